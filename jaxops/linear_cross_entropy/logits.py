"""The logits of a linear layer, what cross entropy needs to know of a row of them, and how a loss pulls on each."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxops._checks.dtypes import accumulation_dtype
from jaxops._primitive.derivative import Arrays
from jaxops.linear_cross_entropy.rounded_products import rounded_products

# The label of a row that does not count. Its x is zero, so that what is known of it needs no matrix product.
SKIPPED = -2


class RowStatistics(NamedTuple):
    """What is kept of each row of logits z, relative to its maximum m; m counts as a constant, as it cancels.

    With several shards of the vocabulary each holds the statistics of its own columns.

    Attributes:
      max_logit: m = max z, without a derivative.
      log_sum_exp: log sum exp(z - m).
      label_logit: z[label] - m, or 0 where the label is none of the columns.
      target_logit: sum t (z - m), for the weights t of the columns; 0 without any.
      mean_logit: sum softmax(z) (z - m), on request, else 0.
      prediction: argmax z, on request, else 0.
    """

    max_logit: jax.Array
    log_sum_exp: jax.Array
    label_logit: jax.Array
    target_logit: jax.Array
    mean_logit: jax.Array
    prediction: jax.Array


class Targets(NamedTuple):
    """What a row of logits is compared with: a label, and weights of the columns, shared by all rows or its own."""

    labels: jax.Array
    shared: jax.Array
    row: jax.Array

    @property
    def weighted(self) -> bool:
        """Whether there are weights of the columns."""
        return given(self.shared) or given(self.row)

    def weights(self, like: jax.Array) -> jax.Array:
        """The weights t of the columns for each row of `like`."""
        return self.row.astype(like.dtype) if given(self.row) else across(self.shared, like)


class RowPull(NamedTuple):
    """How a loss pulls on the logits z of each row, whose maximum is m.

    The cotangent of z is softmax(z) (softmax + softmax_slope (z - m)) + label onehot(label) + target t.
    """

    softmax: jax.Array
    softmax_slope: jax.Array | None
    label: jax.Array
    target: jax.Array
    maximum: jax.Array
    log_sum_exp: jax.Array


class Needs(NamedTuple):
    """Which operands a gradient is needed for."""

    x: bool
    weight: bool
    bias: bool
    shared_target: bool
    row_target: bool


def given(operand: Any) -> bool:
    """Whether an optional operand is there: primitives have none, so an empty array stands for one that is missing."""
    return operand.shape[-1] > 0


def column(row_values: jax.Array) -> jax.Array:
    """One value a row, to be combined with rows of logits."""
    return row_values[..., None]


def across(column_values: jax.Array, like: jax.Array) -> jax.Array:
    """One value a column of logits, for every row."""
    return jnp.broadcast_to(column_values.astype(like.dtype), like.shape)


def linear_logits(x: jax.Array, weight: jax.Array, bias: jax.Array, softcap: float | None) -> jax.Array:
    """Computes x weight^T + bias, accumulated and kept in float32; bounded by softcap tanh(z / softcap) if given."""
    logits = jnp.einsum("...h,vh->...v", x, weight, preferred_element_type=accumulation_dtype(x.dtype))
    if given(bias):
        logits = logits + across(bias, logits)
    return _bounded(logits, softcap)


def logits_of_zero(bias: jax.Array, columns: int, softcap: float | None, dtype: Any) -> jax.Array:
    """The logits (V,) where x is zero."""
    return _bounded(bias.astype(dtype), softcap) if given(bias) else jnp.zeros(columns, dtype)


class RowSums(NamedTuple):
    """What `RowStatistics` are made of, for some of the columns: sums, so that those of more columns can be added.

    Attributes:
      max_logit, label_logit, target_logit, prediction: as there. Without columns all are 0, and so is `sum_exp`.
      sum_exp: sum exp(z - m).
      target_total: sum t.
      weighted_logit: sum exp(z - m) (z - m), on request, else 0.
    """

    max_logit: jax.Array
    sum_exp: jax.Array
    label_logit: jax.Array
    target_logit: jax.Array
    target_total: jax.Array
    weighted_logit: jax.Array
    prediction: jax.Array

    @property
    def statistics(self) -> RowStatistics:
        """The statistics of rows that have these columns only."""
        mean_logit = self.weighted_logit / jnp.where(self.sum_exp == 0, jnp.ones_like(self.sum_exp), self.sum_exp)
        log_sum_exp = jnp.log(self.sum_exp)
        return RowStatistics(
            self.max_logit, log_sum_exp, self.label_logit, self.target_logit, mean_logit, self.prediction
        )


def no_columns(rows: tuple[int, ...], dtype: Any) -> RowSums:
    """The sums of so many rows of no columns."""
    zeros = jnp.zeros(rows, dtype)
    return RowSums(zeros, zeros, zeros, zeros, zeros, zeros, jnp.zeros(rows, jnp.int32))


def row_sums(logits: jax.Array, targets: Targets, *, metrics: bool) -> RowSums:
    """The sums of rows of logits; `metrics` asks for the last two."""
    maximum = row_max(logits)
    shifted = logits - column(maximum)
    exp = jnp.exp(shifted)
    target_logit = weighted_logit = jnp.zeros_like(maximum)
    prediction = jnp.zeros(maximum.shape, jnp.int32)
    if targets.weighted:
        target_logit = jnp.sum(targets.weights(shifted) * shifted, axis=-1)
    if metrics:
        weighted_logit = jnp.sum(exp * _finite(shifted), axis=-1)
        prediction = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    total = target_total(targets, maximum)
    # Picked before the maximum is subtracted: with two uses, the difference would be another array of logits.
    label_logit = pick(logits, targets.labels, maximum)
    return RowSums(maximum, jnp.sum(exp, axis=-1), label_logit, target_logit, total, weighted_logit, prediction)


def row_statistics(logits: jax.Array, targets: Targets, *, metrics: bool) -> RowStatistics:
    """The statistics of rows of logits; `metrics` asks for the last two."""
    return row_sums(logits, targets, metrics=metrics).statistics


def target_total(targets: Targets, like: jax.Array) -> jax.Array:
    """The sum of the target weights t of each row; 0 where there are none."""
    if given(targets.row):
        return jnp.sum(targets.row.astype(like.dtype), axis=-1)
    return jnp.broadcast_to(jnp.sum(targets.shared.astype(like.dtype)), like.shape)


def added(left: RowSums, right: RowSums, has_label: tuple[jax.Array, jax.Array]) -> RowSums:
    """The sums of the columns of both; `has_label` says of which of them each row's label is."""
    parts = left, right
    # Without a finite logit the maximum is called 0.
    maxima = [jnp.where(part.sum_exp == 0, -jnp.inf, part.max_logit) for part in parts]
    maximum = jax.lax.stop_gradient(jnp.maximum(*maxima))
    maximum = jnp.where(maximum == -jnp.inf, jnp.zeros_like(maximum), maximum)
    shifts = [
        jax.lax.stop_gradient(jnp.where(part.sum_exp == 0, jnp.zeros_like(maximum), part.max_logit - maximum))
        for part in parts
    ]
    scales = [jnp.exp(shift) for shift in shifts]
    label_logit, target_logit, weighted_logit = zip(
        *(
            (
                jnp.where(has, part.label_logit + shift, jnp.zeros_like(shift)),
                part.target_logit + part.target_total * shift,
                scale * (part.weighted_logit + shift * part.sum_exp),
            )
            for part, shift, scale, has in zip(parts, shifts, scales, has_label, strict=True)
        ),
        strict=True,
    )
    first = jnp.minimum(left.prediction, right.prediction)
    best = jnp.where(maxima[0] > maxima[1], left.prediction, right.prediction)
    return RowSums(
        maximum,
        scales[0] * left.sum_exp + scales[1] * right.sum_exp,
        sum(label_logit),
        sum(target_logit),
        left.target_total + right.target_total,
        sum(weighted_logit),
        jnp.where(maxima[0] == maxima[1], first, best),
    )


def row_max(logits: jax.Array) -> jax.Array:
    """The maximum of each row, without a derivative; 0 where all logits are -inf, where z - m would be NaN."""
    maximum = jax.lax.stop_gradient(jnp.max(logits, axis=-1))
    return jnp.where(maximum == -jnp.inf, jnp.zeros_like(maximum), maximum)


def pick(logits: jax.Array, labels: jax.Array, maximum: jax.Array) -> jax.Array:
    """The logit of each row's label, relative to the maximum; 0 where the label is none of the columns."""
    columns = logits.shape[-1]
    picked = jnp.take_along_axis(logits, column(jnp.clip(labels, 0, columns - 1)), axis=-1)[..., 0] - maximum
    return jnp.where((labels >= 0) & (labels < columns), picked, jnp.zeros_like(picked))


def linear_gradients(
    pull: RowPull,
    x: jax.Array,
    weight: jax.Array,
    targets: Targets,
    logits: jax.Array,
    softcap: float | None,
    needs: Needs,
    weight_sum: jax.Array | None = None,
) -> tuple[Arrays, Arrays]:
    """The gradients ((x, row target), (weight, bias, shared target)), accumulated in float32; empty where not needed.

    The weight's is added to `weight_sum`, if there is one.

    The cotangent of the logits is rounded to the dtype of x before the matrix products, as the documented operators do:
    16-bit inputs run on 16-bit matrix units. The sum for the bias is taken before.
    """
    dtype, batch = accumulation_dtype(x.dtype), tuple(range(x.ndim - 1))
    cotangent = _logits_cotangent(pull, targets, logits)
    if softcap is not None:
        cotangent = cotangent * (1 - jnp.square(logits / softcap))
    bound = functools.partial(_cotangent_bound, pull, targets)
    needed = needs.x, needs.weight
    x_grad, weight_grad = rounded_products(needed, cotangent, bound, x, weight, weight_sum)
    bias_grad = shared_grad = jnp.zeros((0,), dtype)
    if needs.bias:
        bias_grad = jnp.sum(cotangent, axis=batch)
    target_grad = column(pull.target) * (logits - column(pull.maximum))
    if needs.shared_target:
        shared_grad = jnp.sum(target_grad, axis=batch)
    row_grad = target_grad if needs.row_target else target_grad[..., :0]
    return (x_grad, row_grad), (weight_grad, bias_grad, shared_grad)


def _cotangent_bound(pull: RowPull, targets: Targets) -> jax.Array:
    """How large the cotangent of each row of logits may be, within a small factor."""
    # exp(-d) d is below 1: a slope counts as what it is.
    slope = jnp.zeros_like(pull.label) if pull.softmax_slope is None else jnp.abs(pull.softmax_slope)
    bound = jnp.abs(pull.softmax) + slope + jnp.abs(pull.label)
    if not targets.weighted:
        return bound
    weights = jnp.abs(targets.row if given(targets.row) else targets.shared)
    return bound + jnp.abs(pull.target) * jnp.max(weights, axis=-1).astype(bound.dtype)


def _logits_cotangent(pull: RowPull, targets: Targets, logits: jax.Array) -> jax.Array:
    shifted = logits - column(pull.maximum)
    scale = column(pull.softmax)
    if pull.softmax_slope is not None:
        scale = scale + column(pull.softmax_slope) * _finite(shifted)
    cotangent = scale * jnp.exp(shifted - column(pull.log_sum_exp))
    # Comparing columns fuses, and leaves a split vocabulary split; a scatter does neither.
    columns = jax.lax.broadcasted_iota(targets.labels.dtype, logits.shape, logits.ndim - 1)
    cotangent = cotangent + jnp.where(columns == column(targets.labels), column(pull.label), jnp.zeros_like(logits))
    return cotangent + column(pull.target) * targets.weights(logits) if targets.weighted else cotangent


def _bounded(logits: jax.Array, softcap: float | None) -> jax.Array:
    return logits if softcap is None else softcap * jnp.tanh(logits / softcap)


def _finite(shifted: jax.Array) -> jax.Array:
    """0 for -inf: a column of probability 0 has no part in a mean."""
    return jnp.where(shifted == -jnp.inf, jnp.zeros_like(shifted), shifted)
