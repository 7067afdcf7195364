"""Dropout on TPU: the mask is drawn in registers, beside the elements that it keeps or drops, in one pass over HBM.

XLA's own program draws the words of the mask in one loop and expands each to its 32 elements in another. Here both
happen in VMEM. A word holds 32 neighbouring lanes, so a register of elements needs four words for each of its rows.
"""

import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.dropout_mask import WORD_BITS, compared, digits, threshold
from pallas_kernels.kernel import Kernel
from pallas_kernels.tpu.streaming_cost import streaming_cost

_LANES = 128
_DTYPES = ("float32", "bfloat16")
_BLOCK_COLUMNS = _LANES * WORD_BITS  # 128 words of the mask, which fill the lanes of a register
# VMEM of a block: x and y in the operand's dtype and the words, 4 / 32 bytes an element, with two buffers each. With
# float32 and 2**18 elements that is 2 * (1 + 1 + 1 / 32) MiB, within the 16 MiB that XLA grants.
_CONFIGS = ({"block_elements": 131072}, {"block_elements": 65536}, {"block_elements": 262144})

# Vector operations for an element: a word takes 12 calls of the generator, each of some 120, for 32 elements; then its
# bit is tested, and the element scaled and selected.
_DRAW_FLOPS = 12 * 120 // WORD_BITS
_SELECT_FLOPS = 4


def _words(streams_ref, shape, keep_probability):
    # A row has a stream of its own: two words of key, and the number of its first word. So the mask does not depend on
    # how rows are cut into blocks.
    key0, key1, first = (jnp.broadcast_to(streams_ref[:, i : i + 1], shape) for i in range(3))
    column = jax.lax.broadcasted_iota(jnp.int32, shape, 1).astype(jnp.uint32)
    words = first + (pl.program_id(1) * shape[1]).astype(jnp.uint32) + column
    less, number = digits(threshold(keep_probability))
    return compared(jnp.full(shape, less), (key0, key1), words, 0, number)


def _select(words, x_ref, y_ref, factor):
    """Keeps or drops each lane by bit `lane % 32` of one of the four words that a register of elements needs."""
    rows, columns = x_ref.shape
    for start in range(0, columns, _LANES):
        lanes = min(_LANES, columns - start)
        lane = jax.lax.broadcasted_iota(jnp.int32, (rows, lanes), 1)
        first = start // WORD_BITS
        # TPUs have no cheap gather across lanes: broadcast each of the four words to all lanes, and select by the lane.
        word_of_lane = jnp.broadcast_to(words[:, first : first + 1], (rows, lanes))
        for i in range(1, lanes // WORD_BITS):
            word = jnp.broadcast_to(words[:, first + i : first + i + 1], (rows, lanes))
            word_of_lane = jnp.where(lane >= i * WORD_BITS, word, word_of_lane)
        bit = jax.lax.shift_right_logical(word_of_lane, (lane % WORD_BITS).astype(jnp.uint32)) & jnp.uint32(1)
        x = x_ref[:, start : start + lanes].astype(jnp.float32)
        y_ref[:, start : start + lanes] = jnp.where(bit.astype(jnp.int32) != 0, x * factor, 0.0).astype(y_ref.dtype)


def _kernel(keep_ref, streams_ref, x_ref, y_ref, words_ref):
    words = _words(streams_ref, words_ref.shape, keep_ref[0])
    words_ref[...] = words
    _select(words, x_ref, y_ref, keep_ref[1])


def _backward_kernel(keep_ref, grad_ref, words_ref, out_ref):
    _select(words_ref[...], grad_ref, out_ref, keep_ref[1])


def _blocks(rows, columns, block_elements):
    """The grid, and the blocks of streams, elements and words; rows are cut where a register of words ends."""
    block_columns = min(columns, _BLOCK_COLUMNS)
    block_rows = min(rows, max(16, block_elements // max(block_columns, _LANES) // 16 * 16))
    grid = (pl.cdiv(rows, block_rows), pl.cdiv(columns, block_columns))
    specs = [
        pl.BlockSpec((block_rows, width), lambda row, column: (row, column))
        for width in (block_columns, block_columns // WORD_BITS)
    ]
    return grid, pl.BlockSpec((block_rows, 3), lambda row, column: (row, 0)), *specs


def _launch(kernel, name, grid, in_specs, out_specs, results, flops, interpret, operands):
    from jax.experimental.pallas import tpu as pltpu  # here, because only lowering for a TPU needs its 0.2 s

    return pl.pallas_call(
        kernel,
        name=name,
        grid=grid,
        # The probability and the factor are scalars, which the scalar core reads from SMEM.
        in_specs=[pl.BlockSpec(memory_space=pltpu.SMEM), *in_specs],
        out_specs=out_specs,
        out_shape=results,
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel")),
        cost_estimate=streaming_cost((*operands, *results), results[0].size, flops=flops),
        interpret=interpret,
    )(*operands)


def run(streams, x, keep, *, config, interpret=False):
    """Launches the kernel; see `pallas_kernels.kernel.Kernel.run`."""
    rows, columns = _rows(x)
    grid, stream_spec, spec, word_spec = _blocks(rows, columns, config["block_elements"])
    results = [
        jax.ShapeDtypeStruct((rows, columns), x.dtype),
        jax.ShapeDtypeStruct((rows, columns // WORD_BITS), jnp.uint32),
    ]
    operands = keep, streams.reshape(rows, 3), x.reshape(rows, columns)
    outs = [spec, word_spec]
    flops = _DRAW_FLOPS + _SELECT_FLOPS
    y, words = _launch(_kernel, "dropout", grid, [stream_spec, spec], outs, results, flops, interpret, operands)
    return y.reshape(x.shape), words.reshape(*x.shape[:-1], columns // WORD_BITS)


def run_backward(grad, words, keep, *, config, interpret=False):
    """Launches the kernel of the gradient; see `pallas_kernels.kernel.Kernel.run`."""
    rows, columns = _rows(grad)
    grid, _, spec, word_spec = _blocks(rows, columns, config["block_elements"])
    results = [jax.ShapeDtypeStruct((rows, columns), grad.dtype)]
    operands = keep, grad.reshape(rows, columns), words.reshape(rows, columns // WORD_BITS)
    (out,) = _launch(
        _backward_kernel,
        "dropout_backward",
        grid,
        [spec, word_spec],
        [spec],
        results,
        _SELECT_FLOPS,
        interpret,
        operands,
    )
    return (out.reshape(grad.shape),)


def _rows(x):
    return math.prod(x.shape[:-1]), x.shape[-1]


def _refusal(x) -> str | None:
    if jnp.dtype(x.dtype).name not in _DTYPES:
        return f"Mosaic TPU computes on {' and '.join(_DTYPES)}; the operand is {jnp.dtype(x.dtype).name}"
    if math.prod(x.shape) == 0:
        return "there is nothing to drop"
    if x.shape[-1] % WORD_BITS:
        return f"rows must consist of whole words of {WORD_BITS} elements; a row has {x.shape[-1]}"
    return None


def refuses(hardware, streams, x, keep) -> str | None:
    """Why the kernel cannot run; see `pallas_kernels.kernel.Kernel.refuses`."""
    return _refusal(x)


def refuses_backward(hardware, grad, words, keep) -> str | None:
    """Why the kernel of the gradient cannot run; see `pallas_kernels.kernel.Kernel.refuses`."""
    return _refusal(grad)


def configs(hardware, *operands):
    """Block sizes worth trying; see `pallas_kernels.kernel.Kernel.configs`."""
    return _CONFIGS


KERNEL = Kernel(name="mosaic_tpu", platform="tpu", run=run, refuses=refuses, configs=configs)
BACKWARD_KERNEL = Kernel(name="mosaic_tpu", platform="tpu", run=run_backward, refuses=refuses_backward, configs=configs)
