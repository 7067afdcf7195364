"""The documented negative log-likelihood in NumPy float64, position by position."""

import jax.numpy as jnp
import numpy as np

IGNORED = -100


def expected(log_probs, labels, weight=None, *, axis=-1, ignore_index=IGNORED, reduction="mean"):
    """The documented loss and its gradients in log_probs and weight, position by position in float64.

    The gradients are those of the sum of all losses for "none".
    """
    x = np.moveaxis(np.asarray(log_probs).astype(np.float64), axis, -1)
    w = np.ones(x.shape[-1]) if weight is None else np.asarray(weight).astype(np.float64)
    losses, total_weight = np.zeros(labels.shape), 0.0
    grad_x, grad_w, counts = np.zeros(x.shape), np.zeros(w.shape), np.zeros(w.shape)
    for at in np.ndindex(labels.shape):
        label = int(labels[at])
        if label != ignore_index:
            losses[at] = -w[label] * x[(*at, label)]
            total_weight += w[label]
            grad_x[(*at, label)] = -w[label]
            grad_w[label] -= x[(*at, label)]
            counts[label] += 1
    value = losses if reduction == "none" else losses.sum()
    if reduction == "mean":
        with np.errstate(invalid="ignore", divide="ignore"):
            value = value / total_weight
            grad_x = grad_x / total_weight
            grad_w = (grad_w - value * counts) / total_weight
    return value, np.moveaxis(grad_x, -1, axis), grad_w


def make_case(rng, shape=(3, 4), classes=5, dtype="float32", axis=-1):
    log_probs = np.moveaxis(-rng.uniform(0, 9, size=(*shape, classes)), -1, axis)
    labels = rng.integers(0, classes, size=shape).astype(np.int32)
    labels.reshape(-1)[1::3] = IGNORED
    weight = rng.uniform(0.5, 2, size=classes)
    return jnp.asarray(log_probs, dtype), labels, jnp.asarray(weight, dtype)


def assert_rounded_once(actual, truth, dtype):
    assert actual.dtype == dtype
    tolerance = 0.501 * float(jnp.finfo(dtype).eps) + 2e-6
    np.testing.assert_allclose(np.asarray(actual).astype(np.float64), truth, rtol=tolerance, atol=1e-6)
