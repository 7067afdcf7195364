"""The public function `activation`."""

import jax

from jaxops._checks.mcdnn import as_array, require, require_choice, require_real
from jaxops.activation.modes import DEFAULT_COEFFICIENTS, MODES, Activation
from jaxops.activation.operator import ACTIVATION, check


def activation(x: jax.Array, mode: str, *, coef: float | None = None, swish_beta: float = 1.0) -> jax.Array:
    """Applies an activation function to each element.

        "sigmoid"       1 / (1 + exp(-x))
        "relu"          max(x, 0)
        "tanh"          tanh(x)
        "clipped_relu"  min(max(x, 0), coef)
        "elu"           x if x > 0 else coef * (exp(x) - 1)
        "identity"      x
        "swish"         x / (1 + exp(-swish_beta * x))

    Args:
      x: floating point, of any shape.
      mode: one of the above.
      coef: the ceiling of "clipped_relu", which must be given, or the factor of "elu", where None means 1. Other modes
        ignore it; in particular, "relu" is never clipped.
      swish_beta: the factor in "swish". Other modes ignore it.

    Returns:
      An array with the shape and dtype of x.

    Raises:
      BadParamError: if x is not floating point, the mode is unknown, or a coefficient is missing or not a number.

    Numerics:
      Computed in float32 (float64 for float64) and rounded once. Nothing overflows on the way. Infinities give the
      values of the limits, and NaN gives NaN.

      The gradient keeps one array: the result for "sigmoid", "relu", "tanh" and "elu", x for "clipped_relu" and
      "swish", nothing for "identity". An "elu" with a negative factor keeps x, because its result does not tell the
      sign of x.

      relu'(0) = 0 and elu'(0) = coef; "clipped_relu" has slope 0 at both corners. Where "relu" or "clipped_relu" has
      slope 0, including where x is NaN, no gradient passes, not even NaN.

      Derivatives of all modes and orders exist. There is no kernel: XLA fuses elementwise functions into whatever
      computes or reads them, and a kernel would prevent that.

    Example:
      >>> jaxops.activation(jnp.array([-1.0, 2.0, 9.0]), "clipped_relu", coef=6.0)
      Array([0., 2., 6.], dtype=float32)

    Source: mcDNN `mcdnnActivationForward` and `mcdnnActivationBackward`; PyTorch `torch.nn.functional`.
    """
    name = "activation"
    x = as_array(name, "x", x)
    mode = require_choice(name, "mode", mode, MODES)
    if coef is None:
        coef = DEFAULT_COEFFICIENTS.get(mode, 0.0)
        require(coef is not None, name, "coef", f"be given for {mode}", None)
    coef = require_real(name, "coef", coef)
    swish_beta = require_real(name, "swish_beta", swish_beta)
    coef = swish_beta if mode == "swish" else coef
    return apply(x, Activation(mode, coef if mode in DEFAULT_COEFFICIENTS else 0.0))


def apply(x: jax.Array, activation: Activation) -> jax.Array:
    """Applies an activation by binding its operator."""
    if activation.mode == "identity":
        check(x, activation=activation)
        return x
    (y,) = ACTIVATION(x, activation=activation)
    return y
