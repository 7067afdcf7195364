"""The operators for row statistics of a linear layer's logits, from which every cross entropy follows.

Statistics and gradients are computed one tile of columns after the other: each tile of the weight is read once, and
each tile of its gradient is written once. On a single device those rows that count go first, and a tile is computed in
chunks of them.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp

from jaxops._checks.dtypes import accumulation_dtype
from jaxops._primitive.derivative import Active, Derivative
from jaxops._primitive.operator import Operator
from jaxops._primitive.sharding import varying_with
from jaxops.linear_cross_entropy.checks import check_operands
from jaxops.linear_cross_entropy.chunk_sizes import columns_of_tile, logits_of_tile
from jaxops.linear_cross_entropy.fold_columns import Tile, fold_columns, merged_pair, parts_of
from jaxops.linear_cross_entropy.fold_rows import KeptRows, is_on_one_device, kept_rows
from jaxops.linear_cross_entropy.operands import (
    SKIPPED,
    ColumnGradients,
    Columns,
    CotangentTerms,
    Needs,
    RowGradients,
    Rows,
    RowStatistics,
    axes,
)
from jaxops.linear_cross_entropy.row_statistics import (
    RowSums,
    bounded_logits,
    linear_gradients,
    logits_of,
    logits_of_zero,
    row_sums,
    scale_gradient,
    statistics_terms,
)
from lowering.operators import EVERYWHERE, Form, Place
from pallas_kernels.gpu.linear_cross_entropy import gradients as gpu_gradients
from pallas_kernels.gpu.linear_cross_entropy import statistics as gpu_statistics
from pallas_kernels.tpu.linear_cross_entropy import backward as tpu_backward
from pallas_kernels.tpu.linear_cross_entropy import statistics as tpu_statistics


def linear_row_statistics(
    rows: Rows, columns: Columns, *, softcap: float | None, chunk_rows: int | None, metrics: bool
) -> RowStatistics:
    """Computes the statistics of the logits z = x weight^T + bias, which are never needed all at once.

    Args:
      rows: what each row has.
      columns: what each column has.
      softcap: z becomes softcap tanh(z / softcap).
      chunk_rows: about how many rows' worth of z exists at a time.
      metrics: whether to compute `mean_logit` and `prediction`.
    """
    tile_logits = logits_of_tile(math.prod(rows.x.shape[:-1]), columns.weight.shape, chunk_rows)
    return _STATISTICS(rows, columns, softcap=softcap, tile_logits=tile_logits, metrics=metrics)


def statistics_by_columns(
    rows: Rows,
    columns: Columns,
    *,
    softcap: float | None,
    tile_logits: int | None,
    metrics: bool,
    place: Place | None = None,
) -> RowStatistics:
    """Computes the `RowStatistics` of x weight^T + bias."""
    rows, dtype = rows._replace(x=rows.x.astype(columns.weight.dtype)), accumulation_dtype(columns.weight.dtype)
    # Metrics are wanted for all rows.
    kept = None if metrics else kept_rows(rows, place)
    taken = rows if kept is None else kept.take(rows)

    def sums_of(bounded: jax.Array, rows: Rows, columns: Columns) -> RowSums:
        return row_sums(logits_of(bounded, rows), rows, columns, metrics=metrics)

    def add_tile(sums: RowSums, tile: Tile) -> RowSums:
        in_tile = tile.columns(columns)

        def add(_: None, chunk: tuple[RowSums, Rows]) -> tuple[RowSums, None]:
            before, rows = chunk
            sums = sums_of(bounded_logits(rows, in_tile, softcap, dtype), rows, in_tile)
            return merged_pair(before, tile.sums(sums)), None

        of_tile = tile.rows(taken)
        return (add(None, (sums, of_tile)) if kept is None else kept.fold(add, None, sums, of_tile))[0]

    shapes = jax.eval_shape(lambda: sums_of(bounded_logits(taken, columns, softcap, dtype), taken, columns))
    no_columns = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    # A sum of exponentials over no columns is 0, and this is 1 less.
    no_columns = no_columns._replace(less_one=no_columns.less_one - 1)
    statistics = _folded(add_tile, no_columns, taken, columns, tile_logits, kept, place).statistics
    if kept is None or rows.labels is None:
        return statistics
    # The x of all skipped rows counts as 0, so their statistics are those of one row.
    zero = Rows(jnp.zeros((1, rows.x.shape[-1]), rows.x.dtype), jnp.full((1,), SKIPPED, rows.labels.dtype))
    skipped = sums_of(logits_of_zero(columns, softcap, dtype), zero, columns).statistics
    is_skipped = rows.labels == SKIPPED
    pairs: Any = zip(skipped, kept.restore(statistics), strict=True)
    results: Any = (None if of_kept is None else jnp.where(is_skipped, x, of_kept) for x, of_kept in pairs)
    return RowStatistics(*results)


def gradients_by_columns(
    terms: CotangentTerms,
    rows: Rows,
    columns: Columns,
    *,
    softcap: float | None,
    tile_logits: int | None,
    needs: Needs,
    place: Place | None = None,
) -> tuple[RowGradients, ColumnGradients]:
    """Computes gradients from the cotangent of the logits; that of the scale is as in `linear_gradients`."""
    x_dtype, rows = rows.x.dtype, rows._replace(x=rows.x.astype(columns.weight.dtype))
    kept = kept_rows(rows, place)
    if kept is not None:
        terms, rows = kept.take((terms, rows))
        # Fillers must get probabilities of 0: their logits are the bias, and exp(bias) alone may overflow.
        terms = terms._replace(log_sum_exp=jnp.where(rows.labels == SKIPPED, jnp.inf, terms.log_sum_exp))
    dtype = accumulation_dtype(rows.x.dtype)

    def add_tile(carry: tuple[RowGradients, ColumnGradients], tile: Tile) -> tuple[RowGradients, ColumnGradients]:
        of_rows, of_columns = carry
        in_tile = tile.columns(columns)

        def add(sums: ColumnGradients, chunk: Any) -> tuple[RowGradients, ColumnGradients]:
            before, (terms, rows) = chunk
            bounded = bounded_logits(rows, in_tile, softcap, dtype)
            new, added = linear_gradients(terms, rows, in_tile, bounded, softcap, needs)
            # Row gradients are sums over tiles, except that of probabilities: each of its columns is in one tile.
            summed = jax.tree.map(jnp.add, before, new._replace(probabilities=None))
            return summed._replace(probabilities=new.probabilities), jax.tree.map(jnp.add, sums, added)

        sums = jax.tree.map(lambda x: jnp.zeros_like(tile.of(x), dtype), of_columns)
        before = of_rows._replace(probabilities=None)
        chunk = terms, tile.rows(rows)
        new, sums = add(sums, (before, chunk)) if kept is None else kept.fold(add, sums, before, chunk)
        probabilities = of_rows.probabilities
        if probabilities is not None and new.probabilities is not None:
            axis = probabilities.ndim - 1
            probabilities = tile.put(probabilities, new.probabilities.astype(probabilities.dtype), axis)
        # A tile has seen all rows, so its part of the gradient is complete and is rounded once.
        of_columns = jax.tree.map(lambda x, part: tile.put(x, part.astype(x.dtype)), of_columns, sums)
        return new._replace(probabilities=probabilities), of_columns

    def zeros(name: str, like: Any, dtype: Any) -> jax.Array | None:
        return jnp.zeros_like(getattr(like, name), dtype) if getattr(needs, name) else None

    # What is added up over tiles would lose digits if each of them rounded it to 16 bits; the rest is written once.
    start = (
        RowGradients(zeros("x", rows, dtype), zeros("probabilities", rows, None), zeros("scale", rows, dtype)),
        ColumnGradients(*(zeros(name, columns, None) for name in ColumnGradients._fields)),
    )
    of_rows, of_columns = _folded(add_tile, start, rows, columns, tile_logits, kept, place)
    of_rows = of_rows if kept is None else kept.restore(of_rows)
    return of_rows if of_rows.x is None else of_rows._replace(x=of_rows.x.astype(x_dtype)), of_columns


def _folded(
    add_tile: Any,
    start: Any,
    rows: Rows,
    columns: Columns,
    tile_logits: int | None,
    kept: KeptRows | None,
    place: Place | None,
) -> Any:
    """Calls `fold_columns` with tiles whose logits, of all rows or of a chunk of those that are kept, are as many."""
    classes = columns.weight.shape[0]
    count = math.prod(rows.x.shape[:-1]) if kept is None else kept.chunk_rows
    width = columns_of_tile(count, columns.weight.shape, tile_logits)
    # On a single device nothing can move between devices, and neighbouring columns are read as one piece.
    parts = 1 if is_on_one_device(place) else parts_of(classes)
    return fold_columns(add_tile, varying_with(start, (rows, columns)), classes, width, parts)


def _vjp(residuals: Any, cotangents: RowStatistics, active: Active, *, metrics: bool, **params: Any) -> Any:
    rows, columns = residuals[:2]
    statistics = RowStatistics(*residuals[2:])
    terms = statistics_terms(cotangents, statistics)
    of_rows, of_columns = _BACKWARD(terms, rows, columns, needs=Needs.of(*active), **params)
    of_scale = of_rows.scale
    if of_scale is not None:
        of_scale = scale_gradient(of_scale, cotangents, statistics, rows, columns)
    return Rows(of_rows.x, None, of_rows.probabilities, of_scale, rows.margin), Columns(*of_columns)


_BACKWARD = Operator(
    name="linear_cross_entropy_backward",
    signature=f"{axes(CotangentTerms, Rows, Columns)} -> {axes(RowGradients, ColumnGradients)}",
    check=lambda *_, **__: None,
    reference=gradients_by_columns,
    kernels=(tpu_backward.KERNEL, gpu_gradients.KERNEL),
    forms=(Form("xla_by_columns", EVERYWHERE, gradients_by_columns),),
)

_STATISTICS = Operator(
    name="linear_cross_entropy",
    signature=f"{axes(Rows, Columns)} -> {axes(RowStatistics)}",
    check=check_operands,
    reference=statistics_by_columns,
    derivative=Derivative(vjp=_vjp),
    kernels=(tpu_statistics.KERNEL, gpu_statistics.KERNEL),
    forms=(Form("xla_by_columns", EVERYWHERE, statistics_by_columns),),
)
