"""The documented gradient of an embedding's table in NumPy float64."""

import numpy as np


def expected_gradient(cotangent, indices, rows, padding_idx=None, scale_grad_by_freq=False):
    """The documented gradient, row by row in float64."""
    cotangent = np.asarray(cotangent).astype(np.float64).reshape(-1, cotangent.shape[-1])
    ids = np.asarray(indices).ravel()
    gradient = np.zeros((rows, cotangent.shape[-1]))
    for row in range(rows):
        hits = ids == row
        if hits.any() and (padding_idx is None or row != padding_idx % rows):
            gradient[row] = cotangent[hits].sum(axis=0) / (hits.sum() if scale_grad_by_freq else 1)
    return gradient
