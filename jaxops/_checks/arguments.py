"""Checks of arguments: operands, which operators accept as arrays, and attributes; and the errors that they raise.

Accepted as arrays are JAX arrays (traced ones too), NumPy arrays, numbers, nested lists and tuples of numbers, and
objects with `__jax_array__`. Tensors of other frameworks are refused, because JAX would silently copy them through the
host, and so are views that make 2**31 elements or more out of a few, because JAX would write all of them to memory.

Every check of an attribute returns the plain Python value, or raises BadParamError. A bool is never a number.
"""

import math
from collections.abc import Mapping, Sequence
from numbers import Integral, Real
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lowering.describe import first_line, is_like_array, one_of, show
from lowering.errors import NotSupportedError as NotSupportedError
from lowering.errors import OperatorError as OperatorError
from lowering.pytrees import flattening_fault

PARAM_NULLPTR = 161001
PARAM_INVALID = 161002
BAD_PARAM = "MCDNN_STATUS_BAD_PARAM"
NOT_SUPPORTED = "MCDNN_STATUS_NOT_SUPPORTED"
INT32_MAX = 2**31 - 1
_FLOAT32_MAX = float(np.finfo(np.float32).max)
_FLOAT32_TINY = float(np.finfo(np.float32).tiny)
_MAX_RANK = 64  # of NumPy; lists may contain themselves
_TOO_MANY = 2**31  # elements of a view that repeats a few of them, which JAX would all write to memory
_RAW_KEY_WORDS = (2, 4)  # of threefry2x32; of rbg and unsafe_rbg
_SCALES = jnp.dtype(jnp.float8_e8m0fnu)  # powers of two alone, for blocks of numbers in other dtypes
_NUMBERS = (bool, int, float, complex)
_NUMPY = (np.ndarray, np.generic)


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


def as_array(operator: str, argument: str, value: Any, *, status: int | str = PARAM_INVALID) -> jax.Array:
    """Returns a required operand as a JAX array; raises BadParamError if it is None or not an array."""
    array = value if isinstance(value, jax.Array) else _converted(operator, argument, value, status)
    if array.dtype == _SCALES:
        raise BadParamError(f"{operator}: {argument} must have a dtype that holds 0; got {show(array)}", status)
    return array


def _converted(operator: str, argument: str, value: Any, status: int | str) -> jax.Array:
    require_present(operator, {argument: value}, status=status)
    if not _may_be_array(value):
        raise _refusal(operator, argument, value, status)
    _check_integers(operator, argument, value, status)
    try:
        with np.errstate(over="raise"):
            if isinstance(value, float | complex):  # JAX would cast them only where they are used
                np.asarray(value, jax.dtypes.canonicalize_dtype(type(value)))
            array = jnp.asarray(value)
    except FloatingPointError:
        rule = f"hold numbers that fit {jax.dtypes.canonicalize_dtype(float)}, as jax_enable_x64 is off"
        raise BadParamError(f"{operator}: {argument} must {rule}; got {show(value)}", status) from None
    except (TypeError, ValueError, OverflowError):  # ragged lists, and numbers that have no dtype in JAX
        raise _refusal(operator, argument, value, status) from None
    except Exception as error:
        if not hasattr(value, "__jax_array__"):
            raise
        shown = f"one whose __jax_array__ raises {first_line(error)}"
        raise BadParamError(f"{operator}: {argument} must be an array; got {shown}", status) from error
    # JAX takes arrays of `float0`, which hold nothing.
    if not any(jnp.issubdtype(array.dtype, kind) for kind in (np.number, np.bool_, jax.dtypes.extended)):
        raise _refusal(operator, argument, value, status)
    return array


def as_optional(operator: str, argument: str, value: Any, *, status: int | str = PARAM_INVALID) -> jax.Array | None:
    """Calls `as_array` unless the operand is None."""
    return None if value is None else as_array(operator, argument, value, status=status)


def as_arrays(operator: str, operands: Mapping[str, Any], *, status: int | str = PARAM_INVALID) -> list[jax.Array]:
    """Calls `as_array` for several required operands by name; first checks that all are given."""
    require_present(operator, operands, status=status)
    return [as_array(operator, argument, value, status=status) for argument, value in operands.items()]


def require_tree(operator: str, argument: str, tree: Any, *, status: int | str = PARAM_INVALID) -> None:
    """Refuses what JAX cannot flatten as a pytree."""
    fault = flattening_fault(tree)
    if fault is not None:
        raise BadParamError(f"{operator}: {argument} must be a pytree; got {fault}", status)


def as_shape(
    operator: str, argument: str, value: Any, *, status: int | str = PARAM_INVALID
) -> jax.ShapeDtypeStruct | jax.core.ShapedArray:
    """Returns the shape and dtype of an operand that must have these but need not have values."""
    if isinstance(value, jax.ShapeDtypeStruct | jax.core.ShapedArray):
        return value
    if not hasattr(value, "shape"):
        raise _refusal(operator, argument, value, status)
    array = as_array(operator, argument, value, status=status)
    return jax.ShapeDtypeStruct(array.shape, array.dtype)


def as_key(operator: str, argument: str, value: Any, *, status: int | str = PARAM_INVALID) -> jax.Array:
    """Returns the uint32 words of a single `jax.random` key, typed or raw."""
    key = as_array(operator, argument, value, status=status)
    is_typed = jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    data = jax.random.key_data(key) if is_typed else key
    is_key = data.dtype == jnp.uint32 and data.ndim == 1
    is_key = is_key and (data.size >= 2 if is_typed else data.size in _RAW_KEY_WORDS)
    require(is_key, operator, argument, "be one key of jax.random, such as jax.random.key(0)", key, status=status)
    return data


def _may_be_array(value: Any, depth: int = 0) -> bool:
    """Tells whether a value is an array, a number, or a list of these. JAX would read strings in lists as dtypes."""
    if isinstance(value, list | tuple):
        # A named tuple is a state or a result, even if JAX could stack its fields.
        is_list = depth < _MAX_RANK and not hasattr(value, "_fields")
        return is_list and all(_may_be_array(each, depth + 1) for each in value)
    if isinstance(value, _NUMPY):
        if value.size >= _TOO_MANY and 0 in value.strides:
            return False
        return value.dtype.kind not in "OSUMm" and not isinstance(value, np.ma.MaskedArray)
    return isinstance(value, (jax.Array, *_NUMBERS)) or hasattr(value, "__jax_array__")


def _refusal(operator: str, argument: str, value: Any, status: int | str) -> BadParamError:
    shown, kind = show(value), type(value).__qualname__
    if isinstance(value, np.ndarray) and value.size >= _TOO_MANY:
        shown = f"{shown}, a view that repeats its elements"
    elif not isinstance(value, np.ndarray) and is_like_array(value):
        shown = f"{kind} {shown}"  # shape and dtype alone would read like an accepted array
    return BadParamError(f"{operator}: {argument} must be an array of JAX or NumPy, or numbers; got {shown}", status)


def _check_integers(operator: str, argument: str, value: Any, status: int | str) -> None:
    """Refuses Python and NumPy integers that JAX would truncate to 32 bits, unless they fit."""
    if not isinstance(value, (list, tuple, *_NUMBERS, *_NUMPY)):
        return
    try:
        host = np.asarray(value)
    except (TypeError, ValueError):  # a list with traced numbers in it, or a ragged one
        return
    if host.dtype.kind not in "iu" or host.size == 0:
        return
    limits = jnp.iinfo(jax.dtypes.canonicalize_dtype(host.dtype))
    for extreme in (int(host.min()), int(host.max())):
        rule = f"hold integers that fit {limits.dtype}, as jax_enable_x64 is off"
        require(limits.min <= extreme <= limits.max, operator, argument, rule, extreme, status=status)


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
    rule = rule if traced or in_range else static_rule(rule, value)
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
    require(fits, operator, argument, rule if traced or fits else static_rule(rule, value), value, status=status)
    return int(value)


def require_bool(
    operator: str, argument: str, value: Any, *, or_int: bool = False, status: int | str = PARAM_INVALID
) -> bool:
    """Returns a Python or NumPy bool as a bool; with `or_int` also takes 0 or 1, as in C calls."""
    fits = is_bool(value) or (or_int and is_integer(value) and value in (0, 1))
    require(fits, operator, argument, static_rule("be a bool", value), value, status=status)
    return bool(value)


def static_rule(rule: str, value: Any) -> str:
    """Adds to the rule of an option, if it was given arrays, that it takes none: traced ones have no value yet."""
    parts = value if isinstance(value, tuple | list) else (value,)
    if any(isinstance(part, jax.core.Tracer) for part in parts):
        return f"{rule}, known before the function is traced"
    return f"{rule}, not an array" if any(isinstance(part, jax.Array | np.ndarray) for part in parts) else rule


def require_choice(
    operator: str, argument: str, value: Any, choices: Sequence[str], *, status: int | str = PARAM_INVALID
) -> str:
    """Returns a string that must be one of `choices`."""
    if not (isinstance(value, str) and value in choices):
        raise BadParamError(f"{operator}: {argument} must be {one_of(choices, value)}", status)
    return str(value)


def require_axis_names(
    operator: str, argument: str, value: Any, *, status: int | str = PARAM_INVALID
) -> tuple[str, ...]:
    """Returns the names in a mesh axis or a tuple of different ones; such axes need not exist."""
    names = value if isinstance(value, tuple) else (value,)
    are_names = all(isinstance(name, str) for name in names) and len({*names}) == len(names)
    require(are_names, operator, argument, "be a mesh axis or a tuple of them", value, status=status)
    return names


def is_floating(value: Any) -> bool:
    """Tells whether an array is floating point."""
    return bool(jnp.issubdtype(value.dtype, jnp.floating))


def require_floating_dtype(operator: str, argument: str, value: Any, *, status: int | str = PARAM_INVALID) -> np.dtype:
    """Returns a floating-point dtype that JAX supports, from a dtype, a type or a name."""
    dtype = _as_dtype(value)
    # NumPy has wider dtypes than JAX, and dtypes with their bytes reversed.
    fits = dtype is not None and dtype.itemsize <= 8 and dtype.isnative and bool(jnp.issubdtype(dtype, jnp.floating))
    require(fits, operator, argument, "be a floating dtype, such as bfloat16 or float32", value, status=status)
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
