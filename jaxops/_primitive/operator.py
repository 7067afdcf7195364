"""An operator as a record, and the JAX primitive made from it."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching

import lowering
from jaxops._primitive import sharding
from jaxops._primitive.batching import batching_rule
from jaxops._primitive.derivative import Derivative, compiled_bind, jvp_rule
from jaxops._primitive.signature import Signature
from lowering import registry
from lowering.patterns import Pattern
from pallas_kernels.kernel import Kernel


@dataclasses.dataclass(frozen=True, eq=False)
class Operator:
    """Everything about one operator. Constructing the record creates the primitive and installs all of its rules.

    Attributes:
      name: the name of the operator and of its primitive, as jaxprs print it.
      signature: which operands and results carry batch axes; `jaxops._primitive.signature.Signature` describes the
        notation. Batching and sharding follow from it.
      check: `check(*operands, **params)` raises BadParamError if shapes, dtypes or attributes break the documented
        rules. Operands need only a shape and a dtype.
      reference: `reference(*operands, **params)` returns a tuple of results. It defines the operator in jnp, and runs
        wherever no kernel is better.
      derivative: how to differentiate by way of other operators. None differentiates the reference as JAX does.
      kernels: kernels that may run in place of the reference, in order of preference.
      patterns: plain-JAX patterns that this operator can replace. `lowering.explain` looks for them in users'
        functions.
    """

    name: str
    signature: str
    check: Callable[..., None]
    reference: Callable[..., tuple[jax.Array, ...]]
    derivative: Derivative | None = None
    kernels: tuple[Kernel, ...] = ()
    patterns: tuple[Pattern, ...] = ()
    primitive: Primitive = dataclasses.field(init=False, repr=False)

    def __post_init__(self) -> None:
        primitive = Primitive(self.name)
        primitive.multiple_results = True
        object.__setattr__(self, "primitive", primitive)
        axes = self.axes
        primitive.def_impl(compiled_bind(primitive))
        primitive.def_abstract_eval(self._abstract_eval)
        lowering.register(self)
        carries_batch = ([operand.batched for operand in axes.operands], [result.batched for result in axes.results])
        batching.primitive_batchers[primitive] = batching_rule(primitive, *carries_batch)
        ad.primitive_jvps[primitive] = jvp_rule(self)

    def __call__(self, *operands: jax.Array, **params: Any) -> tuple[jax.Array, ...]:
        """Binds the primitive. Operands must be arrays, and `params` hashable."""
        # Abstract evaluation checks too, but under vmap only this place sees the shapes that the user wrote.
        self.check(*operands, **params)
        selection = lowering.current_selection()
        operands = tuple(sharding.same_varying_axes(sharding.agreeing(self.signature, *operands)))
        return tuple(self.primitive.bind(*operands, selection=selection, **params))

    @property
    def axes(self) -> Signature:
        return Signature.parse(self.signature)

    def meaning(self, *operands: Any, **params: Any) -> tuple[jax.Array, ...]:
        """Evaluates the reference; on an explicit mesh, with results laid out as the signature says."""
        return sharding.sharded_as_signature(self.axes, self.reference, operands, params)

    def local_kernel(self, run: Callable[..., Any], operands: Any) -> Callable[..., Any]:
        """Applies a kernel's `run` to each device's own part of the operands."""
        return sharding.per_device(self.axes, run, operands)

    def _abstract_eval(self, *operands: Any, selection: Any, **params: Any) -> list[Any]:
        self.check(*operands, **params)
        results = jax.make_jaxpr(lambda *arrays: self.meaning(*arrays, **params))(*operands)
        return list(results.out_avals)


def operators() -> tuple[Operator, ...]:
    """Returns the records of all operators, sorted by name, for tools and tests.

    Example:
      >>> softmax = next(operator for operator in jaxops.operators() if operator.name == "softmax")
      >>> softmax.signature, [kernel.platform for kernel in softmax.kernels]
      ('... c -> ... c', ['tpu', 'cuda'])
    """
    by_name = {operator.name: operator for operator in registry.operators() if isinstance(operator, Operator)}
    return tuple(by_name[name] for name in sorted(by_name))
