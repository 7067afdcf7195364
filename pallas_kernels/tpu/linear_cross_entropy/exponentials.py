"""Exponentials of a linear layer's logits on TPU, with a reference of each row that is known before its logits.

    P = exp(z - reference) in the operands' dtype,    rest = sum P over the classes, before P is rounded

Both are elementwise in the logits z, up to the sum, so all that `statistics` says of its code holds here: a block is
one long piece of code, in chunks of classes that are reduced beside the next one's product, and each sublane has sums
of its own. Classes lie along sublanes, so P is stored as (classes, rows).
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

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
    logits_by_chunk,
    masked,
    operand_bytes,
    scratch_of_tile,
    size_refusal,
    streamed,
    vmem_limit_bytes,
    whole_tile,
)


def _kernel(labels_ref, reference_ref, columns_ref, x_ref, weight_ref, *refs, classes, features, **options):
    """Takes as `refs` P, the sums, sum t (z - reference); then what is held from step to step."""
    exponentials_ref, *sum_refs = refs[:3]
    hidden_blocks, vocab_index, hidden_index = pl.cdiv(features, x_ref.shape[1]), pl.program_id(1), pl.program_id(2)

    @pl.when((vocab_index == 0) & (hidden_index == 0))
    def _start():
        for ref in sum_refs:
            ref[...] = jnp.zeros(ref.shape, jnp.float32)

    logits_of = logits_by_chunk(x_ref, weight_ref, refs[3:], (vocab_index, hidden_index), features)

    @pl.when(hidden_index == hidden_blocks - 1)
    def _complete():
        refs_of_sums = labels_ref, reference_ref, columns_ref, exponentials_ref, sum_refs

        def fold_block(valid_classes):
            # x is loaded in here: what two branches share is copied in VMEM first.
            fold = functools.partial(_fold_chunk, *refs_of_sums, logits_of(), **options)
            for_chunks(fold, weight_ref.shape[0], vocab_index, valid_classes)

        at_edge(fold_block, vocab_index, classes, weight_ref.shape[0])


def _fold_chunk(
    labels_ref,
    reference_ref,
    columns_ref,
    exponentials_ref,
    sum_refs,
    logits_of,
    here,
    first_class,
    valid_classes,
    *,
    softcap,
    biased,
    weighted,
    most_excess,
):
    """Stores the exponentials of a chunk of classes, and adds them to the sums of their rows."""
    logits = logits_of(here)

    def column(position):
        # Vectors over classes lie along lanes in HBM; here classes lie along sublanes.
        return columns_ref[:, here].T[:, position : position + 1]

    if biased:
        logits = logits + column(BIAS)
    if softcap is not None:
        bounded = jnp.tanh(logits * (1 / softcap))
        logits = softcap * bounded
    logits = masked(logits, 0, valid_classes, -jnp.inf)
    target = masked(column(TARGET), 0, valid_classes) if weighted else None
    rest_ref, target_ref = sum_refs
    lanes = min(LANES, logits.shape[1])
    # 128 rows at a time, whose sums are then in registers.
    for start in range(0, logits.shape[1], lanes):
        rows = slice(start, start + lanes)
        shifted = logits[:, rows] - reference_ref[:, rows]
        classes = jax.lax.broadcasted_iota(jnp.int32, shifted.shape, 0)
        is_label = classes == labels_ref[:, rows] - first_class
        exponentials = jnp.where(is_label, 0.0, jnp.exp(jnp.minimum(shifted, most_excess)))
        rest_ref[:, rows] += _by_sublane(exponentials)
        if target is not None:
            target_ref[:, rows] += _by_sublane(masked(target * shifted, 0, valid_classes))
        if softcap is not None:
            # The derivative of softcap tanh(z / softcap).
            exponentials = exponentials * (1 - bounded[:, rows] * bounded[:, rows])
        exponentials_ref[here, rows] = exponentials.astype(exponentials_ref.dtype)


def _by_sublane(columns):
    """Sums over every eighth class: (classes, rows) -> (sublanes, rows)."""
    return jnp.sum(columns.reshape(-1, SUBLANES, columns.shape[1]), axis=0)


def exponentials(
    x, weight, bias, target, labels, reference, *, softcap, most_excess, config, interpret=False
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Launches the kernel on rows (R, H); bias and target may be None.

    Returns P (R, V) times the softcap's derivative, which is 0 at the label and at most exp(most_excess); the sums of
    the exponentials (R,), without the label's and without the derivative; and sum t (z - reference) (R,).
    """
    from jax.experimental.pallas import tpu as pltpu  # here, because only lowering for a TPU needs its 0.2 s

    (rows, features), classes = x.shape, weight.shape[0]
    block_rows, block_vocab, block_hidden = blocks_of(rows, classes, features, config)
    grid = (pl.cdiv(rows, block_rows), pl.cdiv(classes, block_vocab), pl.cdiv(features, block_hidden))
    options = {"softcap": softcap, "biased": bias is not None, "weighted": target is not None}
    columns = class_vectors(bias, target, classes)
    has_columns = int(columns is not None)
    if columns is None:
        columns = jnp.zeros((SUBLANES, block_vocab), jnp.float32)
    row_spec = pl.BlockSpec((1, block_rows), lambda i, j, k: (0, i))
    sums_spec = pl.BlockSpec((SUBLANES, block_rows), lambda i, j, k: (0, i))
    itemsize = x.dtype.itemsize
    stored, rest, target_logit = pl.pallas_call(
        functools.partial(_kernel, classes=classes, features=features, most_excess=most_excess, **options),
        name="linear_cross_entropy_exponentials",
        grid=grid,
        in_specs=[
            row_spec,
            row_spec,
            pl.BlockSpec((SUBLANES, block_vocab), lambda i, j, k: (0, has_columns * j)),
            pl.BlockSpec((block_rows, block_hidden), lambda i, j, k: (i, k)),
            pl.BlockSpec((block_vocab, block_hidden), lambda i, j, k: (j, k)),
        ],
        out_specs=[pl.BlockSpec((block_vocab, block_rows), lambda i, j, k: (j, i)), sums_spec, sums_spec],
        out_shape=[
            jax.ShapeDtypeStruct((classes, rows), x.dtype),
            *[jax.ShapeDtypeStruct((SUBLANES, rows), jnp.float32)] * 2,
        ],
        scratch_shapes=scratch_of_tile(x.dtype, grid, (block_rows, block_vocab, block_hidden)),
        compiler_params=pltpu.CompilerParams(
            # Blocks of rows are independent and may go to different TensorCores; the others accumulate in order.
            dimension_semantics=("parallel", "arbitrary", "arbitrary"),
            vmem_limit_bytes=vmem_limit_bytes(_vmem_bytes(itemsize, block_rows, block_vocab, block_hidden)),
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * rows * classes * features,
            transcendentals=rows * classes,
            bytes_accessed=operand_bytes(itemsize, x.shape, classes, block_rows, block_vocab, block_hidden)
            + itemsize * rows * classes,
        ),
        interpret=interpret,
    )(
        class_or_none(labels, classes).reshape(1, rows),
        reference.reshape(1, rows),
        columns,
        whole_tile(x),
        streamed(weight, interpret),
    )
    return stored.T, jnp.sum(rest, axis=0), jnp.sum(target_logit, axis=0)


def refusal(hardware, x, weight) -> str | None:
    """Says why the kernel cannot run on operands of these shapes and dtypes."""
    return dtype_refusal(x=x, weight=weight) or size_refusal(x, weight)


def configs(hardware, x, weight, chunk_rows):
    """Lists block sizes worth trying for chunks of so many rows; see `pallas_kernels.kernel.Kernel.configs`."""
    *batch, features = x.shape
    rows, classes, itemsize = min(math.prod(batch), chunk_rows), weight.shape[0], jnp.dtype(x.dtype).itemsize
    return affordable(
        hardware,
        # Rows need not be skipped here, so a block may have more of them, and the weight is read less often.
        block_choices(rows, classes, features, most_rows=4096),
        functools.partial(_vmem_bytes, itemsize),
        functools.partial(operand_bytes, itemsize, (rows, features), classes),
    )


def _vmem_bytes(itemsize, block_rows, block_vocab, block_hidden):
    """Estimates the VMEM that the kernel needs."""
    # x:       (block_rows, block_hidden), two buffers, as the pipeline fetches the next block during a product
    # weight:  (block_vocab, block_hidden), likewise; `block_bytes` also counts the parts of a float32 product
    operands = block_bytes(itemsize, (block_rows + block_vocab) * block_hidden)
    # P:       (block_vocab, block_rows), two buffers
    # logits:  (block_vocab, block_rows) float32 scratch if features are cut
    tile = (2 * itemsize + 4) * block_rows * block_vocab
    # x again, arranged for the matrix unit, and four chunks: partial products and logits that wait for their turn
    spilled = itemsize * block_rows * block_hidden + 4 * 4 * block_rows * CHUNK
    # Vectors over rows and over classes are small: `vmem_limit_bytes` adds a quarter for these and Mosaic's own needs.
    return operands + tile + spilled
