"""Local response normalization and divisive normalization with their gradients, element by element in float64.

Written from the documents' formulas; images have their channels first. Gradients are those of `sum(dy * y)`, added up
window by window: nothing here knows which windows hold an element.
"""

import itertools

import numpy as np


def window(centre, n, extent):
    """The positions of a window of n around a centre, clipped: an even one looks one further ahead."""
    before = (n - 1) // 2
    return [j for j in range(centre - before, centre - before + n) if 0 <= j < extent]


def across_channels(x, dy, *, n, alpha, beta, k):
    """y and dx."""
    x, dy = np.asarray(x).astype(np.float64), np.asarray(dy).astype(np.float64)
    y, dx = np.zeros(x.shape), np.zeros(x.shape)
    for c in range(x.shape[1]):
        inside = window(c, n, x.shape[1])
        s = k + alpha / n * (x[:, inside] ** 2).sum(1)
        y[:, c] = x[:, c] * s**-beta
        dx[:, c] += dy[:, c] * s**-beta
        for j in inside:
            dx[:, j] -= dy[:, c] * x[:, c] * beta * s ** (-beta - 1) * alpha / n * 2 * x[:, j]
    return y, dx


def within_channels(x, means, dy, *, n, alpha, beta, k):
    """y, dx and dmeans; means may be None."""
    x, dy = np.asarray(x).astype(np.float64), np.asarray(dy).astype(np.float64)
    means = np.zeros(x.shape) if means is None else np.asarray(means).astype(np.float64)
    y, dx, dmeans = np.zeros(x.shape), np.zeros(x.shape), np.zeros(x.shape)
    extents = x.shape[2:]
    share = alpha / n ** len(extents)
    for centre in np.ndindex(extents):
        here = (slice(None), slice(None), *centre)
        along_each = (window(i, n, extent) for i, extent in zip(centre, extents, strict=True))
        inside = [(slice(None), slice(None), *j) for j in itertools.product(*along_each)]
        deviations = [x[j] - means[here] for j in inside]
        s = k + share * sum(d**2 for d in deviations)
        y[here] = x[here] * s**-beta
        dx[here] += dy[here] * s**-beta
        ds = dy[here] * x[here] * -beta * s ** (-beta - 1)
        for j, deviation in zip(inside, deviations, strict=True):
            dx[j] += ds * share * 2 * deviation
            dmeans[here] -= ds * share * 2 * deviation
    return y, dx, dmeans
