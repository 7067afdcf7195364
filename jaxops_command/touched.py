"""Places where known faults touch a program: lines of a function, and the operators of this library that it runs."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax.extend.core import Jaxpr

from jaxops import _suite
from jaxops_command.known_faults import FAULTS, Fault
from lowering import operators
from lowering.patterns import Graph, Operation, graphs
from lowering.register import without_kernels
from lowering.static_leaves import jaxpr_of, of_arrays
from lowering.targets import named


def faults_here(jaxlib: str, platform: str, xla_flags: str) -> tuple[Fault, ...]:
    """Returns the known faults of this jaxlib on this platform under these flags."""
    return tuple(fault for fault in FAULTS if fault.is_in(jaxlib, platform, xla_flags))


def lines(fn: Callable[..., Any], args: Sequence[Any], fault: Fault, platform: str) -> list[str]:
    """Returns the lines of a function that a fault may touch, such as "model.py:12 (loss)"."""
    fn, args = of_arrays(fn, args)
    return list(dict.fromkeys(_of_program(jaxpr_of(fn, args), fault, platform)))


@functools.cache
def library_jaxprs() -> tuple[tuple[str, Jaxpr], ...]:
    """Returns what our operators with kernels compute, gradients included, at the shapes that models have, by name."""
    traced = []
    for case in _suite.SUITE:
        args = jax.eval_shape(functools.partial(case.arguments, *case.timed_at[0]))
        traced.append((case.name, jaxpr_of(case.fn, args)))
    return tuple(traced)


def of_library(fault: Fault, platform: str) -> list[str]:
    """Lists what of this library a fault may touch."""
    return [name for name, jaxpr in library_jaxprs() if next(_of_program(jaxpr, fault, platform), None) is not None]


def _of_program(jaxpr: Jaxpr, fault: Fault, platform: str) -> Iterator[str]:
    for graph in graphs(jaxpr):
        for operation in fault.find(graph):
            yield operation.source
        for operation in graph.operations:
            if _touches_operator(operation, fault, platform):
                yield f"{operation.source}, in {operation.name}"


def _touches_operator(operation: Operation, fault: Fault, platform: str) -> bool:
    operator: Any = next((each for each in operators.registered() if each.name == operation.name), None)
    if operator is None:
        return False
    params = {name: value for name, value in operation.params.items() if name != "selection"}
    shapes = [jax.ShapeDtypeStruct(x.shape, x.aval.dtype) for x in operation.inputs]
    return any(_finds(graph, fault) for graph in _meaning(operator, tuple(params.items()), tuple(shapes), platform))


# Many faults look at the same operator, and many lines run it at the same shapes.
@functools.lru_cache(maxsize=256)
def _meaning(operator: Any, params: Any, shapes: Any, platform: str) -> tuple[Graph, ...]:
    # By the form that runs there.
    jaxpr = jax.make_jaxpr(without_kernels(operator, named(platform), shapes, dict(params)))(*shapes)
    return tuple(graphs(jaxpr.jaxpr))


def _finds(graph: Graph, fault: Fault) -> bool:
    with contextlib.suppress(StopIteration):
        next(iter(fault.find(graph)))
        return True
    return False
