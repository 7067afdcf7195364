"""The gradient of an embedding table as the looked-up rows, for tables too large for a dense gradient."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxops._checks.arguments import as_arrays, require, require_bool, require_integer
from jaxops._checks.dtypes import ids_of_part, wide_ids
from jaxops._primitive import sharding
from jaxops._primitive.derivative import Arrays
from jaxops._primitive.operator import Operator
from jaxops._primitive.results import exportable
from jaxops.embedding.operator import EMBEDDING, EMBEDDING_DENSE_BACKWARD, check_dense_backward

_NAME = "embedding_row_gradients"
NO_ROW = jnp.iinfo(jnp.int32).max


@exportable
class RowGradients(NamedTuple):
    """The rows of a table's gradient whose ids were looked up. The gradient of all other rows is zero.

    Attributes:
      rows: int32 (K,), the ids in ascending order, without repeats. If fewer than K ids were looked up, the rest are
        2**31 - 1, which is beyond every table.
      values: (K, D), the gradients of these rows; zeros where `rows` is 2**31 - 1.
    """

    rows: jax.Array
    values: jax.Array


def embedding_row_gradients(
    grad: jax.Array,
    indices: jax.Array,
    *,
    num_weights: int,
    padding_idx: int | None = None,
    scale_grad_by_freq: bool = False,
    vocab_axis: str | None = None,
) -> RowGradients:
    """Computes the rows of an embedding table's gradient that a lookup touched: those whose ids are in `indices`.

    Differentiate with respect to the looked-up rows, not the table. Then nothing of the table's size is ever made, not
    even the table's gradient:

        looked_up = jaxops.embedding(table, indices)
        grad = jax.grad(loss)(looked_up)
        touched = jaxops.embedding_row_gradients(grad, indices, num_weights=table.shape[0])

    `table.at[touched.rows].add(-0.1 * touched.values, mode="drop")` is then a step of gradient descent, and
    `ema_adam_rows` takes `touched` in place of a dense gradient. If the batch is split over devices, gather what each
    has found and sum it again:

        rows, values = (jax.lax.all_gather(x, "data", tiled=True) for x in touched)
        touched = jaxops.embedding_row_gradients(values, rows, num_weights=table.shape[0])

    Args:
      grad: (..., D), the cotangent of the looked-up rows; floating point.
      indices: (...), integers in [0, V). Others are dropped.
      num_weights: V, the number of rows of the table, at most 2**31 - 1.
      padding_idx: the id whose row is never touched, in [-V, V). Negative values count from the end. None means that
        every row can be touched.
      scale_grad_by_freq: divides each row by the number of positions that hold its id.
      vocab_axis: inside `shard_map`, the mesh axis over which the rows of the table are split. Each device gets the
        rows that it owns, counted from its first.

    Returns:
      `RowGradients(rows, values)` with K = min(number of indices, V) rows, whatever the indices are: int32 (K,), and
      (K, D) with the dtype of grad. Placed in a table of zeros they equal the dense gradient, bit by bit.

    Raises:
      BadParamError: if a shape, a dtype, `num_weights` or `padding_idx` differs from the above.

    Numerics:
      Summed and scaled in float32 (float64 for float64) and rounded once, in the same order in every run.
      Differentiable in `grad`.

    Example:
      >>> grad = jnp.array([[1.0], [2.0], [4.0]])
      >>> touched = jaxops.embedding_row_gradients(
      ...     grad, jnp.array([7, 3, 7]), num_weights=1000
      ... )
      >>> # Three indices, but only two different rows.
      >>> touched.rows.tolist(), touched.values.tolist()
      ([3, 7, 2147483647], [[2.0], [5.0], [0.0]])
    """
    grad, indices = as_arrays(_NAME, {"grad": grad, "indices": indices})
    require_bool(_NAME, "scale_grad_by_freq", scale_grad_by_freq)
    check_dense_backward(grad, indices, num_weights=num_weights, name=_NAME)
    require(num_weights <= NO_ROW, _NAME, "num_weights", f"be at most {NO_ROW}", num_weights)
    if padding_idx is not None:
        rule = f"be None or in [{-num_weights}, {num_weights})"
        least, most = -num_weights, num_weights - 1
        padding_idx = require_integer(_NAME, "padding_idx", padding_idx, rule, least=least, most=most) % num_weights
    size = int(num_weights)
    if vocab_axis is not None:
        if padding_idx is not None:
            indices = jnp.where(wide_ids(indices) == padding_idx, -1, wide_ids(indices))
        size, rest = divmod(size, sharding.axis_size(_NAME, "vocab_axis", vocab_axis))
        require(rest == 0, _NAME, "num_weights", f"be a multiple of the devices along {vocab_axis}", num_weights)
        (indices, _), padding_idx = ids_of_part(indices, size, vocab_axis), None
    rows, slots = EMBEDDING_ROWS(indices, num_weights=size, padding_idx=padding_idx)
    attributes = {"padding_idx": None, "scale_grad_by_freq": bool(scale_grad_by_freq)}
    (values,) = EMBEDDING_DENSE_BACKWARD(grad, slots, num_weights=rows.size, **attributes)
    return RowGradients(rows, values)


def rows_at(table: jax.Array, rows: jax.Array, dtype: Any) -> jax.Array:
    """Returns the rows of a table in another dtype; zeros where the id is `NO_ROW`."""
    (found,) = EMBEDDING(table, rows, padding_idx=None, counted_rank=None)
    return jnp.where((rows != NO_ROW)[:, None], found.astype(dtype), jnp.zeros((), dtype))


def with_rows(table: jax.Array, rows: jax.Array, values: jax.Array) -> jax.Array:
    """Returns the table with these rows replaced, in place if it is donated. Ids out of range are dropped."""
    out_sharding = None if sharding.explicit_mesh([table]) is None else jax.typeof(table).sharding
    options = {"indices_are_sorted": True, "unique_indices": True, "wrap_negative_indices": False}
    return table.at[rows].set(values.astype(table.dtype), mode="drop", out_sharding=out_sharding, **options)


def _rows(indices: jax.Array, *, num_weights: int, padding_idx: int | None) -> Arrays:
    """Returns the distinct ids among indices, and for each position its id's slot; one past the end if it has none."""
    count, size = math.prod(indices.shape), min(math.prod(indices.shape), num_weights)
    ids = wide_ids(indices).reshape(count)
    live = (ids >= 0) & (ids < num_weights)
    if padding_idx is not None:
        live &= ids != padding_idx
    ids = jnp.where(live, ids, NO_ROW).astype(jnp.int32)
    ids, order = jax.lax.sort((ids, jnp.arange(count, dtype=jnp.int32)), num_keys=1)
    is_first = jnp.concatenate([jnp.ones(min(count, 1), bool), ids[1:] != ids[:-1]])
    ranks = jnp.where(ids == NO_ROW, size, jnp.cumsum(is_first, dtype=jnp.int32) - 1)
    rows = jnp.full(size, NO_ROW, jnp.int32).at[ranks].set(ids, mode="drop", indices_are_sorted=True)
    slots = jnp.zeros(count, jnp.int32).at[order].set(ranks, unique_indices=True)
    return rows, slots.reshape(indices.shape)


def _check_rows(indices: Any, **_: Any) -> None:
    """Does nothing: the public function has checked."""


EMBEDDING_ROWS = Operator("embedding_rows", "... -> k, ...", _check_rows, _rows)
