"""How the batch-norm kernels on TPU cut images into blocks, and walk through them.

Images are (..., n, a, c, b), as in the operator, with a = 1 or b = 1. Statistics do not depend on the order of the
other axes, so the kernels take the order in which XLA stores them.
"""

import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.tpu.stored_order import LANES, SUBLANES, round_up, stored_order

_MIB = 2**20
# TPUs have 64 vector registers of 8 x 128 values. A group's partial statistics take at most 8 of them each, two or
# three in all, and a turn of the innermost loop reads 32, so that its overhead is small beside it.
_REGISTER = SUBLANES * LANES
_PARTIAL_REGISTERS = 8
_TURN_REGISTERS = 64
_MOST_COLUMNS = 512  # of a tile: with more, the 16 rows of a tile of bfloat16 would take more registers
# The most parameters and statistics that a kernel has, in the two buffers of the pipeline.
_STATISTICS = 2 * 7
# VMEM for what Mosaic keeps for itself.
_RESERVED_BYTES = 4 * _MIB


class Blocks(NamedTuple):
    """The view of images as (batch, planes, rows, columns), and its cut into blocks of (1, planes, rows, columns).

    Attributes:
      order: which of n, c and s (the extent of a and b) are planes, rows and columns, such as "scn".
      view: the shape of the images.
      block: the shape of a block; each size divides the view's.
      kept: how many arrays stay in VMEM from the first phase to the second, so that HBM is read once.
    """

    order: str
    view: tuple[int, int, int, int]
    block: tuple[int, int, int, int]
    kept: int

    def to_view(self, x: jax.Array) -> jax.Array:
        """The operator's images in this view."""
        n, a, c, b = x.shape[-4:]
        stored = "nsc" if b == 1 else "ncs"
        shape = (self.view[0], *({"n": n, "c": c, "s": a * b}[axis] for axis in stored))
        return jnp.transpose(x.reshape(shape), (0, *(1 + stored.index(axis) for axis in self.order)))

    def from_view(self, x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """The inverse of `to_view`, for images of this shape."""
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
    def elements(self) -> int:
        """The number of elements that each statistic reduces."""
        return math.prod(self.view[1:]) // self.view[self.channel_axis]

    @property
    def statistics_shape(self) -> tuple[int, ...]:
        """The shape of parameters and statistics, to broadcast against the view."""
        return tuple(extent if axis in (0, self.channel_axis) else 1 for axis, extent in enumerate(self.view))

    def images_spec(self, phases: str) -> pl.BlockSpec:
        """Blocks of images in "both" phases, or only in the "first" or "second".

        The pipeline copies a block when its index changes. In a phase without blocks, the index stays where the other
        phase ends or begins.
        """

        def index(batch, channel, phase, *steps):
            if phases == "second":
                steps = tuple(step * phase for step in steps)
            elif phases == "first":
                lasts = [count - 1 for count in self.steps[1:]]
                steps = tuple(step + phase * (last - step) for step, last in zip(steps, lasts, strict=True))
            return batch, *self._with_channels(channel, steps)

        return pl.BlockSpec(self.block, index)

    def statistics_spec(self) -> pl.BlockSpec:
        """The parameters or statistics of a block of channels."""
        shape = tuple(size if axis == self.channel_axis else 1 for axis, size in enumerate(self.block))

        return pl.BlockSpec(shape, lambda batch, channel, *_: (batch, *self._with_channels(channel, (0, 0))))

    def _with_channels(self, channel: Any, others: tuple[Any, ...]) -> tuple[Any, ...]:
        """A value of each axis, from that of the channels and those of the other two."""
        return *others[: self.channel_axis - 1], channel, *others[self.channel_axis - 1 :]

    # A block is walked through in tiles of whole registers. A group of channels is one position of tiles along the
    # channels' axis: a plane, a tile's rows or a tile's columns.

    @property
    def tile(self) -> tuple[int, int, int]:
        """One plane, and rows and columns that divide the block's and are few registers, if such a division exists."""
        _, rows, columns = self.block[1:]
        widths = divisors(columns, LANES)
        width = next((size for size in widths if size <= _MOST_COLUMNS), widths[-1])
        most = _PARTIAL_REGISTERS * _REGISTER // round_up(width, LANES)
        heights = divisors(rows, 2 * SUBLANES)
        heights = [size for size in heights if size <= most] or heights[-1:]
        return 1, max(heights, key=lambda height: height * math.prod(self._turn((1, height, width)))), width

    def _turn(self, tile: tuple[int, int, int]) -> tuple[int, ...]:
        """How many tiles along each axis one turn of the innermost loop takes; 1 along the channels."""
        most = max(1, _TURN_REGISTERS * _REGISTER // (tile[1] * round_up(tile[2], LANES)))
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
    def partial_shape(self) -> tuple[int, int, int]:
        """The shape of a block's partial statistics: one of each position in a group's tiles."""
        return self.groups, *self.tile[1:]

    @property
    def tiles(self) -> int:
        """The number of a group's tiles in a block."""
        return math.prod(self.block) // math.prod(self.partial_shape)

    def total(self, partial: jax.Array) -> jax.Array:
        """The sums of a group's partial statistics, to broadcast against them."""
        return jnp.sum(partial, ((0, 1), (1,), (0,))[self.channel_axis - 1], keepdims=True)

    def of_group(self, ref: Any, group: Any) -> jax.Array:
        """The parameters or statistics of a group of channels, in the shape of its tiles."""
        return jnp.broadcast_to(ref[self.group_at(group)], self.tile[1:])

    def group_at(self, group: Any) -> tuple[Any, ...]:
        """The index of a group of channels among parameters or statistics."""
        at: list[Any] = [0, slice(None), slice(None)]
        at[self.channel_axis - 1] = self._at(group, group, group)[self.channel_axis - 1]
        return 0, *at

    def for_each_group(self, body: Callable[[Any], None]) -> None:
        """Calls `body(group)` for each group of channels."""
        _loop(self.groups, lambda group, _: body(group), None)

    def fold(self, group: Any, body: Callable[[tuple[Any, ...], Any], Any], carry: Any) -> Any:
        """`carry = body(index, carry)` for each tile of a group, whose index is (plane, rows, columns)."""
        turn = self._turn(self.tile)
        turns = [size // (tile * step) for size, tile, step in zip(self.block[1:], self.tile, turn, strict=True)]
        turns[self.channel_axis - 1] = 1

        def tiles_of_a_turn(starts, carry):
            for offsets in itertools.product(*map(range, turn)):
                at = [start * step + offset for start, step, offset in zip(starts, turn, offsets, strict=True)]
                at[self.channel_axis - 1] = group
                carry = body(self._at(*at), carry)
            return carry

        def loop(starts, carry):
            if len(starts) == 3:
                return tiles_of_a_turn(starts, carry)
            return _loop(turns[len(starts)], lambda start, carry: loop((*starts, start), carry), carry)

        return loop((), carry)

    def _at(self, plane: Any, row: Any, column: Any) -> tuple[Any, Any, Any]:
        """The index of a tile."""
        return plane, _tile_at(row, self.tile[1], self.block[2]), _tile_at(column, self.tile[2], self.block[3])


def _loop(turns: int, body: Callable[[Any, Any], Any], carry: Any) -> Any:
    return body(0, carry) if turns == 1 else jax.lax.fori_loop(0, turns, body, carry)


def _tile_at(tile: Any, size: int, extent: int) -> Any:
    if size == extent:
        return slice(None)
    start = tile * size
    return pl.ds(start if isinstance(start, int) else pl.multiple_of(start, size), size)


def blocks_of(shape, dtype, arrays, block_elements, kept_bytes):
    """Blocks of at most `block_elements` padded elements; None if no division of the images is that small.

    Up to `arrays` images stay in VMEM between the phases: as many as fit into `kept_bytes`.
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
    axis = order.index("c")
    channel_sizes = sizes.pop(axis)

    def padded(block):
        return math.prod(map(round_up, block, multiples))

    for kept in range(arrays, -1, -1):
        # All channels if possible, as each block of channels waits for its statistics; then what DMAs find together.
        for channels, rest, first in itertools.product(channel_sizes, sizes[1], sizes[0]):
            whole = [channels if other == axis else extent for other, extent in enumerate(view[1:])]
            statistics_bytes = _padded_bytes([channels if other == axis else 1 for other in range(3)], jnp.float32)
            if kept and kept * padded(whole) * itemsize + _STATISTICS * statistics_bytes > kept_bytes:
                continue
            planes, rows, columns = ((channels, first, rest), (first, channels, rest), (first, rest, channels))[axis]
            if padded((planes, rows, columns)) <= block_elements:
                return Blocks(order, view, (1, planes, rows, columns), kept)
    return None


def _order(n: int, c: int, s: int, channels_last: bool) -> str:
    """The order of axes in which XLA:TPU most likely stores the images, so that this view moves nothing.

    The height and width are unknown here, and the root of the extent stands in for them. A wrong guess costs copies,
    never the result.
    """
    width = math.isqrt(s) if math.isqrt(s) ** 2 == s else s
    names, shape = ("nhwc", (n, s // width, width, c)) if channels_last else ("nchw", (n, c, s // width, width))
    order = "".join(names[axis] for axis in stored_order(shape))
    # Width and height are one axis here, where the width is.
    return order.replace("h", "").replace("w", "s")


def divisors(extent: int, multiple: int) -> list[int]:
    """The extent itself, then its divisors that are multiples, the largest first."""
    return [extent, *(size for size in range(extent - 1, 0, -1) if extent % size == 0 and size % multiple == 0)]


def most_kept_bytes(on_chip_bytes: int | None, dtype: Any, images: int, block_elements: int) -> int:
    """The VMEM left for arrays that are kept, beside the blocks of this many `images` and two partial statistics."""
    if on_chip_bytes is None:
        return 0
    # The pipeline has two buffers of each block. Partial statistics are float32, and at most as many as a block's.
    blocks_bytes = block_elements * (2 * images * jnp.dtype(dtype).itemsize + 2 * 4)
    return max(0, on_chip_bytes - blocks_bytes - _RESERVED_BYTES)


def launch(body, name, blocks, images, statistics, results, partial_statistics, interpret):
    """Runs a body over the blocks in two phases.

    Its refs are the `images`, the `statistics`, the results, scratch that keeps `blocks.kept` arrays like the images
    between the phases, (steps, planes, rows, columns), and scratch for partial statistics. `images` are pairs of an
    array and the phases that read it. Results with the view's shape are written in the second phase.
    """
    from jax.experimental.pallas import tpu as pltpu  # here, because only lowering for a TPU needs its 0.2 s

    operands = [blocks.to_view(values) for values, _ in images]
    in_specs = [blocks.images_spec(phases) for _, phases in images]
    out_specs = [
        blocks.images_spec("second") if result.shape == blocks.view else blocks.statistics_spec() for result in results
    ]
    dtype = operands[0].dtype
    kept = pltpu.VMEM((blocks.steps_of_a_phase, *blocks.block[1:]), dtype)
    partial = pltpu.VMEM(blocks.partial_shape, jnp.float32)
    buffers = 2 * (len(images) + sum(result.shape == blocks.view for result in results))
    block_bytes = _padded_bytes(blocks.block[1:], dtype)
    statistics_bytes = partial_statistics * _padded_bytes(blocks.partial_shape, jnp.float32)
    statistics_bytes += _STATISTICS * _padded_bytes(blocks.statistics_spec().block_shape[1:], jnp.float32)
    # Tiles of rows that no whole registers divide are large, and some values of their size do not stay in registers.
    statistics_bytes += 4 * _padded_bytes(blocks.tile, jnp.float32)
    reads = sum(2 if phases == "both" else 1 for _, phases in images)
    written = sum(result.shape == blocks.view for result in results)
    elements = math.prod(blocks.view)
    return pl.pallas_call(
        body,
        name=name,
        # The phase lies inside the channels: all images of a block of channels pass before the next block, and its
        # statistics stay in VMEM from the first step to the last.
        grid=(blocks.view[0], blocks.steps[0], 2, *blocks.steps[1:]),
        in_specs=[*in_specs, *[blocks.statistics_spec()] * len(statistics)],
        out_specs=out_specs,
        out_shape=results,
        scratch_shapes=[*[kept] * blocks.kept, *[partial] * partial_statistics],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary", "arbitrary", "arbitrary"),
            vmem_limit_bytes=_RESERVED_BYTES
            + statistics_bytes
            + (buffers + blocks.kept * blocks.steps_of_a_phase) * block_bytes,
        ),
        cost_estimate=pl.CostEstimate(
            flops=10 * elements,
            transcendentals=0,
            bytes_accessed=(reads + written) * elements * dtype.itemsize,
        ),
        interpret=interpret,
    )(*operands, *(values.reshape(blocks.statistics_shape) for values in statistics))


def _padded_bytes(shape, dtype):
    planes, rows, columns = shape[-3:]
    itemsize = jnp.dtype(dtype).itemsize
    return math.prod(shape[:-3]) * planes * round_up(rows, 32 // itemsize) * round_up(columns, LANES) * itemsize
