"""An operator as a record, and the JAX primitive made from it."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching

import lowering
from jaxops._primitive import sharding
from jaxops._primitive.batching import batching_rule
from jaxops._primitive.call_faults import call_fault
from jaxops._primitive.derivative import Derivative, compiled_bind, jvp_rule
from jaxops._primitive.signature import Signature
from lowering.describe import show
from lowering.operators import Form, Structure, fields, packed, presence, registered, structure_of, unpacked
from pallas_kernels.kernel import Kernel

# The structures of results that one operator remembers: attributes may take any number of values.
_MOST_STRUCTURES = 4096


@dataclasses.dataclass(frozen=True, eq=False)
class Operator:
    """Everything about one operator. Constructing the record creates the primitive and installs all of its rules.

    Operands and results are arrays, or NamedTuples of arrays whose fields may be None. The primitive binds the arrays
    that are present; batching, sharding and derivatives follow from the signature's entries for their fields.

    Attributes:
      name: the name of the operator and of its primitive, as jaxprs print it.
      signature: which operands and results carry batch axes, with an entry for each field, present or not;
        `jaxops._primitive.signature.Signature` describes the notation. Batching and sharding follow from it.
      check: `check(*operands, **params)` raises BadParamError if shapes, dtypes or attributes break the documented
        rules. Operands need only a shape and a dtype. None if the functions that bind the operator have checked them.
      reference: `reference(*operands, **params)` returns the results. It defines the operator in jnp, is the same
        program on every platform, and runs wherever no kernel and no other form is better. Which fields of the results
        are None depends on those of the operands and on params alone.
      derivative: how to differentiate by way of other operators. None differentiates the reference as JAX does.
      kernels: kernels that may run in place of the reference, in order of preference.
      forms: programs in jnp that are better than the reference on some platforms, in order of preference.
      no_kernel: the reason for having no kernel, in a few words. `explain` shows it.
      axes: the parsed signature, with all fields of operands and results.
    """

    name: str
    signature: str
    check: Callable[..., None] | None
    reference: Callable[..., Any]
    derivative: Derivative | None = None
    kernels: tuple[Kernel, ...] = ()
    forms: tuple[Form, ...] = ()
    no_kernel: str = ""
    primitive: Primitive = dataclasses.field(init=False, repr=False)
    axes: Signature = dataclasses.field(init=False, repr=False)
    _structures: dict[Any, Structure] = dataclasses.field(init=False, repr=False, default_factory=dict)

    def __post_init__(self) -> None:
        primitive = Primitive(self.name)
        primitive.multiple_results = True
        object.__setattr__(self, "primitive", primitive)
        object.__setattr__(self, "axes", self._parsed(self.signature))
        self._require_sound()
        primitive.def_impl(compiled_bind(primitive))
        primitive.def_abstract_eval(self._abstract_eval)
        lowering.register(self)
        batching.primitive_batchers[primitive] = batching_rule(primitive, self._axes_of_equation)
        ad.primitive_jvps[primitive] = jvp_rule(self)

    def _parsed(self, signature: str) -> Signature:
        try:
            return Signature.parse(signature)
        except ValueError as error:
            raise ValueError(f"{self.name}: {error}") from None

    def _require_sound(self) -> None:
        """Refuses a record that would fail later, where nobody could tell why."""
        kinds = {"kernels": Kernel, "forms": Form}
        for name, kind in kinds.items():
            given = getattr(self, name)
            if not (isinstance(given, tuple) and all(isinstance(each, kind) for each in given)):
                raise TypeError(f"{self.name}: {name} must be a tuple of {kind.__name__} records; got {show(given)}")
        if self.derivative is not None and not isinstance(self.derivative, Derivative):
            raise TypeError(f"{self.name}: derivative must be a Derivative or None; got {show(self.derivative)}")
        if self.derivative is not None and self.derivative.residuals:
            self._parsed(f"{self.derivative.residuals} ->")
        # A cell or a module that is run again defines its operator again.
        others = (one for one in registered() if one.name == self.name)
        taken = next((one for one in others if _origins(one).isdisjoint(_origins(self))), None)
        if taken is not None:
            raise ValueError(f"{self.name}: name must not be taken; got that of an operator of {_module(taken)}")

    def __call__(self, *operands: Any, **params: Any) -> Any:
        """Binds the primitive. Operands must be arrays or NamedTuples of them, and `params` hashable."""
        for position, operand in enumerate(operands):
            if type(operand) in (list, tuple, dict):
                rule = "must be an array or a NamedTuple of arrays"
                raise TypeError(f"{self.name}: operand {position} {rule}; got {show(operand)}")
        if (count := len(fields(operands))) != len(self.axes.operands):
            raise self._misfit("operands", count)
        # Abstract evaluation checks too, but under vmap only this place sees the shapes that the user wrote.
        try:
            if self.check is not None and (found := self.check(*operands, **params)) is not None:
                raise TypeError(f"{self.name}: check must return None, or raise; got {show(found)}")
            arrays, attributes = packed(operands, params)
            found = self.bind(arrays, attributes)
            return jax.tree.unflatten(self.structure_of_results(arrays, attributes), found)
        except (AttributeError, TypeError) as error:
            is_told = str(error).startswith(f"{self.name}: ")
            fault = None if is_told else call_fault((self.check, self.reference), operands, params, error)
            if fault is None:
                raise
            raise TypeError(f"{self.name}: {fault}") from error

    def bind(self, arrays: Sequence[jax.Array], params: Mapping[str, Any]) -> list[jax.Array]:
        """Binds the primitive to the arrays of operands; returns those of results."""
        if sharding.explicit_mesh(arrays) is not None:
            present = presence(structure_of(arrays, params))
            arrays = sharding.agreeing(self.axes.of_present(present, [False] * len(self.axes.results)), *arrays)
        arrays = sharding.same_varying_axes(arrays)
        return self.primitive.bind(*arrays, selection=lowering.current_selection(), **params)

    def meaning(self, *arrays: Any, **params: Any) -> tuple[jax.Array, ...]:
        """Evaluates the reference on an equation; on an explicit mesh, with results laid out as the signature says."""
        return self.in_jnp(self.reference, arrays, params)

    def in_jnp(
        self, run: Callable[..., Any], arrays: Sequence[Any], params: Mapping[str, Any]
    ) -> tuple[jax.Array, ...]:
        """Evaluates a form's `run` in place of the reference, with results laid out likewise."""
        evaluate = functools.partial(self._evaluate, run, params)
        return sharding.sharded_as_signature(lambda: self._axes_of_equation(arrays, params), evaluate, arrays)

    def _evaluate(self, run: Callable[..., Any], params: Mapping[str, Any], *arrays: Any) -> tuple[jax.Array, ...]:
        operands, attributes = unpacked(arrays, params)
        results, structure = jax.tree.flatten(run(*operands, **attributes))
        self.remember_structure(arrays, params, structure)
        return tuple(results)

    def _misfit(self, side: str, count: int) -> TypeError:
        """Says that operands or results are not as many as the signature has entries."""
        wanted = len(getattr(self.axes, side))
        return TypeError(f"{self.name}: {side} must be as many as in its signature, {wanted}; got {count}")

    def local_kernel(
        self, run: Callable[..., Any], arrays: Sequence[Any], params: Mapping[str, Any]
    ) -> Callable[..., Any]:
        """Applies a kernel's `run`, on arrays, to each device's own part of an equation's operands."""
        return sharding.per_device(self._axes_of_equation(arrays, params), run, arrays)

    def remember_structure(self, arrays: Sequence[Any], params: Mapping[str, Any], structure: Structure) -> None:
        """Remembers the structure of an equation's results, for `structure_of_results`."""
        if len(self._structures) >= _MOST_STRUCTURES:
            self._structures.clear()
        self._structures[_key(arrays, params)] = structure

    def structure_of_results(self, arrays: Sequence[Any], params: Mapping[str, Any]) -> Structure:
        """Returns the structure of an equation's results."""
        key = _key(arrays, params)
        if key not in self._structures:
            types = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays]
            jax.eval_shape(functools.partial(self._evaluate, self.reference, params), *types)
        return self._structures[key]

    def _axes_of_equation(self, arrays: Sequence[Any], params: Mapping[str, Any]) -> Signature:
        attributes = {name: value for name, value in params.items() if name != "selection"}
        results = self.structure_of_results(arrays, attributes)
        return self.axes.of_present(presence(structure_of(arrays, params)), presence(results))

    def _abstract_eval(self, *arrays: Any, selection: Any, **params: Any) -> list[Any]:
        if self.check is not None:
            operands, attributes = unpacked(arrays, params)
            self.check(*operands, **attributes)
        results = list(jax.make_jaxpr(lambda *arrays: self.meaning(*arrays, **params))(*arrays).out_avals)
        structured = jax.tree.unflatten(self.structure_of_results(arrays, params), results)
        count = 0 if structured is None else len(fields(structured))
        if count != len(self.axes.results):
            raise self._misfit("results", count)
        axes = self._axes_of_equation(arrays, params)
        conflict = axes.conflict([x.shape for x in arrays], [x.shape for x in results])
        if conflict is not None:
            rule = f'be as in its signature, "{self.signature}"'
            raise TypeError(f"{self.name}: shapes of operands and results must {rule}; got {conflict}")
        return results


def _module(operator: Any) -> str:
    """Returns the module that defines an operator."""
    return str(getattr(getattr(operator, "reference", operator), "__module__", ""))


def _origins(operator: Any) -> set[str]:
    """Returns the module and the file that define an operator; a file may be run under two names of a module."""
    code = getattr(getattr(operator, "reference", None), "__code__", None)
    return {_module(operator), getattr(code, "co_filename", "")} - {""}


def _key(arrays: Sequence[Any], params: Mapping[str, Any]) -> Any:
    # Where the parameters have no structure of the operands, it is a plain tuple of this length.
    return len(arrays), tuple(sorted(params.items()))


def operators() -> tuple[Operator, ...]:
    """Returns the records of all operators, sorted by name, for tools and tests.

    Example:
      >>> softmax = next(
      ...     operator for operator in jaxops.operators() if operator.name == "softmax"
      ... )
      >>> softmax.signature, [kernel.platform for kernel in softmax.kernels]
      ('... c -> ... c', ['tpu', 'cuda'])
    """
    by_name = {operator.name: operator for operator in registered() if isinstance(operator, Operator)}
    return tuple(by_name[name] for name in sorted(by_name))
