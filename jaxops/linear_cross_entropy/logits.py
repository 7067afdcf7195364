"""The logits of a linear layer, the statistics of their rows for a cross entropy, and the cotangent of the logits."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxops._checks.dtypes import accumulation_dtype
from jaxops._primitive.derivative import Arrays
from jaxops._primitive.sharding import laid_out_as
from jaxops.linear_cross_entropy.rounded_products import rounded_products

# The label of a row that does not count. Its x is zero, so its statistics need no matrix product.
SKIPPED = -2


class RowStatistics(NamedTuple):
    """Statistics of each row of logits z, relative to its maximum m. m counts as a constant, because it cancels.

    If the vocabulary is split, each shard holds the statistics of its own columns.

    Attributes:
      max_logit: m = max z, without a derivative.
      log_sum_exp: log sum exp(z - m).
      label_logit: z[label] - m; 0 if the label is not one of the columns.
      target_logit: sum t (z - m) for the weights t of the columns; 0 without weights.
      mean_logit: sum softmax(z) (z - m) on request, else 0.
      prediction: argmax z on request, else 0.
    """

    max_logit: jax.Array
    log_sum_exp: jax.Array
    label_logit: jax.Array
    target_logit: jax.Array
    mean_logit: jax.Array
    prediction: jax.Array


class Targets(NamedTuple):
    """What a row of logits is compared with: a label, and weights of the columns, shared by all rows or per row."""

    labels: jax.Array
    shared: jax.Array
    row: jax.Array

    @property
    def weighted(self) -> bool:
        """Whether the columns have weights."""
        return is_present(self.shared) or is_present(self.row)

    def weights(self, like: jax.Array) -> jax.Array:
        """The weights t of the columns, for each row of `like`."""
        return self.row.astype(like.dtype) if is_present(self.row) else broadcast_columns(self.shared, like)


class CotangentTerms(NamedTuple):
    """The cotangent of the logits z of each row, by its coefficients; m is the row's maximum.

    The cotangent of z is softmax(z) (softmax + softmax_slope (z - m)) + label onehot(label) + target t.
    """

    softmax: jax.Array
    softmax_slope: jax.Array | None
    label: jax.Array
    target: jax.Array
    maximum: jax.Array
    log_sum_exp: jax.Array


class RowWeights(NamedTuple):
    """The weights of the three terms in a row's loss: -log p[label], sum_c t_c (-log p_c), and (log sum exp z)^2."""

    label: jax.Array
    target: jax.Array
    square: jax.Array


class Needs(NamedTuple):
    """Which operands need a gradient."""

    x: bool
    weight: bool
    bias: bool
    shared_target: bool
    row_target: bool


def is_present(operand: Any) -> bool:
    """Whether an optional operand is present. Primitives take no None, so an empty array stands for a missing one."""
    return operand.shape[-1] > 0


def broadcast_rows(row_values: jax.Array) -> jax.Array:
    """One value per row, with an axis added to broadcast against rows of logits."""
    return row_values[..., None]


def broadcast_columns(column_values: jax.Array, like: jax.Array) -> jax.Array:
    """One value per column of the logits, broadcast to every row."""
    return jnp.broadcast_to(column_values.astype(like.dtype), like.shape)


def linear_logits(x: jax.Array, weight: jax.Array, bias: jax.Array, softcap: float | None) -> jax.Array:
    """Computes x weight^T + bias, accumulated and kept in float32; with a softcap, softcap tanh(z / softcap)."""
    logits = jnp.einsum("...h,vh->...v", x, weight, preferred_element_type=accumulation_dtype(x.dtype))
    if is_present(bias):
        logits = logits + broadcast_columns(bias, logits)
    return _bounded(logits, softcap)


def scaled(logits: jax.Array, scale: Arrays) -> jax.Array:
    """Logits times the scale of their row, (...); `scale` has one entry, or none for 1."""
    if not scale:
        return logits
    # A forbidden column stays one; in forward mode, the scale's tangent times -inf would be NaN.
    return jnp.where(logits == -jnp.inf, logits, broadcast_rows(scale[0]) * logits)


def logits_of_zero(bias: jax.Array, columns: int, softcap: float | None, dtype: Any) -> jax.Array:
    """The logits (V,) of x = 0."""
    return _bounded(bias.astype(dtype), softcap) if is_present(bias) else jnp.zeros(columns, dtype)


class RowSums(NamedTuple):
    """The sums behind `RowStatistics`, over some of the columns, so that sums of more columns can be added.

    Attributes:
      max_logit, label_logit, target_logit, prediction: as there. Without columns all are 0, and so is `sum_exp`.
      sum_exp: sum exp(z - m).
      target_total: sum t.
      weighted_logit: sum exp(z - m) (z - m) on request, else 0.
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
        """The statistics of rows that consist of these columns alone."""
        mean_logit = self.weighted_logit / jnp.where(self.sum_exp == 0, jnp.ones_like(self.sum_exp), self.sum_exp)
        log_sum_exp = jnp.log(self.sum_exp)
        return RowStatistics(
            self.max_logit, log_sum_exp, self.label_logit, self.target_logit, mean_logit, self.prediction
        )


def no_columns(rows: tuple[int, ...], dtype: Any) -> RowSums:
    """The sums over no columns, for rows of this shape."""
    zeros = jnp.zeros(rows, dtype)
    return RowSums(zeros, zeros, zeros, zeros, zeros, zeros, jnp.zeros(rows, jnp.int32))


def row_sums(logits: jax.Array, targets: Targets, *, metrics: bool) -> RowSums:
    """The sums of rows of logits; `metrics` asks for the last two."""
    maximum = row_max(logits)
    shifted = logits - broadcast_rows(maximum)
    exp = jnp.exp(shifted)
    target_logit = weighted_logit = jnp.zeros_like(maximum)
    prediction = jnp.zeros(maximum.shape, jnp.int32)
    if targets.weighted:
        target_logit = jnp.sum(targets.weights(shifted) * shifted, axis=-1)
    if metrics:
        weighted_logit = jnp.sum(exp * finite(shifted), axis=-1)
        prediction = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    total = target_total(targets, maximum)
    # Picked before the maximum is subtracted: with two uses, the difference would be one more array of logits.
    label_logit = pick(logits, targets.labels, maximum)
    return RowSums(maximum, jnp.sum(exp, axis=-1), label_logit, target_logit, total, weighted_logit, prediction)


def row_statistics(logits: jax.Array, targets: Targets, *, metrics: bool) -> RowStatistics:
    """The statistics of rows of logits; `metrics` asks for the last two."""
    return row_sums(logits, targets, metrics=metrics).statistics


def metrics_of(rows: RowStatistics, metrics: bool) -> tuple[jax.Array, jax.Array]:
    """What `RowStatistics` say of rows beside their loss: numbers (..., 3) and predictions (..., 1), or (..., 0)."""
    numbers = jnp.stack([rows.max_logit, rows.log_sum_exp, rows.mean_logit], axis=-1)
    predictions = rows.prediction.astype(jnp.int32)[..., None]
    return (numbers, predictions) if metrics else (numbers[..., :0], predictions[..., :0])


def target_total(targets: Targets, like: jax.Array) -> jax.Array:
    """The sum of each row's target weights t; 0 without weights."""
    if is_present(targets.row):
        return jnp.sum(targets.row.astype(like.dtype), axis=-1)
    return jnp.broadcast_to(jnp.sum(targets.shared.astype(like.dtype)), like.shape)


def added(left: RowSums, right: RowSums, has_label: tuple[jax.Array, jax.Array]) -> RowSums:
    """The sums over the columns of both; `has_label` says for each of the two whether it holds the row's label."""
    parts = left, right
    # A part without a finite logit has 0 as its maximum.
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


def cross_entropy_terms(rows: RowStatistics, total: jax.Array) -> Arrays:
    """The three terms of a row's loss, before they are weighted; `total` is the sum of its target weights."""
    # Differences are relative to the row's maximum, so a large common offset of the logits costs no digits.
    by_label = rows.log_sum_exp - rows.label_logit
    by_target = total * rows.log_sum_exp - rows.target_logit
    return by_label, by_target, jnp.square(rows.max_logit + rows.log_sum_exp)


def cotangent_terms(by: RowWeights, targets: Targets, rows: RowStatistics) -> CotangentTerms:
    """The cotangent of the logits of rows whose weighted losses are summed."""
    lse = rows.max_logit + rows.log_sum_exp
    softmax = by.label + by.target * target_total(targets, rows.max_logit) + 2 * by.square * lse
    # With these, logits - maximum is computed again. Without the barrier XLA would keep it next to the logits instead.
    maximum = jax.lax.optimization_barrier(rows.max_logit)
    return CotangentTerms(softmax, None, -by.label, -by.target, maximum, rows.log_sum_exp)


def row_max(logits: jax.Array) -> jax.Array:
    """The maximum of each row, without a derivative; 0 if all logits are -inf, because z - m would be NaN."""
    maximum = jax.lax.stop_gradient(jnp.max(logits, axis=-1))
    return jnp.where(maximum == -jnp.inf, jnp.zeros_like(maximum), maximum)


def pick(logits: jax.Array, labels: jax.Array, maximum: jax.Array) -> jax.Array:
    """The logit of each row's label, relative to the maximum; 0 if the label is not one of the columns."""
    columns = logits.shape[-1]
    picked = jnp.take_along_axis(logits, broadcast_rows(jnp.clip(labels, 0, columns - 1)), axis=-1)[..., 0] - maximum
    return jnp.where((labels >= 0) & (labels < columns), picked, jnp.zeros_like(picked))


def zero_unless(live: jax.Array, x: jax.Array) -> jax.Array:
    """The rows of x (..., H) that are live, and zeros for the others."""
    is_live = broadcast_rows(live)
    if is_live.shape == x.shape:  # a single feature: nothing is broadcast, so an explicit mesh wants one layout
        is_live = laid_out_as(is_live, jax.typeof(x).sharding)
    return jnp.where(is_live, x, jnp.zeros_like(x))


def kept_gradient_dtype(dtype: Any) -> Any:
    """The dtype in which a gradient of x or weight is kept until the loss's cotangent multiplies it.

    An unscaled gradient fits bfloat16's range but not float16's, and a cotangent of 1 does not round it again.
    """
    return dtype if dtype == jnp.bfloat16 else accumulation_dtype(dtype)


def linear_gradients(
    terms: CotangentTerms,
    x: jax.Array,
    weight: jax.Array,
    targets: Targets,
    logits: jax.Array,
    softcap: float | None,
    needs: Needs,
    weight_sum: jax.Array | None = None,
    scale: Arrays = (),
) -> tuple[Arrays, Arrays]:
    """The gradients ((x, row target), (weight, bias, shared target)), accumulated in float32; empty if not needed.

    The weight gradient is added to `weight_sum`, if there is one. `logits` are those before they are `scaled`. With a
    scale, the first tuple also has the sum over columns of the scaled logits' cotangent times (logits - maximum).

    The cotangent of the logits is rounded to the dtype of x before the matrix products, as in the documented operators,
    so that 16-bit inputs run on 16-bit matrix units. The sum for the bias is taken before.
    """
    dtype, batch = accumulation_dtype(x.dtype), tuple(range(x.ndim - 1))
    bounded, logits = logits, scaled(logits, scale)
    cotangent = _logits_cotangent(terms, targets, logits)
    along_logits = tuple(jnp.sum(cotangent * finite(logits - broadcast_rows(terms.maximum)), axis=-1) for _ in scale)
    for factor in scale:
        cotangent = broadcast_rows(factor) * cotangent
    if softcap is not None:
        cotangent = cotangent * (1 - jnp.square(bounded / softcap))
    bound = functools.partial(_cotangent_bound, terms, targets, scale)
    needed = needs.x, needs.weight
    x_grad, weight_grad = rounded_products(needed, cotangent, bound, x, weight, weight_sum)
    bias_grad = shared_grad = jnp.zeros((0,), dtype)
    if needs.bias:
        bias_grad = jnp.sum(cotangent, axis=batch)
    target_grad = broadcast_rows(terms.target) * (logits - broadcast_rows(terms.maximum))
    if needs.shared_target:
        shared_grad = jnp.sum(target_grad, axis=batch)
    row_grad = target_grad if needs.row_target else target_grad[..., :0]
    return (x_grad, row_grad, *along_logits), (weight_grad, bias_grad, shared_grad)


def _cotangent_bound(terms: CotangentTerms, targets: Targets, scale: Arrays) -> jax.Array:
    """An upper bound for the cotangent of each row of logits, within a small factor."""
    # exp(-d) d is below 1, so the slope itself bounds its term.
    slope = jnp.zeros_like(terms.label) if terms.softmax_slope is None else jnp.abs(terms.softmax_slope)
    bound = jnp.abs(terms.softmax) + slope + jnp.abs(terms.label)
    if targets.weighted:
        weights = jnp.abs(targets.row if is_present(targets.row) else targets.shared)
        bound = bound + jnp.abs(terms.target) * jnp.max(weights, axis=-1).astype(bound.dtype)
    for factor in scale:
        bound = jnp.abs(factor) * bound
    return bound


def _logits_cotangent(terms: CotangentTerms, targets: Targets, logits: jax.Array) -> jax.Array:
    shifted = logits - broadcast_rows(terms.maximum)
    scale = broadcast_rows(terms.softmax)
    if terms.softmax_slope is not None:
        scale = scale + broadcast_rows(terms.softmax_slope) * finite(shifted)
    cotangent = scale * jnp.exp(shifted - broadcast_rows(terms.log_sum_exp))
    # A comparison of columns fuses and leaves a split vocabulary split; a scatter does neither.
    columns = jax.lax.broadcasted_iota(targets.labels.dtype, logits.shape, logits.ndim - 1)
    cotangent = cotangent + jnp.where(
        columns == broadcast_rows(targets.labels), broadcast_rows(terms.label), jnp.zeros_like(logits)
    )
    return cotangent + broadcast_rows(terms.target) * targets.weights(logits) if targets.weighted else cotangent


def _bounded(logits: jax.Array, softcap: float | None) -> jax.Array:
    return logits if softcap is None else softcap * jnp.tanh(logits / softcap)


def finite(shifted: jax.Array) -> jax.Array:
    """`shifted`, with 0 for -inf: a column of probability 0 has no part in a mean."""
    return jnp.where(shifted == -jnp.inf, jnp.zeros_like(shifted), shifted)
