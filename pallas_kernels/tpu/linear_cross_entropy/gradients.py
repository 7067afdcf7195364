"""Gradients of a linear layer from the cotangent of its logits, on TPU: logits are computed again, tile by tile.

The gradients of x and of the weight are one computation with the two operands exchanged. The operand that is
differentiated stays, the other streams by, and for each tile of logits (stays, streams)

    logits = stays streams^T,   gradient += (cotangent of logits) streams

so two launches take four matrix products. One launch with three would have to read and write one of the two gradients,
in float32, once for every block of the other operand.

The grid is (stays, streams, features twice). The features are innermost, because a tile's logits have to be complete
before their cotangent is known. A block's whole gradient stays in VMEM until everything has streamed by.
"""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.tpu.linear_cross_entropy.tiles import (
    BIAS,
    LANES,
    SUBLANES,
    TARGET,
    affordable,
    at_edge,
    block_bytes,
    block_size,
    class_vectors,
    dot,
    dtype_refusal,
    live_blocks,
    masked,
    round_up,
    size_refusal,
    stacked,
    vmem_limit_bytes,
    whole_tile,
)

# The order of the stacked vectors over rows. A label is a class, or -1 for none.
_SOFTMAX, _SLOPE, _LABEL_TERM, _TARGET_TERM, _MAXIMUM, _LOG_SUM_EXP, _LABEL = range(7)


def _kernel(
    live_ref,
    rows_ref,
    columns_ref,
    staying_ref,
    streaming_ref,
    *refs,
    names,
    rows_stay,
    streaming_size,
    features,
    **options,
):
    ref_of = dict(zip(names, refs, strict=True))
    logits_ref = ref_of["logits"]
    hidden_blocks = pl.cdiv(features, staying_ref.shape[1])
    last_streaming = pl.cdiv(streaming_size, streaming_ref.shape[0]) - 1
    staying_index, streaming_index, step = (pl.program_id(axis) for axis in range(3))
    # The innermost axis passes over the features twice: first the logits are summed, then the gradient.
    hidden_index = _hidden_index(step, hidden_blocks)
    is_live = live_ref[staying_index if rows_stay else streaming_index] == 1
    has_logits, is_second_half = step == hidden_blocks - 1, step >= hidden_blocks

    @pl.when(step == 0)
    def _clear_logits():
        logits_ref[...] = jnp.zeros(logits_ref.shape, jnp.float32)

    def multiply_features(valid_features):
        staying, streaming = (masked(ref[...], 1, valid_features) for ref in (staying_ref, streaming_ref))
        logits_ref[...] += dot(staying, streaming, contract=(1, 1))

    @pl.when(is_live & ~is_second_half)
    def _multiply_features():
        at_edge(multiply_features, hidden_index, features, staying_ref.shape[1])

    if "sums" in ref_of:

        @pl.when((streaming_index == 0) & (step == 0))
        def _clear_sums():
            ref_of["partial_sums"][...] = jnp.zeros(ref_of["partial_sums"].shape, jnp.float32)

    @pl.when(is_live & has_logits)
    def _turn_into_cotangent():
        store = functools.partial(_store_cotangent, ref_of, rows_ref, columns_ref, rows_stay, **options)
        first_index = streaming_index if rows_stay else staying_index
        at_edge(functools.partial(store, first_index), streaming_index, streaming_size, streaming_ref.shape[0])

    if "sums" in ref_of:

        @pl.when((streaming_index == last_streaming) & has_logits)
        def _store_sums():
            for position in (BIAS, TARGET):
                by_lane = ref_of["partial_sums"][position].T
                ref_of["sums"][position : position + 1, :] = jnp.sum(by_lane, axis=0, keepdims=True)

    if "gradient" in ref_of:
        _accumulate_gradient(
            ref_of, streaming_ref, streaming_index, streaming_size, hidden_index, is_live, is_second_half
        )


def _store_cotangent(
    ref_of, rows_ref, columns_ref, rows_stay, class_block, valid_streaming, *, softcap, biased, weighted, metrics
):
    """Turns a tile of logits into its cotangent, and adds that to the sums over rows if they are needed."""
    # Tiles are (stays, streams), so classes lie along lanes if rows stay, and along sublanes if classes do. The vectors
    # over rows and over classes come along lanes; one of the two is transposed to broadcast.
    classes_axis = 1 if rows_stay else 0
    rows = rows_ref[...].T if rows_stay else rows_ref[...]
    columns = columns_ref[...] if rows_stay else columns_ref[...].T
    row = functools.partial(_vector, rows, classes_axis)
    column = functools.partial(_vector, columns, 1 - classes_axis)
    logits = ref_of["logits"][...]
    if biased:
        logits = logits + column(BIAS)
    if softcap is not None:
        bounded = jnp.tanh(logits * (1 / softcap))
        logits = softcap * bounded
    shifted = logits - row(_MAXIMUM)
    scale = row(_SOFTMAX)
    if metrics:
        scale = scale + row(_SLOPE) * jnp.where(shifted == -jnp.inf, 0.0, shifted)
    first_class = class_block * logits.shape[classes_axis]
    classes = jax.lax.broadcasted_iota(jnp.int32, logits.shape, classes_axis)
    is_label = classes == row(_LABEL).astype(jnp.int32) - first_class
    cotangent = scale * jnp.exp(shifted - row(_LOG_SUM_EXP)) + jnp.where(is_label, row(_LABEL_TERM), 0.0)
    if weighted:
        cotangent = cotangent + row(_TARGET_TERM) * column(TARGET)
    if softcap is not None:
        # The derivative of softcap tanh(z / softcap).
        cotangent = cotangent * (1 - bounded * bounded)
    # The next product sums over the streaming axis, beyond whose end the tile holds anything.
    cotangent = masked(cotangent, 1, valid_streaming)
    ref_of["cotangent"][...] = cotangent.astype(ref_of["cotangent"].dtype)
    if "sums" in ref_of:
        by_target = masked(row(_TARGET_TERM) * shifted, 1, valid_streaming)
        lanes = ref_of["partial_sums"].shape[2]
        ref_of["partial_sums"][BIAS] += _by_lane(cotangent, lanes)
        ref_of["partial_sums"][TARGET] += _by_lane(by_target, lanes)


def _accumulate_gradient(ref_of, streaming_ref, streaming_index, streaming_size, hidden_index, is_live, is_second_half):
    """Runs the second half of the innermost axis: gradient += cotangent streams, for each block of features."""
    accumulator_ref, gradient_ref = ref_of["accumulator"], ref_of["gradient"]
    last_streaming = pl.cdiv(streaming_size, streaming_ref.shape[0]) - 1

    def multiply_streaming(valid_streaming):
        streaming = masked(streaming_ref[...], 0, valid_streaming)
        accumulator_ref[hidden_index] += dot(ref_of["cotangent"][...], streaming, contract=(1, 0))

    @pl.when((streaming_index == 0) & is_second_half)
    def _clear_accumulator():
        accumulator_ref[hidden_index] = jnp.zeros(accumulator_ref.shape[1:], jnp.float32)

    @pl.when(is_live & is_second_half)
    def _multiply_streaming():
        at_edge(multiply_streaming, streaming_index, streaming_size, streaming_ref.shape[0])

    @pl.when((streaming_index == last_streaming) & is_second_half)
    def _store():
        gradient_ref[...] = accumulator_ref[hidden_index].astype(gradient_ref.dtype)


def _hidden_index(step, hidden_blocks):
    """Goes forth for the logits and back for the gradient, so that the block that was read last needs no new copy."""
    return jnp.minimum(step, 2 * hidden_blocks - 1 - step)


def _vector(stack, axis, position):
    """Returns one of the stacked vectors, as a row or a column."""
    return jax.lax.slice_in_dim(stack, position, position + 1, axis=axis)


def _by_lane(tile, lanes):
    """Adds a tile's registers of lanes; summing across lanes, which is slow, is left for the end."""
    return sum(tile[:, start : start + lanes] for start in range(0, tile.shape[1], lanes))


def _index_maps(rows_stay, grid, hidden_blocks):
    """Returns where the pipeline takes the blocks of the staying and the streaming operand, and puts the gradient's."""

    # A skipped block of rows has the index of one that was read before, and the pipeline copies nothing.
    def alive(i, j, live):
        return live[i if rows_stay else j]

    # The second half does not read the staying operand: its index stays at the last block.
    def staying_index(i, j, k, live):
        return i, jnp.minimum(k, hidden_blocks - 1) * alive(i, j, live)

    def streaming_index(i, j, k, live):
        return j * alive(i, j, live), _hidden_index(k, hidden_blocks) * alive(i, j, live)

    # A block is written to HBM when its index changes, so the index may only move once the gradient is complete.
    def gradient_index(i, j, k, live):
        is_stored = (j == grid[1] - 1) & (k >= hidden_blocks)
        return i, jnp.where(is_stored, _hidden_index(k, hidden_blocks), hidden_blocks - 1)

    return staying_index, streaming_index, gradient_index


def _outputs_and_scratch(staying, staying_size, blocks, hidden_blocks, gradient_index, *, needs_product, needs_sums):
    """Returns what the kernel gets beside its inputs, by name: outputs with their specs and shapes, then scratch."""
    from jax.experimental.pallas import tpu as pltpu  # here, because only lowering for a TPU needs its 0.2 s

    block_staying, block_streaming, block_hidden = blocks
    # The cotangent is rounded to the operands' dtype: with bfloat16, its product takes a single pass.
    scratch = {"logits": pltpu.VMEM(blocks[:2], jnp.float32), "cotangent": pltpu.VMEM(blocks[:2], staying.dtype)}
    outputs = {}
    if needs_product:
        spec = pl.BlockSpec((block_staying, block_hidden), gradient_index)
        outputs["gradient"] = spec, jax.ShapeDtypeStruct(staying.shape, staying.dtype)
        scratch["accumulator"] = pltpu.VMEM((hidden_blocks, block_staying, block_hidden), jnp.float32)
    if needs_sums:
        spec = pl.BlockSpec((SUBLANES, block_staying), lambda i, j, k, live: (0, i))
        outputs["sums"] = spec, jax.ShapeDtypeStruct((SUBLANES, staying_size), jnp.float32)
        scratch["partial_sums"] = pltpu.VMEM((2, block_staying, min(LANES, block_streaming)), jnp.float32)
    return outputs, scratch


def _launch(rows, columns, is_live, x, weight, *, rows_stay, needs_product, needs_sums, config, interpret, **params):
    """Computes the "gradient" of x, or of the weight with "sums" (8, V) over rows of the cotangent and the target's."""
    from jax.experimental.pallas import tpu as pltpu  # here, because only lowering for a TPU needs its 0.2 s

    staying, streaming = (x, weight) if rows_stay else (weight, x)
    (staying_size, features), streaming_size = staying.shape, streaming.shape[0]
    block_staying, block_streaming, block_hidden = _blocks(staying_size, streaming_size, features, config)
    staying, streaming = whole_tile(staying), whole_tile(streaming)
    hidden_blocks = pl.cdiv(features, block_hidden)
    block_rows, block_vocab = (block_staying, block_streaming) if rows_stay else (block_streaming, block_staying)
    grid = (
        pl.cdiv(staying_size, block_staying),
        pl.cdiv(streaming_size, block_streaming),
        hidden_blocks * (2 if needs_product else 1),
    )
    has_columns = int(columns is not None)
    if columns is None:
        columns = jnp.zeros((SUBLANES, block_vocab), jnp.float32)
    staying_index, streaming_index, gradient_index = _index_maps(rows_stay, grid, hidden_blocks)
    itemsize, blocks = x.dtype.itemsize, (block_staying, block_streaming, block_hidden)
    needs = {"needs_product": needs_product, "needs_sums": needs_sums}
    outputs, scratch = _outputs_and_scratch(staying, staying_size, blocks, hidden_blocks, gradient_index, **needs)
    results = pl.pallas_call(
        functools.partial(
            _kernel,
            rows_stay=rows_stay,
            streaming_size=streaming_size,
            features=features,
            names=(*outputs, *scratch),
            **params,
        ),
        name="linear_cross_entropy_x_grad" if rows_stay else "linear_cross_entropy_weight_grad",
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=grid,
            in_specs=[
                pl.BlockSpec((SUBLANES, block_rows), lambda i, j, k, live: (0, i if rows_stay else j)),
                pl.BlockSpec((SUBLANES, block_vocab), lambda i, j, k, live: (0, has_columns * (j if rows_stay else i))),
                pl.BlockSpec((block_staying, block_hidden), staying_index),
                pl.BlockSpec((block_streaming, block_hidden), streaming_index),
            ],
            out_specs=[spec for spec, _ in outputs.values()],
            scratch_shapes=[*scratch.values()],
        ),
        out_shape=[shape for _, shape in outputs.values()],
        compiler_params=pltpu.CompilerParams(
            # Staying blocks are independent; what streams by is accumulated in order.
            dimension_semantics=("parallel", "arbitrary", "arbitrary"),
            vmem_limit_bytes=vmem_limit_bytes(_vmem_bytes(itemsize, features, *blocks)),
        ),
        cost_estimate=pl.CostEstimate(
            flops=(4 if needs_product else 2) * staying_size * streaming_size * features,
            transcendentals=staying_size * streaming_size,
            bytes_accessed=_hbm_bytes(itemsize, staying.shape, streaming_size, *blocks),
        ),
        interpret=interpret,
    )(live_blocks(is_live, block_rows), rows, columns, staying, streaming)
    return dict(zip(outputs, results, strict=True))


def linear_gradients(rows, x, weight, *, bias=None, target=None, needs, softcap, metrics, config, interpret):
    """Computes the gradients of x (R, H), weight (V, H), bias (V,) and target (V,); None if `needs` does not ask.

    `rows` are the seven vectors (R,) in the order above.
    """
    # A row whose terms are all 0 has no gradient, whatever its other values are.
    is_live = functools.reduce(jnp.logical_or, (row != 0 for row in rows[:_MAXIMUM]))
    launch = functools.partial(
        _launch,
        stacked(rows),
        class_vectors(bias, target, weight.shape[0]),
        is_live,
        x,
        weight,
        softcap=softcap,
        metrics=metrics,
        biased=bias is not None,
        weighted=target is not None,
        config=config,
        interpret=interpret,
    )
    needs_x, needs_weight, needs_bias, needs_target = needs
    x_grad = weight_grad = bias_grad = target_grad = None
    needs_sums = needs_bias or needs_target
    if needs_x:
        x_grad = launch(rows_stay=True, needs_product=True, needs_sums=False)["gradient"][: x.shape[0]]
    if needs_weight or needs_sums:
        results = launch(rows_stay=False, needs_product=needs_weight, needs_sums=needs_sums)
        weight_grad = results["gradient"][: weight.shape[0]] if needs_weight else None
        bias_grad = results["sums"][BIAS] if needs_bias else None
        target_grad = results["sums"][TARGET] if needs_target else None
    return x_grad, weight_grad, bias_grad, target_grad


def _blocks(staying_size, streaming_size, features, config):
    wanted = config["block_staying"], config["block_streaming"], config["block_hidden"]
    return tuple(map(block_size, (staying_size, streaming_size, features), wanted))


def refusal(hardware, x, weight) -> str | None:
    """Says why the kernels cannot run on operands of these shapes and dtypes."""
    if reason := dtype_refusal(x=x, weight=weight) or size_refusal(x, weight):
        return reason
    if not configs(hardware, x, weight):
        return f"128 rows of a gradient with {x.shape[-1]} features do not fit into VMEM in float32"
    return None


def configs(hardware, x, weight):
    """Lists block sizes worth trying for operands of these shapes."""
    *batch, features = x.shape
    rows, classes, itemsize = math.prod(batch), weight.shape[0], jnp.dtype(x.dtype).itemsize
    # Both launches use the same sizes, so the larger operand bounds the blocks.
    sizes = max(rows, classes), max(rows, classes), features
    names = ("block_staying", "block_streaming", "block_hidden")
    wanted = itertools.product((1024, 512, 256, 128), (512, 256, 128), (round_up(features, LANES), 2048, 1024, 512))
    candidates = (_blocks(*sizes, dict(zip(names, blocks, strict=True))) for blocks in wanted)
    return affordable(
        hardware,
        (dict(zip(names, blocks, strict=True)) for blocks in candidates),
        functools.partial(_vmem_bytes, itemsize, features),
        lambda *_, **blocks: (
            _hbm_bytes(itemsize, (rows, features), classes, **blocks)
            + _hbm_bytes(itemsize, (classes, features), rows, **blocks)
        ),
    )


def _vmem_bytes(itemsize, features, block_staying, block_streaming, block_hidden):
    """Estimates the VMEM that a launch needs."""
    # stays, streams:  (block_staying or block_streaming, block_hidden), two buffers each for the pipeline
    operands = block_bytes(itemsize, (block_staying + block_streaming) * block_hidden)
    # gradient:        (block_staying, block_hidden) in the result's dtype, two buffers
    result = 2 * itemsize * block_staying * block_hidden
    # accumulator:     (block_staying, all features) float32; this is what bounds block_staying for wide layers
    accumulator = 4 * block_staying * round_up(features, block_hidden)
    # logits:          (block_staying, block_streaming) float32, and four values of that size computed from it, among
    #                  them the cotangent
    tile = 5 * 4 * block_staying * block_streaming
    return operands + result + accumulator + tile


def _hbm_bytes(itemsize, staying_shape, streaming_size, block_staying, block_streaming, block_hidden):
    """Estimates the traffic of both operands and the gradient."""
    # The streaming operand is read once per staying block; if features are cut, twice, for logits and gradient. The
    # staying operand is read once; if features are cut, again for every streaming block.
    staying_size, features = staying_shape
    is_whole = block_hidden >= features
    streamed = streaming_size * pl.cdiv(staying_size, block_staying) * (1 if is_whole else 2)
    stayed = staying_size * (1 if is_whole else pl.cdiv(streaming_size, block_streaming))
    return itemsize * features * (streamed + stayed + staying_size)
