"""The gradient of an embedding table on TPU: each row is summed in VMEM and written once.

XLA sorts the ids and brings the gradient's rows into their order. Then every tile of the table's rows owns a run of
these rows, and the grid walks over pairs of a tile and a chunk of its run. The indices of both are known ahead, by
scalar prefetch, so that the pipeline can fetch the next chunk. A tile stays in VMEM, in float32, until its run is
summed.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.kernel import Kernel
from pallas_kernels.tpu.streaming_cost import streaming_cost

_LANES = 128
_DTYPES = ("float32", "bfloat16")
_NO_ROW = 2**31 - 1
_CHUNK_ROWS = 128  # at most
# VMEM: a tile of sums in float32, the result's tile in two buffers, and three chunks that are at most as large (two
# buffers, and a float32 copy of bfloat16). In float32 that is 6 * 4 * block_elements bytes at most: 12 MiB for the
# largest, within the 16 MiB that XLA grants.
_CONFIGS = ({"block_elements": 2**18}, {"block_elements": 2**19}, {"block_elements": 2**17})
_SMEM_BYTES = 2**18  # of the schedule, four int32 per step; a TensorCore has four times as much SMEM


class Blocks(NamedTuple):
    """How a table (V, D) and the sorted positions are cut.

    Attributes:
      rows: of a tile.
      columns: of a tile and of a chunk.
      chunk_rows: sorted positions in a chunk.
      tiles: how many cover the table's rows.
      chunks: how many cover the positions.
    """

    rows: int
    columns: int
    chunk_rows: int
    tiles: int
    chunks: int

    @property
    def steps(self) -> int:
        """The most pairs of a tile and a chunk that share positions, where a tile without positions counts as one."""
        return self.tiles + self.chunks - 1


def blocks_of(num_weights: int, width: int, positions: int, dtype: Any, config: Any) -> Blocks:
    """Tiles of at most `block_elements`, as wide as the table if enough rows of it fit."""
    multiple = 32 // jnp.dtype(dtype).itemsize
    columns = min(width, config["block_elements"] // multiple // _LANES * _LANES)
    rows = config["block_elements"] // _round_up(columns, _LANES) // multiple * multiple
    chunk_rows = min(rows, _CHUNK_ROWS)
    rows = min(rows, _round_up(num_weights, multiple))
    return Blocks(rows, columns, chunk_rows, pl.cdiv(num_weights, rows), pl.cdiv(positions, chunk_rows))


def _round_up(size: int, multiple: int) -> int:
    return pl.cdiv(size, multiple) * multiple


def _schedule(ids: jax.Array, blocks: Blocks) -> tuple[jax.Array, ...]:
    """For each step: the tile, the chunk, and where in the chunk the tile's positions begin and end."""
    starts = jnp.searchsorted(ids, blocks.rows * jnp.arange(blocks.tiles + 1, dtype=jnp.int32)).astype(jnp.int32)
    start, stop = starts[:-1], starts[1:]
    first_chunk = jnp.minimum(start // blocks.chunk_rows, blocks.chunks - 1)
    last_chunk = jnp.maximum(first_chunk, (stop - 1) // blocks.chunk_rows)
    steps_before = jnp.cumsum(last_chunk - first_chunk + 1, dtype=jnp.int32)
    step = jnp.arange(blocks.steps, dtype=jnp.int32)
    tile = jnp.searchsorted(steps_before, step, side="right").astype(jnp.int32)
    is_idle, tile = tile == blocks.tiles, jnp.minimum(tile, blocks.tiles - 1)
    # Counted back from the tile's last step. Idle steps at the end repeat the last chunk, which copies nothing.
    chunk = jnp.minimum(last_chunk[tile] - (steps_before[tile] - 1 - step), last_chunk[tile])
    begin = jnp.clip(start[tile] - chunk * blocks.chunk_rows, 0, blocks.chunk_rows)
    end = jnp.clip(stop[tile] - chunk * blocks.chunk_rows, 0, blocks.chunk_rows)
    return tile, chunk, begin, jnp.where(is_idle, 0, end)


def _kernel(
    tile_ref, chunk_ref, begin_ref, end_ref, ids_ref, grad_ref, out_ref, sums_ref, *scratch_refs, steps, averaged
):
    del chunk_ref
    step = pl.program_id(1)
    tile, begin, end = tile_ref[step], begin_ref[step], end_ref[step]
    is_first = (step == 0) | (tile_ref[jnp.maximum(step - 1, 0)] != tile)
    is_last = (step == steps - 1) | (tile_ref[jnp.minimum(step + 1, steps - 1)] != tile)
    scratch = list(scratch_refs)
    counts_ref = scratch.pop() if averaged else None
    float32_ref = scratch.pop() if scratch else grad_ref
    first_row = tile * sums_ref.shape[0]

    # The steps of one tile follow each other, so its sums stay in VMEM from the first to the last.
    @pl.when(is_first)
    def _():
        sums_ref[...] = jnp.zeros_like(sums_ref)
        if counts_ref is not None:
            counts_ref[...] = jnp.zeros_like(counts_ref)

    if float32_ref is not grad_ref:

        @pl.when(begin < end)
        def _():
            # A row of 16-bit values shares its registers with the next one and cannot be read alone. So a chunk that
            # has any rows of this tile is converted as a whole, once.
            float32_ref[...] = grad_ref[...].astype(jnp.float32)

    # Rows are added one by one, in the order of positions: equal ids may follow each other, and the sum must not depend
    # on how the work is cut.
    def add(position, _):
        row = pl.ds(ids_ref[0, 0, position] - first_row, 1)
        sums_ref[row, :] += float32_ref[pl.ds(position, 1), :]
        if counts_ref is not None:
            counts_ref[row, :] += 1.0

    jax.lax.fori_loop(begin, end, add, None)

    @pl.when(is_last)
    def _():
        sums = sums_ref[...]
        if counts_ref is not None:
            sums = sums * (1 / jnp.maximum(counts_ref[...], 1.0))
        out_ref[...] = sums.astype(out_ref.dtype)


def run(grad, indices, *, num_weights, padding_idx, scale_grad_by_freq, config, interpret=False):
    """Launches the kernel; see `pallas_kernels.kernel.Kernel.run`."""
    from jax.experimental.pallas import tpu as pltpu  # here, because only lowering for a TPU needs its 0.2 s

    width, positions = grad.shape[-1], math.prod(indices.shape)
    blocks = blocks_of(num_weights, width, positions, grad.dtype, config)
    ids, order, schedule = _in_order(indices, blocks, num_weights, padding_idx)
    rows = grad.reshape(positions, width)[order]
    table = jax.ShapeDtypeStruct((num_weights, width), grad.dtype)
    out = pl.pallas_call(
        functools.partial(_kernel, steps=blocks.steps, averaged=scale_grad_by_freq),
        name="embedding_dense_backward",
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(schedule),
            # Parts of wide rows are independent. Each passes over all steps, which accumulate in order.
            grid=(pl.cdiv(width, blocks.columns), blocks.steps),
            in_specs=[
                pl.BlockSpec(
                    (1, 1, blocks.chunk_rows),
                    lambda column, step, tile, chunk, *_: (chunk[step], 0, 0),
                    memory_space=pltpu.SMEM,
                ),
                pl.BlockSpec(
                    (blocks.chunk_rows, blocks.columns), lambda column, step, tile, chunk, *_: (chunk[step], column)
                ),
            ],
            out_specs=pl.BlockSpec((blocks.rows, blocks.columns), lambda column, step, tile, *_: (tile[step], column)),
            scratch_shapes=[
                pltpu.VMEM((blocks.rows, blocks.columns), jnp.float32),
                *[pltpu.VMEM((blocks.chunk_rows, blocks.columns), jnp.float32)] * (grad.dtype != jnp.float32),
                *[pltpu.VMEM((blocks.rows, 1), jnp.float32)] * scale_grad_by_freq,
            ],
        ),
        out_shape=table,
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        cost_estimate=streaming_cost((ids, rows, table), rows.size, flops=1),
        interpret=interpret,
    )(*schedule, ids.reshape(blocks.chunks, 1, blocks.chunk_rows), rows)
    return (out,)


def scalar_operands(indices: jax.Array, num_weights: int, width: int, dtype: Any, config: Any) -> tuple[jax.Array, ...]:
    """What the kernel's first operands hold for these ids: they decide its course, for replays of its schedule."""
    blocks = blocks_of(num_weights, width, indices.size, dtype, config)
    ids, _, schedule = _in_order(indices, blocks, num_weights, None)
    return *schedule, ids


def _in_order(
    indices: jax.Array, blocks: Blocks, num_weights: int, padding_idx: int | None
) -> tuple[jax.Array, jax.Array, tuple[jax.Array, ...]]:
    """Sorted ids and the positions that hold them, both filled up to whole chunks; and the schedule."""
    ids, order = _sorted_ids(indices, num_weights, padding_idx)
    missing = blocks.chunks * blocks.chunk_rows - ids.size
    ids = jnp.pad(ids, (0, missing), constant_values=_NO_ROW)
    return ids, jnp.pad(order, (0, missing)), _schedule(ids, blocks)


def _sorted_ids(indices: jax.Array, num_weights: int, padding_idx: int | None) -> tuple[jax.Array, jax.Array]:
    """Ids in ascending order, with ids that are not a row last, and the positions that hold them."""
    ids = indices.reshape(-1)
    ids = ids if ids.dtype.itemsize == 8 else ids.astype(jnp.int32)
    live = (ids >= 0) & (ids < num_weights)
    if padding_idx is not None:
        live &= ids != padding_idx
    ids = jnp.where(live, ids, jnp.full_like(ids, _NO_ROW)).astype(jnp.int32)
    ids, order = jax.lax.sort((ids, jnp.arange(ids.size, dtype=jnp.int32)), num_keys=1)
    return ids, order


def refuses(hardware, grad, indices, *, num_weights, **_) -> str | None:
    """Why the kernel cannot run; see `pallas_kernels.kernel.Kernel.refuses`."""
    if jnp.dtype(grad.dtype).name not in _DTYPES:
        return f"Mosaic TPU computes on {' and '.join(_DTYPES)}; grad is {jnp.dtype(grad.dtype).name}"
    if 0 in (*grad.shape, num_weights):
        return f"there is nothing to sum; grad is {list(grad.shape)}"
    if not configs(hardware, grad, indices, num_weights=num_weights):
        return f"where the rows of {num_weights} ids begin does not fit the memory for scalars"
    return None


def configs(hardware, grad, indices, *, num_weights, **_):
    """Block sizes worth trying; see `pallas_kernels.kernel.Kernel.configs`."""
    positions = math.prod(indices.shape)
    cuts = ((config, blocks_of(num_weights, grad.shape[-1], positions, grad.dtype, config)) for config in _CONFIGS)
    return [config for config, blocks in cuts if 4 * 4 * blocks.steps <= _SMEM_BYTES and num_weights < _NO_ROW]


KERNEL = Kernel(name="mosaic_tpu", platform="tpu", run=run, refuses=refuses, configs=configs)
