"""The operators of a function, each with operands."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from lowering.measurements import Key
from lowering.measuring.inputs import made_up
from lowering.operators import Operator, operator_of
from pallas_kernels.hardware import Hardware


@dataclasses.dataclass(frozen=True)
class Problem:
    """An operator on operands.

    Attributes:
      key: what a measurement of it is valid for.
      operator: its record.
      operands: arrays, or their types where nothing is run on them.
      params: its attributes.
    """

    key: Key
    operator: Operator
    operands: tuple[Any, ...]
    params: Mapping[str, Any]

    @classmethod
    def of(
        cls, operator: Operator, hardware: Hardware, operands: Sequence[Any], params: Mapping[str, Any]
    ) -> "Problem":
        """Returns the problem with its key for a chip, which is here or was named."""
        key = Key.of(operator.name, hardware, operands, params)
        assert key is not None  # the chip is known
        return cls(key, operator, tuple(operands), params)

    @property
    def meaning(self) -> Callable[..., Any]:
        """The reference as a function of the operands."""
        return functools.partial(self.operator.meaning, **self.params)

    def with_arrays(self) -> "Problem":
        """Returns the problem with made-up arrays, if it has types alone."""
        if all(isinstance(x, jax.Array) for x in self.operands):
            return self
        arrays = made_up(self.operands, list(self.params.values()))
        return dataclasses.replace(self, operands=tuple(arrays))

    def __str__(self) -> str:
        return f"{self.operator.name} {', '.join(self.key.operands)}"


def problems(fn: Callable[..., Any], args: Sequence[Any], hardware: Hardware) -> tuple[Problem, ...]:
    """Evaluates a function with the operators' references, and keeps what each operator is given.

    Made-up operands would not do: a gradient's are the statistics that the forward operator has found.
    """
    closed = jax.make_jaxpr(fn)(*args)
    used: list[tuple[Operator, Mapping[str, Any]]] = []

    @jax.jit
    def operands_of_all(*leaves: Any) -> list[list[Any]]:
        given: list[list[Any]] = []

        def keep(operator: Operator, operands: Sequence[Any], params: Mapping[str, Any]) -> None:
            used.append((operator, params))
            given.append([jax.numpy.asarray(x) for x in operands])

        _evaluate(closed.jaxpr, closed.consts, leaves, keep)
        return given

    found: dict[Key, Problem] = {}
    for operands, (operator, params) in zip(operands_of_all(*jax.tree.leaves(args)), used, strict=True):
        problem = Problem.of(operator, hardware, operands, params)
        found.setdefault(problem.key, problem)
    return tuple(found.values())


def _evaluate(jaxpr: Jaxpr, consts: Sequence[Any], operands: Sequence[Any], keep: Callable[..., None]) -> list[Any]:
    values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *operands), strict=True))

    def value_of(atom: Any) -> Any:
        return atom.val if isinstance(atom, Literal) else values[atom]

    for equation in jaxpr.eqns:
        inputs = [value_of(atom) for atom in equation.invars]
        values.update(zip(equation.outvars, _results(equation, inputs, keep), strict=True))
    return [value_of(atom) for atom in jaxpr.outvars]


def _results(equation: Any, inputs: Sequence[Any], keep: Callable[..., None]) -> Sequence[Any]:
    operator = operator_of(equation.primitive)
    if operator is not None:
        params = {name: value for name, value in equation.params.items() if name != "selection"}
        keep(operator, inputs, params)
        return operator.meaning(*inputs, **params)
    inner = equation.params.get("jaxpr")
    if isinstance(inner, ClosedJaxpr) and equation.primitive.name in ("jit", "pjit"):
        return _evaluate(inner.jaxpr, inner.consts, inputs, keep)
    results = equation.primitive.bind(*inputs, **equation.primitive.get_bind_params(equation.params))
    return results if equation.primitive.multiple_results else [results]
