"""Tells whether a transform returns other updates than the `ema_adam` inside of it made.

The average of `ema_adam` follows the parameters that its own updates lead to. So each array that it takes must be
updated just as it says, or not at all, with the average as it was. This is read from the equations of the transform:
what passes a result on is known, and any other equation changes it, whichever transform it comes from.
"""

import enum
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxops.ema_adam.operator import APPLY_FUSED_EMA_ADAM

_PASSING = frozenset(
    {"convert_element_type", "copy", "copy_p", "optimization_barrier", "reshape", "sharding_constraint"}
)
_CALLS = frozenset({"closed_call", "custom_jvp_call", "custom_vjp_call", "jit", "pjit", "remat2", "checkpoint"})


class _Kind(enum.Enum):
    UPDATE = enum.auto()
    SKIPPED_UPDATE = enum.auto()  # or zeros, for all elements alike
    AVERAGE = enum.auto()
    KEPT_AVERAGE = enum.auto()  # or another array, for all elements alike
    CHANGED = enum.auto()
    ZERO = enum.auto()
    CHOICE = enum.auto()  # a bool, or 0 and 1, for all elements alike
    PARAM = enum.auto()


class _Fact(NamedTuple):
    """Fact about a value: its kind, and the step or parameter that it belongs to."""

    kind: _Kind
    of: int = 0


_ZERO, _CHOICE, _CHANGED = (_Fact(kind) for kind in (_Kind.ZERO, _Kind.CHOICE, _Kind.CHANGED))
_UPDATES = (_Kind.UPDATE, _Kind.SKIPPED_UPDATE, _Kind.CHANGED)


def drifts(jaxpr: Any, params: Sequence[Any], updates: Iterable[tuple[int, Any]], state: Iterable[Any]) -> bool:
    """Tells whether an average drifts away from its parameters.

    Args:
      jaxpr: the transform's.
      params: the variables that hold parameters.
      updates: variables that hold updates, each with the position of its parameter among `params`.
      state: the variables that hold the new state.
    """
    place_of = {variable: place for place, variable in enumerate(params)}
    operands = [_Fact(_Kind.PARAM, place_of[x]) if x in place_of else None for x in jaxpr.invars]
    reading = _Reading()
    known = reading.results(jaxpr, operands)
    moves = {fact.of for fact in map(known, state) if fact is not None and fact.kind is _Kind.AVERAGE}
    for place, variable in updates:
        fact = known(variable)
        if fact is None or fact.kind not in _UPDATES:
            is_drift = place in reading.stepped
        else:
            is_drift = fact.kind is _Kind.CHANGED or (fact.kind is _Kind.SKIPPED_UPDATE and fact.of in moves)
        if is_drift:
            return True
    return False


class _Reading:
    """Reading of what the equations do with the results of `ema_adam`.

    Attributes:
      stepped: the positions of the parameters that an `ema_adam` takes.
    """

    def __init__(self) -> None:
        """Begins with no equations."""
        self.stepped: set[int] = set()

    def results(self, jaxpr: Any, operands: Sequence[_Fact | None]) -> Callable[[Any], _Fact | None]:
        """Reads all equations; returns what is known of a variable, or of a literal."""
        facts = dict(zip(jaxpr.invars, operands, strict=True))

        def known(variable: Any) -> _Fact | None:
            if hasattr(variable, "val"):
                return _ZERO if np.ndim(variable.val) == 0 and not variable.val else None
            return facts.get(variable)

        for equation in jaxpr.eqns:
            found = self._of(equation, [known(x) for x in equation.invars])
            facts.update(zip(equation.outvars, found, strict=True))
        return known

    def _of(self, equation: Any, operands: list[_Fact | None]) -> Sequence[_Fact | None]:
        name, count = equation.primitive.name, len(equation.outvars)
        if name == APPLY_FUSED_EMA_ADAM.name:
            self.stepped.update(x.of for x in operands if x is not None and x.kind is _Kind.PARAM)
            step = id(equation)
            return [_Fact(_Kind.UPDATE, step), None, None, _Fact(_Kind.AVERAGE, step)]
        if name in _CALLS:
            inner = equation.params.get("jaxpr") or equation.params["call_jaxpr"]
            return self._inside(inner, operands)
        if name == "cond":
            branches = [self._inside(branch, operands[1:]) for branch in equation.params["branches"]]
            return [_either(facts) for facts in zip(*branches, strict=True)]
        if name == "select_n" and (operands[0] == _CHOICE or equation.invars[0].aval.shape == ()):
            return [_either(operands[1:])]
        if name in _PASSING or name == "broadcast_in_dim":
            return [self._passed(equation, fact) for fact in operands[:count]]
        if name == "mul" and _CHOICE in operands:
            return [_either([_ZERO, operands[operands[0] == _CHOICE]])]
        return [_changed(operands)] * count

    def _passed(self, equation: Any, fact: _Fact | None) -> _Fact | None:
        operand = equation.invars[0].aval
        if operand.shape == () and operand.dtype == np.bool_:
            return _CHOICE
        return fact if operand.shape == equation.outvars[0].aval.shape or fact in (_ZERO, _CHOICE) else _changed([fact])

    def _inside(self, inner: Any, operands: Sequence[_Fact | None]) -> list[_Fact | None]:
        jaxpr = getattr(inner, "jaxpr", inner)
        return list(map(self.results(jaxpr, operands), jaxpr.outvars))


def _either(facts: Iterable[_Fact | None]) -> _Fact | None:
    """Returns what is known of a value that is one of these, for all elements alike."""
    first, *others = set(facts)
    if not others:
        return first
    kinds = {fact.kind for fact in (first, *others) if fact is not None}
    known = next((fact for fact in (first, *others) if fact is not None and fact != _ZERO), _ZERO)
    is_update = len(others) == 1 and _ZERO in (first, *others)
    if is_update and known.kind in (_Kind.UPDATE, _Kind.SKIPPED_UPDATE):
        return known._replace(kind=_Kind.SKIPPED_UPDATE)
    if not kinds.isdisjoint(_UPDATES):
        return _CHANGED
    is_average = known.kind in (_Kind.AVERAGE, _Kind.KEPT_AVERAGE)
    return known._replace(kind=_Kind.KEPT_AVERAGE) if is_average else None


def _changed(facts: Iterable[_Fact | None]) -> _Fact | None:
    """Returns what is known of a value that is computed from these."""
    return _CHANGED if any(fact is not None and fact.kind in _UPDATES for fact in facts) else None
