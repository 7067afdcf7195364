"""Tiles of a linear layer's logits on Hopper, and what its kernels share inside a tile.

A worker is a thread block, or a cluster of two, with rows of its own. It computes a run of a row's vocabulary tiles, or
single tiles one after another.

Functions import `mosaic_gpu` themselves: it takes a third of a second, which only those who lower for a GPU should pay.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels._jax_private import load_gpu

# Warpgroups of 128 threads that multiply: two, so that one can multiply while the other reduces.
MULTIPLYING = 2

BLOCK_HIDDEN = 64  # 128 bytes, the widest rows that shared memory can swizzle
SWIZZLED_ROWS = 8
# Row blocks that run at the same time read the same weights, and read their own rows of x again for every tile. All
# these rows together should stay in the L2 cache, which has 50 MB in two halves; what both need may be in both. On an
# H100 the least time of 12 runs with the first is 2 to 6 % below that with the last, for both kernels in both calls.
_ROW_GROUP_BYTES = (16 * 2**20, 8 * 2**20, 32 * 2**20)
_MULTIPROCESSORS = 132  # of an H100, for programs that are exported for any GPU
_START_TILES = 0.1  # the cost of starting a thread block: one trip to memory, in units of a tile's time
_ALONE = {"copying": 1, "cluster_blocks": 1}
# The size of a warpgroup's tile, and how many stages fit into 227 KiB beside the buffers that kernels store from. A
# stage takes (2 * block_rows + block_columns) * 128 bytes: 48 KiB. These tiles load the fewest bytes per product, as
# 1/256 + 1/128 is the least that 128 accumulator registers allow: on an H100, tiles of 64 by 128 take 1.35 of the
# first's time, and three stages 1.15. The third does without `setmaxnreg`. In the last, a cluster reads 32 KiB for each
# stage of a thread block, where the others read 48.
TILE_SIZES: tuple[dict[str, int], ...] = (
    {"block_rows": 128, "block_columns": 128, "stages": 4, **_ALONE},
    {"block_rows": 64, "block_columns": 256, "stages": 4, **_ALONE},
    {"block_rows": 128, "block_columns": 128, "stages": 4, "copying": 0, "cluster_blocks": 1},
    {"block_rows": 64, "block_columns": 256, "stages": 4, "copying": 1, "cluster_blocks": 2},
)
# The columns that are stored at a time: more columns' terms would not fit the registers beside the tile. Of two buffers
# to store from, one is filled while TMA reads the other.
STORE_COLUMNS = 32
STORE_SLOTS = (2, 1)
_DTYPES = ("bfloat16", "float16")
LOG2_E = math.log2(math.e)


@dataclasses.dataclass(frozen=True)
class Tiling:
    """Tiling of the logits of one launch.

    Attributes:
      rows: a multiple of a worker's rows.
      hidden: the length of the products.
      columns: of the logits.
      block_rows: of one warpgroup's tile.
      block_columns: of a tile.
      stages: how many tiles of each operand shared memory holds.
      copying: the number of warpgroups that only copy, 0 or 1.
      cluster_blocks: how many thread blocks share the weight's tiles.
      row_group: how many row blocks are worked on at a time.
      vocab_splits: the number of runs that the tiles of a row are split into.
      workers: thread blocks, or clusters of them. Each computes one run, unless runs are single tiles.
    """

    rows: int
    hidden: int
    columns: int
    block_rows: int
    block_columns: int
    stages: int
    copying: int
    cluster_blocks: int
    row_group: int
    vocab_splits: int
    workers: int

    @classmethod
    def of(cls, config: Any, rows: int, weight_shape: Sequence[int]) -> "Tiling":
        """Makes the tiling of a launch from a configuration; rows are padded to whole row blocks."""
        columns, hidden = weight_shape
        row_blocks = math.ceil(rows / worker_rows(config))
        tiles = math.ceil(columns / config["block_columns"])
        splits = min(config.get("vocab_splits", tiles), tiles)
        return cls(
            rows=row_blocks * worker_rows(config),
            hidden=hidden,
            columns=columns,
            vocab_splits=splits,
            workers=min(config.get("workers", row_blocks * splits), row_blocks * splits),
            **{name: config[name] for name in (*TILE_SIZES[0], "row_group")},
        )

    @property
    def thread_block_rows(self) -> int:
        """The rows that a thread block owns at a time."""
        return MULTIPLYING * self.block_rows

    @property
    def row_blocks(self) -> int:
        """The number of row blocks; a worker owns one at a time."""
        return self.rows // (self.thread_block_rows * self.cluster_blocks)

    @property
    def hidden_blocks(self) -> int:
        """The steps along the hidden axis that one tile takes."""
        return pl.cdiv(self.hidden, BLOCK_HIDDEN)

    @property
    def tiles(self) -> int:
        """The number of tiles of a row."""
        return pl.cdiv(self.columns, self.block_columns)

    @property
    def tiles_per_split(self) -> int:
        """The most tiles of a run."""
        return pl.cdiv(self.tiles, self.vocab_splits)

    def tiles_of(self, worker: jax.Array) -> jax.Array:
        """Counts the tiles that a worker computes."""
        if self.tiles_per_split == 1:
            return lax.div(self.row_blocks * self.vocab_splits - 1 - worker, jnp.int32(self.workers)) + 1
        _, first_tile = self.place(worker, 0)
        # The last split may have fewer tiles than the others, or none.
        return jnp.clip(self.tiles - first_tile, 0, self.tiles_per_split)

    def place(self, worker: jax.Array, number: Any) -> tuple[jax.Array, jax.Array]:
        """Returns the row block of a worker's tile, and which tile of its row it is."""
        if self.tiles_per_split == 1:
            return self._run(worker + number * self.workers)
        row_block, split = self._run(worker)
        return row_block, split * self.tiles_per_split + number

    def _run(self, index: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the row block and the vocabulary split of a run.

        Rows vary fastest within a group: runs that start together are of the same split, so the weight passes from
        memory once for a whole group of row blocks, and the others find it in the cache. Every other group takes the
        splits in reverse, beginning with the weights that the group before has read last.
        """
        group = min(self.row_group, self.row_blocks)
        group_index = lax.div(index, jnp.int32(group * self.vocab_splits))
        rest = index - group_index * (group * self.vocab_splits)
        size = jnp.minimum(group, self.row_blocks - group_index * group)
        split = lax.div(rest, size)
        reverse = lax.rem(group_index, jnp.int32(2)) == 1
        split = jnp.where(reverse, self.vocab_splits - 1 - split, split)
        return group_index * group + lax.rem(rest, size), split


def worker_rows(config: Any) -> int:
    """Counts the rows that a worker owns at a time; rows have to be padded to a multiple of this."""
    return MULTIPLYING * config["block_rows"] * config["cluster_blocks"]


def grouped_sizes(rows: int, hidden: int) -> list[dict[str, int]]:
    """Lists `TILE_SIZES` with the row groups worth trying: all for the first sizes, and the first for the others."""

    def grouped(sizes: dict[str, int], group_bytes: int) -> dict[str, int]:
        row_blocks, block_bytes = math.ceil(rows / worker_rows(sizes)), 2 * worker_rows(sizes) * hidden
        return {**sizes, "row_group": max(1, min(row_blocks, group_bytes // block_bytes))}

    first = [grouped(sizes, _ROW_GROUP_BYTES[0]) for sizes in TILE_SIZES]
    others = [grouped(TILE_SIZES[0], group_bytes) for group_bytes in _ROW_GROUP_BYTES[1:]]
    return first + [sizes for index, sizes in enumerate(others) if sizes not in (first[0], *others[:index])]


def workers(hardware: Any, config: Any) -> int:
    """Counts the workers that run at the same time: shared memory has room for one thread block per multiprocessor."""
    return (hardware.cores or _MULTIPROCESSORS) // config["cluster_blocks"]


def vocab_splits(hardware: Any, config: Any, rows: int, columns: int, hidden: int) -> int:
    """Returns the number of vocabulary splits that keeps the multiprocessors busy with a group of row blocks."""
    at_once, tiles = workers(hardware, config), math.ceil(columns / config["block_columns"])
    row_blocks = math.ceil(rows / worker_rows(config))
    least = max(1, at_once // config["row_group"])

    # Workers run in waves. More splits even out the last wave; fewer start up less often.
    def time(splits: int) -> float:
        waves = pl.cdiv(row_blocks * splits, at_once)
        return waves * (pl.cdiv(tiles, splits) + _START_TILES)

    return min(range(min(least, tiles), min(8 * least, tiles) + 1), key=time)


def swizzled_smem(shape: Sequence[int], dtype: Any) -> Any:
    """Returns a type of shared memory that the matrix units and TMA both access without bank conflicts."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    row_bytes = shape[-1] * jnp.dtype(dtype).itemsize
    swizzle = plgpu.find_swizzle(8 * row_bytes)
    transforms = (
        plgpu.TilingTransform((SWIZZLED_ROWS, swizzle // jnp.dtype(dtype).itemsize)),
        plgpu.SwizzleTransform(swizzle),
    )
    return plgpu.SMEM(tuple(shape), dtype, transforms=transforms)


def store_buffers(slots: int, block_rows: int, dtype: Any) -> Any:
    """Returns shared memory to store from: slots * block_rows * STORE_COLUMNS * 2 bytes a warpgroup, 32 KiB at most."""
    return swizzled_smem((MULTIPLYING, slots, block_rows, STORE_COLUMNS), dtype)


def load(ref: Any, index: Any, *, interpret: bool) -> jax.Array:
    """Loads per-row or per-column values from device memory, in whatever layout their use requires."""
    return ref[index] if interpret else load_gpu(ref, index)


def by_row(values: jax.Array, like: jax.Array) -> jax.Array:
    """Broadcasts one value per row to every column."""
    return lax.broadcast_in_dim(values, like.shape, [0])


def by_column(values: jax.Array, like: jax.Array) -> jax.Array:
    """Broadcasts one value per column to every row."""
    return lax.broadcast_in_dim(values, like.shape, [1])


def capped(logits: jax.Array, softcap: float) -> jax.Array:
    """Computes softcap tanh(logits / softcap) from exponentials, as the hardware's own tanh has only 11 bits."""
    return softcap - 2 * softcap / (jnp.exp2((2 * LOG2_E / softcap) * logits) + 1)


def filled(array: jax.Array, shape: Sequence[int], value: float = 0) -> jax.Array:
    """Pads an array with `value` up to `shape`."""
    missing = [(0, size - present) for size, present in zip(shape, array.shape, strict=True)]
    if not any(after for _, after in missing):
        return array
    return jnp.pad(array, missing, constant_values=jnp.asarray(value, array.dtype))


def refuses_linear(hardware: Any, x: Any, weight: Any) -> str | None:
    """Says why logits of these operands cannot be computed; see `pallas_kernels.kernel.Kernel.refuses`."""
    if hardware.compute_capability is not None and hardware.compute_capability != (9, 0):
        major, minor = hardware.compute_capability
        return (
            "the kernel is written for the matrix units of compute capability 9.0; "
            f"{hardware.label} has {major}.{minor}"
        )
    # The weight's, because x is rounded to it if x is wider.
    dtype = jnp.dtype(weight.dtype).name
    if dtype == "float32":
        return "the matrix units would round float32 to 10 bits (tf32)"
    if dtype not in _DTYPES:
        return f"the kernel takes {', '.join(_DTYPES)}; x is {dtype}"
    if 0 in (*x.shape, *weight.shape):
        return "there is nothing to compute"
    return None
