"""Refusals: one sentence with operator, argument, rule and value, and the documented status."""

import re
from collections.abc import Mapping
from typing import Any

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
    "require_present",
    "show",
]

PARAM_NULLPTR = 161001
PARAM_INVALID = 161002
BAD_PARAM = "MCDNN_STATUS_BAD_PARAM"
NOT_SUPPORTED = "MCDNN_STATUS_NOT_SUPPORTED"
_MAX_SHOWN = 160  # characters of a value in a message
_MAX_SHOWN_BITS = 256


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


def is_like_array(value: Any) -> bool:
    """Whether a value has a shape and a dtype. Modules and mocks have other things under these names."""
    try:
        return isinstance(value.shape, tuple) and hasattr(value, "dtype") and not isinstance(value, np.generic | type)
    except Exception:  # a user's attribute may raise anything
        return False


def show(value: Any) -> str:
    """The shape and dtype of anything like an array, even a tracer; the one-line repr of anything else."""
    if is_like_array(value):
        return f"{value.dtype}{list(value.shape)}"
    if isinstance(value, int) and value.bit_length() > _MAX_SHOWN_BITS:
        return f"an integer of {value.bit_length()} bits"
    # An object's address in memory helps nobody.
    text = _show_elements(value) or re.sub(r" at 0x[0-9a-f]+", "", _written(value))
    text = " ".join(text.split())
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."


def _written(value: Any) -> str:
    """The repr. If it fails, as for objects that are only half built, the type: the refusal matters more."""
    try:
        return repr(value)
    except Exception:
        return f"a value of type {type(value).__qualname__}"


def _show_elements(value: Any) -> str | None:
    """A container shown element by element, because an element may be a tracer; None for anything else."""
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        fields = zip(value._fields, value, strict=True)
        return f"{type(value).__name__}({', '.join(f'{name}={show(each)}' for name, each in fields)})"
    if isinstance(value, tuple):
        return f"({', '.join(map(show, value[:_MAX_SHOWN]))}{',' * (len(value) == 1)})"
    if isinstance(value, list):
        return f"[{', '.join(map(show, value[:_MAX_SHOWN]))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key!r}: {show(each)}' for key, each in value.items())}}}"
    return None
