"""Finds the sum of cross entropies through which a level reads logits, and computes it together with its gradients.

The loss of a row follows from the row's statistics. If a sum of losses is affine in log sum exp, the label's logit, a
weighted sum of logits, and the square of log sum exp, its slopes are known before the logits: they are the weights of
the operator. JAX's own derivative tells: it must not depend on statistics.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxops._primitive.sharding import agreeing, varying_with
from jaxops.linear_cross_entropy.operands import SKIPPED, Columns, Rows, RowStatistics, RowWeights
from jaxops.linear_cross_entropy.rewriting.derivatives import has_linear_rule
from jaxops.linear_cross_entropy.rewriting.head import Readers
from jaxops.linear_cross_entropy.row_statistics import skipped_as_zeros, targets_of
from jaxops.linear_cross_entropy.row_targets import Vocabulary
from jaxops.linear_cross_entropy.sum_operator import summed_cross_entropy
from lowering.cost import inner_jaxprs
from lowering.rewriting.graph import SAME, Level, Node, Value, equations, forward, level_of, names_axes
from lowering.rewriting.ordering import Step, Task, needed

# What a sum may be affine in.
_SMOOTH = ("log_sum_exp", "label_logit", "target_loss", "square")
# What it may read, unless its derivative does; `peak` and `stop` only serve to find that out.
_FIXED = ("max_logit", "mean_logit", "prediction", "peak", "stop")
_OPAQUE = frozenset({"pure_callback", "pallas_call", "shard_map", "custom_partitioning", "ffi_call"})


class Sums:
    """Numbers of a level that are computed from the numbers of rows."""

    def __init__(self, level: Level, wanted: frozenset[Task], readers: Readers) -> None:
        """Finds which numbers are affine in the statistics."""
        self._level, self._readers = level, readers
        self._nodes: list[Node] = []
        computed, reading = set(readers.exits), set(readers.nodes)
        for node in level.nodes:
            is_behind = node in wanted and node not in reading and not computed.isdisjoint(node.inputs)
            if is_behind and not node.equation.effects and not _is_opaque(node):
                self._nodes.append(node)
                computed.update(node.outputs)
        found = [*readers.exits, *(x for node in self._nodes for x in node.outputs)]
        self._numbers = [x for x in found if x.shape == () and jnp.issubdtype(x.dtype, jnp.floating)]
        self._read = [x for x in dict.fromkeys(x for node in self._nodes for x in node.inputs) if x not in computed]
        if self._numbers:
            self._look()

    def _look(self) -> None:
        """Traces numbers, exits and their derivatives, and follows what they depend on."""
        readers = self._readers
        values = tuple(dict.fromkeys([*readers.inputs, *self._read]))
        values = tuple(x for x in values if not x.is_constant)
        rows, names = readers.rows, (*_SMOOTH, *_FIXED)
        results = (*self._numbers, *readers.exits)  # an exit may be both

        def call(given: dict[str, Any], dots: dict[str, Any], arrays: Sequence[Any]) -> Any:
            def of_smooth(smooth: dict[str, Any]) -> list[Any]:
                def run(node: Node, *operands: Any) -> Sequence[Any]:
                    if node.name == "stop_gradient" and jnp.issubdtype(node.inputs[0].dtype, jnp.floating):
                        return [operands[0] * jnp.sum(given["stop"]).astype(node.inputs[0].dtype)]
                    return _bound(node, *operands)

                known = self._values({**given, **smooth}, dict(zip(values, arrays, strict=True)), run)
                return [known[x] for x in results]

            smooth = {name: given[name] for name in dots}
            return jax.jvp(of_smooth, (smooth,), (dots,))

        def typed(name: str) -> Any:
            return jax.ShapeDtypeStruct(rows, jnp.int32 if name == "prediction" else readers.head.dtype)

        smooth = {name: typed(name) for name in (*_SMOOTH, "mean_logit")}
        given = {name: typed(name) for name in names}
        arrays = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in values]
        graph = level_of(jax.make_jaxpr(call)(given, smooth, arrays), lambda _: True, lambda _: False)
        by_name = dict(zip(sorted(given), graph.arguments, strict=False))
        dots = dict(zip(sorted(smooth), graph.arguments[len(given) :], strict=False))

        def behind(*values: Value) -> set[Value]:
            return forward(values, lambda *_: True)

        varies, moves = behind(*by_name.values()), behind(*(dots[name] for name in _SMOOTH))
        by_mean = behind(dots["mean_logit"])
        of_fixed = behind(*(by_name[name] for name in _FIXED))
        reads = behind(by_name["mean_logit"], by_name["prediction"])
        # The statistics beside gradients are relative to something else than the largest logit.
        unknown = behind(by_name["peak"])
        of_smooth = behind(*(by_name[name] for name in (*_SMOOTH, "mean_logit")))
        primals, tangents = graph.results[: len(results)], graph.results[len(results) :]
        along, count = [*zip(results, primals, tangents, strict=True)], len(self._numbers)
        linear = moves - varies - by_mean
        self._affine = [x for x, primal, dot in along[:count] if dot in linear and primal not in unknown]
        self._fixed = {x for x, primal, _ in along if primal in of_fixed}
        self._reading = {x for x, primal, _ in along if primal in reads}
        self._beside = {x for x, primal, _ in along[count:] if primal not in of_smooth | unknown}

    def steps(self, taken: Sequence[Step], *, first: bool) -> Iterator[Step]:
        """Yields the steps by which no logits are needed: each computes a number, from the last or the first on.

        Then the last, with what its terms are, if the first result depends on it: the others are taken for metrics.
        """
        affine, results = self._affine if self._numbers else [], self._level.results
        ways = [(number, set[Value]()) for number in (affine if first else affine[::-1])]
        if affine and results and not first and results[0] in forward(affine[-1:], lambda *_: True):
            ways.append((affine[-1], set(affine[:-1])))

        def read(*known: Value) -> set[Value]:
            left = needed(self._level, [*taken, Step((), known, lambda *_: ())])
            return {x for task in left for x in task.inputs} | set(results)

        for number, terms in ways:
            beside = [x for x in self._readers.exits if x in self._beside & read(number)]
            others = [x for x in affine if x in terms & read(number, *terms)]
            step = self._step(number, beside, others)
            if self._readers.head.node not in needed(self._level, [*taken, step]):
                yield step

    def _values(self, given: dict[str, Any], arrays: dict[Value, Any], run: Any = Node.run) -> dict[Value, Any]:
        """Computes exits, and numbers behind them, for statistics by name."""
        more = {name: given.pop(name) for name in ("square", "peak", "stop") if name in given}
        exits = self._readers.results(arrays, RowStatistics(**given), **more)
        known = {**arrays, **dict(zip(self._readers.exits, exits, strict=True))}
        for node in self._nodes:
            operands = [x.constant if x.is_constant else known[x] for x in node.inputs]
            known.update(zip(node.outputs, run(node, *operands), strict=True))
        return known

    def _step(self, number: Value, beside: Sequence[Value], others: Sequence[Value]) -> Step:
        readers, outputs = self._readers, (number, *beside)
        metrics = not self._reading.isdisjoint((*outputs, *others)) or bool(beside)
        inputs = tuple(dict.fromkeys([*readers.inputs, *self._read]))
        inputs = tuple(x for x in inputs if not x.is_constant)

        def run(*arrays: Any) -> Sequence[Any]:
            found = self._run(dict(zip(inputs, arrays, strict=True)), (*outputs, *others), metrics)
            return [*found[: len(outputs)], *(differentiated(found[len(outputs) :], *arrays) if others else ())]

        def from_statistics(*arrays: Any) -> Sequence[Any]:
            known = dict(zip(inputs, arrays, strict=True))
            found = readers.statistics(known)
            square = jnp.square(found.max_logit + found.log_sum_exp)
            values = self._values({**found._asdict(), "square": square}, known)
            return [values[x] for x in others]

        @jax.custom_jvp
        def differentiated(values: Sequence[Any], *_: Any) -> Sequence[Any]:
            return [*values]

        @differentiated.defjvp
        def _(primals: Any, dots: Any) -> Any:
            # XLA drops this where nobody differentiates the other numbers, and the sum has been computed anyhow.
            return [*primals[0]], jax.jvp(from_statistics, primals[1:], dots[1:])[1]

        return Step(inputs, (*outputs, *others), run)

    def _run(self, arrays: dict[Value, Any], outputs: Sequence[Value], metrics: bool) -> Sequence[Any]:
        readers = self._readers
        rows, columns = readers.scaled_operands(arrays)
        x, labels = agreeing("... h, ... ->", rows.x, rows.labels)
        rows = rows._replace(x=x, labels=labels)
        (nothing,) = varying_with([jnp.zeros_like(labels, readers.head.dtype)], list(arrays.values()))
        fixed = {"max_logit": nothing, "mean_logit": nothing, "prediction": nothing.astype(jnp.int32)}

        def number(smooth: dict[str, Any], fixed: dict[str, Any]) -> Any:
            return self._values({**smooth, **fixed}, arrays)[outputs[0]]

        # It is affine, so these are its slopes wherever they are taken.
        rest, transposed = jax.vjp(lambda smooth: number(smooth, fixed), dict.fromkeys(_SMOOTH, nothing))
        # Where users leave a quotient by 0 out, its slope is 0, but JAX finds 0 / 0.
        is_number = jnp.isfinite(rest)
        (slopes,) = transposed(jnp.ones_like(rest))
        slopes = {name: jnp.where(jnp.isfinite(x) | ~is_number, x, jnp.zeros_like(x)) for name, x in slopes.items()}
        rows, weights = self._weighted(rows, columns, slopes)
        if metrics:
            rows = skipped_as_zeros(rows)
        options: dict[str, Any] = {"softcap": readers.asked.layer.softcap, "chunk_rows": None, "metrics": metrics}
        total, statistics = summed_cross_entropy(rows, columns, weights, **options)
        found = RowStatistics(*(nothing if x is None else x for x in statistics))._asdict()
        fixed = {name: found[name] for name in fixed}
        fixed["prediction"] = fixed["prediction"].astype(jnp.int32)
        if outputs[0] in self._fixed:
            rest = number(dict.fromkeys(_SMOOTH, nothing), fixed)
        total = rest + total.astype(rest.dtype)
        # Users may subtract what nearly equals a row's loss, such as another model's, before they add up rows. So the
        # value is what their equations make of each row; the sum of losses and the rest only have the derivatives.
        smooth = {name: found[name] for name in _SMOOTH if name in found}
        smooth["square"] = jnp.square(found["max_logit"] + found["log_sum_exp"])
        known = self._values({**smooth, **fixed}, arrays)
        missing = jax.lax.stop_gradient(known[outputs[0]] - total)
        total = total + jax.lax.select(jax.lax.is_finite(missing), missing, jnp.zeros_like(missing))
        return (total, *(known[x] for x in outputs[1:]))

    def _weighted(self, rows: Any, columns: Columns, slopes: dict[str, Any]) -> tuple[Rows, RowWeights]:
        """Returns the weights of the terms of each row's loss, from a sum's slopes; what does not count is skipped."""
        by_log_sum_exp, by_label, by_target, by_square = (slopes[name] for name in _SMOOTH)
        # Where there is a label, both are the same, apart from rounding, unless the sum rises with all logits.
        of_label = jnp.where(rows.labels >= 0, -by_label, by_log_sum_exp)
        found, has_targets = self._readers.found, targets_of(rows, columns) is not None
        rise = by_log_sum_exp - of_label if found.maxima.rises else None
        weights = RowWeights(of_label, by_target if has_targets else None, by_square if found.squares else None, rise)
        counts = (of_label != 0) | (by_target != 0) | (by_square != 0) | (False if rise is None else rise != 0)
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


def _is_opaque(node: Node) -> bool:
    """Tells whether a node may lack a derivative, or has an odd one, or speaks to other devices.

    No sum is followed through it.
    """
    within = (node.equation, *(x for body in inner_jaxprs(node.equation) for x in equations(body)))
    # What only says that a value varies over devices has axes, too.
    others = [x for x in within if x.primitive.name not in SAME]
    types = ([x.aval for x in values] for values in (node.inputs, node.outputs))
    if node.name.startswith("custom_vjp") and not has_linear_rule(node.run, *types):
        return True
    return any(x.primitive.name in _OPAQUE or names_axes(x.params) for x in others)


def _bound(node: Node, *arrays: Any) -> Sequence[Any]:
    """Evaluates a node without regard to how arrays are laid out over devices."""
    if node.name in SAME - {"reduce_precision"}:
        return arrays
    primitive = node.equation.primitive
    params = node.params | {name: None for name in ("sharding", "out_sharding") if name in node.params}
    with node.at_its_line():
        results = primitive.bind(*arrays, **primitive.get_bind_params(params))
    return results if primitive.multiple_results else [results]
