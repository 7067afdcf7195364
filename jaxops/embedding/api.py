"""The public function: rows of a table by id."""

import jax
import jax.numpy as jnp

from jaxops._checks.attributes import require_bool
from jaxops._checks.ids import ids_of_part, wide_ids
from jaxops._checks.operands import as_arrays
from jaxops._primitive import sharding
from jaxops.embedding.operator import EMBEDDING, check_lookup


def embedding(
    table: jax.Array,
    indices: jax.Array,
    *,
    padding_idx: int | None = None,
    scale_grad_by_freq: bool = False,
    vocab_axis: str | None = None,
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
      vocab_axis: inside `shard_map`, the mesh axis over which the rows of the table are split: `table` is this device's
        part of V / n rows, while `indices` (the same along this axis) and `padding_idx` stay those of the whole table.
        Devices exchange the rows that were looked up, and nothing for the gradient, of which each owner has its own
        rows. A table that is split by columns needs nothing of the kind, and under `jit` neither needs it: the
        compiler does the same.

    Returns:
      (..., D), with the dtype of `table`.

    Raises:
      BadParamError: if `table` is not (V, D) and floating point, `indices` is not of integers, V is 0 while there are
        indices, or `padding_idx` is out of range.

    Numerics: gradients are summed, and scaled, in float32 (float64 for float64 tables) and rounded once. Every run adds
      in the same order, except on GPUs where the compiler splits the batch over devices. Cotangents of positions that
      hold padding_idx are skipped, so NaN in them goes nowhere. Forward mode is the transpose of this gradient:
      tangents of padding rows are zero and the others are scaled. All orders and mixtures of derivatives exist.

    Source: PyTorch `torch.nn.functional.embedding`; the gradient is CANN `aclnnEmbeddingDenseBackward`.
    """
    table, indices = as_arrays("embedding", {"table": table, "indices": indices})
    require_bool("embedding", "scale_grad_by_freq", scale_grad_by_freq)
    attributes = {"padding_idx": padding_idx, "counted_rank": indices.ndim if scale_grad_by_freq else None}
    if vocab_axis is not None:
        return _of_split_table(table, indices, vocab_axis, **attributes)
    check_lookup(table, indices, **attributes)
    return EMBEDDING(table, indices, **attributes)[0]


def _of_split_table(
    table: jax.Array, indices: jax.Array, vocab_axis: str, *, padding_idx: int | None, counted_rank: int | None
) -> jax.Array:
    """Every device contributes the rows that it has, and zeros for all others."""
    parts = sharding.axis_size("embedding", "vocab_axis", vocab_axis)
    whole = jax.ShapeDtypeStruct((table.shape[0] * parts, *table.shape[1:]), table.dtype)
    check_lookup(whole, indices, padding_idx=padding_idx, counted_rank=counted_rank)
    ids = wide_ids(indices)
    ids_here, is_here = ids_of_part(indices, table.shape[0], vocab_axis)
    (rows,) = EMBEDDING(table, ids_here, padding_idx=None, counted_rank=counted_rank)
    if padding_idx is not None:
        is_padding = ids == int(padding_idx) % whole.shape[0]
        rows = jnp.where(is_padding[..., None], jax.lax.stop_gradient(rows), rows)
    found = jax.lax.psum(jnp.where(is_here[..., None], rows, jnp.zeros((), rows.dtype)), vocab_axis)
    is_row = (ids >= 0) & (ids < whole.shape[0])
    return jnp.where(is_row[..., None], found, jnp.array(jnp.nan, found.dtype))
