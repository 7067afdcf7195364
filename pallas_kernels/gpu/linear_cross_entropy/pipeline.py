"""Logits of a linear layer on Hopper, tile by tile in registers; the forward and backward kernels share this.

A thread block owns rows and computes their logits tile by tile. One of its three warpgroups only asks the copy engine
(TMA) for the operands' tiles, as many ahead as shared memory holds, and does not stop between logit tiles. The other
two multiply, each its own half of the rows, and fold each tile into what they know about their rows. So the matrix
units work for one warpgroup while the other evaluates exponentials, and logits never leave registers.

Two forms differ. With two warpgroups, the first of the multiplying ones asks for tiles as well, and no thread needs
more registers than the launch gives it: this does not rely on `setmaxnreg`, which ptxas drops where JAX links kernels
(from 0.12). In a cluster, two thread blocks with different rows share the weight: each asks for half of its tile, and
TMA writes the half to both.

If the last tile reaches beyond the weight, TMA fills in zeros. The kernels leave out the logits of classes that do not
exist.

Functions import `mosaic_gpu` themselves: it takes a third of a second, which only those who lower for a GPU should pay.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels._jax_private import INTERPRETS_CLUSTER_BARRIERS, interpret_gpu_params
from pallas_kernels.gpu.linear_cross_entropy.tiles import (
    BLOCK_HIDDEN,
    MULTIPLYING,
    SWIZZLED_ROWS,
    Tiling,
    filled,
    swizzled_smem,
)

# Registers of each thread: 128 * (2 * 232 + 40) = 64512 of the 65536 of a multiprocessor. The accumulator takes
# block_rows * block_columns / 128 of a multiplying thread's: 128 in most configurations.
_MULTIPLYING_REGISTERS = 232
_COPYING_REGISTERS = 40
# Rows lie within the four lanes of a quad, which reduce them without shared memory; so the
# default of 2048 bytes would be wasted.
_SCRATCH_BYTES = 128


class Place(NamedTuple):
    """Place of a warpgroup's tile of logits: its rows, the number of the tile in its row, and its first column."""

    rows: Any
    tile: jax.Array
    column: jax.Array


class _Pipeline(NamedTuple):
    """The operands' tiles of one thread block on their way through shared memory.

    Steps are numbered across logit tiles: step `number * hidden_blocks + block` uses slot `step % stages`. Without a
    break between tiles, the next tile's operands are fetched while the last one's logits are still being reduced.
    """

    tiling: Tiling
    interpret: bool
    warpgroup: jax.Array
    worker: jax.Array
    thread_block: Any
    tiles: jax.Array
    x_gmem: Any
    weight_gmem: Any
    x_smem: Any
    weight_smem: Any
    loaded: Any
    consumed: Any

    @property
    def steps(self) -> jax.Array:
        return self.tiles * self.tiling.hidden_blocks

    def slot(self, step: jax.Array) -> jax.Array:
        return lax.rem(step, jnp.int32(self.tiling.stages))

    def place(self, number: Any) -> tuple[jax.Array, jax.Array]:
        """Returns the row block of this thread block's tile, and where in its row the tile is."""
        row_block, tile = self.tiling.place(self.worker, number)
        return row_block * self.tiling.cluster_blocks + self.thread_block, tile

    def own_place(self, number: Any) -> Place:
        row_block, tile = self.place(number)
        first_row = row_block * self.tiling.thread_block_rows + self.warpgroup * self.tiling.block_rows
        return Place(pl.ds(first_row, self.tiling.block_rows), tile, tile * self.tiling.block_columns)

    def copy(self, step: jax.Array) -> None:
        """Asks TMA for the operands of a step, whose slot has to be free."""
        from jax.experimental.pallas import mosaic_gpu as plgpu

        tiling, slot = self.tiling, self.slot(step)
        hidden_blocks = jnp.int32(tiling.hidden_blocks)
        row_block, tile = self.place(lax.div(step, hidden_blocks))
        rows = pl.ds(row_block * tiling.thread_block_rows, tiling.thread_block_rows)
        columns = pl.ds(tile * tiling.block_columns, tiling.block_columns)
        hidden = pl.ds(lax.rem(step, hidden_blocks) * BLOCK_HIDDEN, BLOCK_HIDDEN)
        weight_tile = self.weight_gmem.at[hidden, columns] if self.interpret else self.weight_gmem.at[columns, hidden]
        plgpu.copy_gmem_to_smem(self.x_gmem.at[rows, hidden], self.x_smem.at[slot], self.loaded.at[slot])
        plgpu.copy_gmem_to_smem(
            weight_tile,
            self.weight_smem.at[slot],
            self.loaded.at[slot],
            collective_axes="thread_block" if tiling.cluster_blocks > 1 else None,
        )

    def copy_all(self) -> None:
        """Asks TMA for the operands of every step, as soon as a slot is free."""
        from jax.experimental.pallas import mosaic_gpu as plgpu

        stages = self.tiling.stages

        # The first `stages` steps find their slots empty; later ones wait until all who multiply have read theirs.
        def copy(step, _):
            @pl.when(step >= stages)
            def _wait():
                plgpu.barrier_wait(self.consumed.at[self.slot(step)])

            self.copy(step)

        lax.fori_loop(0, self.steps, copy, None)
        self.finish()

    def finish(self) -> None:
        """Waits until the last slots have been read: who copies must not return before, and free the shared memory."""
        from jax.experimental.pallas import mosaic_gpu as plgpu

        lax.fori_loop(
            jnp.maximum(0, self.steps - self.tiling.stages),
            self.steps,
            lambda step, _: plgpu.barrier_wait(self.consumed.at[self.slot(step)]),
            None,
        )

    def copy_first(self) -> None:
        """Asks TMA for as many operands as there are slots."""
        lax.fori_loop(0, jnp.minimum(self.steps, self.tiling.stages), lambda step, _: self.copy(step), None)

    def _copy_into_slot_of(self, step: jax.Array) -> None:
        """Uses the slot of a step again, once the other warpgroup has read it too."""
        from jax.experimental.pallas import mosaic_gpu as plgpu

        next_step = step + self.tiling.stages

        @pl.when((self.warpgroup == 0) & (step >= 0) & (next_step < self.steps))
        def _copy():
            plgpu.barrier_wait(self.consumed.at[self.slot(step)])
            self.copy(next_step)

    def logits(self, number: jax.Array) -> jax.Array:
        """Multiplies one tile: the logits of a warpgroup's own rows, in registers."""
        from jax.experimental.pallas import mosaic_gpu as plgpu

        tiling, hidden_blocks = self.tiling, self.tiling.hidden_blocks
        own_rows = pl.ds(self.warpgroup * tiling.block_rows, tiling.block_rows)

        def multiply(accumulator):
            def multiply_block(block, _):
                step = number * hidden_blocks + block
                slot = self.slot(step)
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
                    plgpu.barrier_arrive(self.consumed.at[self.slot(step - 1)])

                if not tiling.copying:
                    self._copy_into_slot_of(step - 1)

            lax.fori_loop(0, hidden_blocks, multiply_block, None)
            # Reading the accumulator waits for the last product; then the last slot is free as well.
            result = accumulator[...]
            plgpu.barrier_arrive(self.consumed.at[self.slot((number + 1) * hidden_blocks - 1)])
            return result

        return pl.run_scoped(
            multiply, plgpu.WGMMAAccumulatorRef((tiling.block_rows, tiling.block_columns), jnp.float32)
        )


def fold_tiles(body: Callable[..., None], x_gmem: Any, weight_gmem: Any, *, tiling: Tiling, interpret: bool) -> None:
    """Calls `body(first, fold)` in each multiplying warpgroup.

    `first` is the place of its first tile. `fold(begin, carry)` calls `begin(place)` before it computes the logits z of
    each tile, so that what this loads arrives meanwhile, and `consume(z, carry)`, its result, after that; it returns
    the next carry.
    """
    from jax.experimental.pallas import mosaic_gpu as plgpu

    warpgroup, worker = lax.axis_index("warpgroup"), lax.axis_index("worker")
    thread_block = lax.axis_index("thread_block") if tiling.cluster_blocks > 1 else 0

    def scope(*memory: Any) -> None:
        tiles = tiling.tiles_of(worker)
        pipeline = _Pipeline(tiling, interpret, warpgroup, worker, thread_block, tiles, x_gmem, weight_gmem, *memory)

        def multiply():
            def fold(begin, carry):
                def next_tile(number, carry):
                    consume = begin(pipeline.own_place(number))
                    return consume(pipeline.logits(number), carry)

                return lax.fori_loop(0, tiles, next_tile, carry)

            body(pipeline.own_place(0), fold)

        if not tiling.copying:
            pl.when(warpgroup == 0)(pipeline.copy_first)
            multiply()
            pl.when(warpgroup == 0)(pipeline.finish)
            return

        # The launch gives every thread the same number of registers. A copying thread needs few and gives up the rest,
        # so that the accumulator and the terms of a tile fit into those of the multiplying threads.
        @pl.when(warpgroup == MULTIPLYING)
        def _copy():
            plgpu.set_max_registers(_COPYING_REGISTERS, action="decrease")
            pipeline.copy_all()

        @pl.when(warpgroup < MULTIPLYING)
        def _multiply():
            plgpu.set_max_registers(_MULTIPLYING_REGISTERS, action="increase")
            multiply()

    # Collective: the warpgroups share one allocation.
    pl.run_scoped(scope, *_memory(x_gmem.dtype, weight_gmem.dtype, tiling, interpret), collective_axes="warpgroup")


def store(part: jax.Array, index: int, slots: int, buffers: Any, result_gmem: Any) -> None:
    """Stores a tile's part of this index from one of the warpgroup's buffers by TMA, while the next is computed."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    buffer = buffers.at[index % slots]
    # Before a buffer is written again, TMA has to have read it; the stores themselves may go on.
    plgpu.wait_smem_to_gmem(slots - 1, wait_read_only=True)
    buffer[...] = part.astype(result_gmem.dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(buffer, result_gmem)


def _memory(x_dtype: Any, weight_dtype: Any, tiling: Tiling, interpret: bool) -> tuple[Any, ...]:
    """Returns a thread block's shared memory for 16-bit operands; the first configuration takes 128 + 64 KiB.

        x_smem:       stages * thread_block_rows * BLOCK_HIDDEN * 2    both warpgroups read their halves of the rows
        weight_smem:  stages * block_columns * BLOCK_HIDDEN * 2        both read all of it
        barriers:     2 * stages * 8

    A slot is loaded when both of its copies have arrived, and consumed when both warpgroups have multiplied it: in a
    cluster those of both thread blocks, as each copies into both.
    """
    from jax.experimental.pallas import mosaic_gpu as plgpu

    weight_tile = (tiling.block_columns, BLOCK_HIDDEN)
    stages = tiling.stages
    # The interpreter lets each thread block of a cluster copy all for itself, so its own barriers are enough there.
    consumed: Any = plgpu.Barrier(num_barriers=stages, num_arrivals=MULTIPLYING)
    if tiling.cluster_blocks > 1 and (INTERPRETS_CLUSTER_BARRIERS or not interpret):
        axes = ("thread_block",)
        consumed = plgpu.ClusterBarrier(collective_axes=axes, num_barriers=stages, num_arrivals=MULTIPLYING)
    return (
        swizzled_smem((stages, tiling.thread_block_rows, BLOCK_HIDDEN), x_dtype),
        swizzled_smem((stages, *(weight_tile[::-1] if interpret else weight_tile)), weight_dtype),
        plgpu.Barrier(num_barriers=stages, num_arrivals=2),
        consumed,
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
    classes = max(tiling.block_columns, SWIZZLED_ROWS * math.ceil(tiling.columns / SWIZZLED_ROWS))
    if interpret:  # TMA fills what it reads out of bounds with zeros, and the interpreter refuses to read it.
        classes = tiling.tiles * tiling.block_columns
    x, weight = filled(x, (tiling.rows, hidden)), filled(weight, (classes, hidden))
    if interpret is True:
        interpret = interpret_gpu_params()
    in_cluster = tiling.cluster_blocks > 1
    return plgpu.kernel(
        kernel,
        out_type=result,
        scratch_types=list(scratch),
        grid=(tiling.workers,),
        grid_names=("worker",),
        cluster=(tiling.cluster_blocks,) if in_cluster else (),
        cluster_names=("thread_block",) if in_cluster else (),
        num_threads=MULTIPLYING + tiling.copying,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
            reduction_scratch_bytes=_SCRATCH_BYTES,
        ),
        kernel_name=name,
        interpret=interpret or None,
    )(x, weight.T if interpret else weight, *others)
