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
from jaxops.linear_cross_entropy.rewriting import picks, row_wise
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
    counts,
)
from jaxops.linear_cross_entropy.rewriting.row_wise import POINTWISE, RESHAPES, SUM, Part
from lowering.rewriting.graph import SAME, Level, Node, Value
from lowering.rewriting.rules import RefusalError

_RETURNED = (
    "the logits, or as many numbers computed from them, are returned: where they are only reduced to metrics, do that"
    " in the function that you rewrite, or rewrite the function that does so, such as the whole training step"
)
_CARRIED = (
    "the logits, or as many numbers computed from them, leave the loop, branch or shard_map around them, as for a"
    " backward pass: rewrite the loss, and then differentiate it"
)
_MOVES = RESHAPES | {"broadcast_in_dim", "transpose"}
_NARROW = POINTWISE | _MOVES
_FOLLOWED = _NARROW | {"slice", "reduce_sum", "dot_general"}
_TAKEN = frozenset({"reduce_max", "argmax", "gather", "dynamic_slice"})
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
      whole: the logits before rows were left out, and the view that did so; None unless statistics of all rows were
        asked for first.
    """

    form: Any
    classes: Part | None
    rows: tuple[int, ...]
    whole: "tuple[Placed, View] | None" = None


def returned(level: Level) -> str:
    """Says that logits are among the results of a level, and what a user could do about it."""
    return _CARRIED if level.is_body else _RETURNED


class Reading:
    """One evaluation of what reads logits.

    Attributes:
      algebra: what is asked.
      nodes: those that were evaluated.
      exits: the values of these that are read elsewhere, numbers per row or sums of such numbers.
    """

    def __init__(self, algebra: RowAlgebra, logits: Sequence[Value], axis: int, read: Callable[[Value], Any]) -> None:
        """Takes the logits, if there are any, the axis that counts the classes, and how to read other values."""
        self.algebra, self._logits, self._axis, self._read = algebra, logits, axis, read
        self.nodes: list[Node] = []
        self.exits: tuple[Value, ...] = ()
        self._begin()

    def _begin(self) -> None:
        form, axis = self.algebra.logits(), self._axis
        self._placed = {z: Placed(form, Part(axis), row_wise.without_axis(z.shape, axis)) for z in self._logits}

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
            except RefusalError as error:
                if any(one.classes is not None for one in placed):
                    raise error.located(node) from None
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
            raise RefusalError(returned(level) if is_returned else "the logits are used elsewhere")
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
        form, _, rows, _ = self._placed[value]
        is_differentiated = bool(jnp.issubdtype(value.dtype, jnp.floating))
        array = jnp.asarray(self.algebra.maxima.array(form, is_differentiated=is_differentiated)).astype(value.dtype)
        return reshaped(jnp.broadcast_to(array, rows), value.shape)

    def _of_node(self, node: Node) -> Placed:
        """Evaluates a node that reads what depends on logits."""
        if node.equation.effects or len(node.outputs) != 1:
            raise RefusalError("reads the logits as well", node)
        placed = [self._placed.get(x) for x in node.inputs]
        lead = next((x for x in placed if x and x.classes), None) or next(filter(None, placed))
        _, of_classes, rows, _ = lead
        if node.name in _TAKEN and lead is placed[0]:
            return self._taken(node, lead)
        if node.name not in _FOLLOWED or (of_classes is None and node.name not in _NARROW):
            raise RefusalError("reads the logits as well", node)
        parts, role = self._followed(node, placed)
        if any(x is not None and (x.classes, x.rows) != (part, rows) for x, part in zip(placed, parts, strict=True)):
            raise RefusalError("pairs rows with other rows", node)
        along = zip(node.inputs, placed, parts, strict=True)
        forms = [x.form if x else self._repeated(node, value, part, role, rows) for value, x, part in along]
        is_ordered = _keeps_order(node, parts)
        if node.name == "slice" or (node.name == "transpose" and not is_ordered):
            return self._viewed(node, lead, role)
        if not is_ordered:
            raise RefusalError("changes the order of rows", node)
        if node.name in _MOVES | SAME:
            return Placed(forms[0], role, rows)
        if node.name in POINTWISE:
            return Placed(self._computed(node, forms), role, rows)
        if role == SUM:
            of_sum = node.name == "reduce_sum"
            name, make = ("total", self.algebra.total) if of_sum else ("product", self.algebra.total_of_product)
            return self._summed(node, self.algebra.once(name, forms, lambda: make(*forms)), lead, parts)
        if node.name == "reduce_sum":
            raise RefusalError("adds up rows", node)
        form, by = forms if lead is placed[0] else forms[::-1]
        product = self.algebra.once(
            "times", (form, by), lambda: self.algebra.scaled(form, by, self.algebra.maxima.times)
        )
        if product is None or any(one.result == SUM for one in row_wise.axes_of(node)):
            raise RefusalError("needs whole rows of logits", node)
        return Placed(product, role, rows)

    def _followed(self, node: Node, placed: Sequence[Placed | None]) -> tuple[Sequence[Part | None], Any]:
        """Finds where operands of a node have the classes, and its result."""
        if any(x is not None and x.classes for x in placed):
            return row_wise.followed(node, [x and x.classes for x in placed])
        (before, after) = next(x.shape for x in node.inputs if x in self._placed), node.outputs[0].shape
        dims = node.params.get("broadcast_dimensions", range(len(before)))
        kept = {} if node.name in RESHAPES | {"transpose"} else dict(zip(dims, before, strict=True))
        # Numbers of rows may be repeated for each class, or meet what has one for each.
        repeated = [at for at, size in enumerate(after) if kept and size != kept.get(at, 1)]
        if not repeated:
            return [None] * len(node.inputs), None
        if [after[at] for at in repeated] != [self.algebra.classes]:
            raise RefusalError("repeats rows", node)
        return row_wise.parts_of_operands(node, Part(repeated[0])) or [], Part(repeated[0])

    def _viewed(self, node: Node, placed: Placed, classes: Part) -> Placed:
        """Leaves rows out, or changes their order."""
        before, after, old = node.inputs[0].shape, node.outputs[0].shape, placed.classes
        if old is None or old != Part(old.axis):
            raise RefusalError("changes the order of rows", node)
        if before == after and node.name == "slice":
            return placed
        bounds, order = None, None
        if node.name == "slice":
            first, last, strides = (node.params[name] for name in ("start_indices", "limit_indices", "strides"))
            strides = strides or (1,) * len(before)
            bounds = tuple(row_wise.without_axis(each, old.axis) for each in (first, last, strides))
        else:
            order = tuple(at - (at > old.axis) for at in node.params["permutation"] if at != old.axis)
        shapes = row_wise.without_axis(before, old.axis), row_wise.without_axis(after, classes.axis)
        view, asked = View(*shapes, bounds, order), self.algebra.asked.layer
        is_asked = isinstance(placed.form, Logits) and asked is not None and asked.is_same(placed.form.layer)
        whole = (placed, view) if is_asked and view.is_dense else None
        return Placed(self._viewed_form(placed.form, view), classes, view.shape, whole)

    def _viewed_form(self, form: Any, view: View) -> Any:
        """Leaves rows out of a form, or changes their order."""

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
                case Combined():
                    return form._replace(operands=tuple(map(viewed, form.operands)))
            raise TypeError(form)

        return viewed(form)

    def _computed(self, node: Node, operands: list[Any]) -> Any:
        return self.algebra.once(_written(node), operands, lambda: self.algebra.elementwise(node, operands))

    def _summed(self, node: Node, number: Any, lead: Placed, parts: Sequence[Part | None]) -> Placed:
        """Adds up over axes of rows as well what was added up over the classes."""
        part, shape, result = parts[0], node.inputs[0].shape, node.outputs[0].shape
        assert part is not None
        added = (one.operands[0] for one in row_wise.axes_of(node) if one.result == SUM)
        axes, shape = tuple(at for at in added if at is not None), part.shape(shape, 1)
        if all(shape[at] == 1 for at in axes):
            return Placed(number, None, lead.rows)
        array = jnp.broadcast_to(self.algebra.maxima.array(number), lead.rows)
        total = jnp.sum(reshaped(array, shape), axes)
        return Placed(Number(reshaped(total, result)), None, result)

    def _taken(self, node: Node, placed: Placed) -> Placed:
        """Takes one number from the classes of each row, or of some rows."""
        (form, classes, rows, of_all), params, algebra = placed, node.params, self.algebra
        if node.name in ("reduce_max", "argmax") and [Part(at) for at in params["axes"]] == [classes]:
            take = algebra.maximum if node.name == "reduce_max" else algebra.prediction
            return Placed(algebra.once(node.name, (form,), lambda: take(form)), None, rows)
        is_one = node.outputs[0].size * algebra.classes == node.inputs[0].size
        if node.name == "dynamic_slice" and classes and classes == Part(classes.axis) and is_one:
            label = algebra.clipped(self._pulled(node.inputs[1 + classes.axis], None, rows))
            return Placed(algebra.once("pick", (form, label), lambda: algebra.picked_at(form, label)), None, rows)
        if node.name != "gather" or classes is None or node.inputs[1] in self._placed:
            raise RefusalError("reads the logits as well", node)
        found = next((pick for pick in picks.picks_by_position(node) if Part(pick.axis) == classes), None)
        if found is None:
            numbers, sizes = params["dimension_numbers"], params["slice_sizes"]
            is_pick = [Part(at) for at in numbers.start_index_map] == [classes] and sizes[classes.axis] == 1
            is_pick &= node.outputs[0].size == math.prod(rows) and _keeps_order(node, [classes, None])
            if not is_pick or node.inputs[1].size not in (1, math.prod(rows)):
                raise RefusalError("does more than to pick one class per row", node)
        key, labels = (
            (node.name, str(params["mode"]), str(params["fill_value"])),
            found.labels if found else node.inputs[1],
        )
        all_rows = row_wise.without_axis(node.inputs[0].shape, classes.axis)
        if of_all is not None and (found is None or found.shape == all_rows):
            (form, _, rows, _), view = of_all
        elif found is None or found.shape == all_rows:
            label = self._pulled(labels, None, rows)
            return Placed(algebra.once(key, (form, label), lambda: algebra.gathered(node, form, label)), None, rows)
        else:
            ends = tuple(first + count for first, count in zip(found.first, found.shape, strict=True))
            view = View(all_rows, found.shape, (found.first, ends, (1,) * len(ends)))
        read = self._pulled(labels, None, view.shape)
        label = algebra.once(("of all rows", view, rows), (read,), lambda: view.filled(read, rows))
        number = algebra.once(key, (form, label), lambda: algebra.gathered(node, form, label))
        # Maxima are those of all rows, so a number of some rows has none of them.
        whole = algebra.once("computed", (number,), lambda: Number(algebra.maxima.array(number)))
        return Placed(self._viewed_form(whole, view), None, view.shape)

    def pulled(self, value: Value, axis: int) -> Any:
        """Returns the form of a value that depends on no logits, whose `axis` counts the classes."""
        return self._pulled(value, Part(axis), row_wise.without_axis(value.shape, axis))

    def _repeated(self, node: Node, x: Value, part: Part | None, role: Any, rows: tuple[int, ...]) -> Any:
        """Returns the form of an operand that depends on no logits, and may be repeated for several rows."""
        made = x.producer
        if part is None and made is not None and made.name == "broadcast_in_dim" and made.inputs[0].size == 1:
            x = made.inputs[0]  # such as the 0 of a vmap, which is repeated twice
        if x.size // (1 if part is None else self.algebra.classes) in (1, math.prod(rows)):
            return self._pulled(x, part, rows)
        shape = node.outputs[0].shape
        if node.name not in POINTWISE | {"broadcast_in_dim"}:
            raise RefusalError("needs whole rows of logits", node)
        sizes = shape if part or not role else role.shape(shape, 1)
        dims = node.params.get("broadcast_dimensions", range(len(shape)))
        return self._given(lax.broadcast_in_dim(self._read(x), sizes, dims), part and role, rows)

    def _pulled(self, value: Value, classes: Part | None, rows: tuple[int, ...]) -> Any:
        """Returns the form of a value that depends on no logits, computed with the rows so that its meaning is seen."""
        key = ("pulled", identity(value), classes, rows)
        return self.algebra.once(key, (), lambda: self._form(value, classes, rows))

    def _form(self, value: Value, classes: Part | None, rows: tuple[int, ...]) -> Any:
        number = picks.number_of(value)
        if number is not None:
            return self.algebra.once(("is", str(number), str(value.dtype)), (), lambda: Number(number))
        node, parts = value.producer, self._parts_before(value, classes, math.prod(rows))
        if node is None or parts is None:
            if classes is not None and _is_counted(value, self.algebra.classes):
                return Vector(jnp.asarray(value.constant).reshape(-1), counts=True)
            return self._given(self._read(value), classes, rows)
        if node.name == "iota":
            size = self.algebra.classes
            return Vector(jnp.arange(size, dtype=value.dtype), counts(value.dtype, size))
        forms = [self._repeated(node, x, part, classes, rows) for x, part in zip(node.inputs, parts, strict=True)]
        return self._computed(node, forms) if node.name in POINTWISE - SAME else forms[0]

    def _parts_before(self, value: Value, classes: Part | None, count: int) -> Sequence[Part | None] | None:
        """Returns where operands have the classes, if a value is computed with the rows; None if it is only read."""
        node = value.producer
        if node is None or node.equation.effects or len(node.outputs) > 1:
            return None
        if node.name == "iota":
            return [] if classes == Part(node.params["dimension"]) else None
        is_narrow, is_float = value.size <= count, jnp.issubdtype(value.dtype, jnp.floating)
        if node.name not in ((_OF_NUMBERS if is_float else _OF_LABELS) if is_narrow else _NARROW):
            return None
        parts = [None] * len(node.inputs) if classes is None else row_wise.parts_of_operands(node, classes)
        return parts if parts is not None and _keeps_order(node, parts) else None

    def _given(self, array: Any, classes: Part | None, rows: tuple[int, ...]) -> Any:
        """Returns the form of an array with a number for each row, or for all of them, and perhaps for each class."""
        if array.size // (1 if classes is None else self.algebra.classes) not in (1, math.prod(rows)):
            raise RefusalError("a row reads arrays of another length than the classes'")
        if classes is None:
            return Number(reshaped(array, rows if array.size > 1 else ()))
        before, behind, size = array.shape[: classes.axis], array.shape[classes.axis + 1 :], self.algebra.classes
        if classes != Part(classes.axis):
            array = reshaped(array, (*before, classes.outer, size, classes.inner, *behind))
        array = jnp.moveaxis(array, len(before) + (classes != Part(classes.axis)), -1)
        return Vector(reshaped(array, (*(rows if array.size > size else ()), size)))


def _is_counted(value: Value, classes: int) -> bool:
    """Tells whether an array in the code is 0, 1, 2, ... for each class."""
    if not value.is_constant or value.size != classes or isinstance(value.constant, jax.core.Tracer):
        return False
    return np.array_equal(np.asarray(value.constant).reshape(-1), np.arange(classes))


def _keeps_order(node: Node, parts: Sequence[Part | None]) -> bool:
    """Tells whether axes of rows keep their order, from operands to each other and to the result.

    A product or a gather must also have all of them in common, or none.
    """
    rows = []
    for operands, result in row_wise.axes_of(node):
        places = zip(parts, operands, strict=True)
        is_of_rows = all(part is None or at is None or part != Part(at) for part, at in places)
        sizes = [x.shape[at] for x, at in zip(node.inputs, operands, strict=True) if at is not None]
        if is_of_rows and max(sizes, default=1) > 1:
            rows.append((*operands, result))
    columns = [*zip(*rows, strict=True)]
    pairs = ((first, second) for i, first in enumerate(columns) for second in columns[i + 1 :])
    for first, second in pairs:
        both = [pair for pair in zip(first, second, strict=True) if None not in pair and SUM not in pair]
        if sorted(both) != sorted(both, key=lambda pair: pair[1]):
            return False
    is_mixed = any(None in column and len({*column}) > 1 for column in columns)
    return not (is_mixed and node.name in ("dot_general", "gather"))


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
