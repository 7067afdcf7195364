"""The summed cross entropy of rows and its gradients, in chunks of rows whose logits exist one after the other."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import lowering
from jaxops._checks.dtypes import accumulation_dtype
from jaxops._primitive.derivative import Arrays
from jaxops._primitive.sharding import varying_with
from jaxops.linear_cross_entropy import cpu_chunks, fixed_reference
from jaxops.linear_cross_entropy.live_rows import AtOnce, LiveRows, filler, live_rows, rows_where
from jaxops.linear_cross_entropy.logits import (
    SKIPPED,
    Needs,
    RowStatistics,
    RowWeights,
    Targets,
    broadcast_rows,
    cotangent_terms,
    cross_entropy_terms,
    is_present,
    kept_gradient_dtype,
    linear_gradients,
    linear_logits,
    metrics_of,
    row_statistics,
    target_total,
    zero_unless,
)
from jaxops.linear_cross_entropy.row_chunks import SMALL_LOGITS, default_chunk_rows, fold_rows, of_all_devices


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
    return weighted(cross_entropy_terms(rows, target_total), weights)


def weighted(terms: Arrays, weights: RowWeights) -> jax.Array:
    """The loss of each row, from its `cross_entropy_terms`."""
    by_label, by_target, by_square = terms
    return weights.label * by_label + weights.target * by_target + weights.square * by_square


def by_maximum(
    operands: Operands,
    *,
    softcap: float | None,
    chunk_rows: int | None,
    needs: Needs,
    metrics: bool,
    weight_grad_dtype: Any,
) -> Arrays:
    """The loss, its gradients, and `metrics_of` rows; the exponentials of each row have its maximum as a reference."""
    chunk_rows = of_all_devices(chunk_rows or default_chunk_rows(*operands.weight.shape))
    start = _no_sums(operands, needs, weight_grad_dtype)
    has_tiles, of_rows = cpu_chunks.takes_tiles(), operands.of_rows
    live = None
    # Probabilities are too large to be reordered, and metrics are wanted for all rows.
    if not is_present(operands.row_target) and (has_tiles or not metrics):
        live = live_rows(jnp.zeros_like(operands.labels) if metrics else operands.labels, chunk_rows)
    step = functools.partial(_chunk, operands, softcap, needs, metrics)
    if live is None:
        rank, fills = operands.labels.ndim, [*map(filler, of_rows)]
        results, sums = fold_rows(step, start, of_rows, rank, chunk_rows, fills)
    elif has_tiles:
        in_tiles = functools.partial(_in_tiles, operands, softcap, needs, metrics)
        parts = cpu_chunks.parts_at_once(start[1], start[0].dtype, live.chunk_rows, live.chunks)
        at_once = AtOnce(parts, functools.partial(in_tiles, True)) if parts else None
        results, sums = live.map(lambda sums, *rows: in_tiles(False, sums, [rows]), start, of_rows, at_once)
    else:
        results, sums = live.map(step, start, of_rows)
    (x_grad, row_grad, *others), (loss, weight_grad, *sums_by_class) = results, sums
    weight_grad = weight_grad.astype(kept_gradient_dtype(operands.weight.dtype))
    return (loss, x_grad, weight_grad, *sums_by_class, row_grad, *others)


def by_fixed_reference(
    operands: Operands,
    implementation: Callable[..., fixed_reference.Exponentials],
    *,
    softcap: float | None,
    chunk_rows: int | None,
    needs: Needs,
    metrics: bool,
    weight_grad_dtype: Any,
) -> Arrays:
    """The same with references that are known before the logits; see `fixed_reference`."""
    x, weight, bias, labels, shared_target, _, *weights = operands
    start, dtype = _no_sums(operands, needs, weight_grad_dtype), accumulation_dtype(x.dtype)
    chunk_rows = of_all_devices(chunk_rows or fixed_reference.default_chunk_rows(*weight.shape, metrics=metrics))
    shared = fixed_reference.Shared(weight, bias, shared_target, softcap, needs, metrics=metrics)
    step = functools.partial(fixed_reference.chunk_with_gradients, shared, implementation)
    sums = (*start[:3], *(jnp.zeros(shape, dtype) for shape in (x.shape[-1:], ())))
    # Metrics are wanted for all rows.
    live, of_rows = None if metrics else live_rows(labels, chunk_rows), (x, labels, *weights)
    # TPUs take rows faster than they scatter them.
    in_order = live if live is not None and fixed_reference.fuses_here() else None
    if live is None:
        (*results, has_failed), sums = fold_rows(step, sums, of_rows, labels.ndim, chunk_rows, [*map(filler, of_rows)])
    elif in_order is None:
        (*results, has_failed), sums = live.map_in_place(step, sums, of_rows)
    else:
        # Filling the gradient of a large weight with 0 would take as long as hundreds of rows.
        unwritten = tuple(jax.lax.empty(x.shape, x.dtype) for x in sums)
        (*results, has_failed), sums = in_order.map_in_order(step, unwritten, x, (labels, *weights))
    loss, weight_grad, bias_grad = fixed_reference.with_target(shared, sums)
    weight_grad = weight_grad.astype(kept_gradient_dtype(weight.dtype))

    def add_failed(_: Any, carry: tuple[Arrays, jax.Array, Arrays]) -> tuple[Arrays, jax.Array, Arrays]:
        rows, weight_grad, (loss, *others) = carry
        again = functools.partial(_chunk, operands, softcap, needs, metrics)
        # What is added up in another dtype is rounded once, not with each chunk.
        sums = loss, weight_grad if weight_grad.dtype == start[1].dtype else start[1], *others
        # The failed rows are looked for here: sorting all rows takes as long as a product with the first columns.
        compute_again = _computes_again(operands, has_failed, in_order)
        rows, (loss, theirs, *others) = compute_again(again, sums, rows)
        if weight_grad.dtype != theirs.dtype:
            theirs = (weight_grad.astype(theirs.dtype) + theirs).astype(weight_grad.dtype)
        return rows, theirs, (loss, *others)

    row_grad = jnp.zeros((*has_failed.shape, 0), dtype)
    rows = results[0], row_grad, *results[1:]
    # A loop of one step or none, rather than a branch, so that what it leaves alone stays where it is.
    carry = rows, weight_grad, (loss, bias_grad, start[3])
    rows, weight_grad, sums = jax.lax.fori_loop(0, jnp.any(has_failed).astype(jnp.int32), add_failed, carry)
    x_grad, row_grad, *others = rows if in_order is None else in_order.restore_all(rows)
    return (sums[0], x_grad, weight_grad, *sums[1:], row_grad, *others)


def _computes_again(
    operands: Operands, has_failed: jax.Array, in_order: LiveRows | None
) -> Callable[..., tuple[Arrays, Arrays]]:
    """What calls `rows, sums = step(sums, *operands)` for the rows that have failed, and replaces theirs."""
    place = lowering.placement()
    if place is not None and place.is_split:
        # Rows cannot move between devices, so all are taken, and those that count already have no label.
        labels = jnp.where(has_failed, operands.labels, SKIPPED)
        weights = [jnp.where(has_failed, weight, 0) for weight in operands[6:]]
        of_rows = Operands(*operands[:3], labels, *operands[4:6], *weights).of_rows
        chunk_rows = of_all_devices(default_chunk_rows(*operands.weight.shape))

        def take_all(step: Callable[..., Any], sums: Arrays, rows: Arrays) -> tuple[Arrays, Arrays]:
            new, sums = fold_rows(step, sums, of_rows, labels.ndim, chunk_rows, [*map(filler, of_rows)])
            is_new = (has_failed.reshape(*has_failed.shape, *(1,) * (row.ndim - has_failed.ndim)) for row in rows)
            return tuple(map(jnp.where, is_new, new, rows)), sums

        return take_all
    failed = rows_where(has_failed, max(1, SMALL_LOGITS // operands.weight.shape[0]))

    def operands_at(places: jax.Array) -> Arrays:
        if in_order is None:
            return failed.operands_at(places, operands.of_rows)
        places = in_order.order.at[places].get(mode="fill", fill_value=operands.labels.size)
        return in_order.operands_at(places, operands.of_rows)

    return functools.partial(failed.update, operands_at=operands_at)


def _no_sums(operands: Operands, needs: Needs, weight_grad_dtype: Any) -> Arrays:
    """The loss and the gradients of weight, bias and shared target before the first row."""
    x, weight, bias, _, shared_target, *_ = operands
    shapes = (
        (),
        (weight.shape[0] if needs.weight else 0, x.shape[-1]),
        (bias.size if needs.bias else 0,),
        (shared_target.size if needs.shared_target else 0,),
    )
    dtype = accumulation_dtype(x.dtype)
    dtypes = (dtype, weight_grad_dtype, dtype, dtype)
    return varying_with([jnp.zeros(*of) for of in zip(shapes, dtypes, strict=True)], operands)


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
    x = zero_unless(labels != SKIPPED, x)
    logits = linear_logits(x, operands.weight, operands.bias, softcap)
    rows = row_statistics(logits, targets, metrics=metrics)
    terms = cotangent_terms(by, targets, rows)
    gradients = linear_gradients(terms, x, operands.weight, targets, logits, softcap, needs, sums[1])
    return _rows_and_sums(operands, sums, targets, by, rows, gradients, metrics)


def _in_tiles(
    operands: Operands,
    softcap: float | None,
    needs: Needs,
    metrics: bool,
    are_first: bool,
    sums: Arrays,
    parts: Sequence[Arrays],
) -> tuple[Arrays, Arrays]:
    """As `_chunk`, by `cpu_chunks.with_gradients`; each part has what are the last operands there."""
    of_parts = [
        cpu_chunks.Part(
            zero_unless(labels != SKIPPED, x), Targets(labels, operands.shared_target, row_target), RowWeights(*weights)
        )
        for x, labels, row_target, *weights in parts
    ]
    linear = operands.weight, operands.bias, softcap, needs, sums[1]
    statistics, gradients = cpu_chunks.with_gradients(of_parts, *linear, metrics=metrics, are_first=are_first)
    labels, row_target, *weights = (jnp.concatenate(arrays) for arrays in [*zip(*parts, strict=True)][1:])
    rows = RowStatistics(*(jnp.concatenate(arrays) for arrays in zip(*statistics, strict=True)))
    targets = Targets(labels, operands.shared_target, row_target)
    return _rows_and_sums(operands, sums, targets, RowWeights(*weights), rows, gradients, metrics)


def _rows_and_sums(
    operands: Operands,
    sums: Arrays,
    targets: Targets,
    by: RowWeights,
    rows: RowStatistics,
    gradients: tuple[Arrays, Arrays],
    metrics: bool,
) -> tuple[Arrays, Arrays]:
    """What is returned for rows, and the sums with theirs; the gradient of the weight already has the others in it."""
    (x_grad, row_grad), (weight_grad, bias_grad, shared_grad) = gradients
    total = target_total(targets, rows.max_logit)
    # A target weight also counts in the total, which multiplies log sum exp.
    by_total = by.target * rows.log_sum_exp
    row_grad = row_grad + broadcast_rows(by_total)
    loss = jnp.sum(row_losses(rows, total, by))
    others = (loss, bias_grad, shared_grad + jnp.sum(by_total))
    loss, bias_grad, shared_grad = (a + b for a, b in zip((sums[0], *sums[2:]), others, strict=True))
    x_grad = x_grad.astype(kept_gradient_dtype(operands.x.dtype))
    of_rows = x_grad, row_grad, *cross_entropy_terms(rows, total), *metrics_of(rows, metrics)
    return of_rows, (loss, weight_grad, bias_grad, shared_grad)
