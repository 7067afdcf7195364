"""Pooling of images with the channels first, window by window in NumPy float64."""

import numpy as np

AXES = {"NCHW": (0, 1, 2, 3), "NHWC": (0, 2, 3, 1), "NCDHW": (0, 1, 2, 3, 4), "NDHWC": (0, 2, 3, 4, 1)}


# extents, window, stride, padding
GEOMETRIES = {
    "3-by-2-padded": ((7, 9), (3, 3), (2, 2), (1, 1)),
    "2-by-2": ((4, 6), (2, 2), (2, 2), (0, 0)),
    "overlapping": ((5, 6), (3, 2), (1, 1), (2, 1)),
    "with-gaps": ((8, 5), (2, 1), (3, 2), (1, 0)),
    "rest-unread": ((8, 7), (3, 3), (3, 3), (0, 0)),
    "whole": ((5, 3), (5, 3), (1, 1), (0, 0)),
    "one-with-rest": ((5, 6), (2, 1), (7, 9), (1, 0)),
    "rows-only": ((5, 4), (3, 1), (2, 1), (1, 0)),
    "long-window": ((40, 3), (18, 2), (3, 1), (4, 1)),
    "long-stride": ((60, 2), (2, 1), (21, 1), (1, 0)),
    "before-only": ((7, 6), (3, 2), (2, 2), ((2, 0), (1, 0))),
    "behind-only": ((7, 6), (3, 3), (2, 1), ((0, 2), 1)),
    "volume-sides": ((2, 5, 4), (2, 3, 2), (1, 2, 2), ((0, 1), (2, 1), 0)),
    "volume": ((3, 5, 4), (2, 3, 2), (1, 2, 2), (1, 1, 0)),
    "volume-of-depth-1": ((1, 4, 4), (3, 2, 2), (1, 2, 2), (1, 0, 0)),
    "volume-flat-window": ((2, 4, 5), (1, 2, 2), (1, 2, 2), (0, 0, 0)),
}


def sides(padding):
    """Pairs, of what may be a number for both sides."""
    return [(pad, pad) if isinstance(pad, int) else pad for pad in padding]


def window_slices(extents, window, stride, padding):
    """For each output position, the part of the image that its window covers."""
    triples = list(zip(extents, window, stride, sides(padding), strict=True))
    for output in np.ndindex(outputs_of((extents, window, stride, padding))):
        starts = [o * s - p[0] for o, (_, _, s, p) in zip(output, triples, strict=True)]
        inside = (slice(max(a, 0), min(a + k, n)) for a, (n, k, _, _) in zip(starts, triples, strict=True))
        yield output, tuple(inside)


def expected(kind, x, cotangent, geometry):
    """Values and gradient of images with the channels first, window by window in float64."""
    window = geometry[1]
    x, grad = np.asarray(x).astype(np.float64), np.zeros(x.shape)
    y = np.zeros(cotangent.shape)
    for output, inside in window_slices(*geometry):
        for image in np.ndindex(x.shape[:2]):
            part, dy = x[image][inside], np.float64(cotangent[image][output])
            if kind == "max":
                first = np.unravel_index(np.argmax(part), part.shape)  # NumPy's takes NaN for greatest, and the first
                y[image][output] = part[first]
                grad[image][inside][first] += dy
            else:
                count = part.size if kind == "mean-inside" else np.prod(window)
                y[image][output] = part.sum() / count
                grad[image][inside] += dy / count
    return y, grad


def outputs_of(geometry):
    *numbers, padding = geometry
    return tuple(1 + (n + sum(p) - k) // s for n, k, s, p in zip(*numbers, sides(padding), strict=True))


def make_case(rng, geometry, dtype="float32", images=(2, 3)):
    """Images with many ties, and cotangents of their windows."""
    x = rng.integers(-4, 4, (*images, *geometry[0])) / 4
    return x.astype(dtype), rng.normal(size=(*images, *outputs_of(geometry))).astype(dtype)
