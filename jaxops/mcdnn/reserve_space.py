"""Reserve space: what a forward call stores for its backward call, one bit for each element of its data.

Bit i % 8 of byte i // 8 belongs to element i in row-major order.
"""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jaxops._primitive import sharding


def size_bytes(elements: int) -> int:
    """Returns the bytes that one bit for each element takes, in words of 32 bits."""
    return -(-elements // 32) * 4


def from_words(words: jax.Array) -> jax.Array:
    """Packs words of bits into reserve space, the least significant byte first."""
    shifts = jnp.arange(0, 32, 8, dtype=jnp.uint32)
    flat = sharding.reshaped(words, (words.size,))
    return sharding.reshaped((flat[:, None] >> shifts[None]).astype(jnp.uint8), (4 * words.size,))


def to_words(reserve_space: jax.Array, elements: int) -> jax.Array:
    """Unpacks the words of bits of the first so many elements."""
    words = sharding.reshaped(_beginning(reserve_space, elements), (size_bytes(elements) // 4, 4))
    first, second, third, fourth = jnp.unstack(words.astype(jnp.uint32), axis=-1)
    return first | second << jnp.uint32(8) | third << jnp.uint32(16) | fourth << jnp.uint32(24)


def packed(mask: jax.Array) -> jax.Array:
    """Packs a mask into uint8 reserve space; the bits after the last element are 0."""
    flat = sharding.in_pieces_along_first(sharding.reshaped(mask, (mask.size,)), 32)
    bits = jnp.packbits(flat, bitorder="little")
    return jnp.pad(bits, (0, size_bytes(mask.size) - bits.size))


def unpacked(reserve_space: jax.Array, shape: Sequence[int]) -> jax.Array:
    """Unpacks the mask of this shape at the beginning of reserve space."""
    elements = math.prod(shape)
    bits = jnp.unpackbits(_beginning(reserve_space, elements), count=elements, bitorder="little").astype(bool)
    return sharding.reshaped(bits, shape)


def _beginning(reserve_space: jax.Array, elements: int) -> jax.Array:
    size = size_bytes(elements)
    return reserve_space if reserve_space.size == size else sharding.whole_along_first(reserve_space)[:size]
