"""Draws which elements dropout keeps: 32 per word of bits, from a counter-based generator in integer arithmetic.

The reference and the kernels of both dialects share this code, so all of them keep the same elements.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

WORD_BITS = 32
RESOLUTION_BITS = 24
# `jax.random` counts up from 0 under the same key. Counters that begin here do not meet its counters.
_FIRST_COUNT = 1 << 31
_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_KEY_PARITY = 0x1BD11BDA


@jax.jit
def threefry(key0: jax.Array, key1: jax.Array, count0: jax.Array, count1: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Computes Threefry-2x32 with 20 rounds: two random words for each pair of counters; uint32, broadcast together.

    Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3" (2011).
    """
    keys = (key0, key1, key0 ^ key1 ^ jnp.uint32(_KEY_PARITY))
    x0, x1 = count0 + keys[0], count1 + keys[1]
    for group in range(5):
        for distance in _ROTATIONS[group % 2]:
            x0 = x0 + x1
            x1 = x0 ^ (x1 << jnp.uint32(distance) | x1 >> jnp.uint32(WORD_BITS - distance))
        x0 = x0 + keys[(group + 1) % 3]
        # Summed first, key and number are the same in all calls with a key.
        x1 = x1 + (keys[(group + 2) % 3] + jnp.uint32(group + 1))
    return x0, x1


def threshold(keep_probability: jax.Array) -> jax.Array:
    """Returns a probability with 24 binary digits in units of the last digit, as uint32 from 0 to 2**24."""
    return (keep_probability * 2**RESOLUTION_BITS).astype(jnp.int32).astype(jnp.uint32)


def digits(threshold: jax.Array) -> tuple[jax.Array, list[jax.Array]]:
    """Returns the start value of `compared` and the 24 digits of a threshold; each 0 or 2**32 - 1.

    The probability 1 is written as 0.111...: 24 digits of 1, and a start value that says less for all digits after
    them.
    """
    is_one = threshold >> jnp.uint32(RESOLUTION_BITS)
    number = threshold - is_one
    shifts = reversed(range(RESOLUTION_BITS))
    return repeated(is_one), [repeated((number >> jnp.uint32(shift)) & jnp.uint32(1)) for shift in shifts]


def decisive_digits(threshold: jax.Array) -> jax.Array:
    """Counts the digits of a threshold before its trailing zeros, which decide nothing; none for 0 and 1."""
    last = lax.clz(threshold & (jnp.uint32(0) - threshold)).astype(jnp.int32)
    return jnp.where(threshold == 0, 0, last - (WORD_BITS - 1 - RESOLUTION_BITS))


def digit_pair(number: jax.Array, pair: jax.Array) -> list[jax.Array]:
    """Returns two neighbouring digits of a number that `digits` takes apart, counted in pairs; each 0 or 2**32 - 1."""
    last = (RESOLUTION_BITS - 2 - 2 * pair).astype(jnp.uint32)
    return [repeated(number >> (last + jnp.uint32(place)) & jnp.uint32(1)) for place in (1, 0)]


def repeated(bit: jax.Array) -> jax.Array:
    """Sets all bits of a word equal to this one."""
    return jnp.uint32(0) - bit


def compared(
    less: jax.Array,
    keys: tuple[jax.Array, jax.Array],
    words: jax.Array,
    first_pair: jax.typing.ArrayLike,
    digits: Sequence[jax.typing.ArrayLike],
) -> jax.Array:
    """Compares 32 random numbers with a threshold at once, digit by digit from the last to the first.

    Bit b of a word says whether the number of element `32 * word + b` is less. A random word holds one digit of all 32
    numbers. If a digit equals the threshold's, the digits after it decide.

    Args:
      less: the result for the digits after these.
      keys: of the generator.
      words: the numbers of the words in the mask.
      first_pair: the position of the first digit, counted in pairs.
      digits: an even number of the threshold's digits; each 0 or 2**32 - 1.
    """
    for pair in reversed(range(len(digits) // 2)):
        drawn = drawn_pair(keys, words, jnp.asarray(first_pair, jnp.uint32) + jnp.uint32(pair))
        for digit, word in ((digits[2 * pair + 1], drawn[1]), (digits[2 * pair], drawn[0])):
            less = (less & word) | (jnp.asarray(digit, jnp.uint32) & (less | word))
    return less


def drawn_pair(keys: tuple[jax.Array, jax.Array], words: jax.Array, pair: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Draws random words with a digit of all their elements' numbers, and the next: one call makes two."""
    return threefry(*keys, jnp.full_like(words, _FIRST_COUNT) + pair, words)
