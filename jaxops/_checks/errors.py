"""Refusals: one sentence with operator, argument, rule and value, and the documented status."""

from collections.abc import Mapping

from lowering.describe import show
from lowering.errors import NotSupportedError, OperatorError

__all__ = [
    "BAD_PARAM",
    "NOT_SUPPORTED",
    "BadParamError",
    "NotSupportedError",
    "OperatorError",
    "VersionMismatchError",
    "require",
    "require_present",
]

PARAM_NULLPTR = 161001
PARAM_INVALID = 161002
BAD_PARAM = "MCDNN_STATUS_BAD_PARAM"
NOT_SUPPORTED = "MCDNN_STATUS_NOT_SUPPORTED"


class BadParamError(OperatorError):
    """An argument breaks a documented rule about shape, dtype or value."""


class VersionMismatchError(OperatorError):
    """Two parts that need the same version have different ones."""


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


def require_present(operator: str, arguments: Mapping[str, object], *, status: int | str = PARAM_INVALID) -> None:
    """Raises BadParamError for the first required argument that is None; CANN has a status of its own for that."""
    missing = PARAM_NULLPTR if status == PARAM_INVALID else status
    for name, value in arguments.items():
        require(value is not None, operator, name, "be given", None, status=missing)
