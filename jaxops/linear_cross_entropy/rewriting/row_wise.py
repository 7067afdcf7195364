"""Rows that are taken in chunks: which axis of an array holds them, and how each node computes a chunk."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from jaxops._primitive import sharding
from lowering.rewriting.graph import SAME, Node
from lowering.rewriting.rules import RefusalError

RESHAPES = frozenset({"reshape", "squeeze", "expand_dims"})
POINTWISE = SAME | frozenset(
    {"add", "add_any", "sub", "mul", "div", "neg", "exp", "exp2", "log", "log1p", "log2", "expm1", "tanh", "logistic"}
    | {"sqrt", "rsqrt", "square", "integer_pow", "pow", "abs", "sign", "max", "min", "clamp", "select_n", "eq", "ne"}
    | {"lt", "le", "gt", "ge", "and", "or", "not", "is_finite", "convert_element_type", "stop_gradient", "floor"}
    | {"ceil", "erf", "erfc", "erf_inv", "sin", "cos", "tan", "asin", "acos", "atan", "atan2", "sinh", "cosh", "asinh"}
    | {"acosh", "atanh", "lgamma", "digamma", "round", "rem", "nextafter", "shift_right_logical", "xor", "cbrt"}
    | {"one_minus_square", "polygamma", "population_count", "shift_left", "shift_right_arithmetic"}
)
_REDUCTIONS = frozenset(
    {"reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or", "argmax", "argmin"}
)
# A result that adds up all rows, or is the largest or smallest of them.
SUM, MAX, MIN = "sum", "max", "min"
# Of truth values, the largest tells whether one is true.
_OVER_ROWS = {"reduce_sum": SUM, "reduce_max": MAX, "reduce_or": MAX, "reduce_min": MIN, "reduce_and": MIN}
_LINEAR = RESHAPES | {"neg", "convert_element_type", "broadcast_in_dim", "copy", "reduce_sum", "transpose"}
_ALONG_ONE_AXIS = frozenset({"cumsum", "cumlogsumexp", "cummax", "cummin", "cumprod", "sort", "top_k", "concatenate"})


class Part(NamedTuple):
    """Place of the rows in an array: an axis of `outer` x rows x `inner` positions.

    Of all rows, the array lacks so many first and last ones, as labels of the next token do. A chunk has rows in their
    place that nothing reads.
    """

    axis: int
    outer: int = 1
    inner: int = 1
    lacks_first: int = 0
    lacks_last: int = 0

    @property
    def lacks(self) -> int:
        """The number of rows that the array lacks."""
        return self.lacks_first + self.lacks_last

    def shape(self, shape: Sequence[int], rows: int) -> tuple[int, ...]:
        """Returns a shape with so many rows."""
        return (*shape[: self.axis], self.outer * rows * self.inner, *shape[self.axis + 1 :])

    def without(self, first: int, last: int) -> "Part | None":
        """Returns the place without so many first and last rows; None if that is not known."""
        lacks = self.lacks_first + first, self.lacks_last + last
        if not (first or last):
            return self
        if min(lacks) < 0 or (self.outer, self.inner) != (1, 1):
            return None
        return self._replace(lacks_first=lacks[0], lacks_last=lacks[1])

    def filled(self, array: Any) -> Any:
        """Repeats the first and the last row in place of those that the array lacks."""
        if not self.lacks:
            return array
        shape, axis = array.shape, self.axis + 1
        count = shape[self.axis] // (self.outer * self.inner)
        rows = sharding.reshaped(array, (*shape[: self.axis], self.outer, count, self.inner, *shape[axis:]))
        ends = ((0, self.lacks_first), (count - 1, self.lacks_last))
        first, last = (
            jnp.repeat(lax.slice_in_dim(rows, at, at + 1, axis=axis), lacks, axis, total_repeat_length=lacks)
            for at, lacks in ends
        )
        return sharding.reshaped(lax.concatenate([first, rows, last], axis), self.shape(shape, count + self.lacks))

    def trimmed(self, array: Any, rows: int) -> Any:
        """Leaves out the rows that the array should lack, of so many."""
        if not self.lacks:
            return array
        return self.cut(array, self.lacks_first, rows - self.lacks_last, rows)

    def chunks(self, array: Any, rows: int, steps: int) -> Any:
        """Cuts an array into chunks of so many rows, along a new first axis; for meshes, each has rows of all parts."""
        before, behind = array.shape[: self.axis], array.shape[self.axis + 1 :]
        parts = sharding.reshaped(array, (*before, self.outer, rows, steps, self.inner, *behind))
        parts = lax.transpose(parts, _moved(parts.ndim, len(before) + 2, 0))
        return sharding.reshaped(parts, (steps, *self.shape(array.shape, rows)))

    def joined(self, chunks: Any, rows: int, steps: int) -> Any:
        """Inverts `chunks`."""
        before, behind = chunks.shape[1 : self.axis + 1], chunks.shape[self.axis + 2 :]
        parts = sharding.reshaped(chunks, (steps, *before, self.outer, rows, self.inner, *behind))
        parts = lax.transpose(parts, _moved(parts.ndim, 0, len(before) + 2))
        return sharding.reshaped(parts, self.shape(chunks.shape[1:], rows * steps))

    def cut(self, array: Any, first: int, last: int, rows: int) -> Any:
        """Takes the rows from `first` to `last`."""
        before, behind = array.shape[: self.axis], array.shape[self.axis + 1 :]
        parts = sharding.reshaped(array, (*before, self.outer, rows, self.inner, *behind))
        parts = lax.slice_in_dim(parts, first, last, axis=len(before) + 1)
        return sharding.reshaped(parts, self.shape(array.shape, last - first))


class Chunk(NamedTuple):
    """Rows that are computed together.

    Attributes:
      size: how many.
      total: the number of all rows.
      positions: their positions among these; None if the user's arrays themselves are computed.
    """

    size: int
    total: int
    positions: Any = None

    @property
    def is_whole(self) -> bool:
        """Tells whether these are the user's arrays themselves."""
        return self.positions is None

    def shape(self, part: Part, shape: Sequence[int]) -> tuple[int, ...]:
        """Returns the shape that an array has with these rows."""
        return part.shape(shape, self.size - (part.lacks if self.is_whole else 0))

    def present(self, part: Part, array: Any, instead: Any) -> Any:
        """Replaces the rows that the array should lack."""
        if self.positions is None or not part.lacks:
            return array
        is_present = (self.positions >= part.lacks_first) & (self.positions < self.total - part.lacks_last)
        is_present = jnp.tile(jnp.repeat(is_present, part.inner), part.outer)
        mask = lax.broadcast_in_dim(is_present, array.shape, (part.axis,))
        return jnp.where(mask, array, jnp.asarray(instead, array.dtype))


Role = Part | str | None


def neutral(role: str, dtype: Any) -> Any:
    """Returns the number that changes no sum, or no largest or smallest number."""
    if role == SUM:
        return 0
    if dtype == jnp.bool_:
        return role == MIN
    info: Any = jnp.iinfo(dtype) if jnp.issubdtype(dtype, jnp.integer) else None
    least, most = (-jnp.inf, jnp.inf) if info is None else (info.min, info.max)
    return least if role == MAX else most


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
            over_rows = _OVER_ROWS.get(name, "")
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
        case "gather" | "scatter-add" | "scatter":
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


def windowed(node: Node, part: Part, *, backward: bool = False) -> Part | None:
    """Finds where a slice or a padding puts the rows, if it leaves out first or last ones, or brings these back.

    With `backward`, finds where it takes them from.
    """
    axis = part.axis
    if node.name == "slice" and (node.params["strides"] or (1,) * (axis + 1))[axis] == 1:
        first, last = (
            node.params["start_indices"][axis],
            node.inputs[0].shape[axis] - node.params["limit_indices"][axis],
        )
    elif node.name == "pad" and node.params["padding_config"][axis][2] == 0:
        first, last, _ = (-size for size in node.params["padding_config"][axis])
    else:
        return None
    return part.without(-first, -last) if backward else part.without(first, last)


def parts_of_operands(node: Node, part: Part) -> list[Part | None] | None:
    """Finds where operands have the rows that a node's result has at `part`; None if that is not known."""
    if node.name in RESHAPES:
        before = reshaped(node.outputs[0].shape, part, node.inputs[0].shape)
        return None if before is None else [before]
    along = next((one for one in axes_of(node) if one.result == part.axis), None)
    if along is not None:
        return [_at(part, axis) for axis in along.operands]
    before = windowed(node, part, backward=True)
    return None if before is None else [before, *(None for _ in node.inputs[1:])]


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


def run(node: Node, part: Role, chunk: Chunk, arrays: Sequence[Any]) -> Sequence[Any]:
    """Computes a node's results for a chunk of rows."""
    params = node.params
    if isinstance(part, Part) and not chunk.is_whole:
        shape = chunk.shape(part, node.outputs[0].shape)
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
                starts, limits = list(params["start_indices"]), list(params["limit_indices"])
                starts[part.axis], limits[part.axis] = 0, arrays[0].shape[part.axis]
                params = {**params, "start_indices": tuple(starts), "limit_indices": tuple(limits)}
            case "pad":
                sides = list(params["padding_config"])
                sides[part.axis] = (0, 0, 0)
                params = {**params, "padding_config": tuple(sides)}
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
            return part._replace(axis=axis, outer=outer // ahead, inner=inner // behind)
    return None


def without_axis(shape: Any, axis: int) -> tuple[int, ...]:
    """Returns a shape without one of its axes."""
    return (*shape[:axis], *shape[axis + 1 :])
