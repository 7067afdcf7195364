"""Losses and statistics of rows whose bits do not depend on the batch, the row's position, chunks or the mesh.

Every row is computed in a block of a fixed number of rows (`row_blocks`), for one part of the vocabulary after the
other. There are as many parts whatever the mesh, and devices that share the vocabulary have whole parts. Sums over the
parts are added in a fixed order: those of the statistics are gathered first, and the gradient of x is added as a
balanced tree, and each device computes one of its branches.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.export
import jax.numpy as jnp

import lowering
from jaxops._checks.dtypes import accumulation_dtype
from jaxops._checks.errors import require
from jaxops._primitive.derivative import Active, Arrays, Derivative
from jaxops._primitive.operator import Operator
from jaxops._primitive.sharding import tracks_varying_axes
from jaxops.linear_cross_entropy.chunk_gradients import row_losses
from jaxops.linear_cross_entropy.invariant_sums import exchanged_sum, is_part_of, part_sums
from jaxops.linear_cross_entropy.logits import RowStatistics, RowSums, RowWeights, Targets, broadcast_rows
from jaxops.linear_cross_entropy.row_blocks import PerDeviceOperator, map_blocks
from jaxops.linear_cross_entropy.vocabulary import Vocabulary

INVARIANT_STRATEGIES = ("auto", "recompute")
# A vocabulary may lie on up to this many devices.
_MOST_PARTS = 16


def invariant_losses(
    operator: str,
    x: jax.Array,
    weight: jax.Array,
    bias: jax.Array,
    targets: Targets,
    weights: RowWeights,
    labels: jax.Array,
    vocabulary: Vocabulary,
    *,
    softcap: float | None,
    metrics: bool,
    scale: jax.Array | None = None,
) -> tuple[jax.Array, RowStatistics]:
    """The `row_losses` and the statistics of rows over the whole vocabulary.

    Operands are as in `operator.linear_row_statistics`; `labels` count all classes. The operator is for messages.
    """
    is_known = not any(map(jax.export.is_symbolic_dim, (*labels.shape, *weight.shape)))
    require(is_known, operator, "batch_invariant", "be False where sizes are symbolic", True)
    parts, devices = math.gcd(vocabulary.classes, _MOST_PARTS), vocabulary.classes // vocabulary.columns
    rule = f"have a size that divides {parts}, the number of parts that batch_invariant cuts the vocabulary into"
    require(parts % devices == 0, operator, "vocab_axis", rule, devices)
    lowering.note(f"{operator}: strategy recompute, in blocks of rows, as batch_invariant is set")
    scale = jnp.ones_like(weights.label) if scale is None else scale
    axis = vocabulary.axis
    operands = (x, weight, bias, targets, scale)
    sums = part_sums(*operands, parts=parts // devices, softcap=softcap, metrics=metrics, axis=axis)
    if axis is not None:
        sums = RowSums(*_GATHERED(*sums, axis=axis))
    sums = sums._replace(max_logit=jax.lax.stop_gradient(sums.max_logit))
    loss, *rows = _LOSSES(*sums, labels, *weights, columns=vocabulary.classes // parts)
    return loss, RowStatistics(*rows)


def invariant_smoothing(probabilities: jax.Array, smoothing: float, classes: int) -> jax.Array:
    """Label probabilities (..., V), smoothed; in blocks as well, as how XLA rounds depends on what it fuses."""
    dtype = accumulation_dtype(probabilities.dtype)
    return _SMOOTHED(probabilities.astype(dtype), smoothing=smoothing, share=smoothing / classes)[0]


def _smoothed(probabilities: jax.Array, *, smoothing: float, share: float) -> Arrays:
    def of_block(probabilities: jax.Array) -> Arrays:
        return ((1 - smoothing) * probabilities + share,)

    return map_blocks(of_block, probabilities.shape[:-1], [probabilities])


def _gather(*of_device: jax.Array, axis: Any) -> Arrays:
    """The parts (..., p) of all devices, in order."""
    # A sum with zeros is exact, and JAX knows that its result is the same on all devices.
    is_here = jnp.arange(jax.lax.axis_size(axis))[:, None] == jax.lax.axis_index(axis)
    placed = [jnp.where(is_here, x[..., None, :], jnp.zeros_like(x[..., None, :])) for x in of_device]
    return tuple(x.reshape(*x.shape[:-2], -1) for x in jax.lax.psum(placed, axis))


def _vjp_of_gather(
    residuals: Sequence[jax.Array], cotangents: Sequence[jax.Array], active: Active, *, axis: Any
) -> list[Any]:
    if not tracks_varying_axes(axis):
        # Each device has a share of the cotangent, and the sum of equal shares is exact only in this order.
        cotangents = [None if x is None else exchanged_sum(x, axis) for x in cotangents]
    here = jax.lax.axis_index(axis)

    def own(x: jax.Array) -> jax.Array:
        by_device = x.reshape(*x.shape[:-1], jax.lax.axis_size(axis), -1)
        return jax.lax.dynamic_index_in_dim(by_device, here, x.ndim - 1, keepdims=False)

    return [None if x is None else own(x) for x in cotangents]


def _losses(*operands: jax.Array, columns: int) -> Arrays:
    """The losses and `RowStatistics` of whole rows, from the `RowSums` (..., p) of parts of so many columns.

    The other operands are labels, which count all classes, and `RowWeights`.
    """

    def results(chosen: slice) -> Arrays:
        def of_block(*block: jax.Array) -> Arrays:
            return _block_losses(*block, columns=columns)[chosen]

        return map_blocks(of_block, operands[_LABELS].shape, operands)

    # The loss, what it is made of, and what only metrics need: apart, as in `invariant_sums`.
    return *results(slice(1)), *results(slice(1, -2)), *results(slice(-2, None))


def _block_losses(*operands: jax.Array, columns: int) -> Arrays:
    sums, labels, weights = RowSums(*operands[:_LABELS]), operands[_LABELS], RowWeights(*operands[_LABELS + 1 :])
    zeros = jnp.zeros_like(sums.sum_exp)
    # A part without a finite logit has 0 as its maximum.
    is_empty = sums.sum_exp == 0
    maxima = jnp.where(is_empty, jnp.full_like(zeros, -jnp.inf), sums.max_logit)
    largest = jnp.max(maxima, axis=-1)
    maximum = jnp.where(largest == -jnp.inf, jnp.zeros_like(largest), largest)
    shift = jnp.where(is_empty, zeros, maxima - broadcast_rows(maximum))
    share = jnp.exp(shift)
    sum_exp = jnp.sum(share * sums.sum_exp, axis=-1)
    divisor = jnp.where(sum_exp == 0, jnp.ones_like(sum_exp), sum_exp)
    label_logits = jnp.where(is_part_of(labels, zeros, columns), sums.label_logit + shift, zeros)
    firsts = columns * jax.lax.broadcasted_iota(jnp.int32, zeros.shape, zeros.ndim - 1)
    is_best = maxima == broadcast_rows(largest)
    rows = RowStatistics(
        maximum,
        jnp.where(sum_exp == 0, jnp.full_like(sum_exp, -jnp.inf), jnp.log(divisor)),
        jnp.sum(label_logits, axis=-1),
        jnp.sum(sums.target_logit + sums.target_total * shift, axis=-1),
        jnp.sum(share * (sums.weighted_logit + shift * sums.sum_exp), axis=-1) / divisor,
        jnp.min(jnp.where(is_best, firsts + sums.prediction, jnp.iinfo(jnp.int32).max), axis=-1),
    )
    return row_losses(rows, jnp.sum(sums.target_total, axis=-1), weights), *rows


def _loss_gradients(*operands: jax.Array, columns: int, varying: tuple[int, ...]) -> Arrays:
    """The gradients of some operands of `_losses`, whose cotangents, of results that have them, come first."""

    def of_block(*block: jax.Array) -> Arrays:
        cotangents, operands = block[: len(_WITH_COTANGENT)], block[len(_WITH_COTANGENT) :]

        def results(*replaced: jax.Array) -> Arrays:
            changed = dict(zip(varying, replaced, strict=True))
            results = _block_losses(*(changed.get(i, x) for i, x in enumerate(operands)), columns=columns)
            return tuple(results[i] for i in _WITH_COTANGENT)

        return tuple(jax.vjp(results, *(operands[i] for i in varying))[1](cotangents))

    return map_blocks(of_block, operands[0].shape, operands)


def _vjp_of_losses(
    residuals: Sequence[jax.Array], cotangents: Sequence[jax.Array], active: Active, **params: Any
) -> list[Any]:
    # The maximum, the second result, has no derivative, and the prediction no cotangent.
    for_loss, _, *for_statistics, _ = cotangents
    operands = (for_loss, *for_statistics, *residuals[: len(active)])
    gradients = dict(zip(_OF_LOGITS, _LOSS_GRADIENTS(*operands, **params), strict=True))
    if any(active[i] for i in _OF_WEIGHTS):
        # Apart, for the same reason as in `invariant_sums`.
        gradients |= zip(_OF_WEIGHTS, _WEIGHT_GRADIENTS(*operands, **params), strict=True)
    return [gradients.get(i) for i in range(len(active))]


_LABELS = len(RowSums._fields)
# The operands of `_losses` through which it depends on x, and the others that have a derivative.
_OF_LOGITS = (1, 2, 3, 5)
_OF_WEIGHTS = (4, 8, 9, 10)
# The results that have a derivative: all but the maximum and the prediction.
_WITH_COTANGENT = (0, 2, 3, 4, 5)

_SUMS = ", ".join(["... p"] * len(RowSums._fields))
_OPERANDS = f"{_SUMS}, ..., ..., ..., ..."
_COTANGENTS = "..., ..., ..., ..., ..."

_SMOOTHED = PerDeviceOperator(
    name="batch_invariant_smoothing",
    signature="... v -> ... v",
    check=lambda *_, **__: None,
    reference=_smoothed,
)

_GATHERED = Operator(
    name="batch_invariant_gather",
    signature=f"{_SUMS} -> {_SUMS.replace('p', 'q')}",
    check=lambda *_, **__: None,
    reference=_gather,
    derivative=Derivative(vjp=_vjp_of_gather),
)

_LOSS_GRADIENTS = PerDeviceOperator(
    name="batch_invariant_losses_backward",
    signature=f"{_COTANGENTS}, {_OPERANDS} -> ... p, ... p, ... p, ... p",
    check=lambda *_, **__: None,
    reference=functools.partial(_loss_gradients, varying=_OF_LOGITS),
)

_WEIGHT_GRADIENTS = PerDeviceOperator(
    name="batch_invariant_weights_backward",
    signature=f"{_COTANGENTS}, {_OPERANDS} -> ... p, ..., ..., ...",
    check=lambda *_, **__: None,
    reference=functools.partial(_loss_gradients, varying=_OF_WEIGHTS),
)

_LOSSES = PerDeviceOperator(
    name="batch_invariant_losses",
    signature=f"{_OPERANDS} -> ..., ..., ..., ..., ..., ..., ...",
    check=lambda *_, **__: None,
    reference=_losses,
    derivative=Derivative(vjp=_vjp_of_losses),
)
