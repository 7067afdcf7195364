"""Activations and their slopes, for the operators that apply them alone or fused into batch normalization."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

MODES = ("sigmoid", "relu", "tanh", "clipped_relu", "elu", "identity", "swish")
MASKED_MODES = ("relu", "clipped_relu")  # whose slope is 0 or 1
# None: the coefficient has no default and must be given. Modes that are not listed have no coefficient.
DEFAULT_COEFFICIENTS = {"clipped_relu": None, "elu": 1.0, "swish": 1.0}


class Activation(NamedTuple):
    """An activation, as an attribute of operators.

    Attributes:
      mode: one of MODES.
      coef: the ceiling of clipped_relu, the factor of elu, the beta of swish; other modes ignore it.
      propagate_nan: whether relu and clipped_relu map NaN to NaN, or to 0.
    """

    mode: str
    coef: float = 0.0
    propagate_nan: bool = True


IDENTITY = Activation("identity")
RELU = Activation("relu")


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def activated(activation: Activation, u: jax.Array) -> jax.Array:
    """Applies an activation to u."""
    mode, coef, propagate_nan = activation
    if mode in ("relu", "clipped_relu"):
        y = jnp.maximum(u, 0) if propagate_nan else jnp.where(u > 0, u, 0)
        return y if mode == "relu" else jnp.minimum(y, coef)
    if mode == "elu":
        return jnp.where(u > 0, u, coef * jnp.expm1(jnp.where(u > 0, 0, u)))
    if mode == "swish":
        # The limit at an infinity is 0, and not infinity times 0.
        s = jax.nn.sigmoid(_times(coef, u))
        return jnp.where(s == 0, 0, u * s)
    return {"sigmoid": jax.nn.sigmoid, "tanh": jnp.tanh, "identity": lambda u: u}[mode](u)


@activated.defjvp
def _activated_jvp(activation: Activation, primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    # One slope everywhere: JAX's derivative of the formula above would be 1/2 at the corner of relu.
    return activated(activation, *primals), scaled_by_slope(activation, *primals, *tangents)


def scaled_by_slope(activation: Activation, gate: jax.Array, grad: jax.Array) -> jax.Array:
    """Multiplies `grad` by the activation's derivative at `gate`, in the dtype of `grad`.

    For relu, the gate may be any array that is positive exactly where the activation passes, or a mask. Where relu and
    clipped_relu stop a gradient they do not multiply it by zero, so NaN in it disappears.
    """
    mode, coef, _ = activation
    if mode == "identity":
        return grad
    if mode == "relu":
        return jnp.where(gate if gate.dtype == jnp.bool_ else gate > 0, grad, 0)
    u = gate.astype(grad.dtype)
    if mode == "clipped_relu":
        return jnp.where((u > 0) & (u < coef), grad, 0)
    if mode == "elu":
        # Where u is positive the other branch must not overflow: its derivative would be NaN.
        return grad * jnp.where(u > 0, 1, coef * jnp.exp(jnp.where(u > 0, 0, u)))
    if mode == "tanh":
        return grad * (1 - jnp.square(jnp.tanh(u)))
    if mode == "sigmoid":
        return grad * jax.nn.sigmoid(u) * jax.nn.sigmoid(-u)
    scaled = _times(coef, u)
    s, rest = jax.nn.sigmoid(scaled), jax.nn.sigmoid(-scaled)
    # Where one of the two is 0, u may be infinite.
    return grad * (s + jnp.where(s * rest == 0, 0, scaled) * s * rest)


def _times(factor: float, u: jax.Array) -> jax.Array:
    """Multiplies u by a factor; a factor of 0 gives 0 even if u is infinite."""
    return factor * u if factor else jnp.zeros_like(u)


def scaled_by_slope_of_result(activation: Activation, y: jax.Array, grad: jax.Array) -> jax.Array:
    """Multiplies `grad` by the derivative of sigmoid, relu, tanh or elu, where the activation's result is y."""
    if activation.mode == "relu":
        return scaled_by_slope(activation, y, grad)
    y = y.astype(grad.dtype)
    if activation.mode == "elu":
        return grad * jnp.where(y > 0, 1, y + activation.coef)
    return grad * (1 - jnp.square(y) if activation.mode == "tanh" else y * (1 - y))
