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
from pallas_kernels.gpu.linear_cross_entropy.statistics import label_refusal
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
    """Takes as `refs` the bias and the target weights, if present; the cotangent; shared memory to store it from."""
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


_Gradients = tuple[jax.Array | None, jax.Array | None, jax.Array | None]


def cotangent_of_logits(
    x: jax.Array,
    weight: jax.Array,
    terms: jax.Array,
    labels: jax.Array,
    bias: jax.Array | None,
    target: jax.Array | None,
    *,
    softcap: float | None,
    has_slope: bool,
    config: Any,
    interpret: Any,
) -> jax.Array:
    """Computes the cotangent of the logits x weight^T + bias in x's dtype, for whole row blocks, `terms` stacked."""
    tiling = Tiling.of(config, len(x), weight.shape)
    columns = tiling.tiles * tiling.block_columns
    params = _Params(softcap, config["store_slots"], bias is not None, target is not None, has_slope)
    cotangent = pipeline.launch(
        functools.partial(_kernel, tiling=tiling, params=params, interpret=bool(interpret)),
        (x, weight, terms, labels, *(tiles.filled(v, (columns,)) for v in (bias, target) if v is not None)),
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
    labels: jax.Array,
    *,
    bias: jax.Array | None = None,
    target: jax.Array | None = None,
    softcap: float | None,
    has_slope: bool,
    needs: tuple[bool, bool, bool],
    config: Any,
    interpret: Any,
) -> _Gradients:
    """Computes the gradients of x (n, H), weight and bias in their dtypes; None if `needs` does not ask for them.

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
        by_column = (
            None if v is None else lax.dynamic_slice_in_dim(v.astype(jnp.float32), start, width) for v in (bias, target)
        )
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
        return _with_chunk(gradients, cotangent, part, x_scaled, powers, start)

    gradients = (
        jnp.zeros((padded_rows, hidden), jnp.float32) if needs_x else None,
        jnp.zeros_like(weight) if needs_weight else None,
        jnp.zeros_like(bias) if needs_bias and bias is not None else None,
    )
    # A loop over whole chunks, so that one kernel is compiled for all of them, and one more for the shorter last chunk.
    # This one goes first: if it came after the loop, XLA would compute its cotangent before the loop and keep it.
    width = min(config["chunk_columns"], classes)
    chunks, rest = divmod(classes, width)
    if rest:
        gradients = add_chunk(classes - rest, rest, gradients)
    gradients = lax.fori_loop(0, chunks, lambda chunk, found: add_chunk(chunk * width, width, found), gradients)
    x_grad, weight_grad, bias_grad = gradients
    if x_grad is not None:
        x_grad = x_grad if powers is None else powers.rows[: len(x_grad), None] * x_grad
        x_grad = x_grad[:rows].astype(x.dtype)
    return x_grad, weight_grad, bias_grad


def _with_chunk(
    gradients: _Gradients,
    cotangent: jax.Array,
    weight: jax.Array,
    x_scaled: jax.Array,
    powers: RowPowers | None,
    start: Any,
) -> _Gradients:
    """Adds the products with a chunk's cotangent; `weight` is the chunk's, which begins at class `start`."""
    x_grad, weight_grad, bias_grad = gradients
    if x_grad is not None:
        x_grad = x_grad + jnp.einsum("nv,vh->nh", cotangent, weight, preferred_element_type=jnp.float32)
    if weight_grad is not None:
        product = jnp.einsum("nv,nh->vh", cotangent, x_scaled, preferred_element_type=jnp.float32)
        product = product if powers is None else powers.largest * product
        weight_grad = lax.dynamic_update_slice_in_dim(weight_grad, product.astype(weight.dtype), start, 0)
    if bias_grad is not None:
        by_row = cotangent if powers is None else cotangent.astype(jnp.float32) * powers.rows[:, None]
        total = jnp.sum(by_row, axis=0, dtype=jnp.float32)
        bias_grad = lax.dynamic_update_slice_in_dim(bias_grad, total.astype(bias_grad.dtype), start, 0)
    return x_grad, weight_grad, bias_grad


def _in_range(
    x: jax.Array, terms: CotangentTerms, target: jax.Array | None
) -> tuple[RowPowers | None, jax.Array, CotangentTerms]:
    """Returns powers of two that bring the cotangent's rows into float16's range, and x and terms scaled by them."""
    if x.dtype != jnp.float16:  # bfloat16 has float32's range
        return None, x, terms
    softmax, slope, label, by_target = (jnp.abs(v) for v in terms[:4])
    largest = 0 if target is None else jnp.max(jnp.abs(target)).astype(jnp.float32)
    powers = RowPowers.of(softmax + slope + label + by_target * largest)
    scaled = {name: getattr(terms, name) / powers.rows for name in CotangentTerms._fields[:4]}
    return powers, powers.multiplied(x), terms._replace(**scaled)


def run(terms, rows, columns, *, softcap, needs, config, interpret=False, **_):
    """Launches the kernel; see `pallas_kernels.kernel.Kernel.run`."""
    x, zeros = rows.x, jnp.zeros_like(terms.softmax)
    slope, label, target = (zeros if term is None else term for term in (terms.slope, terms.label, terms.target))
    by_row = CotangentTerms(terms.softmax, slope, label, target, terms.maximum, terms.log_sum_exp)
    x_grad, weight_grad, bias_grad = linear_gradients(
        CotangentTerms(*(value.reshape(-1) for value in by_row)),
        x.reshape(-1, x.shape[-1]),
        columns.weight,
        rows.labels.reshape(-1),
        bias=columns.bias,
        target=columns.class_targets,
        softcap=softcap,
        has_slope=terms.slope is not None,
        needs=(needs.x, needs.weight, needs.bias),
        config=config,
        interpret=interpret,
    )
    return (None if x_grad is None else x_grad.reshape(x.shape), None, None), (weight_grad, bias_grad, None)


def refuses(hardware, terms, rows, columns, *, needs, **_) -> str | None:
    """Tells why the kernel cannot run; see `pallas_kernels.kernel.Kernel.refuses`."""
    if needs.class_targets:
        return "the gradient of class weights needs the logits, which the kernel does not keep"
    return label_refusal(rows) or tiles.refuses_linear(hardware, rows.x, columns.weight)


def configs(hardware, terms, rows, columns, **_):
    """Returns tiles, stages, splits and chunks worth trying; see `pallas_kernels.kernel.Kernel.configs`."""
    return launch_configs(hardware, math.prod(rows.x.shape[:-1]), *columns.weight.shape)


def launch_configs(hardware: Any, rows: int, columns: int, hidden: int) -> tuple[dict[str, int], ...]:
    """Lists the configurations for gradients over this many rows and columns."""
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


TAKES = frozenset({"x", "labels", "weight", "bias", "class_targets"})
KERNEL = Kernel(
    name="mosaic_gpu",
    platform="cuda",
    run=run,
    refuses=refuses,
    configs=configs,
    interpreter_is_pure=False,
    takes=TAKES | {"softmax", "maximum", "log_sum_exp", "label", "target", "slope"},
    yields_to=frozenset({"scale"}),
)
