"""The layer that computes logits, the operator's operands for it, and what follows from the operator's answers."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxops._checks.dtypes import accumulation_dtype
from jaxops._primitive.sharding import laid_out_as, same_varying_axes
from jaxops.linear_cross_entropy.operands import Columns, Rows, RowStatistics
from jaxops.linear_cross_entropy.operator import linear_row_statistics
from jaxops.linear_cross_entropy.rewriting import row_wise
from jaxops.linear_cross_entropy.rewriting.row_algebra import RowAlgebra
from jaxops.linear_cross_entropy.rewriting.row_forms import Asked, OneHot, is_shared
from jaxops.linear_cross_entropy.rewriting.row_reading import Reading, identity
from lowering.rewriting.graph import Level, Node, Value
from lowering.rewriting.ordering import Task
from lowering.rewriting.rules import RefusalError


@dataclasses.dataclass(frozen=True)
class Head:
    """A matrix product as a layer; `side` says which operand the weight is."""

    node: Node
    side: int

    @property
    def x(self) -> Value:
        """The value with which the weight is multiplied."""
        return self.node.inputs[1 - self.side]

    @property
    def weight(self) -> Value:
        """The weight, with its axes in any order."""
        return self.node.inputs[self.side]

    @property
    def dtype(self) -> Any:
        """The dtype of the statistics."""
        return accumulation_dtype(self.x.dtype)

    @property
    def classes(self) -> int:
        """The number of classes, V."""
        return int(self.weight.shape[self.layout.class_axis])

    @property
    def features(self) -> int:
        """The number of features, H."""
        return self.weight.size // self.classes

    @property
    def layout(self) -> "Layout":
        """The roles of the axes."""
        if self.node.name == "conv_general_dilated":
            lhs, rhs, out = self.node.params["dimension_numbers"]
            by_result = dict(zip((out[0], *out[2:]), (lhs[0], *lhs[2:]), strict=True))
            rows = tuple(by_result[axis] for axis in sorted(by_result))
            return Layout(rows, (lhs[1],), rhs[0], tuple(rhs[1:]), out[1])
        contracted, _ = self.node.params["dimension_numbers"]
        side, ranks = self.side, [len(x.shape) for x in self.node.inputs]
        free = [tuple(axis for axis in range(ranks[i]) if axis not in contracted[i]) for i in (0, 1)]
        result_axis = len(self.node.outputs[0].shape) - 1 if side == 1 else 0
        return Layout(free[1 - side], tuple(contracted[1 - side]), free[side][0], tuple(contracted[side]), result_axis)

    def rows_of(self, x: Any) -> Any:
        """Returns the operand x as (..., H)."""
        layout = self.layout
        rows = [x.shape[axis] for axis in layout.rows]
        x = _in_order(x, (*layout.rows, *layout.x_features))
        return x if len(layout.x_features) == 1 else x.reshape(*rows, -1)

    def columns_of(self, weight: Any) -> Any:
        """Returns the weight as (V, H)."""
        weight = _in_order(weight, (self.layout.class_axis, *self.layout.weight_features))
        return weight if weight.ndim == 2 else weight.reshape(weight.shape[0], -1)


class Layout(NamedTuple):
    """Roles of the axes of a layer's operands and of its result.

    Attributes:
      rows: axes of x, in the order of the result.
      x_features: axes of x that are added up.
      class_axis: the axis of the weight that counts the classes.
      weight_features: its other axes.
      result_axis: the axis of the result that counts the classes.
    """

    rows: tuple[int, ...]
    x_features: tuple[int, ...]
    class_axis: int
    weight_features: tuple[int, ...]
    result_axis: int


def heads_of(node: Node) -> list[Head]:
    """Lists the ways to read a matrix product, or a convolution with a window of one position, as a layer."""
    x, weight = node.inputs
    precision = node.params.get("precision")
    asked = {str(one) for one in (precision if isinstance(precision, tuple) else (precision,))}
    is_known = asked <= {"None", "DEFAULT"} and x.dtype == weight.dtype and bool(jnp.issubdtype(x.dtype, jnp.floating))
    if not is_known or jnp.finfo(x.dtype).bits < 16:
        return []
    if node.name == "conv_general_dilated":
        return [Head(node, 1)] if _is_pointwise(node) else []
    contracted, batch = node.params["dimension_numbers"]
    sides = [side for side in (1, 0) if len(node.inputs[side].shape) == len(contracted[side]) + 1]
    return [] if batch[0] else [Head(node, side) for side in sides]


def _is_pointwise(node: Node) -> bool:
    params, (_, rhs, _) = node.params, node.params["dimension_numbers"]
    steps = (*params["window_strides"], *params["lhs_dilation"], *params["rhs_dilation"])
    window = [node.inputs[1].shape[axis] for axis in rhs[2:]]
    groups = params["feature_group_count"], params["batch_group_count"]
    is_still = all(tuple(pair) == (0, 0) for pair in params["padding"])
    return is_still and all(size == 1 for size in (*steps, *window, *groups))


class Readers:
    """Readers of a head's logits, whose results follow from statistics of rows.

    Attributes:
      head: the layer.
      found: an evaluation, which says what is asked for.
      nodes: the nodes that read logits, down to numbers per row.
      exits: the values that are read of these elsewhere.
      rows: the shape of the rows that are read.
      inputs: the values from which operands and results are computed.
    """

    def __init__(self, level: Level, wanted: frozenset[Task], head: Head, *, is_promised: bool) -> None:
        """Finds what reads logits; for `is_promised` see `RowAlgebra`.

        Raises:
          RefusalError: if it does not follow from statistics.
        """
        self.head, self._is_promised = head, is_promised
        self._read: dict[Any, Value] = {}

        def look() -> None:
            reading = self._reading(self._remembered)
            reading.explore(level, wanted)
            reading.arrays(reading.exits)
            self.found, self.nodes, self.exits = reading.algebra, tuple(reading.nodes), reading.exits

        jax.eval_shape(look)
        if self.asked.scale is None:
            raise RefusalError("no log sum exp is taken")
        views = self.asked.layer.views
        self.rows = (
            views[-1].shape if views else row_wise.without_axis(head.node.outputs[0].shape, head.layout.result_axis)
        )
        values = (head.x, head.weight, *self._read.values())
        self.inputs = tuple(x for x in dict.fromkeys(values) if not x.is_constant)

    @property
    def asked(self) -> Asked:
        """Questions to the statistics."""
        return self.found.asked

    def _remembered(self, value: Value) -> Any:
        self._read.setdefault(identity(value), value)
        return jnp.zeros(value.shape, value.dtype)

    def _reading(self, read: Callable[[Value], Any], statistics: RowStatistics | None = None, **more: Any) -> Reading:
        """Begins an evaluation; without statistics, nothing is known of them but that they are numbers."""
        algebra = RowAlgebra(self.head.classes, self.head.dtype, is_promised=self._is_promised)
        zero = jnp.zeros((), self.head.dtype)
        if statistics is None:
            statistics = RowStatistics(zero, zero, zero, zero, zero, jnp.zeros((), jnp.int32))
            more = {"square": zero if self._is_promised else None}
        algebra.answer(statistics, **more)
        return Reading(algebra, self.head.node.outputs, self.head.layout.result_axis, read)

    def _evaluated(self, arrays: dict[Value, Any], statistics: RowStatistics | None = None, **more: Any) -> Reading:
        values = self._read.values()
        given = same_varying_axes([x.constant if x.is_constant else arrays[x] for x in values])
        by_identity = dict(zip(self._read, given, strict=True))
        reading = self._reading(lambda value: by_identity[identity(value)], statistics, **more)
        reading.evaluate(self.nodes)
        return reading

    def results(self, arrays: dict[Value, Any], statistics: RowStatistics, **more: Any) -> list[Any]:
        """Computes the exits; for what else may be given, see `RowAlgebra.answer`."""
        return self._evaluated(arrays, statistics, **more).arrays(self.exits)

    def operands(self, arrays: dict[Value, Any]) -> tuple[Rows, Columns]:
        """Returns the operands of the operators; the scale is among the rows, unless it is 1."""
        head = self.head
        x, weight = (value.constant if value.is_constant else arrays[value] for value in (head.x, head.weight))
        x, weight = head.rows_of(x), head.columns_of(weight)
        row = self._evaluated(arrays).algebra
        layer, scale, label, target = row.asked
        for view in layer.views:
            x = view.read(x, 1)
        nothing = jnp.zeros_like(x[..., 0], head.dtype)
        labels = jnp.full_like(nothing, -1, jnp.int32)
        if label is not None:
            # On an explicit mesh, rows may be split in x that are not split in the labels.
            given = jnp.asarray(row.is_class(label).rest), jnp.asarray(row.maxima.array(label), jnp.int32)
            as_rows = (jnp.broadcast_to(value, labels.shape) for value in given)
            is_class, found = (laid_out_as(value, jax.typeof(labels).sharding) for value in as_rows)
            labels = jnp.where(is_class, found, labels)
        scales = None if scale.known == 1 else nothing + jnp.asarray(row.maxima.array(scale), head.dtype)
        bias, kept = layer.bias, layer.kept
        if kept is not None:
            weight = jnp.where(kept[:, None], weight, jnp.zeros_like(weight))
            bias = jnp.where(kept, 0 if bias is None else bias, jnp.asarray(layer.fill, head.dtype))
        rows, columns = Rows(x, labels, scale=scales), Columns(weight, bias)
        if target is None:
            return rows, columns
        if target == "ones":
            return rows, columns._replace(class_targets=jnp.ones(head.classes, head.dtype))
        if is_shared(target):
            return rows, columns._replace(class_targets=target.array.astype(head.dtype))
        return rows._replace(probabilities=jnp.broadcast_to(target.array, (*labels.shape, head.classes))), columns

    def statistics(self, arrays: dict[Value, Any]) -> RowStatistics:
        """Computes the statistics, chunk by chunk."""
        rows, columns = self.operands(arrays)
        metrics = self.found.wants_mean or self.found.wants_prediction
        options: dict[str, Any] = {"softcap": self.asked.layer.softcap, "chunk_rows": None, "metrics": metrics}
        found = linear_row_statistics(rows, columns, **options)
        # Nothing reads what was not asked for.
        return RowStatistics(*(jnp.zeros_like(found.max_logit) if answer is None else answer for answer in found))

    def can_scale_layer(self) -> bool:
        """Tells whether the logits times the scale are those of another layer, up to the rounding of logits."""
        layer, scale, _, _ = self.asked
        if scale.known == 1:
            return True
        is_power = scale.known is not None and math.frexp(scale.known)[0] == 0.5
        is_exact = is_power or jnp.finfo(self.head.x.dtype).bits >= 32
        is_one_number = scale.known is not None or is_shared(scale)
        return is_exact and layer.softcap is None and (is_one_number or (layer.bias is None and layer.kept is None))

    def scaled_operands(self, arrays: dict[Value, Any]) -> tuple[Rows, Columns]:
        """Returns the operands of the layer whose logits are those of `operands` times the scale."""
        rows, columns = self.operands(arrays)
        if rows.scale is None:
            return rows, columns
        scale, bias = rows.scale.astype(rows.x.dtype), columns.bias
        if bias is not None:
            # A forbidden column stays one.
            bias = jnp.where(bias == -jnp.inf, bias, bias * scale.reshape(-1)[0].astype(bias.dtype))
        return rows._replace(x=rows.x * scale[..., None], scale=None), columns._replace(bias=bias)


def one_hot_labels(one_hot: Value, axis: int) -> tuple[tuple[Value, ...], Callable[..., Any]]:
    """Returns what the labels of one-hot rows are computed from, and how.

    Raises:
      RefusalError: if an array does not have a 1 at the label of each row and 0 elsewhere along an axis.
    """
    read: dict[Value, None] = {}

    def label_of(array_of: Callable[[Value], Any]) -> Any:
        algebra = RowAlgebra(one_hot.shape[axis], jnp.float32)
        form = Reading(algebra, (), axis, array_of).pulled(one_hot, axis)
        if not isinstance(form, OneHot) or (form.on.known, form.off.known) != (1, 0):
            raise RefusalError("this is not one-hot")
        return jnp.broadcast_to(algebra.maxima.array(form.label), row_wise.without_axis(one_hot.shape, axis))

    def remembered(value: Value) -> Any:
        read[value] = None
        return jnp.zeros(value.shape, value.dtype)

    jax.eval_shape(lambda: label_of(remembered))
    values = tuple(x for x in read if not x.is_constant)

    def labels(*arrays: Any) -> Any:
        given = dict(zip(values, arrays, strict=True))
        return label_of(lambda value: value.constant if value.is_constant else given[value])

    return values, labels


def _in_order(array: Any, axes: tuple[int, ...]) -> Any:
    return array if axes == tuple(range(array.ndim)) else jnp.transpose(array, axes)
