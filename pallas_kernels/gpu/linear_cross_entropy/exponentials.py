"""Exponentials of a linear layer's logits on Hopper, with a reference of each row that is known before its logits.

    P = exp(z - reference) in the operands' dtype,    rest = sum P over the classes, before P is rounded

Nothing is carried from tile to tile, so the grid is persistent: there is a thread block for each multiprocessor, which
computes one tile after another. All of them end within a tile's time of each other, and only the first tile waits for
its operands. P is stored as the cotangent in `gradients` is: from shared memory, by TMA, while the next columns are
computed. Row sums are stored for each tile, 4 bytes beside 256 of P. XLA leaves the two products with P to cuBLAS.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.gpu.linear_cross_entropy import pipeline, tiles
from pallas_kernels.gpu.linear_cross_entropy.tiles import STORE_COLUMNS, STORE_SLOTS, Tiling


class _Params(NamedTuple):
    softcap: float | None
    most_excess: float
    store_slots: int
    has_bias: bool
    has_target: bool


def _kernel(x_gmem, weight_gmem, labels_gmem, reference_gmem, *refs, tiling, params, interpret):
    """Takes as `refs` the bias and the target weights, if present; P and the sums; shared memory to store P from."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    *optional, exponentials_gmem, sums_gmem, exponentials_smem = refs
    bias_gmem = optional.pop(0) if params.has_bias else None
    target_gmem = optional.pop(0) if params.has_target else None
    load = functools.partial(tiles.load, interpret=interpret)

    def body(_, fold):
        out_smem = exponentials_smem.at[lax.axis_index("warpgroup")]

        def begin(place):
            labels, reference = load(labels_gmem, place.rows), load(reference_gmem, place.rows)

            def consume(z, _):
                sums = (jnp.zeros(reference.shape, jnp.float32),) * (1 + params.has_target)
                for index, start in enumerate(range(0, tiling.block_columns, STORE_COLUMNS)):
                    part = lax.slice(z, (0, start), (z.shape[0], start + STORE_COLUMNS))
                    part, sums = exponentials_of(part, place.column + start, labels, reference, sums)
                    own_gmem = exponentials_gmem.at[place.rows, pl.ds(place.column + start, STORE_COLUMNS)]
                    pipeline.store(part, index, params.store_slots, out_smem, own_gmem)
                # No two thread blocks have the same rows and tile, so results are stored without atomics, in any order.
                for field, values in enumerate(sums):
                    sums_gmem[field, place.tile, place.rows] = values

            return consume

        def exponentials_of(z, column, labels, reference, sums):
            own_columns = pl.ds(column, STORE_COLUMNS)
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
                of_target = [of_target[0] + jnp.sum(products, axis=1)]
            if params.softcap is not None:
                bounded = z * (1 / params.softcap)
                value = value * (1 - bounded * bounded)
            return value, (rest, *of_target)

        fold(begin, None)
        plgpu.wait_smem_to_gmem(0)

    pipeline.fold_tiles(body, x_gmem, weight_gmem, tiling=tiling, interpret=interpret)


def exponentials(
    x, weight, bias, target, labels, reference, *, softcap, most_excess, config, interpret=False
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Launches the kernel on rows (R, H); bias and target may be None.

    Returns P (R, V) times the softcap's derivative, which is 0 at the label and at most exp(most_excess); the sums of
    the exponentials (R,), without the label's and without the derivative; and sum t (z - reference) (R,).
    """
    rows, slots = len(x), config["store_slots"]
    tiling = Tiling.of(config, rows, weight.shape)
    columns = tiling.tiles * tiling.block_columns
    params = _Params(softcap, most_excess, slots, bias is not None, target is not None)
    vectors = (tiles.filled(v.astype(jnp.float32), (columns,)) for v in (bias, target) if v is not None)
    stored, sums = pipeline.launch(
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
            jax.ShapeDtypeStruct((1 + params.has_target, tiling.tiles, tiling.rows), jnp.float32),
        ),
        tiling=tiling,
        name="linear_cross_entropy_exponentials",
        interpret=interpret,
        scratch=[tiles.store_buffers(slots, tiling.block_rows, x.dtype)],
    )
    rest, *of_target = jnp.sum(sums, axis=1)[:, :rows]
    return stored[:rows, : tiling.columns], rest, of_target[0] if of_target else jnp.zeros_like(rest)


def refusal(hardware, x, weight) -> str | None:
    """Says why the kernel cannot run on operands of these shapes and dtypes."""
    return tiles.refuses_linear(hardware, x, weight)


def configs(hardware, x, weight, chunk_rows) -> tuple[dict[str, Any], ...]:
    """Lists tiles and stages worth trying for chunks of so many rows; see `pallas_kernels.kernel.Kernel.configs`."""
    sizes = tiles.grouped_sizes(min(math.prod(x.shape[:-1]), chunk_rows), weight.shape[1])
    ways = [(each, STORE_SLOTS[0]) for each in sizes] + [(sizes[0], slots) for slots in STORE_SLOTS[1:]]
    return tuple({**each, "workers": tiles.workers(hardware, each), "store_slots": slots} for each, slots in ways)
