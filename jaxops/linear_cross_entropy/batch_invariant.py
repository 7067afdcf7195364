"""Statistics of rows whose bits depend on nothing but the row: not on the batch, its position there, or the mesh.

A compiler chooses the order in which a product or a reduction adds by the shapes of its operands, and what it fuses by
what is wanted. So every step of a loop computes one block of a fixed number of rows, from their x to their statistics,
or from the cotangents of these to the gradient of x; rows that are missing are filled in. A loop of one step would be
no loop: compilers merge its body with what is around it, which may round differently. So there are at least two.
Gradients other than that of x come from a loop of their own.
"""

import math
from typing import Any

import jax

from jaxops._checks.dtypes import accumulation_dtype
from jaxops._primitive.derivative import Active, Derivative
from jaxops._primitive.operator import Operator
from jaxops.linear_cross_entropy.fold_rows import Step, fold_rows, padded
from jaxops.linear_cross_entropy.operands import Columns, Needs, Rows, RowStatistics, axes
from jaxops.linear_cross_entropy.row_statistics import Logits, statistics_terms, with_scale
from lowering.operators import EVERYWHERE, Form, is_absent_field

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


def _statistics(
    rows: Rows, columns: Columns, *, softcap: float | None, metrics: bool, place: Any = None
) -> RowStatistics:
    def step(_: None, rows: Rows) -> tuple[RowStatistics, None]:
        return Logits.of(rows, columns, softcap).sums(metrics=metrics).statistics, None

    return _fold_blocks(step, None, rows, rows.x.shape[:-1])[0]


def _gradients(
    cotangents: RowStatistics,
    rows: Rows,
    columns: Columns,
    *,
    needs: Needs,
    softcap: float | None,
    metrics: bool,
    place: Any = None,
) -> tuple[Rows, Columns]:
    """Computes the gradients of the operands of `_statistics`, whose results are computed again."""

    def step(sums: Columns, block: tuple[RowStatistics, Rows]) -> tuple[Rows, Columns]:
        cotangents, rows = block
        logits = Logits.of(rows, columns, softcap)
        statistics = logits.sums(metrics=metrics).statistics
        of_rows, sums = logits.gradients(statistics_terms(cotangents, statistics, rows, columns), needs, sums)
        return with_scale(of_rows, cotangents, statistics, rows, columns), sums

    sums = needs.zeros(columns, accumulation_dtype(columns.weight.dtype))
    gradients = _fold_blocks(step, sums, (cotangents, rows), rows.x.shape[:-1])

    def rounded(x: Any, gradient: Any) -> Any:
        return None if x is None or gradient is None else gradient.astype(x.dtype)

    return jax.tree.map(rounded, (rows, columns), gradients, is_leaf=is_absent_field)


def _vjp(residuals: Any, cotangents: Any, active: Active, **params: Any) -> Any:
    rows, columns, *_ = residuals
    needs = Needs.of(*active)
    of_rows, of_columns = _GRADIENTS(cotangents, rows, columns, needs=Needs(x=needs.x), **params)
    if any(others := needs._replace(x=False)):
        # Apart: in one loop, what else is asked for would change what is fused in the computation of x's gradient.
        x_grad = of_rows.x
        of_rows, of_columns = _GRADIENTS(cotangents, rows, columns, needs=others, **params)
        of_rows = of_rows._replace(x=x_grad)
    return of_rows, of_columns


# Per device: if the compiler split a block over devices, its shape on each, and so its bits, would depend on the mesh.
_GRADIENTS = Operator(
    name="batch_invariant_statistics_backward",
    signature=f"{axes(RowStatistics, Rows, Columns)} -> {axes(Rows, Columns)}",
    check=None,
    reference=_gradients,
    forms=(Form("xla_row_blocks", EVERYWHERE, _gradients, per_device=True),),
)

INVARIANT_STATISTICS = Operator(
    name="batch_invariant_statistics",
    signature=f"{axes(Rows, Columns)} -> {axes(RowStatistics)}",
    check=None,
    reference=_statistics,
    derivative=Derivative(vjp=_vjp),
    forms=(Form("xla_row_blocks", EVERYWHERE, _statistics, per_device=True),),
)
