"""Gradients of linear cross entropy on Hopper: the logits are computed once more, in chunks of the vocabulary.

For a chunk of columns the kernel computes the logits, turns them into their cotangent in registers, and writes only the
cotangent, rounded to the 16 bits that the matrix units take. XLA leaves the two products with it to cuBLAS: they are
plain, large matrix products, which no kernel here would do faster. A single kernel for all three products would have to
add to the gradient of x or of the weight from many thread blocks at once, through memory and in no fixed order.

Chunks are of the vocabulary, not of rows, so that a chunk's weight gradient is final. Only the gradient of x, the
smaller one, is accumulated in float32.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.float16_rows import RowPowers
from pallas_kernels.gpu.linear_cross_entropy import pipeline, tiles
from pallas_kernels.gpu.linear_cross_entropy.tiles import STORE_COLUMNS, STORE_SLOTS, Tiling
from pallas_kernels.kernel import Kernel

_CHUNK_ELEMENTS = 2**27  # of the cotangent: a quarter of a GiB of 16-bit values in device memory at a time
_LEAST_CHUNK_COLUMNS = 4096


class CotangentTerms(NamedTuple):
    """The terms of the logits' cotangent for each row (n,).

    With p = exp(z - maximum - log_sum_exp), the cotangent of a logit z is

        p (softmax + slope (z - maximum)) + label [its class is the label] + target t.
    """

    softmax: Any
    slope: Any
    label: Any
    target: Any
    maximum: Any
    log_sum_exp: Any


# Padded rows have the probabilities exp(0 - 0 - inf) = 0.
_FILLS = CotangentTerms(0, 0, 0, 0, 0, math.inf)


class _Params(NamedTuple):
    softcap: float | None
    store_slots: int
    has_bias: bool
    has_target: bool
    has_slope: bool


def _kernel(x_gmem, weight_gmem, terms_gmem, labels_gmem, *refs, tiling, params, interpret):
    """`refs`: the bias and the target weights, if present; the cotangent; shared memory to store it from."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    *optional, cotangent_gmem, cotangent_smem = refs
    bias_gmem = optional.pop(0) if params.has_bias else None
    target_gmem = optional.pop(0) if params.has_target else None
    load = functools.partial(tiles.load, interpret=interpret)

    def body(first, fold):
        rows = first.rows
        labels = load(labels_gmem, rows)
        is_used = CotangentTerms(True, params.has_slope, True, params.has_target, True, True)
        terms = CotangentTerms(
            *(load(terms_gmem, (field, rows)) if used else None for field, used in enumerate(is_used))
        )
        out_smem = cotangent_smem.at[lax.axis_index("warpgroup")]

        def begin(place):
            def consume(z, carry):
                for index, start in enumerate(range(0, tiling.block_columns, STORE_COLUMNS)):
                    part = lax.slice(z, (0, start), (z.shape[0], start + STORE_COLUMNS))
                    own_gmem = cotangent_gmem.at[rows, pl.ds(place.column + start, STORE_COLUMNS)]
                    part = cotangent(part, place.column + start)
                    pipeline.store(part, index, params.store_slots, out_smem, own_gmem)
                return carry

            return consume

        # With p = exp(z - maximum - log_sum_exp), as `CotangentTerms` says. Exponentials are powers of 2, which is what
        # the hardware computes.
        def cotangent(z, column):
            columns = lax.broadcasted_iota(jnp.int32, z.shape, 1) + column
            own_columns = pl.ds(column, STORE_COLUMNS)
            if params.has_bias:
                z = z + tiles.by_column(load(bias_gmem, own_columns), z)
            if params.softcap is not None:
                z = tiles.capped(z, params.softcap)
            shifted = z - tiles.by_row(terms.maximum, z)
            scale = tiles.by_row(terms.softmax, z)
            if params.has_slope:
                finite = jnp.where(shifted == -jnp.inf, 0.0, shifted)
                scale = scale + tiles.by_row(terms.slope, z) * finite
            value = scale * jnp.exp2(tiles.LOG2_E * (shifted - tiles.by_row(terms.log_sum_exp, z)))
            is_label = columns == tiles.by_row(labels, columns)
            value = value + jnp.where(is_label, tiles.by_row(terms.label, z), 0.0)
            if params.has_target:
                value = value + tiles.by_row(terms.target, z) * tiles.by_column(load(target_gmem, own_columns), z)
            if params.softcap is not None:
                bounded = z * (1 / params.softcap)
                value = value * (1 - bounded * bounded)
            # The last tile may reach beyond the classes; these columns are cut off after the launch.
            return jnp.where(columns < tiling.columns, value, 0.0)

        fold(begin, None)
        plgpu.wait_smem_to_gmem(0)

    pipeline.fold_tiles(body, x_gmem, weight_gmem, tiling=tiling, interpret=interpret)


_Gradients = tuple[jax.Array, jax.Array, jax.Array]


def cotangent_of_logits(
    x: jax.Array,
    weight: jax.Array,
    terms: jax.Array,
    labels: jax.Array,
    bias: jax.Array,
    target: jax.Array,
    *,
    softcap: float | None,
    has_slope: bool,
    config: Any,
    interpret: Any,
) -> jax.Array:
    """The cotangent of the logits x weight^T + bias, in x's dtype; rows fill whole blocks, and `terms` are stacked."""
    tiling = Tiling.of(config, len(x), weight.shape)
    columns = tiling.tiles * tiling.block_columns
    params = _Params(softcap, config["store_slots"], bias.size > 0, target.size > 0, has_slope)
    cotangent = pipeline.launch(
        functools.partial(_kernel, tiling=tiling, params=params, interpret=bool(interpret)),
        (x, weight, terms, labels, *(tiles.filled(v, (columns,)) for v in (bias, target) if v.size > 0)),
        jax.ShapeDtypeStruct((tiling.rows, columns), x.dtype),
        tiling=tiling,
        name="linear_cross_entropy_backward",
        interpret=interpret,
        scratch=[tiles.store_buffers(params.store_slots, tiling.block_rows, x.dtype)],
    )
    return cotangent[:, : tiling.columns]


def linear_gradients(
    terms: CotangentTerms,
    x: jax.Array,
    weight: jax.Array,
    bias: jax.Array,
    labels: jax.Array,
    target: jax.Array,
    *,
    softcap: float | None,
    has_slope: bool,
    needs: tuple[bool, bool, bool],
    config: Any,
    interpret: Any,
) -> _Gradients:
    """The gradients of x (n, H), weight and bias in their dtypes; empty if `needs` does not ask for them.

    The bias gradient sums the rounded cotangent, in float32. x is rounded to the weight's dtype; its gradient is not.
    """
    needs_x, needs_weight, needs_bias = needs
    rows, hidden = x.shape
    classes = weight.shape[0]
    block_rows = tiles.worker_rows(config)
    padded_rows = block_rows * math.ceil(rows / block_rows)
    # Rows are padded once for all chunks. x_scaled is x but for float16, where it takes part of the rows' powers.
    x_filled = tiles.filled(x.astype(weight.dtype), (padded_rows, hidden))
    terms = CotangentTerms(*(tiles.filled(v, (padded_rows,), fill) for v, fill in zip(terms, _FILLS, strict=True)))
    powers, x_scaled, terms = _in_range(x_filled, terms, target)
    stacked, labels = jnp.stack(terms), tiles.filled(labels, (padded_rows,), -1)

    def add_chunk(start: Any, width: int, gradients: _Gradients) -> _Gradients:
        part = lax.dynamic_slice_in_dim(weight, start, width)
        by_column = (lax.dynamic_slice_in_dim(v.astype(jnp.float32), start, min(width, v.size)) for v in (bias, target))
        cotangent = cotangent_of_logits(
            x_filled,
            part,
            stacked,
            labels - start,
            *by_column,
            softcap=softcap,
            has_slope=has_slope,
            config=config,
            interpret=interpret,
        )
        return _with_chunk(gradients, cotangent, part, x_scaled, powers, start, needs)

    gradients = (
        jnp.zeros((padded_rows, hidden) if needs_x else (rows, 0), jnp.float32),
        jnp.zeros((classes if needs_weight else 0, hidden), weight.dtype),
        jnp.zeros((classes if needs_bias else 0,), bias.dtype),
    )
    # A loop over whole chunks, so that one kernel is compiled for all of them, and one more for the shorter last chunk.
    # This one goes first: if it came after the loop, XLA would compute its cotangent before the loop and keep it.
    width = min(config["chunk_columns"], classes)
    chunks, rest = divmod(classes, width)
    if rest:
        gradients = add_chunk(classes - rest, rest, gradients)
    gradients = lax.fori_loop(0, chunks, lambda chunk, found: add_chunk(chunk * width, width, found), gradients)
    x_grad, weight_grad, bias_grad = gradients
    x_grad = x_grad if powers is None else powers.rows[: len(x_grad), None] * x_grad
    return x_grad[:rows].astype(x.dtype), weight_grad, bias_grad


def _with_chunk(
    gradients: _Gradients,
    cotangent: jax.Array,
    weight: jax.Array,
    x_scaled: jax.Array,
    powers: RowPowers | None,
    start: Any,
    needs: tuple[bool, bool, bool],
) -> _Gradients:
    """Adds the products with a chunk's cotangent; `weight` is the chunk's, which begins at class `start`."""
    x_grad, weight_grad, bias_grad = gradients
    needs_x, needs_weight, needs_bias = needs
    if needs_x:
        x_grad = x_grad + jnp.einsum("nv,vh->nh", cotangent, weight, preferred_element_type=jnp.float32)
    if needs_weight:
        product = jnp.einsum("nv,nh->vh", cotangent, x_scaled, preferred_element_type=jnp.float32)
        product = product if powers is None else powers.largest * product
        weight_grad = lax.dynamic_update_slice_in_dim(weight_grad, product.astype(weight.dtype), start, 0)
    if needs_bias:
        by_row = cotangent if powers is None else cotangent.astype(jnp.float32) * powers.rows[:, None]
        total = jnp.sum(by_row, axis=0, dtype=jnp.float32)
        bias_grad = lax.dynamic_update_slice_in_dim(bias_grad, total.astype(bias_grad.dtype), start, 0)
    return x_grad, weight_grad, bias_grad


def _in_range(
    x: jax.Array, terms: CotangentTerms, target: jax.Array
) -> tuple[RowPowers | None, jax.Array, CotangentTerms]:
    """Powers of two that bring the cotangent's rows into float16's range, and x and the terms scaled by them."""
    if x.dtype != jnp.float16:  # bfloat16 has float32's range
        return None, x, terms
    softmax, slope, label, by_target = (jnp.abs(v) for v in terms[:4])
    powers = RowPowers.of(softmax + slope + label + by_target * jnp.max(jnp.abs(target), initial=0).astype(jnp.float32))
    scaled = {name: getattr(terms, name) / powers.rows for name in CotangentTerms._fields[:4]}
    return powers, powers.multiplied(x), terms._replace(**scaled)


def run(*operands, softcap, metrics, needs, config, interpret=False, **_):
    """Launches the kernel; see `pallas_kernels.kernel.Kernel.run`."""
    *terms, x, weight, bias, labels, shared_target, row_target, _logits = operands
    rows = x.shape[:-1]
    x_grad, weight_grad, bias_grad = linear_gradients(
        CotangentTerms(*(value.reshape(-1) for value in terms)),
        x.reshape(-1, x.shape[-1]),
        weight,
        bias,
        labels.reshape(-1),
        shared_target,
        softcap=softcap,
        has_slope=metrics,
        needs=(needs.x, needs.weight, needs.bias),
        config=config,
        interpret=interpret,
    )
    none = jnp.zeros((0,), shared_target.dtype)
    return x_grad.reshape(*rows, x_grad.shape[1]), weight_grad, bias_grad, none, jnp.zeros((*rows, 0), row_target.dtype)


def refuses(hardware, *operands, needs, **_) -> str | None:
    """Why the kernel cannot run; see `pallas_kernels.kernel.Kernel.refuses`."""
    *_pull, x, weight, _bias, _labels, _shared_target, row_target, logits = operands
    if logits.shape[-1] > 0:
        return "the logits are kept, so there are none to compute"
    if row_target.shape[-1] > 0:
        return "the kernel takes labels; probabilities of all classes are another array of the logits' size"
    if needs.shared_target:
        return "the gradient of target weights needs the logits, which the kernel does not keep"
    return tiles.refuses_linear(hardware, x, weight)


def configs(hardware, *operands, **_):
    """Tiles, stages, splits and chunks worth trying; see `pallas_kernels.kernel.Kernel.configs`."""
    x, weight = operands[6:8]
    return launch_configs(hardware, math.prod(x.shape[:-1]), *weight.shape)


def launch_configs(hardware: Any, rows: int, columns: int, hidden: int) -> tuple[dict[str, int], ...]:
    """The configurations for gradients over this many rows and columns."""
    # As large as the cotangent's memory allows, since each chunk reads all of x again; but not so narrow, with very
    # many rows, that its products no longer fill the matrix units.
    chunk_columns = max(_LEAST_CHUNK_COLUMNS, 2 ** int(math.log2(_CHUNK_ELEMENTS / rows)))

    def config(sizes: dict[str, int], chunk_columns: int, store_slots: int = STORE_SLOTS[0]) -> dict[str, int]:
        splits = tiles.vocab_splits(hardware, sizes, rows, min(columns, chunk_columns), hidden)
        return {**sizes, "vocab_splits": splits, "chunk_columns": chunk_columns, "store_slots": store_slots}

    sizes = tiles.grouped_sizes(rows, hidden)
    others = [config(sizes[0], chunk_columns, slots) for slots in STORE_SLOTS[1:]]
    others += [config(sizes[0], 2 * chunk_columns), config(sizes[0], chunk_columns // 2)]
    return (*(config(each, chunk_columns) for each in sizes), *others)


KERNEL = Kernel(
    name="mosaic_gpu", platform="cuda", run=run, refuses=refuses, configs=configs, interpreter_is_pure=False
)
