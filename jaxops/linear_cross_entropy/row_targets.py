"""The classes that labels count, and the targets and weights of rows' losses."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxops._checks.dtypes import differ_from, wide_ids
from jaxops._primitive import sharding
from jaxops.linear_cross_entropy.operands import Rows, RowWeights


class Vocabulary(NamedTuple):
    """The number of columns on this device, that of all classes, and the mesh axis over which columns are split."""

    columns: int
    classes: int
    axis: str | None

    @classmethod
    def of(cls, operator: str, weight: jax.Array, axis: str | None) -> "Vocabulary":
        """Makes the vocabulary, from this device's part of the weight (V, H)."""
        columns = weight.shape[0]
        if axis is None:
            return cls(columns, columns, None)
        parts = sharding.axis_size(operator, "vocab_axis", axis)
        sharding.require_split(operator, "weight", weight, jax.lax.axis_index(axis))
        return cls(columns, columns * parts, axis)

    @property
    def first(self) -> jax.Array | int:
        """The class of this device's first column."""
        return 0 if self.axis is None else self.columns * jax.lax.axis_index(self.axis)

    def local(self, labels: jax.Array) -> jax.Array:
        """This device's columns of labels, as int32; -1 for classes of other devices and invalid labels."""
        columns = labels - jnp.asarray(self.first, labels.dtype)
        is_class = (labels >= 0) & (labels < self.classes)
        return jnp.where(is_class & (columns >= 0) & (columns < self.columns), columns.astype(jnp.int32), -1)

    def argmax(self, row_values: jax.Array) -> jax.Array:
        """Finds the class with the largest value of each row (..., columns); of equal ones, the first."""
        best = jnp.argmax(row_values, axis=-1).astype(jnp.int32)
        if self.axis is None:
            return best
        local_max = jax.lax.stop_gradient(jnp.max(row_values, axis=-1))
        is_best = local_max == jax.lax.pmax(local_max, self.axis)
        return jax.lax.pmin(jnp.where(is_best, best + self.first, self.classes), self.axis)

    def values_of(self, labels: jax.Array, by_class: jax.Array) -> jax.Array:
        """Returns the value of each row's label among values by class; 0 if the label is not a class."""
        columns = self.local(labels)
        # Indexing alone cannot infer how a result is laid out on an explicit mesh.
        layout = None if sharding.explicit_mesh([columns]) is None else jax.typeof(columns).sharding
        values = by_class.at[jnp.maximum(columns, 0)].get(mode="promise_in_bounds", out_sharding=layout)
        values = jnp.where(columns >= 0, values, jnp.zeros_like(values))
        return values if self.axis is None else jax.lax.psum(values, self.axis)


class Losses(NamedTuple):
    """Meaning of the labels: operands without x and weight, and how the rows' losses become one.

    Attributes:
      rows: what rows are compared with; labels are this device's columns.
      class_targets: as in `Columns`.
      weights: of the terms of each row's loss, for a mean with its divisor; those of ignored rows are 0.
      kept: (...) bool, the rows whose label is not ignored.
      has_mean: (), whether the divisor of a mean is not 0; None for other reductions.
    """

    rows: Rows
    class_targets: jax.Array | None
    weights: RowWeights
    kept: jax.Array
    has_mean: jax.Array | None


class Targets(NamedTuple):
    """Labels or probabilities, and what `linear_cross_entropy` is told about the losses of rows with them."""

    labels: jax.Array
    class_weight: jax.Array | None
    row_weight: jax.Array | None
    margin: Any
    ignore_index: int
    label_smoothing: float
    z_loss: Any
    reduction: str

    def losses(self, x: jax.Array, vocabulary: Vocabulary, dtype: Any) -> Losses:
        """Returns what they mean for the losses of rows x."""
        of_rows = self._of_probabilities if self.labels.ndim == x.ndim else self._of_labels
        rows, class_targets, weights, kept, shares = of_rows(x, vocabulary, dtype)
        if not isinstance(self.z_loss, float | int) or self.z_loss != 0:
            weights = weights._replace(square=jnp.where(kept, jnp.asarray(self.z_loss, dtype), 0))
        if (row_weight := self.row_weight) is not None:
            counts = sharding.laid_out_as(kept, jax.typeof(row_weight).sharding)
            by_row = jnp.where(counts, row_weight.astype(dtype), jnp.zeros_like(row_weight, dtype))
            weights, shares = jax.tree.map(lambda weight: by_row * weight, (weights, shares))
        has_mean = None
        if self.reduction == "mean":
            # The mean of nothing is NaN. Its gradients are zero, as of skipped rows, so 1 / 0 must not reach them.
            divisor = jnp.sum(shares)
            has_mean = divisor != 0
            divisor = jnp.where(has_mean, divisor, 1)
            weights = jax.tree.map(lambda weight: jnp.where(has_mean, weight / divisor, 0), weights)
        return Losses(rows, class_targets, weights, kept, has_mean)

    def _of_labels(self, x: jax.Array, vocabulary: Vocabulary, dtype: Any) -> tuple[Any, ...]:
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
            margin = vocabulary.values_of(labels, margin.astype(dtype)) if jnp.ndim(margin) else zeros + margin
        margin = jax.lax.stop_gradient(margin)
        return Rows(x, vocabulary.local(labels), margin=margin), class_targets, weights, kept, of_label

    def _of_probabilities(self, x: jax.Array, vocabulary: Vocabulary, dtype: Any) -> tuple[Any, ...]:
        # Used unchanged if possible: a changed copy would be one more array of the logits' size.
        probabilities = self.labels
        if self.label_smoothing:
            smoothed = (1 - self.label_smoothing) * self.labels.astype(dtype)
            probabilities = smoothed + self.label_smoothing / vocabulary.classes
        if self.class_weight is not None:
            probabilities = probabilities.astype(dtype)
            probabilities, by_class = sharding.agreeing("... v, ... v ->", probabilities, self.class_weight)
            # Laid out at once, as the transpose of a broadcast that is resharded would gather all rows.
            layout = jax.typeof(probabilities).sharding if sharding.explicit_mesh([probabilities]) is not None else None
            last, shape = probabilities.ndim - 1, probabilities.shape
            by_class = jax.lax.broadcast_in_dim(by_class.astype(dtype), shape, (last,), out_sharding=layout)
            probabilities = probabilities * by_class
        ones = jnp.ones(self.labels.shape[:-1], dtype)
        return Rows(x, probabilities=probabilities), None, RowWeights(target=ones), ones > 0, ones


@jax.jit
def nan_unless(valid: jax.Array, x: jax.Array) -> jax.Array:
    """Returns `x` where valid, else NaN, with a derivative of 1 that compilers can see.

    Jitted even outside jit, so that `jax.debug_nans` only sees the result.
    """
    return x + jnp.where(valid, 0, jnp.nan).astype(x.dtype)
