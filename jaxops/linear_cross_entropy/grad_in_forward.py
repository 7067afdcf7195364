"""The summed cross entropy of rows, with gradients computed in the same pass: three matrix products, chunk by chunk."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxops._checks.dtypes import accumulation_dtype
from jaxops._primitive.derivative import Active, Arrays, Derivative
from jaxops._primitive.operator import Operator
from jaxops._primitive.sharding import laid_out_as, varying_with
from jaxops.linear_cross_entropy import fixed_reference, operator
from jaxops.linear_cross_entropy.live_rows import filler, live_rows, rows_where
from jaxops.linear_cross_entropy.logits import (
    CotangentTerms,
    Needs,
    RowStatistics,
    RowWeights,
    Targets,
    broadcast_rows,
    cross_entropy_terms,
    is_present,
    linear_gradients,
    linear_logits,
    row_statistics,
    target_total,
)
from jaxops.linear_cross_entropy.row_chunks import SMALL_LOGITS, default_chunk_rows, fold_rows
from jaxops.linear_cross_entropy.tiled import tiled_statistics

_OPERANDS = "... h, v h, v, ..., v, ... v, ..., ..., ..."


def row_losses(rows: RowStatistics, target_total: jax.Array, weights: RowWeights) -> jax.Array:
    """The loss of each row, from the statistics of its logits and the sum of its target weights t."""
    by_label, by_target, by_square = cross_entropy_terms(rows, target_total)
    return weights.label * by_label + weights.target * by_target + weights.square * by_square


def summed_cross_entropy(
    x: jax.Array,
    weight: jax.Array,
    bias: jax.Array,
    targets: Targets,
    weights: RowWeights,
    *,
    softcap: float | None,
    chunk_rows: int | None,
) -> jax.Array:
    """The sum of `row_losses`; operands as in `operator.linear_row_statistics`.

    It is a plain sum, without the 1 / rows of a mean. Gradients are kept before the loss's own cotangent is known, and
    the factor would push them out of float16's range where they are rounded for the matrix products.
    """
    return _SUM(x, weight, bias, *targets, *weights, softcap=softcap, chunk_rows=chunk_rows)[0]


def _reference(
    x: jax.Array,
    weight: jax.Array,
    bias: jax.Array,
    labels: jax.Array,
    shared_target: jax.Array,
    row_target: jax.Array,
    *weights: jax.Array,
    softcap: float | None,
    chunk_rows: int | None,
) -> Arrays:
    tile_logits = (chunk_rows or default_chunk_rows(*weight.shape)) * weight.shape[0]
    operands = (x, weight, bias, labels, shared_target, row_target)
    rows = RowStatistics(*tiled_statistics(*operands, softcap=softcap, tile_logits=tile_logits, metrics=False))
    total = target_total(Targets(labels, shared_target, row_target), rows.max_logit)
    return (jnp.sum(row_losses(rows, total, RowWeights(*weights))),)


def _reference_with_gradients(
    x: jax.Array,
    weight: jax.Array,
    bias: jax.Array,
    labels: jax.Array,
    shared_target: jax.Array,
    row_target: jax.Array,
    *weights: jax.Array,
    softcap: float | None,
    chunk_rows: int | None,
    needs: Needs,
) -> Arrays:
    def chunk(
        sums: Arrays, x: jax.Array, labels: jax.Array, row_target: jax.Array, *weights: jax.Array
    ) -> tuple[Arrays, Arrays]:
        targets, by = Targets(labels, shared_target, row_target), RowWeights(*weights)
        logits = linear_logits(x, weight, bias, softcap)
        rows = row_statistics(logits, targets, metrics=False)
        total = target_total(targets, rows.max_logit)
        lse = rows.max_logit + rows.log_sum_exp
        softmax = by.label + by.target * total + 2 * by.square * lse
        # Below, logits - maximum is computed again. Without the barrier XLA would keep it next to the logits instead.
        maximum = jax.lax.optimization_barrier(rows.max_logit)
        terms = CotangentTerms(softmax, None, -by.label, -by.target, maximum, rows.log_sum_exp)
        (x_grad, row_grad), (weight_grad, bias_grad, shared_grad) = linear_gradients(
            terms, x, weight, targets, logits, softcap, needs, sums[1]
        )
        # A target weight also counts in the total, which multiplies log sum exp.
        by_total = by.target * rows.log_sum_exp
        row_grad = row_grad + broadcast_rows(by_total)
        loss = jnp.sum(row_losses(rows, total, by))
        others = (loss, bias_grad, shared_grad + jnp.sum(by_total))
        loss, bias_grad, shared_grad = (a + b for a, b in zip((sums[0], *sums[2:]), others, strict=True))
        return (x_grad, row_grad, *cross_entropy_terms(rows, total)), (loss, weight_grad, bias_grad, shared_grad)

    operands = (x, labels, row_target, *weights)
    targets, dtype = Targets(labels, shared_target, row_target), accumulation_dtype(x.dtype)
    shapes = (
        (),
        (weight.shape[0] if needs.weight else 0, x.shape[-1]),
        (bias.size if needs.bias else 0,),
        (shared_target.size if needs.shared_target else 0,),
    )
    start = varying_with([jnp.zeros(shape, dtype) for shape in shapes], (*operands, weight, bias, shared_target))
    if not fixed_reference.applies(x, weight, targets, softcap, needs):
        chunk_rows = chunk_rows or default_chunk_rows(*weight.shape)
        rows, sums = _all_chunks(chunk, start, operands, None if is_present(row_target) else labels, chunk_rows)
        x_grad, row_grad, *weights_grads = rows
        return (*sums[:1], x_grad, *sums[1:], row_grad, *weights_grads)

    chunk_rows = chunk_rows or fixed_reference.default_chunk_rows(*weight.shape)
    shared = fixed_reference.Shared(weight, bias, shared_target, softcap, needs)
    by_reference = functools.partial(fixed_reference.chunk_with_gradients, shared)
    sums = (*start[:3], *(jnp.zeros(shape, dtype) for shape in (x.shape[-1:], ())))
    (*results, has_failed), sums = _all_chunks(by_reference, sums, (x, labels, *weights), labels, chunk_rows)
    sums = (*fixed_reference.with_target(shared, sums), start[3])
    row_grad = jnp.zeros((*labels.shape, 0), dtype)
    failed = rows_where(has_failed, max(1, SMALL_LOGITS // weight.shape[0]))
    (x_grad, _, *weights_grads), sums = failed.update(chunk, sums, (results[0], row_grad, *results[1:]), operands)
    return (*sums[:1], x_grad, *sums[1:], row_grad, *weights_grads)


def _all_chunks(
    step: Callable[..., tuple[Arrays, Arrays]],
    start: Arrays,
    operands: Sequence[jax.Array],
    labels: jax.Array | None,
    chunk_rows: int | None,
) -> tuple[Arrays, Arrays]:
    """As `fold_rows`; with labels, rows without one are left out where they may be reordered."""
    live = None if labels is None else live_rows(labels, chunk_rows)
    if live is None:
        return fold_rows(step, start, operands, operands[-1].ndim, chunk_rows, [filler(x) for x in operands])
    return live.map(step, start, operands)


def _linearize(operands: Sequence[jax.Array], active: Active, **params: Any) -> tuple[Arrays, Arrays]:
    before, after = active[: operator.LABELS], active[operator.LABELS + 1 : 6]
    loss, *gradients = _SUM_WITH_GRADIENTS(*operands, needs=Needs(*before, *after), **params)
    return (loss,), (*operands, *gradients)


def _active_gradients(residuals: Sequence[jax.Array], active: Active) -> list[tuple[jax.Array, jax.Array]]:
    """Each active operand with its float32 gradient, which on an explicit mesh is laid out like the operand."""
    operands, gradients = list(residuals[: len(active)]), list(residuals[len(active) :])
    gradients.insert(operator.LABELS, operands[operator.LABELS])
    pairs = [(x, gradient) for x, gradient, a in zip(operands, gradients, active, strict=True) if a]
    return [(x, laid_out_as(gradient, jax.typeof(x).sharding)) for x, gradient in pairs]


def _tangent(residuals: Sequence[jax.Array], tangents: Sequence[jax.Array], active: Active, **_: Any) -> Arrays:
    pairs = zip(_active_gradients(residuals, active), tangents, strict=True)
    products = [jnp.sum(gradient * tangent.astype(gradient.dtype)) for (_, gradient), tangent in pairs]
    return (sum(products[1:], products[0]),)


def _vjp(residuals: Sequence[jax.Array], cotangents: Sequence[jax.Array], active: Active, **_: Any) -> Arrays:
    (cotangent,) = cotangents
    return tuple((cotangent * gradient).astype(x.dtype) for x, gradient in _active_gradients(residuals, active))


_GRADIENTS = "... h, v h, v, v, ... v, ..., ..., ..."

_SUM_WITH_GRADIENTS = Operator(
    name="linear_cross_entropy_sum_with_gradients",
    signature=f"{_OPERANDS} -> , {_GRADIENTS}",
    check=operator.check,
    reference=_reference_with_gradients,
)

_SUM = Operator(
    name="linear_cross_entropy_sum",
    signature=f"{_OPERANDS} ->",
    check=operator.check,
    reference=_reference,
    derivative=Derivative(vjp=_vjp, tangent=_tangent, linearize=_linearize, residuals=f"{_OPERANDS}, {_GRADIENTS}"),
)
