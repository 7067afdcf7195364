"""The summed cross entropy of rows and its gradients, in chunks of rows whose logits exist one after the other.

For each chunk: its logits, their statistics, the cotangent, and both gradients; three products in all.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxops.linear_cross_entropy.chunk_sizes import rows_of_logits
from jaxops.linear_cross_entropy.fold_rows import Step, fold_kept_rows
from jaxops.linear_cross_entropy.operands import (
    ColumnGradients,
    Columns,
    Needs,
    RowGradients,
    Rows,
    RowStatistics,
    RowWeights,
)
from jaxops.linear_cross_entropy.row_statistics import (
    Adding,
    added,
    added_in_blocks,
    bounded_logits,
    cotangent_terms,
    kept_gradient,
    linear_gradients,
    logits_of,
    row_losses,
    row_sums,
    skipped_as_zeros,
    target_total,
    with_target_total,
)
from lowering.operators import Place


class Sums(NamedTuple):
    """Sums over rows."""

    loss: jax.Array
    columns: ColumnGradients


def summed_by_rows(
    rows: Rows,
    columns: Columns,
    weights: RowWeights,
    *,
    softcap: float | None,
    chunk_rows: int | None,
    needs: Needs,
    metrics: bool,
    weight_grad_dtype: Any,
    place: Place | None = None,
) -> tuple[jax.Array, RowStatistics, RowGradients, ColumnGradients]:
    """Computes the sum of losses, the rows' statistics and gradients, with exponentials relative to a row's maximum.

    With the place where it runs, chunks are sized for all of its devices, a CPU adds to the gradient of the weight in
    blocks, and a single device leaves out chunks of skipped rows.
    """
    on_one_cpu = place == Place("cpu")
    # XLA's CPU compiler writes what it adds up over columns or multiplies: one more array, unless the loss is plain.
    is_plain = softcap is None and columns.bias is None and columns.class_targets is None and not metrics
    is_plain = is_plain and columns.weight.dtype.itemsize > 2
    classes, features = columns.weight.shape
    chunk_rows = chunk_rows or rows_of_logits(classes, features, 2 if on_one_cpu and not is_plain else 1)
    add = added_in_blocks if on_one_cpu and not jax.export.is_symbolic_dim(columns.weight.size) else added
    step = chunk_step(columns, softcap, needs, metrics=metrics, add=add)
    start = no_sums(columns, weights, needs, weight_grad_dtype)
    (statistics, of_rows), sums = fold_kept_rows(step, start, (rows, weights), place, chunk_rows, all_rows=metrics)
    weight_grad = kept_gradient(sums.columns.weight, columns.weight.dtype)
    return sums.loss, statistics, of_rows, sums.columns._replace(weight=weight_grad)


def no_sums(columns: Columns, weights: RowWeights, needs: Needs, weight_grad_dtype: Any) -> Sums:
    """Returns the sums before the first row, in the dtype of the weights of losses."""
    dtype = jnp.result_type(*jax.tree.leaves(weights))

    def zeros(is_needed: bool, like: jax.Array | None, dtype: Any = dtype) -> jax.Array | None:
        return jnp.zeros_like(like, dtype) if is_needed and like is not None else None

    of_columns = ColumnGradients(
        zeros(needs.weight, columns.weight, weight_grad_dtype or dtype),
        zeros(needs.bias, columns.bias),
        zeros(needs.class_targets, columns.class_targets),
    )
    return Sums(jnp.zeros((), dtype), of_columns)


def chunk_step(columns: Columns, softcap: float | None, needs: Needs, *, metrics: bool, add: Adding = added) -> Step:
    """Returns the step of a chunk, by which its sums are added to those of the chunks before."""

    def step(sums: Sums, chunk: tuple[Rows, RowWeights]) -> tuple[tuple[RowStatistics, RowGradients], Sums]:
        rows, weights = chunk
        x_dtype, rows = rows.x.dtype, skipped_as_zeros(rows._replace(x=rows.x.astype(columns.weight.dtype)))
        bounded = bounded_logits(rows, columns, softcap, sums.loss.dtype)
        # With it, logits - maximum is computed again. Without the barrier XLA would keep it next to the logits instead.
        row_totals = jax.lax.optimization_barrier(row_sums(logits_of(bounded, rows), rows, columns, metrics=metrics))
        statistics = row_totals.statistics
        total = target_total(rows, columns, statistics.max_logit)
        cotangent = cotangent_terms(weights, row_totals, total)
        of_rows, of_columns = linear_gradients(
            cotangent, rows, columns, bounded, softcap, needs, weight_sum=sums.columns.weight, add=add
        )
        # The gradient of t_c is b l - b (z_c - m), as T is the sum of t; the first term, alike for all c, is missing.
        if weights.target is not None:
            of_rows, of_columns = with_target_total(of_rows, of_columns, weights.target * statistics.log_sum_exp)
        loss = sums.loss + jnp.sum(row_losses(statistics, total, weights))
        # The weight's product adds to its sum itself: as an array of its own, it would be V H numbers more.
        before = sums.columns._replace(weight=None)
        added = jax.tree.map(jnp.add, before, of_columns._replace(weight=None))
        # Rounded in its chunk, so that no gradient of all rows exists in float32 if it is kept in bfloat16.
        of_rows = of_rows._replace(x=kept_gradient(of_rows.x, x_dtype))
        return (statistics, of_rows), Sums(loss, added._replace(weight=of_columns.weight))

    return step
