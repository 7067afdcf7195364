"""Embedding: rows of a table by id, and the dense gradient of that table."""

import math
from collections.abc import Sequence
from numbers import Integral
from typing import Any

import jax
import jax.numpy as jnp

from jaxops._derivative import Active, Arrays, Derivative
from jaxops._errors import require, require_bool, require_present
from jaxops._ids import wide_ids
from jaxops._operator import Operator


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
    _check(table, indices, **attributes)
    return EMBEDDING(table, indices, **attributes)[0]


def _check(table: Any, indices: Any, *, padding_idx: int | None, counted_rank: int | None) -> None:
    require(table.ndim == 2, "embedding", "table", "have shape (V, D)", table)
    require(jnp.issubdtype(table.dtype, jnp.floating), "embedding", "table", "be floating point", table)
    _check_indices("embedding", indices)
    rows = table.shape[0]
    require(rows > 0 or indices.size == 0, "embedding", "table", "have at least one row", table)
    if padding_idx is not None:
        require(isinstance(padding_idx, Integral), "embedding", "padding_idx", "be an integer or None", padding_idx)
        require(-rows <= padding_idx < rows, "embedding", "padding_idx", f"be in [{-rows}, {rows})", padding_idx)


def _check_dense_backward(
    grad: Any, indices: Any, *, num_weights: int, padding_idx: int | None, scale_grad_by_freq: bool
) -> None:
    name = "embedding_dense_backward"
    require(jnp.issubdtype(grad.dtype, jnp.floating), name, "grad", "be floating point", grad)
    _check_indices(name, indices)
    require(
        grad.shape[:-1] == indices.shape and grad.ndim > 0, name, "grad", f"have shape {(*indices.shape, 'D')}", grad
    )
    require(
        isinstance(num_weights, Integral) and num_weights >= 0,
        name,
        "num_weights",
        "be a non-negative integer",
        num_weights,
    )
    require(
        num_weights > 0 or indices.size == 0, name, "num_weights", "be positive where there are indices", num_weights
    )


def _check_indices(name: str, indices: Any) -> None:
    require(jnp.issubdtype(indices.dtype, jnp.integer), name, "indices", "be integers", indices)


def _lookup(table: jax.Array, indices: jax.Array, **_: Any) -> Arrays:
    # Ids that are out of range are replaced here: as int64 they would be cut to 32 bits before they are looked up.
    ids = jnp.where(_live(indices, table.shape[0], None), wide_ids(indices), -1)
    return (table.at[ids].get(mode="fill", fill_value=jnp.nan, wrap_negative_indices=False),)


def _dense_backward(
    grad: jax.Array, indices: jax.Array, *, num_weights: int, padding_idx: int | None, scale_grad_by_freq: bool
) -> Arrays:
    ids, live = wide_ids(indices), _live(indices, num_weights, padding_idx)
    destinations = jnp.where(live, ids, num_weights)  # one past the end, where "drop" drops
    sums = jnp.zeros((num_weights, grad.shape[-1]), _accumulator(grad))
    sums = sums.at[destinations].add(grad.astype(sums.dtype), mode="drop")
    if scale_grad_by_freq:
        counts = jnp.zeros(num_weights, jnp.int32).at[destinations].add(1, mode="drop")
        sums = sums * _reciprocal(counts, sums.dtype)[:, None]
    return (sums.astype(grad.dtype),)


def _frequency(indices: jax.Array, *, num_weights: int, counted_rank: int) -> Arrays:
    """At each position, how often the last `counted_rank` axes of `indices` hold the id that is there."""
    calls = indices.shape[: indices.ndim - counted_rank]
    ids = wide_ids(indices).reshape(*calls, math.prod(indices.shape[len(calls) :]))
    ids = jnp.where(_live(ids, num_weights, None), ids, num_weights)

    def count(ids: jax.Array) -> jax.Array:
        counts = jnp.zeros(num_weights, jnp.int32).at[ids].add(1, mode="drop")
        return counts.at[ids].get(mode="fill", fill_value=0)

    for _ in calls:
        count = jax.vmap(count)
    return (count(ids).reshape(indices.shape),)


def _live(indices: jax.Array, num_weights: int, padding_idx: int | None) -> jax.Array:
    ids = wide_ids(indices)
    live = (ids >= 0) & (ids < num_weights)
    return live if padding_idx is None else live & (ids != padding_idx)


def _reciprocal(counts: jax.Array, dtype: Any) -> jax.Array:
    return 1 / jnp.maximum(counts, 1).astype(dtype)


def _accumulator(x: jax.Array) -> Any:
    return jnp.float64 if x.dtype == jnp.float64 else jnp.float32


def _linearize(operands: Sequence[jax.Array], active: Active, **params: Any) -> tuple[Arrays, Arrays]:
    table, indices = operands
    return EMBEDDING(table, indices, **params), (table, indices)


def _tangent(
    residuals: Arrays, tangents: Arrays, active: Active, *, padding_idx: int | None, counted_rank: int | None
) -> Arrays:
    table, indices = residuals
    rows, padding_idx = table.shape[0], _row(padding_idx, table)
    (out,) = EMBEDDING(tangents[0], indices, padding_idx=None, counted_rank=None)
    if counted_rank is not None:
        out = _scaled_by_frequency(out, indices, rows, counted_rank).astype(out.dtype)
    live = _live(indices, rows, padding_idx)
    return (jnp.where(live[..., None], out, jnp.zeros((), out.dtype)),)


def _vjp(
    residuals: Arrays, cotangents: Arrays, active: Active, *, padding_idx: int | None, counted_rank: int | None
) -> Arrays:
    table, indices = residuals
    (grad,) = cotangents
    scale = counted_rank is not None
    if counted_rank is not None and indices.ndim > counted_rank:
        # vmap has put several calls into one, and each has its own frequencies: scale before they are summed together.
        grad, scale = _scaled_by_frequency(grad, indices, table.shape[0], counted_rank), False
    attributes = {"num_weights": table.shape[0], "padding_idx": _row(padding_idx, table), "scale_grad_by_freq": scale}
    (grad_table,) = EMBEDDING_DENSE_BACKWARD(grad, indices, **attributes)
    return (grad_table.astype(table.dtype),)


def _scaled_by_frequency(rows: jax.Array, indices: jax.Array, num_weights: int, counted_rank: int) -> jax.Array:
    """Rows divided by the frequency of their id within its call, not yet rounded."""
    (counts,) = EMBEDDING_FREQUENCY(indices, num_weights=num_weights, counted_rank=counted_rank)
    dtype = _accumulator(rows)
    return rows.astype(dtype) * _reciprocal(counts, dtype)[..., None]


def _row(padding_idx: int | None, table: jax.Array) -> int | None:
    return None if padding_idx is None else int(padding_idx) % table.shape[0]


EMBEDDING = Operator(
    "embedding",
    "v d, ... -> ... d",
    _check,
    _lookup,
    Derivative(_vjp, _tangent, _linearize, residuals="v d, ..."),
)
EMBEDDING_DENSE_BACKWARD = Operator(
    "embedding_dense_backward", "... d, ... -> v d", _check_dense_backward, _dense_backward
)
EMBEDDING_FREQUENCY = Operator("embedding_frequency", "... -> ...", lambda indices, **_: None, _frequency)
