"""Dropout on TPU: the mask is drawn in registers, beside the elements that it keeps or drops, in one pass over HBM.

XLA's own program draws the words of the mask in one loop and expands each to its 32 elements in another. Here both
happen in VMEM. Short rows are drawn several at a time, so that words fill all 128 lanes of a register.

What bounds it is the generator. TPUs have no rotation of bits, so a round takes five operations, and a call of 20
rounds with its keys and two digits about 120, which is 30 cycles for a register of words at four vector operations in a
cycle. Its 32 registers of elements, in bfloat16, pass HBM in 248 cycles on a v5e and in 144 on a v6e. A probability of
24 digits asks for 12 calls. But after the first 12 digits, and six calls, one element in 4096 is undecided: the other
six calls are made only for words with such elements, gathered from all registers of a block. Probabilities of up to
four digits, such as 0.5 and 0.75, are bound by HBM.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.dropout_mask import RESOLUTION_BITS, WORD_BITS, compared, drawn_pair, repeated, threshold
from pallas_kernels.kernel import Kernel
from pallas_kernels.tpu.stored_order import SUBLANES
from pallas_kernels.tpu.streaming_cost import streaming_cost

_LANES = 128
_DTYPES = ("float32", "bfloat16")
_BLOCK_COLUMNS = _LANES * WORD_BITS  # a row of words fills the lanes of a register
_BAND_ROWS = 16  # at least: two tiles of rows fill a register of 16-bit values
_MAX_BAND_ROWS = 128  # 16 registers of words, and for each of them the generator's state, of a TensorCore's 64
_MAX_BANDS = 8
_BEGIN_DIGITS = 4  # enough for probabilities such as 0.5
_FIRST_DIGITS = 12  # drawn for all words; fewer would leave too many words undecided at the same place of a register
_SWAPPED_DIGITS = (8, 4)  # of lanes and of bits; each more halves the moves, but waits some 100 cycles for its own
# VMEM of a block: x and y in the operand's dtype and the words, 4 / 32 bytes an element, with two buffers each, and one
# copy of the words. With float32 and 2**19 elements that is 8.2 MiB, within the 16 MiB that XLA grants.
_CONFIGS = ({"block_elements": 524288}, {"block_elements": 262144}, {"block_elements": 131072})

# Vector operations for an element: the generator's, for 32 elements at once; then a bit is tested, and the element
# scaled and selected.
_DRAW_FLOPS = 7 * 120 // WORD_BITS
_SELECT_FLOPS = 4


def _words(streams_ref, bands, row_words, shape, keep_probability):
    """The words of a block's bands of rows, (rows of a band, 128): `row_words` lanes for each band."""
    lane = lax.broadcasted_iota(jnp.int32, shape, 1)
    # A row has a stream of its own: two words of key, and the number of its first word. So the mask does not depend on
    # how rows are cut into blocks.
    key0, key1, words = (_of_bands(streams_ref, i, bands, row_words, lane) for i in range(3))
    for _ in range(1, bands):
        lane = jnp.where(lane >= row_words, lane - row_words, lane)
    words += (pl.program_id(1) * _LANES + lane).astype(jnp.uint32)
    above = threshold(keep_probability)
    # The probability 1 is written as 0.111..., as in `dropout_mask.digits`.
    is_one = above >> jnp.uint32(RESOLUTION_BITS)
    number = above - is_one
    digits = [number >> jnp.uint32(shift) & jnp.uint32(1) for shift in reversed(range(RESOLUTION_BITS))]

    def all_zero_from(digit):
        return number & jnp.uint32((1 << RESOLUTION_BITS - digit) - 1) == 0

    def narrowed(first, last, less, at_most):
        return _narrowed(less, at_most, (key0, key1), words, first, digits[first:last])

    begun = narrowed(0, _BEGIN_DIGITS, jnp.zeros(shape, jnp.uint32), jnp.full(shape, 2**WORD_BITS - 1, jnp.uint32))
    # Zeros at a probability's end decide nothing.
    less, at_most = lax.cond(
        all_zero_from(_BEGIN_DIGITS), lambda: begun, lambda: narrowed(_BEGIN_DIGITS, _FIRST_DIGITS, *begun)
    )
    turn = functools.partial(_turn, (key0, key1, words), repeated(is_one), list(map(repeated, digits[_FIRST_DIGITS:])))
    return lax.while_loop(lambda state: state[2], turn, (less, less ^ at_most, ~all_zero_from(_FIRST_DIGITS)))[0]


def _narrowed(less, at_most, keys, words, first, digits):
    """Compares digits, the first of them first: which numbers are less, and which are that or equal so far.

    `first` is the position of the first digit here; less and at_most are the results for the digits before.
    """
    for position in range(0, len(digits), 2):
        drawn = drawn_pair(keys, words, jnp.uint32((first + position) // 2))
        for digit, word in zip(digits[position : position + 2], drawn, strict=True):
            narrowed = less | (at_most & word)
            less, at_most = jnp.where(digit == 1, narrowed, less), jnp.where(digit == 1, at_most, narrowed)
    return less, at_most


def _turn(operands, less_at_end, digits, state):
    """Decides a few elements by the digits after the first ones, and says whether others are left.

    At each place of a register, the generator draws for two of the words that hold undecided elements. With 16
    registers, one turn is enough for three blocks in four.

    Args:
      operands: the keys and the numbers of all words.
      less_at_end: the result for the digits after all others.
      digits: those after the first ones.
      state: which elements are less, which are undecided, and whether any is.
    """
    rows = SUBLANES if state[0].shape[0] % SUBLANES == 0 else state[0].shape[0]
    less, undecided, *operands = (
        [values[start : start + rows] for start in range(0, values.shape[0], rows)]
        for values in (*state[:2], *operands)
    )
    registers = range(len(less))
    for order in (registers, reversed(registers)):  # the last undecided, then the first
        found = [jnp.zeros_like(less[0]), *(values[0] for values in operands)]
        for i in order:
            here = (jnp.full_like(less[0], i), *(values[i] for values in operands))
            found = [jnp.where(undecided[i] != 0, one, other) for one, other in zip(here, found, strict=True)]
        register, key0, key1, words = found
        known = compared(jnp.full_like(words, less_at_end), (key0, key1), words, _FIRST_DIGITS // 2, digits)
        for i in registers:
            decided = jnp.where(register == jnp.uint32(i), undecided[i], jnp.uint32(0))
            less[i] |= decided & known
            undecided[i] ^= decided
    is_left = functools.reduce(jnp.bitwise_or, undecided) != 0
    return jnp.concatenate(less), jnp.concatenate(undecided), jnp.any(is_left)


def _of_bands(streams_ref, column, bands, row_words, lane):
    rows = lane.shape[0]
    values = jnp.broadcast_to(streams_ref[:rows, column : column + 1], lane.shape)
    for band in range(1, bands):
        others = jnp.broadcast_to(streams_ref[band * rows : (band + 1) * rows, column : column + 1], lane.shape)
        values = jnp.where(lane >= band * row_words, others, values)
    return values


def _swapped(words):
    """Exchanges digits of the lane's number with digits of the bit's number, as in a transposition of bits."""
    lane = lax.broadcasted_iota(jnp.int32, words.shape, 1)
    for digit in _SWAPPED_DIGITS:
        low = sum(1 << bit for bit in range(WORD_BITS) if not bit & digit)
        upper, shift = lane & digit != 0, jnp.uint32(digit)
        partner = _permuted(words, lane ^ digit)
        partner = jnp.where(upper, partner >> shift, partner << shift)
        words ^= (words ^ partner) & jnp.where(upper, jnp.uint32(low), jnp.uint32(low << digit))
    return words


def _permuted(words, lanes):
    if words.shape[0] == 1:  # Mosaic takes no gather from a single row, so it passes as two equal ones.
        return _permuted(*(jnp.broadcast_to(values, (2, _LANES)) for values in (words, lanes)))[:1]
    return jnp.take_along_axis(words, lanes, axis=1, mode="promise_in_bounds")


def _select(words, x_ref, y_ref, factor):
    """Keeps or drops each element; lane `32 q + b` of register c of a row has bit b of the word in lane `4 c + q`."""
    # The cross-lane unit moves one register in a few cycles, and a lane needs one bit of the 32 that come. So some
    # digits of c change places with digits of b first: then one move serves all c that differ in these digits.
    swapped, digits = _swapped(words), sum(_SWAPPED_DIGITS)
    lane = lax.broadcasted_iota(jnp.int32, words.shape, 1)
    quarter, bit = lane >> WORD_BITS.bit_length() - 1, lane & WORD_BITS - 1
    moved = {}

    def selected(start, end):
        first = start // WORD_BITS
        source = first & ~digits
        if source not in moved:
            there = _permuted(swapped, source + quarter + (bit & digits))
            moved[source] = there >> (bit & ~digits).astype(jnp.uint32)
        kept = (moved[source][:, : end - start] & jnp.uint32(1 << (first & digits))) != 0
        return jnp.where(kept, x_ref[:, start:end].astype(jnp.float32) * factor, 0.0)

    # Two registers of float32 at a time, which make one of 16-bit values.
    for start in range(0, x_ref.shape[1], 2 * _LANES):
        end = min(start + 2 * _LANES, x_ref.shape[1])
        parts = [selected(first, min(first + _LANES, end)) for first in range(start, end, _LANES)]
        y_ref[:, start:end] = jnp.concatenate(parts, axis=1).astype(y_ref.dtype)


def _kernel(keep_ref, streams_ref, x_ref, y_ref, words_ref, words_vmem):
    rows, row_words = words_vmem.shape[0], words_ref.shape[1]
    bands = x_ref.shape[0] // rows
    words_vmem[...] = _words(streams_ref, bands, row_words, words_vmem.shape, keep_ref[0])
    for band in range(bands):
        place = slice(band * rows, (band + 1) * rows)
        words = words_vmem[...]
        if band:
            words = _permuted(words, (lax.broadcasted_iota(jnp.int32, words.shape, 1) + band * row_words) & _LANES - 1)
        words_ref[place, :] = words[:, :row_words]
        _select(words, x_ref.at[place], y_ref.at[place], keep_ref[1])


def _backward_kernel(keep_ref, grad_ref, words_ref, out_ref, words_vmem):
    rows = words_vmem.shape[0]
    for band in range(grad_ref.shape[0] // rows):
        place = slice(band * rows, (band + 1) * rows)
        # Lanes without a word keep whatever they hold; no element asks for them.
        words_vmem[:, : words_ref.shape[1]] = words_ref[place, :]
        _select(words_vmem[...], grad_ref.at[place], out_ref.at[place], keep_ref[1])


class Blocks(NamedTuple):
    """How rows and columns are cut.

    Attributes:
      grid: the number of blocks along rows and columns.
      bands: of a block's rows; their words lie beside each other in the lanes, which a single row may not fill.
      rows: of a band.
      columns: of a block.
    """

    grid: tuple[int, int]
    bands: int
    rows: int
    columns: int

    def spec(self, width):
        """Blocks of elements or words."""
        return pl.BlockSpec((self.bands * self.rows, width), lambda row, column: (row, column))

    @property
    def streams_spec(self):
        """The streams of a block's rows."""
        return pl.BlockSpec((self.bands * self.rows, 3), lambda row, column: (row, 0))


def blocks_of(rows, columns, block_elements):
    """Blocks of about `block_elements`, of whole rows if those are short."""
    block_columns = min(columns, _BLOCK_COLUMNS)
    bands = max(1, min(_BLOCK_COLUMNS // block_columns, _MAX_BANDS, rows // _BAND_ROWS))
    wanted = block_elements // (bands * block_columns)
    band_rows = max(_BAND_ROWS, min(wanted, rows // bands, _MAX_BAND_ROWS) // _BAND_ROWS * _BAND_ROWS)
    if bands == 1:
        band_rows = min(rows, band_rows)
    return Blocks((pl.cdiv(rows, bands * band_rows), pl.cdiv(columns, block_columns)), bands, band_rows, block_columns)


def _launch(kernel, name, blocks, in_specs, out_specs, results, flops, interpret, operands):
    from jax.experimental.pallas import tpu as pltpu  # here, because only lowering for a TPU needs its 0.2 s

    return pl.pallas_call(
        kernel,
        name=name,
        grid=blocks.grid,
        # The probability and the factor are scalars, which the scalar core reads from SMEM.
        in_specs=[pl.BlockSpec(memory_space=pltpu.SMEM), *in_specs],
        out_specs=out_specs,
        out_shape=results,
        scratch_shapes=[pltpu.VMEM((blocks.rows, _LANES), jnp.uint32)],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel")),
        cost_estimate=streaming_cost((*operands, *results), results[0].size, flops=flops),
        interpret=interpret,
    )(*operands)


def run(streams, x, keep, *, config, interpret=False):
    """Launches the kernel; see `pallas_kernels.kernel.Kernel.run`."""
    rows, columns = _rows(x)
    blocks = blocks_of(rows, columns, config["block_elements"])
    spec, word_spec = blocks.spec(blocks.columns), blocks.spec(blocks.columns // WORD_BITS)
    results = [
        jax.ShapeDtypeStruct((rows, columns), x.dtype),
        jax.ShapeDtypeStruct((rows, columns // WORD_BITS), jnp.uint32),
    ]
    operands = keep, streams.reshape(rows, 3), x.reshape(rows, columns)
    ins, outs, flops = [blocks.streams_spec, spec], [spec, word_spec], _DRAW_FLOPS + _SELECT_FLOPS
    y, words = _launch(_kernel, "dropout", blocks, ins, outs, results, flops, interpret, operands)
    return y.reshape(x.shape), words.reshape(*x.shape[:-1], columns // WORD_BITS)


def run_backward(grad, words, keep, *, config, interpret=False):
    """Launches the kernel of the gradient; see `pallas_kernels.kernel.Kernel.run`."""
    rows, columns = _rows(grad)
    blocks = blocks_of(rows, columns, config["block_elements"])
    spec, word_spec = blocks.spec(blocks.columns), blocks.spec(blocks.columns // WORD_BITS)
    results = [jax.ShapeDtypeStruct((rows, columns), grad.dtype)]
    operands = keep, grad.reshape(rows, columns), words.reshape(rows, columns // WORD_BITS)
    ins, name = [spec, word_spec], "dropout_backward"
    (out,) = _launch(_backward_kernel, name, blocks, ins, [spec], results, _SELECT_FLOPS, interpret, operands)
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
