"""`aclnnEmbeddingDenseBackward` under its own name."""

import math

import jax
import jax.numpy as jnp

from jaxops._checks.arguments import as_arrays, require, require_bool, require_integer
from jaxops.embedding import EMBEDDING_DENSE_BACKWARD

NAME = "embedding_dense_backward"
GRAD_DTYPES = ("float32", "float16", "bfloat16")
INDEX_DTYPES = ("int64", "int32", "int16", "int8", "uint8", "bool", "float32", "float16", "float64")
MAX_RANK = 8


def embedding_dense_backward(
    grad: jax.Array, indices: jax.Array, *, num_weights: int, padding_idx: int = -1, scale_grad_by_freq: bool = False
) -> jax.Array:
    """Computes the gradient of an embedding table: `out[w] = sum of grad[r] over {r : indices[r] = w}`.

    An empty sum is 0. With scale_grad_by_freq, `out[w]` is divided by the number of rows in its sum.

    Args:
      grad: (..., D) of rank 2 to 8; float32, float16 or bfloat16.
      indices: one index for each row of `grad`, in any shape of rank 1 to 8 (any number of them if D is 0); int64,
        int32, int16, int8, uint8, bool, float32, float16 or float64. Floats are expected to be whole numbers. Rows
        whose index is outside [0, num_weights) are dropped.
      num_weights: the number of rows of the result.
      padding_idx: rows with this index are skipped, even if they hold NaN or infinity. A value outside [0, num_weights)
        has no effect; here -1 does not mean the last row.
      scale_grad_by_freq: whether to divide by the frequency.

    Returns:
      (num_weights, D), with the dtype of `grad`.

    Raises:
      BadParamError: with status 161001 if `grad` or `indices` is None; with 161002 if a dtype, rank or shape differs
        from the above, num_weights is negative, or num_weights is 0 although there are rows.

    Numerics:
      Summed and scaled in float32, and rounded once. Differentiable in `grad`.

    Example:
      >>> grad = jnp.array([[1.0], [2.0], [4.0]])
      >>> jaxops.aclnn.embedding_dense_backward(
      ...     grad, jnp.array([1, 0, 1]), num_weights=3
      ... ).tolist()
      [[2.0], [5.0], [0.0]]

    Source: CANN `aclnnEmbeddingDenseBackward`. Its limits that belong to chips are not enforced: on the Atlas training
      series, the width with scale_grad_by_freq, D < (180192 - 4 * counts) / 36 for int32 and (180192 - 8 * counts) / 20
      for int64 indices, where counts is the number of weights per core; on A2 and A3, at most 2**31 - 1 rows or
      weights.
    """
    grad, indices = as_arrays(NAME, {"grad": grad, "indices": indices})
    require(grad.dtype.name in GRAD_DTYPES, NAME, "grad", f"be one of {', '.join(GRAD_DTYPES)}", grad)
    require(indices.dtype.name in INDEX_DTYPES, NAME, "indices", f"be one of {', '.join(INDEX_DTYPES)}", indices)
    num_weights = require_integer(NAME, "num_weights", num_weights, "be a non-negative integer", least=0)
    padding_idx = require_integer(NAME, "padding_idx", padding_idx)
    scale_grad_by_freq = require_bool(NAME, "scale_grad_by_freq", scale_grad_by_freq, or_int=True)
    require(2 <= grad.ndim <= MAX_RANK, NAME, "grad", f"have rank 2 to {MAX_RANK}", grad)
    require(1 <= indices.ndim <= MAX_RANK, NAME, "indices", f"have rank 1 to {MAX_RANK}", indices)
    width = grad.shape[-1]
    if width == 0:
        return jnp.zeros((num_weights, 0), grad.dtype)
    rows = math.prod(grad.shape[:-1])
    require(indices.size == rows, NAME, "indices", f"have {rows} elements, one for each row of grad", indices)
    (out,) = EMBEDDING_DENSE_BACKWARD(
        grad,
        _integral(indices).reshape(grad.shape[:-1]),
        num_weights=num_weights,
        padding_idx=padding_idx if 0 <= padding_idx < num_weights else None,
        scale_grad_by_freq=scale_grad_by_freq,
    )
    return out


def _integral(indices: jax.Array) -> jax.Array:
    """Returns indices as integers: int64 from float64, int32 from every other dtype that is not an integer."""
    if jnp.issubdtype(indices.dtype, jnp.integer):
        return indices
    if jnp.issubdtype(indices.dtype, jnp.floating):
        indices = jnp.where(jnp.isfinite(indices), indices, -1)  # which no row has
    return indices.astype(jnp.int64 if indices.dtype == jnp.float64 else jnp.int32)
