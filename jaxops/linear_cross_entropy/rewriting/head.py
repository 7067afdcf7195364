"""The layer that computes logits, what its rows are asked for, and the one call that answers."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxops._checks.dtypes import accumulation_dtype
from jaxops.linear_cross_entropy.operands import Columns, Rows
from jaxops.linear_cross_entropy.operator import linear_row_statistics
from jaxops.linear_cross_entropy.rewriting.rows import Change, Read, Row, is_class
from lowering.rewriting.graph import Node, Value
from lowering.rewriting.rules import RefusalError


@dataclasses.dataclass(frozen=True)
class Mask:
    """Columns where a form of columns is `kept` keep their logits; the others have the logit `fill`."""

    columns: Any
    kept: bool
    fill: float


@dataclasses.dataclass(frozen=True)
class Head:
    """A matrix product with what follows it: bias, mask, softcap.

    Attributes:
      node: the product.
      side: which operand the weight is.
      cuts: changes that its rows undergo before anything is read from them.
      biases: forms of columns added to all rows, each times a number.
      mask: which columns take part.
      softcap: the bound of the logits.
    """

    node: Node
    side: int
    cuts: tuple[Change, ...] = ()
    biases: tuple[tuple[Any, float], ...] = ()
    mask: Mask | None = None
    softcap: float | None = None

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
        return int(self.weight.shape[layout_of(self.node, self.side).class_axis])

    @property
    def features(self) -> int:
        """The number of features, H."""
        return self.weight.size // self.classes

    def rows_of(self, x: Any) -> Any:
        """Returns the operand x as (..., H)."""
        layout = layout_of(self.node, self.side)
        rows = [x.shape[axis] for axis in layout.rows]
        x = _in_order(x, (*layout.rows, *layout.x_features))
        x = x if len(layout.x_features) == 1 else x.reshape(*rows, -1)
        for cut in self.cuts:
            x = cut.apply(x)
        return x

    def columns_of(self, weight: Any) -> Any:
        """Returns the weight as (V, H)."""
        layout = layout_of(self.node, self.side)
        weight = _in_order(weight, (layout.class_axis, *layout.weight_features))
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


def layout_of(node: Node, side: int) -> Layout:
    """Returns the layout of a layer whose weight is the operand on this side."""
    if node.name == "conv_general_dilated":
        lhs, rhs, out = node.params["dimension_numbers"]
        by_result = dict(zip((out[0], *out[2:]), (lhs[0], *lhs[2:]), strict=True))
        rows = tuple(by_result[axis] for axis in sorted(by_result))
        return Layout(rows, (lhs[1],), rhs[0], tuple(rhs[1:]), out[1])
    contracted, _ = node.params["dimension_numbers"]
    free = [tuple(axis for axis in range(len(node.inputs[i].shape)) if axis not in contracted[i]) for i in (0, 1)]
    result_axis = len(node.outputs[0].shape) - 1 if side == 1 else 0
    return Layout(free[1 - side], tuple(contracted[1 - side]), free[side][0], tuple(contracted[side]), result_axis)


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


@dataclasses.dataclass(eq=False)
class Statistics:
    """Questions about the rows of one head's logits, and the values that will hold the answers.

    Answers are about the logits times `scale`, relative to each row's maximum.
    """

    head: Head
    scale: Row | None = None
    labels: Row | None = None
    target: Any = None
    target_total: Row | None = None
    wants_mean: bool = False
    wants_prediction: bool = False
    wants_log_sum_exp: bool = False

    def __post_init__(self) -> None:
        shape = jax.ShapeDtypeStruct((), self.head.dtype)
        self.maximum, self.log_sum_exp, self.label, self.weighted, self.mean, self.prediction = (
            Value(shape) for _ in range(6)
        )

    def ask_scale(self, scale: Row) -> None:
        """Asks that the exponentials be of the logits times this."""
        if self.scale is not None and self.scale.key != scale.key:
            raise RefusalError("exponentials of the logits are taken at two temperatures")
        self.scale = scale

    def ask_label(self, labels: Row) -> None:
        """Asks for the logit at these labels."""
        if self.labels is not None and self.labels.key != labels.key:
            raise RefusalError("the logits are picked at two kinds of labels")
        self.labels = labels

    def ask_target(self, target: Any, total: Row) -> None:
        """Asks for the sum of the logits times this, a form or "ones", whose own sum is `total`."""
        if self.target is not None and self.target != target:
            raise RefusalError("two different weighted sums of the logits are wanted")
        self.target, self.target_total = target, total

    def answers(self) -> tuple[Value, ...]:
        """Returns the values that `run` computes."""
        return self.maximum, self.log_sum_exp, self.label, self.weighted, self.mean, self.prediction

    def has_label(self) -> Row:
        """Returns where the label is a class."""
        assert self.labels is not None
        return is_class(self.labels, self.head.classes)

    def operands(self) -> tuple[Value, ...]:
        """Returns the values that `run` needs."""
        head = self.head
        values = {head.x: None, head.weight: None, **{columns.value: None for columns, _ in head.biases}}
        if head.mask is not None:
            values[head.mask.columns.value] = None
        for row in (self.scale, self.labels):
            values.update(dict.fromkeys(row.values if row is not None else ()))
        if hasattr(self.target, "value"):
            values[self.target.value] = None
        return tuple(values)

    def run(self, read: Read) -> Sequence[Any]:
        """Computes the answers, chunk by chunk."""
        rows, columns = self.layer(read)
        if self.scale is not None and self.scale.literal != 1:
            scale = jnp.asarray(self.scale.compute(read), self.head.dtype)
            rows = rows._replace(scale=jnp.broadcast_to(scale, rows.x.shape[:-1]))
        answers = linear_row_statistics(
            rows,
            columns,
            softcap=self.head.softcap,
            chunk_rows=None,
            metrics=self.wants_mean or self.wants_prediction,
        )
        # Nothing reads what was not asked for.
        return [jnp.zeros_like(answers.max_logit) if answer is None else answer for answer in answers]

    def can_scale_layer(self) -> bool:
        """Tells whether the logits times the scale are those of another layer, up to the rounding of logits."""
        head, scale = self.head, self.scale
        if scale is None or scale.literal == 1:
            return scale is not None
        is_power = scale.literal is not None and math.frexp(scale.literal)[0] == 0.5
        is_exact = is_power or jnp.finfo(head.x.dtype).bits >= 32
        is_one_number = scale.literal is not None or all(not x.shape for x in scale.values)
        return is_exact and head.softcap is None and (is_one_number or not (head.biases or head.mask))

    def scaled_layer(self, read: Read) -> tuple[Rows, Columns]:
        """Returns the operands of the layer whose logits are those of `layer` times the scale."""
        rows, columns = self.layer(read)
        if self.scale is None or self.scale.literal == 1:
            return rows, columns
        scale = jnp.asarray(self.scale.compute(read), rows.x.dtype)
        bias = columns.bias
        if bias is not None:
            # A forbidden column stays one.
            bias = jnp.where(bias == -jnp.inf, bias, bias * scale.astype(bias.dtype))
        by_row = jnp.broadcast_to(scale, rows.x.shape[:-1])[..., None]
        return rows._replace(x=rows.x * by_row), columns._replace(bias=bias)

    def layer(self, read: Read) -> tuple[Rows, Columns]:
        """Returns the operands of the operators."""
        head = self.head
        x, weight = head.rows_of(read(head.x)), head.columns_of(read(head.weight))
        bias = self._bias(read)
        if head.mask is not None:
            is_kept = head.mask.columns.array(read) == head.mask.kept
            weight = jnp.where(is_kept[:, None], weight, jnp.zeros_like(weight))
            bias = jnp.where(is_kept, 0 if bias is None else bias, jnp.asarray(head.mask.fill, head.dtype))
        labels = jnp.full(x.shape[:-1], -1, jnp.int32)
        if self.labels is not None:
            labels, has_label = (jnp.asarray(row.compute(read)) for row in (self.labels, self.has_label()))
            labels, has_label = (jnp.broadcast_to(row, x.shape[:-1]) for row in (labels, has_label))
            labels = jnp.where(has_label, labels, jnp.full_like(labels, -1)).astype(jnp.int32)
        rows, columns = Rows(x, labels), Columns(weight, bias)
        if self.target is None:
            return rows, columns
        if self.target == "ones":
            return rows, columns._replace(class_targets=jnp.ones(head.classes, head.dtype))
        target = self.target.array(read)
        if target.ndim > 1:
            return rows._replace(probabilities=target), columns
        return rows, columns._replace(class_targets=target.astype(head.dtype))

    def _bias(self, read: Read) -> Any:
        parts = [factor * columns.array(read).astype(self.head.dtype) for columns, factor in self.head.biases]
        return sum(parts[1:], parts[0]) if parts else None


def _in_order(array: Any, axes: tuple[int, ...]) -> Any:
    return array if axes == tuple(range(array.ndim)) else jnp.transpose(array, axes)
