"""Plans the rewrite of a jaxpr: what is replaced on each level, and what is left alone and why."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
from jax.custom_derivatives import SymbolicZero

from lowering import _jax_private, cost
from lowering.rewriting import control_flow
from lowering.rewriting.graph import PRODUCTS, Level, Node, level_of, opened, size_of
from lowering.rewriting.ordering import OrderError, Step, Task, evaluate, needed, ordered
from lowering.rewriting.report import Applied, Refused
from lowering.rewriting.rules import Found, Missed, Rule


@dataclasses.dataclass(frozen=True)
class Plan:
    """Plan for evaluating a level again.

    Attributes:
      level: its graph.
      order: what runs.
      applied: what is replaced in it and in its bodies.
      refused: what looks like a pattern and is left alone.
      replaced: the products that nothing computes as a whole any more.
    """

    level: Level
    order: Sequence[Task]
    applied: tuple[Applied, ...]
    refused: tuple[Refused, ...]
    replaced: tuple[Node, ...] = ()

    def run(self, *arguments: Any) -> list[Any]:
        """Computes the results of the level."""
        run = functools.partial(evaluate, self.level, self.order)
        read = itertools.chain(self.level.results, *(task.inputs for task in self.order))
        # What a function with a derivative of its own closes over has no derivative, and it must not have effects.
        is_closed = not any(isinstance(x.constant, jax.core.Tracer) for x in read)
        has_effects = any(node.equation.effects for node in self.level.nodes)
        if is_closed and not has_effects and _jax_private.are_differentiated(arguments):
            return _differentiated_at_once(run, arguments)
        return run(*arguments)


def _differentiated_at_once(run: Callable[..., Any], arrays: Sequence[Any]) -> list[Any]:
    """Computes `run(*arrays)`, whose derivative is JAX's.

    JAX linearizes an equation at a time, which takes twice as long as differentiating all of them and then taking
    apart what is linear, as it does with a function that has a derivative of its own.
    """

    def jvp(primals: Sequence[Any], tangents: Sequence[Any]) -> Any:
        active = [not isinstance(dot, SymbolicZero) for dot in tangents]

        def of_active(*varying: Any) -> Any:
            rest = iter(varying)
            return run(*(next(rest) if a else x for x, a in zip(primals, active, strict=True)))

        varying, dots = (tuple(itertools.compress(each, active)) for each in (primals, tangents))
        return jax.jvp(of_active, varying, dots)

    whole = jax.custom_jvp(run)
    whole.defjvp(jvp, symbolic_zeros=True)
    return whole(*arrays)


@dataclasses.dataclass(frozen=True)
class _Within:
    """Findings in the bodies of one node."""

    step: Step | None = None
    applied: tuple[Applied, ...] = ()
    refused: tuple[Refused, ...] = ()


class Planner:
    """Planner that applies rules to a jaxpr and to the bodies in it."""

    def __init__(self, rules: Sequence[Rule]) -> None:
        """Takes the rules, in order of preference."""
        self._rules = rules
        self._least_size = min((rule.least_size() for rule in rules if rule.least_size), default=math.inf)
        self._primitives = frozenset[str]().union(*(rule.primitives for rule in rules if not rule.least_size))
        self._known: dict[Any, bool] = {}

    def plan(
        self,
        closed: Any,
        repetitions: int = 1,
        *,
        keeps_each: bool = False,
        draws_again: Callable[[], bool] | None = None,
    ) -> Plan:
        """Plans how to evaluate a jaxpr, closed or not, that runs so often; for the rest, see `Level`."""
        is_body = draws_again is not None
        if draws_again is None:
            draws_again = functools.cache(functools.partial(control_flow.draws_again, opened(closed)[0]))
        level = level_of(closed, self._holds, self._is_large)
        level = dataclasses.replace(level, is_body=is_body, keeps_each=keeps_each, draws_again=draws_again)
        steps: list[Step] = []
        applied: list[Applied] = []
        refused: list[Refused] = []
        missed: list[tuple[Rule, Missed]] = []
        order: Sequence[Task] = ()
        names = {node.name for node in level.nodes}
        for rule in self._rules:
            for one in rule.find(level, tuple(steps)) if rule.find and not names.isdisjoint(rule.primitives) else ():
                if isinstance(one, Missed):
                    missed.append((rule, one))
                    continue
                try:
                    order = ordered(level, [*steps, *one.steps])
                except OrderError:
                    reason = "an effect, such as a print, or the labels would have to wait for it"
                    refused.append(Refused(rule.name, one.node.source, one.detail, reason))
                    continue
                for step in one.steps:
                    step.node = one.node
                steps += one.steps
                applied.append(_applied(rule, one, repetitions))
        left = needed(level, steps)
        # What another step computes in its chunks is not left alone.
        refused += (_refused(rule, one) for rule, one in missed if one.node in left)
        for node in level.nodes:
            if not self._holds_in_bodies(node.equation):
                continue
            keeps_inner = control_flow.keeps_each(node, level.keeps_each)
            inner = self._within(node, repetitions, keeps_each=keeps_inner, draws_again=draws_again)
            refused += inner.refused
            if inner.step is not None and node in needed(level, steps):
                steps.append(inner.step)
                applied += inner.applied
                order = ()
        order = order or ordered(level, steps) if steps else ()
        replaced = tuple(node for node in level.named(*PRODUCTS) if node not in left)
        return Plan(level, order, tuple(applied), _distinct(refused, applied), replaced)

    def _within(self, node: Node, repetitions: int, **of_level: Any) -> _Within:
        """Finds what can be rewritten in the bodies of one node."""
        inner = cost.bodies(node.equation)
        runnable = control_flow.bodies_of(node)
        repetitions *= cost.repetitions(node.equation)
        plans = [self.plan(body, repetitions, **of_level) for body in runnable or inner]
        applied = tuple(one for plan in plans for one in plan.applied)
        refused = tuple(one for plan in plans for one in plan.refused)
        if not runnable:
            reason = control_flow.closed_because(node)
            found = tuple(Refused(one.pattern, one.source, one.detail, reason) for one in applied)
            return _Within(refused=found if reason else ())
        if not applied:
            return _Within(refused=refused)
        runs = [plan.run if plan.applied else _unchanged(body) for plan, body in zip(plans, runnable, strict=True)]
        step = Step(node.inputs, node.outputs, lambda *arrays: control_flow.evaluate(node, runs, arrays), node)
        return _Within(step, applied, refused)

    def _holds(self, equation: Any) -> bool:
        """Tells whether an equation, or one in its bodies, may belong to a place of a rule."""
        is_known = equation.primitive.name in self._primitives
        if is_known or any(self._is_large(x.aval) for x in (*equation.invars, *equation.outvars)):
            return True
        return self._holds_in_bodies(equation)

    def _holds_in_bodies(self, equation: Any) -> bool:
        return any(self._holds_within(opened(body)[0]) for body in cost.bodies(equation))

    def _holds_within(self, jaxpr: Any) -> bool:
        """Tells the same for a jaxpr; calls of the same function share one."""
        if jaxpr not in self._known:
            self._known[jaxpr] = any(map(self._holds, jaxpr.eqns))
        return self._known[jaxpr]

    def _is_large(self, aval: Any) -> bool:
        return size_of(aval) > self._least_size


def overlooked(rules: Sequence[Rule], closed: Any, plan: Plan) -> tuple[Refused, ...]:
    """Finds the places that the plan of a jaxpr does not mention, though users would expect a rule to know them."""
    looking = [
        dataclasses.replace(rule, find=_of_level(rule.overlooked), least_size=lambda: -1)
        for rule in rules
        if rule.overlooked
    ]
    operators = {rule.replacement for rule in rules if rule.overlooked}
    names = {rule.name for rule in rules if rule.replacement in operators}
    known = {one.source for one in plan.applied if one.pattern in names}
    known |= {one.source for one in plan.refused if one.pattern in names}
    known |= {node.source for node in plan.replaced}
    found = Planner(looking).plan(closed).refused
    return tuple(one for one in found if one.source not in known)


def _of_level(find: Callable[[Level], Iterable[Missed]]) -> Callable[..., Iterable[Missed]]:
    return lambda level, _: find(level)


def _refused(rule: Rule, missed: Missed) -> Refused:
    return Refused(rule.name, missed.node.source, missed.detail, missed.reason)


def _applied(rule: Rule, found: Found, repetitions: int) -> Applied:
    more = rule.remark, rule.on_tpu, rule.replacement
    return Applied(rule.name, found.node.source, found.detail, found.saved_bytes, repetitions, *more)


def _distinct(refused: Sequence[Refused], applied: Sequence[Applied]) -> tuple[Refused, ...]:
    """Returns each refusal once, and none of what another rule has rewritten after all."""
    done = {one.source for one in applied}
    return tuple(dict.fromkeys(one for one in refused if one.source not in done))


def _unchanged(body: Any) -> control_flow.Run:
    jaxpr, constants = opened(body)
    return lambda *arrays: jax.core.eval_jaxpr(jaxpr, constants, *arrays)
