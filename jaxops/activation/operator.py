"""The operators of the activation and of its documented gradient, which reads the result or the input, by mode."""

from collections.abc import Sequence
from typing import Any

import jax

from jaxops._checks.dtypes import accumulation_dtype, check_floating
from jaxops._checks.mcdnn import require
from jaxops._primitive.derivative import Active, Arrays, Derivative
from jaxops._primitive.operator import Operator
from jaxops.activation.modes import (
    Activation,
    activated,
    scaled_by_slope,
    scaled_by_slope_of_result,
)

_READ_RESULT = ("sigmoid", "relu", "tanh", "elu")


def reads_result(activation: Activation) -> bool:
    """Tells whether the documented gradient reads the activation's result instead of its input."""
    return activation.mode in _READ_RESULT


def check(x: Any, *, activation: Activation) -> None:
    """Refuses operands that are not floating point."""
    check_floating("activation", x=x)


def _check_backward(gate: Any, grad: Any, *, activation: Activation, of_result: bool) -> None:
    name = "activation_backward"
    check_floating(name, gate=gate, grad=grad)
    require(gate.shape == grad.shape, name, "gate", f"have the shape of grad, {grad.shape}", gate)


def _forward(x: jax.Array, *, activation: Activation) -> Arrays:
    return (activated(activation, x.astype(accumulation_dtype(x.dtype))).astype(x.dtype),)


def _backward(gate: jax.Array, grad: jax.Array, *, activation: Activation, of_result: bool) -> Arrays:
    """Multiplies `grad` by the slope where the activation's result or input is `gate`, in the dtype of `grad`."""
    scaled = scaled_by_slope_of_result if of_result else scaled_by_slope
    return (scaled(activation, gate, grad.astype(accumulation_dtype(grad.dtype))).astype(grad.dtype),)


# The Jacobian is diagonal, so tangents and cotangents are scaled in the same way.


def _of_result(activation: Activation) -> bool:
    # An elu with a negative factor is positive on both sides.
    return reads_result(activation) and not (activation.mode == "elu" and activation.coef < 0)


def _linearize(operands: Sequence[jax.Array], active: Active, *, activation: Activation) -> tuple[Arrays, Arrays]:
    results = ACTIVATION(*operands, activation=activation)
    return results, results if _of_result(activation) else tuple(operands)


def _scaled(residuals: Arrays, grads: Arrays, active: Active, *, activation: Activation) -> Arrays:
    return ACTIVATION_BACKWARD(*residuals, *grads, activation=activation, of_result=_of_result(activation))


_FUSED = "XLA fuses it with what surrounds it"
ACTIVATION = Operator(
    "activation",
    "... -> ...",
    check,
    _forward,
    Derivative(_scaled, _scaled, _linearize, residuals="..."),
    no_kernel=_FUSED,
)
ACTIVATION_BACKWARD = Operator("activation_backward", "..., ... -> ...", _check_backward, _backward, no_kernel=_FUSED)
