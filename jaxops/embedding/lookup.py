"""The public function: rows of a table by id."""

import jax
import jax.numpy as jnp

from jaxops._errors import require_bool, require_present
from jaxops.embedding.operator import EMBEDDING, check_lookup


def embedding(
    table: jax.Array, indices: jax.Array, *, padding_idx: int | None = None, scale_grad_by_freq: bool = False
) -> jax.Array:
    """Looks up rows of a table: `out[..., :] = table[indices[...], :]`.

    The gradient sums the cotangents of all positions that hold an id into the id's row:

        grad_table[w] = sum of grad_out[r] over {r : indices[r] = w},  0 for w = padding_idx

    times 1 / n[w] with scale_grad_by_freq, where n[w] counts how often this call's `indices` hold w. Inside `vmap`
    every mapped call counts its own.

    Args:
      table: (V, D), floating point.
      indices: (...), integers in [0, V). Negative ids do not count from the end: any id outside of the range, which
        cannot be refused because its value is not known under jit, gives a row of NaN and has no gradient.
      padding_idx: the id whose row gets no gradient, in [-V, V); negative ones count from the end, so -1 is the last
        row. It leaves the looked-up values alone. None means no such id.
      scale_grad_by_freq: divides each row of the gradient by the frequency of its id.

    Returns:
      (..., D), with the dtype of `table`.

    Raises:
      BadParamError: if `table` is not (V, D) and floating point, `indices` is not of integers, V is 0 while there are
        indices, or `padding_idx` is out of range.

    Numerics: gradients are summed, and scaled, in float32 (float64 for float64 tables) and rounded once. Cotangents of
      positions that hold padding_idx are skipped, so NaN in them goes nowhere. Forward mode is the transpose of this
      gradient: tangents of padding rows are zero and the others are scaled. All orders and mixtures of derivatives
      exist.

    Source: PyTorch `torch.nn.functional.embedding`; the gradient is CANN `aclnnEmbeddingDenseBackward`.
    """
    require_present("embedding", table=table, indices=indices)
    require_bool("embedding", "scale_grad_by_freq", scale_grad_by_freq)
    table, indices = jnp.asarray(table), jnp.asarray(indices)
    attributes = {"padding_idx": padding_idx, "counted_rank": indices.ndim if scale_grad_by_freq else None}
    check_lookup(table, indices, **attributes)
    return EMBEDDING(table, indices, **attributes)[0]
