"""The words of dropout's mask, drawn in full registers of a TPU.

What bounds dropout there is the generator. TPUs have no rotation of bits, so a round takes five operations, and a call
of 20 rounds with its keys and two digits about 120, which is 30 cycles for a register of words at four vector
operations in a cycle. Its 32 registers of elements, in bfloat16, pass HBM in 248 cycles on a v5e and in 144 on a v6e. A
probability of 24 digits asks for 12 calls. But after the first 12 digits, and six calls, one element in 4096 is
undecided: the other six calls are made only for words with such elements, gathered from all registers of a block.
Probabilities of up to four digits, such as 0.5 and 0.75, are bound by HBM.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.dropout_mask import RESOLUTION_BITS, WORD_BITS, compared, drawn_pair, repeated
from pallas_kernels.tpu.stored_order import LANES, SUBLANES

_SHORT_DIGITS = 4  # enough for probabilities such as 0.5
_FIRST_DIGITS = 12  # drawn for all words; fewer would leave too many words undecided at the same place of a register


class Keep(NamedTuple):
    """The probability to keep an element, as scalars.

    Attributes:
      digits: 24 of them, 0 or 1.
      is_one: 1 where the probability is; it is then written as 0.111..., as in `dropout_mask.digits`.
      is_short: whether the digits after the first four are 0.
    """

    digits: list[jax.Array]
    is_one: jax.Array
    is_short: jax.Array


def keep_of(above):
    """Returns the digits of a probability, as `dropout_mask.threshold` gives it."""
    is_one = above >> jnp.uint32(RESOLUTION_BITS)
    number = above - is_one
    digits = [number >> jnp.uint32(shift) & jnp.uint32(1) for shift in reversed(range(RESOLUTION_BITS))]
    return Keep(digits, is_one, number & jnp.uint32((1 << RESOLUTION_BITS - _SHORT_DIGITS) - 1) == 0)


class Places(NamedTuple):
    """Places where the words of a block's rows are drawn.

    The rows are bands of `rows`, one after another. Words fill groups of 128 lanes, in which each row has a line: first
    groups with words of one band only, then those in which the other words of all bands lie beside each other.

    Attributes:
      bands: of a block's rows.
      rows: of a band.
      words: of a row.
    """

    bands: int
    rows: int
    words: int

    @property
    def whole(self):
        """The number of a row's words that fill groups of their own."""
        return self.words // LANES * LANES

    @property
    def groups(self):
        """The number of groups of 128 lanes."""
        return self.bands * self.whole // LANES + pl.cdiv(self.bands * (self.words - self.whole), LANES)

    def counters(self, streams_ref, first_word):
        """Returns keys and numbers of all words, (groups * rows, 128): each row has its own stream in any blocks.

        Args:
          streams_ref: for each row of the block two words of key, and the number of its first word.
          first_word: of a row in this block.
        """
        lane = lax.broadcasted_iota(jnp.int32, (self.rows, LANES), 1)

        def counter(band, begin, word):
            """Returns the same of one band, whose word of this number lies in lane `begin`."""
            place = slice(band * self.rows, (band + 1) * self.rows)
            key0, key1, number = (jnp.broadcast_to(streams_ref[place, i : i + 1], lane.shape) for i in range(3))
            return key0, key1, number + (lane + (first_word + word - begin)).astype(jnp.uint32)

        groups = [counter(band, 0, word) for band in range(self.bands) for word in range(0, self.whole, LANES)]
        others = self.words - self.whole
        for start in range(0, self.bands * others, LANES):
            first, last = start // others, min((start + LANES - 1) // others, self.bands - 1)
            group = counter(first, first * others - start, self.whole)
            for band in range(first + 1, last + 1):
                begin = band * others - start
                pairs = zip(counter(band, begin, self.whole), group, strict=True)
                group = tuple(jnp.where(lane >= begin, new, old) for new, old in pairs)
            groups.append(group)
        return [jnp.concatenate(values) for values in zip(*groups, strict=True)]

    def in_rows(self, drawn):
        """Yields slices of rows and words of a block, and the words there, in as many of 128 lanes as there are any."""
        lane = lax.broadcasted_iota(jnp.int32, (self.rows, LANES), 1)
        groups = [drawn[start : start + self.rows] for start in range(0, drawn.shape[0], self.rows)]
        others = self.words - self.whole
        for band in range(self.bands):
            rows = slice(band * self.rows, (band + 1) * self.rows)
            for word in range(0, self.whole, LANES):
                yield rows, slice(word, word + LANES), groups[(band * self.whole + word) // LANES]
            if not others:
                continue
            group, shift = divmod(band * others, LANES)
            group += self.bands * self.whole // LANES
            words = groups[group]
            if shift:
                source = lane + shift & LANES - 1
                words = permuted(words, source)
                if shift + others > LANES:
                    words = jnp.where(lane < LANES - shift, words, permuted(groups[group + 1], source))
            yield rows, slice(self.whole, self.words), words


def permuted(words, lanes):
    """Takes the words of other lanes."""
    if words.shape[0] == 1:  # Mosaic takes no gather from a single row, so it passes as two equal ones.
        return permuted(*(jnp.broadcast_to(values, (2, LANES)) for values in (words, lanes)))[:1]
    return jnp.take_along_axis(words, lanes, axis=1, mode="promise_in_bounds")


def short_words(keep, counters):
    """Draws the words of a probability whose digits after the first four are 0."""
    return _narrowed(counters, keep.digits[:_SHORT_DIGITS])[0]


def long_words(keep, counters):
    """Draws the words of any other probability: by its first 12 digits, and by all where an element is still open."""
    less, at_most = _narrowed(counters, keep.digits[:_FIRST_DIGITS])
    turn = functools.partial(
        decide_some, counters, repeated(keep.is_one), list(map(repeated, keep.digits[_FIRST_DIGITS:]))
    )
    return lax.while_loop(lambda state: state[2], turn, turn((less, less ^ at_most, True)))[0]


def _narrowed(counters, digits):
    """Compares the first digits: which numbers are less, and which are that or equal so far."""
    *keys, words = counters
    less, at_most = jnp.zeros_like(words), jnp.full_like(words, 2**WORD_BITS - 1)
    for position in range(0, len(digits), 2):
        drawn = drawn_pair(tuple(keys), words, jnp.uint32(position // 2))
        for digit, word in zip(digits[position : position + 2], drawn, strict=True):
            narrowed = less | (at_most & word)
            less, at_most = jnp.where(digit == 1, narrowed, less), jnp.where(digit == 1, at_most, narrowed)
    return less, at_most


def decide_some(counters, less_at_end, digits, state):
    """Decides a few elements by the digits after the first ones, and says whether others are left.

    At each place of a register, the generator draws for two of the words that hold undecided elements. With 16
    registers, one turn is enough for three blocks in four.

    Args:
      counters: the keys and the numbers of all words.
      less_at_end: the result for the digits after all others.
      digits: those after the first ones.
      state: which elements are less, which are undecided, and whether any is.
    """
    rows = SUBLANES if state[0].shape[0] % SUBLANES == 0 else state[0].shape[0]
    less, undecided, *counters = (values.reshape(-1, rows, LANES) for values in (*state[:2], *counters))
    number = lax.broadcasted_iota(jnp.uint32, less.shape, 0)
    registers = range(less.shape[0])
    turns = []
    for order in (registers, reversed(registers)):  # the last undecided, then the first
        found = [number[0], *(values[0] for values in counters)]
        for i in order:
            here = (number[i], *(values[i] for values in counters))
            found = [jnp.where(undecided[i] != 0, one, other) for one, other in zip(here, found, strict=True)]
        decided = jnp.where(found[0][None] == number, undecided, jnp.uint32(0))
        undecided ^= decided
        turns.append((found[1:], decided))
    is_left = jnp.any(functools.reduce(jnp.bitwise_or, [undecided[i] for i in registers]) != 0)
    for (*keys, words), decided in turns:
        known = compared(jnp.full_like(words, less_at_end), tuple(keys), words, _FIRST_DIGITS // 2, digits)
        less |= decided & known[None]
    return less.reshape(state[0].shape), undecided.reshape(state[0].shape), is_left
