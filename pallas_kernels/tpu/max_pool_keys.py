"""Integers in whose order the kernels of max pooling compare elements."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

LEAST = jnp.iinfo(jnp.int32).min  # the key of padding, below the key of any element


def keys(x: jax.Array, propagate_nan: bool) -> jax.Array:
    """Integers in the order of x, equal for equal numbers; NaN is the largest if propagated, else the smallest.

    Comparing them settles ties and NaN at once, and padding has a key of its own, below that of -inf.
    """
    x = x.astype(jnp.float32)
    bits = lax.bitcast_convert_type(x, jnp.int32)
    # Read as an integer, a negative float is the least integer plus its magnitude; so -0 has the key of 0.
    ordered = jnp.where(bits < 0, LEAST - bits, bits)
    return jnp.where(jnp.isnan(x), jnp.iinfo(jnp.int32).max if propagate_nan else LEAST + 1, ordered)


def shares(found: Sequence[jax.Array], grad: jax.Array) -> list[jax.Array]:
    """The gradient for the first of the elements with the greatest key, and zeros for the others."""
    best, wins = found[0], []
    for key in found[1:]:
        wins.append(key > best)
        best = jnp.where(wins[-1], key, best)
    shares, rest = [], grad
    for is_greater in reversed(wins):
        shares.append(jnp.where(is_greater, rest, 0.0))
        rest = jnp.where(is_greater, 0.0, rest)
    return [rest, *reversed(shares)]
