"""The gradient of an embedding table on TPU: each row is summed in VMEM and written once.

XLA sorts the ids. Then every tile of the table's rows owns a run of positions, and the grid passes over the tiles, in
one of two ways:

* if the rows of the gradient fit into VMEM, they come there as they are, and the words of `embedding_order` say where
  each position's row lies.
* else XLA brings them into the order of ids, and the grid walks over pairs of a tile and a chunk of its run. The
  indices of both are known ahead, by scalar prefetch, so that the pipeline can fetch the next chunk.

`embedding_sums` has the kernel.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.kernel import Kernel, Kind, dtype_names
from pallas_kernels.tpu.embedding_order import LANES, SUBLANES, Blocks, blocks_of, in_order
from pallas_kernels.tpu.embedding_sums import SLOTS, Plan, kernel
from pallas_kernels.tpu.streaming_cost import streaming_cost

_DTYPES = ("float32", "bfloat16")
_MOST_ROWS = 2**31 - 1
# `resident`: if all rows of the gradient are in VMEM.
_CONFIGS = (
    {"block_elements": 2**20, "resident": 1},
    {"block_elements": 2**18, "resident": 0},
    {"block_elements": 2**19, "resident": 0},
    {"block_elements": 2**17, "resident": 0},
)
_SMEM_BYTES = 2**19  # of scalar operands, at most; a TensorCore has twice as much SMEM
_MIB = 2**20
_SMALLEST_VMEM_BYTES = 64 * _MIB  # of all TPUs that can be targets: v5p's and TPU7x's


def run(grad, indices, *, num_weights, padding_idx, scale_grad_by_freq, config, interpret=False):
    """Launches the kernel; see `pallas_kernels.kernel.Kernel.run`."""
    from jax.experimental.pallas import tpu as pltpu  # here, because only lowering for a TPU needs its 0.2 s

    width, positions = grad.shape[-1], math.prod(indices.shape)
    blocks = blocks_of(num_weights, width, positions, grad.dtype, config)
    is_float32, is_whole = grad.dtype == jnp.float32, num_weights % SUBLANES == width % LANES == 0
    plan = Plan(blocks, is_float32 and is_whole, is_converted=not is_float32, averaged=scale_grad_by_freq)
    schedule, words, order = in_order(indices, blocks, num_weights, padding_idx)
    rows = grad.reshape(positions, width)
    rows = _as_stored(rows if blocks.is_resident else rows[order])
    table = jax.ShapeDtypeStruct((num_weights, width), grad.dtype)
    out = pl.pallas_call(
        functools.partial(kernel, plan=plan),
        name="embedding_dense_backward",
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(schedule), grid=(blocks.steps,), **_specs(plan, grad.dtype)
        ),
        out_shape=jax.eval_shape(_as_stored, table) if plan.in_place else table,
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",), vmem_limit_bytes=_vmem_bytes(blocks)),
        cost_estimate=streaming_cost((words, rows, table), rows.size, flops=1),
        interpret=interpret,
    )(*schedule, words.reshape(blocks.chunks, 1, blocks.chunk_rows), rows)
    return (_from_stored(out, table.shape) if plan.in_place else out,)


def _as_stored(rows: jax.Array) -> jax.Array:
    """Returns (N, D) as rows of 128 lanes in the order in which memory has them, which XLA knows to be no copy."""
    rows = jnp.pad(rows, ((0, -rows.shape[0] % SUBLANES), (0, -rows.shape[1] % LANES)))
    return rows.reshape(-1, SUBLANES, rows.shape[1] // LANES, LANES).transpose(0, 2, 1, 3).reshape(-1, LANES)


def _from_stored(lanes: jax.Array, shape: tuple[int, int]) -> jax.Array:
    return lanes.reshape(-1, shape[1] // LANES, SUBLANES, LANES).transpose(0, 2, 1, 3).reshape(shape)


def _specs(plan: Plan, dtype: Any) -> dict[str, Any]:
    """Returns blocks and scratch of the kernel."""
    from jax.experimental.pallas import tpu as pltpu  # here, because only lowering for a TPU needs its 0.2 s

    blocks = plan.blocks
    in_chunk, in_tile = (blocks.chunk_rows * blocks.strips, LANES), (blocks.rows * blocks.strips, LANES)
    if blocks.is_resident:
        words, rows = pl.BlockSpec(memory_space=pltpu.SMEM), pl.BlockSpec(memory_space=pl.ANY)
    else:
        words = pl.BlockSpec(
            (1, 1, blocks.chunk_rows), lambda step, tile, chunk, *_: (chunk[step], 0, 0), memory_space=pltpu.SMEM
        )
        rows = pl.BlockSpec(in_chunk, lambda step, tile, chunk, *_: (chunk[step], 0))
    table = pl.BlockSpec(
        (blocks.rows, blocks.strips * LANES),
        lambda step, scalars, *_: (step if blocks.is_resident else scalars[step], 0),
    )
    return {
        "in_specs": [words, rows],
        "out_specs": pl.BlockSpec(memory_space=pl.ANY) if plan.in_place else table,
        "scratch_shapes": [
            pltpu.VMEM((plan.slots + (plan.fullest_at > 0), *in_tile), jnp.float32),
            pltpu.SMEM((4,), jnp.int32),
            *[pltpu.VMEM((blocks.strips, LANES), jnp.float32)] * (1 + plan.averaged),
            *[pltpu.VMEM(in_chunk, jnp.float32)] * (blocks.is_resident or plan.is_converted),
            *[pltpu.SemaphoreType.DMA(())] * blocks.is_resident,
            *[pltpu.SemaphoreType.DMA((plan.slots + 1,))] * plan.in_place,
        ],
    }


def _vmem_bytes(blocks: Blocks) -> int:
    """Returns the VMEM that the kernel asks for."""
    row_bytes = 4 * blocks.strips * LANES
    # The gradient's rows, all of them or three chunks: two buffers, and a copy in float32. Then a tile of sums for each
    # slot and for the fullest one; or one such tile and two buffers of the result's.
    chunks = blocks.chunk_rows * (1 if blocks.is_resident else 3)
    return (chunks + (SLOTS + 1) * blocks.rows) * row_bytes + 2 * _MIB


def scalar_operands(indices: jax.Array, num_weights: int, width: int, dtype: Any, config: Any) -> tuple[jax.Array, ...]:
    """Returns the kernel's first operands for these ids: they decide its course, for replays of its schedule."""
    blocks = blocks_of(num_weights, width, indices.size, dtype, config)
    schedule, words, _ = in_order(indices, blocks, num_weights, None)
    return *schedule, words


def refuses(hardware, grad, indices, *, num_weights, **_) -> str | None:
    """Says why the kernel cannot run; see `pallas_kernels.kernel.Kernel.refuses`."""
    if jnp.dtype(grad.dtype).name not in _DTYPES:
        return f"Mosaic TPU computes on {' and '.join(_DTYPES)}; grad is {jnp.dtype(grad.dtype).name}"
    if 0 in (*grad.shape, num_weights):
        return f"there is nothing to sum; grad is {list(grad.shape)}"
    offered = configs(hardware, grad, indices, num_weights=num_weights)
    if not offered:
        return f"where the rows of {num_weights} ids begin does not fit the memory for scalars"
    is_float32, is_resident = jnp.dtype(grad.dtype) == jnp.float32, offered[0]["resident"]
    if is_float32 and not is_resident and kind_is_copied(hardware, grad.dtype, num_weights, grad.shape[-1], 0):
        return f"XLA stores tables of width {grad.shape[-1]} by columns, and would copy what the kernel writes"
    return None


def configs(hardware, grad, indices, *, num_weights, **_):
    """Lists block sizes worth trying; see `pallas_kernels.kernel.Kernel.configs`."""
    positions, width = math.prod(indices.shape), grad.shape[-1]
    vmem_bytes = getattr(hardware, "on_chip_bytes", None) or _SMALLEST_VMEM_BYTES

    def fits(config):
        blocks = blocks_of(num_weights, width, positions, grad.dtype, config)
        words = blocks.chunk_rows + blocks.tiles + 1 if blocks.is_resident else 4 * blocks.steps
        is_narrow = blocks.word_bits <= 32 and num_weights < _MOST_ROWS
        is_meant = blocks.is_resident == config["resident"]
        is_small = _vmem_bytes(blocks) <= 0.85 * vmem_bytes
        return is_narrow and is_meant and is_small and 4 * words <= _SMEM_BYTES

    return [config for config in _CONFIGS if fits(config)]


def kind(hardware, grad, indices, *, num_weights, padding_idx, scale_grad_by_freq) -> Kind:
    """Returns what makes cases alike; see `pallas_kernels.kernel.Kernel.kind`."""
    (config, *_) = configs(hardware, grad, indices, num_weights=num_weights)
    way = "all rows in VMEM" if config["resident"] else "rows in chunks"
    is_whole = grad.shape[-1] % LANES == 0
    options = ["whole lanes" if is_whole else "part of the lanes"]
    # Rows that the kernel holds in VMEM leave the less of it for the table.
    held_bytes = config["resident"] * grad.size * jnp.dtype(grad.dtype).itemsize
    is_small = config["resident"] and not is_whole and kind_is_small(hardware, grad, num_weights)
    options += ["small table"] * is_small
    options += ["copied"] * kind_is_copied(hardware, grad.dtype, num_weights, grad.shape[-1], held_bytes)
    options += ["padding"] * (padding_idx is not None) + ["by frequency"] * scale_grad_by_freq
    return Kind(", ".join((dtype_names(grad), way, *options)), (math.prod(indices.shape), grad.shape[-1], num_weights))


def kind_is_small(hardware, grad, rows) -> bool:
    """Tells whether XLA adds up rows in VMEM as well, as table and gradient take a quarter of it."""
    width = pl.cdiv(grad.shape[-1], LANES) * LANES
    taken = (rows * width + grad.size) * jnp.dtype(grad.dtype).itemsize
    return hardware.on_chip_bytes is not None and 4 * taken <= hardware.on_chip_bytes


def kind_is_copied(hardware, dtype, rows, width, held_bytes) -> bool:
    """Tells whether XLA stores columns of a table together, as that pads less, and copies the kernel's rows in HBM."""
    of_rows = pl.cdiv(rows, SUBLANES) * pl.cdiv(width, LANES)
    of_columns = pl.cdiv(width, SUBLANES) * pl.cdiv(rows, LANES)
    table_bytes = of_rows * SUBLANES * LANES * jnp.dtype(dtype).itemsize
    return of_columns < of_rows and not hardware.may_keep(table_bytes + held_bytes)


KERNEL = Kernel(name="mosaic_tpu", platform="tpu", run=run, refuses=refuses, configs=configs, kind=kind)
