"""The operator for `RowSums` of parts of the columns, and gradients, whose bits depend on nothing but the row."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxops._checks.dtypes import accumulation_dtype
from jaxops._primitive.derivative import Active, Arrays, Derivative
from jaxops._primitive.sharding import laid_out_as, varying_with
from jaxops.linear_cross_entropy.column_tiles import Tile
from jaxops.linear_cross_entropy.logits import (
    CotangentTerms,
    Needs,
    RowSums,
    Targets,
    broadcast_rows,
    linear_gradients,
    linear_logits,
    row_sums,
    scaled,
)
from jaxops.linear_cross_entropy.operator import LABELS, check
from jaxops.linear_cross_entropy.row_blocks import PerDeviceOperator, RowBlocks, scan_blocks

# How many fields of `_GradientRows` have one number for each part.
_PART_FIELDS = 6


def part_sums(
    x: jax.Array,
    weight: jax.Array,
    bias: jax.Array,
    targets: Targets,
    scale: jax.Array,
    *,
    parts: int,
    softcap: float | None,
    metrics: bool,
    axis: Any,
) -> RowSums:
    """The sums (..., parts) of equal parts of the columns; a prediction is a column of its part.

    `parts` is a power of two. `axis` is the mesh axis over which columns are split inside shard_map, or None; the
    gradient of x is summed over it in a fixed order. The others are as in `operator.linear_row_statistics`.
    """
    return RowSums(
        *_PART_SUMS(x, weight, bias, *targets, scale, parts=parts, softcap=softcap, metrics=metrics, axis=axis)
    )


def is_part_of(labels: jax.Array, like: jax.Array, columns: int) -> jax.Array:
    """Whether labels (...) belong to each of the parts (..., parts), which have so many columns."""
    parts = jax.lax.broadcasted_iota(labels.dtype, like.shape, like.ndim - 1)
    return parts == broadcast_rows(labels // columns)


def _reference(
    x: jax.Array,
    weight: jax.Array,
    bias: jax.Array,
    labels: jax.Array,
    shared_target: jax.Array,
    row_target: jax.Array,
    scale: jax.Array,
    *,
    parts: int,
    softcap: float | None,
    metrics: bool,
    axis: Any,
) -> Arrays:
    blocks = RowBlocks(labels.shape)

    def of_group(_: None, group: Arrays) -> tuple[None, Arrays]:
        x, labels, row_target, scale = group

        def of_part(_: None, part: jax.Array) -> tuple[None, Arrays]:
            tile = _tile(part, parts, weight.shape[0])
            weight_part, bias_part, shared_part = map(tile.of, (weight, bias, shared_target))

            def of_block(_: None, block: Arrays, metrics: bool) -> tuple[None, RowSums]:
                x, labels, row_part, scale = block
                logits = scaled(linear_logits(x, weight_part, bias_part, softcap), (scale,))
                return None, row_sums(logits, Targets(labels, shared_part, row_part), metrics=metrics)

            rows = (x, tile.local(labels), tile.of(row_target, row_target.ndim - 1), scale)
            sums: RowSums = scan_blocks(functools.partial(of_block, metrics=False), None, rows)[1]
            if metrics:
                # Apart, as in `_vjp`: a program that uses them must not round the others otherwise.
                more: RowSums = scan_blocks(functools.partial(of_block, metrics=True), None, rows)[1]
                sums = sums._replace(weighted_logit=more.weighted_logit, prediction=more.prediction)
            return None, sums

        return jax.lax.scan(of_part, None, jnp.arange(parts, dtype=jnp.int32))

    rows = tuple(map(blocks.split, (x.astype(weight.dtype), labels, row_target, scale)))
    _, sums = jax.lax.scan(of_group, None, rows)
    return tuple(blocks.join(jnp.moveaxis(part, 1, -1)) for part in sums)


class _GradientRows(NamedTuple):
    """What the gradients of rows are computed from: the cotangents of their `RowSums`, the maximum, and operands."""

    for_sum_exp: jax.Array
    for_label: jax.Array
    for_target: jax.Array
    for_total: jax.Array
    for_weighted: jax.Array
    maximum: jax.Array
    x: jax.Array
    labels: jax.Array
    row_target: jax.Array
    scale: jax.Array
    log_sum_exp: jax.Array

    def of_part(self, part: jax.Array, tile: Tile) -> "_GradientRows":
        """The same, of one part of the columns."""
        chosen = {name: getattr(self, name)[..., part] for name in self._fields[:_PART_FIELDS]}
        row_part = tile.of(self.row_target, self.row_target.ndim - 1)
        return self._replace(**chosen, labels=tile.local(self.labels), row_target=row_part)


def _gradients(
    *operands: jax.Array,
    parts: int,
    softcap: float | None,
    metrics: bool,
    axis: Any,
    needs: Needs,
    needs_scale: bool,
) -> Arrays:
    """The gradients of x, not rounded to its dtype, of weight, bias, shared and row targets, and of the scale.

    Operands are the first fields of `_GradientRows` and those of `_reference`. The last result is as in
    `linear_gradients`.
    """
    *of_parts, x, weight, bias, labels, shared_target, row_target, scale = operands
    columns, dtype, blocks = (weight, bias, shared_target), accumulation_dtype(x.dtype), RowBlocks(labels.shape)
    rows = map(blocks.split, (*of_parts, x.astype(weight.dtype), labels, row_target, scale))
    # Rows that fill up a block get probabilities of 0: their logits are the bias, and exp(bias) alone may overflow.
    log_sum_exp = blocks.split(jnp.zeros_like(scale), jnp.inf)
    gradients = functools.partial(
        _block_gradients, softcap=softcap, metrics=metrics, needs=needs, needs_scale=needs_scale
    )

    def of_group(sums: Arrays, group: Arrays) -> tuple[Arrays, Arrays]:
        rows = _GradientRows(*group)

        def of_part(carry: Arrays, part: jax.Array) -> tuple[Arrays, Arrays]:
            tile = _tile(part, parts, weight.shape[0])
            column_parts = tuple(map(tile.of, columns))
            *sums, row_grad = carry

            def of_block(sums: Arrays, block: Arrays) -> tuple[Arrays, Arrays]:
                of_rows, of_columns = gradients(_GradientRows(*block), *column_parts)
                return tuple(a + b for a, b in zip(sums, of_columns, strict=True)), of_rows

            of_columns, (x_grad, row_part, along) = scan_blocks(
                of_block, tuple(map(tile.of, sums)), rows.of_part(part, tile)
            )
            sums = [tile.put(whole, values) for whole, values in zip(sums, of_columns, strict=True)]
            return (*sums, tile.put(row_grad, row_part, row_grad.ndim - 1)), (x_grad, along)

        row_grad = jnp.zeros_like(rows.row_target if needs.row_target else rows.row_target[..., :0])
        x_grad = jnp.zeros_like(rows.x if needs.x else rows.x[..., :0], dtype)
        *carry, x_grad, along = varying_with((*sums, row_grad, x_grad, jnp.zeros_like(rows.scale)), operands)
        (*sums, row_grad), of_rows = _tree_sum(of_part, tuple(carry), (x_grad, along), 0, parts)
        return tuple(sums), (*of_rows, row_grad)

    needed = needs.weight, needs.bias, needs.shared_target
    zeros = [jnp.zeros_like(array if need else array[:0], dtype) for need, array in zip(needed, columns, strict=True)]
    sums, of_rows = jax.lax.scan(of_group, varying_with(zeros, operands), (*rows, log_sum_exp))
    x_grad, along, row_grad = map(blocks.join, of_rows)
    return (x_grad, *(total.astype(array.dtype) for total, array in zip(sums, columns, strict=True)), row_grad, along)


def _block_gradients(
    rows: _GradientRows,
    weight: jax.Array,
    bias: jax.Array,
    shared_target: jax.Array,
    *,
    softcap: float | None,
    metrics: bool,
    needs: Needs,
    needs_scale: bool,
) -> tuple[Arrays, Arrays]:
    """The gradients ((x, row target, scale), (weight, bias, shared target)) of a block of rows and part of columns."""
    softmax, slope = rows.for_sum_exp, None
    if metrics:
        softmax, slope = rows.for_sum_exp + rows.for_weighted, rows.for_weighted
    terms = CotangentTerms(softmax, slope, rows.for_label, rows.for_target, rows.maximum, rows.log_sum_exp)
    targets = Targets(rows.labels, shared_target, rows.row_target)
    logits = linear_logits(rows.x, weight, bias, softcap)
    arguments = (terms, rows.x, weight, targets, logits, softcap, needs)
    (x_grad, row_grad, along), of_columns = linear_gradients(*arguments, scale=(rows.scale,))
    weight_grad, bias_grad, shared_grad = of_columns
    if needs.row_target:
        row_grad = row_grad + broadcast_rows(rows.for_total)
    if needs.shared_target:
        shared_grad = shared_grad + jnp.sum(rows.for_total)
    along = along if needs_scale else jnp.zeros_like(along)
    return (x_grad, row_grad.astype(rows.row_target.dtype), along), (weight_grad, bias_grad, shared_grad)


def _tile(part: jax.Array, parts: int, columns: int) -> Tile:
    return Tile(1, columns, columns // parts, part * (columns // parts))


def _tree_sum(
    of_part: Callable[[Any, jax.Array], tuple[Any, Arrays]], carry: Any, zeros: Arrays, first: Any, parts: int
) -> tuple[Any, Arrays]:
    """Calls `carry, values = of_part(carry, part)` for each part, and adds the values up as a balanced tree."""
    if parts == 1:
        return of_part(carry, jnp.asarray(first, jnp.int32))

    def half(state: tuple[Any, Arrays], step: jax.Array) -> tuple[tuple[Any, Arrays], None]:
        carry, total = state
        carry, values = _tree_sum(of_part, carry, zeros, first + step * (parts // 2), parts // 2)
        return (carry, tuple(a + b for a, b in zip(total, values, strict=True))), None

    return scan_blocks(half, (carry, zeros), jnp.arange(2, dtype=jnp.int32))[0]


def _added_over_devices(part: jax.Array, axis: Any) -> jax.Array:
    """The sum over devices, added as a balanced tree, on the first device, and zeros on the others.

    Like the gradient of anything that devices share, it is still to be summed over them, which is now exact.
    """
    if axis is None:
        return part
    total = exchanged_sum(part, axis)
    return jnp.where(jax.lax.axis_index(axis) == 0, total, jnp.zeros_like(total))


def exchanged_sum(part: jax.Array, axis: Any) -> jax.Array:
    """The sum over a power of two of devices, on each, added as a balanced tree: pairs, pairs of pairs, and so on."""
    devices, distance = jax.lax.axis_size(axis), 1
    while distance < devices:
        part = part + jax.lax.ppermute(part, axis, [(i, i ^ distance) for i in range(devices)])
        distance *= 2
    return part


def _vjp(residuals: Sequence[jax.Array], cotangents: Sequence[jax.Array], active: Active, **params: Any) -> list[Any]:
    operands, sums = residuals[: len(active)], RowSums(*residuals[len(active) :])
    x, weight, *_, scale = operands
    # The maximum has no derivative, and the prediction no cotangent.
    _, for_sum_exp, for_label, for_target, for_total, for_weighted, _ = cotangents
    of_parts = for_sum_exp, for_label, for_target, for_total, for_weighted, sums.max_logit
    gradients = functools.partial(_PART_GRADIENTS, *of_parts, *operands, **params)
    needs = Needs(active[0], active[1], active[2], False, False)
    x_grad, weight_grad, bias_grad, *others = gradients(needs=needs, needs_scale=False)
    if any(active[LABELS + 1 :]):
        # Computed apart, though from the same logits: in one loop, what else is asked for would change what XLA fuses
        # in the computation of x's gradient, and so how that is rounded.
        needs = Needs(False, False, False, active[LABELS + 1], active[LABELS + 2])
        *_, shared_grad, row_grad, along = gradients(needs=needs, needs_scale=active[-1])
        others = [shared_grad, row_grad, along]
    if active[-1]:
        # As in `operator`, the maximum is added apart, times the sum over columns of the scaled logits' cotangent.
        # On an explicit mesh, labels and scales need not be split as their rows are.
        labels, scale = (laid_out_as(row, jax.typeof(others[-1]).sharding) for row in (operands[LABELS], scale))
        has_label = is_part_of(labels, for_label, weight.shape[0] // params["parts"])
        total = for_sum_exp * sums.sum_exp + for_weighted * (sums.sum_exp + sums.weighted_logit)
        total = total + jnp.where(has_label, for_label, jnp.zeros_like(for_label)) + for_target * sums.target_total
        others[-1] = (others[-1] + jnp.sum(sums.max_logit * total, axis=-1)) / scale
    x_grad = _added_over_devices(x_grad, params["axis"]).astype(x.dtype)
    return [x_grad, weight_grad, bias_grad, None, *others]


_OPERANDS = "... h, v h, v, ..., v, ... v, ..."

_PART_GRADIENTS = PerDeviceOperator(
    name="batch_invariant_sums_backward",
    signature=f"{', '.join(['... p'] * _PART_FIELDS)}, {_OPERANDS} -> ... h, v h, v, v, ... v, ...",
    check=lambda *_, **__: None,
    reference=_gradients,
)

_PART_SUMS = PerDeviceOperator(
    name="batch_invariant_sums",
    signature=f"{_OPERANDS} -> {', '.join(['... p'] * len(RowSums._fields))}",
    check=check,
    reference=_reference,
    derivative=Derivative(vjp=_vjp),
)
