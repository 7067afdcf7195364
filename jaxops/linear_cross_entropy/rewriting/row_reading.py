"""Reads a level from logits to numbers per row: follows the axis of the classes, and leaves the rest to `RowAlgebra`.

All other axes are of rows, which keep their order, in whatever shape: an array that has a number for each row is that
of the rows, reshaped. Where rows are left out or change their order, the operands of the layer do so as well.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxops._primitive.sharding import reshaped
from jaxops.linear_cross_entropy.rewriting import row_wise
from jaxops.linear_cross_entropy.rewriting.row_algebra import RowAlgebra
from jaxops.linear_cross_entropy.rewriting.row_forms import (
    Combined,
    Exponentials,
    Factor,
    Logits,
    Number,
    OneHot,
    Vector,
    View,
)
from jaxops.linear_cross_entropy.rewriting.row_wise import POINTWISE, RESHAPES, SUM, Part
from lowering.rewriting.graph import SAME, Level, Node, Value
from lowering.rewriting.rules import RefusalError

RETURNED = (
    "the logits, or as many numbers computed from them, are returned: where they are only reduced to metrics, do that"
    " in the function that you rewrite, or rewrite the function that does so, such as the whole training step"
)
_MOVES = RESHAPES | {"broadcast_in_dim", "transpose"}
_NARROW = POINTWISE | _MOVES
# What turns labels into indices; and what only moves or repeats numbers.
_OF_LABELS = RESHAPES | SAME | {"broadcast_in_dim", "convert_element_type", "select_n", "lt", "add"}
_OF_NUMBERS = RESHAPES | SAME | {"broadcast_in_dim", "convert_element_type"}
_DEPTH = 8


class Placed(NamedTuple):
    """Form of a value.

    Attributes:
      form: the form, whose arrays have the shape of the rows.
      classes: the axis of the value that counts the classes, perhaps rows as well; None if it has one number per row.
      rows: the shape of the rows.
    """

    form: Any
    classes: Part | None
    rows: tuple[int, ...]


class Reading:
    """One evaluation of what reads logits.

    Attributes:
      algebra: what is asked.
      nodes: those that were evaluated.
      exits: the values of these that are read elsewhere, numbers per row or sums of such numbers.
    """

    def __init__(
        self, algebra: RowAlgebra, logits: Iterable[Value], axis: int, read: Callable[[Value], Any] | None = None
    ) -> None:
        """Takes values that are the same logits, the axis that counts the classes, and how to read other values."""
        self.algebra, self._logits, self._axis = algebra, tuple(logits), axis
        self._read = read or (lambda value: jnp.zeros(value.shape, value.dtype))
        self.nodes: list[Node] = []
        self.exits: tuple[Value, ...] = ()
        self._begin()

    def _begin(self) -> None:
        logits = self.algebra.logits()
        classes, rows = Part(self._axis), [row_wise.without_axis(z.shape, self._axis) for z in self._logits]
        self._placed = {z: Placed(logits, classes, shape) for z, shape in zip(self._logits, rows, strict=True)}

    def explore(self, level: Level, wanted: Any) -> None:
        """Finds what reads the logits, down to numbers per row and sums of these.

        Raises:
          RefusalError: if numbers per row do not suffice, or do not follow from the statistics.
        """
        beyond = set[Value]()
        for node in level.nodes:
            placed = [self._placed[x] for x in node.inputs if x in self._placed]
            is_behind = not beyond.isdisjoint(node.inputs)
            if not (placed or is_behind) or node not in wanted:
                continue
            try:
                if is_behind:
                    raise RefusalError("needs a sum over all rows first", node)
                found = self._placed[node.outputs[0]] = self._of_node(node)
            except RefusalError:
                if any(one.classes is not None for one in placed):
                    raise
                beyond.update(node.outputs)
                continue
            self.nodes.append(node)
            if math.prod(found.rows) != math.prod(placed[0].rows) and found.classes is None:
                beyond.update(node.outputs)
        inside = set(self.nodes)
        outside = {x for node in level.nodes if node in wanted and node not in inside for x in node.inputs}
        outside |= {x for task in wanted if not isinstance(task, Node) for x in task.inputs} | set(level.results)
        self.exits = tuple(x for x in self._placed if x in outside)
        if any(self._placed[x].classes is not None for x in self.exits):
            is_returned = not self._placed.keys().isdisjoint(level.results)
            raise RefusalError(RETURNED if is_returned else "the logits are used elsewhere")
        self._once_more()

    def evaluate(self, nodes: Sequence[Node]) -> None:
        """Evaluates nodes that were found."""
        for node in nodes:
            self._placed[node.outputs[0]] = self._of_node(node)
        self.nodes = [*nodes]
        self._once_more()

    def _once_more(self) -> None:
        """Evaluates again, if only now the scale of all exponentials is known."""
        if self.algebra.has_guessed_wrong:
            self._begin()
            for node in self.nodes:
                self._placed[node.outputs[0]] = self._of_node(node)

    def arrays(self, exits: Iterable[Value]) -> list[Any]:
        """Returns numbers per row as exits have them."""
        return [self._array(value) for value in exits]

    def _array(self, value: Value) -> Any:
        form, _, rows = self._placed[value]
        is_differentiated = bool(jnp.issubdtype(value.dtype, jnp.floating))
        array = jnp.asarray(self.algebra.maxima.array(form, is_differentiated=is_differentiated)).astype(value.dtype)
        return reshaped(jnp.broadcast_to(array, rows), value.shape)

    def _of_node(self, node: Node) -> Placed:
        """Evaluates a node that reads what depends on logits."""
        if node.equation.effects or len(node.outputs) != 1:
            raise RefusalError("reads the logits as well", node)
        if node.name in _MOVES | SAME | {"slice"}:
            return self._moved(node, self._placed[node.inputs[0]])
        if node.name in POINTWISE:
            return self._elementwise(node)
        lead, params, algebra = self._placed.get(node.inputs[0]), node.params, self.algebra
        if node.name == "dot_general":
            return self._product(node)
        if lead is None or lead.classes is None:
            raise RefusalError("reads the logits as well", node)
        match node.name:
            case "reduce_sum":
                number = algebra.once("sum", (lead.form,), lambda: algebra.total(lead.form))
                return self._summed(node, number, lead, node.inputs[0].shape, params["axes"])
            case "reduce_max" | "argmax" if [Part(at) for at in params["axes"]] == [lead.classes]:
                take = algebra.maximum if node.name == "reduce_max" else algebra.prediction
                return Placed(algebra.once(node.name, (lead.form,), lambda: take(lead.form)), None, lead.rows)
            case "gather":
                return Placed(self._gathered(node, lead), None, lead.rows)
            case "dynamic_slice" if node.outputs[0].shape == lead.classes.shape(node.inputs[0].shape, 1):
                label = algebra.clipped(self._pulled(node.inputs[1 + lead.classes.axis], None, lead.rows))
                form = algebra.once("pick", (lead.form, label), lambda: algebra.picked_at(lead.form, label))
                return Placed(form, None, lead.rows)
        raise RefusalError("reads the logits as well", node)

    def _moved(self, node: Node, placed: Placed) -> Placed:
        """Follows the axis of the classes through a node that moves numbers."""
        before, after, (form, classes, rows) = node.inputs[0].shape, node.outputs[0].shape, placed
        if node.name in RESHAPES:
            if classes is not None and (classes := row_wise.reshaped(before, classes, after)) is None:
                raise RefusalError("a reshape mixes rows and classes")
            return Placed(form, classes, rows)
        if node.name in SAME or (node.name == "slice" and before == after):
            return placed
        if node.name == "broadcast_in_dim":
            dims = node.params["broadcast_dimensions"]
            kept = dict(zip(dims, before, strict=True))
            repeated = [at for at, size in enumerate(after) if size != kept.get(at, 1)]
            if classes is None and len(repeated) == 1 and after[repeated[0]] == self.algebra.classes:
                return Placed(form, Part(repeated[0]), rows)
            if repeated:
                raise RefusalError("repeats rows", node)
            return Placed(form, classes and classes._replace(axis=dims[classes.axis]), rows)
        if node.name == "transpose":
            order = node.params["permutation"]
            if classes is not None:
                classes = classes._replace(axis=order.index(classes.axis))
            if _keeps_order(node, placed.classes):
                return Placed(form, classes, rows)
        if classes is None or placed.classes is None or classes != Part(classes.axis):
            raise RefusalError("changes the order of rows", node)
        rows, left = row_wise.without_axis(before, placed.classes.axis), row_wise.without_axis(after, classes.axis)
        if node.name == "transpose":
            places = [at - (at > placed.classes.axis) for at in order if at != placed.classes.axis]
            return self._viewed(placed, View(rows, left, order=tuple(places)), classes)
        if after[classes.axis] != before[classes.axis]:
            raise RefusalError("reads some of the classes", node)
        first, last, strides = (node.params[name] for name in ("start_indices", "limit_indices", "strides"))
        bounds = (row_wise.without_axis(each, classes.axis) for each in (first, last, strides or (1,) * len(before)))
        return self._viewed(placed, View(rows, left, bounds=tuple(bounds)), classes)

    def _viewed(self, placed: Placed, view: View, classes: Part) -> Placed:
        """Leaves rows out, or changes their order."""

        def viewed(form: Any) -> Any:
            return self.algebra.once(view, (form,), lambda: of_form(form))

        def of_form(form: Any) -> Any:
            match form:
                case Number(rest):
                    return form if getattr(rest, "ndim", 0) == 0 else form._replace(rest=view.read(rest))
                case Vector(array):
                    return form if array.ndim == 1 else form._replace(array=view.read(array, 1))
                case Logits(layer, scale, shift):
                    layer = layer._replace(views=(*layer.views, view))
                    return Logits(layer, viewed(scale), viewed(shift))
                case Factor() | Exponentials() | OneHot():
                    return type(form)(*map(viewed, form))
                case Combined(node, operands):
                    return Combined(node, tuple(map(viewed, operands)))
            raise TypeError(form)

        return Placed(viewed(placed.form), classes, view.shape)

    def _elementwise(self, node: Node) -> Placed:
        placed, shape = [x for x in node.inputs if x in self._placed], node.outputs[0].shape
        lead = next((x for x in placed if self._placed[x].classes is not None), placed[0])
        _, classes, rows = self._placed[lead]
        if node.outputs[0].size not in (count := math.prod(rows), count * self.algebra.classes):
            raise RefusalError("repeats rows", node)
        longer = [at for at, size in enumerate(lead.shape) if size != shape[at]]
        if classes is None and longer:
            # Numbers of rows meet what has one for each class.
            classes = Part(longer[0])
        operands = []
        for x in node.inputs:
            here = _classes_of(x, classes, shape)
            if x in self._placed and self._placed[x][1:] != (here, rows):
                raise RefusalError("pairs rows with other rows", node)
            operands.append(self._placed[x].form if x in self._placed else self._repeated(x, classes, rows, shape))
        return Placed(self._computed(node, operands), classes, rows)

    def _computed(self, node: Node, operands: list[Any]) -> Any:
        return self.algebra.once(_written(node), operands, lambda: self.algebra.elementwise(node, operands))

    def _summed(self, node: Node, number: Any, lead: Placed, shape: Sequence[int], axes: Sequence[int]) -> Placed:
        """Adds up over axes of rows what was added up over the classes; `shape` and `axes` are the operand's."""
        assert lead.classes is not None
        if lead.classes.axis not in axes:
            raise RefusalError("adds up rows", node)
        shape, result = lead.classes.shape(shape, 1), node.outputs[0].shape
        if all(shape[at] == 1 for at in axes):
            return Placed(number, None, lead.rows)
        array = jnp.broadcast_to(self.algebra.maxima.array(number), lead.rows)
        total = jnp.sum(reshaped(array, shape), tuple(axes))
        return Placed(Number(reshaped(total, result)), None, result)

    def _gathered(self, node: Node, lead: Placed) -> Any:
        """Follows a gather that picks one class for each row."""
        found, shape, classes = row_wise.labels_by_position(node), node.inputs[0].shape, lead.classes
        assert classes is not None
        if found is not None and Part(found[0]) == classes:
            label = self._pulled(found[1], None, lead.rows)
        else:
            numbers, sizes = node.params["dimension_numbers"], node.params["slice_sizes"]
            is_pick = [Part(at) for at in numbers.start_index_map] == [classes] and sizes[classes.axis] == 1
            along = {x.operands[0]: (x.operands[1], x.result) for x in row_wise.axes_of(node)}
            rows = [at for at, size in enumerate(shape) if size > 1 and at != classes.axis]
            starts, results = zip(*(along.get(at, (None, None)) for at in rows), strict=True) if rows else ((), ())
            starts = tuple(at for at in starts if at is not None)
            is_pick = is_pick and None not in results and _rises(results) and _rises(starts)
            if not is_pick or node.outputs[0].size != math.prod(lead.rows) or len(starts) not in (0, len(rows)):
                raise RefusalError("does more than to pick one class per row", node)
            label = self._pulled(node.inputs[1], None, lead.rows)
        key = (node.name, str(node.params["mode"]), str(node.params["fill_value"]))
        return self.algebra.once(key, (lead.form, label), lambda: self.algebra.gathered(node, lead.form, label))

    def _product(self, node: Node) -> Placed:
        """Follows a product that adds up over the classes, or multiplies by a number for each row."""
        sides, shapes = [self._placed.get(x) for x in node.inputs], [x.shape for x in node.inputs]
        side = next((i for i, one in enumerate(sides) if one is not None and one.classes is not None), 0)
        lead, along = sides[side], {one.operands[side]: one for one in row_wise.axes_of(node)}
        if lead is None or lead.classes is None:
            raise RefusalError("reads the logits as well", node)
        of_classes = along[lead.classes.axis]
        at = of_classes.operands[1 - side]
        paired = None if at is None else lead.classes._replace(axis=at)
        # Axes of rows keep their order in both operands and in the result; the other operand may have none.
        rows = [along[at] for at, size in enumerate(shapes[side]) if size > 1 and at != lead.classes.axis]
        others = [one.operands[1 - side] for one in rows if one.operands[1 - side] is not None]
        results = [one.result for one in rows if one.result != SUM]
        count = math.prod(shapes[1 - side]) // (1 if paired is None else self.algebra.classes)
        fits = count in (1, math.prod(lead.rows)) and len(others) in (0, len(rows))
        if not (fits and _rises(others) and _rises(results)):
            raise RefusalError("needs whole rows of logits", node)
        given = sides[1 - side]
        if given is not None and given[1:] != (paired, lead.rows):
            raise RefusalError("pairs rows with other rows", node)
        other = given.form if given else self._pulled(node.inputs[1 - side], paired, lead.rows)
        forms = (lead.form, other)
        if of_classes.result == SUM:
            number = self.algebra.once("product", forms, lambda: self.algebra.total_of_product(*forms))
            axes = [at for at, one in along.items() if at is not None and one.result == SUM]
            return self._summed(node, number, lead, shapes[side], axes)
        form = self.algebra.once("times", forms, lambda: self.algebra.scaled(*forms, self.algebra.maxima.times))
        if form is None or len(results) < len(rows) or not isinstance(of_classes.result, int):
            raise RefusalError("needs whole rows of logits", node)
        return Placed(form, lead.classes._replace(axis=of_classes.result), lead.rows)

    def pulled(self, value: Value, axis: int) -> Any:
        """Returns the form of a value that depends on no logits, whose `axis` counts the classes."""
        return self._pulled(value, Part(axis), row_wise.without_axis(value.shape, axis))

    def _repeated(
        self, x: Value, classes: Part | None, rows: tuple[int, ...], shape: Sequence[int], dims: Any = None
    ) -> Any:
        """Returns the form of what is repeated to a shape, where `classes` are, and whose axes `dims` are its own."""
        here = _classes_of(x, classes, shape, dims)
        count = x.size // (1 if here is None else self.algebra.classes)
        if count in (1, math.prod(rows)):
            return self._pulled(x, here, rows)
        # Along some axes of rows all have the same.
        sizes = shape if here or not classes else classes.shape(shape, 1)
        array = lax.broadcast_in_dim(self._read(x), sizes, range(len(sizes)) if dims is None else dims)
        return self._given(array, here and classes, rows)

    def _pulled(self, value: Value, classes: Part | None, rows: tuple[int, ...]) -> Any:
        """Returns the form of a value that depends on no logits, computed with the rows so that its meaning is seen."""
        key = ("pulled", identity(value), classes, rows)
        return self.algebra.once(key, (), lambda: self._form(value, classes, rows))

    def _form(self, value: Value, classes: Part | None, rows: tuple[int, ...]) -> Any:
        if value.number is not None:
            return self.algebra.once(("is", str(value.number), str(value.dtype)), (), lambda: Number(value.number))
        node = value.producer
        if node is None or not self._is_computed(node, value, classes, math.prod(rows)):
            if classes is not None and _is_counted(value, self.algebra.classes):
                return Vector(jnp.asarray(value.constant).reshape(-1), counts=True)
            return self._given(self._read(value), classes, rows)
        if node.name == "iota":
            return Vector(jnp.arange(self.algebra.classes, dtype=value.dtype), counts=True)
        if node.name in POINTWISE - SAME:
            return self._computed(node, [self._repeated(x, classes, rows, value.shape) for x in node.inputs])
        (operand,) = node.inputs
        if node.name == "broadcast_in_dim":
            return self._repeated(operand, classes, rows, value.shape, node.params["broadcast_dimensions"])
        return self._pulled(operand, classes and _classes_before(node, classes), rows)

    def _is_computed(self, node: Node, value: Value, classes: Part | None, count: int) -> bool:
        if node.equation.effects or len(node.outputs) > 1:
            return False
        if node.name == "iota":
            return classes == Part(node.params["dimension"])
        if node.name == "transpose" and not _keeps_order(node, classes and _classes_before(node, classes)):
            return False
        if node.name in RESHAPES and classes is not None and _classes_before(node, classes) is None:
            return False
        if value.size > count:
            return node.name in _NARROW
        return node.name in (_OF_NUMBERS if jnp.issubdtype(value.dtype, jnp.floating) else _OF_LABELS)

    def _given(self, array: Any, classes: Part | None, rows: tuple[int, ...]) -> Any:
        """Returns the form of an array with a number for each row, or for all of them, and perhaps for each class."""
        if classes is None:
            return Number(reshaped(array, rows if array.size > 1 else ()))
        before, behind, size = array.shape[: classes.axis], array.shape[classes.axis + 1 :], self.algebra.classes
        if classes != Part(classes.axis):
            array = reshaped(array, (*before, classes.outer, size, classes.inner, *behind))
        array = jnp.moveaxis(array, len(before) + (classes != Part(classes.axis)), -1)
        return Vector(reshaped(array, (*(rows if array.size > size else ()), size)))


def _classes_of(x: Value, classes: Part | None, shape: Sequence[int], dims: Any = None) -> Part | None:
    """Returns where an array has the classes that is repeated to a shape; None if it has one number for all."""
    dims = range(len(x.shape)) if dims is None else dims
    if classes is None or classes.axis not in dims:
        return None
    at = dims.index(classes.axis)
    return classes._replace(axis=at) if x.shape[at] == shape[classes.axis] else None


def _classes_before(node: Node, classes: Part) -> Part | None:
    """Returns where the operand of a node that moves numbers has the classes; None if that is not known."""
    if node.name == "transpose":
        return classes._replace(axis=node.params["permutation"][classes.axis])
    return row_wise.reshaped(node.outputs[0].shape, classes, node.inputs[0].shape) if node.name in RESHAPES else classes


def _is_counted(value: Value, classes: int) -> bool:
    """Tells whether an array in the code is 0, 1, 2, ... for each class."""
    if not value.is_constant or value.size != classes or isinstance(value.constant, jax.core.Tracer):
        return False
    return np.array_equal(np.asarray(value.constant).reshape(-1), np.arange(classes))


def _keeps_order(node: Node, classes: Part | None) -> bool:
    """Tells whether axes of rows keep their order in a transposition."""
    sizes = node.inputs[0].shape
    of_rows = [at for at in node.params["permutation"] if sizes[at] > 1 and (classes is None or at != classes.axis)]
    return _rises(of_rows) and (classes is None or classes == Part(classes.axis))


def _rises(numbers: Sequence[Any]) -> bool:
    return [*numbers] == sorted(numbers)


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
    return node.name, params, str(node.outputs[0].dtype)
