"""Nodes that reduce arrays of the logits' shape to rows: sums, maxima, predictions and picked classes."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxops.linear_cross_entropy.rewriting import changes, rows
from jaxops.linear_cross_entropy.rewriting.changes import without_axis
from jaxops.linear_cross_entropy.rewriting.forms import changed
from jaxops.linear_cross_entropy.rewriting.reading import Reading
from jaxops.linear_cross_entropy.rewriting.rows import Row
from jaxops.linear_cross_entropy.rewriting.totals import Asked
from lowering.rewriting.graph import Node, Value
from lowering.rewriting.rules import RefusalError

SINKS = frozenset({"reduce_sum", "reduce_max", "argmax", "gather", "dynamic_slice", "dot_general"})


def reduced(node: Node, reading: Reading, asked: Asked) -> Row:
    """Reads what a node computes, with the rows in the order of its result's axes.

    Raises:
      RefusalError: if it is not known.
    """
    return _READERS[node.name](node, reading, asked)


def _axes_behind(node: Node, reading: Reading) -> tuple[Value, int, tuple[int, ...]]:
    """Returns the operand, the axis of its classes, and the other axes that are reduced, counted among the rows."""
    value = node.inputs[0]
    axis, axes = reading.axes[value], tuple(node.params["axes"])
    if axis not in axes:
        raise RefusalError(f"{node.name} on {node.source} reduces over rows, not over classes")
    return value, axis, tuple(other - (other > axis) for other in axes if other != axis)


def _sum(node: Node, reading: Reading, asked: Asked) -> Row:
    value, axis, others = _axes_behind(node, reading)
    total = asked.total(reading.form(value, axis))
    return _summed(total, others, without_axis(value.shape, axis))


def _summed(row: Row, axes: tuple[int, ...], shape: tuple[int, ...]) -> Row:
    if not axes:
        return row
    return rows.combine(("sum", axes), lambda x: jnp.sum(jnp.broadcast_to(x, shape), axes), row)


def _maximum(node: Node, reading: Reading, asked: Asked) -> Row:
    value, axis, others = _axes_behind(node, reading)
    row = asked.maximum(reading.form(value, axis))
    if not others:
        return row
    return rows.combine(("max", others), lambda x: jnp.max(x, others), row)


def _argmax(node: Node, reading: Reading, asked: Asked) -> Row:
    value, axis, others = _axes_behind(node, reading)
    if others:
        raise RefusalError(f"{node.name} on {node.source} looks through several rows")
    return asked.prediction(reading.form(value, axis))


def _gather(node: Node, reading: Reading, asked: Asked) -> Row:
    value, indices = node.inputs
    if value not in reading.axes:
        raise RefusalError(f"{node.name} on {node.source} is indexed by the logits")
    axis = reading.axes[value]
    labels = _labels(node, value, indices, axis)
    asked.picks_by_label |= not is_known(indices)
    form, mode = reading.form(value, axis), node.params["mode"].name
    if mode == "FILL_OR_DROP":
        fill = node.params["fill_value"]
        missing = Row.number(math.nan if fill is None else float(fill))
        return rows.where(asked.is_class(labels), asked.picked(form, labels), missing)
    row = asked.picked(form, _clipped(labels, value.shape[axis]))
    if mode == "CLIP" or asked.is_promised:
        return row
    # JAX picks a class for a label that is none, but drops its gradient.
    fixed = rows.combine("fixed", lambda x: jax.lax.stop_gradient(jnp.asarray(x)), row)
    return rows.where(asked.is_class(labels), row, fixed)


def _clipped(labels: Row, classes: int) -> Row:
    return rows.combine("clip", lambda x: jnp.clip(jnp.asarray(x), 0, classes - 1), labels)


def labels_by_position(node: Node) -> tuple[int, Value] | None:
    """Returns the axis along which a gather picks one number in each row, and the labels, if positions number rows."""
    value, indices = node.inputs
    if node.params["dimension_numbers"].operand_batching_dims:
        return None
    for axis in range(len(value.shape)):
        try:
            (label,) = _labels(node, value, indices, axis).values
        except (RefusalError, ValueError):
            continue
        return axis, label
    return None


def _labels(node: Node, value: Value, indices: Value, axis: int) -> Row:
    """Returns the class that a gather picks in each row; it must pick one in each, in order."""
    numbers, shape = node.params["dimension_numbers"], value.shape
    refusal = RefusalError(f"{node.name} on {node.source} does more than to pick one class per row")
    if any(size != 1 for size in node.params["slice_sizes"]):
        raise refusal
    row_shape = without_axis(shape, axis)
    if numbers.start_index_map == (axis,):
        batch, batch_indices = numbers.operand_batching_dims, numbers.start_indices_batching_dims
        whole = [i for i in range(len(shape)) if i != axis and shape[i] != 1]
        if [i for i in batch if shape[i] != 1] != whole or list(batch_indices) != sorted(batch_indices):
            raise refusal
        if math.prod(indices.shape) != math.prod(row_shape):
            raise refusal
        return Row.of(indices, changes.reshaped(indices.shape, row_shape))
    if sorted(numbers.start_index_map) != list(range(len(shape))) or math.prod(indices.shape[:-1]) != math.prod(
        row_shape
    ):
        raise refusal
    parts = _parts(indices)
    if len(parts) != len(shape):
        raise refusal
    by_axis = dict(zip(numbers.start_index_map, parts, strict=True))
    for other, size in enumerate(shape):
        if other != axis:
            along = other - (other > axis)
            expected = np.broadcast_to(
                np.arange(size).reshape([-1 if i == along else 1 for i in range(len(row_shape))]), row_shape
            )
            found = constant_of(by_axis[other])
            if found is None or not np.array_equal(found.reshape(-1), expected.reshape(-1)):
                raise refusal
    label = by_axis[axis]
    return Row.of(label, changes.reshaped(label.shape, row_shape))


def _parts(indices: Value) -> list[Value]:
    """Returns the arrays that are joined along the last axis, each of length 1 there."""
    node = indices.producer
    if node is None or node.name != "concatenate" or node.params["dimension"] != len(indices.shape) - 1:
        return []
    return list(node.inputs) if all(x.shape[-1] == 1 for x in node.inputs) else []


def constant_of(value: Value) -> np.ndarray | None:
    """Returns the array, if it follows from numbers in the code alone."""
    if value.is_constant:
        return None if isinstance(value.constant, jax.core.Tracer) else np.asarray(value.constant)
    node = value.producer
    if node is None or node.equation.effects or (list(node.params) and "jaxpr" in node.params):
        return None
    operands = [constant_of(x) for x in node.inputs]
    if any(x is None for x in operands):
        return None
    with jax.ensure_compile_time_eval():
        return np.asarray(node.run(*operands)[node.outputs.index(value)])


def is_known(value: Value) -> bool:
    """Tells whether all that decides about a value is written in the code, as numbers or counted positions."""
    seen, waiting = {value}, [value]
    while waiting:
        one = waiting.pop()
        if one.producer is None:
            if not one.is_constant or one.shape:
                return False
        else:
            fresh = [x for x in one.producer.inputs if x not in seen]
            seen.update(fresh)
            waiting += fresh
    return True


def _slice(node: Node, reading: Reading, asked: Asked) -> Row:
    value, *starts = node.inputs
    axis, sizes = reading.axes.get(value), node.params["slice_sizes"]
    is_pick = axis is not None and sizes[axis] == 1 and without_axis(sizes, axis) == without_axis(value.shape, axis)
    if axis is None or not is_pick:
        raise RefusalError(f"{node.name} on {node.source} does more than to pick one class per row")
    label = _clipped(Row.of(starts[axis]), value.shape[axis])
    asked.picks_by_label |= not is_known(starts[axis])
    return asked.picked(reading.form(value, axis), label)


def _product(node: Node, reading: Reading, asked: Asked) -> Row:
    contracted, batch = node.params["dimension_numbers"]
    forms, orders = [], []
    axis = next((reading.axes[x] for x in node.inputs if x in reading.axes), None)
    side = 0 if node.inputs[0] in reading.axes else 1
    if axis not in contracted[side]:
        raise RefusalError(f"{node.name} on {node.source} needs whole rows of logits")
    position = list(contracted[side]).index(axis)
    for i, value in enumerate(node.inputs):
        axis = contracted[i][position]
        others = [a for k, a in enumerate(contracted[i]) if k != position]
        order = [a - (a > axis) for a in (*batch[i], *others)]
        if len(order) != len(value.shape) - 1:
            raise RefusalError(f"{node.name} on {node.source} needs whole rows of logits")
        form = reading.form(value, axis)
        forms.append(form if order == sorted(order) else changed(form, changes.transposed(order)))
        orders.append(tuple(without_axis(value.shape, axis)[a] for a in order))
    total = asked.total_of_product(forms[0], forms[1])
    return _summed(total, tuple(range(len(batch[0]), len(orders[0]))), orders[0])


_READERS: dict[str, Any] = {
    "reduce_sum": _sum,
    "reduce_max": _maximum,
    "argmax": _argmax,
    "gather": _gather,
    "dynamic_slice": _slice,
    "dot_general": _product,
}
