"""Row statistics of a linear layer's logits on TPU: matrix product, online maximum and sums, without logits in HBM.

A tile of logits has classes along sublanes and rows along lanes, and the statistics of rows lie in HBM as densely as
vectors do; a column vector would be padded to 128 lanes.

What limits the kernel is the matrix unit, as long as all else happens beside it. So

* a block's product and the reduction of its logits are one long piece of code without branches, in chunks of classes.
  The compiler's scheduler then reduces a chunk while the matrix unit computes the next one.
* each of the eight sublanes keeps statistics of its own, of every eighth class. Folding in more logits takes
  elementwise operations only; the sublanes are merged once, at the end.
* a chunk is reduced 128 rows at a time, whose running statistics are then in registers.

The grid is (rows, classes, hidden), the hidden axis innermost. The statistics of a block of rows stay in VMEM from its
first step to its last and are written once. The weight passes through VMEM once per block of rows, so large blocks of
rows save the most traffic; `operand_bytes` counts it and orders the configurations.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.kernel import Kernel
from pallas_kernels.tpu.linear_cross_entropy.tiles import (
    BIAS,
    CHUNK,
    LANES,
    SUBLANES,
    TARGET,
    affordable,
    at_edge,
    block_bytes,
    block_choices,
    blocks_of,
    class_or_none,
    class_vectors,
    dtype_refusal,
    for_chunks,
    live_blocks,
    logits_by_chunk,
    masked,
    operand_bytes,
    size_refusal,
    vmem_limit_bytes,
    whole_tile,
)


class OnlineStatistics(NamedTuple):
    """What is known about each row (R,) after some classes, or refs to it; m is the maximum, or 0 if that is -inf.

    Inside the kernel each sublane has a row of it, for its classes, and a seventh vector: the sum of t so far.

    Attributes:
      maximum: max z.
      total: sum exp(z - m).
      label_logit: z[label] - m, or 0 if the label is not a class; inside the kernel without - m.
      target_logit: sum t (z - m).
      weighted_total: sum exp(z - m) (z - m).
      prediction: int32, the first argmax z; inside the kernel float32, which holds these integers exactly.
    """

    maximum: jax.Array
    total: jax.Array
    label_logit: jax.Array
    target_logit: jax.Array
    weighted_total: jax.Array
    prediction: jax.Array


def _kernel(live_ref, labels_ref, columns_ref, x_ref, weight_ref, *refs, classes, features, scaled, **options):
    """`refs`: scales of rows, if any; six statistics, as many of each sublane, the sums of targets; some logits."""
    scale_ref, refs = (refs[0], refs[1:]) if scaled else (None, refs)
    results, known, target_total_ref = OnlineStatistics(*refs[:6]), OnlineStatistics(*refs[6:12]), refs[12]
    logits_ref, hidden_blocks = refs[-1], pl.cdiv(features, x_ref.shape[1])
    vocab_index, hidden_index = pl.program_id(1), pl.program_id(2)
    is_live = live_ref[pl.program_id(0)] == 1

    @pl.when((vocab_index == 0) & (hidden_index == 0))
    def _start():
        # A skipped block ends as it starts: all of its logits are 0.
        known.maximum[...] = jnp.full(known.maximum.shape, jnp.where(is_live, -jnp.inf, 0.0), jnp.float32)
        known.total[...] = jnp.full(known.total.shape, jnp.where(is_live, 0.0, classes / SUBLANES), jnp.float32)
        for ref in (*known[2:], target_total_ref):
            ref[...] = jnp.zeros(ref.shape, ref.dtype)

    logits_of = logits_by_chunk(x_ref, weight_ref, logits_ref, hidden_index, features, is_live)

    # The hidden axis is innermost, so a tile's logits are complete before the next tile begins.
    @pl.when(is_live & (hidden_index == hidden_blocks - 1))
    def _complete():
        rows = labels_ref, scale_ref, columns_ref, known, target_total_ref

        def fold_block(valid_classes):
            # x is loaded in here: what two branches share is copied in VMEM first.
            fold = functools.partial(_fold_chunk, *rows, logits_of(), **options)
            for_chunks(fold, weight_ref.shape[0], vocab_index, valid_classes)

        at_edge(fold_block, vocab_index, classes, weight_ref.shape[0])

    @pl.when((vocab_index == pl.num_programs(1) - 1) & (hidden_index == hidden_blocks - 1))
    def _merge():
        _merge_sublanes(results, known, target_total_ref, weighted=options["weighted"], metrics=options["metrics"])


def _fold_chunk(
    labels_ref,
    scale_ref,
    columns_ref,
    known,
    target_total_ref,
    logits_of,
    here,
    first_class,
    valid_classes,
    *,
    softcap,
    biased,
    weighted,
    metrics,
):
    """Computes the logits (classes, rows) of a chunk, and folds them into what is known about their rows."""
    logits = logits_of(here)

    def column(position):
        # Vectors over classes lie along lanes in HBM; here classes lie along sublanes.
        return columns_ref[:, here].T[:, position : position + 1]

    if biased:
        logits = logits + column(BIAS)
    if softcap is not None:
        logits = softcap * jnp.tanh(logits * (1 / softcap))
    if scale_ref is not None:
        logits = logits * scale_ref[...]
    logits = masked(logits, 0, valid_classes, -jnp.inf)
    target = masked(column(TARGET), 0, valid_classes) if weighted else None
    lanes = min(LANES, logits.shape[1])
    for start in range(0, logits.shape[1], lanes):
        rows = slice(start, start + lanes)
        labels = labels_ref[:, rows] - first_class
        of_rows = OnlineStatistics(*(ref.at[:, rows] for ref in known)), target_total_ref.at[:, rows]
        _fold_rows(logits[:, rows], labels, target, first_class, valid_classes, *of_rows, metrics=metrics)


def _fold_rows(logits, labels, target, first_class, valid_classes, known, target_total_ref, *, metrics):
    """Folds the logits of some rows into what each sublane knows about them; `labels` count from the chunk's first."""
    class_index = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 0)
    label_logits = jnp.where(class_index == labels, logits, 0.0)
    known.label_logit[...] += jnp.sum(_by_sublane(label_logits), axis=0)
    logits = _by_sublane(logits)
    chunk_max, old = jnp.max(logits, axis=0), known.maximum[...]
    new = jnp.maximum(old, chunk_max)
    shift, shifted = _finite(old) - _finite(new), logits - _finite(new)[None]
    correction, exponentials = jnp.exp(old - _finite(new)), jnp.exp(shifted)
    if target is not None:
        products = masked(target * shifted.reshape(class_index.shape), 0, valid_classes)
        # A new maximum moves sum t (z - m) by the sum of t so far times the change of m.
        known.target_logit[...] += target_total_ref[...] * shift + jnp.sum(_by_sublane(products), axis=0)
        target_total_ref[...] += jnp.sum(_by_sublane(target), axis=0)
    if metrics:
        products = jnp.sum(exponentials * _finite(shifted), axis=0)
        known.weighted_total[...] = (known.weighted_total[...] + known.total[...] * shift) * correction + products
        # Small integers, which float32 holds exactly: not every TPU has a minimum of integers.
        class_index = _by_sublane(class_index.astype(jnp.float32))
        first = jnp.min(jnp.where(logits == chunk_max[None], class_index, jnp.inf), axis=0)
        first += jnp.asarray(first_class, jnp.float32)
        known.prediction[...] = jnp.where(chunk_max > old, first, known.prediction[...])
    known.total[...] = known.total[...] * correction + jnp.sum(exponentials, axis=0)
    known.maximum[...] = new


def _by_sublane(columns):
    """(classes, rows) as (registers, sublanes, rows)."""
    return columns.reshape(-1, SUBLANES, columns.shape[1])


def _merge_sublanes(results, known, target_total_ref, *, weighted, metrics):
    """Stores what is known about the rows, from what each sublane knows of its classes."""
    maximum, total = known.maximum[...], known.total[...]
    row_max = jnp.max(maximum, axis=0, keepdims=True)
    shift, correction = _finite(maximum) - _finite(row_max), jnp.exp(maximum - _finite(row_max))

    def store(ref, terms):
        ref[...] = jnp.sum(terms, axis=0, keepdims=True)

    results.maximum[...] = row_max
    store(results.total, total * correction)
    store(results.label_logit, known.label_logit[...])
    target_logit, weighted_total = known.target_logit[...], known.weighted_total[...]
    store(results.target_logit, target_logit + target_total_ref[...] * shift if weighted else target_logit)
    store(results.weighted_total, (weighted_total + total * shift) * correction if metrics else weighted_total)
    # Where no sublane has the maximum, it is NaN.
    prediction = jnp.where(maximum == row_max, known.prediction[...], jnp.inf)
    prediction = jnp.min(prediction, axis=0, keepdims=True)
    results.prediction[...] = jnp.where(prediction == jnp.inf, 0.0, prediction).astype(jnp.int32)


def _finite(logits):
    """0 in place of -inf, whose difference with -inf would be NaN."""
    return jnp.where(logits == -jnp.inf, 0.0, logits)


def online_statistics(
    x, weight, labels, bias, shared_target, *scale, softcap, metrics, config, interpret
) -> OnlineStatistics:
    """Launches the kernel on rows (R, H); bias and shared_target may be empty, and logits have a scale (R,) or none."""
    from jax.experimental.pallas import tpu as pltpu  # here, because only lowering for a TPU needs its 0.2 s

    (rows, features), classes = x.shape, weight.shape[0]
    block_rows, block_vocab, block_hidden = blocks_of(rows, classes, features, config)
    biased = bias.size > 0
    options = {"softcap": softcap, "biased": biased, "weighted": shared_target.size > 0, "metrics": metrics}
    options["scaled"] = bool(scale)
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
                *[row_spec for _ in scale],
            ],
            out_specs=[row_spec] * 6,
            scratch_shapes=[
                *[pltpu.VMEM((SUBLANES, block_rows), jnp.float32)] * 7,  # statistics of each sublane, sums of targets
                # Logits, while the products of some features are missing.
                *[pltpu.VMEM((block_vocab, block_rows), jnp.float32)] * (grid[2] > 1),
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
            bytes_accessed=operand_bytes(x.dtype.itemsize, x.shape, classes, block_rows, block_vocab, block_hidden),
        ),
        interpret=interpret,
    )(live, labels.reshape(1, rows), columns, whole_tile(x), whole_tile(weight), *(s.reshape(1, rows) for s in scale))
    statistics = OnlineStatistics(*(result.reshape(rows) for result in results))
    label_logit = jnp.where(labels >= 0, statistics.label_logit - _finite(statistics.maximum), 0.0)
    return statistics._replace(label_logit=label_logit)


def run(
    x,
    weight,
    bias,
    labels,
    shared_target,
    row_target,
    *scale,
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
        *(s.reshape(-1) for s in scale),
        softcap=softcap,
        metrics=metrics,
        config=config,
        interpret=interpret,
    )
    mean_logit = rows.weighted_total / rows.total
    log_sum_exp = jnp.log(rows.total)
    results = _finite(rows.maximum), log_sum_exp, rows.label_logit, rows.target_logit, mean_logit, rows.prediction
    return tuple(result.reshape(batch_shape) for result in results)


def refuses(hardware, x, weight, bias, labels, shared_target, row_target, *scale, **params) -> str | None:
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
    return affordable(
        hardware,
        block_choices(*shape[:1], classes, features),
        functools.partial(_vmem_bytes, itemsize),
        functools.partial(operand_bytes, itemsize, shape, classes),
    )


def _vmem_bytes(itemsize, block_rows, block_vocab, block_hidden):
    """An estimate of the VMEM that the kernel needs."""
    # x:       (block_rows, block_hidden), two buffers, as the pipeline fetches the next block during a product
    # weight:  (block_vocab, block_hidden), likewise; `block_bytes` also counts the parts of a float32 product
    operands = block_bytes(itemsize, (block_rows + block_vocab) * block_hidden)
    # logits:  (block_vocab, block_rows) float32 scratch if features are cut
    tile = 4 * block_rows * block_vocab
    # x again, arranged for the matrix unit, and four chunks: partial products and logits that wait for their turn
    spilled = itemsize * block_rows * block_hidden + 4 * 4 * block_rows * CHUNK
    # Vectors over rows and over classes are small: `vmem_limit_bytes` adds a quarter for these and Mosaic's own needs.
    return operands + tile + spilled


KERNEL = Kernel(name="mosaic_tpu", platform="tpu", run=run, refuses=refuses, configs=configs)
