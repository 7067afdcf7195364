"""The public function `embedding`."""

import jax
import jax.numpy as jnp

from jaxops._checks.arguments import as_arrays, require_bool
from jaxops._checks.dtypes import ids_of_part, wide_ids
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

    The gradient of a row is the sum of the cotangents of all positions that hold its id:

        grad_table[w] = sum of grad_out[r] over {r : indices[r] = w},  0 for w = padding_idx

    With scale_grad_by_freq it is divided by the number of times that this call's `indices` hold w. Under `vmap` every
    mapped call counts on its own.

    Args:
      table: (V, D), floating point.
      indices: (...), integers in [0, V). Negative ids do not count from the end. Any id out of range gives a row of NaN
        and has no gradient. It raises no error because values are unknown under jit.
      padding_idx: the id whose row gets no gradient, in [-V, V). Negative values count from the end, so -1 is the last
        row. Looked-up values are not affected. None means that every row gets a gradient.
      scale_grad_by_freq: divides each row of the gradient by the frequency of its id.
      vocab_axis: inside `shard_map`, the mesh axis over which the rows of the table are split. `table` is then this
        device's V / n rows, while `indices` and `padding_idx` refer to the whole table. `indices` are the same along
        this axis, which nothing checks: ids that in_specs splits over it find wrong rows.
        Devices exchange the looked-up rows, and nothing for the gradient, because each device owns its rows. A table
        that in_specs does not split is refused, unless `check_vma` is off: then nothing tells it from a part, and ids
        beyond the table find rows. A table split by columns does not need this. Neither does a table under `jit`, where
        the compiler does the same.

    Returns:
      (..., D), with the dtype of `table`.

    Raises:
      BadParamError: if `table` is not (V, D) and floating point, `indices` are not integers, V is 0 although there are
        indices, `padding_idx` is out of range, or `vocab_axis` names an axis over which the table is not split.

    Numerics:
      Gradients are summed and scaled in float32 (float64 for float64 tables) and rounded once. Every run adds in the
      same order, except on GPUs where the compiler splits the batch over devices. Cotangents at positions that hold
      padding_idx are skipped, so NaN in them is lost.

      Forward mode is the transpose of this gradient: tangents of padding rows are zero, and the others are scaled. All
      orders and mixtures of derivatives exist.

    Example:
      >>> table = jnp.array([[0.0, 1.0], [10.0, 11.0], [20.0, 21.0]])
      >>> jaxops.embedding(table, jnp.array([2, 0])).tolist()
      [[20.0, 21.0], [0.0, 1.0]]
      >>> jax.grad(lambda table: jaxops.embedding(table, jnp.array([2, 0, 2])).sum())(
      ...     table
      ... ).tolist()
      [[1.0, 1.0], [0.0, 0.0], [2.0, 2.0]]

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
    """Looks up in a split table: every device contributes the rows it owns, and zeros for all others."""
    parts = sharding.axis_size("embedding", "vocab_axis", vocab_axis)
    sharding.require_split("embedding", "table", table, jax.lax.axis_index(vocab_axis))
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
