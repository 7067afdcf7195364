"""The activation that batch normalization applies before it rounds its result."""

from typing import Any

from jaxops._checks.mcdnn import require, require_real
from jaxops.activation.modes import DEFAULT_COEFFICIENTS, MODES, Activation


def requested(operator: str, activation: Any) -> Activation:
    """Returns the activation that a user names by a mode, or by a mode and its coefficient."""
    mode: Any = activation
    coef: Any = None
    if isinstance(activation, tuple) and len(activation) == 2:
        mode, coef = activation
    known = isinstance(mode, str) and mode in MODES
    require(known, operator, "activation", f"be one of {', '.join(MODES)}", activation)
    if coef is None:
        coef = DEFAULT_COEFFICIENTS.get(mode, 0.0)
    require(coef is not None, operator, "activation", "have a number as its coefficient", activation)
    rule = "have a finite number as its coefficient"
    return Activation(str(mode), require_real(operator, "activation", coef, rule))
