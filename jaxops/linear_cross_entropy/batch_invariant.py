"""Losses of rows whose bits depend on nothing but the row: not on the batch, the row's position, chunks or the mesh.

A compiler chooses the order in which a product or a reduction adds by the shapes of its operands, and what it fuses by
what is wanted. So every step of a loop computes one block of a fixed number of rows, from their x to their losses, or
from the cotangents of these to the gradient of x; rows that are missing are filled in. A loop of one step would be no
loop: compilers merge its body with what is around it, which may round differently. So there are at least two. Metrics,
and gradients other than that of x, come from loops of their own.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import lowering
from jaxops._checks.arguments import require
from jaxops._checks.dtypes import accumulation_dtype
from jaxops._primitive.derivative import Active, Derivative
from jaxops._primitive.operator import Operator
from jaxops._primitive.sharding import varying_with
from jaxops.linear_cross_entropy import row_statistics as algebra
from jaxops.linear_cross_entropy.fold_rows import padded
from jaxops.linear_cross_entropy.operands import Columns, Needs, Rows, RowStatistics, RowWeights, axes
from lowering.operators import EVERYWHERE, Form, is_absent_field

_Operands = tuple[Rows, Columns, RowWeights]
_NO_STATISTICS = RowStatistics(*(None for _ in RowStatistics._fields))  # type: ignore[arg-type]
INVARIANT_STRATEGIES = ("auto", "recompute")
_BLOCK_ROWS = 64
_LEAST_BLOCKS = 2


def invariant_losses(
    operator: str, operands: _Operands, *, vocab_axis: str | None, softcap: float | None, metrics: bool
) -> tuple[jax.Array, RowStatistics]:
    """Computes the `row_losses` of rows and, with metrics, their statistics. The operator is for messages."""
    sizes = jax.tree.leaves(jax.tree.map(lambda x: x.shape, operands))
    is_known = not any(map(jax.export.is_symbolic_dim, sizes))
    # Symbolic sizes leave the number of blocks open; parts of a split vocabulary are added as the mesh has them.
    require(is_known, operator, "batch_invariant", "be False where sizes are symbolic", True)
    require(vocab_axis is None, operator, "batch_invariant", "be False with vocab_axis", True)
    lowering.note(f"{operator}: strategy recompute, in blocks of rows, as batch_invariant is set")
    # Two loops: in one, the metrics would change what is fused with the sums behind the loss.
    loss, _ = _LOSSES(*operands, softcap=softcap, metrics=False)
    return loss, _LOSSES(*operands, softcap=softcap, metrics=True)[1] if metrics else _NO_STATISTICS


def _scan_blocks(step: Callable[[Any, Any], tuple[Any, Any]], sums: Any, operands: Any, batch: tuple[int, ...]) -> Any:
    """Calls `sums, results = step(sums, block of rows)` for blocks of a fixed size; returns all sums and results."""
    size = math.prod(batch)
    blocks = max(_LEAST_BLOCKS, math.ceil(size / _BLOCK_ROWS))

    def split(x: jax.Array) -> jax.Array:
        flat = x.reshape(size, *x.shape[len(batch) :])
        # A shorter last block would be a product of another shape, which may add in another order.
        return padded(flat, [blocks * _BLOCK_ROWS - size]).reshape(blocks, _BLOCK_ROWS, *flat.shape[1:])

    def join(x: jax.Array) -> jax.Array:
        return x.reshape(-1, *x.shape[2:])[:size].reshape(*batch, *x.shape[2:])

    # Steps keep nothing for their derivative but what they are given.
    step = jax.checkpoint(step, prevent_cse=False)
    sums, results = jax.lax.scan(step, varying_with(sums, operands), jax.tree.map(split, operands))
    return sums, jax.tree.map(join, results)


def _losses(
    rows: Rows, columns: Columns, weights: RowWeights, *, softcap: float | None, metrics: bool, place: Any = None
) -> tuple[jax.Array | None, RowStatistics]:
    """Computes the losses of rows or, with metrics, their statistics; not both, as results that nothing reads go."""

    def step(_: None, block: tuple[Rows, RowWeights]) -> tuple[None, tuple[jax.Array | None, RowStatistics]]:
        rows, weights = block
        sums = algebra.Logits.of(rows, columns, softcap).sums(metrics=metrics)
        if metrics:
            return None, (None, sums.statistics)
        return None, (algebra.row_losses(sums.statistics, sums.target_total, weights), _NO_STATISTICS)

    return _scan_blocks(step, None, (rows, weights), rows.x.shape[:-1])[1]


def _gradients(
    for_losses: jax.Array | None,
    for_statistics: RowStatistics,
    rows: Rows,
    columns: Columns,
    weights: RowWeights,
    *,
    needs: Needs,
    softcap: float | None,
    metrics: bool,
    place: Any = None,
) -> tuple[Rows, Columns, RowWeights]:
    """Computes the gradients of the operands of `_losses`; those of the weights are never left out."""

    def step(sums: Columns, block: Any) -> tuple[Columns, tuple[Rows, RowWeights]]:
        of_loss, cotangents, rows, weights = block
        logits = algebra.Logits.of(rows, columns, softcap)
        row_sums = logits.sums(metrics=metrics)
        statistics = row_sums.statistics
        of_weights = RowWeights()
        if of_loss is not None:
            pairs = zip(weights, algebra.loss_terms(statistics, row_sums.target_total), strict=True)
            of_weights = RowWeights(*(None if weight is None else of_loss * term for weight, term in pairs))
            weighted = jax.tree.map(lambda weight: of_loss * weight, weights)
            of_rows, sums = logits.loss_gradients(weighted, row_sums, needs, sums)
            # A loss is linear in the statistics but for log sum exp, so these are the cotangents of the statistics.
            softmax, minus = algebra.softmax_coefficient(weighted, row_sums), jax.tree.map(jnp.negative, weighted)
            cotangents = RowStatistics(softmax, softmax, minus.label, minus.target)
        else:
            of_rows, sums = logits.gradients(algebra.statistics_terms(cotangents, statistics), needs, sums)
        return sums, (algebra.with_scale(of_rows, cotangents, statistics, rows, columns), of_weights)

    operands = (for_losses, for_statistics, rows, weights)
    sums = needs.zeros(columns, accumulation_dtype(columns.weight.dtype))
    sums, (of_rows, of_weights) = _scan_blocks(step, sums, operands, rows.x.shape[:-1])
    return of_rows, sums, of_weights


def _vjp(residuals: Any, cotangents: Any, active: Active, **params: Any) -> Any:
    for_losses, for_statistics = cotangents
    operands = residuals[:3]
    is_row, is_column, is_weight = active
    x_only = Needs(x=bool(is_row.x))
    gradients = _GRADIENTS(for_losses, for_statistics, *operands, needs=x_only, **params)
    others = Needs.of(is_row, is_column)._replace(x=False)
    if any(others) or any(is_weight):
        # Apart: in one loop, what else is asked for would change what is fused in the computation of x's gradient.
        of_rows, *rest = _GRADIENTS(for_losses, for_statistics, *operands, needs=others, **params)
        gradients = of_rows._replace(x=gradients[0].x), *rest

    def rounded(x: Any, gradient: Any) -> Any:
        return None if x is None or gradient is None else gradient.astype(x.dtype)

    return jax.tree.map(rounded, tuple(operands), tuple(gradients), is_leaf=is_absent_field)


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
