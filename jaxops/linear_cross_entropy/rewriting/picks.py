"""Gathers and scatters of one class of each row, where the code counts the rows in order."""

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxops.linear_cross_entropy.rewriting.row_wise import Chunk, Part, without_axis
from lowering.rewriting.graph import SAME, Node, Value, backward, names_axes

SCATTERS = frozenset({"scatter-add", "scatter"})


class Pick(NamedTuple):
    """One class of each row, which a gather picks or a scatter writes.

    Attributes:
      axis: the axis of the classes.
      labels: the class of each row.
      first: the position of the first row that is read, along each axis of rows.
      shape: how many are read along each.
    """

    axis: int
    labels: Value
    first: tuple[int, ...]
    shape: tuple[int, ...]

    def moved(self, part: Part, shape: Sequence[int], sign: int) -> Part | None:
        """Finds where what is read has its rows (`sign` 1), or what it is read from (-1); `shape` is of all rows."""
        first, at = self.first[part.axis], part.axis
        return part.without(sign * first, sign * (shape[at] - first - self.shape[at]))


def picks_by_position(node: Node) -> Iterator[Pick]:
    """Yields the ways to read a gather or scatter as one class of each row, with rows that the code counts in order."""
    value, indices = node.inputs[:2]
    numbers, shape = node.params["dimension_numbers"], value.shape
    parts = _parts(indices)
    if node.name == "gather":
        is_pick, axes = all(size == 1 for size in node.params["slice_sizes"]), numbers.start_index_map
    else:
        is_pick, axes = not numbers.update_window_dims, numbers.scatter_dims_to_operand_dims
    if not is_pick or indices.size == 0:
        return
    if len(shape) == 2 and shape[0] == shape[1] and len(numbers.operand_batching_dims) == 1:
        # On the diagonal, rows are classes, as where a contrastive loss takes both log softmaxes.
        labels = constant_of(indices)
        if labels is not None and np.array_equal(labels.reshape(-1), np.arange(shape[0])):
            yield Pick(numbers.operand_batching_dims[0], indices, (0,), shape[:1])
    if len(parts) != len(shape) or sorted(axes) != list(range(len(shape))):
        return
    by_axis = dict(zip(axes, parts, strict=True))
    known = {axis: constant_of(x) for axis, x in by_axis.items()}
    for axis in range(len(shape)):
        others = [at.reshape(-1) for other, at in known.items() if other != axis and at is not None]
        if len(others) < len(shape) - 1:
            continue
        first = tuple(int(at.min()) for at in others)
        read = tuple(int(at.max()) + 1 - start for at, start in zip(others, first, strict=True))
        counted = zip(others, np.indices(read), first, strict=True)
        is_within = all(
            x >= 0 and x + n <= size for x, n, size in zip(first, read, without_axis(shape, axis), strict=True)
        )
        is_counted = len(others[0]) == math.prod(read) if others else True
        if is_within and is_counted and all(np.array_equal(at, each.reshape(-1) + x) for at, each, x in counted):
            yield Pick(axis, by_axis[axis], first, read)


def run_pick(node: Node, pick: Pick, part: Part, chunk: Chunk, arrays: Sequence[Any]) -> Any:
    """Computes what a gather picks or a scatter adds for a chunk; `part` is of the rows that are read."""
    shape, read = without_axis(arrays[0].shape, pick.axis), chunk.shape(part, pick.shape)
    ahead = [0 if at == part.axis and not chunk.is_whole else first for at, first in enumerate(pick.first)]
    sides = [(first, size - first - count, 0) for first, size, count in zip(ahead, shape, read, strict=True)]

    def padded(x: Any, sides: Sequence[tuple[int, int, int]]) -> Any:
        return x if all(side == (0, 0, 0) for side in sides) else lax.pad(x, jnp.zeros((), x.dtype), sides)

    labels, *updates = (x.reshape(read) for x in arrays[1:])
    if not updates:
        found = _picked(node, pick.axis, arrays[0], padded(labels, sides))
        return padded(found.reshape(shape), [(-low, -high, 0) for low, high, _ in sides])
    added = padded(chunk.present(part, updates[0], 0), sides)
    return _added_at(node, pick.axis, arrays[0], padded(labels, sides), added)


def _picked(node: Node, axis: int, array: Any, labels: Any) -> Any:
    """Picks along an axis by labels (a number for each row) as a gather does, and keeps the axis."""
    others = tuple(other for other in range(array.ndim) if other != axis)
    numbers = lax.GatherDimensionNumbers((), (axis,), (axis,), others, others)
    shape = (*array.shape[:axis], 1, *array.shape[axis + 1 :], 1)
    mode, fill = node.params["mode"], node.params["fill_value"]
    return lax.gather(array, labels.reshape(shape), numbers, (1,) * array.ndim, mode=mode, fill_value=fill)


def _added_at(node: Node, axis: int, array: Any, labels: Any, updates: Any) -> Any:
    """Adds a number for each row along an axis, at its label, as a scatter does."""
    others = tuple(other for other in range(array.ndim) if other != axis)
    numbers = lax.ScatterDimensionNumbers((), (axis,), (axis,), others, tuple(range(len(others))))
    shape = without_axis(array.shape, axis)
    scatter = lax.scatter if node.name == "scatter" else lax.scatter_add
    return scatter(
        array, labels.reshape(*shape, 1), updates.reshape(shape), numbers, unique_indices=True, mode=node.params["mode"]
    )


def _parts(indices: Value) -> list[Value]:
    """Returns the arrays that are joined along the last axis, each of length 1 there."""
    node = indices.producer
    if node is None or node.name != "concatenate" or node.params["dimension"] != len(indices.shape) - 1:
        return []
    return list(node.inputs) if all(x.shape[-1] == 1 for x in node.inputs) else []


def number_of(value: Value) -> Any:
    """Returns a scalar as a Python number, if it follows from numbers in the code alone, such as the root of a size."""
    found = constant_of(value) if value.shape == () and not value.is_constant else None
    return value.number if found is None else found.item()


def constant_of(value: Value) -> np.ndarray | None:
    """Returns the array, if it follows from numbers in the code alone."""
    if value.dtype is None or jnp.issubdtype(value.dtype, jax.dtypes.extended):
        return None
    if value.is_constant:
        return None if isinstance(value.constant, jax.core.Tracer) else np.asarray(value.constant)
    node = value.producer
    if node is not None and node.name in SAME:
        return constant_of(node.inputs[node.outputs.index(value)])
    if node is None or node.equation.effects or "jaxpr" in node.params or names_axes(node.params):
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
