"""The summed cross entropy of rows with its gradients, where every exponential is shifted by a number known before.

With the maximum of each row, exp(z - max) needs all logits z of the row first: they are written, and read again. Here
each row has a shift r that is known before z: the larger of its label's logit and of its first columns'. So

    P = exp(z - r), in the operands' dtype

is elementwise in z, a compiler or a kernel fuses it into the product that makes z, and the logits never exist in
float32. Row sums are taken before P is rounded. With total = sum P + exp(z_label - r), the cotangent of z off the label
is s P, where s = coefficient / total is one number for each row, so

    x_grad = s (P weight) + k weight[label],        weight_grad = C^T (s x)

C is P with k / s at the label, put in while the product reads P. k, where p_label - 1 cancels, is float32.

P is above 1 where a logit is above r. A chunk with a row in which it comes near the end of float32's range counts as
nothing here, and is computed again by the rows' maxima.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxops._checks.dtypes import accumulation_dtype
from jaxops.linear_cross_entropy.by_rows import (
    Sums,
    chunk_step,
    kept_in_range,
    metrics_of,
    no_sums,
    on_all_devices,
)
from jaxops.linear_cross_entropy.chunk_sizes import SIZES, rows_of_exponentials, rows_of_logits
from jaxops.linear_cross_entropy.fold_rows import fold_rows, varying
from jaxops.linear_cross_entropy.kept_rows import kept_rows
from jaxops.linear_cross_entropy.operands import (
    SKIPPED,
    ColumnGradients,
    Columns,
    Needs,
    RowGradients,
    RowResults,
    Rows,
    RowStatistics,
    RowWeights,
)
from jaxops.linear_cross_entropy.rounded_products import added
from jaxops.linear_cross_entropy.row_statistics import (
    bounded_logits,
    finite,
    is_label,
    kept_gradient_dtype,
    loss_terms,
    of_present,
    over_columns,
    over_rows,
    softmax_coefficient,
    weighted,
    zero_unless,
)
from lowering.forms import Place

# Here XLA fuses what is elementwise into a product, and writing zeros to a large array takes its time.
_FUSING_PLATFORMS = ("tpu",)
# exp(60) is 1e26: as far from float32's 3e38 as a product over many columns can need.
MOST_EXCESS = 60.0


def refusal(rows: Any, columns: Any, softcap: float | None, needs: Needs) -> str | None:
    """Returns why rows of these operands cannot have their shift known before, if so."""
    if any(map(jax.export.is_symbolic_dim, (*rows.x.shape, *columns.weight.shape))):
        return "rows that have failed are taken in chunks of a known size"
    if rows.labels is None or rows.probabilities is not None or needs.class_targets:
        return "probabilities, and a gradient of class weights, need the logits themselves, column by column"
    if rows.margin is not None or rows.scale is not None:
        return "a margin or a scale of each row changes the logits, whose exponentials are taken at once"
    if jnp.dtype(columns.weight.dtype) == jnp.float16:
        return "float16 cannot hold exponentials above their reference"
    if softcap is not None and columns.class_targets is not None:
        return "label smoothing of bounded logits needs the logits themselves, column by column"
    return None


class Shared:
    """Operands without rows, which all chunks share, and what is computed from them once."""

    def __init__(self, columns: Columns, softcap: float | None, needs: Needs, *, metrics: bool = False) -> None:
        """Takes the operands of all columns."""
        self.columns, self.softcap, self.needs, self.metrics = columns, softcap, needs, metrics
        self.targets: jax.Array | None = None
        self.target_total = self.weight_of_targets = jnp.zeros((), accumulation_dtype(columns.weight.dtype))
        if columns.class_targets is not None:
            self.targets = columns.class_targets.astype(self.target_total.dtype)
            self.target_total = jnp.sum(self.targets)
            if needs.x:
                weight = columns.weight.astype(self.targets.dtype)
                self.weight_of_targets = jnp.einsum("v,vh->h", self.targets, weight)

    def of_labels(self, x: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the label's row of the weight and its logit in float32, for labels that are columns."""
        weight = self.columns.weight.at[labels].get(mode="promise_in_bounds").astype(accumulation_dtype(x.dtype))
        logit = jnp.sum(x.astype(weight.dtype) * weight, axis=-1)
        if self.columns.bias is not None:
            logit = logit + self.columns.bias.at[labels].get(mode="promise_in_bounds").astype(logit.dtype)
        return weight, logit if self.softcap is None else self.softcap * jnp.tanh(logit / self.softcap)

    def slope(self, logits: jax.Array) -> Any:
        """Computes the derivative of the softcap, from what it gives."""
        return 1.0 if self.softcap is None else 1 - jnp.square(logits / self.softcap)


class Exponentials(NamedTuple):
    """The exponentials of a chunk, and what is summed over columns while they are computed.

    Attributes:
      off_label: (..., V), P with 0 at the label and times the softcap's derivative, in the operands' dtype.
      rest: (...), sum exp(z - shift) over the other columns, before P is rounded.
      target_logit: (...), sum t (z - shift); 0 without targets t.
      weighted_logit: (...), sum exp(z - shift) (z - shift) over the other columns; 0 unless metrics are wanted.
      prediction: (...), the first column with the largest logit; 0 unless metrics are wanted.
    """

    off_label: jax.Array
    rest: jax.Array
    target_logit: jax.Array
    weighted_logit: Any = 0
    prediction: Any = 0


Exponentiating = Callable[[Shared, jax.Array, jax.Array, jax.Array], Exponentials]


def exponentials(shared: Shared, x: jax.Array, labels: jax.Array, shift: jax.Array) -> Exponentials:
    """Computes exponentials in jnp, for compilers that fuse what is elementwise into a product."""
    logits = bounded_logits(Rows(x), shared.columns, shared.softcap)
    shifted = logits - over_columns(shift)
    exp = jnp.where(is_label(labels, logits), 0, jnp.exp(jnp.minimum(shifted, MOST_EXCESS)))
    rest = jnp.sum(exp, axis=-1)
    target_logit = jnp.zeros_like(rest)
    if shared.targets is not None:
        target_logit = jnp.sum(over_rows(shared.targets, shifted) * shifted, axis=-1)
    metrics: tuple[jax.Array, ...] = ()
    if shared.metrics:
        # No compiler finds a column within the product: for this, the logits are written after all.
        metrics = (jnp.sum(exp * finite(shifted), axis=-1), jnp.argmax(logits, axis=-1).astype(jnp.int32))
    # The barrier keeps what is fused into this product from being computed again in the next ones.
    off_label = jax.lax.optimization_barrier((exp * shared.slope(logits)).astype(x.dtype))
    return Exponentials(off_label, rest, target_logit, *metrics)


class _TargetSums(NamedTuple):
    """Sums over rows of w x and of w, the weights of the target term, by which `_with_targets` completes gradients."""

    x: jax.Array
    weight: jax.Array


def summed_by_prior_shift(
    rows: Rows,
    columns: Columns,
    weights: RowWeights,
    *,
    softcap: float | None,
    chunk_rows: int | None,
    needs: Needs,
    metrics: bool,
    weight_grad_dtype: Any,
    place: Place,
    exponentiating: Exponentiating = exponentials,
) -> tuple[jax.Array, RowResults, ColumnGradients]:
    """Computes what `by_rows.summed_by_rows` does, with exponentials shifted by what is known before the logits."""
    chunk_rows = chunk_rows or rows_of_exponentials(*columns.weight.shape, metrics=metrics)
    shared, dtype = Shared(columns, softcap, needs, metrics=metrics), accumulation_dtype(columns.weight.dtype)
    by_maximum = chunk_step(columns, softcap, needs, metrics=metrics)
    # Seldom needed, so no more than fit beside the rest: their float32 logits are larger than a chunk's exponentials.
    again_rows = on_all_devices(rows_of_logits(columns.weight.shape[0], features=0), place)

    def again(chunk: tuple[Rows, RowWeights], results: RowResults, sums: Sums, is_exact: jax.Array) -> Any:
        def take(at: jax.Array, carry: tuple[RowResults, Sums]) -> tuple[RowResults, Sums]:
            results, sums = carry
            # Nothing in a step may be the same in every step, or the compiler computes it before the loop, always.
            rows, _ = jax.lax.optimization_barrier((_failed(*chunk, is_exact), at))
            new, sums = fold_rows(by_maximum, sums, rows, is_exact.shape, again_rows)
            is_kept = [
                is_exact.reshape(*is_exact.shape, *(1,) * (x.ndim - is_exact.ndim)) for x in jax.tree.leaves(new)
            ]
            masks = jax.tree.unflatten(jax.tree.structure(new), is_kept)
            return jax.tree.map(jnp.where, masks, results, new), sums

        # A loop of one step or none, rather than a branch, so that sums stay where they are.
        return jax.lax.fori_loop(0, jnp.any(~is_exact).astype(jnp.int32), take, (results, sums))

    def step(carry: tuple[Sums, _TargetSums], chunk: tuple[Rows, RowWeights]) -> Any:
        results, is_exact, sums, of_targets = _chunk(shared, exponentiating, place, *carry, *chunk)
        if not place.is_split:
            results, sums = again(chunk, results, sums, is_exact)
        return (results, is_exact), (sums, of_targets)

    sums = no_sums(rows, columns, needs, weight_grad_dtype)
    of_targets = varying(_TargetSums(jnp.zeros(rows.x.shape[-1:], dtype), jnp.zeros((), dtype)), (rows, columns))
    # Metrics are wanted for all rows.
    kept = None if metrics else kept_rows(rows, place, chunk_rows)
    if kept is None:
        chunk = on_all_devices(chunk_rows, place)
        (results, is_exact), carry = fold_rows(step, (sums, of_targets), (rows, weights), rows.x.shape[:-1], chunk)
    else:
        # Filling the gradient of a large weight with 0 would take as long as hundreds of rows.
        starts_unwritten = place.platform in _FUSING_PLATFORMS
        start = jax.tree.map(lambda x: jax.lax.empty(x.shape, x.dtype) if starts_unwritten else x, (sums, of_targets))
        (results, is_exact), carry = kept.map(step, start, (rows, weights), starts_unwritten=starts_unwritten)
    sums, of_targets = carry
    if place.is_split:
        # Once for all chunks: a sum over devices of the gradient of the weight would not move out of two loops.
        results, sums = again((rows, weights), results, sums, is_exact)
    return sums.loss, results, kept_in_range(_with_targets(shared, sums.columns, of_targets), columns)


def _failed(rows: Rows, weights: RowWeights, is_exact: jax.Array) -> tuple[Rows, RowWeights]:
    """Returns the rows with those that are exact skipped."""
    labels = jnp.where(is_exact, SKIPPED, rows.labels)  # type: ignore[arg-type]
    return rows._replace(labels=labels), jax.tree.map(lambda weight: jnp.where(is_exact, 0, weight), weights)


def _chunk(
    shared: Shared,
    exponentiating: Exponentiating,
    place: Place,
    sums: Sums,
    of_targets: _TargetSums,
    rows: Rows,
    weights: RowWeights,
) -> tuple[RowResults, jax.Array, Sums, _TargetSums]:
    """Returns the results of a chunk, which of its rows count in the sums, and the sums with these added.

    Rows that have failed count nothing, and on one device neither does the rest of their chunk: all are taken again.
    """
    assert rows.labels is not None
    weight, needs = shared.columns.weight, shared.needs
    dtype = accumulation_dtype(weight.dtype)
    x = zero_unless(rows.labels != SKIPPED, rows.x.astype(weight.dtype))
    of, off_label = _statistics(shared, exponentiating, x, rows.labels)
    total = None if shared.targets is None else jnp.broadcast_to(shared.target_total, of.total.shape)
    terms = loss_terms(of.statistics, total)
    scale = softmax_coefficient(weights, of.statistics, total) / of.total
    by_label = jnp.zeros_like(scale) if weights.label is None else weights.label
    at_label = jnp.where(of.has_label, (scale * of.label_exp - by_label) * of.label_slope, 0)
    ratio = at_label / scale
    # Near the limit, some exponentials may have met it. A scale of 0 stands for no rows, unless their label counts.
    is_finite = jnp.isfinite(scale) & (jnp.isfinite(ratio) | (at_label == 0))
    is_exact = (of.total < jnp.exp(MOST_EXCESS - 1)) & is_finite
    if not place.is_split:
        is_exact = jnp.broadcast_to(jnp.all(is_exact), is_exact.shape)
    scale, at_label = jnp.where(is_exact, scale, 0), jnp.where(is_exact, at_label, 0)
    ratio = jnp.where(scale == 0, 0, ratio).astype(x.dtype)
    target_weights = jnp.zeros_like(scale)
    if weights.target is not None and shared.targets is not None:
        target_weights = jnp.where(is_exact, weights.target, 0)
    loss = sums.loss + jnp.sum(jnp.where(is_exact, weighted(terms, weights), 0))
    x_grad, of_columns = None, sums.columns
    if needs.x:
        x_grad = jnp.einsum("...v,vh->...h", off_label, weight, preferred_element_type=dtype)
        x_grad, off_label = jax.lax.optimization_barrier((x_grad, off_label))
        x_grad = over_columns(scale) * x_grad + over_columns(at_label) * of.label_weight
        if shared.targets is not None:
            x_grad = x_grad - over_columns(target_weights) * over_rows(shared.weight_of_targets, x_grad)
        x_grad = x_grad.astype(kept_gradient_dtype(rows.x.dtype))
    cotangent = _with_label(off_label, rows.labels, ratio, place)
    if of_columns.weight is not None:
        scaled_x = jax.lax.optimization_barrier((over_columns(scale) * x.astype(dtype)).astype(x.dtype))
        of_columns = of_columns._replace(weight=added(of_columns.weight, cotangent, scaled_x))
    batch = tuple(range(of.total.ndim))
    if of_columns.bias is not None:
        bias = jnp.sum(cotangent.astype(dtype) * over_columns(scale), axis=batch)
        of_columns = of_columns._replace(bias=of_columns.bias + bias)
    if shared.targets is not None:
        target_x = of_targets.x + jnp.sum(over_columns(target_weights) * x.astype(dtype), axis=batch)
        of_targets = _TargetSums(target_x, of_targets.weight + jnp.sum(target_weights))
    results = RowResults(of_present(terms, weights), metrics_of(of.statistics, shared.metrics), RowGradients(x_grad))
    return results, is_exact, Sums(loss, of_columns), of_targets


class _Statistics(NamedTuple):
    """Facts that are known of a chunk's rows.

    Attributes:
      statistics: relative to the shift.
      total: the sum of all exponentials of a row.
      label_exp: exp(z_label - shift); 0 without a label.
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


def _statistics(
    shared: Shared, exponentiating: Exponentiating, x: jax.Array, labels: jax.Array
) -> tuple[_Statistics, jax.Array]:
    """Returns what is known of the rows, and P off the label."""
    has_label = (labels >= 0) & (labels < shared.columns.weight.shape[0])
    label_weight, label_logit = shared.of_labels(x, jnp.where(has_label, labels, 0))
    label_logit = jnp.where(has_label, label_logit, -jnp.inf)
    first_columns = jax.tree.map(lambda column: column[: SIZES.first_columns], shared.columns)
    first = bounded_logits(Rows(x), first_columns, shared.softcap)
    shift = jnp.maximum(label_logit, jnp.max(first, axis=-1))
    shift = jnp.where(jnp.isfinite(shift), shift, 0)

    of = exponentiating(shared, x, labels, shift)
    label_exp, total_less_one = jnp.exp(label_logit - shift), of.rest + jnp.expm1(label_logit - shift)
    total = of.rest + label_exp
    label_logit = jnp.where(has_label, label_logit - shift, 0)
    mean_logit = (of.weighted_logit + label_exp * label_logit) / total
    prediction = jnp.broadcast_to(of.prediction, total.shape)
    # As in `RowSums.statistics`: as a rule the label has the shift itself.
    statistics = RowStatistics(shift, jnp.log1p(total_less_one), label_logit, of.target_logit, mean_logit, prediction)
    slope = shared.slope(label_logit + shift)
    return _Statistics(statistics, total, label_exp, slope, label_weight, has_label), of.off_label


def _with_label(off_label: jax.Array, labels: jax.Array, ratio: jax.Array, place: Place) -> jax.Array:
    """Returns P with the ratio at the label, for the products that read it next."""
    if place.platform in _FUSING_PLATFORMS:
        return jnp.where(is_label(labels, off_label), over_columns(ratio), off_label)
    # Elsewhere a pass over P would be written. These elements are put where they belong, in place.
    rows = jnp.arange(labels.size, dtype=labels.dtype)
    flat = off_label.reshape(-1, off_label.shape[-1])
    at = jnp.where(labels < 0, flat.shape[1], labels).reshape(-1)
    return flat.at[rows, at].set(ratio.reshape(-1), mode="drop", unique_indices=True).reshape(off_label.shape)


def _with_targets(shared: Shared, of_columns: ColumnGradients, of_targets: _TargetSums) -> ColumnGradients:
    """Returns gradients with the part of the column targets t in them: - t sum w x, and - t sum w."""
    if shared.targets is None:
        return of_columns
    if (weight := of_columns.weight) is not None:
        by_target = shared.targets[:, None] * of_targets.x[None]
        of_columns = of_columns._replace(weight=(weight.astype(by_target.dtype) - by_target).astype(weight.dtype))
    if (bias := of_columns.bias) is not None:
        of_columns = of_columns._replace(bias=bias - shared.targets * of_targets.weight)
    return of_columns
