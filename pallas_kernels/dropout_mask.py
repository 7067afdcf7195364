"""Which elements dropout keeps: 32 of them in a word of bits, from a counter-based generator in integer arithmetic.

Written once, for the reference and for kernels of any dialect, so that all of them keep the same elements.
"""

import struct
from collections.abc import Sequence

import jax
import jax.numpy as jnp

WORD_BITS = 32
RESOLUTION_BITS = 24
# `jax.random` counts up from 0 under the same key. Counters that begin here keep clear of it.
_FIRST_COUNT = 1 << 31
_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_KEY_PARITY = 0x1BD11BDA


@jax.jit
def threefry(key0: jax.Array, key1: jax.Array, count0: jax.Array, count1: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Threefry-2x32 with 20 rounds: two random words for each pair of counters; uint32, broadcast together.

    Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3" (2011).
    """
    keys = (key0, key1, key0 ^ key1 ^ jnp.uint32(_KEY_PARITY))
    x0, x1 = count0 + keys[0], count1 + keys[1]
    for group in range(5):
        for distance in _ROTATIONS[group % 2]:
            x0 = x0 + x1
            x1 = x0 ^ (x1 << jnp.uint32(distance) | x1 >> jnp.uint32(WORD_BITS - distance))
        x0 = x0 + keys[(group + 1) % 3]
        x1 = x1 + keys[(group + 2) % 3] + jnp.uint32(group + 1)
    return x0, x1


def constant_word(rate: float) -> int | None:
    """What all words are where the rate, rounded to 24 binary digits, is 1 or 0; else None."""
    return {0: 0, 2**RESOLUTION_BITS: 2**WORD_BITS - 1}.get(_kept(rate))


def digits(rate: float) -> list[int]:
    """The binary digits of `1 - rate` behind the point, without zeros at the end; each 0 or 2**32 - 1."""
    return [(2**WORD_BITS - 1) * int(digit) for digit in f"{_kept(rate):0{RESOLUTION_BITS}b}".rstrip("0")]


def scale(rate: float, itemsize: int) -> float:
    """`1 / (1 - rate)` in float32, or in float64 for items of its size; 0 where everything is dropped."""
    if constant_word(rate) == 0:
        return 0.0
    rounded = _rounded_to_float32 if itemsize < 8 else float
    # Rounding what float64 gives to float32 is what float32 gives: float64 has more than twice the digits.
    return rounded(1 / rounded(1 - rounded(rate)))


def _rounded_to_float32(x: float) -> float:
    return float(struct.unpack("f", struct.pack("f", x))[0])


def _kept(rate: float) -> int:
    return round((1 - rate) * 2**RESOLUTION_BITS)


def compared(
    less: jax.Array,
    keys: tuple[jax.Array, jax.Array],
    words: jax.Array,
    first_pair: jax.typing.ArrayLike,
    digits: Sequence[jax.typing.ArrayLike],
) -> jax.Array:
    """Compares 32 random numbers with one at once, some binary digits of them, from the last of these to the first.

    Bit b of a word says of element `32 * word + b` whether its number is less. Each digit of 32 numbers is a random
    word, and where it equals that of the number, the digits behind it decide.

    Args:
      less: what the digits behind these say; 0 where these are the last.
      keys: of the generator.
      words: which words of the mask these are.
      first_pair: the first of these digits, counted in pairs.
      digits: of the number; each 0 or 2**32 - 1, as many as are in pairs.
    """
    for pair in reversed(range(len(digits) // 2)):
        count = jnp.full_like(words, _FIRST_COUNT) + jnp.asarray(first_pair, jnp.uint32) + jnp.uint32(pair)
        drawn = threefry(*keys, count, words)
        for digit, word in ((digits[2 * pair + 1], drawn[1]), (digits[2 * pair], drawn[0])):
            less = (less & word) | (jnp.asarray(digit, jnp.uint32) & (less | word))
    return less
