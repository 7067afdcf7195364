"""Arrays with one number per row, to be computed once their values are known."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from lowering.rewriting.graph import Node, Value

Read = Callable[[Value], Any]


@dataclasses.dataclass(frozen=True)
class Row:
    """An array with one number per row, or one number for all rows.

    Attributes:
      key: equal for rows that are computed alike.
      values: what it is computed from.
      compute: `compute(read)`, where `read` gives the array of a value.
      before: if its axes were changed last, the change, and the row before.
      terms: the rows of which it is the sum, in the order in which they are added up; () for any other.
    """

    key: Any
    values: frozenset[Value]
    compute: Callable[[Read], Any] = dataclasses.field(compare=False)
    before: "tuple[Any, Row] | None" = dataclasses.field(compare=False, default=None)
    terms: "tuple[Row, ...]" = dataclasses.field(compare=False, default=())

    @classmethod
    def number(cls, number: Any) -> "Row":
        """Makes a row that has the same number everywhere."""
        return cls(("number", number), frozenset(), lambda _: number)

    @classmethod
    def of(cls, value: Value, change: "Change | None" = None) -> "Row":
        """Makes a row from the array of a value, perhaps with its axes changed."""
        number = _number(value)
        if number is not None:
            return cls.number(number)
        row = cls(identity(value), frozenset([value]), lambda read: read(value))
        return row if change is None else row.through(change)

    @property
    def literal(self) -> Any:
        """The number, where it is known."""
        return self.key[1] if isinstance(self.key, tuple) and self.key[0] == "number" else None

    def through(self, change: "Change") -> "Row":
        """Returns the row after a change of its axes; one number stays one."""
        if self.literal is not None:
            return self
        if self.before is not None and (
            self.before[0] == ("undo", change.key) or change.key == ("undo", self.before[0])
        ):
            return self.before[1]
        if self.terms:
            return total(*(term.through(change) for term in self.terms))
        key, before = (change.key, self.key), (change.key, self)

        def compute(read: Read) -> Any:
            array = self.compute(read)
            return array if jnp.ndim(array) == 0 else change.apply(array)  # one number for all rows stays one

        return Row(key, self.values, compute, before)


@dataclasses.dataclass(frozen=True)
class Change:
    """A change of axes: `key` tells it from others, `apply(array)` makes it, `undo(array)` takes it back."""

    key: Any
    apply: Callable[[Any], Any] = dataclasses.field(compare=False)
    undo: Callable[[Any], Any] | None = dataclasses.field(compare=False, default=None)


def _number(value: Value) -> Any:
    """Returns the number that a scalar is, if that is written in the code."""
    while value.shape == () and value.producer is not None and value.producer.name in ("convert_element_type", "copy"):
        value = value.producer.inputs[0]
    return value.number


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


_SIMPLE = frozenset(
    {"broadcast_in_dim", "reshape", "squeeze", "convert_element_type", "select_n", "lt", "add", "slice"}
)
_DEPTH = 8


def identity(value: Value, depth: int = _DEPTH) -> Any:
    """Returns something equal for values that are computed in the same way, as labels are for each pick."""
    if value.number is not None:
        return ("is", value.number, str(value.dtype))
    node = value.producer
    if node is None or node.name not in _SIMPLE or not depth:
        return value
    params = tuple(sorted((name, str(param)) for name, param in node.params.items()))
    return (node.name, params, value.shape, tuple(identity(x, depth - 1) for x in node.inputs))


def combine(name: Any, compute: Callable[..., Any], *rows: Row) -> Row:
    """Computes a row from others; `name` tells the computation from others."""
    values = frozenset().union(*(row.values for row in rows))
    return Row((name, *(row.key for row in rows)), values, lambda read: compute(*(row.compute(read) for row in rows)))


def plus(a: Row, b: Row) -> Row:
    """Adds a and b."""
    if a.literal == 0 or b.literal == 0:
        return b if a.literal == 0 else a
    if a.literal is not None and b.literal is not None:
        return Row.number(a.literal + b.literal)
    return total(*(a.terms or (a,)), *(b.terms or (b,)))


def total(*terms: Row) -> Row:
    """Sums the terms, from the first to the last."""
    terms = tuple(term for term in terms if term.literal != 0) or terms[:1]
    if len(terms) == 1:
        return terms[0]
    found = combine("plus", lambda *arrays: functools.reduce(_aligned(jnp.add), arrays), *terms)
    return dataclasses.replace(found, terms=terms)


def minus(a: Row, b: Row) -> Row:
    """Subtracts b from a."""
    if b.literal == 0:
        return a
    if a.literal is not None and b.literal is not None:
        return Row.number(a.literal - b.literal)
    return plus(a, total(*(times(Row.number(-1.0), term) for term in b.terms or (b,))))


def times(a: Row, b: Row) -> Row:
    """Multiplies a by b."""
    if a.literal == 1 or b.literal == 1:
        return b if a.literal == 1 else a
    if a.literal is not None and b.literal is not None:
        return Row.number(a.literal * b.literal)
    return combine("times", _aligned(jnp.multiply), a, b)


def over(a: Row, b: Row) -> Row:
    """Divides a by b."""
    if b.literal == 1:
        return a
    if a.key == b.key:
        return Row.number(1.0)
    if a.literal is not None and b.literal not in (None, 0):
        return Row.number(a.literal / b.literal)
    return combine("over", _aligned(jnp.divide), a, b)


def exponential(a: Row) -> Row:
    """Computes exp(a)."""
    return combine("exp", jnp.exp, a)


def where(condition: Row, yes: Row, no: Row) -> Row:
    """Chooses `yes` where the condition holds, else `no`."""

    def choose(condition: Any, yes: Any, no: Any) -> Any:
        return jnp.where(*_spread(condition, *_together(yes, no)))

    return combine("where", choose, condition, yes, no)


def is_class(labels: Row, classes: int) -> Row:
    """Marks the labels that are classes."""
    return combine("is class", lambda x: (jnp.asarray(x) >= 0) & (jnp.asarray(x) < classes), labels)


def bound(node: Node, rows: Sequence[Row], dtype: Any) -> Row:
    """Applies an elementwise node to rows; floating numbers in `dtype`, as the logits are."""
    originals = [value.dtype for value in node.inputs]
    result = node.outputs[0].dtype

    def compute(*arrays: Any) -> Any:
        arrays = tuple(_in(array, original, dtype) for array, original in zip(arrays, originals, strict=True))
        arrays = tuple(_spread(*arrays))
        if node.name == "convert_element_type":
            to = dtype if jnp.issubdtype(result, jnp.floating) else result
            return arrays[0].astype(to)
        return node.equation.primitive.bind(*arrays, **node.params)

    key = node.name, tuple(sorted((name, str(param)) for name, param in node.params.items()))
    return combine(key, compute, *rows)


def _in(array: Any, original: Any, dtype: Any) -> jax.Array:
    """Casts the operand to `dtype` if its own is floating point."""
    return jnp.asarray(array, dtype if jnp.issubdtype(original, jnp.floating) else original)


def _spread(*arrays: Any) -> list[Any]:
    """Repeats single numbers among the arrays, laid out over a mesh like the others."""
    whole = next((x for x in arrays if jnp.ndim(x)), None)
    return [x if whole is None or jnp.ndim(x) else jnp.full_like(whole, x, dtype=jnp.result_type(x)) for x in arrays]


def _together(a: Any, b: Any) -> tuple[Any, Any]:
    """Casts two operands to the wider of their dtypes; plain numbers take that of the other."""
    if not (hasattr(a, "dtype") and hasattr(b, "dtype")) or a.dtype == b.dtype:
        return a, b
    dtype = jnp.promote_types(a.dtype, b.dtype)
    return a.astype(dtype), b.astype(dtype)


def _aligned(operation: Callable[..., Any]) -> Callable[..., Any]:
    def compute(a: Any, b: Any) -> Any:
        return operation(*_together(a, b))

    return compute
