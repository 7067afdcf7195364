"""How operators are differentiated: in forward mode, reverse mode and any mixture of them.

The JVP of an operator binds a *linear tangent* primitive, which maps tangents of operands to tangents of results.
Transposed, it binds the documented backward operator: so reverse mode runs that operator, forward mode works, and both
can be differentiated again.
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

    In each function `active` says which operands are being differentiated, `params` are the operator's attributes, and
    `tangents` and cotangents of operands are given for active operands only, in order. Results of integer dtype have no
    tangents and no cotangents.

    Attributes:
      vjp: `vjp(residuals, cotangents, active, **params)` returns the cotangents of the active operands; it calls the
        documented backward operator.
      tangent: `tangent(residuals, tangents, active, **params)` returns the tangents of the results; linear in
        `tangents`. It is made of operators and elementwise jnp, so that an explicit mesh lays it out. None takes the
        JVP of the operator's reference, which is right unless vjp is deliberately something else.
      linearize: `linearize(operands, active, **params)` returns (results, residuals). None evaluates the operator and
        keeps its operands and results.
      residuals: the signature of the residuals where `linearize` is given, such as `"... h, v h"`; "" for none.
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
        active = tuple(not isinstance(tangent, ad.Zero) for tangent in tangents)
        live_tangents = [tangent for tangent, a in zip(tangents, active, strict=True) if a]
        with lowering.using(selection):
            if tangent_primitive is None:
                results = operator(*primals, **params)
                result_tangents = _jvp_of_meaning(operator, primals, live_tangents, active, params)
            else:
                results, residuals = _linearize(operator, primals, active, params)
                operands = sharding.same_varying_axes([*residuals, *live_tangents])
                result_tangents = tangent_primitive.bind(
                    *operands, active=active, selection=selection, params=tuple(sorted(params.items()))
                )
        rest = iter(result_tangents)
        return results, [next(rest) if _has_tangent(x) else ad.Zero(jax.typeof(x).to_tangent_aval()) for x in results]

    return jvp


def compiled_bind(primitive: Primitive) -> Callable[..., Any]:
    """Evaluates a primitive outside of jit by compiling it once for each set of attributes and shapes.

    Under `jax.disable_jit` as well, as JAX does with its own primitives: what users debug are their functions.
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
    """The primitive that maps tangents of operands to tangents of results; the residuals are its first operands."""
    primitive = Primitive(f"{operator.name}_tangent")
    primitive.multiple_results = True

    def apply(*operands: Any, active: Active, selection: Any, params: Any) -> Arrays:
        residuals, tangents = _split(operands, active)
        with lowering.using(selection):
            if derivative.tangent is None:
                primals = residuals[: len(active)]
                return tuple(_jvp_of_meaning(operator, primals, tangents, active, dict(params)))
            return tuple(derivative.tangent(residuals, tangents, active, **dict(params)))

    def abstract_eval(*operands: Any, **params: Any) -> list[Any]:
        return list(jax.make_jaxpr(functools.partial(apply, **params))(*operands).out_avals)

    def transpose(cotangents: Any, *operands: Any, active: Active, selection: Any, params: Any) -> list[Any]:
        residuals, tangents = _split(operands, active)
        with lowering.using(selection):
            cotangents = [as_array(ad.instantiate_zeros(cotangent)) for cotangent in cotangents]
            results = derivative.vjp(residuals, cotangents, active, **dict(params))
        laid_out = [
            sharding.laid_out_as(x, tangent.aval.sharding) for x, tangent in zip(results, tangents, strict=True)
        ]
        return [None] * len(residuals) + laid_out

    def jvp(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> tuple[Any, Any]:
        residuals, linear = _split(primals, params["active"])
        residual_dots, linear_dots = _split(tangents, params["active"])
        results = primitive.bind(*primals, **params)
        moving = [not isinstance(dot, ad.Zero) for dot in residual_dots]
        terms = []
        if any(moving):
            inputs = [x for x, m in zip(residuals, moving, strict=True) if m]
            dots = [dot for dot, m in zip(residual_dots, moving, strict=True) if m]

            def at(*moved: Any) -> Arrays:
                rest = iter(moved)
                full = [next(rest) if m else x for x, m in zip(residuals, moving, strict=True)]
                return apply(*full, *linear, **params)

            terms.append(jax.jvp(at, inputs, dots)[1])
        live = [not isinstance(dot, ad.Zero) for dot in linear_dots]
        if any(live):
            among_active = iter(live)
            active = tuple(a and next(among_active) for a in params["active"])
            dots = [dot for dot, alive in zip(linear_dots, live, strict=True) if alive]
            terms.append(
                primitive.bind(*sharding.same_varying_axes([*residuals, *dots]), **{**params, "active": active})
            )
        return results, terms[0] if len(terms) == 1 else [a + b for a, b in zip(*terms, strict=True)]

    def batch(operands: Sequence[Any], dims: Sequence[Any], **params: Any) -> Any:
        axes = operator.axes
        active_axes = [operand for operand, a in zip(axes.operands, params["active"], strict=True) if a]
        residual_axes: Sequence[Axes] = [*axes.operands, *axes.results]
        if derivative.linearize is not None:
            residual_axes = Signature.parse(f"{derivative.residuals} ->").operands if derivative.residuals else ()
        carry = [x.batched for x in (*residual_axes, *active_axes)]
        return batching_rule(primitive, carry, [result.batched for result in axes.results])(operands, dims, **params)

    primitive.def_impl(compiled_bind(primitive))
    primitive.def_abstract_eval(abstract_eval)
    mlir.register_lowering(primitive, mlir.lower_fun(apply, multiple_results=True))
    ad.primitive_transposes[primitive] = transpose
    ad.primitive_jvps[primitive] = jvp
    batching.primitive_batchers[primitive] = batch
    return primitive


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
    def of_active(*moving: Any) -> list[jax.Array]:
        rest = iter(moving)
        operands = [next(rest) if a else primal for primal, a in zip(primals, active, strict=True)]
        return [result for result in operator.meaning(*operands, **params) if _has_tangent(result)]

    moving = [primal for primal, a in zip(primals, active, strict=True) if a]
    return jax.jvp(of_active, moving, list(tangents))[1]


def _has_tangent(result: Any) -> bool:
    return bool(jnp.issubdtype(result.dtype, jnp.inexact))


def _split(operands: Sequence[Any], active: Active) -> tuple[list[Any], list[Any]]:
    """Residuals, and the tangents after them (one for each active operand)."""
    count = len(operands) - sum(active)
    return list(operands[:count]), list(operands[count:])
