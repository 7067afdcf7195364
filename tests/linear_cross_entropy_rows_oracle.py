"""Statistics of the logits' rows, and the gradients that the cotangent of the logits leads to, in NumPy float64."""

import jax.numpy as jnp
import numpy as np

from jaxops.linear_cross_entropy.logits import RowStatistics

F32 = "float32"
# Two blocks of rows, three of classes and of features, and none of them full at the end: what lies beyond is NaN.
ROWS, HIDDEN, CLASSES = 13, 20, 21


def make_operands(rng, *, dtype=F32, bias=False, target=False, scale=1.0, **_):
    """x, weight, bias, labels, shared target, row target."""
    x, weight = (jnp.asarray(rng.normal(size=(size, HIDDEN)), dtype) for size in (ROWS, CLASSES))
    vectors = [jnp.asarray(rng.normal(size=CLASSES if given else 0), F32) for given in (bias, target)]
    labels = jnp.asarray(rng.integers(-1, CLASSES + 1, size=ROWS), jnp.int32)
    return scale * x, weight, vectors[0], labels, vectors[1], jnp.zeros((ROWS, 0), F32)


def wide(array):
    return np.asarray(array).astype(np.float64)


def vector_or_zeros(vector):
    return wide(vector) if vector.size else np.zeros(CLASSES)


def make_logits(x, weight, bias, softcap):
    logits = wide(x) @ wide(weight).T + vector_or_zeros(bias)
    return logits if softcap is None else softcap * np.tanh(logits / softcap)


def is_label(labels):
    return np.asarray(labels)[:, None] == np.arange(CLASSES)


def expected_statistics(operands, *, softcap, metrics):
    x, weight, bias, labels, target, _ = operands
    logits = make_logits(x, weight, bias, softcap)
    maximum = logits.max(-1)
    shifted = logits - maximum[:, None]
    total = np.exp(shifted).sum(-1)
    mean = (np.exp(shifted) * shifted).sum(-1) / total
    return RowStatistics(
        maximum,
        np.log(total),
        np.where(is_label(labels), shifted, 0).sum(-1),
        shifted @ vector_or_zeros(target),
        mean if metrics else 0 * mean,
        logits.argmax(-1) if metrics else 0 * logits.argmax(-1),
    )


def expected_gradients(terms, operands, *, softcap, metrics):
    """The gradients of x, weight, bias and target that the cotangent of the logits, as documented, leads to."""
    softmax, slope, for_label, for_target, maximum, log_sum_exp = (wide(row)[:, None] for row in terms)
    x, weight, bias, labels, target, _ = operands
    logits = make_logits(x, weight, bias, softcap)
    shifted = logits - maximum
    scale = softmax + slope * shifted if metrics else softmax
    cotangent = scale * np.exp(shifted - log_sum_exp) + for_label * is_label(labels)
    cotangent = cotangent + for_target * vector_or_zeros(target)
    if softcap is not None:
        cotangent = cotangent * (1 - (logits / softcap) ** 2)
    return cotangent @ wide(weight), cotangent.T @ wide(x), cotangent.sum(0), (for_target * shifted).sum(0)
