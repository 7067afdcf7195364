"""The activations that batch normalization applies before its result is rounded, and their slopes."""

import math
from numbers import Real
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxops._errors import BAD_PARAM, require

MODES = ("sigmoid", "relu", "tanh", "clipped_relu", "elu", "identity", "swish")
# Where a mode has no default, its coefficient must be given; modes that are not here have none.
_DEFAULT_COEFFICIENTS = {"clipped_relu": None, "elu": 1.0, "swish": 1.0}


class FusedActivation(NamedTuple):
    """An activation, as an attribute of operators.

    Attributes:
      mode: one of MODES.
      coef: the ceiling of clipped_relu, the factor of elu, the beta of swish; of no effect elsewhere.
      propagate_nan: whether relu and clipped_relu give NaN for NaN, or 0.
    """

    mode: str
    coef: float = 0.0
    propagate_nan: bool = True


IDENTITY = FusedActivation("identity")
RELU = FusedActivation("relu")


def requested(operator: str, activation: Any) -> FusedActivation:
    """The activation that a user asks for by a mode or by a mode and its coefficient."""
    mode: Any = activation
    coef: Any = None
    if isinstance(activation, tuple) and len(activation) == 2:
        mode, coef = activation
    known = isinstance(mode, str) and mode in MODES
    require(known, operator, "activation", f"be one of {', '.join(MODES)}", activation, status=BAD_PARAM)
    if coef is None:
        coef = _DEFAULT_COEFFICIENTS.get(mode, 0.0)
    is_number = isinstance(coef, Real) and not isinstance(coef, bool) and not math.isnan(coef)
    require(is_number, operator, "activation", "have a number as its coefficient", activation, status=BAD_PARAM)
    return FusedActivation(mode, float(coef))


def activated(activation: FusedActivation, u: jax.Array) -> jax.Array:
    """The activation of u."""
    mode, coef, propagate_nan = activation
    if mode in ("relu", "clipped_relu"):
        y = jnp.maximum(u, 0) if propagate_nan else jnp.where(u > 0, u, 0)
        return y if mode == "relu" else jnp.minimum(y, coef)
    if mode == "elu":
        # Where u is positive the other branch must not overflow: its derivative would be NaN.
        return jnp.where(u > 0, u, coef * jnp.expm1(jnp.minimum(u, 0)))
    if mode == "swish":
        return u * jax.nn.sigmoid(coef * u)
    return {"sigmoid": jax.nn.sigmoid, "tanh": jnp.tanh, "identity": lambda u: u}[mode](u)


def scaled_by_slope(activation: FusedActivation, gate: jax.Array, grad: jax.Array) -> jax.Array:
    """`grad` times the activation's derivative at `gate`, of the same dtype.

    For relu the gate may be anything that is positive exactly where the activation passes, a mask too. What relu and
    clipped_relu stop is not multiplied by zero: NaN in it goes nowhere.
    """
    mode, coef, _ = activation
    if mode == "identity":
        return grad
    if mode == "relu":
        return jnp.where(gate if gate.dtype == jnp.bool_ else gate > 0, grad, 0)
    if mode == "clipped_relu":
        return jnp.where((gate > 0) & (gate < coef), grad, 0)
    u = gate.astype(grad.dtype)
    if mode == "elu":
        return grad * jnp.where(u > 0, 1, coef * jnp.exp(jnp.minimum(u, 0)))
    if mode == "tanh":
        return grad * (1 - jnp.square(jnp.tanh(u)))
    if mode == "sigmoid":
        return grad * jax.nn.sigmoid(u) * jax.nn.sigmoid(-u)
    s = jax.nn.sigmoid(coef * u)
    return grad * (s + coef * u * s * (1 - s))


def scaled_by_slope_of_result(activation: FusedActivation, y: jax.Array, grad: jax.Array) -> jax.Array:
    """`grad` times the derivative of sigmoid, tanh or elu where the activation's result is y."""
    y = y.astype(grad.dtype)
    if activation.mode == "elu":
        return grad * jnp.where(y > 0, 1, y + activation.coef)
    return grad * (1 - jnp.square(y) if activation.mode == "tanh" else y * (1 - y))
