"""bfloat16 numbers in the halves of 32-bit words, as a TPU's registers hold them."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

HIGH_HALF = -(2**16)  # a mask of the odd rows


def words_of(x: jax.Array) -> jax.Array:
    """Returns the words that hold 16-bit values, two rows each."""
    from jax.experimental.pallas import tpu as pltpu  # here, because only lowering for a TPU needs its 0.2 s

    return pltpu.bitcast(x, jnp.int32)


def halves(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the even and the odd rows of bfloat16 numbers, which share words, in float32."""
    words = words_of(x)
    return lax.bitcast_convert_type(words << 16, jnp.float32), lax.bitcast_convert_type(words & HIGH_HALF, jnp.float32)


def joined(rows: Sequence[jax.Array]) -> jax.Array:
    """Joins float32s of bfloat16 numbers, even rows and odd ones, to words; one float32 is a word itself."""
    if len(rows) == 1:
        return rows[0]
    even, odd = (lax.bitcast_convert_type(row, jnp.int32) for row in rows)
    return lax.shift_right_logical(even, 16) | (odd & HIGH_HALF)
