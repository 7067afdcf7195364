"""Rows that are taken in chunks: which axis of an array holds them, and how each node computes a chunk.

Gathers may pick one number in each row: by labels, or by numbers in the code.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxops._primitive import sharding
from lowering.rewriting.graph import SAME, Node, Value, backward
from lowering.rewriting.rules import RefusalError

RESHAPES = frozenset({"reshape", "squeeze", "expand_dims"})
ELEMENTWISE = frozenset(
    {"add", "add_any", "sub", "mul", "div", "neg", "exp", "exp2", "log", "log1p", "expm1", "tanh", "logistic", "sqrt"}
    | {"rsqrt", "square", "integer_pow", "pow", "abs", "sign", "max", "min", "clamp", "select_n", "eq", "ne", "lt"}
    | {"le", "gt", "ge", "and", "or", "not", "is_finite", "convert_element_type", "stop_gradient", "floor", "ceil"}
)
_MORE_ELEMENTWISE = frozenset(
    {"erf", "erfc", "erf_inv", "sin", "cos", "tan", "asin", "acos", "atan", "atan2", "sinh", "cosh", "asinh", "acosh"}
    | {"atanh", "lgamma", "digamma", "round", "rem", "nextafter", "shift_right_logical", "xor", "cbrt"}
)
POINTWISE = ELEMENTWISE | SAME | _MORE_ELEMENTWISE
_REDUCTIONS = frozenset(
    {"reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or", "argmax", "argmin"}
)
_LINEAR = frozenset({"neg", "convert_element_type", "reshape", "squeeze", "expand_dims", "broadcast_in_dim", "copy"})
_ALONG_ONE_AXIS = frozenset({"cumsum", "cumlogsumexp", "cummax", "cummin", "cumprod", "sort", "top_k", "concatenate"})


class Part(NamedTuple):
    """Place of the rows in an array: an axis of `outer` x rows x `inner` positions."""

    axis: int
    outer: int = 1
    inner: int = 1

    def size(self, rows: int) -> int:
        """Returns the length of the axis, for so many rows."""
        return self.outer * rows * self.inner

    def shape(self, shape: Sequence[int], rows: int) -> tuple[int, ...]:
        """Returns a shape with so many rows."""
        return (*shape[: self.axis], self.size(rows), *shape[self.axis + 1 :])

    def chunks(self, array: Any, rows: int, steps: int) -> Any:
        """Cuts an array into chunks of so many rows, along a new first axis; for meshes, each has rows of all parts."""
        before, behind = array.shape[: self.axis], array.shape[self.axis + 1 :]
        parts = sharding.reshaped(array, (*before, self.outer, rows, steps, self.inner, *behind))
        parts = lax.transpose(parts, _moved(parts.ndim, len(before) + 2, 0))
        return sharding.reshaped(parts, (steps, *before, self.size(rows), *behind))

    def joined(self, chunks: Any, rows: int, steps: int) -> Any:
        """Inverts `chunks`."""
        before, behind = chunks.shape[1 : self.axis + 1], chunks.shape[self.axis + 2 :]
        parts = sharding.reshaped(chunks, (steps, *before, self.outer, rows, self.inner, *behind))
        parts = lax.transpose(parts, _moved(parts.ndim, 0, len(before) + 2))
        return sharding.reshaped(parts, (*before, self.size(rows * steps), *behind))

    def cut(self, array: Any, first: int, last: int, rows: int) -> Any:
        """Takes the rows from `first` to `last`."""
        before, behind = array.shape[: self.axis], array.shape[self.axis + 1 :]
        parts = sharding.reshaped(array, (*before, self.outer, rows, self.inner, *behind))
        parts = lax.slice_in_dim(parts, first, last, axis=len(before) + 1)
        return sharding.reshaped(parts, (*before, self.size(last - first), *behind))


# A result that adds up all rows, or is the largest or smallest of them.
SUM, MAX, MIN = "sum", "max", "min"
Role = Part | str | None


def _moved(rank: int, source: int, target: int) -> tuple[int, ...]:
    order = [axis for axis in range(rank) if axis != source]
    order.insert(target, source)
    return tuple(order)


class Along(NamedTuple):
    """Axis along which a node treats all positions alike.

    Attributes:
      operands: that axis of each operand; None of one that all positions share.
      result: that axis of the results; SUM if they add up its positions, MAX or MIN if they take one.
    """

    operands: tuple[int | None, ...]
    result: int | str


def axes_of(node: Node) -> list[Along]:
    """Lists the axes along which a node is known to treat all positions alike, but for those of reshapes."""
    params, shape = node.params, node.outputs[0].shape
    shapes = [x.shape for x in node.inputs]
    match node.name:
        case name if name in POINTWISE:
            whole = [[x and x[i] == size for x in shapes] for i, size in enumerate(shape)]
            return [Along(tuple(i if is_whole else None for is_whole in x), i) for i, x in enumerate(whole)]
        case "iota":
            return [Along((), i) for i in range(len(shape)) if i != params["dimension"]]
        case "broadcast_in_dim":
            dims = {at: i for i, at in enumerate(params["broadcast_dimensions"]) if shapes[0][i] == shape[at]}
            return [Along((dims.get(i),), i) for i in range(len(shape))]
        case "transpose":
            return [Along((before,), i) for i, before in enumerate(params["permutation"])]
        case name if name in _REDUCTIONS:
            kept = [i for i in range(len(shapes[0])) if i not in params["axes"]]
            over_rows = {"reduce_sum": SUM, "reduce_max": MAX, "reduce_min": MIN}.get(name, "")
            gone = params["axes"] if over_rows else ()
            return [*(Along((i,), at) for at, i in enumerate(kept)), *(Along((i,), over_rows) for i in gone)]
        case name if name in _ALONG_ONE_AXIS:
            along = params.get("axis", params.get("dimension", len(shape) - 1))
            return [Along((i,) * len(shapes), i) for i in range(len(shape)) if i != along]
        case "stack" | "unstack":
            at = params["axis"]
            pairs = [(i, i + (i >= at)) for i in range(len(shapes[0]) - (node.name == "unstack"))]
            pairs = [pair[::-1] for pair in pairs] if node.name == "unstack" else pairs
            return [Along((before,) * len(shapes), after) for before, after in pairs]
        case "split":
            return [Along((i,), i) for i in range(len(shape)) if i != params["axis"]]
        case "pad":
            return [Along((i, None), i) for i, sides in enumerate(params["padding_config"]) if sides == (0, 0, 0)]
        case "slice":
            return [Along((i,), i) for i, size in enumerate(shape) if size == shapes[0][i]]
        case "dot_general":
            return _axes_of_product(node)
        case "gather" | "scatter-add":
            return _axes_of_rows(node)
    return []


def _axes_of_product(node: Node) -> list[Along]:
    contracted, batch = node.params["dimension_numbers"]
    ranks = [len(x.shape) for x in node.inputs]
    free = [[i for i in range(ranks[side]) if i not in (*contracted[side], *batch[side])] for side in (0, 1)]
    pairs = [*zip(*batch, strict=True), *((i, None) for i in free[0]), *((None, i) for i in free[1])]
    return [
        *(Along(pair, at) for at, pair in enumerate(pairs)),
        *(Along(x, SUM) for x in zip(*contracted, strict=True)),
    ]


def _axes_of_rows(node: Node) -> list[Along]:
    """Lists the axes of a gather or scatter: of the operand, the indices (None for a whole window), and the updates."""
    numbers, shape = node.params["dimension_numbers"], node.inputs[0].shape
    if node.name == "gather":
        batch, starts = numbers.operand_batching_dims, numbers.start_indices_batching_dims
        window, gone, last = numbers.offset_dims, numbers.collapsed_slice_dims, node.outputs[0]
    else:
        batch, starts = numbers.operand_batching_dims, numbers.scatter_indices_batching_dims
        window, gone, last = numbers.update_window_dims, numbers.inserted_window_dims, node.inputs[-1]
    rest = [axis for axis in range(len(last.shape)) if axis not in window]
    kept = [axis for axis in range(len(shape)) if axis not in (*gone, *batch)]
    whole = [(axis, None, at) for axis, at in zip(kept, window, strict=True) if last.shape[at] == shape[axis]]
    found = [*((axis, start, rest[start]) for axis, start in zip(batch, starts, strict=True)), *whole]
    return [Along(x[:2], x[2]) if node.name == "gather" else Along(x, x[0]) for x in found]


def followed(node: Node, parts: Sequence[Part | None]) -> tuple[list[Part | None], Role]:
    """Finds where a node's operands and results have their rows, given where some operands have them.

    Raises:
      RefusalError: if it is not known to treat all rows alike.
    """
    part = next(at for at in parts if at is not None)
    after = reshaped(node.inputs[0].shape, part, node.outputs[0].shape) if node.name in RESHAPES else None
    if after is not None:
        return [part], after
    for operands, result in axes_of(node):
        found = [_at(part, axis) for axis in operands]
        if all(at in (None, one) for at, one in zip(parts, found, strict=True)) and part in found:
            return found, result if isinstance(result, str) else _at(part, result)
    raise RefusalError("is not known to treat all rows alike", node)


def parts_of_operands(node: Node, part: Part) -> list[Part | None] | None:
    """Finds where operands have the rows that a node's result has at `part`; None if that is not known."""
    if node.name in RESHAPES:
        before = reshaped(node.outputs[0].shape, part, node.inputs[0].shape)
        return None if before is None else [before]
    along = next((one for one in axes_of(node) if one.result == part.axis), None)
    return None if along is None else [_at(part, axis) for axis in along.operands]


def is_linear_in_sum(node: Node, roles: Sequence[Role], depends: Sequence[bool]) -> bool:
    """Tells whether a node only scales or moves a sum over all rows, so that each chunk may do so with its share.

    Args:
      node: the node.
      roles: where its operands have their rows.
      depends: which operands depend on rows at all.
    """
    sums, others = roles.count(SUM), sum(depends)
    if node.name in ("add", "add_any", "sub"):
        return sums == len(roles)
    if sums != 1 or others != 1 or not jnp.issubdtype(node.outputs[0].dtype, jnp.floating):
        return False
    return node.name in _LINEAR or node.name == "mul" or (node.name == "div" and roles[0] == SUM)


def _at(part: Part, axis: int | None) -> Part | None:
    return None if axis is None else part._replace(axis=axis)


def run(node: Node, part: Role, rows: int, arrays: Sequence[Any]) -> Sequence[Any]:
    """Computes a node's results for a chunk of so many rows."""
    params = node.params
    if isinstance(part, Part):
        shape = part.shape(node.outputs[0].shape, rows)
        match node.name:
            case "broadcast_in_dim":
                params = {**params, "shape": shape}
            case "iota":
                params = {**params, "shape": shape}
            case "squeeze" | "expand_dims" | "reshape":
                return [lax.reshape(arrays[0], shape)]
            case "gather":
                # A window holds the axis of rows whole, or one position of it.
                sizes = zip(params["slice_sizes"], node.inputs[0].shape, arrays[0].shape, strict=True)
                params = {**params, "slice_sizes": tuple(new if size == old else size for size, old, new in sizes)}
            case "slice":
                limits = list(params["limit_indices"])
                limits[part.axis] = arrays[0].shape[part.axis]
                params = {**params, "limit_indices": tuple(limits)}
    with node.equation.ctx.manager, node.at_its_line():
        results = node.equation.primitive.bind(*arrays, **params)
    return results if node.equation.primitive.multiple_results else [results]


def reshaped(before: Sequence[int], part: Part, after: Sequence[int]) -> Part | None:
    """Finds where a reshape puts the rows, if it keeps them together."""
    rows = before[part.axis] // (part.outer * part.inner)
    outer = math.prod(before[: part.axis]) * part.outer
    inner = math.prod(before[part.axis + 1 :]) * part.inner
    for axis, size in enumerate(after):
        ahead, behind = math.prod(after[:axis]), math.prod(after[axis + 1 :])
        if outer % ahead == 0 and inner % behind == 0 and outer // ahead * rows * (inner // behind) == size:
            return Part(axis, outer // ahead, inner // behind)
    return None


def without_axis(shape: Any, axis: int) -> tuple[int, ...]:
    """Returns a shape without one of its axes."""
    return (*shape[:axis], *shape[axis + 1 :])


def labels_by_position(node: Node) -> tuple[int, Value] | None:
    """Returns the axis of the one number of each row that a gather picks, or a scatter adds to, and the labels.

    None unless the positions along all other axes number the rows.
    """
    value, indices = node.inputs[:2]
    numbers, shape = node.params["dimension_numbers"], value.shape
    parts = _parts(indices)
    if node.name == "gather":
        is_pick, axes = all(size == 1 for size in node.params["slice_sizes"]), numbers.start_index_map
    else:
        is_pick, axes = not numbers.update_window_dims, numbers.scatter_dims_to_operand_dims
    if not is_pick or len(parts) != len(shape) or sorted(axes) != list(range(len(shape))):
        return None
    by_axis = dict(zip(axes, parts, strict=True))
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


def added_at(node: Node, axis: int, array: Any, labels: Any, updates: Any) -> Any:
    """Adds a number for each row along an axis, at its label, as a scatter does."""
    others = tuple(other for other in range(array.ndim) if other != axis)
    numbers = lax.ScatterDimensionNumbers((), (axis,), (axis,), others, tuple(range(len(others))))
    shape = without_axis(array.shape, axis)
    return lax.scatter_add(
        array, labels.reshape(*shape, 1), updates.reshape(shape), numbers, unique_indices=True, mode=node.params["mode"]
    )


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
