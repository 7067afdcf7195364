"""Logits of a linear layer on Hopper, tile by tile in registers; the forward and backward kernels share this.

A thread block owns a block of rows and a run of vocabulary tiles. One of its three warpgroups only asks the copy engine
(TMA) for the operands' tiles, as many ahead as shared memory holds, and does not stop between logit tiles. The other
two multiply, each its own half of the rows, and fold each tile into what they know about their rows. So the matrix
units work for one warpgroup while the other evaluates exponentials, and logits never leave registers.

If the last tile reaches beyond the weight, TMA fills in zeros. The kernels leave out the logits of classes that do not
exist.

Functions import `mosaic_gpu` themselves: it takes a third of a second, which only those who lower for a GPU should pay.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels._jax_private import interpret_gpu_params, load_gpu

# Warpgroups of 128 threads: two, so that one can multiply while the other reduces, and one to feed them.
_MULTIPLYING = 2
_COPYING = 1
# Registers of each thread: 128 * (2 * 232 + 40) = 64512 of the 65536 of a multiprocessor. The accumulator takes
# block_rows * block_columns / 128 of a multiplying thread's: 128 in most configurations.
_MULTIPLYING_REGISTERS = 232
_COPYING_REGISTERS = 40

BLOCK_HIDDEN = 64  # 128 bytes, the widest rows that shared memory can swizzle
_SWIZZLED_ROWS = 8
# Row blocks that run at the same time read the same weights, and read their own rows of x again for every tile. All
# these rows together should stay in the L2 cache, which has 50 MB.
_ROW_GROUP_BYTES = 32 * 2**20
_START_TILES = 0.1  # the cost of starting a thread block: one trip to memory, in units of a tile's time
# The size of a warpgroup's tile, and how many stages fit into 227 KiB beside the buffer that the backward kernel stores
# from. A stage takes (2 * block_rows + block_columns) * 128 bytes: 48 KiB in the first three, 32 KiB in the last. The
# first two load the fewest bytes per product, as 1/256 + 1/128 is the least that 128 accumulator registers allow; the
# last needs only 64 of them. The third has a stage less, and more shared memory to spare.
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
      vocab_splits: the number of runs that the tiles of a row are split into; each is one thread block's work.
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
        """The rows that a thread block owns."""
        return _MULTIPLYING * self.block_rows

    @property
    def row_blocks(self) -> int:
        """The number of row blocks; a thread block owns one."""
        return self.rows // self.thread_block_rows

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
        """The most tiles that one thread block computes."""
        return pl.cdiv(self.tiles, self.vocab_splits)

    @property
    def thread_blocks(self) -> int:
        """The number of thread blocks in the grid."""
        return self.row_blocks * self.vocab_splits

    def place(self, index: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The row block and the vocabulary split of a thread block.

        Rows vary fastest within a group: thread blocks that start together work on the same split, so the weight passes
        from memory once for a whole group of row blocks, and the others find it in the cache.
        """
        group = _row_group(self.row_blocks, self.hidden, self.thread_block_rows)
        group_index = lax.div(index, jnp.int32(group * self.vocab_splits))
        rest = index - group_index * (group * self.vocab_splits)
        size = jnp.minimum(group, self.row_blocks - group_index * group)
        return group_index * group + lax.rem(rest, size), lax.div(rest, size)


def thread_block_rows(config: Any) -> int:
    """The rows of a thread block; rows have to be padded to a multiple of this."""
    return _MULTIPLYING * config["block_rows"]


def vocab_splits(tiles: int, row_blocks: int, hidden: int, block_rows: int, multiprocessors: int) -> int:
    """The number of vocabulary splits that keeps the multiprocessors busy with row blocks that fit the cache."""
    least = max(1, multiprocessors // _row_group(row_blocks, hidden, block_rows))

    # Thread blocks run in waves of one per multiprocessor, as shared memory has room for one. More splits even out the
    # last wave; fewer start up less often.
    def time(splits: int) -> float:
        waves = pl.cdiv(row_blocks * splits, multiprocessors)
        return waves * (pl.cdiv(tiles, splits) + _START_TILES)

    return min(range(min(least, tiles), min(8 * least, tiles) + 1), key=time)


def _row_group(row_blocks: int, hidden: int, block_rows: int) -> int:
    """The number of row blocks that are worked on at a time."""
    return max(1, min(row_blocks, _ROW_GROUP_BYTES // (2 * block_rows * hidden)))


def swizzled_smem(shape: Sequence[int], dtype: Any) -> Any:
    """A type of shared memory that the matrix units and TMA both access without bank conflicts."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    row_bytes = shape[-1] * jnp.dtype(dtype).itemsize
    swizzle = plgpu.find_swizzle(8 * row_bytes)
    transforms = (
        plgpu.TilingTransform((_SWIZZLED_ROWS, swizzle // jnp.dtype(dtype).itemsize)),
        plgpu.SwizzleTransform(swizzle),
    )
    return plgpu.SMEM(tuple(shape), dtype, transforms=transforms)


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


class _Pipeline(NamedTuple):
    """The operands' tiles of one thread block on their way through shared memory.

    Steps are numbered across logit tiles: step `tile * hidden_blocks + block` uses slot `step % stages`. Without a
    break between tiles, the next tile's operands are fetched while the last one's logits are still being reduced.
    """

    tiling: Tiling
    interpret: bool
    first_tile: jax.Array
    tiles: jax.Array
    stages: jax.Array
    x_smem: Any
    weight_smem: Any
    loaded: Any
    consumed: Any

    def column_of(self, tile: jax.Array) -> jax.Array:
        return (self.first_tile + tile) * self.tiling.block_columns

    def copy_all(self, x_gmem: Any, weight_gmem: Any, row_block: jax.Array) -> None:
        """Asks TMA for the operands of every step, as soon as a slot is free."""
        from jax.experimental.pallas import mosaic_gpu as plgpu

        tiling, stages, hidden_blocks = self.tiling, self.stages, self.tiling.hidden_blocks

        def copy_tile(tile, _):
            rows = pl.ds(row_block * tiling.thread_block_rows, tiling.thread_block_rows)
            columns = pl.ds(self.column_of(tile), tiling.block_columns)

            def copy(block, _):
                step = tile * hidden_blocks + block
                slot = lax.rem(step, stages)

                # The first `stages` steps find their slots empty; later ones wait until both warpgroups have read
                # theirs.
                @pl.when(step >= stages)
                def _wait():
                    plgpu.barrier_wait(self.consumed.at[slot])

                hidden = pl.ds(block * BLOCK_HIDDEN, BLOCK_HIDDEN)
                weight_tile = weight_gmem.at[hidden, columns] if self.interpret else weight_gmem.at[columns, hidden]
                plgpu.copy_gmem_to_smem(x_gmem.at[rows, hidden], self.x_smem.at[slot], self.loaded.at[slot])
                plgpu.copy_gmem_to_smem(weight_tile, self.weight_smem.at[slot], self.loaded.at[slot])

            lax.fori_loop(0, hidden_blocks, copy, None)

        lax.fori_loop(0, self.tiles, copy_tile, None)
        steps = self.tiles * hidden_blocks
        # This warpgroup must not return, which would free the shared memory, before the last slots have been read.
        lax.fori_loop(
            jnp.maximum(0, steps - stages),
            steps,
            lambda step, _: plgpu.barrier_wait(self.consumed.at[lax.rem(step, stages)]),
            None,
        )

    def logits(self, tile: jax.Array, own_rows: Any) -> jax.Array:
        """Multiplies one tile: the logits of a warpgroup's own rows, in registers."""
        from jax.experimental.pallas import mosaic_gpu as plgpu

        stages, hidden_blocks = self.stages, self.tiling.hidden_blocks

        def multiply(accumulator):
            def step(block, _):
                step = tile * hidden_blocks + block
                slot = lax.rem(step, stages)
                plgpu.barrier_wait(self.loaded.at[slot])
                weight_tile = self.weight_smem.at[slot]
                # Mosaic GPU's interpreter cannot transpose a reference, so there the weight comes as (H, V).
                weight_tile = weight_tile if self.interpret else weight_tile.transpose((1, 0))
                # Products are asynchronous. At most one stays in flight, so this wait ends the product of the step
                # before, and only then is that step's slot free for TMA to overwrite.
                plgpu.wgmma(accumulator, self.x_smem.at[slot, own_rows], weight_tile)
                plgpu.wgmma_wait(1)

                @pl.when(block > 0)
                def _release():
                    plgpu.barrier_arrive(self.consumed.at[lax.rem(step + stages - 1, stages)])

            lax.fori_loop(0, hidden_blocks, step, None)
            # Reading the accumulator waits for the last product; then the last slot is free as well.
            result = accumulator[...]
            plgpu.barrier_arrive(self.consumed.at[lax.rem((tile + 1) * hidden_blocks - 1, stages)])
            return result

        shape = self.tiling.block_rows, self.tiling.block_columns
        return pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef(shape, jnp.float32))


def fold_tiles(body: Callable[..., None], x_gmem: Any, weight_gmem: Any, *, tiling: Tiling, interpret: bool) -> None:
    """Calls `body(rows, split, fold)` in each multiplying warpgroup.

    `rows` is the slice of the warpgroup's rows and `split` the index of the vocabulary split.
    `fold(consume, carry)` computes the logits z tile by tile, and calls `consume(z, column, carry)` with the tile's
    first column; it returns the next carry.
    """
    from jax.experimental.pallas import mosaic_gpu as plgpu

    row_block, split = tiling.place(lax.axis_index("thread_block"))
    warpgroup = lax.axis_index("warpgroup")
    first_tile = split * tiling.tiles_per_split
    # The last split may have fewer tiles than the others, or none.
    tiles = jnp.clip(tiling.tiles - first_tile, 0, tiling.tiles_per_split)
    stages = jnp.int32(tiling.stages)

    def scope(x_smem: Any, weight_smem: Any, loaded: Any, consumed: Any) -> None:
        pipeline = _Pipeline(tiling, interpret, first_tile, tiles, stages, x_smem, weight_smem, loaded, consumed)

        # The launch gives every thread the same number of registers. A copying thread needs few and gives up the rest,
        # so that the accumulator and the terms of a tile fit into those of the multiplying threads.
        @pl.when(warpgroup == _MULTIPLYING)
        def _copy():
            plgpu.set_max_registers(_COPYING_REGISTERS, action="decrease")
            pipeline.copy_all(x_gmem, weight_gmem, row_block)

        @pl.when(warpgroup < _MULTIPLYING)
        def _multiply():
            plgpu.set_max_registers(_MULTIPLYING_REGISTERS, action="increase")
            own_rows = pl.ds(warpgroup * tiling.block_rows, tiling.block_rows)

            def fold(consume, carry):
                def next_tile(tile, carry):
                    return consume(pipeline.logits(tile, own_rows), pipeline.column_of(tile), carry)

                return lax.fori_loop(0, tiles, next_tile, carry)

            first_row = row_block * tiling.thread_block_rows + warpgroup * tiling.block_rows
            body(pl.ds(first_row, tiling.block_rows), split, fold)

    # Shared memory of a thread block, in bytes, for 16-bit operands; the first configuration takes 128 + 64 KiB:
    #   x_smem:       stages * thread_block_rows * BLOCK_HIDDEN * 2    both warpgroups read their halves of the rows
    #   weight_smem:  stages * block_columns * BLOCK_HIDDEN * 2        both read all of it
    #   barriers:     2 * stages * 8
    # A slot is loaded when both of its copies have arrived, and consumed when both warpgroups have multiplied it.
    # Collective: the three warpgroups share one allocation.
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
    result: Any,
    *,
    tiling: Tiling,
    name: str,
    interpret: Any,
    scratch: Sequence[Any] = (),
) -> Any:
    """Launches a kernel on (x, weight, ...), with results like `result`; pads the first two operands with zeros."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    x, weight, *others = operands
    # A tile may reach beyond the last class, but not be larger than the weight, and Mosaic GPU wants whole groups of
    # eight swizzled rows. For a vocabulary that is not a multiple of eight, or a hidden size that is not a multiple of
    # 64, this copies the operands.
    hidden = BLOCK_HIDDEN * tiling.hidden_blocks
    classes = max(tiling.block_columns, _SWIZZLED_ROWS * math.ceil(tiling.columns / _SWIZZLED_ROWS))
    x, weight = filled(x, (tiling.rows, hidden)), filled(weight, (classes, hidden))
    if interpret is True:
        # TMA fills what it reads out of bounds with zeros.
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
    """Pads an array with `value` up to `shape`."""
    missing = [(0, size - present) for size, present in zip(shape, array.shape, strict=True)]
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
    # The weight's, because x is rounded to it if x is wider.
    dtype = jnp.dtype(weight.dtype).name
    if dtype == "float32":
        return "the matrix units would round float32 to 10 bits (tf32)"
    if dtype not in _DTYPES:
        return f"the kernel takes {', '.join(_DTYPES)}; x is {dtype}"
    if 0 in (*x.shape, *weight.shape):
        return "there is nothing to compute"
    return None
