"""Blocks into which the batch-norm kernels on TPU cut images, and the walk through them.

Images are (..., n, a, c, b), as in the operator, with a = 1 or b = 1. Statistics do not depend on the order of the
other axes, so the kernels take the order in which XLA stores them.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.tpu.stored_order import LANES, SUBLANES, round_up, stored_order

_MIB = 2**20
# TPUs have 64 vector registers of 8 x 128 values. A group's partial statistics take at most 8 of them each, two or
# three in all, and a turn of the innermost loop reads 512, so that its beginning and end are small beside it: where
# that is a whole block, its scalar code is scheduled beside the vectors.
_REGISTER = SUBLANES * LANES
_PARTIAL_REGISTERS = 8
_TURN_REGISTERS = 512
# Sums grow by so many terms at a time, added by halves: one after the other, additions wait for each other.
_TERMS_AT_ONCE = 4
# Where channels are planes, each takes a loop of its own, which needs as many elements to be worth its beginning.
_PLANE_ELEMENTS = 2**16
_MOST_COLUMNS = 512  # of a tile: with more, the 16 rows of a tile of bfloat16 would take more registers
# The most parameters and statistics that a kernel has, in the two buffers of the pipeline.
_STATISTICS = 2 * 7
_STATISTICS_BYTES = 4 * _MIB  # for those of all blocks of channels that a program takes
_WIDER_BYTES = 2  # by which a bfloat16 grows in float32
# What a kernel holds of each position in a group's tiles: sums of one block of channels, coefficients of another.
PARTIALS = 7
# Blocks of each stream in flight, a power of two: a copy hides the latency of the next, and work on blocks is uneven.
DEPTH = 4
# VMEM for what Mosaic keeps for itself.
_RESERVED_BYTES = 4 * _MIB


class Blocks(NamedTuple):
    """The view of images as (batch, planes, rows, columns), and its cut into blocks of (1, planes, rows, columns).

    Attributes:
      order: which of n, c and s (the extent of a and b) are planes, rows and columns, such as "scn".
      view: the shape of the images.
      block: the shape of a block; each size divides the view's.
      kept: how many arrays stay in VMEM from the first phase to the second, so that HBM is read once.
      keeps_all: whether these are all that both phases read.
      rounds: how many blocks of channels a program takes, one after the other.
      widens: whether one of the arrays stays there in float32, which spares the second phase to unpack it.
    """

    order: str
    view: tuple[int, int, int, int]
    block: tuple[int, int, int, int]
    kept: int
    keeps_all: bool
    rounds: int
    widens: bool

    def to_view(self, x: jax.Array) -> jax.Array:
        """Returns the operator's images in this view."""
        n, a, c, b = x.shape[-4:]
        stored = "nsc" if b == 1 else "ncs"
        shape = (self.view[0], *({"n": n, "c": c, "s": a * b}[axis] for axis in stored))
        return jnp.transpose(x.reshape(shape), (0, *(1 + stored.index(axis) for axis in self.order)))

    def from_view(self, x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """Inverts `to_view`, for images of this shape."""
        stored = "nsc" if shape[-1] == 1 else "ncs"
        return jnp.transpose(x, (0, *(1 + self.order.index(axis) for axis in stored))).reshape(shape)

    @property
    def channel_axis(self) -> int:
        """The axis of the view."""
        return 1 + self.order.index("c")

    @property
    def steps(self) -> tuple[int, int, int]:
        """The number of blocks along the channels, and along the two other axes."""
        counts = [extent // size for extent, size in zip(self.view, self.block, strict=True)][1:]
        channels, first, rest = counts.pop(self.channel_axis - 1), *counts
        return channels, first, rest

    @property
    def steps_of_a_phase(self) -> int:
        """The number of blocks of one block of channels."""
        return self.steps[1] * self.steps[2]

    @property
    def depth(self) -> int:
        """The number of blocks of each stream in flight."""
        return min(DEPTH, self.steps_of_a_phase)

    @property
    def alternates(self) -> bool:
        """Tells whether one block of channels is in its second phase while the next is in its first."""
        return self.rounds > 1 and self.keeps_all

    def slots(self, keeps: bool) -> int:
        """Counts the buffers for blocks of images that are kept, or only pass."""
        if not keeps:
            return DEPTH
        return self.steps_of_a_phase + (self.depth if self.alternates else 0)

    def vmem_bytes(self, dtype: Any, images: int) -> int:
        """Returns the VMEM of a kernel with this many images that keeps `kept` of them."""
        kept = self.kept - self.widens
        slots = kept * self.slots(True) + (images - kept) * self.slots(False)
        bytes_of_a_slot = _padded_bytes(self.block[1:], dtype)
        wide_bytes = self.widens * self.steps_of_a_phase * _padded_bytes(self.block[1:], jnp.float32)
        statistics_bytes = PARTIALS * _padded_bytes(self.partial_shape, jnp.float32)
        statistics_bytes += _STATISTICS * _padded_bytes(self.statistics_block[1:], jnp.float32)
        # Tiles of rows that no whole registers divide are large, and some values of their size leave the registers.
        statistics_bytes += 4 * _padded_bytes(self.tile, jnp.float32)
        return _RESERVED_BYTES + statistics_bytes + wide_bytes + slots * bytes_of_a_slot

    @property
    def elements(self) -> int:
        """The number of elements that each statistic reduces."""
        return math.prod(self.view[1:]) // self.view[self.channel_axis]

    @property
    def statistics_shape(self) -> tuple[int, ...]:
        """The shape of parameters and statistics, to broadcast against the view."""
        return tuple(extent if axis in (0, self.channel_axis) else 1 for axis, extent in enumerate(self.view))

    @property
    def statistics_block(self) -> tuple[int, ...]:
        """The shape of a program's parameters or statistics."""
        return tuple(size * self.rounds if axis == self.channel_axis else 1 for axis, size in enumerate(self.block))

    def statistics_spec(self) -> pl.BlockSpec:
        """Returns the spec of a program's parameters or statistics."""
        return pl.BlockSpec(self.statistics_block, lambda batch, part: (batch, *self.with_channels(part, (0, 0))))

    def with_channels(self, channel: Any, others: tuple[Any, ...]) -> tuple[Any, ...]:
        """Returns a value for each axis, from that of the channels and those of the other two."""
        return *others[: self.channel_axis - 1], channel, *others[self.channel_axis - 1 :]

    # A block is walked through in tiles of whole registers. A group of channels is one position of tiles along the
    # channels' axis: a plane, a tile's rows or a tile's columns.

    @property
    def tile(self) -> tuple[int, int, int]:
        """Rows and columns that divide the block's and are few registers, if such a division exists, of some planes."""
        planes, rows, columns = self.block[1:]
        widths = divisors(columns, LANES)
        width = next((size for size in widths if size <= _MOST_COLUMNS), widths[-1])
        most = _PARTIAL_REGISTERS * _REGISTER // round_up(width, LANES)
        heights = divisors(rows, 2 * SUBLANES)
        heights = [size for size in heights if size <= most] or heights[-1:]
        height = max(heights, key=lambda height: height * math.prod(self._turn((1, height, width))))
        # Sums of too few registers would wait for each other.
        depths = divisors(planes, 1) if self.channel_axis != 1 else [1]
        return next((size for size in depths if size * height <= most), 1), height, width

    def _turn(self, tile: tuple[int, int, int]) -> tuple[int, ...]:
        """Returns how many tiles along each axis one turn of the innermost loop takes; 1 along the channels."""
        most = max(1, _TURN_REGISTERS * _REGISTER // (tile[0] * tile[1] * round_up(tile[2], LANES)))
        turn = [1, 1, 1]
        for axis in range(3):
            if axis != self.channel_axis - 1:
                sizes = divisors(self.block[1 + axis] // tile[axis], 1)
                turn[axis] = next(size for size in sizes if size * math.prod(turn) <= most)
        return tuple(turn)

    @property
    def groups(self) -> int:
        """The number of groups of channels in a block."""
        return self.block[self.channel_axis] // self.tile[self.channel_axis - 1]

    @property
    def partial_shape(self) -> tuple[int, int, int, int]:
        """The shape of a block's partial statistics: one of each position in a group's tiles."""
        return self.groups, *self.tile

    @property
    def tiles(self) -> int:
        """The number of a group's tiles in a block."""
        return math.prod(self.block) // math.prod(self.partial_shape)

    def total(self, partial: jax.Array) -> jax.Array:
        """Sums a group's partial statistics, to broadcast against them."""
        return jnp.sum(partial, tuple(axis for axis in range(3) if axis != self.channel_axis - 1), keepdims=True)

    def group_at(self, turn: Any, group: Any) -> tuple[Any, ...]:
        """Returns the index of a group of channels of a round among the program's parameters or statistics."""
        axis = self.channel_axis
        at: list[Any] = [slice(None)] * 3
        at[axis - 1] = _tile_at(turn * self.groups + group, self.tile[axis - 1], self.statistics_block[axis])
        return 0, *at

    def for_each_group(self, body: Callable[[Any], None], at_once: int = 1) -> None:
        """Calls `body(group)` for each group of channels, or for several at once if they are short and independent."""
        several = next(size for size in divisors(self.groups, 1) if size <= at_once)

        def turn(start):
            for offset in range(several):
                body(start * several + offset)

        _loop(self.groups // several, turn)

    def fold(self, group: Any, body: Callable[[tuple[Any, ...]], Any], *refs: Any) -> None:
        """Adds `body(index)` of each tile of a group, whose index is (plane, rows, columns), to the sums in `refs`.

        Each turn of the loop loads and stores a group's sums, which costs the vector unit nothing; as values of the
        loop, they would be moved from register to register.
        """
        turn = self._turn(self.tile)
        turns = [size // (tile * step) for size, tile, step in zip(self.block[1:], self.tile, turn, strict=True)]
        turns[self.channel_axis - 1] = 1

        def tiles_of_a_turn(*starts):
            sums = [ref[group] for ref in refs]
            offsets = list(itertools.product(*map(range, turn)))
            for first in range(0, len(offsets), _TERMS_AT_ONCE):
                terms = []
                for few in offsets[first : first + _TERMS_AT_ONCE]:
                    at = [start * step + offset for start, step, offset in zip(starts, turn, few, strict=True)]
                    at[self.channel_axis - 1] = group
                    terms.append(body(self._at(*at)))
                if refs:
                    sums = [
                        values + _sum(of_ref) for values, of_ref in zip(sums, zip(*terms, strict=True), strict=True)
                    ]
            for ref, values in zip(refs, sums, strict=True):
                ref[group] = values

        def loop(*starts):
            if len(starts) == 3:
                tiles_of_a_turn(*starts)
            else:
                _loop(turns[len(starts)], lambda start: loop(*starts, start))

        loop()

    def _at(self, plane: Any, row: Any, column: Any) -> tuple[Any, Any, Any]:
        """Returns the index of a tile."""
        return (
            _tile_at(plane, self.tile[0], self.block[1]),
            _tile_at(row, self.tile[1], self.block[2]),
            _tile_at(column, self.tile[2], self.block[3]),
        )


def _loop(turns: int, body: Callable[[Any], None]) -> None:
    if turns == 1:
        body(0)
    else:
        jax.lax.fori_loop(0, turns, lambda turn, _: body(turn), None)


def _sum(terms: Sequence[Any]) -> Any:
    """Sums some terms, by halves."""
    half = len(terms) // 2
    return terms[0] if len(terms) == 1 else _sum(terms[:half]) + _sum(terms[half:])


def _tile_at(tile: Any, size: int, extent: int) -> Any:
    if size == extent:
        return slice(None)
    start = tile * size
    return pl.ds(start if isinstance(start, int) else pl.multiple_of(start, size), size)


def blocks_of(shape, dtype, arrays, block_elements, kept_bytes, parts=1, widens=False):
    """Returns blocks of at most `block_elements` padded elements; None if no division of the images is that small.

    Up to `arrays` images stay in VMEM between the phases: as many as fit into `kept_bytes`, one of them in float32 if
    it `widens` and all fit so. Channels are shared by `parts` programs that may run on as many cores, or by more.
    """
    n, a, c, b = shape[-4:]
    if 1 not in (a, b):
        return None
    order = _order(n, c, a * b, channels_last=b == 1)
    extents = {"n": n, "c": c, "s": a * b}
    view = (math.prod(shape[:-4]), *(extents[axis] for axis in order))
    itemsize = jnp.dtype(dtype).itemsize
    multiples = (1, 32 // itemsize, LANES)
    # Blocks divide the view, as values beyond its edge would enter the statistics.
    sizes = [divisors(extent, multiple) for extent, multiple in zip(view[1:], multiples, strict=True)]
    # HBM has tiles of 8 rows of whatever dtype, so a block may have as few.
    if view[2] % SUBLANES == 0 and sizes[1][-1] > SUBLANES:
        sizes[1].append(SUBLANES)
    axis = order.index("c")
    channel_sizes = sizes.pop(axis)

    def padded(block):
        return _padded_bytes(block, dtype) // itemsize

    wide = [(arrays, True)] if widens and itemsize == 2 else []
    for kept, widens in (*wide, *((kept, False) for kept in range(arrays, -1, -1))):
        # All channels if possible, as each block of channels waits for its statistics; then what DMAs find together.
        for channels, rest, first in itertools.product(channel_sizes, sizes[1], sizes[0]):
            if axis == 0 and channels > max(1, block_elements // _PLANE_ELEMENTS):
                continue
            whole = [channels if other == axis else extent for other, extent in enumerate(view[1:])]
            statistics_bytes = _padded_bytes([channels if other == axis else 1 for other in range(3)], jnp.float32)
            rounds = _rounds(view[1 + axis] // channels, parts, statistics_bytes)
            keeps_all = kept == arrays
            # While one block of channels leaves, the next arrives.
            arriving = (kept - widens) * DEPTH * block_elements * itemsize if keeps_all and rounds > 1 else 0
            whole_bytes = padded(whole) * (kept * itemsize + widens * _WIDER_BYTES)
            if kept and whole_bytes + arriving + rounds * _STATISTICS * statistics_bytes > kept_bytes:
                continue
            planes, rows, columns = ((channels, first, rest), (first, channels, rest), (first, rest, channels))[axis]
            if padded((planes, rows, columns)) <= block_elements:
                return Blocks(order, view, (1, planes, rows, columns), kept, keeps_all, rounds, widens)
    return None


def _rounds(channel_blocks: int, parts: int, statistics_bytes: int) -> int:
    """Counts the blocks of channels that a program takes, if their parameters and statistics are to be small."""
    most = max(1, min(-(-channel_blocks // parts), _STATISTICS_BYTES // (_STATISTICS * statistics_bytes)))
    return next(size for size in divisors(channel_blocks, 1) if size <= most)


def _order(n: int, c: int, s: int, channels_last: bool) -> str:
    """Returns the order of axes in which XLA:TPU most likely stores the images, so that this view moves nothing.

    The height and width are unknown here, and the root of the extent stands in for them. A wrong guess costs copies,
    never the result.
    """
    width = math.isqrt(s) if math.isqrt(s) ** 2 == s else s
    names, shape = ("nhwc", (n, s // width, width, c)) if channels_last else ("nchw", (n, c, s // width, width))
    order = "".join(names[axis] for axis in stored_order(shape))
    # Width and height are one axis here, where the width is.
    return order.replace("h", "").replace("w", "s")


def divisors(extent: int, multiple: int) -> list[int]:
    """Lists the extent itself, then its divisors that are multiples, the largest first."""
    return [extent, *(size for size in range(extent - 1, 0, -1) if extent % size == 0 and size % multiple == 0)]


def most_kept_bytes(on_chip_bytes: int | None, dtype: Any, images: int, block_elements: int) -> int:
    """Returns the VMEM left for images that are kept, beside the rings of the others and two partial statistics."""
    if on_chip_bytes is None:
        return 0
    # Partial statistics are float32, and at most a group's tiles of a block.
    rings = DEPTH * images * block_elements * jnp.dtype(dtype).itemsize
    return max(0, on_chip_bytes - rings - _RESERVED_BYTES)


def _padded_bytes(shape, dtype):
    planes, rows, columns = shape[-3:]
    itemsize = jnp.dtype(dtype).itemsize
    padded_rows = round_up(rows, SUBLANES if rows <= SUBLANES else 32 // itemsize)
    return math.prod(shape[:-3]) * planes * padded_rows * round_up(columns, LANES) * itemsize
