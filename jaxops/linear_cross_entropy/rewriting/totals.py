"""Reduces forms over the classes to rows, by asking the head for statistics."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from jaxops.linear_cross_entropy.rewriting import rows
from jaxops.linear_cross_entropy.rewriting.forms import (
    Columns,
    Dense,
    Elementwise,
    Exponentials,
    Form,
    Logits,
    OneHot,
    Rows,
    changed,
)
from jaxops.linear_cross_entropy.rewriting.head import Head, Statistics
from jaxops.linear_cross_entropy.rewriting.rows import Change, Row, minus, over, plus, times
from lowering.rewriting.graph import Value
from lowering.rewriting.rules import RefusalError


class Asked:
    """The statistics that are asked for, of each head, and how everything follows from them."""

    def __init__(self, classes: int, dtype: Any, *, is_promised: bool = False) -> None:
        """Takes the number of classes, and the dtype in which numbers per row are computed.

        Args:
          classes: how many there are.
          dtype: that of statistics.
          is_promised: whether labels are classes wherever the user's code promises so.
        """
        self.classes = classes
        self.dtype = dtype
        self.is_promised = is_promised
        self.of_heads: dict[Head, Statistics] = {}
        self.picks_by_label = False

    def total(self, form: Form) -> Row:
        """Sums over the classes."""
        match form:
            case Rows(row):
                return times(Row.number(float(self.classes)), row)
            case Columns() | Dense():
                return self._sum_of(form)
            case OneHot(labels, on, off):
                inside = self._if_class(labels, minus(on, off))
                return plus(times(Row.number(float(self.classes)), off), inside)
            case Logits():
                return self._weighted(form, "ones", Row.number(float(self.classes)))
            case Exponentials(logits, gain):
                return times(gain, rows.exponential(self._log_total(logits)))
            case Elementwise():
                return self._total_of_node(form)

    def picked(self, form: Form, labels: Row) -> Row:
        """Picks the number at each row's label."""
        match form:
            case Rows(row):
                return row
            case Columns() | Dense():
                return self._picked_from(form, labels)
            case OneHot(other, on, off):
                is_same = rows.combine("equal", lambda a, b: jnp.asarray(a) == b, labels, other)
                return rows.where(is_same, on, off)
            case Logits():
                return self._label_logit(form, labels)
            case Exponentials(logits, gain):
                return times(gain, rows.exponential(self._label_logit(logits, labels)))
            case Elementwise(node, operands):
                return rows.bound(node, [self.picked(x, labels) for x in operands], self.dtype)

    def maximum(self, form: Form) -> Row:
        """Returns the largest number of each row."""
        if not isinstance(form, Logits):
            raise RefusalError("the maximum of something else than logits is taken")
        statistics = self._statistics(form)
        ratio = self._ratio(form, statistics)
        if ratio.literal is None or ratio.literal <= 0:
            raise RefusalError("the maximum is taken at another temperature than the exponentials")
        return plus(times(ratio, self._answer(form, statistics.maximum)), form.shift)

    def prediction(self, form: Form) -> Row:
        """Returns the first class with the largest number."""
        if isinstance(form, Exponentials):
            form = form.logits
        if not isinstance(form, Logits):
            raise RefusalError("the largest of something else than logits is looked for")
        statistics = self._statistics(form)
        ratio = self._ratio(form, statistics)
        if ratio.literal is None or ratio.literal <= 0:
            raise RefusalError("the prediction is taken at another temperature than the exponentials")
        statistics.wants_prediction = True
        return self._answer(form, statistics.prediction)

    def _total_of_node(self, form: Elementwise) -> Row:
        node, operands = form.node, form.operands
        match node.name:
            case "neg":
                return times(Row.number(-1.0), self.total(operands[0]))
            case "convert_element_type":
                return self.total(operands[0])
            case "add" | "add_any" | "sub":
                self._check_terms(form)
                return (minus if node.name == "sub" else plus)(*map(self.total, operands))
            case "div" if isinstance(operands[1], Rows):
                return over(self.total(operands[0]), operands[1].row)
            case "mul":
                return self.total_of_product(*operands)
            case "log":
                return self.total(self._as_logits(form))
            case "select_n" if len(operands) == 3:
                return self._total_of_cases(form)
        raise RefusalError(f"{node.name} on {node.source} is added up over the classes")

    def _total_of_cases(self, form: Elementwise) -> Row:
        condition, no, yes = form.operands
        if isinstance(condition, Rows):
            return rows.where(condition.row, self.total(yes), self.total(no))
        if isinstance(condition, OneHot) and {condition.on.literal, condition.off.literal} == {True, False}:
            at_label, others = (yes, no) if condition.on.literal else (no, yes)
            # Only numbers may stand for the others: a difference of two sums would cost digits.
            if isinstance(others, Rows):
                of_others = times(Row.number(float(self.classes - 1)), others.row)
                outside = times(Row.number(float(self.classes)), others.row)
                inside = plus(of_others, self._at_label(at_label, condition.labels))
                return rows.where(self.is_class(condition.labels), inside, outside)
        raise RefusalError(f"{form.node.name} on {form.node.source} is added up over the classes")

    def total_of_product(self, a: Form, b: Form) -> Row:
        """Sums a b over the classes."""
        for one, other in ((a, b), (b, a)):
            if isinstance(one, Rows):
                return times(one.row, self.total(other))
            if isinstance(one, OneHot):
                inside = self._if_class(one.labels, times(minus(one.on, one.off), self._at_label(other, one.labels)))
                return inside if one.off.literal == 0 else plus(inside, times(one.off, self.total(other)))
        for one, other in ((a, b), (b, a)):
            if not isinstance(one, Columns | Dense):
                continue
            if isinstance(other, Columns | Dense):
                return self._sum_of_product(one, other)
            if isinstance(other, Elementwise) and other.node.name in ("add", "sub"):
                self._check_terms(other)
                parts = [self.total_of_product(one, x) for x in other.operands]
                return (plus if other.node.name == "add" else minus)(*parts)
            if not isinstance(other, Elementwise) or other.node.name == "log":
                return self._weighted(self._as_logits(other), one, self._sum_of(one))
            if isinstance(one, Elementwise) and one.node.name == "neg":
                return times(Row.number(-1.0), self.total_of_product(one.operands[0], other))
        for one, other in ((a, b), (b, a)):
            if isinstance(one, Exponentials):
                return self._expected(one, self._as_logits(other))
        raise RefusalError("a product with the logits is added up over the classes")

    def _check_terms(self, form: Elementwise) -> None:
        """Refuses to add up the terms of a sum or difference apart, if one alone reads the logits.

        In a divergence, p (log p - z), both terms may be large and nearly equal.
        """
        if len({_reads_logits(operand) for operand in form.operands}) > 1:
            node = form.node
            raise RefusalError(f"{node.name} on {node.source} compares the logits with other numbers, class by class")

    def _as_logits(self, form: Form) -> Logits:
        """Returns logits, also from the log of their exponentials."""
        if isinstance(form, Elementwise) and form.node.name == "log" and isinstance(form.operands[0], Exponentials):
            exponentials = form.operands[0]
            logits = exponentials.logits
            shift = plus(logits.shift, rows.combine("log", jnp.log, exponentials.gain))
            return Logits(logits.head, logits.scale, shift, logits.changes)
        if not isinstance(form, Logits):
            what = f"{form.node.name} on {form.node.source}" if isinstance(form, Elementwise) else "something else"
            raise RefusalError(f"{what} is added up over the classes")
        return form

    def _statistics(self, logits: Logits) -> Statistics:
        return self.of_heads.setdefault(logits.head, Statistics(logits.head))

    def _ratio(self, logits: Logits, statistics: Statistics) -> Row:
        """Returns these logits in units of those that the statistics are about."""
        scale = statistics.scale
        if scale is None:
            return logits.scale
        return over(logits.scale, _forth(scale, logits.changes))

    def _answer(self, logits: Logits, value: Value) -> Row:
        return _forth(Row.of(value), logits.changes)

    def _log_total(self, logits: Logits) -> Row:
        """Returns the logarithm of the sum of exp(logits)."""
        statistics = self._statistics(logits)
        statistics.ask_scale(_back(logits.scale, logits.changes))
        maximum, relative = (self._answer(logits, x) for x in (statistics.maximum, statistics.log_sum_exp))
        return _shifted(maximum, relative, logits.shift)

    def _label_logit(self, logits: Logits, labels: Row) -> Row:
        statistics = self._statistics(logits)
        statistics.ask_label(_back(labels, logits.changes))
        relative, maximum = (self._answer(logits, x) for x in (statistics.label, statistics.maximum))
        ratio = self._ratio(logits, statistics)
        return _shifted(times(ratio, maximum), times(ratio, relative), logits.shift)

    def _weighted(self, logits: Logits, weights: Columns | Dense | str, total_weight: Row) -> Row:
        """Sums the logits times weights, whose own sum is known."""
        statistics = self._statistics(logits)
        if isinstance(weights, Dense):
            self.picks_by_label = True
            undone = weights
            for change in reversed(logits.changes):
                undone = changed(undone, _undoing(change))  # type: ignore[assignment]
            weights = undone
        statistics.ask_target(weights, total_weight)
        relative, maximum = (self._answer(logits, x) for x in (statistics.weighted, statistics.maximum))
        ratio = self._ratio(logits, statistics)
        offset = _shifted(times(ratio, maximum), Row.number(0.0), logits.shift)
        return plus(times(ratio, relative), times(total_weight, offset))

    def _expected(self, exponentials: Exponentials, logits: Logits) -> Row:
        """Sums exponentials times logits, as in an entropy."""
        total = self.total(exponentials)
        if logits.head != exponentials.logits.head:
            raise RefusalError("exponentials are multiplied by other logits than their own")
        statistics = self._statistics(logits)
        statistics.wants_mean = True
        relative, maximum = (self._answer(logits, x) for x in (statistics.mean, statistics.maximum))
        ratio = self._ratio(logits, statistics)
        return times(total, _shifted(times(ratio, maximum), times(ratio, relative), logits.shift))

    def _at_label(self, form: Form, labels: Row) -> Row:
        self.picks_by_label |= bool(labels.values)
        return self.picked(form, labels)

    def _if_class(self, labels: Row, row: Row) -> Row:
        """Returns a row where the label is a class, else 0."""
        return rows.where(self.is_class(labels), row, Row.number(0.0))

    def is_class(self, labels: Row) -> Row:
        """Marks the labels that are classes."""
        return rows.is_class(labels, self.classes)

    def _sum_of(self, form: Columns | Dense) -> Row:
        return Row(("sum", form), frozenset([form.value]), lambda read: jnp.sum(_wide(form.array(read)), axis=-1))

    def _sum_of_product(self, a: Columns | Dense, b: Columns | Dense) -> Row:
        def compute(read: rows.Read) -> jnp.ndarray:
            return jnp.sum(_wide(a.array(read)) * _wide(b.array(read)), axis=-1)

        return Row(("sum", a, b), frozenset([a.value, b.value]), compute)

    def _picked_from(self, form: Columns | Dense, labels: Row) -> Row:
        classes = self.classes

        def compute(read: rows.Read) -> jnp.ndarray:
            array, at = form.array(read), jnp.clip(jnp.asarray(labels.compute(read)), 0, classes - 1)
            if isinstance(form, Columns):
                return array[at]
            at = jnp.broadcast_to(at, array.shape[:-1])
            return jnp.take_along_axis(array, at[..., None], axis=-1)[..., 0]

        return Row(("picked", form, labels.key), labels.values | {form.value}, compute)


def _reads_logits(form: Form) -> bool:
    if isinstance(form, Elementwise):
        return any(map(_reads_logits, form.operands))
    return isinstance(form, Logits | Exponentials)


def _shifted(maximum: Row, relative: Row, shift: Row) -> Row:
    """Sums a row's maximum, a number relative to it, and what the user adds.

    What is first subtracted of logits is mostly their maximum. It goes first here too: a small number that is added to
    the maximum before would lose its digits.
    """
    first, *others = shift.terms or (shift,)
    return rows.total(maximum, first, relative, *others)


def _wide(array: jnp.ndarray) -> jnp.ndarray:
    return array.astype(jnp.promote_types(array.dtype, jnp.float32))


def _forth(row: Row, changes: Sequence[Change]) -> Row:
    for change in changes:
        row = row.through(change)
    return row


def _back(row: Row, changes: Sequence[Change]) -> Row:
    for change in reversed(changes):
        row = row.through(_undoing(change))
    return row


def _undoing(change: Change) -> Change:
    assert change.undo is not None  # a change that leaves rows out is the head's
    return Change(("undo", change.key), change.undo, change.apply)
