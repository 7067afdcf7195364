"""Forms of arrays of the logits' shape: each says how a number follows from its row and its class."""

import dataclasses
from typing import Any

import jax.numpy as jnp

from jaxops.linear_cross_entropy.rewriting.head import Head
from jaxops.linear_cross_entropy.rewriting.rows import Change, Read, Row
from lowering.rewriting.graph import Node, Value

ONE, ZERO = Row.number(1.0), Row.number(0.0)


@dataclasses.dataclass(frozen=True)
class Rows:
    """Rows that have one number for all classes."""

    row: Row


@dataclasses.dataclass(frozen=True)
class Columns:
    """Columns that have one number for all rows: those of `value` along an axis, wherever it is on the others."""

    value: Value
    axis: int

    def array(self, read: Read) -> Any:
        """Returns the numbers (V,)."""
        array = jnp.moveaxis(read(self.value), self.axis, -1)
        return array.reshape(-1, array.shape[-1])[0]


@dataclasses.dataclass(frozen=True)
class OneHot:
    """One-hot rows: `on` at each row's label, `off` elsewhere."""

    labels: Row
    on: Row
    off: Row


@dataclasses.dataclass(frozen=True)
class Dense:
    """An array that does not depend on the logits; `changes` bring its rows into this form's shape."""

    value: Value
    axis: int
    changes: tuple[Change, ...] = ()

    def array(self, read: Read) -> Any:
        """Returns the array with the classes last."""
        array = jnp.moveaxis(read(self.value), self.axis, -1)
        for change in self.changes:
            array = change.apply(array)
        return array


@dataclasses.dataclass(frozen=True)
class Logits:
    """Logits scale z + shift, where z are the head's; `changes` bring its rows into this form's shape."""

    head: Head
    scale: Row = ONE
    shift: Row = ZERO
    changes: tuple[Change, ...] = ()


@dataclasses.dataclass(frozen=True)
class Exponentials:
    """Exponentials gain exp(logits)."""

    logits: Logits
    gain: Row = ONE


@dataclasses.dataclass(frozen=True)
class Elementwise:
    """Result of a node that computes number by number from other forms."""

    node: Node
    operands: tuple["Form", ...]


Form = Rows | Columns | OneHot | Dense | Logits | Exponentials | Elementwise


def changed(form: Form, change: Change) -> Form:
    """Returns a form after a change of the axes of its rows."""
    match form:
        case Rows(row):
            return Rows(row.through(change))
        case OneHot(labels, on, off):
            return OneHot(labels.through(change), on.through(change), off.through(change))
        case Dense():
            return dataclasses.replace(form, changes=(*form.changes, change))
        case Logits():
            return changed_logits(form, change)
        case Exponentials(logits, gain):
            return Exponentials(changed_logits(logits, change), gain.through(change))
        case Elementwise(node, operands):
            return Elementwise(node, tuple(changed(x, change) for x in operands))
    return form


def changed_logits(form: Logits, change: Change) -> Logits:
    """Returns logits after a change of their rows' axes. A change that leaves rows out is made before all else."""
    head, changes = form.head, (*form.changes, change)
    if change.undo is None:
        head, changes = dataclasses.replace(head, cuts=(*head.cuts, *changes)), ()
    return Logits(head, form.scale.through(change), form.shift.through(change), changes)
