"""The operators for lookup, for the dense gradient of the table, and for the frequencies of ids.

Lookup and dense gradient are linear and, apart from padding and scaling, each is the other's transpose. So derivatives
of all orders bind these operators again.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxops._checks.arguments import require, require_integer
from jaxops._checks.dtypes import accumulation_dtype, require_numbered, wide_dtype, wide_ids
from jaxops._primitive.derivative import Active, Arrays, Derivative
from jaxops._primitive.operator import Operator
from jaxops.embedding.sums import by_owner, by_run, reciprocal, scattered, scattered_flat
from lowering.operators import Form, Place, refusal_of_parts
from pallas_kernels.gpu import embedding as gpu
from pallas_kernels.tpu import embedding as tpu


def check_lookup(table: Any, indices: Any, *, padding_idx: int | None, counted_rank: int | None) -> None:
    """Raises BadParamError if the lookup cannot take these operands."""
    require(table.ndim == 2, "embedding", "table", "have shape (V, D)", table)
    require(jnp.issubdtype(table.dtype, jnp.floating), "embedding", "table", "be floating point", table)
    _check_indices("embedding", indices)
    rows = table.shape[0]
    require(rows > 0 or indices.size == 0, "embedding", "table", "have at least one row", table)
    require_numbered("embedding", "table", table, rows, indices)
    if padding_idx is not None:
        require_integer("embedding", "padding_idx", padding_idx, "be an integer or None")
        require(-rows <= padding_idx < rows, "embedding", "padding_idx", f"be in [{-rows}, {rows})", padding_idx)


def check_dense_backward(
    grad: Any, indices: Any, *, num_weights: int, name: str = "embedding_dense_backward", **_: Any
) -> None:
    """Raises BadParamError if the gradient cannot take these operands."""
    require(jnp.issubdtype(grad.dtype, jnp.floating), name, "grad", "be floating point", grad)
    _check_indices(name, indices)
    require(
        grad.shape[:-1] == indices.shape and grad.ndim > 0, name, "grad", f"have shape {(*indices.shape, 'D')}", grad
    )
    most = jnp.iinfo(wide_dtype(indices.dtype)).max
    require_integer(name, "num_weights", num_weights, f"be an integer from 0 to {most}", least=0, most=most)
    require(
        num_weights > 0 or indices.size == 0, name, "num_weights", "be positive where there are indices", num_weights
    )


def _check_indices(name: str, indices: Any) -> None:
    require(jnp.issubdtype(indices.dtype, jnp.integer), name, "indices", "be integers", indices)


def _lookup(table: jax.Array, indices: jax.Array, **_: Any) -> Arrays:
    # Ids out of range are replaced here, because int64 ids are cut to 32 bits before they are looked up.
    ids = jnp.where(_live(indices, table.shape[0], None), wide_ids(indices), -1)
    return (table.at[ids].get(mode="fill", fill_value=jnp.nan, wrap_negative_indices=False),)


def _dense_backward(
    grad: jax.Array,
    indices: jax.Array,
    *,
    num_weights: int,
    padding_idx: int | None,
    scale_grad_by_freq: bool,
    sums: Callable[..., jax.Array] = scattered,
) -> Arrays:
    # Ids one past the end are dropped.
    ids = jnp.where(_live(indices, num_weights, padding_idx), wide_ids(indices), num_weights)
    return (sums(grad, ids, num_weights, averaged=scale_grad_by_freq),)


def _refuses_runs(place: Place, grad: Any, indices: Any, *, num_weights: int, **_: Any) -> str | None:
    if reason := refusal_of_parts(place, grad, indices, jax.ShapeDtypeStruct((num_weights,), grad.dtype)):
        return reason
    return None if grad.size else "there are no rows to sum"


def _refuses_flat(place: Place, grad: Any, indices: Any, **params: Any) -> str | None:
    if reason := _refuses_runs(place, grad, indices, **params):
        return reason
    return "the rows lie along one axis already" if indices.ndim == 1 else None


def _refuses_owners(place: Place, grad: Any, indices: Any, *, num_weights: int, **params: Any) -> str | None:
    if reason := _refuses_runs(place, grad, indices, num_weights=num_weights, **params):
        return reason
    if grad.dtype.itemsize >= 4:
        return f"a scatter sums {grad.dtype} without a copy of another dtype"
    if indices.size >= num_weights:
        return f"a copy of the {num_weights} rows of the table is no larger than one of {indices.size} gradients"
    return None


def _frequency(indices: jax.Array, *, num_weights: int, counted_rank: int) -> Arrays:
    """Counts, for each position, how often its id occurs in the last `counted_rank` axes of `indices`."""
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


def _linearize(operands: Sequence[jax.Array], active: Active, **params: Any) -> tuple[Arrays, Arrays]:
    table, indices = operands
    return EMBEDDING(table, indices, **params), (table, indices)


def _tangent(
    residuals: Arrays, tangents: Arrays, active: Active, *, padding_idx: int | None, counted_rank: int | None
) -> Arrays:
    table, indices = residuals
    return (_transposed_gradient(tangents[0], indices, _row(padding_idx, table), counted_rank),)


def _transposed_gradient(
    table: jax.Array, indices: jax.Array, padding_idx: int | None, counted_rank: int | None
) -> jax.Array:
    """Looks up rows with the gradient's padding and scaling: zero at padding and outside the table."""
    rows = table.shape[0]
    (out,) = EMBEDDING(table, indices, padding_idx=None, counted_rank=None)
    if counted_rank is not None:
        out = _scaled_by_frequency(out, indices, rows, counted_rank).astype(out.dtype)
    live = _live(indices, rows, padding_idx)
    return jnp.where(live[..., None], out, jnp.zeros((), out.dtype))


def _vjp(
    residuals: Arrays, cotangents: Arrays, active: Active, *, padding_idx: int | None, counted_rank: int | None
) -> tuple[jax.Array, None]:
    table, indices = residuals
    (grad,) = cotangents
    scale = counted_rank is not None
    if counted_rank is not None and indices.ndim > counted_rank:
        # vmap has merged several calls, each with frequencies of its own: scale before they are summed together.
        grad, scale = _scaled_by_frequency(grad, indices, table.shape[0], counted_rank), False
    attributes = {"num_weights": table.shape[0], "padding_idx": _row(padding_idx, table), "scale_grad_by_freq": scale}
    (grad_table,) = EMBEDDING_DENSE_BACKWARD(grad, indices, **attributes)
    return grad_table.astype(table.dtype), None


def _scaled_by_frequency(rows: jax.Array, indices: jax.Array, num_weights: int, counted_rank: int) -> jax.Array:
    """Divides rows by the frequency of their id within its call, not yet rounded."""
    (counts,) = EMBEDDING_FREQUENCY(indices, num_weights=num_weights, counted_rank=counted_rank)
    dtype = accumulation_dtype(rows.dtype)
    return rows.astype(dtype) * reciprocal(counts, dtype)[..., None]


def _row(padding_idx: int | None, table: jax.Array) -> int | None:
    return None if padding_idx is None else int(padding_idx) % table.shape[0]


def _linearize_dense_backward(operands: Sequence[jax.Array], active: Active, **params: Any) -> tuple[Arrays, Arrays]:
    grad, indices = operands
    return EMBEDDING_DENSE_BACKWARD(grad, indices, **params), (indices,)


def _tangent_of_dense_backward(residuals: Arrays, tangents: Arrays, active: Active, **params: Any) -> Arrays:
    return EMBEDDING_DENSE_BACKWARD(tangents[0], residuals[0], **params)


def _vjp_of_dense_backward(
    residuals: Arrays,
    cotangents: Arrays,
    active: Active,
    *,
    padding_idx: int | None,
    scale_grad_by_freq: bool,
    **_: Any,
) -> tuple[jax.Array, None]:
    (indices,) = residuals
    counted_rank = indices.ndim if scale_grad_by_freq else None
    return _transposed_gradient(cotangents[0], indices, padding_idx, counted_rank), None


def _form(name: str, platforms: set[str], sums: Callable[..., jax.Array], refuses: Callable[..., str | None]) -> Form:
    def run(grad: jax.Array, indices: jax.Array, *, place: Place, **params: Any) -> Arrays:
        return _dense_backward(grad, indices, sums=sums, **params)

    return Form(name, frozenset(platforms), run, refuses)


EMBEDDING = Operator(
    "embedding",
    "v d, ... -> ... d",
    check_lookup,
    _lookup,
    Derivative(_vjp, _tangent, _linearize, residuals="v d, ..."),
    no_kernel="XLA gathers the rows, and checks ids in the next pass",
)
EMBEDDING_DENSE_BACKWARD = Operator(
    "embedding_dense_backward",
    "... d, ... -> v d",
    check_dense_backward,
    _dense_backward,
    Derivative(_vjp_of_dense_backward, _tangent_of_dense_backward, _linearize_dense_backward, residuals="..."),
    kernels=(tpu.KERNEL, gpu.KERNEL),
    forms=(
        _form("xla_sorted_runs", {"cuda"}, by_run, _refuses_runs),
        _form("xla_row_owners", {"cpu", "tpu"}, by_owner, _refuses_owners),
        _form("xla_flat_scatter", {"cpu", "tpu"}, scattered_flat, _refuses_flat),
    ),
)
EMBEDDING_FREQUENCY = Operator("embedding_frequency", "... -> ...", lambda indices, **_: None, _frequency)
