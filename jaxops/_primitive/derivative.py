"""Differentiation of operators: in forward mode, in reverse mode, and in any mixture of them.

Each operator has a documented backward operator, and reverse mode has to run exactly that one. Neither of JAX's own
tools is enough. `jax.custom_vjp` runs it, but rules out forward mode. `jax.custom_jvp` allows both modes, but reverse
mode then transposes the formula of forward mode, and the backward operator never runs.

So the JVP of an operator binds a primitive of its own, `<operator>_tangent`, which maps tangents of operands to
tangents of results and is linear in them. Forward mode evaluates it. Reverse mode transposes it, as JAX does with every
linear primitive, and its transpose rule binds the documented backward operator. Both are made of primitives that have
derivatives again, so every order and mixture exists.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

import lowering
from jaxops._primitive import sharding
from jaxops._primitive.batching import batching_rule
from jaxops._primitive.signature import Signature
from lowering.describe import show
from lowering.operators import Structure, fields, packed, presence, unpacked

Arrays = tuple[jax.Array, ...]
# The operands, with True for each that is differentiated, False for the others, and None where one is absent.
Active = Any


@dataclasses.dataclass(frozen=True)
class Derivative:
    """The derivative of an operator, as a linear map and its transpose.

    Operands, results, their tangents and cotangents have the structure that the operator gives them. Tangents of
    operands that are not `active` are None, and so are tangents and cotangents of integer results. `params` are the
    operator's attributes.

    Attributes:
      vjp: `vjp(residuals, cotangents, active, **params)` returns the cotangents of the operands, by calling the
        documented backward operator. What it returns for those that are not active is not read, and the others are
        rounded to the dtypes of their operands.
      tangent: `tangent(residuals, tangents, active, **params)` returns the tangents of the results; linear in
        `tangents`. It consists of operators and elementwise jnp, whose layout an explicit mesh can infer. None takes
        the JVP of the operator's reference, which is right unless vjp differs from it on purpose.
      linearize: `linearize(operands, active, **params)` returns (results, residuals). None evaluates the operator and
        keeps its operands and results as residuals.
      residuals: the signature of what `linearize` keeps, with an entry for each field, such as `"... h, v h"`; "" if it
        keeps nothing.
    """

    vjp: Callable[..., Any]
    tangent: Callable[..., Any] | None = None
    linearize: Callable[..., tuple[Any, Any]] | None = None
    residuals: str = ""


class _Operator(Protocol):
    """The part of `jaxops._primitive.operator.Operator` that derivatives need."""

    @property
    def name(self) -> str: ...
    @property
    def derivative(self) -> Derivative | None: ...
    @property
    def axes(self) -> Signature: ...
    def __call__(self, *operands: Any, **params: Any) -> Any: ...
    def bind(self, arrays: Sequence[Any], params: Mapping[str, Any]) -> list[jax.Array]: ...
    def meaning(self, *arrays: Any, **params: Any) -> Arrays: ...
    def remember_structure(self, arrays: Sequence[Any], params: Mapping[str, Any], structure: Structure) -> None: ...


@dataclasses.dataclass(frozen=True)
class _Linear:
    """The one parameter of a tangent primitive, whose operands are the residuals and the active operands' tangents.

    Attributes:
      attributes: those of the operator, sorted by name.
      operands: the structure of the operator's operands.
      active: for each operand that is present, whether it has a tangent here.
      residuals: the structure of the residuals.
      results: the structure of the results' tangents.
      selection: what the user asked for where the operator was bound.
    """

    attributes: tuple[tuple[str, Any], ...]
    operands: Structure
    active: tuple[bool, ...]
    residuals: Structure
    results: Structure
    selection: Any

    @property
    def active_operands(self) -> Active:
        """The operands, with whether each is active."""
        return jax.tree.unflatten(self.operands, self.active)

    def split(self, arrays: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Splits operands of the tangent primitive into residuals and tangents."""
        count = self.residuals.num_leaves
        return list(arrays[:count]), list(arrays[count:])

    def tangents(self, arrays: Sequence[Any]) -> Any:
        """Returns the tangents, one for each active operand, as the operands are structured."""
        rest = iter(arrays)
        return jax.tree.unflatten(self.operands, [next(rest) if a else None for a in self.active])

    def of_active(self, operands: Any) -> list[Any]:
        """Lists what `operands`, structured like the operands, has in the place of the active ones."""
        return list(itertools.compress(self.operands.flatten_up_to(tuple(operands)), self.active))


def jvp_rule(operator: _Operator) -> Callable[..., Any]:
    """Returns the JVP of an operator: through its tangent primitive if it has one, else through its reference."""
    tangent_primitive = _tangent_primitive(operator, operator.derivative) if operator.derivative else None

    def jvp(primals: Sequence[Any], tangents: Sequence[Any], *, selection: Any, **params: Any) -> tuple[Any, Any]:
        # Operands with symbolic zeros for tangents are constants here, and get no cotangent in reverse mode.
        active = tuple(not isinstance(tangent, ad.Zero) for tangent in tangents)
        live_tangents = list(itertools.compress(tangents, active))
        # JAX may run this rule after the user's `lowering.use` has ended: operators bound here keep its choice.
        with lowering.using(selection):
            if tangent_primitive is None:
                results = operator.bind(primals, params)
                result_tangents = _jvp_of_meaning(operator, primals, live_tangents, active, params)
            else:
                operands, attributes = unpacked(primals, params)
                structure: Structure = jax.tree.structure(operands)
                structured, residuals = _linearize(operator, operands, structure.unflatten(active), attributes)
                results, structure_of_results = jax.tree.flatten(structured)
                # The caller asks for it, and would trace the reference to find out.
                operator.remember_structure(primals, params, structure_of_results)
                varying = jax.tree.map(lambda x: x if _has_tangent(x) else None, structured)
                residuals, structure_of_residuals = jax.tree.flatten(residuals)
                linear = _Linear(
                    attributes=tuple(sorted(attributes.items())),
                    operands=structure,
                    active=active,
                    residuals=structure_of_residuals,
                    results=jax.tree.structure(varying),
                    selection=selection,
                )
                # Inside shard_map a replicated residual may meet a varying tangent; a primitive needs both to vary.
                operands = sharding.same_varying_axes([*residuals, *live_tangents])
                result_tangents = tangent_primitive.bind(*operands, linear=linear)
        rest = iter(result_tangents)
        return results, [next(rest) if _has_tangent(x) else ad.Zero(jax.typeof(x).to_tangent_aval()) for x in results]

    return jvp


def compiled_bind(primitive: Primitive) -> Callable[..., Any]:
    """Evaluates a primitive outside jit, compiled once for each set of attributes and shapes.

    Also under `jax.disable_jit`, as JAX does with its own primitives: users want to debug their functions, not these.
    """

    def evaluate(*operands: Any, **params: Any) -> Any:
        with jax.disable_jit(False):
            return _compiled(primitive, tuple(sorted(params.items())))(*operands)

    return evaluate


# Bounded for all primitives together: a compiled program takes 1 to 4 MB, and attributes may take any number of values.
@functools.lru_cache(maxsize=128)
def _compiled(primitive: Primitive, params: tuple[tuple[str, Any], ...]) -> Callable[..., Any]:
    return jax.jit(functools.partial(primitive.bind, **dict(params)))


def _tangent_primitive(operator: _Operator, derivative: Derivative) -> Primitive:
    """Makes the primitive that maps operands' tangents to results' tangents; its first operands are the residuals."""
    primitive = Primitive(f"{operator.name}_tangent")
    primitive.multiple_results = True

    def apply(*arrays: Any, linear: _Linear) -> Arrays:
        residuals, tangents = linear.split(arrays)
        with lowering.using(linear.selection):
            if derivative.tangent is None:
                # The residuals begin with the operands, because such an operator keeps them.
                operands = jax.tree.unflatten(linear.operands, residuals[: len(linear.active)])
                primals, params = packed(operands, dict(linear.attributes))
                return tuple(_jvp_of_meaning(operator, primals, tangents, linear.active, params))
            structured = jax.tree.unflatten(linear.residuals, residuals)
            results = derivative.tangent(
                structured, linear.tangents(tangents), linear.active_operands, **dict(linear.attributes)
            )
            return tuple(jax.tree.leaves(results))

    def abstract_eval(*arrays: Any, linear: _Linear) -> list[Any]:
        if derivative.tangent is None and derivative.linearize is None:
            # Such an operator keeps its results after its operands: they tell, and the reference need not be traced.
            results = arrays[len(linear.active) : linear.residuals.num_leaves]
            return [result.to_tangent_aval() for result in results if _has_tangent(result)]
        return list(jax.make_jaxpr(functools.partial(apply, linear=linear))(*arrays).out_avals)

    def axes_of(_: Sequence[Any], params: Mapping[str, Any]) -> Signature:
        return _axes_of_tangent(operator, derivative, params["linear"])

    primitive.def_impl(compiled_bind(primitive))
    primitive.def_abstract_eval(abstract_eval)
    mlir.register_lowering(primitive, mlir.lower_fun(apply, multiple_results=True))
    ad.primitive_transposes[primitive] = functools.partial(_transpose, operator.name, derivative)
    ad.primitive_jvps[primitive] = functools.partial(_jvp_of_tangent, primitive, apply)
    batching.primitive_batchers[primitive] = batching_rule(primitive, axes_of)
    return primitive


def _transpose(name: str, derivative: Derivative, cotangents: Any, *arrays: Any, linear: _Linear) -> list[Any]:
    """Transposes a tangent primitive, by binding the documented backward operator."""
    # JAX transposes in the tangents alone: residuals have values here, and tangents are placeholders for their types.
    residuals, tangents = linear.split(arrays)
    # Transposition happens after tracing, maybe outside the user's `lowering.use`, so what held there is restored.
    with lowering.using(linear.selection):
        # The backward operator takes every cotangent as an array, but JAX passes symbolic zeros for unused results.
        cotangents = [sharding.as_array(ad.instantiate_zeros(cotangent)) for cotangent in cotangents]
        results = derivative.vjp(
            jax.tree.unflatten(linear.residuals, residuals),
            jax.tree.unflatten(linear.results, cotangents),
            linear.active_operands,
            **dict(linear.attributes),
        )
    count = len(linear.operands.children())
    if not isinstance(results, tuple | list) or len(results) != count:
        got = len(results) if isinstance(results, tuple | list) else f"a {type(results).__name__}"
        raise TypeError(f"{name}: vjp must return a gradient, or None, for each of {count} operands; got {got}")
    pairs = list(zip(linear.of_active(results), tangents, strict=True))
    for found, tangent in pairs:
        if getattr(found, "shape", None) != tangent.aval.shape:
            rule = f"return a gradient of shape {list(tangent.aval.shape)} for an active operand of that shape"
            raise TypeError(f"{name}: vjp must {rule}; got {show(found)}")
    # On an explicit mesh JAX adds cotangents of one operand up, and refuses to if they are laid out differently.
    laid_out = (sharding.laid_out_as(x, tangent.aval.sharding).astype(tangent.aval.dtype) for x, tangent in pairs)
    return [None] * len(residuals) + list(laid_out)


def _jvp_of_tangent(
    primitive: Primitive,
    apply: Callable[..., Arrays],
    primals: Sequence[Any],
    tangents: Sequence[Any],
    *,
    linear: _Linear,
) -> tuple[Any, Any]:
    """Computes the JVP of a tangent primitive t = T(r) u, which is linear in the tangents u but not in the residuals r.

    By the product rule, dt = (dT(r)/dr dr) u + T(r) du.
    """
    residuals, directions = linear.split(primals)
    residual_dots, direction_dots = linear.split(tangents)
    results = primitive.bind(*primals, linear=linear)
    terms = []

    # First term: differentiate `apply` in r at fixed u. It consists of operators and jnp, so JAX can, to any order.
    # Residuals without a tangent stay constants: labels, being integers, have none, and explicit zeros would cost work.
    varies = [not isinstance(dot, ad.Zero) for dot in residual_dots]
    if any(varies):
        varying, dots = (list(itertools.compress(values, varies)) for values in (residuals, residual_dots))

        def of_residuals(*varying: Any) -> Arrays:
            rest = iter(varying)
            full = [next(rest) if v else x for x, v in zip(residuals, varies, strict=True)]
            return apply(*full, *directions, linear=linear)

        terms.append(jax.jvp(of_residuals, varying, dots)[1])

    # Second term: T(r) again, now at du. It is bound as the primitive, not inlined, so that its transpose is the
    # documented backward operator here too. Tangents whose own tangent is zero are no longer active.
    is_live = [not isinstance(dot, ad.Zero) for dot in direction_dots]
    if any(is_live):
        among_active = iter(is_live)
        active = tuple(a and next(among_active) for a in linear.active)
        operands = sharding.same_varying_axes([*residuals, *itertools.compress(direction_dots, is_live)])
        terms.append(primitive.bind(*operands, linear=dataclasses.replace(linear, active=active)))
    return results, terms[0] if len(terms) == 1 else [a + b for a, b in zip(*terms, strict=True)]


def _axes_of_tangent(operator: _Operator, derivative: Derivative, linear: _Linear) -> Signature:
    """Returns the signature of a tangent primitive's equation, from those of its operator and of the residuals."""
    axes = operator.axes
    kept = (*axes.operands, *axes.results)
    if derivative.linearize is not None:
        kept = Signature.parse(f"{derivative.residuals} ->").operands if derivative.residuals else ()
    # A tangent has the axes of its operand.
    is_active = [bool(a) for a in fields(linear.active_operands)]
    operands = itertools.chain(
        itertools.compress(kept, presence(linear.residuals)), itertools.compress(axes.operands, is_active)
    )
    return Signature(tuple(operands), tuple(itertools.compress(axes.results, presence(linear.results))))


def _linearize(
    operator: _Operator, operands: Sequence[Any], active: Active, attributes: Mapping[str, Any]
) -> tuple[Any, Any]:
    assert operator.derivative is not None
    if operator.derivative.linearize is not None:
        return operator.derivative.linearize(operands, active, **attributes)
    results = operator(*operands, **attributes)
    return results, (*operands, *(results if isinstance(results, tuple) else (results,)))


def _jvp_of_meaning(
    operator: _Operator,
    primals: Sequence[Any],
    tangents: Sequence[Any],
    active: Sequence[bool],
    params: Mapping[str, Any],
) -> list[jax.Array]:
    """Computes the tangents of the operator's results, by JAX's differentiation of its reference."""

    def of_active(*varying: Any) -> list[jax.Array]:
        rest = iter(varying)
        arrays = [next(rest) if a else primal for primal, a in zip(primals, active, strict=True)]
        return [result for result in operator.meaning(*arrays, **params) if _has_tangent(result)]

    return jax.jvp(of_active, list(itertools.compress(primals, active)), list(tangents))[1]


def _has_tangent(result: Any) -> bool:
    return bool(jnp.issubdtype(result.dtype, jnp.inexact))
