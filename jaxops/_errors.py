"""How a call is refused: one sentence with operator, argument, rule and value, and the documented status."""

from numbers import Integral, Real
from typing import Any

import jax.numpy as jnp
import numpy as np

from lowering.errors import NotSupportedError, OperatorError

__all__ = [
    "BAD_PARAM",
    "NOT_SUPPORTED",
    "BadParamError",
    "NotSupportedError",
    "OperatorError",
    "VersionMismatchError",
    "require",
    "require_bool",
    "require_number",
    "require_present",
    "show",
]

PARAM_NULLPTR = 161001
PARAM_INVALID = 161002
BAD_PARAM = "MCDNN_STATUS_BAD_PARAM"
NOT_SUPPORTED = "MCDNN_STATUS_NOT_SUPPORTED"


class BadParamError(OperatorError):
    """An argument breaks a documented rule of shape, dtype or value."""


class VersionMismatchError(OperatorError):
    """Two parts that must have one version do not."""


def require(
    condition: bool,
    operator: str,
    argument: str,
    rule: str,
    got: object,
    *,
    status: int | str = PARAM_INVALID,
    error: type[OperatorError] = BadParamError,
) -> None:
    """Raises `error` with `"<operator>: <argument> must <rule>; got <got>"` unless the condition holds."""
    if not condition:
        raise error(f"{operator}: {argument} must {rule}; got {show(got)}", status)


def require_present(operator: str, **arguments: object) -> None:
    """Raises BadParamError with status 161001 for the first required argument that is None."""
    for name, value in arguments.items():
        require(value is not None, operator, name, "be given", None, status=PARAM_NULLPTR)


def require_number(operator: str, argument: str, value: Any) -> None:
    """Raises BadParamError unless the value is a real number: of Python, of NumPy, or a 0-d array, traced or not."""
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    if not is_number and hasattr(value, "dtype") and hasattr(value, "shape"):
        is_number = value.shape == () and jnp.issubdtype(value.dtype, jnp.number)
    require(is_number, operator, argument, "be a real number or a 0-d array of one", value)


def require_bool(operator: str, argument: str, value: Any) -> None:
    """Raises BadParamError unless the value is a bool of Python or NumPy, or 0 or 1 as C calls have it."""
    is_bool = isinstance(value, bool | np.bool_) or (isinstance(value, Integral) and value in (0, 1))
    require(is_bool, operator, argument, "be a bool", value)


def show(value: Any) -> str:
    """Shape and dtype of anything like an array (a tracer included), the repr of anything else."""
    if hasattr(value, "shape") and hasattr(value, "dtype") and not isinstance(value, np.generic):
        return f"{value.dtype}{list(value.shape)}"
    return repr(value)
