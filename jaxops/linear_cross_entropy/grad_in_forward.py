"""The sum of cross entropies over rows, differentiated while it is computed: three matrix products, chunk by chunk."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxops._derivative import Active, Arrays, Derivative
from jaxops._operator import Operator
from jaxops.linear_cross_entropy import statistics
from jaxops.linear_cross_entropy.logits import (
    Needs,
    RowPull,
    RowStatistics,
    Targets,
    column,
    given,
    linear_gradients,
    linear_logits,
    row_statistics,
)
from jaxops.linear_cross_entropy.row_chunks import map_rows

_OPERANDS = "... h, v h, v, ..., v, ... v, ..., ..., ..."


class RowWeights(NamedTuple):
    """The weights of the three terms in a row's loss: -log p[label], sum_c t_c (-log p_c), and (log sum exp z)^2."""

    label: jax.Array
    target: jax.Array
    square: jax.Array


def row_losses(rows: RowStatistics, target_total: jax.Array, weights: RowWeights) -> jax.Array:
    """The loss of each row, from the statistics of its logits and the sum of its target weights t."""
    by_label, by_target, by_square = _terms(rows, target_total)
    return weights.label * by_label + weights.target * by_target + weights.square * by_square


def target_total(targets: Targets, like: jax.Array) -> jax.Array:
    """The sum of the target weights t of each row; 0 where there are none."""
    if given(targets.row):
        return jnp.sum(targets.row.astype(like.dtype), axis=-1)
    return jnp.broadcast_to(jnp.sum(targets.shared.astype(like.dtype)), like.shape)


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
    """The sum of `row_losses`; operands as in `statistics.linear_row_statistics`.

    It is a plain sum, without the 1 / rows of a mean: the gradients are kept before the loss' own cotangent is known,
    and the factor would push them out of float16's range where they are rounded for the matrix products.
    """
    return _SUM(x, weight, bias, *targets, *weights, softcap=softcap, chunk_rows=chunk_rows)[0]


def _terms(rows: RowStatistics, total: jax.Array) -> Arrays:
    # Differences relative to the row's maximum: a large common offset of the logits costs no digits.
    by_label = rows.log_sum_exp - rows.label_logit
    by_target = total * rows.log_sum_exp - rows.target_logit
    return by_label, by_target, jnp.square(rows.max_logit + rows.log_sum_exp)


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
    def chunk(x: jax.Array, labels: jax.Array, row_target: jax.Array, *weights: jax.Array) -> tuple[Arrays, Arrays]:
        targets = Targets(labels, shared_target, row_target)
        rows = row_statistics(linear_logits(x, weight, bias, softcap), targets, metrics=False)
        return (row_losses(rows, target_total(targets, rows.max_logit), RowWeights(*weights)),), ()

    (losses,), _ = map_rows(chunk, (x, labels, row_target, *weights), x.ndim - 1, chunk_rows)
    return (jnp.sum(losses),)


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
    def chunk(x: jax.Array, labels: jax.Array, row_target: jax.Array, *weights: jax.Array) -> tuple[Arrays, Arrays]:
        targets, by = Targets(labels, shared_target, row_target), RowWeights(*weights)
        logits = linear_logits(x, weight, bias, softcap)
        rows = row_statistics(logits, targets, metrics=False)
        total = target_total(targets, rows.max_logit)
        lse = rows.max_logit + rows.log_sum_exp
        softmax = by.label + by.target * total + 2 * by.square * lse
        pull = RowPull(softmax, None, -by.label, -by.target, rows.max_logit, rows.log_sum_exp)
        (x_grad, row_grad), (weight_grad, bias_grad, shared_grad) = linear_gradients(
            pull, x, weight, targets, logits, softcap, needs
        )
        # A target weight also counts in the total, which multiplies log sum exp.
        by_total = by.target * rows.log_sum_exp
        row_grad, shared_grad = row_grad + column(by_total), shared_grad + jnp.sum(by_total)
        losses = row_losses(rows, total, by)
        return (losses, x_grad, row_grad, *_terms(rows, total)), (weight_grad, bias_grad, shared_grad)

    (losses, x_grad, row_grad, *weights_grads), (weight_grad, bias_grad, shared_grad) = map_rows(
        chunk, (x, labels, row_target, *weights), x.ndim - 1, chunk_rows
    )
    return (jnp.sum(losses), x_grad, weight_grad, bias_grad, shared_grad, row_grad, *weights_grads)


def _linearize(operands: Sequence[jax.Array], active: Active, **params: Any) -> tuple[Arrays, Arrays]:
    before, after = active[: statistics.LABELS], active[statistics.LABELS + 1 : 6]
    loss, *gradients = _SUM_WITH_GRADIENTS(*operands, needs=Needs(*before, *after), **params)
    return (loss,), (*operands, *gradients)


def _active_gradients(residuals: Sequence[jax.Array], active: Active) -> list[tuple[jax.Array, jax.Array]]:
    """Each active operand with its gradient in float32."""
    operands, gradients = list(residuals[: len(active)]), list(residuals[len(active) :])
    gradients.insert(statistics.LABELS, operands[statistics.LABELS])
    return [(x, gradient) for x, gradient, a in zip(operands, gradients, active, strict=True) if a]


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
    check=statistics.check,
    reference=_reference_with_gradients,
)

_SUM = Operator(
    name="linear_cross_entropy_sum",
    signature=f"{_OPERANDS} ->",
    check=statistics.check,
    reference=_reference,
    derivative=Derivative(vjp=_vjp, tangent=_tangent, linearize=_linearize, residuals=f"{_OPERANDS}, {_GRADIENTS}"),
)
