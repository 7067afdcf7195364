"""The logits of a linear layer, what cross entropy needs to know of a row of them, and how a loss pulls on each."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxops._derivative import Arrays


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


def accumulation_dtype(x: Any) -> Any:
    """float32, or float64 for float64."""
    return jnp.float64 if x.dtype == jnp.float64 else jnp.float32


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
    logits = jnp.einsum("...h,vh->...v", x, weight, preferred_element_type=accumulation_dtype(x))
    if given(bias):
        logits = logits + across(bias, logits)
    return logits if softcap is None else softcap * jnp.tanh(logits / softcap)


def row_statistics(logits: jax.Array, targets: Targets, *, metrics: bool) -> RowStatistics:
    """The statistics of rows of logits; `metrics` asks for the last two."""
    maximum = row_max(logits)
    shifted = logits - column(maximum)
    log_sum_exp = jnp.log(jnp.sum(jnp.exp(shifted), axis=-1))
    target_logit = mean_logit = jnp.zeros_like(maximum)
    prediction = jnp.zeros(maximum.shape, jnp.int32)
    if targets.weighted:
        target_logit = jnp.sum(targets.weights(shifted) * shifted, axis=-1)
    if metrics:
        mean_logit = jnp.sum(jnp.exp(shifted - column(log_sum_exp)) * _finite(shifted), axis=-1)
        prediction = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    return RowStatistics(maximum, log_sum_exp, pick(shifted, targets.labels), target_logit, mean_logit, prediction)


def row_max(logits: jax.Array) -> jax.Array:
    """The maximum of each row, without a derivative; 0 where all logits are -inf, where z - m would be NaN."""
    maximum = jax.lax.stop_gradient(jnp.max(logits, axis=-1))
    return jnp.where(maximum == -jnp.inf, jnp.zeros_like(maximum), maximum)


def pick(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """The logit of each row's label; 0 where the label is none of the columns."""
    columns = logits.shape[-1]
    picked = jnp.take_along_axis(logits, column(jnp.clip(labels, 0, columns - 1)), axis=-1)[..., 0]
    return jnp.where((labels >= 0) & (labels < columns), picked, jnp.zeros_like(picked))


def linear_gradients(
    pull: RowPull,
    x: jax.Array,
    weight: jax.Array,
    targets: Targets,
    logits: jax.Array,
    softcap: float | None,
    needs: Needs,
) -> tuple[Arrays, Arrays]:
    """The gradients ((x, row target), (weight, bias, shared target)), accumulated in float32; empty where not needed.

    The cotangent of the logits is rounded to the dtype of x before the matrix products, as the documented operators do:
    16-bit inputs run on 16-bit matrix units. The sum for the bias is taken before.
    """
    dtype, batch = accumulation_dtype(x), tuple(range(x.ndim - 1))
    cotangent = _logits_cotangent(pull, targets, logits)
    if softcap is not None:
        cotangent = cotangent * (1 - jnp.square(logits / softcap))
    rounded = cotangent.astype(x.dtype)
    x_grad = jnp.zeros((*x.shape[:-1], 0), dtype)
    weight_grad = jnp.zeros((0, x.shape[-1]), dtype)
    bias_grad = shared_grad = jnp.zeros((0,), dtype)
    if needs.x:
        x_grad = jnp.einsum("...v,vh->...h", rounded, weight, preferred_element_type=dtype)
    if needs.weight:
        weight_grad = jnp.tensordot(rounded, x, axes=(batch, batch), preferred_element_type=dtype)
    if needs.bias:
        bias_grad = jnp.sum(cotangent, axis=batch)
    target_grad = column(pull.target) * (logits - column(pull.maximum))
    if needs.shared_target:
        shared_grad = jnp.sum(target_grad, axis=batch)
    row_grad = target_grad if needs.row_target else target_grad[..., :0]
    return (x_grad, row_grad), (weight_grad, bias_grad, shared_grad)


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


def _finite(shifted: jax.Array) -> jax.Array:
    """0 for -inf: a column of probability 0 has no part in a mean."""
    return jnp.where(shifted == -jnp.inf, jnp.zeros_like(shifted), shifted)
