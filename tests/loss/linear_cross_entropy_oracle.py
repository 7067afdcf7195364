"""The truth about linear cross entropy in NumPy float64, and cases to hold it against."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxops.linear_cross_entropy import linear_cross_entropy

IGNORED = -100
STRATEGIES = ("grad_in_forward", "recompute")


def expected(
    x,
    weight,
    labels,
    *,
    bias=None,
    class_weight=None,
    row_weight=None,
    ignore_index=IGNORED,
    label_smoothing=0.0,
    z_loss=0.0,
    softcap=None,
    reduction="mean",
):
    """PyTorch's formulas in float64: the loss, and the gradients in x, weight and bias of its sum."""
    x, weight = (np.asarray(v).astype(np.float64) for v in (x, weight))
    classes = weight.shape[0]
    bias, class_weight = (
        default if v is None else np.asarray(v).astype(np.float64)
        for v, default in ((bias, np.zeros(classes)), (class_weight, np.ones(classes)))
    )
    labels = np.asarray(labels)
    if np.issubdtype(labels.dtype, np.integer):
        kept = labels != ignore_index
        q = np.where(kept[..., None], np.arange(classes) == labels[..., None], 0)
        divisor = np.sum(q * class_weight, -1)
        smooth = np.where(kept, label_smoothing / classes, 0)[..., None]
    else:
        kept, q, smooth = np.ones(x.shape[:-1], bool), labels.astype(np.float64), label_smoothing / classes
        divisor = np.ones(kept.shape)
    row_weight = np.where(kept, 1 if row_weight is None else np.asarray(row_weight).astype(np.float64), 0)
    divisor = np.sum(row_weight * divisor)
    q = ((1 - label_smoothing) * q + smooth) * class_weight
    x = np.where(kept[..., None], x, 0)
    z = x @ weight.T + bias
    slope = np.ones_like(z)
    if softcap is not None:
        slope = 1 - np.tanh(z / softcap) ** 2
        z = softcap * np.tanh(z / softcap)
    maximum = z.max(-1, keepdims=True)
    lse = np.log(np.exp(z - maximum).sum(-1, keepdims=True)) + maximum
    losses = (q * (lse - z)).sum(-1) + kept * z_loss * lse[..., 0] ** 2
    dz = (q.sum(-1, keepdims=True) + 2 * z_loss * kept[..., None] * lse) * np.exp(z - lse) - q
    losses, dz = row_weight * losses, row_weight[..., None] * dz * slope
    loss = losses if reduction == "none" else losses.sum()
    if reduction == "mean":
        with np.errstate(invalid="ignore"):
            loss, dz = loss / divisor, dz / divisor
    rows = tuple(range(x.ndim - 1))
    return loss, dz @ weight, np.tensordot(dz, x, (rows, rows)), dz.sum(rows)


def value_and_gradients(x, weight, labels, *, bias=None, **attributes):
    def total(x, weight, bias):
        loss = linear_cross_entropy(x, weight, labels, bias=bias, **attributes)
        return jnp.sum(loss), loss

    argnums = (0, 1) if bias is None else (0, 1, 2)
    (_, loss), grads = jax.jit(jax.value_and_grad(total, argnums, has_aux=True))(x, weight, bias)
    return loss, *grads


def make_case(rng, rows=(13,), hidden=6, classes=7, dtype="float32", scale=1.0, ignored=0.3):
    x = scale * rng.normal(size=(*rows, hidden))
    weight = rng.normal(size=(classes, hidden))
    labels = rng.integers(0, classes, size=rows).astype(np.int32)
    labels = np.where(rng.uniform(size=rows) < ignored, IGNORED, labels).astype(np.int32)
    return jnp.asarray(x, dtype), jnp.asarray(weight, dtype), labels


def assert_equals_float64(actual, operands, attributes, rtol=2e-5):
    truth = expected(*operands, **{k: v for k, v in attributes.items() if k not in ("strategy", "chunk_rows")})
    for result, true in zip(actual, truth, strict=False):
        scale = max(1e-3, float(np.max(np.abs(true), initial=0)))
        np.testing.assert_allclose(np.asarray(result).astype(np.float64), true, rtol=rtol, atol=rtol * scale)
