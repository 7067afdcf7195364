"""Max pooling of images whose pixels lie outside of the tiles; see `max_pool`, and `max_pool_pixels` for its blocks.

A step takes as many rows as there are from one window to the next. Of the rows that the next windows need as well it
keeps the maxima of each window's columns.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.tpu import max_pool_pixels

_VMEM_BYTES = 42 * 2**20  # holds rows of 112 by 64 by 256 elements, with what the gradient's kernel keeps
_DEFAULT_LIMIT_BYTES = 16 * 2**20  # what XLA grants a kernel that asks for nothing


def blocks_of(view_shape, dtype, **geometry):
    """Returns how images of this view are cut; None if no block fits."""
    if max_pool_pixels.refusal(**geometry):
        return None
    return max_pool_pixels.blocks_of(view_shape, _VMEM_BYTES, dtype == jnp.bfloat16, **geometry)


def grid_of(view_shape, blocks):
    """Returns the blocks, and at last the steps from one row of windows to the next."""
    before, _, _, between, sublanes, lanes = view_shape
    tiles = pl.cdiv(sublanes, blocks.tile[0]), pl.cdiv(lanes, blocks.tile[1])
    return before, between, *tiles, blocks.outputs[0] + blocks.delay


def _kernel(x_ref, y_ref, *kept, blocks, propagate_nan):
    (sublanes, lanes), (tile_sublanes, tile_lanes) = blocks.chunk, blocks.tile
    step = pl.program_id(4)  # here, because JAX's interpreter does not know it in loops

    if kept:

        @pl.when(step == 0)
        def _():
            def fill(i, _):
                kept[0][i] = jnp.full(blocks.tile, -jnp.inf, kept[0].dtype)

            lax.fori_loop(0, blocks.outputs[1], fill, None)

    def chunk(i, _):
        part, lane_part = lax.div(i, tile_lanes // lanes), lax.rem(i, tile_lanes // lanes)
        place = (
            pl.ds(pl.multiple_of(part * sublanes, sublanes), sublanes),
            pl.ds(pl.multiple_of(lane_part * lanes, lanes), lanes),
        )
        window = functools.partial(_window, x_ref, y_ref, kept, place, step, blocks, propagate_nan)
        lax.fori_loop(0, blocks.outputs[1], window, None)

    lax.fori_loop(0, (tile_sublanes // sublanes) * (tile_lanes // lanes), chunk, None)


def _window(x_ref, y_ref, kept, place, step, blocks, propagate_nan, i, _):
    """Computes one window along columns."""
    begin, last = i * blocks.stride[1] - blocks.left, blocks.image[1] - 1
    # For a column beyond the image stands the nearest, which the window has as well.
    columns = [jnp.clip(begin + j, 0, last) for j in range(blocks.window[1])]

    def maximum(row):
        values = [x_ref[(row, column, *place)] for column in columns]
        if not propagate_nan:
            values = [jnp.where(jnp.isnan(value), -jnp.inf, value).astype(value.dtype) for value in values]
        best = functools.reduce(jnp.maximum, values)
        if row in blocks.rows_behind:
            is_inside = step * blocks.stride[0] + row < blocks.image[0]
            best = jnp.where(is_inside, best, -jnp.inf).astype(best.dtype)
        return best

    found = {row: maximum(row) for row in blocks.searched_rows}
    rows = [found[row] for row in blocks.own_rows]
    if kept:
        rows.append(kept[0][(i, *place)])
        kept[0][(i, *place)] = functools.reduce(jnp.maximum, [found[row] for row in blocks.open_rows])
    y_ref[(i, *place)] = functools.reduce(jnp.maximum, rows)


def launch(x, propagate_nan, cost, interpret, **geometry):
    """Computes the maxima of images, both views (before, h, w, between, sublanes, lanes)."""
    from jax.experimental.pallas import tpu as pltpu  # here, because only lowering for a TPU needs its 0.2 s

    blocks = blocks_of(x.shape, x.dtype, **geometry)
    before, _, width, between, sublanes, lanes = x.shape

    def spec(rows, columns, index):
        return pl.BlockSpec(
            (None, rows, columns, None, *blocks.tile),
            lambda i, j, part, lane_part, step: (i, index(step), 0, j, part, lane_part),
        )

    rows, columns = blocks.outputs
    return pl.pallas_call(
        functools.partial(_kernel, blocks=blocks, propagate_nan=propagate_nan),
        name="max_pool",
        grid=grid_of(x.shape, blocks),
        in_specs=[spec(blocks.stride[0], width, lambda step: jnp.minimum(step, blocks.row_blocks - 1))],
        out_specs=spec(None, columns, lambda step: jnp.maximum(step - blocks.delay, 0)),
        out_shape=jax.ShapeDtypeStruct((before, rows, columns, between, sublanes, lanes), x.dtype),
        scratch_shapes=[pltpu.VMEM((columns, *blocks.tile), x.dtype)] if blocks.is_late else [],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",) * 4 + ("arbitrary",),
            vmem_limit_bytes=max(_DEFAULT_LIMIT_BYTES, blocks.vmem_bytes * 9 // 8),
        ),
        cost_estimate=cost,
        interpret=interpret,
    )(x)
