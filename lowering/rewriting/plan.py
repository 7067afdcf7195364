"""Plans the rewrite of a jaxpr: what is replaced on each level, and what is left alone and why."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax

from lowering import cost
from lowering.rewriting import entered
from lowering.rewriting.graph import Level, Node, bodies, level_of, opened
from lowering.rewriting.report import Applied, Refused
from lowering.rewriting.rules import Found, Missed, Rule
from lowering.rewriting.schedule import OrderError, Step, Task, evaluate, needed, ordered


@dataclasses.dataclass(frozen=True)
class Plan:
    """How to evaluate a level again.

    Attributes:
      level: its graph.
      order: what runs.
      applied: what is replaced in it and in its bodies.
      refused: what looks like a pattern and is left alone.
    """

    level: Level
    order: Sequence[Task]
    applied: tuple[Applied, ...]
    refused: tuple[Refused, ...]

    def run(self, *arguments: Any) -> list[Any]:
        """The results of the level."""
        return evaluate(self.level, self.order, arguments)


def plan_of(closed: Any, rules: Sequence[Rule], repetitions: int = 1) -> Plan:
    """Plans the rewrite of a jaxpr by these rules."""
    least_sizes = {rule.name: rule.least_size() for rule in rules}

    def interests(equation: Any) -> bool:
        return any(rule.interests(equation, least_sizes[rule.name]) for rule in rules)

    return _plan(closed, rules, interests, repetitions)


def _plan(closed: Any, rules: Sequence[Rule], interests: Callable[[Any], bool], repetitions: int) -> Plan:
    level = level_of(closed, lambda equation: _holds(equation, interests), repetitions)
    steps: list[Step] = []
    applied: list[Applied] = []
    refused: list[Refused] = []
    for rule in rules:
        for one in rule.find(level, tuple(steps)):
            if isinstance(one, Missed):
                refused.append(Refused(rule.name, one.node.source, one.detail, one.reason))
                continue
            try:
                ordered(level, [*steps, *one.steps])
            except OrderError:
                reason = "an effect, such as a print, would have to wait for it"
                refused.append(Refused(rule.name, one.node.source, one.detail, reason))
                continue
            steps += one.steps
            applied.append(_applied(rule, one, repetitions))
    for node in level.nodes:
        inner = _entered(node, rules, interests, repetitions)
        refused += inner.refused
        if inner.step is not None and node in needed(level, steps):
            steps.append(inner.step)
            applied += inner.applied
    return Plan(level, ordered(level, steps) if steps else (), tuple(applied), _distinct(refused, applied))


def _applied(rule: Rule, found: Found, repetitions: int) -> Applied:
    return Applied(rule.name, found.node.source, found.detail, found.saved_bytes, repetitions, rule.remark)


def _distinct(refused: Sequence[Refused], applied: Sequence[Applied]) -> tuple[Refused, ...]:
    """Each refusal once, and none of what another rule has rewritten after all."""
    done = {one.source for one in applied}
    return tuple(dict.fromkeys(one for one in refused if one.source not in done))


def _holds(equation: Any, interests: Callable[[Any], bool]) -> bool:
    if interests(equation):
        return True
    return any(_holds(inner, interests) for body in bodies(equation) for inner in opened(body)[0].eqns)


@dataclasses.dataclass(frozen=True)
class _Entered:
    """What is found in the bodies of one node."""

    step: Step | None = None
    applied: tuple[Applied, ...] = ()
    refused: tuple[Refused, ...] = ()


def _entered(node: Node, rules: Sequence[Rule], interests: Callable[[Any], bool], repetitions: int) -> _Entered:
    if not any(_holds(inner, interests) for body in bodies(node.equation) for inner in opened(body)[0].eqns):
        return _Entered()
    inner_bodies = entered.bodies_of(node)
    repetitions *= cost.repetitions(node.equation)
    plans = [_plan(body, rules, interests, repetitions) for body in inner_bodies]
    applied = tuple(one for plan in plans for one in plan.applied)
    refused = tuple(one for plan in plans for one in plan.refused)
    if not applied:
        return _Entered(None, (), refused)
    runs = [plan.run if plan.applied else _unchanged(body) for plan, body in zip(plans, inner_bodies, strict=True)]
    step = Step(node.inputs, node.outputs, lambda *arrays: entered.evaluate(node, runs, arrays))
    return _Entered(step, applied, refused)


def _unchanged(body: Any) -> entered.Run:
    jaxpr, constants = opened(body)
    return lambda *arrays: jax.core.eval_jaxpr(jaxpr, constants, *arrays)
