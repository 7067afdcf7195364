"""Reads what an array of the logits' shape is made of, backwards through the nodes that compute it."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxops.linear_cross_entropy.rewriting import changes, rows
from jaxops.linear_cross_entropy.rewriting.changes import without_axis
from jaxops.linear_cross_entropy.rewriting.forms import (
    Columns,
    Dense,
    Elementwise,
    Exponentials,
    Form,
    Logits,
    OneHot,
    Rows,
    changed,
)
from jaxops.linear_cross_entropy.rewriting.head import Head, Mask, layout_of
from jaxops.linear_cross_entropy.rewriting.rows import Row
from lowering.rewriting.graph import SAME, Node, Value
from lowering.rewriting.rules import RefusalError

RESHAPES = frozenset({"reshape", "squeeze", "expand_dims"})
ELEMENTWISE = frozenset(
    {"add", "add_any", "sub", "mul", "div", "neg", "exp", "exp2", "log", "log1p", "expm1", "tanh", "logistic", "sqrt"}
    | {"rsqrt", "square", "integer_pow", "pow", "abs", "sign", "max", "min", "clamp", "select_n", "eq", "ne", "lt"}
    | {"le", "gt", "ge", "and", "or", "not", "is_finite", "convert_element_type", "stop_gradient", "floor", "ceil"}
)


class Reading:
    """Forms of the values that are computed from the result of one matrix product, and of those that meet them."""

    def __init__(self, classes: int, dtype: Any, axes: dict[Value, int], head: Head | None = None) -> None:
        """Takes the number of classes, the dtype of sums over them, and what the result of the head is.

        Args:
          classes: how many there are.
          dtype: in which numbers per row are computed.
          axes: the values that are logits, and which of their axes counts the classes.
          head: what computes these.
        """
        self.classes = classes
        self.dtype = dtype
        self._head = head
        self._logits = set(axes)
        # The values that depend on logits and still have all classes, and which axis counts those.
        self.axes = dict(axes)
        self._known: dict[tuple[Value, int], Form] = {}

    @classmethod
    def of(cls, head: Head, alike: Sequence[Node]) -> "Reading":
        """Starts to read the logits of a head, which all these nodes compute."""
        axis = layout_of(head.node, head.side).result_axis
        return cls(head.classes, head.dtype, {value: axis for node in alike for value in node.outputs}, head)

    def follow(self, node: Node) -> bool:
        """Remembers a node whose result has all classes as well, and tells whether it does."""
        sources = [x for x in dict.fromkeys(node.inputs) if x in self.axes]
        if len(node.outputs) != 1 or node.name not in SAME | RESHAPES | ELEMENTWISE | {
            *("broadcast_in_dim", "transpose", "slice")
        }:
            return False
        axes = {self._axis_after(node, x, self.axes[x]) for x in sources}
        if len(axes) != 1 or None in axes:
            return False
        self.axes[node.outputs[0]] = axes.pop()  # type: ignore[assignment]
        return True

    def _axis_after(self, node: Node, operand: Value, axis: int) -> int | None:
        shape = node.outputs[0].shape
        match node.name:
            case "transpose":
                return tuple(node.params["permutation"]).index(axis)
            case "broadcast_in_dim":
                return node.params["broadcast_dimensions"][axis]
            case "slice":
                return axis if shape[axis] == operand.shape[axis] else None
            case "reshape" | "squeeze" | "expand_dims":
                return _kept_axis(operand.shape, axis, shape)
        # An operand may have axes of length 1 where the result has longer ones, but not rows that the result lacks.
        return axis if shape[axis] == operand.shape[axis] else None

    def form(self, value: Value, axis: int) -> Form:
        """Returns the form of a value, where `axis` counts the classes.

        Raises:
          RefusalError: if it depends on the logits in a way that is not known.
        """
        if (value, axis) not in self._known:
            found = self._read(value, axis)
            if value not in self.axes and not isinstance(found, Rows | Columns | OneHot):
                found = Dense(value, axis)
            self._known[value, axis] = found
        return self._known[value, axis]

    def _read(self, value: Value, axis: int) -> Form:
        node = value.producer
        if value in self._logits:
            assert self._head is not None
            return Logits(self._head)
        if node is None or value.shape[axis] != self.classes:
            return Dense(value, axis)
        if value in self.axes and self.axes[value] != axis:
            raise RefusalError(f"{node.name} on {node.source} mixes rows and classes")
        match node.name:
            case name if name in SAME:
                return self.form(node.inputs[node.outputs.index(value)], axis)
            case "broadcast_in_dim":
                return self.aligned(node.inputs[0], value.shape, axis, node.params["broadcast_dimensions"])
            case name if name in RESHAPES:
                return self._reshaped(node, axis)
            case "transpose":
                return self._transposed(node, axis)
            case "slice":
                return self._sliced(node, axis)
            case "iota":
                return self._iota(node, axis)
            case name if name in ELEMENTWISE:
                operands = tuple(self.aligned(x, value.shape, axis) for x in node.inputs)
                return combined(node, operands, self.dtype)
        if value in self.axes:
            raise RefusalError(f"{node.name} on {node.source} is not known to this rule")
        return Dense(value, axis)

    def aligned(self, value: Value, shape: Sequence[int], axis: int, dims: Sequence[int] | None = None) -> Form:
        """Returns the form of an operand that is repeated to this shape; its axes become the axes `dims`."""
        dims = tuple(range(len(value.shape))) if dims is None else tuple(dims)
        if not value.shape:
            return Rows(Row.of(value))
        if tuple(value.shape) == tuple(shape) and dims == tuple(range(len(shape))):
            return self.form(value, axis)
        at = dims.index(axis) if axis in dims else None
        behind = tuple(dim - (dim > axis) for dim in dims if dim != axis)
        target = without_axis(shape, axis)
        if at is None:
            return Rows(Row.of(value, changes.spread(value.shape, target, behind)))
        rest = without_axis(value.shape, at)
        if value.shape[at] == 1 != shape[axis]:
            squeezed = changes.reshaped(value.shape, rest)
            return Rows(Row.of(value, squeezed).through(changes.spread(rest, target, behind)))
        if value not in self.axes and math.prod(rest) == 1:
            return Columns(value, at)
        return changed(self.form(value, at), changes.spread(rest, target, behind))

    def _reshaped(self, node: Node, axis: int) -> Form:
        (value,), shape = node.inputs[:1], node.outputs[0].shape
        before = _kept_axis(shape, axis, value.shape)
        if before is None:
            if node.outputs[0] in self.axes:
                raise RefusalError(f"{node.name} on {node.source} mixes rows and classes")
            return Dense(node.outputs[0], axis)
        change = changes.reshaped(without_axis(value.shape, before), without_axis(shape, axis))
        return changed(self.form(value, before), change)

    def _transposed(self, node: Node, axis: int) -> Form:
        order = node.params["permutation"]
        before = order[axis]
        rows_order = [old - (old > before) for new, old in enumerate(order) if new != axis]
        form = self.form(node.inputs[0], before)
        is_same = rows_order == sorted(rows_order)
        return form if is_same else changed(form, changes.transposed(rows_order))

    def _sliced(self, node: Node, axis: int) -> Form:
        (value,), params = node.inputs, node.params
        if value.shape[axis] != node.outputs[0].shape[axis]:
            return Dense(node.outputs[0], axis)
        strides = params["strides"] or (1,) * len(value.shape)
        bounds = (without_axis(x, axis) for x in (params["start_indices"], params["limit_indices"], strides))
        return changed(self.form(value, axis), changes.sliced(*bounds))

    def _iota(self, node: Node, axis: int) -> Form:
        params = node.params
        if params["dimension"] != axis:
            along = params["dimension"] - (params["dimension"] > axis)
            shape, dtype = without_axis(params["shape"], axis), params["dtype"]
            key = ("iota", shape, along, str(dtype))
            return Rows(Row(key, frozenset(), lambda _: jax.lax.broadcasted_iota(dtype, shape, along)))
        return Columns(node.outputs[0], axis)


def counts_classes(columns: Columns) -> bool:
    """Tells whether the numbers are 0, 1, 2, ..."""
    value, axis = columns.value, columns.axis
    while value.producer is not None:
        node = value.producer
        match node.name:
            case "iota":
                return bool(node.params["dimension"] == axis)
            case "broadcast_in_dim":
                dims = node.params["broadcast_dimensions"]
                before = dims.index(axis) if axis in dims else None
            case "reshape" | "squeeze" | "expand_dims":
                before = _kept_axis(value.shape, axis, node.inputs[0].shape)
            case "convert_element_type":
                before = axis
            case _:
                return False
        if before is None or node.inputs[0].shape[before] != value.shape[axis]:
            return False
        value, axis = node.inputs[0], before
    if not value.is_constant or isinstance(value.constant, jax.core.Tracer):
        return False
    numbers = np.moveaxis(np.asarray(value.constant), axis, -1)
    return bool(np.all(numbers == np.arange(numbers.shape[-1])))


def combined(node: Node, operands: Sequence[Form], dtype: Any) -> Form:
    """Returns the form that a node computes from forms, number by number."""
    labels = {form.labels.key for form in operands if isinstance(form, OneHot)}
    if all(isinstance(form, Rows | OneHot) for form in operands) and len(labels) <= 1:
        return _of_rows(node, operands, dtype)
    rule = _RULES.get(node.name)
    found = None if rule is None else rule(node, operands)
    return Elementwise(node, tuple(operands)) if found is None else found


def _of_rows(node: Node, operands: Sequence[Form], dtype: Any) -> Form:
    one_hot = next((form for form in operands if isinstance(form, OneHot)), None)
    at_label = [form.on if isinstance(form, OneHot) else form.row for form in operands]  # type: ignore[union-attr]
    on = _computed(node, at_label, dtype)
    if one_hot is None:
        return Rows(on)
    elsewhere = [form.off if isinstance(form, OneHot) else form.row for form in operands]  # type: ignore[union-attr]
    return OneHot(one_hot.labels, on, _computed(node, elsewhere, dtype))


def _computed(node: Node, operands: Sequence[Row], dtype: Any) -> Row:
    row = rows.bound(node, operands, dtype)
    if any(operand.literal is None for operand in operands):
        return row
    with jax.ensure_compile_time_eval():
        return Row.number(np.asarray(row.compute(lambda _: None)).item())


def _compared(node: Node, operands: Sequence[Form]) -> Form | None:
    is_equal = node.name == "eq"
    for one, other in (operands, operands[::-1]):
        if isinstance(one, Rows) and isinstance(other, Columns) and counts_classes(other):
            return OneHot(one.row, Row.number(is_equal), Row.number(not is_equal))
    return None


def _added(node: Node, operands: Sequence[Form]) -> Form | None:
    a, b = operands
    sign = -1.0 if node.name == "sub" else 1.0
    if isinstance(a, Logits) and isinstance(b, Rows):
        shift = (rows.minus if sign < 0 else rows.plus)(a.shift, b.row)
        return dataclasses.replace(a, shift=shift)
    if isinstance(a, Rows) and isinstance(b, Logits):
        scale = b.scale if sign > 0 else rows.times(Row.number(-1.0), b.scale)
        shift = (rows.minus if sign < 0 else rows.plus)(a.row, b.shift)
        return dataclasses.replace(b, scale=scale, shift=shift)
    if isinstance(a, Logits) and isinstance(b, Columns):
        return _biased(a, b, sign)
    if isinstance(b, Logits) and isinstance(a, Columns) and sign > 0:
        return _biased(b, a, sign)
    return None


def _biased(logits: Logits, bias: Columns, sign: float) -> Form | None:
    """Adds one more bias to logits, which the head can take as long as nothing but a number has multiplied them."""
    head, scale = logits.head, logits.scale.literal
    if scale in (None, 0) or logits.shift.literal != 0 or head.softcap is not None or head.mask is not None:
        return None
    if not jnp.issubdtype(bias.value.dtype, jnp.floating):
        return None
    head = dataclasses.replace(head, biases=(*head.biases, (bias, sign / scale)))
    return dataclasses.replace(logits, head=head)


def _multiplied(node: Node, operands: Sequence[Form]) -> Form | None:
    a, b = operands
    if isinstance(a, Rows):
        a, b = b, a
    if not isinstance(b, Rows):
        return None
    if isinstance(a, Elementwise) and a.node.name == "tanh":
        return _capped(a, b.row)
    return _scaled(a, b.row, rows.times)


def _divided(node: Node, operands: Sequence[Form]) -> Form | None:
    a, b = operands
    return _scaled(a, b.row, rows.over) if isinstance(b, Rows) else None


def _scaled(form: Form, by: Row, change: Callable[[Row, Row], Row]) -> Form | None:
    if isinstance(form, Logits):
        return dataclasses.replace(form, scale=change(form.scale, by), shift=change(form.shift, by))
    return Exponentials(form.logits, change(form.gain, by)) if isinstance(form, Exponentials) else None


def _capped(tanh: Elementwise, by: Row) -> Form | None:
    """Reads c tanh(z / c) as the logits of a head with a softcap."""
    (logits,) = tanh.operands
    if not isinstance(logits, Logits) or logits.shift.literal != 0 or logits.head.softcap is not None:
        return None
    scale, cap = logits.scale.literal, by.literal
    if scale is None or cap is None or cap <= 0 or abs(scale * cap - 1) > 1e-6 or logits.head.mask is not None:
        return None
    return Logits(dataclasses.replace(logits.head, softcap=float(cap)), changes=logits.changes)


def _negated(node: Node, operands: Sequence[Form]) -> Form | None:
    return _scaled(operands[0], Row.number(-1.0), rows.times)


def _exponential(node: Node, operands: Sequence[Form]) -> Form | None:
    return Exponentials(operands[0]) if isinstance(operands[0], Logits) else None


def _converted(node: Node, operands: Sequence[Form]) -> Form | None:
    """Leaves out a rounding to another dtype and back, as logits are kept in float32 or wider."""
    (form,), to = operands, node.outputs[0].dtype
    if not jnp.issubdtype(to, jnp.floating) or not jnp.issubdtype(node.inputs[0].dtype, jnp.floating):
        return None
    if jnp.finfo(to).bits > _bits(form):
        raise RefusalError(f"the logits are widened to {to} on {node.source}")
    return form


def _bits(form: Form) -> int:
    if isinstance(form, Elementwise):
        return max(map(_bits, form.operands))
    logits = form.logits if isinstance(form, Exponentials) else form
    return int(jnp.finfo(logits.head.dtype).bits) if isinstance(logits, Logits) else 64


def _selected(node: Node, operands: Sequence[Form]) -> Form | None:
    """Puts a number in place of some columns of the logits."""
    condition, *cases = operands
    for logits, other, kept in ((cases[1], cases[0], True), (cases[0], cases[1], False)):
        if not (isinstance(condition, Columns) and isinstance(logits, Logits) and isinstance(other, Rows)):
            continue
        fill, head = other.row.literal, logits.head
        is_fresh = logits.scale.literal == 1 and logits.shift.literal == 0 and head.softcap is None
        if fill is not None and is_fresh and head.mask is None:
            return dataclasses.replace(logits, head=dataclasses.replace(head, mask=Mask(condition, kept, fill)))
    return None


_RULES: dict[str, Callable[[Node, Sequence[Form]], Form | None]] = {
    "eq": _compared,
    "ne": _compared,
    "add": _added,
    "add_any": _added,
    "sub": _added,
    "mul": _multiplied,
    "div": _divided,
    "neg": _negated,
    "exp": _exponential,
    "convert_element_type": _converted,
    "select_n": _selected,
}


def _kept_axis(before: Sequence[int], axis: int, after: Sequence[int]) -> int | None:
    """Returns the axis that a reshape turns an axis into, if it keeps it whole."""
    ahead = math.prod(before[:axis])
    candidates = [i for i, size in enumerate(after) if size == before[axis] and math.prod(after[:i]) == ahead]
    return candidates[0] if candidates else None
