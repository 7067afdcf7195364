"""The activation as users call it."""

import jax

from jaxops._checks.mcdnn import as_array, require, require_choice, require_real
from jaxops.activation.modes import DEFAULT_COEFFICIENTS, MODES, Activation
from jaxops.activation.operator import ACTIVATION, check


def activation(x: jax.Array, mode: str, *, coef: float | None = None, swish_beta: float = 1.0) -> jax.Array:
    """Applies a function to each element.

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
      coef: the ceiling of "clipped_relu", which must be given, or the factor of "elu", 1 if None; of no effect on the
        other modes: "relu" is never clipped.
      swish_beta: of "swish"; of no effect on the other modes.

    Returns:
      The shape and dtype of x.

    Raises:
      BadParamError: if x is not floating point, the mode is none of the above, or a coefficient is missing or no
        number.

    Numerics: computed in float32 (float64 for float64) and rounded once; nothing overflows on the way, and infinities
      have the values of the limits. NaN gives NaN. The gradient keeps one array: the result of "sigmoid", "relu",
      "tanh" and "elu", x of "clipped_relu" and "swish" (and of "elu" with a negative factor, whose result tells no
      sign), nothing for "identity". relu'(0) = 0, elu'(0) = coef, and "clipped_relu" has slope 0 at both of its
      corners; where "relu" and "clipped_relu" have slope 0, which is so for NaN as well, nothing passes, NaN included.
      All modes and orders of derivatives exist. There is no kernel: XLA fuses functions of one element into what
      computes or reads them, which a kernel would prevent.

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
    """The activation of x, as users bind it."""
    if activation.mode == "identity":
        check(x, activation=activation)
        return x
    (y,) = ACTIVATION(x, activation=activation)
    return y
