"""The registered operators: the one place that knows them by primitive and by name."""

from collections.abc import Callable
from typing import Any, Protocol

import jax
from jax.extend.core import Primitive

from lowering import source_lines
from lowering.forms import Form
from lowering.patterns import Pattern
from pallas_kernels.kernel import Kernel


class Operator(Protocol):
    """Facts that `lowering` needs to know about an operator; `jaxops.Operator` is one implementation."""

    @property
    def name(self) -> str:
        """The name of the operator and of its primitive."""
        ...

    @property
    def primitive(self) -> Primitive:
        """The JAX primitive that stands for the operator in a jaxpr."""
        ...

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        """The hand-written kernels, in order of preference."""
        ...

    @property
    def forms(self) -> tuple[Form, ...]:
        """The forms in jnp beside the reference, in order of preference."""
        ...

    @property
    def patterns(self) -> tuple[Pattern, ...]:
        """Plain-JAX patterns that this operator can replace."""
        ...

    def meaning(self, *arrays: Any, **params: Any) -> tuple[jax.Array, ...]:
        """Computes the results of an equation in plain JAX: the reference implementation."""
        ...

    def in_jnp(self, run: Callable[..., Any], arrays: Any, params: Any) -> tuple[jax.Array, ...]:
        """Computes the results of an equation by a form's `run`."""
        ...

    def local_kernel(self, run: Callable[..., Any], arrays: Any, params: Any) -> Callable[..., Any]:
        """Wraps a kernel's `run`, on arrays, so that each device of a mesh applies it to its own part of them."""
        ...


_operators: dict[Primitive, Operator] = {}


def add(operator: Operator) -> None:
    """Adds an operator. The files of its package count as library code from now on."""
    _operators[operator.primitive] = operator
    source_lines.add_operators(type(operator).__module__.partition(".")[0])


def operators() -> tuple[Operator, ...]:
    """Returns all operators, in order of registration."""
    return tuple(_operators.values())


def names() -> frozenset[str]:
    """Returns the names of all operators."""
    return frozenset(operator.name for operator in _operators.values())


def form_names() -> frozenset[str]:
    """Returns the names of all operators' forms in jnp."""
    return frozenset(form.name for operator in _operators.values() for form in operator.forms)


def operator_of(primitive: Primitive) -> Operator | None:
    """Returns the operator that a primitive stands for; None for a primitive of JAX or of another library."""
    return _operators.get(primitive)
