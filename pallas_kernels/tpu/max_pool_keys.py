"""Integers in whose order the kernels of max pooling compare elements."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

LEAST = jnp.iinfo(jnp.int32).min  # the key of padding, below the key of any element
_BITS_OF_INFINITY, _BITS_OF_NAN = 0x7F80, 0x7FC0  # in bfloat16


def least_of(dtype: jnp.dtype) -> int:
    """Returns the key of padding among keys of this dtype."""
    return int(jnp.iinfo(dtype).min)


def keys(x: jax.Array, propagate_nan: bool, dtype: jnp.dtype = jnp.int32) -> jax.Array:
    """Returns integers in the order of x, equal for equal numbers; NaN is the largest if propagated, else the smallest.

    Comparing them settles ties and NaN at once, and padding has a key of its own, below that of -inf. bfloat16 may have
    keys of 16 bits.
    """
    x = x if jnp.dtype(dtype).itemsize == x.dtype.itemsize else x.astype(jnp.float32)
    bits, info = lax.bitcast_convert_type(x, dtype), jnp.iinfo(dtype)
    # Read as an integer, a negative float is the least integer plus its magnitude; so -0 has the key of 0.
    ordered = jnp.where(bits < 0, jnp.asarray(info.min, dtype) - bits, bits)
    if info.bits == 32:
        return jnp.where(jnp.isnan(x), info.max if propagate_nan else info.min + 1, ordered)
    nan = jnp.asarray(_BITS_OF_NAN if propagate_nan else info.min + 1, dtype)
    # Mosaic splits registers for masks of bfloat16 comparisons; those of integers it uses as they are.
    magnitude = bits & jnp.asarray(info.max, dtype)
    return jnp.where(magnitude > jnp.asarray(_BITS_OF_INFINITY, dtype), nan, ordered)


def greater(key: jax.Array, best: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the greater of two keys, and whether it is the first and not equal to the second."""
    is_greater = key > best
    if key.dtype == jnp.int32:
        return jnp.where(is_greater, key, best), is_greater
    # Mosaic would turn a selection of the integers it compared into a maximum, and has none of 16 bits. A TPU selects
    # numbers bit by bit; an interpreter changes those that would be NaN, which are keys of negative subnormal numbers.
    chosen, other = (lax.bitcast_convert_type(each, jnp.bfloat16) for each in (key, best))
    return lax.bitcast_convert_type(jnp.where(is_greater, chosen, other), key.dtype), is_greater


def shares(found: Sequence[jax.Array], grad: jax.Array) -> list[jax.Array]:
    """Returns the gradient for the first of the elements with the greatest key, and zeros for the others."""
    best, wins = found[0], []
    for key in found[1:]:
        best, is_greater = greater(key, best)
        wins.append(is_greater)
    shares, rest, zero = [], grad, jnp.zeros((), grad.dtype)
    for is_greater in reversed(wins):
        shares.append(jnp.where(is_greater, rest, zero))
        rest = jnp.where(is_greater, zero, rest)
    return [rest, *reversed(shares)]
