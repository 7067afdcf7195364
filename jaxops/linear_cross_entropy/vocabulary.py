"""The vocabulary: all on this device, or split over a mesh axis."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxops._primitive import sharding
from jaxops._primitive.operator import Operator
from jaxops.linear_cross_entropy.logits import RowStatistics, Targets, target_total


class Vocabulary(NamedTuple):
    """The number of columns on this device, that of all classes, and the mesh axis over which columns are split."""

    columns: int
    classes: int
    axis: str | None

    @classmethod
    def of(cls, operator: str, weight: jax.Array, axis: str | None) -> "Vocabulary":
        """The vocabulary, from this device's part of the weight (V, H)."""
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

    def sum(self, part: jax.Array) -> jax.Array:
        """The sum over all parts of the vocabulary."""
        return part if self.axis is None else jax.lax.psum(part, self.axis)

    def merge(self, rows: RowStatistics, targets: Targets, *, metrics: bool) -> RowStatistics:
        """The statistics of whole rows, from those of each part, which are relative to the part's own maximum."""
        if self.axis is None:
            return rows
        local_max = jax.lax.stop_gradient(rows.max_logit)
        # A part without a finite logit has 0 as its maximum.
        empty = rows.log_sum_exp == -jnp.inf
        maximum = jax.lax.pmax(jax.lax.stop_gradient(jnp.where(empty, -jnp.inf, local_max)), self.axis)
        maximum = jnp.where(maximum == -jnp.inf, jnp.zeros_like(maximum), maximum)
        shift = local_max - maximum
        log_sum_exp = jnp.log(self.sum(jnp.exp(rows.log_sum_exp + shift)))
        label_logit = jnp.where(targets.labels >= 0, rows.label_logit + shift, jnp.zeros_like(shift))
        target_logit = rows.target_logit + target_total(targets, shift) * shift
        merged = rows._replace(
            max_logit=maximum,
            log_sum_exp=log_sum_exp,
            label_logit=self.sum(label_logit),
            target_logit=self.sum(target_logit),
        )
        if not metrics:
            return merged
        share = jnp.exp(rows.log_sum_exp + shift - log_sum_exp)
        mean_logit = jnp.where(empty, jnp.zeros_like(shift), share * (rows.mean_logit + shift))
        prediction = self._first_with_maximum(rows.prediction, local_max, maximum)
        return merged._replace(mean_logit=self.sum(mean_logit), prediction=prediction)

    def argmax(self, row_values: jax.Array) -> jax.Array:
        """The class with the largest value of each row (..., columns); of equal ones, the first."""
        best = jnp.argmax(row_values, axis=-1).astype(jnp.int32)
        if self.axis is None:
            return best
        local_max = jax.lax.stop_gradient(jnp.max(row_values, axis=-1))
        return self._first_with_maximum(best, local_max, jax.lax.pmax(local_max, self.axis))

    def weights_of(self, labels: jax.Array, class_weight: jax.Array) -> jax.Array:
        """The class weight of each row's label; 0 if the label is not a class."""
        return self.sum(_LABEL_WEIGHTS(class_weight, self.local(labels))[0])

    def _first_with_maximum(self, columns: jax.Array, local_max: jax.Array, maximum: jax.Array) -> jax.Array:
        """The first class among the parts' best columns that reach the maximum."""
        return jax.lax.pmin(jnp.where(local_max == maximum, columns + self.first, self.classes), self.axis)


def _label_weights(class_weight: jax.Array, labels: jax.Array) -> tuple[jax.Array, ...]:
    weights = class_weight.at[jnp.maximum(labels, 0)].get(mode="promise_in_bounds")
    return (jnp.where(labels >= 0, weights, jnp.zeros_like(weights)),)


# An operator, so that on an explicit mesh the result is laid out like the labels, which indexing alone cannot infer.
_LABEL_WEIGHTS = Operator(
    name="label_weights",
    signature="v, ... -> ...",
    check=lambda *_: None,
    reference=_label_weights,
)
