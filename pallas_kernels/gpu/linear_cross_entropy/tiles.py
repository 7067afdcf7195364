"""Logits of a linear layer on Hopper, tile by tile in registers: what the forward and the backward kernel share.

A thread block owns a block of rows and a run of vocabulary tiles. Of its three warpgroups one does nothing but ask the
copy engine (TMA) for the operands' tiles, as many ahead as shared memory holds and across the ends of logit tiles; the
other two multiply, each its own half of the rows, and fold what a tile holds into what they know of their rows. So the
matrix units of one warpgroup work while the other evaluates exponentials, and logits never leave registers.

Where the last tile reaches beyond the weight, TMA fills in zeros; the logits of classes that do not exist are for the
kernels to leave out.

Functions import `mosaic_gpu` themselves: it takes a third of a second, which only those who lower for a GPU should pay.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels._jax_private import interpret_gpu_params, load_gpu

# Each a warpgroup of 128 threads.
_MULTIPLYING = 2
_COPYING = 1
# Registers of each thread: 128 * (2 * 232 + 40) of the 65536 that a multiprocessor has.
_MULTIPLYING_REGISTERS = 232
_COPYING_REGISTERS = 40

BLOCK_HIDDEN = 64  # 128 bytes, the widest rows that shared memory can swizzle
_SWIZZLED_ROWS = 8
# Row blocks that run at the same time read the same weights; together they should stay in a cache of 50 MB.
_ROW_GROUP_BYTES = 32 * 2**20
_START_TILES = 0.1  # what starting a thread block costs: one trip to memory, in the time of a tile
# Of a warpgroup's tile, with as many stages as fit 227 KiB beside what is stored from there. The first two move the
# fewest bytes a product; the last leaves more registers.
TILE_SIZES = (
    {"block_rows": 128, "block_columns": 128, "stages": 4},
    {"block_rows": 64, "block_columns": 256, "stages": 4},
    {"block_rows": 128, "block_columns": 128, "stages": 3},
    {"block_rows": 64, "block_columns": 128, "stages": 6},
)
_DTYPES = ("bfloat16", "float16")
LOG2_E = math.log2(math.e)


@dataclasses.dataclass(frozen=True)
class Tiling:
    """How the logits of one launch are split.

    Attributes:
      rows: a multiple of a thread block's rows.
      hidden: the length of the products.
      columns: of the logits.
      block_rows: of one warpgroup's tile.
      block_columns: of a tile.
      stages: how many tiles of each operand shared memory holds.
      vocab_splits: into how many runs the tiles of a row are split; each is the work of one thread block.
    """

    rows: int
    hidden: int
    columns: int
    block_rows: int
    block_columns: int
    stages: int
    vocab_splits: int

    @property
    def thread_block_rows(self) -> int:
        """How many rows a thread block owns."""
        return _MULTIPLYING * self.block_rows

    @property
    def row_blocks(self) -> int:
        """Of rows, each a thread block's."""
        return self.rows // self.thread_block_rows

    @property
    def hidden_blocks(self) -> int:
        """How many steps the products of one tile take."""
        return pl.cdiv(self.hidden, BLOCK_HIDDEN)

    @property
    def tiles(self) -> int:
        """How many tiles a row has."""
        return pl.cdiv(self.columns, self.block_columns)

    @property
    def tiles_per_split(self) -> int:
        """How many of them one thread block computes at most."""
        return pl.cdiv(self.tiles, self.vocab_splits)

    @property
    def thread_blocks(self) -> int:
        """How many are launched."""
        return self.row_blocks * self.vocab_splits

    def place(self, index: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The row block and the vocabulary split of a thread block; those that start together share their operands."""
        group = _row_group(self.row_blocks, self.hidden, self.thread_block_rows)
        group_index = lax.div(index, jnp.int32(group * self.vocab_splits))
        rest = index - group_index * (group * self.vocab_splits)
        size = jnp.minimum(group, self.row_blocks - group_index * group)
        return group_index * group + lax.rem(rest, size), lax.div(rest, size)


def thread_block_rows(config: Any) -> int:
    """How many rows a thread block takes; rows have to be filled up to a multiple."""
    return _MULTIPLYING * config["block_rows"]


def vocab_splits(tiles: int, row_blocks: int, hidden: int, block_rows: int, multiprocessors: int) -> int:
    """The number of vocabulary splits that keeps the multiprocessors busy on rows that fit their cache."""
    least = max(1, multiprocessors // _row_group(row_blocks, hidden, block_rows))

    def time(splits: int) -> float:
        waves = pl.cdiv(row_blocks * splits, multiprocessors)
        return waves * (pl.cdiv(tiles, splits) + _START_TILES)

    return min(range(min(least, tiles), min(8 * least, tiles) + 1), key=time)


def _row_group(row_blocks: int, hidden: int, block_rows: int) -> int:
    """How many row blocks are worked on at a time."""
    return max(1, min(row_blocks, _ROW_GROUP_BYTES // (2 * block_rows * hidden)))


def swizzled_smem(shape: Sequence[int], dtype: Any) -> Any:
    """A type of shared memory that both the matrix units and TMA access without conflicts."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    row_bytes = shape[-1] * jnp.dtype(dtype).itemsize
    swizzle = plgpu.find_swizzle(8 * row_bytes)
    transforms = (
        plgpu.TilingTransform((_SWIZZLED_ROWS, swizzle // jnp.dtype(dtype).itemsize)),
        plgpu.SwizzleTransform(swizzle),
    )
    return plgpu.SMEM(tuple(shape), dtype, transforms=transforms)


def load(ref: Any, index: Any, *, interpret: bool) -> jax.Array:
    """Loads a row's or a column's values from device memory, in whichever layout they are needed."""
    return ref[index] if interpret else load_gpu(ref, index)


def by_row(values: jax.Array, like: jax.Array) -> jax.Array:
    """One value a row, for every column."""
    return lax.broadcast_in_dim(values, like.shape, [0])


def by_column(values: jax.Array, like: jax.Array) -> jax.Array:
    """One value a column, for every row."""
    return lax.broadcast_in_dim(values, like.shape, [1])


def capped(logits: jax.Array, softcap: float) -> jax.Array:
    """Computes softcap tanh(logits / softcap) from exponentials: the hardware's own tanh has 11 bits."""
    return softcap - 2 * softcap / (jnp.exp2((2 * LOG2_E / softcap) * logits) + 1)


def fold_tiles(
    body: Callable[..., None],
    x_gmem: Any,
    weight_gmem: Any,
    *,
    tiling: Tiling,
    interpret: bool,
) -> None:
    """Calls `body(rows, split, fold)` in each multiplying warpgroup.

    `rows` is the slice of the warpgroup's rows and `split` the index of the vocabulary split.
    `fold(consume, carry)` computes the logits z of one tile after the other; `consume(z, column, carry)` is given the
    tile's first column, and returns the next carry.
    """
    from jax.experimental.pallas import mosaic_gpu as plgpu

    row_block, split = tiling.place(lax.axis_index("thread_block"))
    warpgroup = lax.axis_index("warpgroup")
    first_tile = split * tiling.tiles_per_split
    tiles = jnp.clip(tiling.tiles - first_tile, 0, tiling.tiles_per_split)
    hidden_blocks, stages = tiling.hidden_blocks, jnp.int32(tiling.stages)

    def column_of(tile: jax.Array) -> jax.Array:
        return (first_tile + tile) * tiling.block_columns

    def scope(x_smem: Any, weight_smem: Any, loaded: Any, consumed: Any) -> None:
        @pl.when(warpgroup == _MULTIPLYING)
        def _copy():
            plgpu.set_max_registers(_COPYING_REGISTERS, action="decrease")

            def copy_tile(tile, _):
                rows = pl.ds(row_block * tiling.thread_block_rows, tiling.thread_block_rows)
                columns = pl.ds(column_of(tile), tiling.block_columns)

                def copy(block, _):
                    step = tile * hidden_blocks + block
                    slot = lax.rem(step, stages)

                    @pl.when(step >= stages)
                    def _wait():
                        plgpu.barrier_wait(consumed.at[slot])

                    hidden = pl.ds(block * BLOCK_HIDDEN, BLOCK_HIDDEN)
                    weight_tile = weight_gmem.at[hidden, columns] if interpret else weight_gmem.at[columns, hidden]
                    plgpu.copy_gmem_to_smem(x_gmem.at[rows, hidden], x_smem.at[slot], loaded.at[slot])
                    plgpu.copy_gmem_to_smem(weight_tile, weight_smem.at[slot], loaded.at[slot])

                lax.fori_loop(0, hidden_blocks, copy, None)

            lax.fori_loop(0, tiles, copy_tile, None)
            steps = tiles * hidden_blocks
            # Shared memory must not be given back while it is read.
            lax.fori_loop(
                jnp.maximum(0, steps - stages),
                steps,
                lambda step, _: plgpu.barrier_wait(consumed.at[lax.rem(step, stages)]),
                None,
            )

        @pl.when(warpgroup < _MULTIPLYING)
        def _multiply():
            plgpu.set_max_registers(_MULTIPLYING_REGISTERS, action="increase")
            own_rows = pl.ds(warpgroup * tiling.block_rows, tiling.block_rows)

            def logits(tile):
                def multiply(accumulator):
                    def step(block, _):
                        step = tile * hidden_blocks + block
                        slot = lax.rem(step, stages)
                        plgpu.barrier_wait(loaded.at[slot])
                        weight_tile = weight_smem.at[slot]
                        # The interpreter knows no transposed references: it is given the weight as (H, V).
                        weight_tile = weight_tile if interpret else weight_tile.transpose((1, 0))
                        plgpu.wgmma(accumulator, x_smem.at[slot, own_rows], weight_tile)
                        # One product stays in flight, so it is the tiles of the one before that are free.
                        plgpu.wgmma_wait(1)

                        @pl.when(block > 0)
                        def _release():
                            plgpu.barrier_arrive(consumed.at[lax.rem(step + stages - 1, stages)])

                    lax.fori_loop(0, hidden_blocks, step, None)
                    result = accumulator[...]
                    plgpu.barrier_arrive(consumed.at[lax.rem((tile + 1) * hidden_blocks - 1, stages)])
                    return result

                return pl.run_scoped(
                    multiply, plgpu.WGMMAAccumulatorRef((tiling.block_rows, tiling.block_columns), jnp.float32)
                )

            def fold(consume, carry):
                return lax.fori_loop(0, tiles, lambda tile, carry: consume(logits(tile), column_of(tile), carry), carry)

            first_row = row_block * tiling.thread_block_rows + warpgroup * tiling.block_rows
            body(pl.ds(first_row, tiling.block_rows), split, fold)

    weight_tile = (tiling.block_columns, BLOCK_HIDDEN)
    pl.run_scoped(
        scope,
        swizzled_smem((tiling.stages, tiling.thread_block_rows, BLOCK_HIDDEN), x_gmem.dtype),
        swizzled_smem((tiling.stages, *(weight_tile[::-1] if interpret else weight_tile)), weight_gmem.dtype),
        plgpu.Barrier(num_arrivals=2, num_barriers=tiling.stages),
        plgpu.Barrier(num_arrivals=_MULTIPLYING, num_barriers=tiling.stages),
        collective_axes="warpgroup",
    )


def launch(
    kernel: Callable[..., None],
    operands: Sequence[jax.Array],
    result: jax.ShapeDtypeStruct,
    *,
    tiling: Tiling,
    name: str,
    interpret: Any,
    scratch: Sequence[Any] = (),
) -> jax.Array:
    """Launches a kernel on (x, weight, ...); the first two are filled up with zeros."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    x, weight, *others = operands
    # A tile may reach beyond the classes, but not be larger than the weight; Mosaic GPU wants whole swizzled rows of
    # eight classes. Where a vocabulary does not have them, or the hidden size is odd, this copies the operands.
    hidden = BLOCK_HIDDEN * tiling.hidden_blocks
    classes = max(tiling.block_columns, _SWIZZLED_ROWS * math.ceil(tiling.columns / _SWIZZLED_ROWS))
    x, weight = filled(x, (tiling.rows, hidden)), filled(weight, (classes, hidden))
    if interpret is True:
        # What TMA does.
        interpret = interpret_gpu_params(out_of_bounds_reads="uninitialized", uninitialized_memory="zero")
    return plgpu.kernel(
        kernel,
        out_type=result,
        scratch_types=list(scratch),
        grid=(tiling.thread_blocks,),
        grid_names=("thread_block",),
        num_threads=_MULTIPLYING + _COPYING,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        kernel_name=name,
        interpret=interpret or None,
    )(x, weight.T if interpret else weight, *others)


def filled(array: jax.Array, shape: Sequence[int], value: float = 0) -> jax.Array:
    """`array` with `value` after its ends, up to `shape`."""
    missing = [(0, size - given) for size, given in zip(shape, array.shape, strict=True)]
    if not any(after for _, after in missing):
        return array
    return jnp.pad(array, missing, constant_values=jnp.asarray(value, array.dtype))


def refuses_linear(hardware: Any, x: Any, weight: Any) -> str | None:
    """Why logits of these operands cannot be computed; see `pallas_kernels.kernel.Kernel.refuses`."""
    if hardware.compute_capability is not None and hardware.compute_capability != (9, 0):
        major, minor = hardware.compute_capability
        return (
            f"the kernel is written for the matrix units of compute capability 9.0; {hardware.name} has {major}.{minor}"
        )
    # Which x is rounded to, where its gradient is asked for in a wider one.
    dtype = jnp.dtype(weight.dtype).name
    if dtype == "float32":
        return "the matrix units would round float32 to 10 bits (tf32)"
    if dtype not in _DTYPES:
        return f"the kernel takes {', '.join(_DTYPES)}; x is {dtype}"
    if 0 in (*x.shape, *weight.shape):
        return "there is nothing to compute"
    return None
