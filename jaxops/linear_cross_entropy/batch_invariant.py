"""Losses of rows whose bits depend on nothing but the row: not on the batch, its position there, or the mesh.

A compiler chooses the order in which a product or a reduction adds by the shapes of its operands, and what it fuses by
what is wanted. So every step of a loop computes one block of a fixed number of rows, from their x to their losses, or
from the cotangents of these to the gradient of x; rows that are missing are filled in. A loop of one step would be no
loop: compilers merge its body with what is around it, which may round differently. So there are at least two. Gradients
other than that of x come from a loop of their own.
"""

import math
from typing import Any

import jax

from jaxops._checks.dtypes import accumulation_dtype
from jaxops._primitive.derivative import Active, Derivative
from jaxops._primitive.operator import Operator
from jaxops.linear_cross_entropy.fold_rows import Step, fold_rows, padded
from jaxops.linear_cross_entropy.operands import Columns, Needs, Rows, RowStatistics, RowWeights, axes
from jaxops.linear_cross_entropy.row_statistics import Logits, row_losses, statistics_terms, with_scale
from lowering.operators import EVERYWHERE, Form

_NO_STATISTICS = RowStatistics(*(None for _ in RowStatistics._fields))  # type: ignore[arg-type]
_BLOCK_ROWS = 64
_LEAST_BLOCKS = 2


def _fold_blocks(step: Step, sums: Any, rows: Any, batch: tuple[int, ...]) -> tuple[Any, Any]:
    """Calls `step` as `fold_rows` does, for blocks of a fixed size."""
    size = math.prod(batch)
    # A shorter last block would be a product of another shape, which may add in another order.
    filled = _BLOCK_ROWS * max(_LEAST_BLOCKS, math.ceil(size / _BLOCK_ROWS))
    rows = jax.tree.map(lambda x: padded(x.reshape(size, *x.shape[len(batch) :]), [filled - size]), rows)
    results, sums = fold_rows(step, sums, rows, (filled,), _BLOCK_ROWS, None)
    return jax.tree.map(lambda x: x[:size].reshape(*batch, *x.shape[1:]), results), sums


def invariant_losses(
    rows: Rows, columns: Columns, weights: RowWeights, *, softcap: float | None, metrics: bool
) -> tuple[jax.Array, RowStatistics]:
    """Computes the `row_losses` of rows and, with metrics, their statistics."""
    # Two loops: in one, the metrics would change what is fused with the sums behind the loss.
    loss, statistics = _LOSSES(rows, columns, weights, softcap=softcap, metrics=False)
    return loss, _LOSSES(rows, columns, weights, softcap=softcap, metrics=True)[1] if metrics else statistics


def _losses(
    rows: Rows, columns: Columns, weights: RowWeights, *, softcap: float | None, metrics: bool, place: Any = None
) -> tuple[jax.Array | None, RowStatistics]:
    """Computes the losses of rows or, with metrics, their statistics; not both, as results that nothing reads go."""

    def step(_: None, block: tuple[Rows, RowWeights]) -> tuple[Any, None]:
        rows, weights = block
        statistics = Logits.of(rows, columns, softcap).sums(metrics=metrics).statistics
        return ((None, statistics) if metrics else (row_losses(statistics, weights), _NO_STATISTICS)), None

    return _fold_blocks(step, None, (rows, weights), rows.x.shape[:-1])[0]


def _gradients(
    of_losses: jax.Array | None,
    of_statistics: RowStatistics,
    rows: Rows,
    columns: Columns,
    weights: RowWeights,
    *,
    needs: Needs,
    softcap: float | None,
    metrics: bool,
    place: Any = None,
) -> tuple[Rows, Columns, RowWeights]:
    """Computes the gradients of the operands of `_losses`, whose results are computed again."""

    def step(sums: Columns, block: Any) -> tuple[tuple[Rows, RowWeights], Columns]:
        of_losses, cotangents, rows, weights = block
        logits = Logits.of(rows, columns, softcap)
        statistics, of_weights = logits.sums(metrics=metrics).statistics, RowWeights()
        if of_losses is not None:
            cotangents, of_weights = jax.vjp(row_losses, statistics, weights)[1](of_losses)
        terms = statistics_terms(cotangents, statistics, rows, columns)
        of_rows, sums = logits.gradients(terms, needs, sums)
        return (with_scale(of_rows, cotangents, statistics, rows, columns), of_weights), sums

    sums = needs.zeros(columns, accumulation_dtype(columns.weight.dtype))
    block = of_losses, of_statistics, rows, weights
    (of_rows, of_weights), of_columns = _fold_blocks(step, sums, block, rows.x.shape[:-1])
    return of_rows, of_columns, of_weights


def _vjp(residuals: Any, cotangents: Any, active: Active, **params: Any) -> Any:
    operands, (is_row, is_column, _) = residuals[:3], active
    needs = Needs.of(is_row, is_column)
    gradients = _GRADIENTS(*cotangents, *operands, needs=Needs(x=needs.x), **params)
    if any(others := needs._replace(x=False)):
        # Apart: in one loop, what else is asked for would change what is fused in the computation of x's gradient.
        of_rows, *rest = _GRADIENTS(*cotangents, *operands, needs=others, **params)
        gradients = of_rows._replace(x=gradients[0].x), *rest
    return gradients


# Per device: if the compiler split a block over devices, its shape on each, and so its bits, would depend on the mesh.
_GRADIENTS = Operator(
    name="batch_invariant_losses_backward",
    signature=f"..., {axes(RowStatistics, Rows, Columns, RowWeights)} -> {axes(Rows, Columns, RowWeights)}",
    check=None,
    reference=_gradients,
    forms=(Form("xla_row_blocks", EVERYWHERE, _gradients, per_device=True),),
)

_LOSSES = Operator(
    name="batch_invariant_losses",
    signature=f"{axes(Rows, Columns, RowWeights)} -> ..., {axes(RowStatistics)}",
    check=None,
    reference=_losses,
    derivative=Derivative(vjp=_vjp),
    forms=(Form("xla_row_blocks", EVERYWHERE, _losses, per_device=True),),
)
