"""The summed cross entropy of a chunk of rows with its gradients, where every exponential has a reference fixed before.

With the maximum of each row, exp(z - max) needs all logits z of the row first: they are written, and read again. Here
each row has a reference r that is known before z: the larger of its label's logit and of its first columns'. So

    P = exp(z - r), in the operands' dtype

is elementwise in z, a compiler or a kernel fuses it into the product that makes z, and the logits never exist in
float32. Row sums are taken before P is rounded. With total = sum P + exp(z_label - r), the cotangent of z off the label
is s P, where s = coefficient / total is one number for each row, so

    x_grad = s (P weight) + k weight[label],        weight_grad = C^T (s x)

C is P with k / s at the label, put in while the product reads P. k, where p_label - 1 cancels, is float32.

P is above 1 where a logit is above r. Rows in which it comes near the end of float32's range count as nothing here, and
are computed again with their own maximum.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import lowering
from jaxops._checks.dtypes import accumulation_dtype
from jaxops._primitive.derivative import Arrays
from jaxops.linear_cross_entropy import row_chunks
from jaxops.linear_cross_entropy.column_tiles import add_product
from jaxops.linear_cross_entropy.logits import (
    SKIPPED,
    Needs,
    RowStatistics,
    RowWeights,
    broadcast_columns,
    broadcast_rows,
    cross_entropy_terms,
    finite,
    is_present,
    kept_gradient_dtype,
    linear_logits,
    metrics_of,
    zero_unless,
)

# Here XLA fuses what is elementwise into a product. For CPUs and GPUs it writes the logits first, in float32.
_FUSING_PLATFORMS = ("tpu",)
_MOST_EXPONENTIALS = 2**28
_FIRST_COLUMNS = 256  # their maximum is below that of 128,000 by some 1.7 standard deviations
# exp(60) is 1e26: as far from float32's 3e38 as a product over many columns can need.
MOST_EXCESS = 60.0


def fuses_here() -> bool:
    """Whether what is lowered now is for a place whose compiler fuses the exponentials into the product."""
    place = lowering.placement()
    return place is not None and place.platform in _FUSING_PLATFORMS


def refusal(
    x: Any, weight: Any, shared_target: Any, row_target: Any, softcap: float | None, needs: Needs
) -> str | None:
    """Why rows of these operands cannot have a fixed reference, if so."""
    if any(map(jax.export.is_symbolic_dim, (*x.shape, *weight.shape))):
        return "rows that have failed are taken in chunks of a known size"
    if jnp.dtype(x.dtype) == jnp.float16:
        return "float16 cannot hold exponentials above their reference"
    if row_target.shape[-1] or needs.shared_target:
        return "probabilities, and a gradient of class weights, need the logits themselves, column by column"
    if softcap is not None and shared_target.shape[0]:
        return "label smoothing of bounded logits needs the logits themselves, column by column"
    return None


def default_chunk_rows(classes: int, features: int, *, metrics: bool = False) -> int:
    """How many rows a chunk has: as many as have 2^28 exponentials, 0.5 GiB in bfloat16.

    With metrics, half as many, as their logits take 0.5 GiB in float32.
    """
    rows = _MOST_EXPONENTIALS // max(1, classes) // (2 if metrics else 1)
    return max(row_chunks.default_chunk_rows(classes, features), rows)


def chunk_rows_on(hardware: Any, classes: int, features: int) -> int:
    """The same for a chip: more, if its memory would not keep up with adding chunks to the float32 sum.

    The sum is read and written, 8 V H bytes beside 2 R V H floating-point operations for R rows. With at most H rows,
    exponentials take no more memory than the gradient of the weight, whose place they have until it is written.
    """
    rows = default_chunk_rows(classes, features)
    rates = dict(hardware.matmul_flops_per_s)
    if not hardware.memory_bytes_per_s or "bfloat16" not in rates:
        return rows
    balanced = 8 * rates["bfloat16"] / hardware.memory_bytes_per_s  # twice as many rows as take equal times
    return max(rows, min(2 ** int(math.log2(balanced)), features))


class Shared:
    """What all chunks share: the operands without rows, and what is computed from them once."""

    def __init__(
        self,
        weight: jax.Array,
        bias: jax.Array,
        target: jax.Array,
        softcap: float | None,
        needs: Needs,
        *,
        metrics: bool = False,
    ) -> None:
        """Takes the weight (V, H), and the bias and target weights, each (V,) or empty."""
        self.weight, self.bias, self.target, self.softcap = weight, bias, target, softcap
        self.needs, self.metrics = needs, metrics
        dtype = accumulation_dtype(weight.dtype)
        self.target_total = jnp.sum(target.astype(dtype))
        self.weight_of_target = jnp.zeros((), dtype)
        if is_present(target) and needs.x:
            self.weight_of_target = jnp.einsum("v,vh->h", target.astype(dtype), weight.astype(dtype))

    def of_labels(self, x: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The label's row of the weight and its logit in float32, for labels that are columns."""
        weight = self.weight.at[labels].get(mode="promise_in_bounds").astype(accumulation_dtype(x.dtype))
        logit = jnp.sum(x.astype(weight.dtype) * weight, axis=-1)
        if is_present(self.bias):
            logit = logit + self.bias.at[labels].get(mode="promise_in_bounds").astype(logit.dtype)
        return weight, logit if self.softcap is None else self.softcap * jnp.tanh(logit / self.softcap)

    def slope(self, logits: jax.Array) -> Any:
        """The derivative of the softcap, from what it gives."""
        return 1.0 if self.softcap is None else 1 - jnp.square(logits / self.softcap)


class Exponentials(NamedTuple):
    """The exponentials of a chunk, and what is summed over columns while they are computed.

    Attributes:
      off_label: (..., V), P with 0 at the label and times the softcap's derivative, in the operands' dtype.
      rest: (...), sum exp(z - reference) over the other columns, before P is rounded.
      target_logit: (...), sum t (z - reference); 0 without target weights t.
      weighted_logit: (...), sum exp(z - reference) (z - reference) over the other columns; 0 unless metrics are wanted.
      prediction: (...), the first column with the largest logit; 0 unless metrics are wanted.
    """

    off_label: jax.Array
    rest: jax.Array
    target_logit: jax.Array
    weighted_logit: Any = 0
    prediction: Any = 0


def exponentials(shared: Shared, x: jax.Array, labels: jax.Array, reference: jax.Array) -> Exponentials:
    """In jnp, for compilers that fuse what is elementwise into a product."""
    logits = linear_logits(x, shared.weight, shared.bias, shared.softcap)
    shifted = logits - broadcast_rows(reference)
    exp = jnp.where(_is_label(labels, logits), 0, jnp.exp(jnp.minimum(shifted, MOST_EXCESS)))
    rest = jnp.sum(exp, axis=-1)
    target_logit = jnp.zeros_like(rest)
    if is_present(shared.target):
        target_logit = jnp.sum(broadcast_columns(shared.target, shifted) * shifted, axis=-1)
    metrics: tuple[jax.Array, ...] = ()
    if shared.metrics:
        # No compiler finds a column within the product: for this, the logits are written after all.
        metrics = (jnp.sum(exp * finite(shifted), axis=-1), jnp.argmax(logits, axis=-1))
    # The barrier keeps what is fused into this product from being computed again in the next ones.
    off_label = jax.lax.optimization_barrier((exp * shared.slope(logits)).astype(x.dtype))
    return Exponentials(off_label, rest, target_logit, *metrics)


def _is_label(labels: jax.Array, columns: jax.Array) -> jax.Array:
    return jax.lax.broadcasted_iota(labels.dtype, columns.shape, columns.ndim - 1) == broadcast_rows(labels)


def _with_label(off_label: jax.Array, labels: jax.Array, ratio: jax.Array) -> jax.Array:
    """P with the ratio at the label, for the products that read it next."""
    if fuses_here():
        return jnp.where(_is_label(labels, off_label), broadcast_rows(ratio), off_label)
    # Elsewhere a pass over P would be written. These elements are put where they belong, in place.
    rows = jnp.arange(labels.size, dtype=labels.dtype)
    flat = off_label.reshape(-1, off_label.shape[-1])
    at = jnp.where(labels < 0, flat.shape[1], labels).reshape(-1)
    return flat.at[rows, at].set(ratio.reshape(-1), mode="drop", unique_indices=True).reshape(off_label.shape)


class _Rows(NamedTuple):
    """What is known of a chunk's rows.

    Attributes:
      statistics: relative to the reference.
      total: the sum of all exponentials of a row.
      label_exp: exp(z_label - reference); 0 without a label.
      label_slope: the softcap's derivative at the label.
      label_weight: the label's row of the weight, in float32.
      has_label: whether the label is a column.
    """

    statistics: RowStatistics
    total: jax.Array
    label_exp: jax.Array
    label_slope: Any
    label_weight: jax.Array
    has_label: jax.Array


def _rows(
    shared: Shared, implementation: Callable[..., Exponentials], x: jax.Array, labels: jax.Array
) -> tuple[_Rows, jax.Array]:
    """What is known of the rows, and P off the label."""
    has_label = (labels >= 0) & (labels < shared.weight.shape[0])
    label_weight, label_logit = shared.of_labels(x, jnp.where(has_label, labels, 0))
    label_logit = jnp.where(has_label, label_logit, -jnp.inf)
    first = linear_logits(x, shared.weight[:_FIRST_COLUMNS], shared.bias[:_FIRST_COLUMNS], shared.softcap)
    reference = jnp.maximum(label_logit, jnp.max(first, axis=-1))
    reference = jnp.where(jnp.isfinite(reference), reference, 0)

    of = implementation(shared, x, labels, reference)
    label_exp = jnp.exp(label_logit - reference)
    total = of.rest + label_exp
    label_logit = jnp.where(has_label, label_logit - reference, 0)
    mean_logit = (of.weighted_logit + label_exp * label_logit) / total
    prediction = jnp.broadcast_to(of.prediction, total.shape)
    statistics = RowStatistics(reference, jnp.log(total), label_logit, of.target_logit, mean_logit, prediction)
    slope = shared.slope(label_logit + reference)
    return _Rows(statistics, total, label_exp, slope, label_weight, has_label), of.off_label


def chunk_with_gradients(
    shared: Shared,
    implementation: Callable[..., Exponentials],
    sums: Arrays,
    x: jax.Array,
    labels: jax.Array,
    *weights: jax.Array,
) -> tuple[Arrays, Arrays]:
    """The x gradient, terms and `metrics_of` each row, and whether it failed; and the sums with this chunk's added.

    Sums are the loss, the gradients of weight and bias, and sum w x and sum w over rows, for `with_target`.
    """
    by, dtype = RowWeights(*weights), accumulation_dtype(x.dtype)
    x_dtype, x = x.dtype, zero_unless(labels != SKIPPED, x.astype(shared.weight.dtype))
    of, off_label = _rows(shared, implementation, x, labels)
    terms = cross_entropy_terms(of.statistics, jnp.broadcast_to(shared.target_total, of.total.shape))
    log_sum_exp = of.statistics.max_logit + of.statistics.log_sum_exp
    scale = (by.label + by.target * shared.target_total + 2 * by.square * log_sum_exp) / of.total
    at_label = jnp.where(of.has_label, (scale * of.label_exp - by.label) * of.label_slope, 0)
    ratio = at_label / scale
    # Near the limit, some exponentials may have met it. A scale of 0 stands for no rows, unless their label counts.
    is_exact = (of.total < jnp.exp(MOST_EXCESS - 1)) & jnp.isfinite(scale) & (jnp.isfinite(ratio) | (at_label == 0))
    scale, at_label = jnp.where(is_exact, scale, 0), jnp.where(is_exact, at_label, 0)
    ratio = jnp.where(scale == 0, 0, ratio).astype(x.dtype)

    losses = by.label * terms[0] + by.target * terms[1] + by.square * terms[2]
    loss, weight_grad, bias_grad, target_x, target_weight = sums
    loss = loss + jnp.sum(jnp.where(is_exact, losses, 0))
    target_weights = jnp.where(is_exact, by.target, 0)
    x_grad = jnp.zeros((*of.total.shape, 0), dtype)
    if shared.needs.x:
        x_grad = jnp.einsum("...v,vh->...h", off_label, shared.weight, preferred_element_type=dtype)
        x_grad, off_label = jax.lax.optimization_barrier((x_grad, off_label))
        x_grad = broadcast_rows(scale) * x_grad + broadcast_rows(at_label) * of.label_weight
        if is_present(shared.target):
            x_grad = x_grad - broadcast_rows(target_weights) * broadcast_columns(shared.weight_of_target, x_grad)
    cotangent = _with_label(off_label, labels, ratio)
    if shared.needs.weight:
        scaled_x = jax.lax.optimization_barrier((broadcast_rows(scale) * x.astype(dtype)).astype(x.dtype))
        weight_grad = add_product(weight_grad, cotangent, scaled_x)
    batch = tuple(range(of.total.ndim))
    if shared.needs.bias:
        bias_grad = bias_grad + jnp.sum(cotangent.astype(dtype) * broadcast_rows(scale), axis=batch)
    if is_present(shared.target):
        target_x = target_x + jnp.sum(broadcast_rows(target_weights) * x.astype(dtype), axis=batch)
        target_weight = target_weight + jnp.sum(target_weights)
    x_grad = x_grad.astype(kept_gradient_dtype(x_dtype))
    return (x_grad, *terms, *metrics_of(of.statistics, shared.metrics), ~is_exact), (
        loss,
        weight_grad,
        bias_grad,
        target_x,
        target_weight,
    )


def with_target(shared: Shared, sums: Arrays) -> Arrays:
    """The loss and the gradients of weight and bias, once the part of the target weights t is in them: - t sum w x."""
    loss, weight_grad, bias_grad, target_x, target_weight = sums
    if is_present(shared.target):
        target = shared.target.astype(loss.dtype)
        if shared.needs.weight:
            by_target = target[:, None] * target_x[None]
            weight_grad = (weight_grad.astype(by_target.dtype) - by_target).astype(weight_grad.dtype)
        if shared.needs.bias:
            bias_grad = bias_grad - target * target_weight
    return loss, weight_grad, bias_grad
