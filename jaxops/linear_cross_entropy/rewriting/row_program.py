"""Part of a level between logits and numbers per row, as the graph of a single row that holds for all."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxops._primitive.sharding import reshaped, same_varying_axes
from jaxops.linear_cross_entropy.rewriting import picks, row_wise
from jaxops.linear_cross_entropy.rewriting.region import RowFunction
from jaxops.linear_cross_entropy.rewriting.row_wise import POINTWISE, RESHAPES, Part, Role
from lowering.rewriting.graph import SAME, Level, Node, Value, level_of
from lowering.rewriting.rules import RefusalError

_NARROW = POINTWISE | RESHAPES | {"broadcast_in_dim", "transpose"}
_WIDE = _NARROW | {"slice", "reduce_sum", "reduce_max", "argmax", "gather", "dynamic_slice", "dot_general"}
# What turns labels into indices; and what only moves or repeats numbers.
_OF_LABELS = RESHAPES | SAME | {"broadcast_in_dim", "convert_element_type", "select_n", "lt", "add"}
_OF_NUMBERS = RESHAPES | SAME | {"broadcast_in_dim", "convert_element_type"}
_DEPTH = 8


class View(NamedTuple):
    """Rows that are read of an array: some of them, or all in another shape.

    Attributes:
      shape: the shape that results.
      bounds: starts, limits and strides of the rows that are taken, along all axes; None if all are only reshaped.
    """

    shape: tuple[int, ...]
    bounds: tuple[tuple[int, ...], ...] | None = None

    @classmethod
    def of(cls, node: Node) -> "View":
        """Returns what a slice or a reshape reads of its operand."""
        params, shape = node.params, node.outputs[0].shape
        if node.name != "slice":
            return cls(shape)
        return cls(shape, (params["start_indices"], params["limit_indices"], params["strides"] or (1,) * len(shape)))

    def along(self, axes: Sequence[int], more: Sequence[int] = ()) -> "View":
        """Returns the view of an array that has only these axes, and behind them `more`, where all is read."""
        shape = (*(self.shape[axis] for axis in axes), *more)
        if self.bounds is None:
            return View(shape)
        whole = (0 for _ in more), more, (1 for _ in more)
        kept = ((*(old[axis] for axis in axes), *new) for old, new in zip(self.bounds, whole, strict=True))
        return View(shape, tuple(kept))

    def read(self, array: Any) -> Any:
        """Reads the rows of an array."""
        return reshaped(array, self.shape) if self.bounds is None else lax.slice(array, *self.bounds)


# What is read of an array, one after the other.
Views = tuple[View, ...]


def read(array: Any, views: Views) -> Any:
    """Reads the rows of an array."""
    return functools.reduce(lambda array, view: view.read(array), views, array)


# A value from outside, and which of its rows are taken.
Input = tuple[Value, Views]


class RowProgram:
    """Nodes between logits and numbers per row.

    Attributes:
      exits: the numbers per row that are read outside.
      inputs: the values from outside that each row reads its part of, or all.
      level: the graph of a single row: of logits, unless there are none, and of the inputs.
      written: of each of its nodes, something equal for those that compute the same from the same.
      is_shared: which of its arguments all rows share.
      axis: the axis of the logits that counts the classes.
      row_shape: the other axes.
      views, row_views: which rows of the logits are read, along all axes and along those of rows.
    """

    def __init__(self, logits: Sequence[Value], nodes: set[Node], exits: Sequence[Value], rows: int, axis: int) -> None:
        """Finds what a single row computes.

        Args:
          logits: values that are the same logits; none if the exits do not depend on any.
          nodes: what depends on these.
          exits: what to compute of each row.
          rows: how many there are.
          axis: counts the classes, in the logits or else in the exit.

        Raises:
          RefusalError: if rows are not known to be treated alike.
        """
        self.exits, self.axis = tuple(exits), axis
        self._logits, self.nodes, self._rows = logits, nodes, rows
        self.classes = (logits or exits)[0].shape[axis]
        seen: set[Views] = set()
        found: dict[Any, Input] = {}

        def remembered(value: Value, views: Views) -> Any:
            key = identity(value), views
            found.setdefault(key, (value, views))
            return jnp.zeros(_shape(value, views), value.dtype)

        def of_views(views: Views) -> Any:
            seen.add(views)
            return jnp.zeros(_shape(logits[0], views), logits[0].dtype)

        jax.eval_shape(lambda: _Evaluation(self, of_views, remembered).exits())
        if len(seen) > 1:
            raise RefusalError("the logits are read in two ways, such as all rows and some of them")
        self.views: Views = next(iter(seen), ())
        self.inputs = tuple(found.values())
        shape = _shape((logits or exits)[0], self.views)
        self.row_views: list[View] = []
        before = (logits or exits)[0].shape
        for view in self.views:
            if view.bounds is None:
                self.axis = _kept_axis(before, self.axis, view.shape)
            self.row_views.append(view.along([at for at in range(len(view.shape)) if at != self.axis]))
            before = view.shape
        self.row_shape = picks.without_axis(shape, self.axis)

        def call(z: Any, *arrays: Any) -> Any:
            known = dict(zip(found, arrays, strict=True))
            return _Evaluation(self, lambda _: z, lambda value, views: known[identity(value), views]).exits()

        types = [jax.ShapeDtypeStruct(shape, (logits or exits)[0].dtype)]
        types += [jax.ShapeDtypeStruct(_shape(x, views), x.dtype) for x, views in self.inputs]
        self._follow(jax.make_jaxpr(call)(*types))

    @classmethod
    def of_logits(cls, level: Level, wanted: Any, logits: Sequence[Value], axis: int) -> "RowProgram":
        """Finds what reads logits, and why some of it needs whole rows after all, in words."""
        rows = logits[0].size // logits[0].shape[axis]
        nodes, dependent, computed, wide = set[Node](), set(logits), set(logits), set(logits)
        for node in level.nodes:
            read = [x for x in node.inputs if x in dependent]
            if not read or node not in wanted:
                continue
            dependent.update(node.outputs)
            if computed.isdisjoint(read):
                continue
            reads_wide = not wide.isdisjoint(read)
            if reads_wide:
                if node.name not in _WIDE or node.equation.effects:
                    raise RefusalError("reads the logits as well", node)
                if not computed.issuperset(read):
                    raise RefusalError("needs a sum over all rows first", node)
            elif not (computed.issuperset(read) and _keeps_rows(node, read[0], logits[0].shape[axis])):
                continue
            nodes.add(node)
            computed.update(node.outputs)
            wide.update(x for x in node.outputs if x.size > (rows if reads_wide else read[0].size))
        outside = {x for node in level.nodes if node in wanted and node not in nodes for x in node.inputs}
        outside |= {x for task in wanted if not isinstance(task, Node) for x in task.inputs} | set(level.results)
        exits = [x for node in level.nodes if node in nodes for x in node.outputs if x in outside]
        if not outside.isdisjoint(wide):
            raise RefusalError(RETURNED if not computed.isdisjoint(level.results) else "the logits are used elsewhere")
        return cls(logits, nodes, exits, rows, axis)

    def _follow(self, closed: Any) -> None:
        """Finds, for each axis of rows, where arguments and results have it, and what is computed of one position."""
        self._axes = [axis for axis, size in enumerate(self.row_shape) if size > 1]
        self._parts: list[list[Part | None]] = []
        self._results: list[list[Role]] = []
        for axis in self._axes:
            part = Part(axis + (axis >= self.axis))
            given = [part, *(None for _ in self.inputs)]
            of_rows = RowFunction(closed, given, None if self._logits else part)
            if any(role is None for role in of_rows.results):
                raise RefusalError("a number that belongs to no row depends on the logits")
            types = [
                jax.ShapeDtypeStruct(x.shape if p is None else p.shape(x.shape, 1), x.dtype)
                for x, p in zip(closed.in_avals, of_rows.parts, strict=True)
            ]
            closed = jax.make_jaxpr(functools.partial(_listed, of_rows.evaluate))(*types)
            self._parts.append(of_rows.parts)
            self._results.append(of_rows.results)
        self.level = level_of(closed, lambda _: True, lambda _: False)
        self.written = {node: _written(node) for node in self.level.nodes}
        of_inputs = zip(*self._parts, strict=True) if self._parts else ([None] for _ in self.level.arguments)
        self.is_shared = [all(part is None for part in parts) for parts in of_inputs]

    @property
    def row_types(self) -> list[Any]:
        """The types of the inputs, as `rows_of` returns them, of a single row."""
        shapes = [((self.classes,) if x.size == self.classes != 1 else ()) for x in self.level.arguments[1:]]
        return [jax.ShapeDtypeStruct(shape, x.dtype) for shape, x in zip(shapes, self.level.arguments[1:], strict=True)]

    def rows_of(self, arrays: Sequence[Any]) -> list[Any]:
        """Returns the inputs' arrays with the axes of rows first, and perhaps the classes as a last axis.

        What all rows share has no axes of rows.
        """
        arrays = [read(x, views) for x, (_, views) in zip(arrays, self.inputs, strict=True)]
        return [self._in_rows(i + 1, x) for i, x in enumerate(same_varying_axes(arrays))]

    def _in_rows(self, position: int, array: Any) -> Any:
        behind = () if self.level.arguments[position].size == 1 else (self.classes,)
        if self.is_shared[position]:
            return array.reshape(behind)
        sizes = dict.fromkeys(range(len(self.row_shape)), 1)
        for axis, parts in zip(self._axes, self._parts, strict=True):
            part = parts[position]
            if part is not None:
                lead = sum(size > 1 for size in sizes.values())
                array = part._replace(axis=part.axis + lead).chunks(array, 1, self.row_shape[axis])
                array = jnp.moveaxis(array, 0, lead)
                sizes[axis] = self.row_shape[axis]
        return reshaped(array, (*sizes.values(), *behind))

    def exits_of(self, rows: Sequence[Any]) -> list[Any]:
        """Returns numbers per row as the exits have them."""
        return [self._as_exit(i, jnp.broadcast_to(x, self.row_shape)) for i, x in enumerate(rows)]

    def _as_exit(self, position: int, rows: Any) -> Any:
        behind = self.level.results[position].shape
        array = reshaped(rows, (*(self.row_shape[axis] for axis in self._axes), *behind))
        for depth, axis in [*enumerate(self._axes)][::-1]:
            role = self._results[depth][position]
            if isinstance(role, Part):
                array = jnp.moveaxis(array, depth, 0)
                array = role._replace(axis=role.axis + depth).joined(array, 1, self.row_shape[axis])
            else:
                array = jnp.sum(array, axis=depth)
        return array


RETURNED = (
    "the logits, or as many numbers computed from them, are returned: where they are only reduced to metrics, do that"
    " in the function that you rewrite, or rewrite the function that does so, such as the whole training step"
)


class _Evaluation:
    """One evaluation of a program for all rows; what says how arrays are laid out over devices is left out."""

    def __init__(self, program: RowProgram, logits: Callable[..., Any], read: Callable[..., Any]) -> None:
        self._program, self._of_views, self._read = program, logits, read
        self._known: dict[Input, Any] = {}

    def exits(self) -> list[Any]:
        """Computes the exits."""
        return [self._get(x, ()) for x in self._program.exits]

    def _get(self, value: Value, views: Views) -> Any:
        if (value, views) not in self._known:
            self._known[value, views] = self._found(value, views)
        return self._known[value, views]

    def _found(self, value: Value, views: Views) -> Any:
        if value in self._program._logits:
            return self._of_views(views)
        if value.number is not None:
            return value.constant
        node, is_inside = value.producer, value.producer in self._program.nodes
        if node is None or not (is_inside or self._is_pulled(node, value)):
            return jnp.asarray(value.constant) if self._counts_classes(value) else self._read(value, views)
        if is_inside and (node.name == "slice" or (node.name == "reshape" and (views or self._parts_rows(node)))):
            return self._get(node.inputs[0], (View.of(node), *views))
        if node.name in POINTWISE:
            is_repeated = [bool(views) and x.shape not in ((), value.shape) for x in node.inputs]
            arrays = [
                self._repeated(x, None, value, views) if repeated else self._get(x, views if x.shape else ())
                for x, repeated in zip(node.inputs, is_repeated, strict=True)
            ]
            return bound(node, *arrays)[node.outputs.index(value)]
        if views and node.name == "broadcast_in_dim" and not (is_inside and node.inputs[0].shape):
            return self._repeated(node.inputs[0], node.params["broadcast_dimensions"], value, views)
        if views and is_inside:
            raise RefusalError(f"rows are left out of what {node.name} on {node.source} computes")
        if views:
            return self._read(value, views)
        found = picks.labels_by_position(node) if node.name == "gather" and is_inside else None
        if found is None:
            return bound(node, *(self._get(x, ()) for x in node.inputs))[node.outputs.index(value)]
        axis, labels = found
        return picks.picked(node, axis, self._get(node.inputs[0], ()), self._get(labels, ())).reshape(value.shape)

    def _repeated(self, operand: Value, dims: Sequence[int] | None, value: Value, views: Views) -> Any:
        """Reads rows of an operand that is repeated to the shape of a value, whose axes `dims` are its own."""
        dims = tuple(range(len(operand.shape)) if dims is None else dims)
        classes, sizes, shape, of_operand = self._program.classes, operand.shape, value.shape, list[View]()
        for view in views:
            if view.bounds is not None:
                bounds = zip(*view.along(dims).bounds or (), strict=True)
                pairs = zip(sizes, dims, bounds, strict=True)
                kept = [(0, 1, 1) if size != shape[dim] else bound for size, dim, bound in pairs]
                sizes = tuple(len(range(*bound)) for bound in kept)
                of_operand += [View(sizes, tuple(zip(*kept, strict=True)))] if kept else []
            else:
                axes = range(len(view.shape))
                is_whole = math.prod(sizes) == classes
                sizes = tuple(1 if (size == classes) != is_whole else size for size in view.shape)
                dims = tuple(axes)
                of_operand.append(View(sizes))
            shape = view.shape
        return lax.broadcast_in_dim(self._get(operand, tuple(of_operand)), shape, dims)

    def _parts_rows(self, node: Node) -> bool:
        """Tells whether a reshape splits an axis of rows: then the position of a row lies along several axes."""
        before, after = node.inputs[0].shape, node.outputs[0].shape
        if self._program.classes not in before:
            return False
        rows = (axis for axis, size in enumerate(before) if size not in (1, self._program.classes))
        return any(row_wise.reshaped(before, Part(axis), after) is None for axis in rows)

    def _is_pulled(self, node: Node, value: Value) -> bool:
        """Tells whether what does not depend on logits is computed with each row, so that its meaning is seen."""
        if node.equation.effects or len(node.outputs) > 1:
            return False
        if node.name in RESHAPES and [n for n in value.shape if n != 1] != [n for n in node.inputs[0].shape if n != 1]:
            return False
        if node.name == "iota":
            return value.shape[node.params["dimension"]] == self._program.classes
        if value.size > self._program._rows:
            return node.name in _NARROW
        return node.name in (_OF_NUMBERS if jnp.issubdtype(value.dtype, jnp.floating) else _OF_LABELS)

    def _counts_classes(self, value: Value) -> bool:
        if not value.is_constant or isinstance(value.constant, jax.core.Tracer):
            return False
        classes = self._program.classes
        return value.size == classes and np.array_equal(np.asarray(value.constant).reshape(-1), np.arange(classes))


def bound(node: Node, *arrays: Any) -> Sequence[Any]:
    """Evaluates a node without regard to how arrays are laid out over devices."""
    if node.name in SAME - {"reduce_precision"}:
        return arrays
    primitive = node.equation.primitive
    params = node.params | {name: None for name in ("sharding", "out_sharding") if name in node.params}
    with node.at_its_line():
        results = primitive.bind(*arrays, **primitive.get_bind_params(params))
    return results if primitive.multiple_results else [results]


def _keeps_rows(node: Node, operand: Value, classes: int) -> bool:
    """Tells whether a node computes number by number from rows, or repeats them for each class."""
    is_alike = all(x.size in (operand.size, operand.size * classes) for x in node.outputs)
    return node.name in _NARROW and is_alike and not node.equation.effects


def identity(value: Value, depth: int = _DEPTH) -> Any:
    """Returns something equal for values that are computed in the same way, as labels are for each pick."""
    if value.number is not None:
        return ("is", str(value.number), str(value.dtype))
    node = value.producer
    if node is None or node.name not in _OF_LABELS | {"slice"} or not depth:
        return value
    return (_written(node), value.shape, tuple(identity(x, depth - 1) for x in node.inputs))


def _written(node: Node) -> Any:
    params = tuple(sorted((name, str(param)) for name, param in node.params.items()))
    return node.name, params, tuple(x.size for x in node.inputs)


def _kept_axis(before: Sequence[int], axis: int, after: Sequence[int]) -> int:
    part = row_wise.reshaped(before, Part(axis), after)
    if part is None or part != Part(part.axis):
        raise RefusalError("a reshape mixes rows and classes")
    return part.axis


def _shape(value: Value, views: Views) -> tuple[int, ...]:
    return views[-1].shape if views else value.shape


def _listed(evaluate: Callable[..., Any], *arrays: Any) -> Any:
    return evaluate(1, arrays)
