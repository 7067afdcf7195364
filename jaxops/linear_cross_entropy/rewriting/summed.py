"""Finds the sum of cross entropies through which a level reads logits, and computes it together with its gradients."""

import dataclasses
from collections.abc import Iterator, Sequence, Set
from typing import Any

import jax
import jax.numpy as jnp

from jaxops._primitive.sharding import agreeing, reshaped, varying_with
from jaxops.linear_cross_entropy.operands import SKIPPED, Columns, Rows, RowStatistics, RowWeights
from jaxops.linear_cross_entropy.rewriting.affine import Forms, Result
from jaxops.linear_cross_entropy.rewriting.head import Statistics
from jaxops.linear_cross_entropy.rewriting.rows import Row
from jaxops.linear_cross_entropy.row_statistics import loss_terms, skipped_as_zeros, target_total
from jaxops.linear_cross_entropy.row_targets import Vocabulary
from jaxops.linear_cross_entropy.sum_operator import summed_cross_entropy
from lowering.rewriting.graph import Level, Node, Value
from lowering.rewriting.schedule import Step, Task


@dataclasses.dataclass(frozen=True)
class Sum:
    """A number that is a sum of rows' cross entropies with known weights, plus something without a derivative.

    Attributes:
      value: the number.
      statistics: of which rows.
      tasks: compute it from the statistics, in order.
      squares: those that square log sum exp.
      reads: whether what is added reads maxima or predictions.
    """

    value: Value
    statistics: Statistics
    tasks: tuple[Task, ...]
    squares: Set[Task]
    reads: bool

    def step(self, wants_known: bool) -> Step:
        """Computes the number; with `wants_known` also the maxima and predictions of rows."""
        statistics, with_rows = self.statistics, wants_known or self.reads
        operands = tuple(dict.fromkeys([*statistics.operands(), *self._operands()]))
        known = statistics.maximum, statistics.prediction

        def run(*arrays: Any) -> Sequence[Any]:
            total, metrics = self._run(dict(zip(operands, arrays, strict=True)), with_rows)
            return (total,) if metrics is None else (total, metrics.max_logit, metrics.prediction)

        return Step(operands, (self.value, *known) if with_rows else (self.value,), run)

    def _operands(self) -> Iterator[Value]:
        """Yields what the tasks read beside the statistics."""
        computed = {*self.statistics.answers(), *(x for task in self.tasks for x in task.outputs)}
        return (x for task in self.tasks for x in task.inputs if x not in computed and not x.is_constant)

    def _run(self, arrays: dict[Value, Any], with_rows: bool) -> tuple[Any, RowStatistics | None]:
        statistics = self.statistics
        rows, columns = statistics.scaled_layer(lambda x: x.constant if x.is_constant else arrays[x])
        x, labels = agreeing("... h, ... ->", rows.x, rows.labels)
        rows = rows._replace(x=x, labels=labels)
        (nothing,) = varying_with([jnp.zeros_like(labels, statistics.head.dtype)], list(arrays.values()))

        def number(log_sum_exp: Any, label: Any, weighted: Any, square: Any, known: Any = (nothing, nothing)) -> Any:
            answers = known[0], log_sum_exp, label, weighted, nothing, known[1].astype(jnp.int32)
            return self._number({**arrays, **dict(zip(statistics.answers(), answers, strict=True))}, square)

        # It is affine, so these are its slopes wherever they are taken.
        rest, transposed = jax.vjp(number, nothing, nothing, nothing, nothing)
        # Where users leave a quotient by 0 out, its slope is 0, but JAX finds 0 / 0.
        is_number = jnp.isfinite(rest)
        slopes = (
            jnp.where(jnp.isfinite(x) | ~is_number, x, jnp.zeros_like(x)) for x in transposed(jnp.ones_like(rest))
        )
        target_sum = target_total(rows, columns, nothing)
        rows, weights = _weighted(rows, columns, target_sum, *slopes)
        if with_rows:
            rows = skipped_as_zeros(rows)
        options: dict[str, Any] = {"softcap": statistics.head.softcap, "chunk_rows": None, "metrics": with_rows}
        total, of_sum = summed_cross_entropy(rows, columns, weights, **options)
        metrics = of_sum if with_rows else None
        known = (nothing, nothing) if metrics is None else (metrics.max_logit, metrics.prediction)
        if metrics is not None:
            rest = number(nothing, nothing, nothing, nothing, known)
        total = rest + total.astype(rest.dtype)
        # Users may subtract what nearly equals a row's loss, such as another model's, before they add up rows. So the
        # value is what their equations make of each row; it stays the same if all relative logits of a row rise by
        # the label's. The sum of losses and the rest only have the derivatives.
        terms: Any = loss_terms(of_sum, target_sum)
        by_label, by_target, by_square = terms
        weighted = nothing if target_sum is None else target_sum * by_label - by_target
        own = number(by_label, nothing, weighted, by_square, known)
        missing = jax.lax.stop_gradient(own - total)
        return total + jax.lax.select(jax.lax.is_finite(missing), missing, jnp.zeros_like(missing)), metrics

    def _number(self, arrays: dict[Value, Any], square: Any) -> Any:
        """Computes the number for some statistics, and for any square of log sum exp."""
        for task in self.tasks:
            if task in self.squares:
                (value,) = task.outputs
                results: Sequence[Any] = [reshaped(square.astype(value.dtype), value.shape)]
            else:
                results = task.run(*(x.constant if x.is_constant else arrays[x] for x in task.inputs))
            arrays.update(zip(task.outputs, results, strict=True))
        return arrays[self.value]


def _weighted(
    rows: Any, columns: Columns, total: Any, by_log_sum_exp: Any, by_label: Any, by_target: Any, by_square: Any
) -> tuple[Rows, RowWeights]:
    """Returns the weights of the terms of each row's loss, from the slopes of a sum; what does not count is skipped.

    `total` is the sum of the rows' column targets, or None.
    """
    # Where there is a label, both are the same, apart from rounding.
    without = by_log_sum_exp if total is None else by_log_sum_exp + by_target * total
    of_label = jnp.where(rows.labels >= 0, -by_label, without)
    weights = RowWeights(of_label, None if total is None else -by_target, by_square)
    counts = (of_label != 0) | (by_target != 0) | (by_square != 0)
    labels = rows.labels
    if columns.bias is not None:
        # The loss of a label that a mask forbids is infinite, and times a weight of 0 not 0.
        classes = columns.weight.shape[0]
        forbids = (~jnp.isfinite(columns.bias)).astype(rows.x.dtype)
        is_forbidden = Vocabulary(classes, classes, None).values_of(labels, forbids) > 0
        labels = jnp.where(is_forbidden & ~counts, jnp.full_like(labels, -1), labels)
    # A row without a weight may hold NaN, which users have left out by `where`.
    counts |= jnp.all(jnp.isfinite(rows.x), axis=-1)
    labels = jnp.where(counts, labels, jnp.full_like(labels, SKIPPED))
    return rows._replace(labels=labels), weights


@dataclasses.dataclass(frozen=True)
class Exit:
    """A node that reduces logits: what it computes of the statistics of rows, and the step that does so."""

    row: Row
    step: Step


def sums_of(
    level: Level, wanted: set[Task], statistics: Statistics, exits: dict[Node, Exit], logits: Set[Value]
) -> Iterator[Sum]:
    """Yields the scalars of a level that are sums of cross entropies, in order.

    Args:
      level: the level.
      wanted: what is needed of it.
      statistics: what the rows of the logits are asked for.
      exits: the nodes that reduce the logits.
      logits: what depends on logits and still has all classes.
    """
    if not statistics.can_scale_layer():
        return
    rows = _Rows(statistics)
    for node in level.nodes:
        if node in exits:
            rows.exit(node, exits[node])
        elif node in wanted and any(x in rows.forms for x in node.inputs) and logits.isdisjoint(node.inputs):
            rows.follow(node)
        else:
            continue
        for value in node.outputs:
            form = rows.forms[value]
            if value.shape == () and form is not None and form.is_known_sum:
                reads = form.reads or bool(form.slopes.maximum)
                yield Sum(value, statistics, _tasks(value, rows.made_by), frozenset(rows.squares), reads)


def _tasks(value: Value, made_by: dict[Value, Task]) -> tuple[Task, ...]:
    """Returns the tasks that compute a value, in order."""
    found, waiting = set(), [made_by[value]]
    while waiting:
        task = waiting.pop()
        if task not in found:
            found.add(task)
            waiting += [made_by[x] for x in task.inputs if x in made_by]
    return tuple(task for task in dict.fromkeys(made_by.values()) if task in found)


class _Rows:
    """Values that are computed from statistics.

    Attributes:
      forms: of each value.
      made_by: what computes each value.
      squares: what squares log sum exp.
    """

    def __init__(self, statistics: Statistics) -> None:
        """Begins with the statistics themselves."""
        head = statistics.head
        self._known = Forms()
        self.forms: dict[Value, Result] = {}
        self.made_by: dict[Value, Task] = {}
        self.squares: set[Task] = set()
        (*rows, _) = jax.eval_shape(head.rows_of, head.x.aval).shape
        self._types = {x: jax.ShapeDtypeStruct(rows, head.dtype) for x in statistics.answers()}
        self._types[statistics.prediction] = jax.ShapeDtypeStruct(rows, jnp.int32)
        total = statistics.target_total
        known_total = None if total is None else self._form_of(total)
        for name, value in zip(RowStatistics._fields, statistics.answers(), strict=True):
            self.forms[value] = self._known.of_statistic(name, known_total)
        if statistics.labels is not None:
            has_label = self._form_of(statistics.has_label())
            if has_label is not None:
                self._known.set_label(has_label)

    def exit(self, node: Node, found: Exit) -> None:
        """Remembers what a node computes that reduces logits."""
        (value,) = node.outputs
        self.forms[value], self.made_by[value] = self._form_of(found.row), found.step

    def follow(self, node: Node) -> None:
        """Remembers what a node computes that depends on statistics."""
        operands = [self._form(x) for x in node.inputs]
        square = self._known.of_square(node.equation, operands)
        if square is not None:
            self.squares.add(node)
        results = self._known.after(node.equation, operands) if square is None else [square]
        self.forms.update(zip(node.outputs, results, strict=True))
        self.made_by.update(dict.fromkeys(node.outputs, node))

    def _form(self, value: Value) -> Result:
        """Returns the form of any value."""
        return self.forms[value] if value in self.forms else self._known.of_constant(value)

    def _form_of(self, row: Row) -> Result:
        """Returns the form of what a row computes."""
        values = tuple(row.values)

        def compute(*arrays: Any) -> Any:
            return jnp.asarray(row.compute(dict(zip(values, arrays, strict=True)).__getitem__))

        # How arrays are laid out says nothing about what is computed.
        types = (self._types.get(x, jax.ShapeDtypeStruct(x.shape, x.dtype)) for x in values)
        closed = jax.make_jaxpr(compute)(*types)
        return self._known.of_jaxpr(closed, [self._form(x) for x in values])[0]
