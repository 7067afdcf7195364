"""Checks of attributes: numbers, integers, bools, choices and mesh axes.

Every check returns the plain Python value, or raises BadParamError. A bool is never a number.
"""

import math
from collections.abc import Sequence
from numbers import Integral, Real
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxops._checks.errors import PARAM_INVALID, require

INT32_MAX = 2**31 - 1
_FLOAT32_MAX = float(np.finfo(np.float32).max)
_FLOAT32_TINY = float(np.finfo(np.float32).tiny)


def is_integer(value: Any) -> bool:
    """Tells whether a value is a Python or NumPy integer."""
    # NumPy's durations count as integers.
    return isinstance(value, Integral) and not isinstance(value, bool | np.timedelta64)


def is_bool(value: Any) -> bool:
    """Tells whether a value is a Python or NumPy bool."""
    return isinstance(value, bool | np.bool_)


def require_real(
    operator: str,
    argument: str,
    value: Any,
    rule: str = "be a finite number that float32 can hold",
    *,
    least: float = -math.inf,
    most: float = math.inf,
    above: float | None = None,
    below: float | None = None,
    traced: bool = False,
    status: int | str = PARAM_INVALID,
) -> Any:
    """Returns a finite Python or NumPy number as a float.

    Args:
      operator: the operator, for the message.
      argument: the argument, for the message.
      value: the value to check.
      rule: the rule, for the message. The next four arguments check what it says about the range.
      least: the smallest number accepted.
      most: the largest number accepted.
      above: a number that the value must exceed.
      below: a number that the value must stay below.
      traced: whether to accept a 0-d JAX array, traced or not. It is returned as it is, and its value is not checked,
        because reading it would wait for the device.
      status: the status of the error.
    """
    if traced and isinstance(value, jax.Array) and value.shape == () and _is_real(value.dtype):
        return value
    number = _as_float(value, traced)
    in_range = number is not None and abs(number) <= _FLOAT32_MAX and least <= number <= most
    if number is not None and above is not None:
        # A difference that float32 flushes to zero does not count.
        in_range = in_range and number - above >= _FLOAT32_TINY
    if number is not None and below is not None:
        in_range = in_range and number < below
    require(in_range, operator, argument, rule, value, status=status)
    return number


def require_integer(
    operator: str,
    argument: str,
    value: Any,
    rule: str = "be an integer",
    *,
    least: float = -math.inf,
    most: float = math.inf,
    traced: bool = False,
    status: int | str = PARAM_INVALID,
) -> Any:
    """Returns a Python or NumPy integer from `least` to `most` as an int.

    With `traced` it may also be a 0-d array; a traced one is returned as it is.
    """
    if traced and (_is_scalar(value) or (isinstance(value, jax.Array) and value.shape == ())):
        is_id = bool(jnp.issubdtype(value.dtype, jnp.integer))
        require(is_id, operator, argument, rule, value, status=status)
        if isinstance(value, jax.core.Tracer):
            return value
        value = int(value)
    fits = is_integer(value) and least <= int(value) <= most
    require(fits, operator, argument, rule, value, status=status)
    return int(value)


def require_bool(
    operator: str, argument: str, value: Any, *, or_int: bool = False, status: int | str = PARAM_INVALID
) -> bool:
    """Returns a Python or NumPy bool as a bool; with `or_int` also takes 0 or 1, as in C calls."""
    fits = is_bool(value) or (or_int and is_integer(value) and value in (0, 1))
    require(fits, operator, argument, "be a bool", value, status=status)
    return bool(value)


def require_choice(
    operator: str, argument: str, value: Any, choices: Sequence[str], *, status: int | str = PARAM_INVALID
) -> str:
    """Returns a string that must be one of `choices`."""
    fits = isinstance(value, str) and value in choices
    require(fits, operator, argument, f"be one of {', '.join(choices)}", value, status=status)
    return str(value)


def require_axis_names(
    operator: str, argument: str, value: Any, *, status: int | str = PARAM_INVALID
) -> tuple[str, ...]:
    """Returns the names in a mesh axis or a tuple of different ones; such axes need not exist."""
    names = value if isinstance(value, tuple) else (value,)
    are_names = all(isinstance(name, str) for name in names) and len({*names}) == len(names)
    require(are_names, operator, argument, "be a mesh axis or a tuple of them", value, status=status)
    return names


def require_floating_dtype(operator: str, argument: str, value: Any, *, status: int | str = PARAM_INVALID) -> np.dtype:
    """Returns a floating-point dtype that JAX supports, from a dtype, a type or a name."""
    dtype = _as_dtype(value)
    # NumPy has wider dtypes than JAX, and dtypes with their bytes reversed.
    fits = dtype is not None and dtype.itemsize <= 8 and dtype.isnative and bool(jnp.issubdtype(dtype, jnp.floating))
    require(fits, operator, argument, "be a floating dtype", value, status=status)
    return jnp.dtype(value)


def _as_float(value: Any, zero_rank: bool) -> float | None:
    """Returns a value as a float; None if it is not a number, or too large for one."""
    is_array = isinstance(value, np.generic) or (zero_rank and _is_scalar(value))
    is_number = _is_real(value.dtype) if is_array else isinstance(value, Real) and not isinstance(value, bool)
    try:
        return float(value) if is_number else None
    except OverflowError:
        return None


def _is_scalar(value: Any) -> bool:
    """Tells whether a value is a 0-d NumPy array with a value, which a masked one lacks."""
    return isinstance(value, np.ndarray) and value.shape == () and not isinstance(value, np.ma.MaskedArray)


def _is_real(dtype: Any) -> bool:
    is_number = jnp.issubdtype(dtype, jnp.floating) or jnp.issubdtype(dtype, jnp.integer)
    return bool(is_number) and dtype.kind != "m"


def _as_dtype(value: Any) -> np.dtype | None:
    if not isinstance(value, str | type | np.dtype):
        return None
    try:
        return jax.dtypes.canonicalize_dtype(jnp.dtype(value))
    except (TypeError, ValueError):
        return None
