"""The operators for row statistics of a linear layer's logits, from which every cross entropy follows.

Statistics and gradients are computed one tile of columns after the other, and each tile of the weight's gradient is
written once. On a single device those rows that count go first, and a tile is computed for a chunk of them at a time,
which reads its part of the weight again.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxops._checks.dtypes import accumulation_dtype
from jaxops._primitive.derivative import Active, Derivative
from jaxops._primitive.operator import Operator
from jaxops.linear_cross_entropy.fold_columns import Tile, fold_columns, merged
from jaxops.linear_cross_entropy.fold_rows import fuses, kept_rows
from jaxops.linear_cross_entropy.operands import SKIPPED, Columns, CotangentTerms, Needs, Rows, RowStatistics, axes
from jaxops.linear_cross_entropy.row_statistics import Logits, RowSums, statistics_terms, target_total, with_scale
from lowering.operators import EVERYWHERE, Form, Place
from pallas_kernels.gpu.linear_cross_entropy import gradients as gpu_gradients
from pallas_kernels.gpu.linear_cross_entropy import statistics as gpu_statistics
from pallas_kernels.tpu.linear_cross_entropy import backward as tpu_backward
from pallas_kernels.tpu.linear_cross_entropy import statistics as tpu_statistics


def linear_row_statistics(
    rows: Rows, columns: Columns, *, chunk_rows: int | None, vocab_axis: str | None = None, **params: Any
) -> RowStatistics:
    """Computes the statistics of the logits, bounded by a softcap, which never exist all at once.

    About `chunk_rows` rows' worth of them does. `vocab_axis` is the mesh axis over which columns are split, if any. The
    other parameters are the softcap, and whether `metrics` are wanted: `mean_logit` and `prediction`.
    """
    if vocab_axis is not None and rows.x.dtype == jnp.float16:
        # Every part of the vocabulary contributes a share of x's gradient. For a mean these are too small for float16,
        # so they are added in float32.
        rows = rows._replace(x=rows.x.astype(jnp.float32))
    statistics = _STATISTICS(rows, columns, chunk_rows=chunk_rows, **params)
    return statistics if vocab_axis is None else _merged(statistics, rows, columns, vocab_axis)


def _merged(statistics: RowStatistics, rows: Rows, columns: Columns, axis: str) -> RowStatistics:
    """Merges the statistics of each part of the vocabulary, which are relative to the part's own maximum."""
    maximum, log_sum_exp, label_logit, target_loss, mean_logit, prediction = statistics
    parts = RowSums(maximum, jnp.expm1(log_sum_exp))
    if rows.labels is not None and label_logit is not None:
        has_label = (rows.labels >= 0).astype(maximum.dtype)
        parts = parts._replace(label_logit=label_logit, has_label=has_label)
    total = target_total(rows, columns, maximum)
    if target_loss is not None and total is not None:
        parts = parts._replace(target_logit=total * log_sum_exp - target_loss, target_total=total)
    if mean_logit is not None and prediction is not None:
        prediction = prediction + columns.weight.shape[0] * jax.lax.axis_index(axis)
        parts = parts._replace(weighted_logit=mean_logit * jnp.exp(log_sum_exp), prediction=prediction)
    return merged(parts, axis).statistics


def statistics_by_columns(
    rows: Rows,
    columns: Columns,
    *,
    softcap: float | None,
    chunk_rows: int | None,
    metrics: bool,
    place: Place | None = None,
) -> RowStatistics:
    """Computes the `RowStatistics` of x weight^T + bias."""
    rows = rows._replace(x=rows.x.astype(columns.weight.dtype))
    # Metrics are wanted for all rows.
    kept = None if metrics else kept_rows(rows, place)
    taken = rows if kept is None else kept.take(rows)

    def add(tile: Tile, in_tile: Columns, _: None, chunk: tuple[RowSums, Rows]) -> tuple[RowSums, None]:
        before, rows = chunk
        sums = Logits.of(tile.rows(rows), in_tile, softcap).sums(metrics=metrics, fused=fuses(place))
        return merged(jax.tree.map(lambda *pair: jnp.stack(pair), before, tile.sums(sums))), None

    shapes = jax.eval_shape(lambda: Logits.of(taken, columns, softcap).sums(metrics=metrics))
    no_columns = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    # A sum of exponentials over no columns is 0, and this is 1 less.
    no_columns = no_columns._replace(less_one=no_columns.less_one - 1)
    statistics = fold_columns(add, no_columns, None, taken, columns, chunk_rows, kept, place)[0].statistics
    if kept is None or rows.labels is None:
        return statistics
    # The x of all skipped rows counts as 0, so their statistics are those of one row.
    zero = Rows(jnp.zeros((1, 0)), jnp.full(1, SKIPPED))
    without_features = columns._replace(weight=columns.weight[:, :0])
    skipped = Logits.of(zero, without_features, softcap).sums(metrics=False).statistics
    return jax.tree.map(functools.partial(jnp.where, rows.labels == SKIPPED), skipped, kept.restore(statistics))


def gradients_by_columns(
    terms: CotangentTerms,
    rows: Rows,
    columns: Columns,
    *,
    softcap: float | None,
    chunk_rows: int | None,
    needs: Needs,
    place: Place | None = None,
) -> tuple[Rows, Columns]:
    """Computes gradients from the cotangent of the logits; that of the scale is as in `Logits.gradients`."""
    x_dtype, rows = rows.x.dtype, rows._replace(x=rows.x.astype(columns.weight.dtype))
    kept = kept_rows(rows, place)
    if kept is not None:
        terms, rows = kept.take((terms, rows))
        # Fillers must get probabilities of 0: their logits are the bias, and exp(bias) alone may overflow.
        large = jnp.finfo(terms.log_sum_exp.dtype).max / 2
        terms = terms._replace(log_sum_exp=jnp.where(rows.labels == SKIPPED, large, terms.log_sum_exp))

    def add(tile: Tile, in_tile: Columns, sums: Columns, chunk: Any) -> tuple[Rows, Columns]:
        before, (rows, terms) = chunk
        new, sums = Logits.of(tile.rows(rows), in_tile, softcap).gradients(terms, needs, sums)
        # Row gradients are sums over tiles, except that of probabilities: each of its columns is in one tile.
        parts = before.probabilities, new.probabilities
        whole = jax.tree.map(lambda x, part: tile.put(x, part, x.ndim - 1), *parts)
        summed = jax.tree.map(jnp.add, before._replace(probabilities=None), new._replace(probabilities=None))
        return summed._replace(probabilities=whole), sums

    # What is added up over tiles would lose digits if each of them rounded it to 16 bits; the rest is written once.
    of_rows = needs.zeros(rows, accumulation_dtype(rows.x.dtype))
    of_rows = of_rows._replace(probabilities=needs.zeros(rows).probabilities)
    start = of_rows, needs.zeros(columns)
    of_rows, of_columns = fold_columns(add, *start, (rows, terms), columns, chunk_rows, kept, place)
    of_rows = of_rows if kept is None else kept.restore(of_rows)
    return of_rows._replace(x=jax.tree.map(lambda x: x.astype(x_dtype), of_rows.x)), of_columns


def _vjp(residuals: Any, cotangents: RowStatistics, active: Active, *, metrics: bool, **params: Any) -> Any:
    rows, columns, *results = residuals
    statistics = RowStatistics(*results)
    terms = statistics_terms(cotangents, statistics, rows, columns)
    of_rows, of_columns = _BACKWARD(terms, rows, columns, needs=Needs.of(*active), **params)
    return with_scale(of_rows, cotangents, statistics, rows, columns), of_columns


_BACKWARD = Operator(
    name="linear_cross_entropy_backward",
    signature=f"{axes(CotangentTerms, Rows, Columns)} -> {axes(Rows, Columns)}",
    check=None,
    reference=gradients_by_columns,
    kernels=(tpu_backward.KERNEL, gpu_gradients.KERNEL),
    forms=(Form("xla_by_columns", EVERYWHERE, gradients_by_columns),),
)

_STATISTICS = Operator(
    name="linear_cross_entropy",
    signature=f"{axes(Rows, Columns)} -> {axes(RowStatistics)}",
    check=None,
    reference=statistics_by_columns,
    derivative=Derivative(vjp=_vjp),
    kernels=(tpu_statistics.KERNEL, gpu_statistics.KERNEL),
    forms=(Form("xla_by_columns", EVERYWHERE, statistics_by_columns),),
)
