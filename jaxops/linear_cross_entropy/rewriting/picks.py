"""Gathers that pick one number in each row, and what decides which: labels, or numbers in the code."""

import math
from typing import Any

import jax
import numpy as np
from jax import lax

from lowering.rewriting.graph import Node, Value, backward


def without_axis(shape: Any, axis: int) -> tuple[int, ...]:
    """Returns a shape without one of its axes."""
    return (*shape[:axis], *shape[axis + 1 :])


def labels_by_position(node: Node) -> tuple[int, Value] | None:
    """Returns the axis along which a gather picks one number in each row, and the labels, if positions number rows."""
    value, indices = node.inputs
    numbers, shape = node.params["dimension_numbers"], value.shape
    parts = _parts(indices)
    is_pick = all(size == 1 for size in node.params["slice_sizes"]) and len(parts) == len(shape)
    if not is_pick or sorted(numbers.start_index_map) != list(range(len(shape))):
        return None
    by_axis = dict(zip(numbers.start_index_map, parts, strict=True))
    for axis in range(len(shape)):
        row_shape = without_axis(shape, axis)
        others = [other for other in range(len(shape)) if other != axis]
        counted = zip((by_axis[other] for other in others), np.indices(row_shape), strict=True)
        if math.prod(indices.shape[:-1]) == math.prod(row_shape) and all(_is_array(*each) for each in counted):
            return axis, by_axis[axis]
    return None


def picked(node: Node, axis: int, array: Any, labels: Any) -> Any:
    """Picks along an axis by labels (a number for each row) as a gather does, and keeps the axis."""
    others = tuple(other for other in range(array.ndim) if other != axis)
    numbers = lax.GatherDimensionNumbers((), (axis,), (axis,), others, others)
    shape = (*array.shape[:axis], 1, *array.shape[axis + 1 :], 1)
    mode, fill = node.params["mode"], node.params["fill_value"]
    return lax.gather(array, labels.reshape(shape), numbers, (1,) * array.ndim, mode=mode, fill_value=fill)


def _is_array(value: Value, expected: np.ndarray) -> bool:
    found = constant_of(value)
    return found is not None and np.array_equal(found.reshape(-1), expected.reshape(-1))


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
    if node is None or node.equation.effects or "jaxpr" in node.params:
        return None
    operands = [constant_of(x) for x in node.inputs]
    if any(x is None for x in operands):
        return None
    with jax.ensure_compile_time_eval():
        return np.asarray(node.run(*operands)[node.outputs.index(value)])


def is_known(value: Value) -> bool:
    """Tells whether all that decides about a value is written in the code, as numbers or counted positions."""
    made_of = backward(value, lambda *_: True)
    return all(x.producer is not None or (x.is_constant and not x.shape) for x in made_of)
