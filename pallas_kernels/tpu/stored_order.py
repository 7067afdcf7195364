"""Layout of arrays in HBM by XLA:TPU."""

import itertools
import math

from jax.experimental import pallas as pl

# A vector register, and so a tile of 32-bit values in HBM, is 8 sublanes of 128 lanes.
LANES = 128
SUBLANES = 8


def stored_order(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the major-to-minor order in which XLA:TPU stores an array of this shape: the one that pads least.

    Pallas takes operands in row-major order, so an array whose axes are first put in this order reaches the kernel as
    it is; otherwise XLA would transpose it on the way in and out. A wrong guess costs those copies, never the result.
    """
    pairs = itertools.permutations(range(len(shape)), 2)
    second, minor = min(pairs, key=lambda pair: (_padded_size(shape, *pair), -pair[1], -pair[0]))
    return (*(axis for axis in range(len(shape)) if axis not in (second, minor)), second, minor)


def _padded_size(shape: tuple[int, ...], second: int, minor: int) -> int:
    """Counts the elements that `shape` occupies in HBM when these two axes are the tiled ones."""
    # XLA stores arrays of few rows in tiles with fewer sublanes.
    tile_rows = min(SUBLANES, pl.next_power_of_2(shape[second]))
    tiled = {second: round_up(shape[second], tile_rows), minor: round_up(shape[minor], LANES)}
    return math.prod(tiled.get(axis, size) for axis, size in enumerate(shape))


def round_up(size: int, multiple: int) -> int:
    """Returns the smallest multiple that is not below `size`."""
    return pl.cdiv(size, multiple) * multiple
