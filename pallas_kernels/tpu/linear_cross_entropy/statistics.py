"""Row statistics of a linear layer's logits on TPU: matrix product, online maximum and sums, without logits in HBM.

A tile of logits has classes along sublanes and rows along lanes, and the statistics of rows lie in HBM as densely as
vectors do; a column vector would be padded to 128 lanes.

What limits the kernel is the matrix unit, as long as all else happens beside it. So

* a block's product and the reduction of its logits are one long piece of code without branches, in chunks of classes.
  The compiler's scheduler then reduces a chunk while the matrix unit computes the next one. What a block's products
  give last is reduced in the next block.
* each of the eight sublanes keeps statistics of its own, of every eighth class. Folding in more logits takes
  elementwise operations only; the sublanes are merged once, at the end.
* a chunk is reduced 128 rows at a time, whose running statistics are then in registers.

The grid is (rows, classes, hidden), the hidden axis innermost. The statistics of a block of rows stay in VMEM from its
first step to its last and are written once. The weight passes through VMEM once per block of rows, so large blocks of
rows save the most traffic; `operand_bytes` counts it and orders the configurations.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.kernel import Kernel
from pallas_kernels.linear_cross_entropy_kinds import kind
from pallas_kernels.tpu.linear_cross_entropy.online import OnlineStatistics, Rows, finite
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
    scratch_of_tile,
    size_refusal,
    vmem_limit_bytes,
    whole_tile,
)

# The logits that the matrix units give last: two hold 256 rows of x each, on v5e four hold 128.
_DEFERRED_ROWS = 512
_NO_CLASS = 2**30


def _kernel(live_ref, labels_ref, columns_ref, x_ref, weight_ref, *refs, classes, features, scaled, defers, **options):
    """Takes as `refs` scales of rows, if any; six statistics, as many a sublane, the sums of targets; then scratch."""
    scale_ref, refs = (refs[0], refs[1:]) if scaled else (None, refs)
    results, rows = OnlineStatistics(*refs[:6]), Rows(labels_ref, scale_ref, OnlineStatistics(*refs[6:12]), refs[12])
    deferred, held = _Deferred(refs[13] if defers else None, rows, options["metrics"]), refs[13 + defers :]
    hidden_blocks, vocab_index, hidden_index = pl.cdiv(features, x_ref.shape[1]), pl.program_id(1), pl.program_id(2)
    is_live, block_vocab = live_ref[pl.program_id(0)] == 1, weight_ref.shape[0]

    @pl.when((vocab_index == 0) & (hidden_index == 0))
    def _start():
        rows.start(classes, is_live)
        deferred.start()

    logits_of = logits_by_chunk(x_ref, weight_ref, held, (vocab_index, hidden_index), features, is_live)

    # The hidden axis is innermost, so a tile's logits are complete before the next tile begins.
    @pl.when(is_live & (hidden_index == hidden_blocks - 1))
    def _complete():
        def fold_block(valid_classes):
            deferred.fold(vocab_index * block_vocab)
            # x is loaded in here: what two branches share is copied in VMEM first.
            fold = functools.partial(_fold_chunk, rows, deferred, columns_ref, logits_of(), **options)
            for_chunks(fold, block_vocab, vocab_index, valid_classes)

        at_edge(fold_block, vocab_index, classes, block_vocab)

    is_last = (vocab_index == pl.num_programs(1) - 1) & (hidden_index == hidden_blocks - 1)
    if defers and classes % block_vocab == 0:
        pl.when(is_last & is_live)(lambda: deferred.fold(classes))

    @pl.when(is_last)
    def _merge():
        rows.merge(results, weighted=options["weighted"], metrics=options["metrics"])


class _Deferred(NamedTuple):
    """The logits of a block that its products give last: those of its last chunk, of the last rows.

    They are folded in beside the products of the next block. In their own, the matrix units would wait for it.

    Attributes:
      logits: a ref (chunk, R), or None where nothing is deferred.
      rows: all of the block.
      metrics: as for `Rows.fold`.
    """

    logits: Any
    rows: Rows
    metrics: bool

    def start(self):
        """Stores nothing: logits of -inf."""
        if self.logits is not None:
            self.logits[...] = jnp.full(self.logits.shape, -jnp.inf, jnp.float32)

    def put(self, logits, is_last_chunk):
        """Defers the logits of the last chunk's last rows; returns how many rows are left."""
        if self.logits is None or not is_last_chunk:
            return logits.shape[1]
        left = logits.shape[1] - self.logits.shape[1]
        self.logits[...] = logits[:, left:]
        return left

    def fold(self, classes):
        """Folds in what was deferred when so many classes had been multiplied."""
        if self.logits is None:
            return
        chunk, deferred_rows = self.logits.shape
        # Before the first block, no label may be found among logits of -inf: -1 stands for none.
        first_class = jnp.where(classes == 0, _NO_CLASS, classes - chunk)
        first_row, lanes = self.rows.labels.shape[1] - deferred_rows, min(LANES, deferred_rows)
        for start in range(0, deferred_rows, lanes):
            some = self.rows.at(slice(first_row + start, first_row + start + lanes))
            some.fold(self.logits[:, start : start + lanes], None, first_class, None, metrics=self.metrics)


def _fold_chunk(
    rows,
    deferred,
    columns_ref,
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
    logits = masked(logits, 0, valid_classes, -jnp.inf)
    target = masked(column(TARGET), 0, valid_classes) if weighted else None
    lanes = min(LANES, logits.shape[1])
    # A block that is cut is the last.
    is_last_chunk = valid_classes is None and here.start + here.size == columns_ref.shape[1]
    for start in range(0, deferred.put(logits, is_last_chunk), lanes):
        some = slice(start, start + lanes)
        rows.at(some).fold(logits[:, some], target, first_class, valid_classes, metrics=metrics)


def online_statistics(
    x, weight, labels, *, bias=None, target=None, scale=None, softcap, metrics, config, interpret
) -> OnlineStatistics:
    """Launches the kernel on rows (R, H), whose logits may have a scale (R,)."""
    from jax.experimental.pallas import tpu as pltpu  # here, because only lowering for a TPU needs its 0.2 s

    (rows, features), classes = x.shape, weight.shape[0]
    block_rows, block_vocab, block_hidden = blocks_of(rows, classes, features, config)
    biased = bias is not None
    options = {"softcap": softcap, "biased": biased, "weighted": target is not None, "metrics": metrics}
    grid = (pl.cdiv(rows, block_rows), pl.cdiv(classes, block_vocab), pl.cdiv(features, block_hidden))
    # Weights of classes would have to be kept for the next block as well.
    options |= {"scaled": scale is not None, "defers": grid[1] > 1 and not options["weighted"]}
    deferred = math.gcd(block_vocab, CHUNK), min(_DEFERRED_ROWS, block_rows)
    columns = class_vectors(bias, target, classes)
    has_columns = int(columns is not None)
    if columns is None:
        columns = jnp.zeros((SUBLANES, block_vocab), jnp.float32)
    by_row = () if scale is None else (scale.reshape(1, rows),)
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
                *[row_spec] * (scale is not None),
            ],
            out_specs=[row_spec] * 6,
            scratch_shapes=[
                *[pltpu.VMEM((SUBLANES, block_rows), jnp.float32)] * 7,  # statistics of each sublane, sums of targets
                *[pltpu.VMEM(deferred, jnp.float32)] * options["defers"],
                *scratch_of_tile(x.dtype, grid, (block_rows, block_vocab, block_hidden)),
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
    )(live, labels.reshape(1, rows), columns, whole_tile(x), whole_tile(weight), *by_row)
    statistics = OnlineStatistics(*(result.reshape(rows) for result in results))
    label_logit = jnp.where(labels >= 0, statistics.label_logit - finite(statistics.maximum), 0.0)
    return statistics._replace(label_logit=label_logit)


def run(rows, columns, *, softcap, metrics, config, interpret=False, **_):
    """Launches the kernel; see `pallas_kernels.kernel.Kernel.run`."""
    x, target = rows.x.astype(columns.weight.dtype), columns.class_targets
    found = online_statistics(
        x.reshape(-1, x.shape[-1]),
        columns.weight,
        rows.labels.reshape(-1),
        bias=columns.bias,
        target=target,
        scale=None if rows.scale is None else rows.scale.reshape(-1),
        softcap=softcap,
        metrics=metrics,
        config=config,
        interpret=interpret,
    )
    log_sum_exp = jnp.log1p(found.less_one)
    results = (
        finite(found.maximum),
        log_sum_exp,
        found.label_logit,
        None if target is None else jnp.sum(target.astype(jnp.float32)) * log_sum_exp - found.target_logit,
        found.weighted_total / (1 + found.less_one) if metrics else None,
        found.prediction if metrics else None,
    )
    return tuple(None if result is None else result.reshape(x.shape[:-1]) for result in results)


def refuses(hardware, rows, columns, **params) -> str | None:
    """Tells why the kernel cannot run; see `pallas_kernels.kernel.Kernel.refuses`."""
    return label_refusal(rows) or refusal(hardware, rows.x, columns.weight)


def label_refusal(rows) -> str | None:
    """Tells why the kernel cannot take what rows are compared with."""
    return None if rows.labels is not None else "the kernel compares rows with labels, and these have none"


def refusal(hardware, x, weight) -> str | None:
    """Says why the kernel cannot run on operands of these shapes and dtypes."""
    return dtype_refusal(x=x, weight=weight) or size_refusal(x, weight)


def configs(hardware, rows, columns, **params):
    """Returns block sizes worth trying; see `pallas_kernels.kernel.Kernel.configs`."""
    return launch_configs(hardware, rows.x, columns.weight)


def launch_configs(hardware, x, weight):
    """Returns block sizes worth trying for operands of these shapes."""
    *batch, features = x.shape
    shape, classes, itemsize = (math.prod(batch), features), weight.shape[0], jnp.dtype(x.dtype).itemsize
    return affordable(
        hardware,
        block_choices(*shape[:1], classes, features),
        functools.partial(_vmem_bytes, itemsize),
        functools.partial(operand_bytes, itemsize, shape, classes),
    )


def _vmem_bytes(itemsize, block_rows, block_vocab, block_hidden):
    """Estimates the VMEM that the kernel needs."""
    # x:       (block_rows, block_hidden), two buffers, as the pipeline fetches the next block during a product
    # weight:  (block_vocab, block_hidden), likewise; `block_bytes` also counts the parts of a float32 product
    operands = block_bytes(itemsize, (block_rows + block_vocab) * block_hidden)
    # logits:  (block_vocab, block_rows) float32 scratch if features are cut
    tile = 4 * block_rows * block_vocab
    # x again, arranged for the matrix unit, and four chunks: partial products and logits that wait for their turn
    spilled = itemsize * block_rows * block_hidden + 4 * 4 * block_rows * CHUNK
    # Vectors over rows and over classes are small: `vmem_limit_bytes` adds a quarter for these and Mosaic's own needs.
    return operands + tile + spilled


TAKES = frozenset({"x", "labels", "scale", "weight", "bias", "class_targets"})
KERNEL = Kernel(name="mosaic_tpu", platform="tpu", run=run, refuses=refuses, configs=configs, takes=TAKES, kind=kind)
