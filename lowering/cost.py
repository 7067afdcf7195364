"""What a computation costs, counted on its jaxpr: the same for every backend, before any compiler has touched it."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr

# Primitives that only move or name data.
_FREE = frozenset(
    {
        *("broadcast_in_dim", "reshape", "transpose", "squeeze", "expand_dims", "rev", "copy", "iota"),
        *("slice", "dynamic_slice", "dynamic_update_slice", "concatenate", "split", "pad", "gather"),
        *("convert_element_type", "stop_gradient", "select_n", "pvary", "pcast", "reshard"),
    }
)


def flops(jaxpr: Jaxpr) -> int:
    """Arithmetic and comparisons: 2mnk a matrix product, one an element elsewhere.

    A loop counts as often as it runs, once where that is not known; all branches of a cond count.
    """
    return sum(_equation_flops(equation) for equation in jaxpr.eqns)


def array_bytes(avals: Sequence[Any]) -> int:
    """The bytes of arrays of these shapes and dtypes."""
    return sum(math.prod(aval.shape) * aval.dtype.itemsize for aval in avals)


def inner_jaxprs(equation: Any) -> Iterator[Jaxpr]:
    """The jaxprs in an equation's parameters: bodies of jit, scan, cond, shard_map, remat and custom rules."""
    for value in equation.params.values():
        for item in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(item, ClosedJaxpr):
                yield item.jaxpr
            elif isinstance(item, Jaxpr):
                yield item


def repetitions(equation: Any) -> int:
    """How often the bodies of this equation run; 1 where that is only known when they run."""
    return equation.params.get("length", 1) if equation.primitive.name == "scan" else 1


def _equation_flops(equation: Any) -> int:
    bodies = list(inner_jaxprs(equation))
    if bodies and not equation.primitive.name.startswith(("scatter", "reduce_")):
        return repetitions(equation) * sum(flops(body) for body in bodies)
    if equation.primitive.name == "dot_general":
        ((contracted, _), _) = equation.params["dimension_numbers"]
        lhs = equation.invars[0].aval.shape
        return 2 * math.prod(equation.outvars[0].aval.shape) * math.prod(lhs[axis] for axis in contracted)
    if equation.primitive.name.startswith("scatter"):
        return math.prod(equation.invars[2].aval.shape)
    if equation.primitive.name.startswith(("reduce_", "arg", "cum")):
        return math.prod(equation.invars[0].aval.shape)
    if equation.primitive.name in _FREE:
        return 0
    return sum(math.prod(out.aval.shape) for out in equation.outvars)
