"""What labels, smoothing and weights say about each row of the cross entropy."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxops._checks.ids import differ_from, wide_ids
from jaxops._primitive.sharding import agreeing, explicit_mesh, laid_out_as
from jaxops.linear_cross_entropy.batch_invariant import invariant_smoothing
from jaxops.linear_cross_entropy.logits import RowWeights, Targets
from jaxops.linear_cross_entropy.operands import is_floating, nan_unless
from jaxops.linear_cross_entropy.vocabulary import Vocabulary


class RowTerms(NamedTuple):
    """What the labels mean for each row: targets, weights of the two terms that use them, a share of the divisor."""

    targets: Targets
    label_weight: jax.Array
    target_weight: jax.Array
    kept: jax.Array
    divisor: jax.Array


def terms_of_rows(
    labels: jax.Array,
    class_weight: Any,
    ignore_index: int,
    smoothing: float,
    vocabulary: Vocabulary,
    dtype: Any,
    *,
    batch_invariant: bool,
) -> RowTerms:
    """The terms of the rows, whose labels are classes or probabilities."""
    if not is_floating(labels):
        return _by_labels(labels, class_weight, ignore_index, smoothing, vocabulary, dtype)
    if batch_invariant and smoothing:
        labels, smoothing = invariant_smoothing(labels, smoothing, vocabulary.classes), 0.0
    return _by_probabilities(labels, class_weight, smoothing, vocabulary, dtype)


def _by_labels(
    labels: jax.Array, class_weight: Any, ignore_index: int, smoothing: float, vocabulary: Vocabulary, dtype: Any
) -> RowTerms:
    kept, labels = differ_from(labels, ignore_index), wide_ids(labels)
    zeros = jnp.zeros_like(labels, dtype)  # laid out as labels are
    weights = jnp.ones(vocabulary.columns, dtype) if class_weight is None else class_weight.astype(dtype)
    of_label = zeros + 1 if class_weight is None else vocabulary.weights_of(labels, weights)
    of_label = jnp.where(kept, of_label, zeros)
    of_label = nan_unless(~kept | ((labels >= 0) & (labels < vocabulary.classes)), of_label)
    shared = weights if smoothing else jnp.zeros((0,), dtype)
    targets = Targets(vocabulary.local(labels), shared, jnp.zeros((*labels.shape, 0), dtype))
    smooth = jnp.where(kept, zeros + smoothing / vocabulary.classes, zeros)
    return RowTerms(targets, (1 - smoothing) * of_label, smooth, kept, of_label)


def _by_probabilities(
    labels: jax.Array, class_weight: Any, smoothing: float, vocabulary: Vocabulary, dtype: Any
) -> RowTerms:
    # Used unchanged if possible: a changed copy would be one more array of the logits' size.
    probabilities = labels
    if smoothing:
        probabilities = (1 - smoothing) * labels.astype(dtype) + smoothing / vocabulary.classes
    if class_weight is not None:
        probabilities, class_weight = agreeing("... v, ... v ->", probabilities.astype(dtype), class_weight)
        # Laid out at once, as the transpose of a broadcast that is resharded would gather all rows.
        layout = jax.typeof(probabilities).sharding if explicit_mesh([probabilities]) is not None else None
        last, shape = probabilities.ndim - 1, probabilities.shape
        class_weight = jax.lax.broadcast_in_dim(class_weight.astype(dtype), shape, (last,), out_sharding=layout)
        probabilities = probabilities * class_weight
    rows = labels.shape[:-1]
    targets = Targets(jnp.full(rows, -1, jnp.int32), jnp.zeros((0,), dtype), probabilities)
    return RowTerms(targets, jnp.zeros(rows, dtype), jnp.ones(rows, dtype), jnp.ones(rows, bool), jnp.ones(rows, dtype))


def weighted(terms: RowTerms, z_loss: Any, row_weight: Any) -> tuple[RowTerms, RowWeights]:
    """The terms with its divisor times the row weight, and the weights of the three terms of each row."""
    square = jnp.where(terms.kept, jnp.asarray(z_loss, terms.divisor.dtype), 0)
    weights = RowWeights(terms.label_weight, terms.target_weight, square)
    if row_weight is None:
        return terms, weights
    kept = laid_out_as(terms.kept, jax.typeof(row_weight).sharding)
    row_weight = jnp.where(kept, row_weight.astype(square.dtype), jnp.zeros_like(row_weight, square.dtype))
    of_rows = RowWeights(*(row_weight * of_term for of_term in weights))
    return terms._replace(divisor=row_weight * terms.divisor), of_rows


def averaged(weights: RowWeights, terms: RowTerms) -> tuple[RowWeights, jax.Array]:
    """The weights with which the sum of the losses is their mean, and whether there is one; zeros if not."""
    divisor = jnp.sum(terms.divisor)
    has_mean = divisor != 0
    divisor = jnp.where(has_mean, divisor, 1)
    return RowWeights(*(jnp.where(has_mean, of_term / divisor, 0) for of_term in weights)), has_mean


def reduced(losses: jax.Array, terms: RowTerms, reduction: str) -> jax.Array:
    """The losses of rows, or their sum or mean; they may be summed already."""
    if reduction == "none":
        return losses
    total = jnp.sum(losses)
    if reduction == "sum":
        return total
    divisor = jnp.sum(terms.divisor)
    # The mean of nothing is NaN. Its gradients are zero, like those of skipped rows, so 1 / 0 must not reach them.
    is_zero = divisor == 0
    return nan_unless(~is_zero, total / jnp.where(is_zero, 1, divisor))
