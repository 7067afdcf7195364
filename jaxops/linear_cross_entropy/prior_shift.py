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
nothing here, and is computed again by the rows' maxima. On several devices, failed rows are, after all chunks.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxops.linear_cross_entropy import row_statistics as algebra
from jaxops.linear_cross_entropy.by_rows import RowResults, SumResults, Sums, chunk_step
from jaxops.linear_cross_entropy.chunk_sizes import SIZES, rows_of_exponentials, rows_of_logits
from jaxops.linear_cross_entropy.fold_rows import fold_kept_rows, fold_rows, fuses
from jaxops.linear_cross_entropy.gradient_products import added, kept_gradient
from jaxops.linear_cross_entropy.operands import SKIPPED, Columns, Needs, Rows, RowWeights
from lowering.operators import Place

# exp(60) is 1e26: as far from float32's 3e38 as a product over many columns can need.
MOST_EXCESS = 60.0


def refusal(_: Any, rows: Any, columns: Any, *__: Any, softcap: float | None, needs: Any, **___: Any) -> str | None:
    """Returns why rows of these operands cannot have their shift known before, if so."""
    if any(map(jax.export.is_symbolic_dim, (*rows.x.shape, *columns.weight.shape))):
        return "rows that have failed are taken in chunks of a known size"
    if rows.labels is None or rows.probabilities is not None or needs.class_targets:
        return "probabilities, and a gradient of class weights, need the logits themselves, column by column"
    if others := [name for name, value in rows._asdict().items() if value is not None and name not in ("x", "labels")]:
        return f"each row's {' and '.join(others)} changes the logits, whose exponentials are taken at once"
    if jnp.dtype(columns.weight.dtype) == jnp.float16:
        return "float16 cannot hold exponentials above their reference"
    if softcap is not None and columns.class_targets is not None:
        return "label smoothing of bounded logits needs the logits themselves, column by column"
    return None


class Exponentials(NamedTuple):
    """The exponentials of a chunk, and what is summed over columns while they are computed.

    Attributes:
      off_label: (..., V), P with 0 at the label and times the softcap's derivative, in the operands' dtype.
      rest: (...), sum exp(z - shift) over the other columns, before P is rounded.
      target_logit: (...), sum t (z - shift); not read without targets t.
      weighted_logit: (...), sum exp(z - shift) (z - shift) over the other columns, a metric.
      prediction: (...), the first column with the largest logit, a metric.
    """

    off_label: jax.Array
    rest: jax.Array
    target_logit: jax.Array | None = None
    weighted_logit: jax.Array | None = None
    prediction: jax.Array | None = None


# Computes them from x, labels and shifts.
Exponentiating = Callable[[jax.Array, jax.Array, jax.Array], Exponentials]


def exponentials(
    columns: Columns, softcap: float | None, metrics: bool, x: jax.Array, labels: jax.Array, shift: jax.Array
) -> Exponentials:
    """Computes exponentials in jnp, for compilers that fuse what is elementwise into a product."""
    logits = algebra.Logits.of(Rows(x), columns, softcap).bounded
    shifted = logits - shift[..., None]
    exp = jnp.where(algebra.is_label(labels, logits), 0, jnp.exp(jnp.minimum(shifted, MOST_EXCESS)))
    targets = algebra.over_rows(columns.class_targets, shifted)
    target_logit = None if targets is None else jnp.sum(targets * shifted, axis=-1)
    weighted_logit = jnp.sum(exp * algebra.finite(shifted), axis=-1) if metrics else None
    # No compiler finds a column within the product: for this, the logits are written after all.
    prediction = jnp.argmax(logits, axis=-1).astype(jnp.int32) if metrics else None
    # The barrier keeps what is fused into this product from being computed again in the next ones.
    off_label = jax.lax.optimization_barrier((exp * algebra.softcap_slope(logits, softcap)).astype(x.dtype))
    return Exponentials(off_label, jnp.sum(exp, axis=-1), target_logit, weighted_logit, prediction)


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
    exponentiating: Exponentiating | None = None,
) -> SumResults:
    """Computes what `by_rows.summed_by_rows` does, with exponentials shifted by what is known before the logits."""
    is_one_device, has_kernel = place.device_count == 1, exponentiating is not None
    exponentiating = exponentiating or functools.partial(exponentials, columns, softcap, metrics)
    chunk_rows = chunk_rows or rows_of_exponentials(*columns.weight.shape, metrics=metrics)
    # Seldom needed, so no more than fit beside the rest: their float32 logits are larger than a chunk's exponentials.
    again_rows = rows_of_logits(columns.weight.shape[0], features=0)
    by_maximum = chunk_step(columns, softcap, needs, metrics)
    by_shift = _chunk_step(columns, softcap, needs, metrics, exponentiating, place)
    start = Sums.zeros(columns, needs, weight_grad_dtype)
    is_rounded = is_one_device and math.prod(rows.x.shape[:-1]) <= chunk_rows and columns.class_targets is None

    def again(rows: Rows, weights: RowWeights, results: RowResults, sums: Sums, is_exact: jax.Array) -> Any:
        def take(at: jax.Array, carry: tuple[RowResults, Sums]) -> tuple[RowResults, Sums]:
            results, kept = carry
            labels: Any = jnp.where(is_exact, SKIPPED, rows.labels)  # type: ignore[arg-type]
            failed = rows._replace(labels=labels), jax.tree.map(lambda weight: jnp.where(is_exact, 0, weight), weights)
            # Nothing in a step may be the same in every step, or the compiler computes it before the loop, always.
            failed, _ = jax.lax.optimization_barrier((failed, at))
            new, sums = fold_rows(by_maximum, _alike(kept, start), failed, is_exact.shape, again_rows, place)
            (old, of_x), (new, of_x_again) = results, new
            merged = jax.tree.map(functools.partial(jnp.where, is_exact), old, new)
            x_grads = jax.tree.map(functools.partial(jnp.where, is_exact[..., None]), of_x, of_x_again)
            return (merged, x_grads), _alike(sums, kept)

        # A loop of one step or none, rather than a branch, so that sums stay where they are. But behind a TPU's kernel,
        # XLA keeps a rounded sum that the loop carries in VMEM, and copies it out behind the loop.
        turns = jnp.any(~is_exact).astype(jnp.int32)
        if is_rounded and has_kernel and place.platform == "tpu":
            return jax.lax.cond(1 - turns, tuple, functools.partial(take, turns), (results, sums))
        return jax.lax.fori_loop(0, turns, take, (results, sums))

    def step(sums: Sums, chunk: tuple[Rows, RowWeights]) -> Any:
        results, is_exact, sums = by_shift(sums, *chunk)
        if is_rounded:  # within the product: behind the loop, it would be one more pass
            weight = kept_gradient(sums.columns.weight, columns.weight.dtype)
            sums = Sums(sums.loss, sums.columns._replace(weight=weight))
        if is_one_device:
            results, sums = again(*chunk, results, sums, is_exact)
        return (results, is_exact), sums

    (results, is_exact), sums = fold_kept_rows(step, start, (rows, weights), place, chunk_rows, all_rows=metrics)
    if not is_one_device:
        # Once for all chunks: a sum over devices of the gradient of the weight would not move out of two loops.
        results, sums = again(rows, weights, results, sums, is_exact)
    of_columns = sums.columns
    if columns.class_targets is not None and weights.target is not None:
        by_row = jnp.where(is_exact, weights.target, 0)
        of_columns = _with_targets(of_columns, rows.x.astype(columns.weight.dtype), columns.class_targets, by_row)
    weight_grad = kept_gradient(of_columns.weight, columns.weight.dtype)
    return sums.loss, *results, of_columns._replace(weight=weight_grad)


def _alike(sums: Sums, others: Sums) -> Sums:
    """Returns sums in the dtypes of others."""
    return jax.tree.map(lambda x, other: x.astype(other.dtype), sums, others)


def _chunk_step(
    columns: Columns, softcap: float | None, needs: Needs, metrics: bool, exponentiating: Exponentiating, place: Place
) -> Callable[[Sums, Rows, RowWeights], tuple[RowResults, jax.Array, Sums]]:
    """Returns the step of a chunk: its results, which of its rows count in the sums, and the sums with these added.

    Rows that have failed count nothing, and on one device neither does the rest of their chunk: all are taken again.
    The columns' targets are missing in the sums, see `_with_targets`.
    """
    targets, weight_of_targets = columns.class_targets, None
    if targets is not None and needs.x:
        weight_of_targets = jnp.einsum("v,vh->h", targets, columns.weight.astype(targets.dtype))

    def step(before: Sums, rows: Rows, weights: RowWeights) -> tuple[RowResults, jax.Array, Sums]:
        assert rows.labels is not None
        dtype = before.loss.dtype
        x = algebra.skipped_as_zeros(rows._replace(x=rows.x.astype(columns.weight.dtype))).x
        sums, off_label, label_weight = _shifted_sums(x, rows.labels, columns, softcap, exponentiating)
        statistics = algebra.own_statistics(sums, rows, metrics)
        scale = algebra.softmax_coefficient(weights, sums) / sums.sum_exp
        at_label = scale * jnp.exp(sums.label_logit) - (0 if weights.label is None else weights.label)
        at_label = at_label * algebra.softcap_slope(sums.label_logit + sums.max_logit, softcap)
        at_label = jnp.where(sums.has_label, at_label, 0)
        ratio = at_label / scale
        # Near the limit, some exponentials may have met it. A scale of 0 stands for no rows, unless their label counts.
        is_finite = jnp.isfinite(scale) & (jnp.isfinite(ratio) | (at_label == 0))
        is_exact = (sums.sum_exp < jnp.exp(MOST_EXCESS - 1)) & is_finite
        if place.device_count == 1:
            is_exact = jnp.broadcast_to(jnp.all(is_exact), is_exact.shape)
        scale, at_label = jnp.where(is_exact, scale, 0), jnp.where(is_exact, at_label, 0)
        ratio = jnp.where(scale == 0, 0, ratio).astype(x.dtype)
        loss = before.loss + jnp.sum(jnp.where(is_exact, algebra.row_losses(statistics, weights), 0))
        x_grad: Any = None
        of_columns = before.columns
        if needs.x:
            x_grad = jnp.einsum("...v,vh->...h", off_label, columns.weight, preferred_element_type=dtype)
            x_grad, off_label = jax.lax.optimization_barrier((x_grad, off_label))
            x_grad = scale[..., None] * x_grad + at_label[..., None] * label_weight
            if weight_of_targets is not None and weights.target is not None:
                x_grad = x_grad - weights.target[..., None] * algebra.over_rows(weight_of_targets, x_grad)
            x_grad = kept_gradient(x_grad, rows.x.dtype)
        cotangent = _with_label(off_label, rows.labels, ratio, place)
        if of_columns.weight is not None:
            scaled_x = jax.lax.optimization_barrier((scale[..., None] * x.astype(dtype)).astype(x.dtype))
            of_columns = of_columns._replace(weight=added(of_columns.weight, cotangent, scaled_x))
        if of_columns.bias is not None:
            bias = jnp.sum(cotangent.astype(dtype) * scale[..., None], axis=tuple(range(scale.ndim)))
            of_columns = of_columns._replace(bias=of_columns.bias + bias)
        return (statistics, Rows(x_grad)), is_exact, Sums(loss, of_columns)

    return step


def _shifted_sums(
    x: jax.Array, labels: jax.Array, columns: Columns, softcap: float | None, exponentiating: Exponentiating
) -> tuple[Any, jax.Array, jax.Array]:
    """Returns `RowSums` relative to each row's shift, P off the label, and the label's rows of the weight."""
    first_columns = jax.tree.map(lambda column: column[: SIZES.first_columns], columns)
    first = algebra.Logits.of(Rows(x), first_columns, softcap).bounded
    has_label = (labels >= 0) & (labels < columns.weight.shape[0])
    at = jnp.where(has_label, labels, 0)
    label = jax.tree.map(lambda column: column.at[at].get(mode="promise_in_bounds").astype(first.dtype), columns)
    label_logit = jnp.sum(x.astype(first.dtype) * label.weight, axis=-1)
    label_logit = algebra.capped(label_logit if label.bias is None else label_logit + label.bias, softcap)
    label_logit = jnp.where(has_label, label_logit, -jnp.inf)
    shift = jnp.maximum(label_logit, jnp.max(first, axis=-1))
    shift = jnp.where(jnp.isfinite(shift), shift, 0)
    of, label_logit = exponentiating(x, labels, shift), label_logit - shift
    # As a rule the label has the shift itself, and a row's sum is 1 and little more.
    less_one, at_label = of.rest + jnp.expm1(label_logit), jnp.where(has_label, label_logit, 0)
    sums = algebra.RowSums(shift, less_one, at_label, has_label)
    if columns.class_targets is not None:
        sums = sums._replace(target_logit=of.target_logit, target_total=algebra.target_total(Rows(x), columns, shift))
    if of.weighted_logit is not None:
        weighted_logit = of.weighted_logit + jnp.exp(label_logit) * at_label
        sums = sums._replace(weighted_logit=weighted_logit, prediction=of.prediction)
    return sums, of.off_label, label.weight


def _with_label(off_label: jax.Array, labels: jax.Array, ratio: jax.Array, place: Place) -> jax.Array:
    """Returns P with the ratio at the label, for the products that read it next."""
    if fuses(place):
        return jnp.where(algebra.is_label(labels, off_label), ratio[..., None], off_label)
    # Elsewhere a pass over P would be written. These elements are put where they belong, in place.
    rows = jnp.arange(labels.size, dtype=labels.dtype)
    flat = off_label.reshape(-1, off_label.shape[-1])
    at = jnp.where(labels < 0, flat.shape[1], labels).reshape(-1)
    return flat.at[rows, at].set(ratio.reshape(-1), mode="drop", unique_indices=True).reshape(off_label.shape)


def _with_targets(of_columns: Columns, x: jax.Array, targets: jax.Array, by_row: jax.Array) -> Columns:
    """Adds the part of the column targets t, - t sum w x and - t sum w, where w is the weight of each row's term."""
    targets = targets.astype(by_row.dtype)
    if (weight := of_columns.weight) is not None:
        x = algebra.zero_unless(by_row != 0, x).astype(by_row.dtype)
        x_sum = jnp.sum(by_row[..., None] * x, axis=tuple(range(by_row.ndim)))
        weight = (weight.astype(x_sum.dtype) - targets[:, None] * x_sum[None]).astype(weight.dtype)
    bias = None if of_columns.bias is None else of_columns.bias - targets * jnp.sum(by_row)
    return of_columns._replace(weight=weight, bias=bias)
