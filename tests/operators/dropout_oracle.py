"""The elements that dropout keeps, in NumPy: Threefry in 64-bit integers, and numbers compared as integers."""

import numpy as np

MASK = 0xFFFFFFFF
ROTATIONS = (13, 15, 26, 6, 17, 29, 16, 24)


def threefry(key0, key1, count0, count1):
    """Threefry-2x32 with 20 rounds."""
    keys = [int(key0), int(key1), int(key0) ^ int(key1) ^ 0x1BD11BDA]
    x0, x1 = ((np.asarray(count, np.int64) + key) & MASK for count, key in zip((count0, count1), keys, strict=False))
    for step in range(20):
        distance = ROTATIONS[step % 8]
        x0 = (x0 + x1) & MASK
        x1 = (((x1 << distance) | (x1 >> (32 - distance))) & MASK) ^ x0
        if step % 4 == 3:
            group = step // 4 + 1
            x0, x1 = (x0 + keys[group % 3]) & MASK, (x1 + keys[(group + 1) % 3] + group) & MASK
    return x0, x1


def kept(key_words, count, rate, first=0):
    """Whether each of `count` elements is kept: where a number of 24 random digits is small enough."""
    # What lies behind the last digit of 1 - rate cannot make a number less.
    return numbers(key_words, count, first) < round((1 - rate) * 2**24)


def numbers(key_words, count, first=0):
    """The random numbers of `count` elements, in units of the last of 24 digits."""
    words = first + np.arange(-(-count // 32))
    drawn = np.zeros((words.size, 32), np.int64)
    for pair in range(12):
        for word in threefry(*key_words, (1 << 31) + pair, words):
            drawn = 2 * drawn + (1 - ((word[:, None] >> np.arange(32)) & 1))
    return drawn.ravel()[:count]


def packed(mask):
    """32 elements of the last axis in a word, the first in the lowest bit."""
    return np.packbits(mask, axis=-1, bitorder="little").view(np.uint32)
