"""How operators are differentiated: in forward mode, in reverse mode, and in any mixture of them.

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
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

import lowering
from jaxops._primitive import sharding
from jaxops._primitive.batching import as_array, batching_rule
from jaxops._primitive.signature import Axes, Signature

Arrays = tuple[jax.Array, ...]
Active = tuple[bool, ...]


@dataclasses.dataclass(frozen=True)
class Derivative:
    """The derivative of an operator, as a linear map and its transpose.

    `active` says which operands are differentiated; `params` are the operator's attributes. Tangents and cotangents of
    operands are listed for active operands only, in order. Results of integer dtype have neither.

    Attributes:
      vjp: `vjp(residuals, cotangents, active, **params)` returns the cotangents of the active operands, by calling
        the documented backward operator.
      tangent: `tangent(residuals, tangents, active, **params)` returns the tangents of the results; linear in
        `tangents`. It consists of operators and elementwise jnp, whose layout an explicit mesh can infer. None takes
        the JVP of the operator's reference, which is right unless vjp differs from it on purpose.
      linearize: `linearize(operands, active, **params)` returns (results, residuals). None evaluates the operator and
        keeps its operands and results as residuals.
      residuals: the signature of what `linearize` keeps, such as `"... h, v h"`; "" if it keeps nothing.
    """

    vjp: Callable[..., Sequence[jax.Array]]
    tangent: Callable[..., Sequence[jax.Array]] | None = None
    linearize: Callable[..., tuple[Arrays, Arrays]] | None = None
    residuals: str = ""


class _Operator(Protocol):
    """The part of `jaxops._primitive.operator.Operator` that derivatives need."""

    @property
    def name(self) -> str: ...
    @property
    def derivative(self) -> Derivative | None: ...
    @property
    def axes(self) -> Signature: ...
    def __call__(self, *operands: Any, **params: Any) -> Arrays: ...
    def meaning(self, *operands: Any, **params: Any) -> Arrays: ...


def jvp_rule(operator: _Operator) -> Callable[..., Any]:
    """The JVP of an operator: through its tangent primitive if it has one, else through its reference."""
    tangent_primitive = _tangent_primitive(operator, operator.derivative) if operator.derivative else None

    def jvp(primals: Sequence[Any], tangents: Sequence[Any], *, selection: Any, **params: Any) -> tuple[Any, Any]:
        # Operands with symbolic zeros for tangents are constants here, and get no cotangent in reverse mode.
        active = tuple(not isinstance(tangent, ad.Zero) for tangent in tangents)
        live_tangents = [tangent for tangent, a in zip(tangents, active, strict=True) if a]
        # JAX may run this rule after the user's `lowering.use` has ended: operators bound here keep its choice.
        with lowering.using(selection):
            if tangent_primitive is None:
                results = operator(*primals, **params)
                result_tangents = _jvp_of_meaning(operator, primals, live_tangents, active, params)
            else:
                results, residuals = _linearize(operator, primals, active, params)
                # Inside shard_map a replicated residual may meet a varying tangent; a primitive needs both to vary.
                operands = sharding.same_varying_axes([*residuals, *live_tangents])
                result_tangents = tangent_primitive.bind(
                    *operands, active=active, selection=selection, params=tuple(sorted(params.items()))
                )
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
    """The primitive that maps tangents of operands to tangents of results; its first operands are the residuals."""
    primitive = Primitive(f"{operator.name}_tangent")
    primitive.multiple_results = True

    def apply(*operands: Any, active: Active, selection: Any, params: Any) -> Arrays:
        residuals, tangents = _split(operands, active)
        with lowering.using(selection):
            if derivative.tangent is None:
                # The residuals begin with the operands, because such an operator has no `linearize` of its own.
                primals = residuals[: len(active)]
                return tuple(_jvp_of_meaning(operator, primals, tangents, active, dict(params)))
            return tuple(derivative.tangent(residuals, tangents, active, **dict(params)))

    def abstract_eval(*operands: Any, **params: Any) -> list[Any]:
        return list(jax.make_jaxpr(functools.partial(apply, **params))(*operands).out_avals)

    primitive.def_impl(compiled_bind(primitive))
    primitive.def_abstract_eval(abstract_eval)
    mlir.register_lowering(primitive, mlir.lower_fun(apply, multiple_results=True))
    ad.primitive_transposes[primitive] = functools.partial(_transpose, derivative)
    ad.primitive_jvps[primitive] = functools.partial(_jvp_of_tangent, primitive, apply)
    batching.primitive_batchers[primitive] = functools.partial(_batch_tangent, operator, derivative, primitive)
    return primitive


def _transpose(
    derivative: Derivative, cotangents: Any, *operands: Any, active: Active, selection: Any, params: Any
) -> list[Any]:
    """The transpose of a tangent primitive: binds the documented backward operator."""
    # JAX transposes in the tangents alone: residuals have values here, and tangents are placeholders for their types.
    residuals, tangents = _split(operands, active)
    # Transposition happens after tracing, maybe outside the user's `lowering.use`, so what held there is restored.
    with lowering.using(selection):
        # The backward operator takes every cotangent as an array, but JAX passes symbolic zeros for unused results.
        cotangents = [as_array(ad.instantiate_zeros(cotangent)) for cotangent in cotangents]
        results = derivative.vjp(residuals, cotangents, active, **dict(params))
    # On an explicit mesh JAX adds cotangents of one operand up, and refuses to if they are laid out differently.
    laid_out = [sharding.laid_out_as(x, tangent.aval.sharding) for x, tangent in zip(results, tangents, strict=True)]
    return [None] * len(residuals) + laid_out


def _jvp_of_tangent(
    primitive: Primitive, apply: Callable[..., Arrays], primals: Sequence[Any], tangents: Sequence[Any], **params: Any
) -> tuple[Any, Any]:
    """The JVP of a tangent primitive t = T(r) u, which is linear in the tangents u but not in the residuals r.

    By the product rule, dt = (dT(r)/dr dr) u + T(r) du.
    """
    residuals, linear = _split(primals, params["active"])
    residual_dots, linear_dots = _split(tangents, params["active"])
    results = primitive.bind(*primals, **params)
    terms = []

    # First term: differentiate `apply` in r at fixed u. It consists of operators and jnp, so JAX can, to any order.
    # Residuals without a tangent stay constants: labels, being integers, have none, and explicit zeros would cost work.
    varies = [not isinstance(dot, ad.Zero) for dot in residual_dots]
    if any(varies):
        varying = [x for x, v in zip(residuals, varies, strict=True) if v]
        dots = [dot for dot, v in zip(residual_dots, varies, strict=True) if v]

        def of_residuals(*varying: Any) -> Arrays:
            rest = iter(varying)
            full = [next(rest) if v else x for x, v in zip(residuals, varies, strict=True)]
            return apply(*full, *linear, **params)

        terms.append(jax.jvp(of_residuals, varying, dots)[1])

    # Second term: T(r) again, now at du. It is bound as the primitive, not inlined, so that its transpose is the
    # documented backward operator here too. Tangents whose own tangent is zero are no longer active.
    is_live = [not isinstance(dot, ad.Zero) for dot in linear_dots]
    if any(is_live):
        among_active = iter(is_live)
        active = tuple(a and next(among_active) for a in params["active"])
        dots = [dot for dot, live in zip(linear_dots, is_live, strict=True) if live]
        operands = sharding.same_varying_axes([*residuals, *dots])
        terms.append(primitive.bind(*operands, **{**params, "active": active}))
    return results, terms[0] if len(terms) == 1 else [a + b for a, b in zip(*terms, strict=True)]


def _batch_tangent(
    operator: _Operator,
    derivative: Derivative,
    primitive: Primitive,
    operands: Sequence[Any],
    dims: Sequence[Any],
    **params: Any,
) -> Any:
    """The batching rule of a tangent primitive, from the signatures of its operator and of the residuals."""
    axes = operator.axes
    # A tangent has the axes of its operand. How many tangents there are depends on `active`, so this waits until now.
    active_axes = [operand for operand, a in zip(axes.operands, params["active"], strict=True) if a]
    residual_axes: Sequence[Axes] = [*axes.operands, *axes.results]
    if derivative.linearize is not None:
        residual_axes = Signature.parse(f"{derivative.residuals} ->").operands if derivative.residuals else ()
    carry = [x.batched for x in (*residual_axes, *active_axes)]
    return batching_rule(primitive, carry, [result.batched for result in axes.results])(operands, dims, **params)


def _linearize(
    operator: _Operator, primals: Sequence[Any], active: Active, params: dict[str, Any]
) -> tuple[Arrays, Arrays]:
    assert operator.derivative is not None
    if operator.derivative.linearize is not None:
        return operator.derivative.linearize(primals, active, **params)
    results = operator(*primals, **params)
    return results, (*primals, *results)


def _jvp_of_meaning(
    operator: _Operator, primals: Sequence[Any], tangents: Sequence[Any], active: Active, params: dict[str, Any]
) -> list[jax.Array]:
    """The tangents of the operator's results, by JAX's differentiation of its reference."""

    def of_active(*varying: Any) -> list[jax.Array]:
        rest = iter(varying)
        operands = [next(rest) if a else primal for primal, a in zip(primals, active, strict=True)]
        return [result for result in operator.meaning(*operands, **params) if _has_tangent(result)]

    varying = [primal for primal, a in zip(primals, active, strict=True) if a]
    return jax.jvp(of_active, varying, list(tangents))[1]


def _has_tangent(result: Any) -> bool:
    return bool(jnp.issubdtype(result.dtype, jnp.inexact))


def _split(operands: Sequence[Any], active: Active) -> tuple[list[Any], list[Any]]:
    """Splits the operands of a tangent primitive into residuals and tangents (one for each active operand)."""
    count = len(operands) - sum(active)
    return list(operands[:count]), list(operands[count:])
