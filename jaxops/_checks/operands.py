"""Operands that operators accept as arrays, and the refusal of everything else.

Accepted are JAX arrays (traced ones too), NumPy arrays, numbers, nested lists and tuples of numbers, and objects with
`__jax_array__`. Tensors of other frameworks are refused, because JAX would silently copy them through the host, and so
are views that make 2**31 elements or more out of a few, because JAX would write all of them to memory.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxops._checks.errors import PARAM_INVALID, BadParamError, require, require_present
from lowering.describe import first_line, is_like_array, show
from lowering.pytrees import flattening_fault

_MAX_RANK = 64  # of NumPy; lists may contain themselves
_TOO_MANY = 2**31  # elements of a view that repeats a few of them, which JAX would all write to memory
_RAW_KEY_WORDS = (2, 4)  # of threefry2x32; of rbg and unsafe_rbg
_SCALES = jnp.dtype(jnp.float8_e8m0fnu)  # powers of two alone, for blocks of numbers in other dtypes
_NUMBERS = (bool, int, float, complex)
_NUMPY = (np.ndarray, np.generic)


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
    require(is_key, operator, argument, "be one key of jax.random, typed or raw", key, status=status)
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
