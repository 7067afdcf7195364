"""Exponentials of a linear layer's logits on Hopper, with a reference of each row that is known before its logits.

    P = exp(z - reference) in the operands' dtype,    rest = sum P over the classes, before P is rounded

Nothing is carried from tile to tile but sums, and P is stored as the cotangent in `gradients` is: from shared memory,
by TMA, while the next columns are computed. XLA leaves the two products with P to cuBLAS.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.gpu.linear_cross_entropy import statistics, tiles
from pallas_kernels.gpu.linear_cross_entropy.tiles import Tiling

# As in the statistics kernel: more columns' terms would not fit the registers beside the tile.
_STORE_COLUMNS = 32
# Buffers to store from: one is filled while TMA reads the other.
_SLOTS = 2


class _Params(NamedTuple):
    softcap: float | None
    most_excess: float
    has_bias: bool
    has_target: bool


def _kernel(x_gmem, weight_gmem, labels_gmem, reference_gmem, *refs, tiling, params, interpret):
    """`refs`: the bias and the target weights, if present; P and the sums; shared memory to store P from."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    *optional, exponentials_gmem, sums_gmem, exponentials_smem = refs
    bias_gmem = optional.pop(0) if params.has_bias else None
    target_gmem = optional.pop(0) if params.has_target else None
    load = functools.partial(tiles.load, interpret=interpret)

    def body(rows, split, fold):
        labels, reference = load(labels_gmem, rows), load(reference_gmem, rows)
        out_smem = exponentials_smem.at[lax.axis_index("warpgroup")]

        def consume(z, column, sums):
            for first in range(0, tiling.block_columns, _STORE_COLUMNS):
                part = lax.slice(z, (0, first), (z.shape[0], first + _STORE_COLUMNS))
                own_columns = pl.ds(column + first, _STORE_COLUMNS)
                part, sums = exponentials_of(part, column + first, own_columns, sums)
                slot = out_smem.at[first // _STORE_COLUMNS % _SLOTS]
                # Before a buffer is written again, TMA has to have read it; the stores themselves may go on.
                plgpu.wait_smem_to_gmem(_SLOTS - 1, wait_read_only=True)
                slot[...] = part.astype(exponentials_gmem.dtype)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(slot, exponentials_gmem.at[rows, own_columns])
            return sums

        def exponentials_of(z, column, own_columns, sums):
            columns = lax.broadcasted_iota(jnp.int32, z.shape, 1) + column
            if params.has_bias:
                z = z + tiles.by_column(load(bias_gmem, own_columns), z)
            if params.softcap is not None:
                z = tiles.capped(z, params.softcap)
            shifted = z - tiles.by_row(reference, z)
            # The last tile may reach beyond the classes; these columns are cut off after the launch.
            is_other = (columns < tiling.columns) & (columns != tiles.by_row(labels, columns))
            value = jnp.where(is_other, jnp.exp2(tiles.LOG2_E * jnp.minimum(shifted, params.most_excess)), 0.0)
            rest, *of_target = sums
            rest = rest + jnp.sum(value, axis=1)
            if params.has_target:
                products = tiles.by_column(load(target_gmem, own_columns), z) * shifted
                products = jnp.where(columns < tiling.columns, products, 0.0)
                of_target = [of_target[0] + jnp.sum(products, axis=1)]
            if params.softcap is not None:
                bounded = z * (1 / params.softcap)
                value = value * (1 - bounded * bounded)
            return value, (rest, *of_target)

        zeros = jnp.zeros(reference.shape, jnp.float32)
        # No two thread blocks have the same rows and split, so results are stored without atomics, in any order.
        for field, values in enumerate(fold(consume, (zeros,) * (1 + params.has_target))):
            sums_gmem[field, split, rows] = values
        plgpu.wait_smem_to_gmem(0)

    tiles.fold_tiles(body, x_gmem, weight_gmem, tiling=tiling, interpret=interpret)


def exponentials(
    x, weight, bias, shared_target, labels, reference, *, softcap, most_excess, config, interpret=False
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Launches the kernel on rows (R, H); bias and shared_target may be empty.

    Returns P (R, V) times the softcap's derivative, which is 0 at the label and at most exp(most_excess); the sums of
    the exponentials (R,), without the label's and without the derivative; and sum t (z - reference) (R,).
    """
    (rows, hidden), block_rows = x.shape, tiles.thread_block_rows(config)
    tiling = Tiling(
        rows=block_rows * math.ceil(rows / block_rows),
        hidden=hidden,
        columns=weight.shape[0],
        **{name: config[name] for name in ("block_rows", "block_columns", "stages", "vocab_splits")},
    )
    columns = tiling.tiles * tiling.block_columns
    params = _Params(softcap, most_excess, bias.size > 0, shared_target.size > 0)
    vectors = (tiles.filled(v.astype(jnp.float32), (columns,)) for v in (bias, shared_target) if v.size > 0)
    stored, sums = tiles.launch(
        functools.partial(_kernel, tiling=tiling, params=params, interpret=bool(interpret)),
        (
            x,
            weight,
            tiles.filled(labels.astype(jnp.int32), (tiling.rows,), -1),
            tiles.filled(reference, (tiling.rows,)),
            *vectors,
        ),
        (
            jax.ShapeDtypeStruct((tiling.rows, columns), x.dtype),
            jax.ShapeDtypeStruct((1 + params.has_target, tiling.vocab_splits, tiling.rows), jnp.float32),
        ),
        tiling=tiling,
        name="linear_cross_entropy_exponentials",
        interpret=interpret,
        # For each warpgroup, _SLOTS * block_rows * _STORE_COLUMNS * 2 bytes.
        scratch=[tiles.swizzled_smem((2, _SLOTS, config["block_rows"], _STORE_COLUMNS), x.dtype)],
    )
    rest, *of_target = jnp.sum(sums, axis=1)[:, :rows]
    return stored[:rows, : tiling.columns], rest, of_target[0] if of_target else jnp.zeros_like(rest)


def refusal(hardware, x, weight) -> str | None:
    """Why the kernel cannot run on operands of these shapes and dtypes."""
    return tiles.refuses_linear(hardware, x, weight)


def configs(hardware, x, weight, chunk_rows):
    """Tiles, stages and splits worth trying for chunks of so many rows; see `pallas_kernels.kernel.Kernel.configs`."""
    return statistics.launch_configs(hardware, min(math.prod(x.shape[:-1]), chunk_rows), *weight.shape)
