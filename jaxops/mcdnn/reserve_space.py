"""Reserve space: what a forward call keeps for its backward call, a bit for each element of its data.

Bit i % 8 of byte i // 8 is element i, in the order in which the data lies in memory.
"""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp


def size_bytes(elements: int) -> int:
    """The bytes that a bit for each element takes, in words of 32."""
    return -(-elements // 32) * 4


def packed(mask: jax.Array) -> jax.Array:
    """A mask as uint8 reserve space; the bits after the last element are 0."""
    bits = jnp.packbits(mask.reshape(mask.size), bitorder="little")
    return jnp.pad(bits, (0, size_bytes(mask.size) - bits.size))


def unpacked(reserve_space: jax.Array, shape: Sequence[int]) -> jax.Array:
    """The mask, of this shape, that reserve space begins with."""
    elements = math.prod(shape)
    taken = reserve_space[: size_bytes(elements)]
    return jnp.unpackbits(taken, count=elements, bitorder="little").astype(bool).reshape(shape)
