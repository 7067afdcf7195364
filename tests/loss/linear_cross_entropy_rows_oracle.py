"""Statistics of the logits' rows, and the gradients that the cotangent of the logits leads to, in NumPy float64."""

import jax.numpy as jnp
import numpy as np

from jaxops.linear_cross_entropy.operands import Columns, Rows, RowStatistics

F32 = "float32"
# Two blocks of rows, three of classes and of features, and none of them full at the end: what lies beyond is NaN.
ROWS, HIDDEN, CLASSES = 13, 20, 21


def make_operands(rng, *, dtype=F32, rows=ROWS, classes=CLASSES, bias=False, target=False, scale=1.0, **_):
    x, weight = (jnp.asarray(rng.normal(size=(size, HIDDEN)), dtype) for size in (rows, classes))
    vectors = [jnp.asarray(rng.normal(size=classes), F32) if given else None for given in (bias, target)]
    labels = jnp.asarray(rng.integers(-1, classes + 1, size=rows), jnp.int32)
    return Rows(scale * x, labels), Columns(weight, *vectors)


def wide(array):
    return np.asarray(array).astype(np.float64)


def make_logits(rows, columns, softcap=None, dtype=np.float64):
    """The logits, computed in `dtype`."""
    x, weight = (np.asarray(each).astype(dtype) for each in (rows.x, columns.weight))
    logits = x @ weight.T
    logits = logits if columns.bias is None else logits + np.asarray(columns.bias).astype(dtype)
    logits = logits if softcap is None else softcap * np.tanh(logits / dtype(softcap))
    logits = logits.astype(dtype).astype(np.float64)
    return logits if rows.scale is None else logits * wide(rows.scale)[:, None]


def is_label(rows, columns):
    return np.asarray(rows.labels)[:, None] == np.arange(len(columns.weight))


def expected_statistics(rows, columns, *, softcap=None, metrics=False, dtype=np.float64):
    """What `RowStatistics` says of each row; the logits are computed in `dtype`."""
    logits = make_logits(rows, columns, softcap, dtype)
    maximum = logits.max(-1)
    shifted = logits - maximum[:, None]
    total = np.exp(shifted).sum(-1)
    return RowStatistics(
        maximum,
        np.log(total),
        np.where(is_label(rows, columns), shifted, 0).sum(-1),
        None if columns.class_targets is None else (np.log(total)[:, None] - shifted) @ wide(columns.class_targets),
        (np.exp(shifted) * shifted).sum(-1) / total if metrics else None,
        logits.argmax(-1) if metrics else None,
    )


def expected_gradients(terms, rows, columns, *, softcap=None, dtype=np.float64, product_dtype=np.float64):
    """The gradients of x, weight, bias and targets that the cotangent of the logits, as documented, leads to.

    The logits are computed in `dtype`, and the cotangent is rounded to `product_dtype`.
    """

    def by_row(values):
        return 0.0 if values is None else wide(values)[:, None]

    logits = make_logits(rows, columns, softcap, dtype)
    shifted = logits - by_row(terms.maximum)
    cotangent = (by_row(terms.softmax) + by_row(terms.slope) * shifted) * np.exp(shifted - by_row(terms.log_sum_exp))
    cotangent = cotangent + by_row(terms.label) * is_label(rows, columns)
    if columns.class_targets is not None:
        cotangent = cotangent + by_row(terms.target) * wide(columns.class_targets)
    if softcap is not None:
        cotangent = cotangent * (1 - (logits / softcap) ** 2)
    cotangent = wide(cotangent.astype(product_dtype))
    of_targets = np.sum(by_row(terms.target) * (shifted - by_row(terms.log_sum_exp)), axis=0)
    return cotangent @ wide(columns.weight), cotangent.T @ wide(rows.x), cotangent.sum(0), of_targets
