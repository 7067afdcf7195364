"""The summed cross entropy of rows and its gradients, in chunks of rows whose logits exist one after the other."""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxops._checks.dtypes import accumulation_dtype
from jaxops._primitive.derivative import Arrays
from jaxops._primitive.sharding import varying_with
from jaxops.linear_cross_entropy import fixed_reference
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


class Operands(NamedTuple):
    """The operands of the sum: those of `operator.linear_row_statistics`, and the three `RowWeights`."""

    x: jax.Array
    weight: jax.Array
    bias: jax.Array
    labels: jax.Array
    shared_target: jax.Array
    row_target: jax.Array
    label_weight: jax.Array
    target_weight: jax.Array
    square_weight: jax.Array

    @property
    def of_rows(self) -> Arrays:
        """Those that have rows."""
        return self.x, self.labels, self.row_target, *self[6:]


def row_losses(rows: RowStatistics, target_total: jax.Array, weights: RowWeights) -> jax.Array:
    """The loss of each row, from the statistics of its logits and the sum of its target weights t."""
    by_label, by_target, by_square = cross_entropy_terms(rows, target_total)
    return weights.label * by_label + weights.target * by_target + weights.square * by_square


def metrics_of(rows: RowStatistics, metrics: bool) -> tuple[jax.Array, jax.Array]:
    """What `RowStatistics` say of rows beside their loss: numbers (..., 3) and predictions (..., 1), or (..., 0)."""
    numbers = jnp.stack([rows.max_logit, rows.log_sum_exp, rows.mean_logit], axis=-1)
    predictions = rows.prediction.astype(jnp.int32)[..., None]
    return (numbers, predictions) if metrics else (numbers[..., :0], predictions[..., :0])


def by_maximum(
    operands: Operands, *, softcap: float | None, chunk_rows: int | None, needs: Needs, metrics: bool
) -> Arrays:
    """The loss, its gradients, and `metrics_of` rows; the exponentials of each row have its maximum as a reference."""
    chunk_rows = chunk_rows or default_chunk_rows(*operands.weight.shape)
    # Probabilities are too large to be reordered, and metrics are wanted for all rows.
    labels = None if is_present(operands.row_target) or metrics else operands.labels
    step = functools.partial(_chunk, operands, softcap, needs, metrics)
    rows, sums = _all_chunks(step, _no_sums(operands, needs), operands.of_rows, labels, chunk_rows)
    x_grad, row_grad, *others = rows
    return (*sums[:1], x_grad, *sums[1:], row_grad, *others)


def by_fixed_reference(
    operands: Operands,
    implementation: Callable[..., fixed_reference.Exponentials],
    *,
    softcap: float | None,
    chunk_rows: int | None,
    needs: Needs,
    metrics: bool,
) -> Arrays:
    """The same with references that are known before the logits; see `fixed_reference`. Metrics it does not have."""
    assert not metrics
    x, weight, bias, labels, shared_target, _, *weights = operands
    start, dtype = _no_sums(operands, needs), accumulation_dtype(x.dtype)
    chunk_rows = chunk_rows or fixed_reference.default_chunk_rows(*weight.shape)
    shared = fixed_reference.Shared(weight, bias, shared_target, softcap, needs)
    step = functools.partial(fixed_reference.chunk_with_gradients, shared, implementation)
    sums = (*start[:3], *(jnp.zeros(shape, dtype) for shape in (x.shape[-1:], ())))
    (*results, has_failed), sums = _all_chunks(step, sums, (x, labels, *weights), labels, chunk_rows)
    sums = (*fixed_reference.with_target(shared, sums), start[3])
    row_grad = jnp.zeros((*labels.shape, 0), dtype)
    failed = rows_where(has_failed, max(1, SMALL_LOGITS // weight.shape[0]))
    again = functools.partial(_chunk, operands, softcap, needs, metrics)
    no_metrics = row_grad, jnp.zeros((*labels.shape, 0), jnp.int32)
    rows = results[0], row_grad, *results[1:], *no_metrics
    (x_grad, _, *others), sums = failed.update(again, sums, rows, operands.of_rows)
    return (*sums[:1], x_grad, *sums[1:], row_grad, *others)


def _no_sums(operands: Operands, needs: Needs) -> Arrays:
    """The loss and the gradients of weight, bias and shared target before the first row."""
    x, weight, bias, _, shared_target, *_ = operands
    shapes = (
        (),
        (weight.shape[0] if needs.weight else 0, x.shape[-1]),
        (bias.size if needs.bias else 0,),
        (shared_target.size if needs.shared_target else 0,),
    )
    return varying_with([jnp.zeros(shape, accumulation_dtype(x.dtype)) for shape in shapes], operands)


def _chunk(
    operands: Operands,
    softcap: float | None,
    needs: Needs,
    metrics: bool,
    sums: Arrays,
    x: jax.Array,
    labels: jax.Array,
    row_target: jax.Array,
    *weights: jax.Array,
) -> tuple[Arrays, Arrays]:
    """The gradients of some rows, and the sums with theirs added to them."""
    targets, by = Targets(labels, operands.shared_target, row_target), RowWeights(*weights)
    logits = linear_logits(x, operands.weight, operands.bias, softcap)
    rows = row_statistics(logits, targets, metrics=metrics)
    total = target_total(targets, rows.max_logit)
    lse = rows.max_logit + rows.log_sum_exp
    softmax = by.label + by.target * total + 2 * by.square * lse
    # Below, logits - maximum is computed again. Without the barrier XLA would keep it next to the logits instead.
    maximum = jax.lax.optimization_barrier(rows.max_logit)
    terms = CotangentTerms(softmax, None, -by.label, -by.target, maximum, rows.log_sum_exp)
    (x_grad, row_grad), (weight_grad, bias_grad, shared_grad) = linear_gradients(
        terms, x, operands.weight, targets, logits, softcap, needs, sums[1]
    )
    # A target weight also counts in the total, which multiplies log sum exp.
    by_total = by.target * rows.log_sum_exp
    row_grad = row_grad + broadcast_rows(by_total)
    loss = jnp.sum(row_losses(rows, total, by))
    others = (loss, bias_grad, shared_grad + jnp.sum(by_total))
    loss, bias_grad, shared_grad = (a + b for a, b in zip((sums[0], *sums[2:]), others, strict=True))
    weights_grads = cross_entropy_terms(rows, total)
    return (x_grad, row_grad, *weights_grads, *metrics_of(rows, metrics)), (loss, weight_grad, bias_grad, shared_grad)


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
