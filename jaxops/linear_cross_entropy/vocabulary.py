"""The vocabulary: all on this device, or split over a mesh axis."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxops._primitive import sharding
from jaxops._primitive.operator import Operator
from jaxops.linear_cross_entropy.fold_columns import merged
from jaxops.linear_cross_entropy.operands import Columns, Rows, RowStatistics
from jaxops.linear_cross_entropy.operator import linear_row_statistics
from jaxops.linear_cross_entropy.row_statistics import RowSums, target_total


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

    def sum(self, part: jax.Array) -> jax.Array:
        """Sums over all parts of the vocabulary."""
        return part if self.axis is None else jax.lax.psum(part, self.axis)

    def statistics(self, rows: Rows, columns: Columns, **options: Any) -> RowStatistics:
        """Computes the statistics of rows over all classes, with the options of `operator.linear_row_statistics`."""
        if self.axis is not None and rows.x.dtype == jnp.float16:
            # Every part of the vocabulary contributes a share of x's gradient. For a mean these are too small for
            # float16, so they are added in float32.
            rows = rows._replace(x=rows.x.astype(jnp.float32))
        statistics = linear_row_statistics(rows, columns, **options)
        return statistics if self.axis is None else self._merged(statistics, rows, columns)

    def _merged(self, statistics: RowStatistics, rows: Rows, columns: Columns) -> RowStatistics:
        """Merges the statistics of each part, which are relative to the part's own maximum."""
        maximum, log_sum_exp, label_logit, target_logit, mean_logit, prediction = statistics
        parts = RowSums(maximum, jnp.expm1(log_sum_exp), target_logit=target_logit)
        if rows.labels is not None and label_logit is not None:
            has_label = (rows.labels >= 0).astype(maximum.dtype)
            parts = parts._replace(label_logit=label_logit, has_label=has_label)
        if target_logit is not None:
            parts = parts._replace(target_total=target_total(rows, columns, maximum))
        if mean_logit is not None and prediction is not None:
            weighted = mean_logit * jnp.exp(log_sum_exp)
            parts = parts._replace(weighted_logit=weighted, prediction=prediction + self.first)
        over = (functools.partial(of, axis_name=self.axis) for of in (jax.lax.pmax, jax.lax.psum, jax.lax.pmin))
        index = jnp.broadcast_to(jax.lax.axis_index(self.axis), maximum.shape)
        return merged(parts, index, *over).statistics

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
        return self.sum(_LABEL_VALUES(by_class, self.local(labels))[0])


def _label_values(by_class: jax.Array, labels: jax.Array) -> tuple[jax.Array, ...]:
    values = by_class.at[jnp.maximum(labels, 0)].get(mode="promise_in_bounds")
    return (jnp.where(labels >= 0, values, jnp.zeros_like(values)),)


# An operator, so that on an explicit mesh the result is laid out like the labels, which indexing alone cannot infer.
_LABEL_VALUES = Operator(
    name="label_values",
    signature="v, ... -> ...",
    check=lambda *_: None,
    reference=_label_values,
)
