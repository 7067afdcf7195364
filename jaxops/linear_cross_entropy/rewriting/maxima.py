"""Proves that the derivative of a function does not depend on how a row's maximum is differentiated.

A log sum exp is computed relative to a maximum m, which then cancels: log sum exp(z - m) + m. Where users do not
stop the gradient of m, this follows how each value changes with m: by d m, or by a factor exp(d m).
"""

import dataclasses
from collections.abc import Sequence

from jaxops.linear_cross_entropy.rewriting.reading import RESHAPES
from lowering.rewriting.graph import SAME, Level, Node, Value


@dataclasses.dataclass(frozen=True)
class _Slope:
    """Change of a value with m: plus `degree` m, or times exp(degree m); None is not known."""

    degree: float | None
    is_factor: bool = False

    @property
    def is_zero(self) -> bool:
        return self.degree == 0


_NONE, _UNKNOWN = _Slope(0.0), _Slope(None)
_PASSES = SAME | RESHAPES | {"broadcast_in_dim", "transpose", "slice", "gather", "dynamic_slice", "abs", "concatenate"}
_STEPS = frozenset(
    {"eq", "ne", "lt", "le", "gt", "ge", "is_finite", "sign", "argmax", "stop_gradient", "floor", "ceil"}
)


def cancels(level: Level, maximum: Value) -> bool:
    """Tells whether nothing that leaves the level changes with this maximum, except where its gradient is stopped."""
    slopes = {maximum: _Slope(1.0)}
    for node in level.nodes:
        if any(x in slopes for x in node.inputs):
            slope = _after(node, [slopes.get(x, _NONE) for x in node.inputs])
            if slope is None:
                return False
            if not slope.is_zero:
                slopes.update(dict.fromkeys(node.outputs, slope))
    return not any(value in slopes for value in level.results)


def _after(node: Node, slopes: Sequence[_Slope]) -> _Slope | None:
    """Returns the slope of a node's results; None if it has an effect or a body, where slopes are not followed."""
    if node.equation.effects or any(name in node.params for name in ("jaxpr", "branches", "call_jaxpr", "body_jaxpr")):
        return None
    first = slopes[0]
    match node.name:
        case name if name in _STEPS:
            return _NONE
        case name if name in _PASSES:
            return first if all(x.is_zero for x in slopes[1:]) else _UNKNOWN
        case "convert_element_type":
            return first if node.outputs[0].dtype.kind in "fV" or node.outputs[0].dtype.itemsize == 2 else _NONE
        case "max" if _is_least(node.inputs[0]) or _is_least(node.inputs[1]):
            return slopes[1] if _is_least(node.inputs[0]) else first
        case "neg":
            return _UNKNOWN if first.is_factor else _times(first, -1.0)
        case "add" | "add_any" | "sub":
            return _sum(first, slopes[1], -1.0 if node.name == "sub" else 1.0)
        case "mul" | "div":
            return _product(node, first, slopes[1], -1.0 if node.name == "div" else 1.0)
        case "exp":
            return _UNKNOWN if first.is_factor else dataclasses.replace(first, is_factor=first.degree is not None)
        case "log":
            return dataclasses.replace(first, is_factor=False) if first.is_factor else _UNKNOWN
        case "reduce_sum":
            return first if first.is_factor and _keeps_rows(node) else _UNKNOWN
    return _UNKNOWN


def _keeps_rows(node: Node) -> bool:
    """Tells whether a sum is over a single axis, as that of exponentials over classes is."""
    return len(node.params["axes"]) == 1


def _is_least(value: Value) -> bool:
    return value.number == float("-inf")


def _times(slope: _Slope, factor: float) -> _Slope:
    return slope if slope.degree is None else dataclasses.replace(slope, degree=slope.degree * factor)


def _sum(a: _Slope, b: _Slope, sign: float) -> _Slope:
    if a.degree is None or b.degree is None or a.is_factor or b.is_factor:
        return _UNKNOWN
    return _Slope(_rounded(a.degree + sign * b.degree))


def _product(node: Node, a: _Slope, b: _Slope, sign: float) -> _Slope:
    if a.degree is None or b.degree is None:
        return _UNKNOWN
    if (a.is_factor or a.is_zero) and (b.is_factor or b.is_zero):
        degree = _rounded(a.degree + sign * b.degree)
        return _Slope(degree, is_factor=degree != 0)
    number = node.inputs[1].number if b.is_zero else node.inputs[0].number
    if number is None or (sign < 0 and not b.is_zero):
        return _UNKNOWN
    return _times(a if b.is_zero else b, float(number) if sign > 0 else 1 / float(number))


def _rounded(degree: float) -> float:
    return 0.0 if abs(degree) < 1e-6 else degree
