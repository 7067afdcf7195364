"""The summed cross entropy of rows and its gradients, in chunks of rows whose logits exist one after the other.

For each chunk: its logits, their statistics, the cotangent, and both gradients; three products in all.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxops._checks.dtypes import accumulation_dtype
from jaxops.linear_cross_entropy import row_statistics as algebra
from jaxops.linear_cross_entropy.chunk_sizes import rows_of_logits
from jaxops.linear_cross_entropy.fold_rows import Step, fold_kept_rows
from jaxops.linear_cross_entropy.gradient_products import Adding, added, added_in_blocks, kept_gradient
from jaxops.linear_cross_entropy.operands import Columns, Needs, Rows, RowStatistics, RowWeights
from lowering.operators import Place

# Of each row; and with the summed loss and the gradients of columns.
RowResults = tuple[RowStatistics, Rows]
SumResults = tuple[jax.Array, RowStatistics, Rows, Columns]


class Sums(NamedTuple):
    """Sums over rows: the loss, and the gradients of what each column has."""

    loss: jax.Array
    columns: Columns

    @classmethod
    def zeros(cls, columns: Columns, needs: Needs, weight_grad_dtype: Any) -> "Sums":
        """Returns the sums before the first row; that for the weight has its dtype, or without it that of losses."""
        dtype = accumulation_dtype(columns.weight.dtype)
        weight = needs.zeros(columns, weight_grad_dtype or dtype).weight
        return cls(jnp.zeros((), dtype), needs.zeros(columns, dtype)._replace(weight=weight))


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
) -> SumResults:
    """Computes the sum of losses, the rows' statistics and gradients, with exponentials relative to a row's maximum.

    With the place where it runs, chunks are sized for all of its devices, a CPU adds to the gradient of the weight in
    blocks, and a single device leaves out chunks of skipped rows. Without `chunk_rows`, they have a size of their own.
    """
    on_one_cpu = place == Place("cpu")
    in_blocks = on_one_cpu and not jax.export.is_symbolic_dim(rows.x.size * columns.weight.size)
    step = chunk_step(columns, softcap, needs, metrics, added_in_blocks if in_blocks else added)
    # XLA's CPU compiler writes what it adds up over columns or multiplies: one more array, unless the loss is plain.
    is_plain = softcap is None and columns.bias is None and columns.class_targets is None
    is_plain = is_plain and not metrics and columns.weight.dtype.itemsize > 2
    start, (classes, features) = Sums.zeros(columns, needs, weight_grad_dtype), columns.weight.shape
    chunk_rows = chunk_rows or rows_of_logits(classes, features, 2 if on_one_cpu and not is_plain else 1)
    (statistics, of_rows), sums = fold_kept_rows(step, start, (rows, weights), place, chunk_rows, all_rows=metrics)
    weight_grad = kept_gradient(sums.columns.weight, columns.weight.dtype)
    return sums.loss, statistics, of_rows, sums.columns._replace(weight=weight_grad)


def chunk_step(columns: Columns, softcap: float | None, needs: Needs, metrics: bool, add: Adding = added) -> Step:
    """Returns the step of a chunk, by which its sums are added to those of the chunks before."""

    def step(sums: Sums, chunk: tuple[Rows, RowWeights]) -> tuple[RowResults, Sums]:
        rows, weights = chunk
        logits = algebra.Logits.of(algebra.skipped_as_zeros(rows), columns, softcap)
        # Behind the barrier, logits - maximum is computed again; without it XLA would keep that beside the logits.
        row_sums = jax.lax.optimization_barrier(logits.sums(metrics=metrics))
        statistics = algebra.own_statistics(row_sums, rows, metrics)
        of_rows, of_columns = logits.gradients(algebra.cotangent_terms(weights, row_sums), needs, sums.columns, add)
        loss = sums.loss + jnp.sum(algebra.row_losses(statistics, weights))
        # Rounded in its chunk, so that no gradient of all rows exists in float32 if it is kept in bfloat16.
        of_rows = of_rows._replace(x=kept_gradient(of_rows.x, rows.x.dtype))
        return (statistics, of_rows), Sums(loss, of_columns)

    return step
