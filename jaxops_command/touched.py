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
from lowering.register import without_kernels
from lowering.rewriting.graph import Level, Node, levels
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
    for level in levels(jaxpr):
        for node in fault.find(level):
            yield node.source
        for node in level.nodes:
            if _touches_operator(node, fault, platform):
                yield f"{node.source}, in {node.name}"


def _touches_operator(node: Node, fault: Fault, platform: str) -> bool:
    operator: Any = operators.operator_of(node.equation.primitive)
    if operator is None:
        return False
    params = {name: value for name, value in node.params.items() if name != "selection"}
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in node.inputs]
    return any(_finds(level, fault) for level in _meaning(operator, tuple(params.items()), tuple(shapes), platform))


# Many faults look at the same operator, and many lines run it at the same shapes.
@functools.lru_cache(maxsize=256)
def _meaning(operator: Any, params: Any, shapes: Any, platform: str) -> tuple[Level, ...]:
    # By the form that runs there.
    jaxpr = jax.make_jaxpr(without_kernels(operator, named(platform), shapes, dict(params)))(*shapes)
    return tuple(levels(jaxpr))


def _finds(level: Level, fault: Fault) -> bool:
    with contextlib.suppress(StopIteration):
        next(iter(fault.find(level)))
        return True
    return False
