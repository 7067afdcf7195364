"""The documented spatial transformer and PyTorch's options of it, in NumPy float64, point by point."""

import itertools

import numpy as np


def affine_grid(theta, extents, align_corners=True):
    rank = len(extents)
    grid = np.zeros((len(theta), *extents, rank))
    for n, *place in np.ndindex(len(theta), *extents):
        grid[n, *place] = np.asarray(theta[n], np.float64) @ base_point(place, extents, align_corners)
    return grid


def affine_grid_gradient(dgrid, align_corners=True):
    extents, rank = dgrid.shape[1:-1], dgrid.shape[-1]
    dtheta = np.zeros((len(dgrid), rank, rank + 1))
    for n, *place in np.ndindex(dgrid.shape[:-1]):
        point = base_point(place, extents, align_corners)
        dtheta[n] += np.outer(np.asarray(dgrid[n, *place], np.float64), point)
    return dtheta


def base_point(place, extents, align_corners):
    """The coordinates x, y and z of a pixel, and 1."""
    if align_corners:
        along = [-1 + 2 * i / (n - 1) if n > 1 else 0.0 for i, n in zip(place, extents, strict=True)]
    else:
        along = [-1 + (2 * i + 1) / n for i, n in zip(place, extents, strict=True)]
    return np.array([*reversed(along), 1.0])


def grid_sample(x, grid, dy, mode="bilinear", padding_mode="zeros", align_corners=True):
    """Values, and the gradients of x and grid."""
    x, grid, dy = (np.asarray(array).astype(np.float64) for array in (x, grid, dy))
    extents, rank = x.shape[2:], grid.shape[-1]
    axes = range(rank)
    y, dx, dgrid = np.zeros(dy.shape), np.zeros(x.shape), np.zeros(grid.shape)
    for n, *place in np.ndindex(grid.shape[:-1]):
        here = (n, slice(None), *place)
        found = [position(grid[n, *place, -1 - axis], extents[axis], padding_mode, align_corners) for axis in axes]
        if None in found:
            continue
        at, slopes = zip(*found, strict=True)
        if mode == "nearest":
            pixel = [round(p) for p in at]  # halfway to the even one
            if all(0 <= pixel[axis] < extents[axis] for axis in axes):
                y[here] = x[n, :, *pixel]
                dx[n, :, *pixel] += dy[here]
            continue
        for steps in itertools.product((0, 1), repeat=rank):
            pixel = [int(np.floor(at[axis])) + steps[axis] for axis in axes]
            if not all(0 <= pixel[axis] < extents[axis] for axis in axes):
                continue
            weights = [1 - abs(at[axis] - pixel[axis]) for axis in axes]
            value = x[n, :, *pixel]
            y[here] += value * np.prod(weights)
            dx[n, :, *pixel] += dy[here] * np.prod(weights)
            for axis in axes:
                others = np.prod([weights[other] for other in axes if other != axis])
                sign = 1 if steps[axis] else -1
                dgrid[n, *place, -1 - axis] += slopes[axis] * sign * others * (dy[here] @ value)
    return y, dx, dgrid


def position(coordinate, extent, padding_mode, align_corners):
    """The position in pixels and its derivative by the coordinate; None if the point counts as nowhere."""
    last, slope = extent - 1, (extent - 1 if align_corners else extent) / 2
    if np.isinf(coordinate) and padding_mode == "border":
        return (last if coordinate > 0 else 0), 0.0
    if not np.isfinite(coordinate):
        return None
    at = (coordinate + 1) / 2 * last if align_corners else ((coordinate + 1) * extent - 1) / 2
    if padding_mode == "zeros":
        return at, slope
    if padding_mode == "reflection":
        least, most = (0, last) if align_corners else (-0.5, last + 0.5)
        if least == most:
            return 0, 0.0
        while not least <= at <= most:
            at, slope = (2 * least if at < least else 2 * most) - at, -slope
    inside = min(max(at, 0), last)
    return inside, slope if 0 < at < last else 0.0
