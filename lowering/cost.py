"""Counts what a computation costs on its jaxpr: the same for every backend, before any compiler runs."""

import math
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr

PALLAS_CALL = "pallas_call"

# Primitives that only move or name data.
_FREE = frozenset(
    {
        *("broadcast_in_dim", "reshape", "transpose", "squeeze", "expand_dims", "rev", "copy", "iota"),
        *("slice", "dynamic_slice", "dynamic_update_slice", "concatenate", "split", "pad", "gather"),
        *("convert_element_type", "stop_gradient", "select_n", "pvary", "pcast", "reshard"),
    }
)


def flops(jaxpr: Jaxpr, platform: str, excluding: Collection[str] = ()) -> int:
    """Counts arithmetic and comparisons: 2mnk for a matrix product, one per element otherwise.

    A loop counts as often as it runs, or once if that is unknown. All branches of a cond count, but those for other
    platforms. Primitives in `excluding` do not count.
    """
    return sum(
        count * (_product_flops(equation) or _elementwise_flops(equation))
        for equation, count in _leaves(jaxpr, platform)
        if equation.primitive.name not in excluding
    )


_JAXPRS = ClosedJaxpr, Jaxpr


def matmul_flops(jaxpr: Jaxpr, platform: str) -> dict[str, int]:
    """Counts the flops of matrix products and convolutions, by kind of product; `Hardware` has a rate for each kind."""
    found: dict[str, int] = {}
    for equation, count in _leaves(jaxpr, platform):
        if product := count * _product_flops(equation):
            kind = _product_kind(equation)
            found[kind] = found.get(kind, 0) + product
    return found


def array_bytes(avals: Sequence[Any]) -> int:
    """Counts the bytes of arrays of these shapes and dtypes."""
    return sum(math.prod(aval.shape) * aval.dtype.itemsize for aval in avals)


def read_bytes(jaxpr: Jaxpr) -> int:
    """Counts the bytes that a computation has to read. A table in which it only looks up rows counts as those rows."""
    return sum(_read_bytes(jaxpr, operand) for operand in jaxpr.invars)


def bodies(equation: Any) -> list[Any]:
    """Lists the jaxprs, closed or not, in an equation's parameters: of jit, scan, cond, shard_map, remat and more."""
    found: list[Any] = []
    for value in equation.params.values():
        if isinstance(value, _JAXPRS):
            found.append(value)
        elif isinstance(value, (tuple, list)):
            found += [item for item in value if isinstance(item, _JAXPRS)]
    return found


def inner_jaxprs(equation: Any) -> Iterator[Jaxpr]:
    """Yields the same jaxprs without their constants."""
    return (body.jaxpr if isinstance(body, ClosedJaxpr) else body for body in bodies(equation))


def bodies_on(equation: Any, platform: str) -> Iterator[Jaxpr]:
    """Yields the jaxprs of an equation that can run on a platform: of `platform_dependent`, the one branch for it."""
    chosen = equation.params.get("branches_platforms")
    if chosen is None:
        yield from inner_jaxprs(equation)
        return
    pairs = zip(inner_jaxprs(equation), chosen, strict=True)
    yield next(body for body, names in pairs if names is None or platform in names)


def repetitions(equation: Any) -> int:
    """Returns how often the bodies of this equation run; 1 if only running them can tell."""
    if equation.primitive.name == PALLAS_CALL:
        return math.prod(size for size in equation.params["grid_mapping"].grid if isinstance(size, int))
    return equation.params.get("length", 1) if equation.primitive.name == "scan" else 1


def _read_bytes(jaxpr: Jaxpr, operand: Any) -> int:
    whole, rows = array_bytes([operand.aval]), 0
    for equation in jaxpr.eqns:
        positions = [position for position, read in enumerate(equation.invars) if read is operand]
        for position in positions:
            if equation.primitive.name in ("gather", "dynamic_slice") and position == 0:
                rows += array_bytes([equation.outvars[0].aval])
            elif equation.primitive.name in ("jit", "pjit"):
                body = next(inner_jaxprs(equation))
                rows += _read_bytes(body, body.invars[position])
            else:
                rows = whole
    return whole if operand in jaxpr.outvars else min(whole, rows)


def _leaves(jaxpr: Jaxpr, platform: str, count: int = 1) -> Iterator[tuple[Any, int]]:
    """Yields the equations that compute something themselves, not through a body, and how often each runs."""
    for equation in jaxpr.eqns:
        bodies = list(bodies_on(equation, platform))
        if bodies and not equation.primitive.name.startswith(("scatter", "reduce_")):
            for body in bodies:
                yield from _leaves(body, platform, count * repetitions(equation))
        else:
            yield equation, count


def _product_flops(equation: Any) -> int:
    """Counts 2mnk for a matrix product or a convolution, 0 otherwise."""
    name, params = equation.primitive.name, equation.params
    if name not in ("dot_general", "conv_general_dilated", "ragged_dot_general"):
        return 0
    lhs, rhs = (operand.aval.shape for operand in equation.invars[:2])
    if name == "conv_general_dilated":
        terms = math.prod(rhs) // max(1, rhs[params["dimension_numbers"].rhs_spec[0]])
    else:
        numbers = params.get("dimension_numbers") or params["ragged_dot_dimension_numbers"].dot_dimension_numbers
        terms = math.prod(lhs[axis] for axis in numbers[0][0])
    return 2 * math.prod(equation.outvars[0].aval.shape) * terms


def _product_kind(equation: Any) -> str:
    """Returns the dtype of the operands; for float32, followed by a precision above the default."""
    dtype = max((operand.aval.dtype for operand in equation.invars[:2]), key=lambda dtype: dtype.itemsize)
    if dtype.itemsize == 1:
        return "int8" if dtype.kind in "iu" else "float8"
    precision = equation.params.get("precision")
    requested = {getattr(one, "name", "") for one in (precision if isinstance(precision, tuple) else (precision,))}
    more = next((name for name in ("HIGHEST", "HIGH") if name in requested), "")
    return f"float32 {more.lower()}" if dtype.name == "float32" and more else dtype.name


def _elementwise_flops(equation: Any) -> int:
    name = equation.primitive.name
    if name.startswith("scatter"):
        return math.prod(equation.invars[2].aval.shape)
    if name.startswith(("reduce_", "arg", "cum")):
        return math.prod(equation.invars[0].aval.shape)
    return 0 if name in _FREE else sum(math.prod(out.aval.shape) for out in equation.outvars)
