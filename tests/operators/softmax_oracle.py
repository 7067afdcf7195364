"""Softmax and its documented gradients in NumPy float64."""

import numpy as np


def forward(x, axes, log):
    """With the maximum of each group subtracted; of -inf alone, or with NaN or inf, it is NaN."""
    x = np.asarray(x).astype(np.float64)
    with np.errstate(invalid="ignore", divide="ignore"):
        shifted = x - x.max(axes, keepdims=True)
        total = np.exp(shifted).sum(axes, keepdims=True)
        return shifted - np.log(total) if log else np.exp(shifted) / total


def backward(y, dy, axes, log):
    """The documented formulas, of y as it is given."""
    y, dy = (np.asarray(array).astype(np.float64) for array in (y, dy))
    if log:
        return dy - np.exp(y) * dy.sum(axes, keepdims=True)
    return y * (dy - (dy * y).sum(axes, keepdims=True))
