"""Nodes and replacements of a level that have to run, and their order."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from lowering.rewriting.graph import Level, Node, Value


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
    if steps not in level.needed:
        level.needed[steps] = frozenset(_needed(level, steps))
    return level.needed[steps]


def _needed(level: Level, steps: Iterable[Step]) -> set[Task]:
    producer = _producers(steps)
    found: set[Task] = set()
    waiting: list[Task] = [node for node in level.nodes if node.equation.effects]
    waiting += [task for task in map(producer, level.results) if task is not None]
    while waiting:
        task = waiting.pop()
        if task not in found:
            found.add(task)
            waiting += [before for before in map(producer, task.inputs) if before is not None]
    return found


def ordered(level: Level, steps: Sequence[Step]) -> list[Task]:
    """Returns what has to run, each after what it reads, otherwise in the order of the level.

    Raises:
      OrderError: if two effects would change places.
    """
    producer = _producers(steps)
    wanted = needed(level, steps)
    order: dict[Task, None] = {}
    roots: list[Task] = [*level.nodes, *steps]
    for root in (task for task in roots if task in wanted):
        stack: list[Task] = [root]
        while stack:
            task = stack[-1]
            missing = [x for x in map(producer, task.inputs) if x is not None and x not in order]
            if not missing:
                order[stack.pop()] = None
            elif set(missing) & set(stack):
                raise OrderError
            else:
                stack += missing[:1]
    effects = [task for task in order if isinstance(task, Node) and task.equation.effects]
    if effects != [node for node in level.nodes if node.equation.effects]:
        raise OrderError
    return list(order)


def evaluate(level: Level, order: Sequence[Task], *arguments: Any) -> list[Any]:
    """Computes the results of a level."""
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


def _producers(steps: Iterable[Step]) -> Callable[[Value], Task | None]:
    replaced = {value: step for step in steps for value in step.outputs}
    return lambda value: replaced.get(value, value.producer)
