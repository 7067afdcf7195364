"""Vectors: arrays (8, 128) of uint32, with rows of sublanes and lanes, and the rows of narrower numbers in them.

16-bit values are packed in two ways: "compressed", where the rows of two vectors follow one another and two
neighbouring rows share a word, the first in its low half; and "interleaved", where a word holds the same place of two
vectors.
"""

from typing import Any

import numpy as np

SUBLANES, LANES = 8, 128
HIGH, LOW = np.uint32(0xFFFF0000), np.uint32(0xFFFF)  # halves of words
EXPONENT = np.uint32(0x7F800000)  # of float32
LANE = np.broadcast_to(np.arange(LANES, dtype=np.uint32), (SUBLANES, LANES))
SUBLANE = np.broadcast_to(np.arange(SUBLANES, dtype=np.uint32)[:, None], (SUBLANES, LANES))


def whole(x: Any) -> np.ndarray:
    """Returns a vector, where one number may stand for all of its elements."""
    return np.broadcast_to(x, (SUBLANES, LANES))


def rounded_to_bfloat16(x: Any) -> Any:
    """Rounds the bits of float32 to nearest even; the low half of the result is 0."""
    # Only NaN can overflow here, and keeps its high half instead.
    rounded = (x + 0x7FFF + (x >> 16 & 1)) & HIGH
    return np.where((x & 0x7FFFFFFF) > EXPONENT, x & HIGH | 0x00400000, rounded)


def rows_of_words(x: Any, bits: int) -> np.ndarray:
    """Unpacks rows of numbers of so many bits, compressed, into the low bits of words."""
    count = 32 // bits
    rows = np.empty((SUBLANES * count, LANES), np.uint32)
    for part in range(count):
        rows[part::count] = whole(x) >> np.uint32(bits * part) & np.uint32((1 << bits) - 1)
    return rows


def words_of_rows(rows: np.ndarray, bits: int) -> np.ndarray:
    """Packs the low bits of rows, which inverts `rows_of_words`."""
    count = 32 // bits
    words = np.zeros((len(rows) // count, LANES), np.uint32)
    for part in range(count):
        words |= (rows[part::count] & np.uint32((1 << bits) - 1)) << np.uint32(bits * part)
    return words
