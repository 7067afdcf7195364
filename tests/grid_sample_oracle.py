"""The documented spatial transformer in NumPy float64, point by point."""

import numpy as np


def affine_grid(theta, extents):
    height, width = extents
    grid = np.zeros((len(theta), height, width, 2))
    for n, h, w in np.ndindex(len(theta), height, width):
        grid[n, h, w] = np.asarray(theta[n], np.float64) @ base_point(h, w, extents)
    return grid


def affine_grid_gradient(dgrid):
    dtheta = np.zeros((len(dgrid), 2, 3))
    for n, h, w in np.ndindex(dgrid.shape[:3]):
        dtheta[n] += np.outer(np.asarray(dgrid[n, h, w], np.float64), base_point(h, w, dgrid.shape[1:3]))
    return dtheta


def base_point(h, w, extents):
    y, x = (-1 + 2 * i / (n - 1) if n > 1 else 0.0 for i, n in zip((h, w), extents, strict=True))
    return np.array([x, y, 1.0])


def grid_sample(x, grid, dy):
    """Values, and the gradients of x and grid."""
    x, grid, dy = (np.asarray(array).astype(np.float64) for array in (x, grid, dy))
    height, width = x.shape[2:]
    y, dx, dgrid = np.zeros(dy.shape), np.zeros(x.shape), np.zeros(grid.shape)
    for n, h, w in np.ndindex(grid.shape[:3]):
        if not np.isfinite(grid[n, h, w]).all():
            continue
        px, py = (grid[n, h, w] + 1) / 2 * (width - 1, height - 1)
        x0, y0 = int(np.floor(px)), int(np.floor(py))
        a, b = px - x0, py - y0
        corners = [((y0 + i, x0 + j), b if i else 1 - b, a if j else 1 - a, i, j) for i in (0, 1) for j in (0, 1)]
        for (row, column), of_row, of_column, i, j in corners:
            if 0 <= row < height and 0 <= column < width:
                value = x[n, :, row, column]
                y[n, :, h, w] += value * of_row * of_column
                dx[n, :, row, column] += dy[n, :, h, w] * of_row * of_column
                product = dy[n, :, h, w] @ value
                dgrid[n, h, w, 0] += (width - 1) / 2 * product * of_row * (1 if j else -1)
                dgrid[n, h, w, 1] += (height - 1) / 2 * product * of_column * (1 if i else -1)
    return y, dx, dgrid
