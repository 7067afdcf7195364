"""How far the weight's gradient is off, in float32 and in bfloat16, against the number of chunks that are added up.

python benchmarks/weight_grad_dtype.py --output benchmarks/results/weight_grad_dtype_cpu.json
"""

import functools
from typing import Any

import harness
import jax
import jax.numpy as jnp
import numpy as np

from jaxops.linear_cross_entropy import linear_cross_entropy

ROWS, HIDDEN, CLASSES = 4096, 256, 8192
QUICK = (256, 64, 512)
CHUNKS = (1, 2, 4, 8, 16, 32)


def case(rows: int, hidden: int, classes: int) -> dict[str, Any]:
    """Norms of errors, relative to the gradient's and in units of 2^-9, the most by which bfloat16 rounds a number."""
    rng = np.random.default_rng(0)
    x, weight = (
        jnp.asarray(rng.standard_normal(shape, np.float32), jnp.bfloat16)
        for shape in ((rows, hidden), (classes, hidden))
    )
    weight = weight / hidden**0.5
    labels = rng.integers(0, classes, rows)
    truth = gradient_in_float64(np.asarray(x, np.float64), np.asarray(weight, np.float64), labels)
    candidates = {}
    for chunks in CHUNKS:
        errors = {}
        for dtype in (jnp.float32, jnp.bfloat16):
            loss = functools.partial(linear_cross_entropy, strategy="grad_in_forward", weight_grad_dtype=dtype)
            gradient = jax.jit(jax.grad(functools.partial(loss, chunk_rows=rows // chunks), 1))(x, weight, labels)
            error = np.linalg.norm(np.asarray(gradient, np.float64) - truth) / np.linalg.norm(truth)
            errors[f"error_{jnp.dtype(dtype)}"] = round(float(error) * 2**9, 3)
        candidates[f"{chunks} chunks"] = errors
    return {"name": f"x bfloat16[{rows}, {hidden}], weight [{classes}, {hidden}], mean", "candidates": candidates}


def gradient_in_float64(x: np.ndarray, weight: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """The gradient of the mean loss by NumPy."""
    logits = x @ weight.T
    exp = np.exp(logits - logits.max(axis=-1, keepdims=True))
    cotangent = exp / exp.sum(axis=-1, keepdims=True)
    cotangent[np.arange(len(x)), labels] -= 1
    return cotangent.T @ x / len(x)


def main() -> None:
    options = harness.arguments(__doc__.splitlines()[0])
    size = QUICK if options.quick else (ROWS, HIDDEN, CLASSES)
    harness.report("weight_grad_dtype", [case(*size)], options.output)


if __name__ == "__main__":
    main()
