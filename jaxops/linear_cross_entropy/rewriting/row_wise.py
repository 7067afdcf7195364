"""Rows that are taken in chunks: which axis of an array holds them, and how each node computes a chunk."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from jaxops._primitive import sharding
from lowering.rewriting.graph import SAME, Node, Value
from lowering.rewriting.rules import RefusalError

RESHAPES = frozenset({"reshape", "squeeze", "expand_dims"})
ELEMENTWISE = frozenset(
    {"add", "add_any", "sub", "mul", "div", "neg", "exp", "exp2", "log", "log1p", "expm1", "tanh", "logistic", "sqrt"}
    | {"rsqrt", "square", "integer_pow", "pow", "abs", "sign", "max", "min", "clamp", "select_n", "eq", "ne", "lt"}
    | {"le", "gt", "ge", "and", "or", "not", "is_finite", "convert_element_type", "stop_gradient", "floor", "ceil"}
)
_MORE_ELEMENTWISE = frozenset(
    {"erf", "erf_inv", "sin", "cos", "atan2", "round", "rem", "nextafter", "shift_right_logical", "xor", "cbrt"}
)
POINTWISE = ELEMENTWISE | SAME | _MORE_ELEMENTWISE
_REDUCTIONS = frozenset({"reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or"})
_LINEAR = frozenset({"neg", "convert_element_type", "reshape", "squeeze", "expand_dims", "broadcast_in_dim", "copy"})
_ALONG_ONE_AXIS = frozenset({"cumsum", "cumlogsumexp", "cummax", "cummin", "cumprod"})


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


# A result that adds up all rows.
SUM = "sum"
Role = Part | str | None


def _moved(rank: int, source: int, target: int) -> tuple[int, ...]:
    order = [axis for axis in range(rank) if axis != source]
    order.insert(target, source)
    return tuple(order)


def role_of_results(node: Node, parts: Sequence[Part | None]) -> Role:
    """Finds where a node's results have their rows, given where its operands have them; SUM if it adds them up.

    Raises:
      RefusalError: if it is not known to treat all rows alike.
    """
    for names, rule in _RULES:
        if node.name in names:
            found = rule(node, parts)
            if found is not None:
                return found
    raise RefusalError(f"{node.name} on {node.source} is not known to treat all rows alike")


def parts_of_operands(node: Node, part: Part) -> list[Part | None] | None:
    """Finds where operands have the rows that a node's result has at `part`; None if that is not known."""
    shape = node.outputs[0].shape
    if node.name in POINTWISE:
        return [_broadcast_part(x, shape, part) for x in node.inputs]
    match node.name:
        case "broadcast_in_dim":
            dims, (operand, *_) = node.params["broadcast_dimensions"], node.inputs
            if part.axis not in dims or operand.shape[dims.index(part.axis)] != shape[part.axis]:
                return [None for _ in node.inputs]
            return [part._replace(axis=dims.index(part.axis))]
        case name if name in RESHAPES:
            before = reshaped(shape, part, node.inputs[0].shape)
            return None if before is None else [before]
        case "transpose":
            return [part._replace(axis=node.params["permutation"][part.axis])]
        case "iota" if node.params["dimension"] != part.axis:
            return []
        case name if name in _REDUCTIONS:
            kept = [axis for axis in range(len(node.inputs[0].shape)) if axis not in node.params["axes"]]
            return [part._replace(axis=kept[part.axis])]
        case "dot_general" if not node.params["dimension_numbers"][1][0]:
            return parts_of_factors(node, part)
        case "scatter-add":
            found = [axes for axes in _axes_of_rows(node) if axes[0] == part.axis]
            return [_at(part, axis) for axis in found[0]] if found else None
    return None


def parts_of_factors(node: Node, part: Part) -> list[Part | None]:
    """Finds the rows of a product's result in its operands: one has them, and the other is needed whole."""
    contracted, _ = node.params["dimension_numbers"]
    free = [
        (side, axis) for side in (0, 1) for axis in range(len(node.inputs[side].shape)) if axis not in contracted[side]
    ]
    side, axis = free[part.axis]
    return [part._replace(axis=axis) if i == side else None for i in (0, 1)]


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


def _axes_of_rows(node: Node) -> list[tuple[int, int | None, int]]:
    """Lists the axes along which a gather or scatter treats all positions alike.

    Each is an axis of the operand, of the indices (None where a window holds the axis whole), and of the result of a
    gather or the updates of a scatter.
    """
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
    return [*((axis, start, rest[start]) for axis, start in zip(batch, starts, strict=True)), *whole]


def _at(part: Part, axis: int | None) -> Part | None:
    return None if axis is None else part._replace(axis=axis)


def matching(node: Node, value: Value, roles: dict[Value, Role]) -> Part | None:
    """Finds where an operand from outside has the rows that other operands have."""
    others = [(x, roles[x]) for x in node.inputs if isinstance(roles.get(x), Part)]
    other, part = others[0]
    assert isinstance(part, Part)
    if node.name in POINTWISE | {"concatenate", "stack", "sort"}:
        is_same = len(value.shape) == len(other.shape) and value.shape[part.axis] == other.shape[part.axis]
        return part if is_same else None
    if node.name == "dot_general":
        contracted, batch = node.params["dimension_numbers"]
        side = 0 if node.inputs[0] is value else 1
        for axes in (contracted, batch):
            if part.axis in axes[1 - side]:
                return part._replace(axis=axes[side][list(axes[1 - side]).index(part.axis)])
        return None
    if node.name in ("gather", "scatter-add"):
        return _matching_index(node, value, roles)
    return None


def _matching_index(node: Node, value: Value, roles: dict[Value, Role]) -> Part | None:
    """Finds the same for the operand, the indices or the updates of a gather or a scatter."""
    position = node.inputs.index(value)
    for source, one in enumerate(node.inputs):
        part = roles.get(one)
        for axes in _axes_of_rows(node):
            if isinstance(part, Part) and part.axis == axes[source]:
                return _at(part, axes[position])
    return None


def _broadcast_part(value: Value, shape: Sequence[int], part: Part) -> Part | None:
    is_whole = len(value.shape) == len(shape) and value.shape[part.axis] == shape[part.axis]
    return part if is_whole else None


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


def _pointwise(node: Node, parts: Sequence[Part | None]) -> Role:
    found = {part for part in parts if part is not None}
    (part,) = found if len(found) == 1 else (None,)
    if part is None:
        return None
    shape = node.outputs[0].shape
    missing = (x for x, at in zip(node.inputs, parts, strict=True) if at is None)
    return None if any(len(x.shape) == len(shape) and x.shape[part.axis] not in (1,) for x in missing) else part


def _broadcast(node: Node, parts: Sequence[Part | None]) -> Role:
    (part, *_) = parts
    return None if part is None else part._replace(axis=node.params["broadcast_dimensions"][part.axis])


def _reshape(node: Node, parts: Sequence[Part | None]) -> Role:
    (part, *_) = parts
    return None if part is None else reshaped(node.inputs[0].shape, part, node.outputs[0].shape)


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


def _transpose(node: Node, parts: Sequence[Part | None]) -> Role:
    (part,) = parts
    return None if part is None else part._replace(axis=tuple(node.params["permutation"]).index(part.axis))


def _reduction(node: Node, parts: Sequence[Part | None]) -> Role:
    (part, *_), axes = parts, node.params["axes"]
    if part is None:
        return None
    if part.axis in axes:
        return SUM if node.name == "reduce_sum" else None
    return part._replace(axis=part.axis - sum(axis < part.axis for axis in axes))


def _kept(node: Node, parts: Sequence[Part | None]) -> Role:
    """Follows nodes that work along one other axis."""
    params = node.params
    axis = params.get("axis", params.get("dimension", len(node.inputs[0].shape) - 1))
    (part, *others) = parts
    is_alike = part is not None and all(other == part for other in others)
    return part if is_alike and part is not None and part.axis != axis else None


def _stack(node: Node, parts: Sequence[Part | None]) -> Role:
    (part, *others) = parts
    if part is None or any(other != part for other in others):
        return None
    return part._replace(axis=part.axis + (node.params["axis"] <= part.axis))


def _unstack(node: Node, parts: Sequence[Part | None]) -> Role:
    (part,), axis = parts, node.params["axis"]
    return None if part is None or part.axis == axis else part._replace(axis=part.axis - (axis < part.axis))


def _slice(node: Node, parts: Sequence[Part | None]) -> Role:
    (part,) = parts
    shapes = node.inputs[0].shape, node.outputs[0].shape
    return part if part is not None and shapes[0][part.axis] == shapes[1][part.axis] else None


def _product(node: Node, parts: Sequence[Part | None]) -> Role:
    contracted, batch = node.params["dimension_numbers"]
    for at, axes, result in (
        *((i, batch, None) for i in range(len(batch[0]))),
        *((i, contracted, SUM) for i in range(len(contracted[0]))),
    ):
        pair = [part is not None and part.axis == axes[side][at] for side, part in enumerate(parts)]
        if all(pair):
            assert parts[0] is not None
            return result if axes is contracted else parts[0]._replace(axis=at)
        if any(pair):
            return None
    (side,) = [side for side, part in enumerate(parts) if part is not None][:1] or (None,)
    if side is None or parts[1 - side] is not None:
        return None
    part = parts[side]
    assert part is not None
    free = [
        [axis for axis in range(len(node.inputs[i].shape)) if axis not in (*contracted[i], *batch[i])] for i in (0, 1)
    ]
    return part._replace(axis=len(batch[0]) + side * len(free[0]) + free[side].index(part.axis))


def _gather(node: Node, parts: Sequence[Part | None]) -> Role:
    operand, *others = parts
    for axes in _axes_of_rows(node):
        if (
            operand is not None
            and operand.axis == axes[0]
            and others == [_at(operand, x) for x in axes[1 : len(parts)]]
        ):
            return operand._replace(axis=axes[2]) if node.name == "gather" else operand
    return None


_Rule = Callable[[Node, Sequence[Part | None]], Role]
_RULES: tuple[tuple[frozenset[str], _Rule], ...] = (
    (POINTWISE, _pointwise),
    (frozenset({"broadcast_in_dim"}), _broadcast),
    (RESHAPES, _reshape),
    (frozenset({"transpose"}), _transpose),
    (_REDUCTIONS | {"argmax", "argmin"}, _reduction),
    (_ALONG_ONE_AXIS | {"sort", "top_k", "concatenate"}, _kept),
    (frozenset({"stack"}), _stack),
    (frozenset({"unstack"}), _unstack),
    (frozenset({"slice"}), _slice),
    (frozenset({"dot_general"}), _product),
    (frozenset({"gather", "scatter-add"}), _gather),
)


_REPEATS = frozenset({"broadcast_in_dim", "reshape", "squeeze", "copy"})


def only_number(value: Value) -> Any:
    """Returns the number that all elements of an array are, if that is written in the code."""
    while (node := value.producer) is not None:
        is_widened = node.name == "convert_element_type" and keeps_numbers(node.equation)
        if node.name not in _REPEATS and not is_widened:
            return None
        value = node.inputs[0]
    return value.number


def keeps_numbers(equation: Any) -> bool:
    """Tells whether a conversion keeps numbers, apart from rounding."""
    before, after = (atom.aval.dtype for atom in (equation.invars[0], equation.outvars[0]))
    return bool(jnp.issubdtype(after, jnp.floating)) or before == after
