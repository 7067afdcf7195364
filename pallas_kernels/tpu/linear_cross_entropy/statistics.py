"""Row statistics of a linear layer's logits on TPU: matrix product, online maximum and sums, without logits in HBM.

A tile of logits has classes along sublanes and rows along lanes. So a reduction over classes adds whole registers, and
the statistics of rows lie in HBM as densely as vectors do; a column vector would be padded to 128 lanes.

The grid is (rows, classes, hidden), the hidden axis innermost. The statistics of a block of rows stay in VMEM from its
first step to its last and are written once. The weight passes through VMEM once per block of rows, so large blocks of
rows save the most traffic; `_hbm_bytes` counts it and orders the configurations.
"""

import functools
import itertools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.kernel import Kernel
from pallas_kernels.tpu.linear_cross_entropy.tiles import (
    BIAS,
    LANES,
    SUBLANES,
    TARGET,
    affordable,
    at_edge,
    block_bytes,
    block_size,
    class_or_none,
    class_vectors,
    dot,
    dtype_refusal,
    live_blocks,
    masked,
    round_up,
    size_refusal,
    vmem_limit_bytes,
    whole_tile,
)


class OnlineStatistics(NamedTuple):
    """What is known about each row (R,) after some classes, or refs to it; m is the maximum, or 0 if that is -inf.

    Attributes:
      maximum: max z.
      total: sum exp(z - m).
      label_logit: z[label] - m, or 0 if the label is not a class; inside the kernel without - m.
      target_logit: sum t (z - m).
      weighted_total: sum exp(z - m) (z - m).
      prediction: int32, the first argmax z.
    """

    maximum: jax.Array
    total: jax.Array
    label_logit: jax.Array
    target_logit: jax.Array
    weighted_total: jax.Array
    prediction: jax.Array


def _kernel(live_ref, labels_ref, columns_ref, x_ref, weight_ref, *refs, classes, features, **options):
    """`refs`: the six statistics, then scratch for a tile of logits and for the sum of target weights so far."""
    *statistics_refs, logits_ref, target_total_ref = refs
    known = OnlineStatistics(*statistics_refs)
    block_vocab, block_hidden = weight_ref.shape
    vocab_index, hidden_index = pl.program_id(1), pl.program_id(2)
    is_live = live_ref[pl.program_id(0)] == 1

    @pl.when((vocab_index == 0) & (hidden_index == 0))
    def _start():
        # A skipped block ends as it starts: all of its logits are 0.
        known.maximum[...] = jnp.full(known.maximum.shape, jnp.where(is_live, -jnp.inf, 0.0), jnp.float32)
        known.total[...] = jnp.full(known.total.shape, jnp.where(is_live, 0.0, float(classes)), jnp.float32)
        for ref in (*known[2:], target_total_ref):
            ref[...] = jnp.zeros(ref.shape, ref.dtype)

    @pl.when(is_live & (hidden_index == 0))
    def _clear():
        logits_ref[...] = jnp.zeros(logits_ref.shape, jnp.float32)

    # Beyond the arrays' edges a block holds anything, NaN included, so features are masked before the product. Rows and
    # classes need no mask there: they only reach their own logits.
    def multiply(valid_features):
        weight, x = (masked(ref[...], 1, valid_features) for ref in (weight_ref, x_ref))
        logits_ref[...] += dot(weight, x, contract=(1, 1))

    @pl.when(is_live)
    def _multiply():
        at_edge(multiply, hidden_index, features, block_hidden)

    # The hidden axis is innermost, so a tile's logits are complete before the next tile begins, and one tile is all
    # that VMEM ever holds of them.
    @pl.when(is_live & (hidden_index == pl.cdiv(features, block_hidden) - 1))
    def _reduce():
        reduce = functools.partial(
            _reduce_tile, logits_ref, labels_ref, columns_ref, known, target_total_ref, **options
        )
        at_edge(functools.partial(reduce, vocab_index), vocab_index, classes, block_vocab)


def _reduce_tile(
    logits_ref,
    labels_ref,
    columns_ref,
    known,
    target_total_ref,
    vocab_index,
    valid_classes,
    *,
    softcap,
    biased,
    weighted,
    metrics,
):
    """Folds a tile of logits (classes, rows) into what is known about its rows."""
    logits = logits_ref[...]
    block_vocab = logits.shape[0]
    if biased or weighted:
        # Vectors over classes lie along lanes in HBM; here classes lie along sublanes.
        columns = columns_ref[...].T
    if biased:
        logits = logits + columns[:, BIAS : BIAS + 1]
    if softcap is not None:
        logits = softcap * jnp.tanh(logits * (1 / softcap))
    logits = masked(logits, 0, valid_classes, -jnp.inf)
    block_max = jnp.max(logits, axis=0, keepdims=True)
    old, new = known.maximum[...], jnp.maximum(known.maximum[...], block_max)
    shift, shifted = _finite(old) - _finite(new), logits - _finite(new)
    correction, exponentials = jnp.exp(old - _finite(new)), jnp.exp(shifted)
    class_index = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 0)
    first_class = vocab_index * block_vocab
    is_label = class_index == labels_ref[...] - first_class
    known.label_logit[...] += jnp.sum(jnp.where(is_label, logits, 0.0), axis=0, keepdims=True)
    if weighted:
        target = masked(columns[:, TARGET : TARGET + 1], 0, valid_classes)
        products = masked(target * shifted, 0, valid_classes)
        # A new maximum moves sum t (z - m) by the sum of t so far times the change of m.
        known.target_logit[...] += target_total_ref[...] * shift + jnp.sum(products, axis=0, keepdims=True)
        target_total_ref[...] += jnp.sum(target, axis=0, keepdims=True)
    if metrics:
        products = exponentials * _finite(shifted)
        rest = jnp.sum(products, axis=0, keepdims=True)
        known.weighted_total[...] = (known.weighted_total[...] + known.total[...] * shift) * correction + rest
        # Small integers, which float32 holds exactly: not every TPU has a minimum of integers.
        positions = jnp.where(logits == block_max, class_index.astype(jnp.float32), float(block_vocab))
        first = jnp.min(positions, axis=0, keepdims=True).astype(jnp.int32) + first_class
        known.prediction[...] = jnp.where(block_max > old, first, known.prediction[...])
    known.total[...] = known.total[...] * correction + jnp.sum(exponentials, axis=0, keepdims=True)
    known.maximum[...] = new


def _finite(logits):
    """0 in place of -inf, whose difference with -inf would be NaN."""
    return jnp.where(logits == -jnp.inf, 0.0, logits)


def online_statistics(
    x, weight, labels, bias, shared_target, *, softcap, metrics, config, interpret
) -> OnlineStatistics:
    """Launches the kernel on rows (R, H); bias and shared_target may be empty."""
    from jax.experimental.pallas import tpu as pltpu  # here, because only lowering for a TPU needs its 0.2 s

    (rows, features), classes = x.shape, weight.shape[0]
    block_rows, block_vocab, block_hidden = _blocks(rows, classes, features, config)
    biased = bias.size > 0
    options = {"softcap": softcap, "biased": biased, "weighted": shared_target.size > 0, "metrics": metrics}
    grid = (pl.cdiv(rows, block_rows), pl.cdiv(classes, block_vocab), pl.cdiv(features, block_hidden))
    columns = class_vectors(bias, shared_target, classes)
    has_columns = int(columns is not None)
    if columns is None:
        columns = jnp.zeros((SUBLANES, block_vocab), jnp.float32)
    # Without a bias, a row x = 0 has only zero logits. Ignored rows come as such, and a block of them is skipped.
    live = jnp.ones(grid[:1], jnp.int32) if biased else live_blocks(jnp.any(x != 0, axis=1), block_rows)
    labels = class_or_none(labels, classes)
    row_spec = pl.BlockSpec((1, block_rows), lambda i, j, k, live: (0, i))
    results = pl.pallas_call(
        functools.partial(_kernel, classes=classes, features=features, **options),
        name="linear_cross_entropy",
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=grid,
            # A skipped block stays with the first blocks of x and weight, and the pipeline copies a block only when its
            # index changes.
            in_specs=[
                row_spec,
                pl.BlockSpec((SUBLANES, block_vocab), lambda i, j, k, live: (0, has_columns * j * live[i])),
                pl.BlockSpec((block_rows, block_hidden), lambda i, j, k, live: (i, k * live[i])),
                pl.BlockSpec((block_vocab, block_hidden), lambda i, j, k, live: (j * live[i], k * live[i])),
            ],
            out_specs=[row_spec] * 6,
            scratch_shapes=[
                pltpu.VMEM((block_vocab, block_rows), jnp.float32),  # logits
                pltpu.VMEM((1, block_rows), jnp.float32),  # the sum of target weights so far
            ],
        ),
        out_shape=[jax.ShapeDtypeStruct((1, rows), dtype) for dtype in (*[jnp.float32] * 5, jnp.int32)],
        compiler_params=pltpu.CompilerParams(
            # Blocks of rows are independent and may go to different TensorCores; the others accumulate in order.
            dimension_semantics=("parallel", "arbitrary", "arbitrary"),
            vmem_limit_bytes=vmem_limit_bytes(_vmem_bytes(x.dtype.itemsize, block_rows, block_vocab, block_hidden)),
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * rows * classes * features,
            transcendentals=rows * classes,
            bytes_accessed=_hbm_bytes(x.dtype.itemsize, x.shape, classes, block_rows, block_vocab, block_hidden),
        ),
        interpret=interpret,
    )(live, labels.reshape(1, rows), columns, whole_tile(x), whole_tile(weight))
    statistics = OnlineStatistics(*(result.reshape(rows) for result in results))
    label_logit = jnp.where(labels >= 0, statistics.label_logit - _finite(statistics.maximum), 0.0)
    return statistics._replace(label_logit=label_logit)


def _blocks(rows, classes, features, config):
    wanted = config["block_rows"], config["block_vocab"], config["block_hidden"]
    return tuple(map(block_size, (rows, classes, features), wanted))


def run(
    x,
    weight,
    bias,
    labels,
    shared_target,
    row_target,
    *,
    softcap,
    metrics,
    config,
    interpret=False,
    **_,
):
    """Launches the kernel; see `pallas_kernels.kernel.Kernel.run`."""
    batch_shape = x.shape[:-1]
    rows = online_statistics(
        x.reshape(-1, x.shape[-1]),
        weight,
        labels.reshape(-1),
        bias,
        shared_target,
        softcap=softcap,
        metrics=metrics,
        config=config,
        interpret=interpret,
    )
    mean_logit = rows.weighted_total / rows.total
    log_sum_exp = jnp.log(rows.total)
    results = _finite(rows.maximum), log_sum_exp, rows.label_logit, rows.target_logit, mean_logit, rows.prediction
    return tuple(result.reshape(batch_shape) for result in results)


def refuses(hardware, x, weight, bias, labels, shared_target, row_target, **params) -> str | None:
    """Why the kernel cannot run; see `pallas_kernels.kernel.Kernel.refuses`."""
    if row_target.shape[-1]:
        return "probabilities of every class are an array of the logits' size, which the kernel is there to avoid"
    return refusal(hardware, x, weight)


def refusal(hardware, x, weight) -> str | None:
    """Why the kernel cannot run on operands of these shapes and dtypes."""
    return dtype_refusal(x=x, weight=weight) or size_refusal(x, weight)


def configs(hardware, x, weight, *operands, **params):
    """Block sizes worth trying; see `pallas_kernels.kernel.Kernel.configs`."""
    *batch, features = x.shape
    shape, classes, itemsize = (math.prod(batch), features), weight.shape[0], jnp.dtype(x.dtype).itemsize
    names = ("block_rows", "block_vocab", "block_hidden")
    wanted = itertools.product((1024, 512, 256), (1024, 512, 256), (round_up(features, LANES), 2048, 1024, 512))
    candidates = (_blocks(*shape[:1], classes, features, dict(zip(names, sizes, strict=True))) for sizes in wanted)
    return affordable(
        hardware,
        (dict(zip(names, sizes, strict=True)) for sizes in candidates),
        functools.partial(_vmem_bytes, itemsize),
        functools.partial(_hbm_bytes, itemsize, shape, classes),
    )


def _vmem_bytes(itemsize, block_rows, block_vocab, block_hidden):
    """An estimate of the VMEM that the kernel needs."""
    # x:       (block_rows, block_hidden), two buffers, as the pipeline fetches the next block during a product
    # weight:  (block_vocab, block_hidden), likewise; `block_bytes` also counts the parts of a float32 product
    operands = block_bytes(itemsize, (block_rows + block_vocab) * block_hidden)
    # logits:  (block_vocab, block_rows) float32 scratch, and four values of that size computed from it, such as
    #          shifted logits, exponentials, class indices and products
    tile = 5 * 4 * block_rows * block_vocab
    # Vectors over rows and over classes are small: `vmem_limit_bytes` adds a quarter for these and Mosaic's own needs.
    return operands + tile


def _hbm_bytes(itemsize, shape, classes, block_rows, block_vocab, block_hidden):
    """The traffic of operands: the weight once per block of rows, x once, or again per block of classes if cut."""
    # A block of x that spans all features keeps its index while classes pass, so it is copied only once.
    rows, features = shape
    reads_of_x = 1 if block_hidden >= features else pl.cdiv(classes, block_vocab)
    return itemsize * features * (rows * reads_of_x + classes * pl.cdiv(rows, block_rows))


KERNEL = Kernel(name="mosaic_tpu", platform="tpu", run=run, refuses=refuses, configs=configs)
