"""Nodes and replacements of a level that have to run, and their order."""

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
from jax.extend.core import Literal, Var

from lowering import _jax_private
from lowering.rewriting.graph import Level, Node, Value, opened

# Fewer neighbours are evaluated one by one.
_FEWEST_IN_CALL = 8


@dataclasses.dataclass(eq=False)
class Step:
    """A computation that replaces nodes: `run(*arrays of the inputs)` returns the arrays of the outputs.

    The equations that it makes get the source line of `node`.
    """

    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    run: Callable[..., Sequence[Any]]
    node: Node | None = None


Task = Node | Step


class OrderError(Exception):
    """Steps need values that are computed only after an effect which would have to wait for them."""


def needed(level: Level, steps: Iterable[Step]) -> frozenset[Task]:
    """Returns what has to run for a level's results and effects, if these steps take the place of its nodes."""
    steps = tuple(steps)
    if steps not in level.memo:
        level.memo[steps] = frozenset(_needed(level, steps))
    return level.memo[steps]


def _needed(level: Level, steps: Iterable[Step]) -> set[Task]:
    replaced = _replaced(steps)
    waiting: list[Task] = [node for node in level.nodes if node.equation.effects]
    found = set(waiting)

    def want(values: Iterable[Value]) -> None:
        for value in values:
            task = replaced.get(value, value.producer) if replaced else value.producer
            if task is not None and task not in found:
                found.add(task)
                waiting.append(task)

    want(level.results)
    while waiting:
        want(waiting.pop().inputs)
    return found


def ordered(level: Level, steps: Sequence[Step]) -> list[Task]:
    """Returns what has to run, each after what it reads, otherwise in the order of the level.

    Raises:
      OrderError: if two effects would change places.
    """
    replaced, wanted = _replaced(steps), needed(level, steps)
    order: dict[Task, None] = {}
    roots: list[Task] = [*level.nodes, *steps]
    for root in (task for task in roots if task in wanted):
        stack: list[Task] = [root]
        while stack:
            task = stack[-1]
            before = (replaced.get(x, x.producer) for x in task.inputs)
            missing = next((x for x in before if x is not None and x not in order), None)
            if missing is None:
                order[stack.pop()] = None
            elif missing in stack:
                raise OrderError
            else:
                stack.append(missing)
    effects = [task for task in order if isinstance(task, Node) and task.equation.effects]
    if effects != [node for node in level.nodes if node.equation.effects]:
        raise OrderError
    return list(order)


def evaluate(level: Level, order: Sequence[Task], *arguments: Any) -> list[Any]:
    """Computes the results of a level."""
    if _jax_private.writes_equations():
        order = _in_calls(level, order)
    last = {value: task for task in order for value in task.inputs}
    kept = set(level.results)
    arrays = dict(zip(level.arguments, arguments, strict=True))

    def read(value: Value) -> Any:
        return value.constant if value.is_constant else arrays[value]

    for task in order:
        node = task.node if isinstance(task, Step) else task
        with contextlib.nullcontext() if node is None else node.at_its_line():
            results = task.run(*map(read, task.inputs))
        arrays.update(zip(task.outputs, results, strict=True))
        for value in task.inputs:
            if last[value] is task and value not in kept:
                arrays.pop(value, None)
    return [read(value) for value in level.results]


def _in_calls(level: Level, order: Sequence[Task]) -> list[Task]:
    """Joins neighbouring nodes into calls, as JAX is much faster to trace and differentiate one call than its body."""
    groups = [list(tasks) for _, tasks in itertools.groupby(order, _is_plain)]
    made = {value: i for i, tasks in enumerate(groups) for task in tasks for value in task.outputs}
    read = {value for i, tasks in enumerate(groups) for task in tasks for value in task.inputs if made.get(value) != i}
    read.update(level.results)
    is_call = [_is_plain(tasks[0]) and len(tasks) >= _FEWEST_IN_CALL for tasks in groups]
    found = ([_call(tasks, read)] if calls else tasks for calls, tasks in zip(is_call, groups, strict=True))
    return list(itertools.chain.from_iterable(found))


def _is_plain(task: Task) -> bool:
    return isinstance(task, Node) and not task.equation.effects


def _call(nodes: Sequence[Any], read: set[Value]) -> Step:
    """Returns the step that computes nodes as the body of one call, without tracing them again."""
    variables: dict[Value, Any] = {}
    inputs: list[Value] = []

    def atom(value: Value, given: Any) -> Any:
        if isinstance(given, Literal) or value.number is not None:
            return given if isinstance(given, Literal) else Literal(value.constant, value.aval)
        if value not in variables:
            variables[value] = Var(value.aval)
            inputs.append(value)
        return variables[value]

    # Variables are new, as a jaxpr that is called twice has been inlined twice, with the same ones.
    equations = []
    for node in nodes:
        invars = [atom(*pair) for pair in zip(node.inputs, node.equation.invars, strict=True)]
        outvars = [variables.setdefault(value, Var(value.aval)) for value in node.outputs]
        info, traceback = node.equation.source_info, node.site.users.traceback
        if traceback is not info.traceback:
            info = info.replace(traceback=traceback)
        equations.append(node.equation.replace(invars=invars, outvars=outvars, source_info=info))
    outputs = [value for node in nodes for value in node.outputs if value in read]
    invars, outvars = ([variables[value] for value in values] for values in (inputs, outputs))
    run = functools.partial(_bind_call, equations, invars, outvars)
    return Step(tuple(inputs), tuple(outputs), run, nodes[0])


def _bind_call(equations: Sequence[Any], invars: Sequence[Any], outvars: Sequence[Any], *arrays: Any) -> Sequence[Any]:
    def unchanged(x: Any) -> Any:
        return x + 1

    call = jax.make_jaxpr(jax.jit(unchanged))(0.0).eqns[0]
    closed = call.params["jaxpr"]
    body, _ = opened(closed)
    names = body.debug_info._replace(arg_names=None, result_paths=None)
    body = body.replace(constvars=[], invars=invars, outvars=outvars, eqns=equations, debug_info=names)
    # What has an element for each operand or result of the call.
    params = {
        name: value * len(outvars if name.startswith("out") else invars) if isinstance(value, tuple) else value
        for name, value in call.params.items()
    }
    params |= {"jaxpr": closed.replace(jaxpr=body, consts=())}
    return call.primitive.bind(*arrays, **params)


def _replaced(steps: Iterable[Step]) -> dict[Value, Any]:
    return {value: step for step in steps for value in step.outputs}
