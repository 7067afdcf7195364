"""The targets and weights of the rows' losses, from labels, smoothing, margins and weights."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxops._checks.dtypes import differ_from, wide_ids
from jaxops._primitive.sharding import agreeing, explicit_mesh, laid_out_as
from jaxops.linear_cross_entropy.checks import nan_unless
from jaxops.linear_cross_entropy.operands import Rows, RowWeights
from jaxops.linear_cross_entropy.vocabulary import Vocabulary


class Losses(NamedTuple):
    """Meaning of the labels: operands without x and weight, and how the rows' losses become one.

    Attributes:
      rows: what rows are compared with; labels are this device's columns.
      class_targets: as in `Columns`.
      weights: of the terms of each row's loss; those of ignored rows are 0.
      kept: (...) bool, the rows whose label is not ignored.
      divisor: (...), each row's share of what the mean is divided by.
    """

    rows: Rows
    class_targets: jax.Array | None
    weights: RowWeights
    kept: jax.Array
    divisor: jax.Array

    def averaged(self) -> tuple[RowWeights, jax.Array]:
        """Returns weights with which the sum of the losses is their mean, and whether there is one; zeros if not.

        The mean of nothing is NaN. Its gradients are zero, like those of skipped rows, so 1 / 0 must not reach them.
        """
        divisor = jnp.sum(self.divisor)
        has_mean = divisor != 0
        divisor = jnp.where(has_mean, divisor, 1)
        return jax.tree.map(lambda weight: jnp.where(has_mean, weight / divisor, 0), self.weights), has_mean


class Targets(NamedTuple):
    """Labels or probabilities, and what `linear_cross_entropy` is told about the losses of rows with them."""

    labels: jax.Array
    class_weight: jax.Array | None
    row_weight: jax.Array | None
    margin: Any
    ignore_index: int
    label_smoothing: float
    z_loss: Any

    def losses(self, x: jax.Array, vocabulary: Vocabulary, dtype: Any) -> Losses:
        """Returns what they mean for the losses of rows x."""
        of_rows = self._of_probabilities if self.labels.ndim == x.ndim else self._of_labels
        losses, row_weight = of_rows(x, vocabulary, dtype), self.row_weight
        weights = losses.weights
        if not isinstance(self.z_loss, float | int) or self.z_loss != 0:
            weights = weights._replace(square=jnp.where(losses.kept, jnp.asarray(self.z_loss, dtype), 0))
        if row_weight is None:
            return losses._replace(weights=weights)
        kept = laid_out_as(losses.kept, jax.typeof(row_weight).sharding)
        by_row = jnp.where(kept, row_weight.astype(dtype), jnp.zeros_like(row_weight, dtype))
        weights = jax.tree.map(lambda weight: by_row * weight, weights)
        return losses._replace(weights=weights, divisor=by_row * losses.divisor)

    def _of_labels(self, x: jax.Array, vocabulary: Vocabulary, dtype: Any) -> Losses:
        kept, labels = differ_from(self.labels, self.ignore_index), wide_ids(self.labels)
        zeros = jnp.zeros_like(labels, dtype)  # laid out as labels are
        by_class = None if self.class_weight is None else self.class_weight.astype(dtype)
        of_label = zeros + 1 if by_class is None else vocabulary.values_of(labels, by_class)
        of_label = jnp.where(kept, of_label, zeros)
        of_label = nan_unless(~kept | ((labels >= 0) & (labels < vocabulary.classes)), of_label)
        smoothing, margin = self.label_smoothing, self.margin
        weights, class_targets = RowWeights(label=(1 - smoothing) * of_label), None
        if smoothing:
            class_targets = jnp.ones(vocabulary.columns, dtype) if by_class is None else by_class
            weights = weights._replace(target=jnp.where(kept, zeros + smoothing / vocabulary.classes, zeros))
        if margin is not None:
            is_number = jnp.ndim(margin) == 0
            margin = zeros + margin if is_number else vocabulary.values_of(labels, margin.astype(dtype))
            margin = jax.lax.stop_gradient(margin)
        return Losses(Rows(x, vocabulary.local(labels), margin=margin), class_targets, weights, kept, of_label)

    def _of_probabilities(self, x: jax.Array, vocabulary: Vocabulary, dtype: Any) -> Losses:
        # Used unchanged if possible: a changed copy would be one more array of the logits' size.
        probabilities = self.labels
        if self.label_smoothing:
            smoothed = (1 - self.label_smoothing) * self.labels.astype(dtype)
            probabilities = smoothed + self.label_smoothing / vocabulary.classes
        if self.class_weight is not None:
            probabilities, by_class = agreeing("... v, ... v ->", probabilities.astype(dtype), self.class_weight)
            # Laid out at once, as the transpose of a broadcast that is resharded would gather all rows.
            layout = jax.typeof(probabilities).sharding if explicit_mesh([probabilities]) is not None else None
            last, shape = probabilities.ndim - 1, probabilities.shape
            by_class = jax.lax.broadcast_in_dim(by_class.astype(dtype), shape, (last,), out_sharding=layout)
            probabilities = probabilities * by_class
        ones = jnp.ones(self.labels.shape[:-1], dtype)
        return Losses(Rows(x, probabilities=probabilities), None, RowWeights(target=ones), ones > 0, ones)
