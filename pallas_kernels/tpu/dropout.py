"""Dropout on TPU: the mask is drawn in registers, beside the elements that it keeps or drops, in one pass over HBM.

XLA's own program draws the words of the mask in one loop and expands each to its 32 elements in another. Here both
happen in VMEM, in one straight piece of code: a step of the grid draws the words of its block, and stores and applies
those of the block before. Each fills the cycles in which the other waits for the cross-lane unit. Arrays whose columns
XLA stores in sublanes are taken as they lie, by the kernels of `dropout_columns`. The words of rows of fewer than 4096
elements do not fill 128 lanes, which HBM would hold whole: they are transposed, and lie in sublanes there.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.dropout_mask import WORD_BITS, threshold
from pallas_kernels.kernel import Kernel, Kind, dtype_names
from pallas_kernels.tpu import dropout_columns
from pallas_kernels.tpu.dropout_launch import launch
from pallas_kernels.tpu.dropout_words import Places, keep_of, long_words, permuted, short_words
from pallas_kernels.tpu.stored_order import LANES, SUBLANES, round_up, stored_order

_DTYPES = ("float32", "bfloat16")
_GROUP_COLUMNS = LANES * WORD_BITS  # a row of words fills the lanes of a register
_BAND_ROWS = 16  # at least: two tiles of rows fill a register of 16-bit values
_MAX_BAND_ROWS = 128
_MAX_REGISTERS = 20  # of words; with more of them, a second turn for undecided ones is needed more often
_MAX_BANDS = 8
_SWAPPED_DIGITS = (8, 4)  # of lanes and of bits; each more halves the moves, but waits some 100 cycles for its own
# VMEM of a block: x and y with two buffers each; words, 4 / 32 bytes an element, with two buffers and one copy. With
# 2**21 bytes of elements that is 8.2 MiB in float32 and 8.4 in bfloat16, within the 16 MiB that XLA grants.
_BLOCK_BYTES = (2**21, 2**20, 2**19)


def _swapped(words, digits):
    """Exchanges digits of the lane's number with digits of the bit's number, as in a transposition of bits."""
    lane = lax.broadcasted_iota(jnp.int32, words.shape, 1)
    for digit in digits:
        low = sum(1 << bit for bit in range(WORD_BITS) if not bit & digit)
        upper, shift = lane & digit != 0, jnp.uint32(digit)
        partner = permuted(words, lane ^ digit)
        partner = jnp.where(upper, partner >> shift, partner << shift)
        words ^= (words ^ partner) & jnp.where(upper, jnp.uint32(low), jnp.uint32(low << digit))
    return words


def _select(words, x_ref, y_ref, factor):
    """Keeps or drops each element; lane `32 q + b` of register c of a row has bit b of the word in lane `4 c + q`."""
    # The cross-lane unit moves one register in a few cycles, and a lane needs one bit of the 32 that come. So some
    # digits of c change places with digits of b first: then one move serves all c that differ in these digits.
    exchanged = [digit for digit in _SWAPPED_DIGITS if digit < pl.cdiv(x_ref.shape[1], LANES)]
    swapped, digits = _swapped(words, exchanged), sum(exchanged)
    lane = lax.broadcasted_iota(jnp.int32, words.shape, 1)
    quarter, bit = lane >> WORD_BITS.bit_length() - 1, lane & WORD_BITS - 1
    moved = {}

    def selected(start, end):
        first = start // WORD_BITS
        source = first & ~digits
        if source not in moved:
            there = permuted(swapped, source + quarter + (bit & digits))
            moved[source] = there >> (bit & ~digits).astype(jnp.uint32)
        kept = (moved[source][:, : end - start] & jnp.uint32(1 << (first & digits))) != 0
        return jnp.where(kept, x_ref[:, start:end].astype(jnp.float32) * factor, 0.0)

    # Two registers of float32 at a time, which make one of 16-bit values.
    for start in range(0, x_ref.shape[1], 2 * LANES):
        end = min(start + 2 * LANES, x_ref.shape[1])
        parts = [selected(first, min(first + LANES, end)) for first in range(start, end, LANES)]
        y_ref[:, start:end] = jnp.concatenate(parts, axis=1).astype(y_ref.dtype)


def _select_from(words, rows, first, x_ref, y_ref, factor):
    """Keeps or drops the elements of rows, whose words from the first on these are."""
    start = first * WORD_BITS
    columns = pl.ds(start, min(_GROUP_COLUMNS, x_ref.shape[1] - start))
    _select(words, x_ref.at[rows, columns], y_ref.at[rows, columns], factor)


def _kernel(below_ref, factor_ref, streams_ref, x_ref, y_ref, words_ref, drawn_vmem, *rows_vmem, blocks):
    places, column_blocks = blocks.places, blocks.counts[1]
    words_in_rows = rows_vmem[0] if blocks.in_sublanes else words_ref
    keep = keep_of(below_ref[0])
    steps = pl.num_programs(1) - 1
    step = pl.program_id(1)
    block = pl.program_id(0) * steps + step
    first_word = lax.rem(block, column_blocks) * places.words

    def take_before():
        # The first step has nothing to take yet. What it makes of whatever is there, the next one replaces.
        for rows, columns, words in places.in_rows(drawn_vmem[...]):
            words_in_rows[rows, columns] = words[:, : columns.stop - columns.start]
            _select_from(words, rows, columns.start, x_ref, y_ref, factor_ref[0])
        for first in range(0, blocks.rows * blocks.in_sublanes, LANES):
            rows = slice(first, first + LANES)
            words_ref[:, rows] = words_in_rows[rows, :].T[: places.words]

    @pl.when((step == steps) | keep.is_short)
    def _():
        take_before()

    @pl.when((step < steps) & keep.is_short)
    def _():
        drawn_vmem[...] = short_words(keep, places.counters(streams_ref, first_word))

    @pl.when((step < steps) & ~keep.is_short)
    def _():
        counters = places.counters(streams_ref, first_word)
        take_before()
        drawn_vmem[...] = long_words(keep, counters)


def _backward_kernel(factor_ref, grad_ref, words_ref, out_ref, words_vmem, *, in_sublanes):
    # Lanes without a word keep whatever they hold; no element asks for them.
    if in_sublanes:
        for first in range(0, words_vmem.shape[0], LANES):
            rows, padding = slice(first, first + LANES), ((0, LANES - words_ref.shape[0]), (0, 0))
            words_vmem[rows, :] = jnp.pad(words_ref[:, rows], padding).T
    else:
        words_vmem[:, : words_ref.shape[1]] = words_ref[...]
    for first in range(0, words_vmem.shape[1], LANES):
        words = words_vmem[:, first : first + LANES]
        _select_from(words, slice(None), first, grad_ref, out_ref, factor_ref[0])


class Blocks(NamedTuple):
    """Blocks into which rows and columns are cut.

    Attributes:
      counts: of blocks along rows and columns.
      places: of a block's words.
      in_sublanes: whether the words of a row lie in sublanes of HBM, where XLA stores them if they fill few lanes.
    """

    counts: tuple[int, int]
    places: Places
    in_sublanes: bool

    @property
    def rows(self):
        """The rows of a block."""
        return self.places.bands * self.places.rows

    @property
    def drawn_words(self):
        """Words of a block as they are drawn."""
        return self.places.groups * self.places.rows, LANES

    def stored(self, words):
        """Returns words of rows in the order in which they lie in HBM, or the reverse."""
        return words.T if self.in_sublanes else words

    @property
    def words_in_rows(self):
        """Words of a block as they lie in rows, in whole groups of lanes."""
        return self.rows, round_up(self.places.words, LANES)

    def specs(self, block_of):
        """Returns specs of elements, words and streams; `block_of` tells which block from the grid's indices."""
        words, columns = self.places.words, self.counts[1]

        def row_and_column(*indices):
            return lax.div(block_of(*indices), columns), lax.rem(block_of(*indices), columns)

        words_spec = pl.BlockSpec((self.rows, words), row_and_column)
        if self.in_sublanes:
            words_spec = pl.BlockSpec((words, self.rows), lambda *indices: (0, block_of(*indices)))
        return (
            pl.BlockSpec((self.rows, words * WORD_BITS), row_and_column),
            words_spec,
            pl.BlockSpec((self.rows, 3), lambda *indices: (lax.div(block_of(*indices), columns), 0)),
        )


def blocks_of(rows, columns, block_elements):
    """Cuts blocks of about `block_elements`: of whole rows where their words fill more lanes so, or of 4096 columns.

    The lanes of a register may hold the end of one row's words and the beginning of another's.
    """
    words = columns // WORD_BITS
    in_sublanes = words < LANES <= rows and stored_order((rows, words)) == (1, 0)

    def groups_of(bands):
        return pl.cdiv(bands * words, LANES)

    def most_rows(bands):
        return min(_MAX_BAND_ROWS, _MAX_REGISTERS * SUBLANES // groups_of(bands))

    def unit(bands):
        """Returns what the rows of a band are a multiple of: words in sublanes need blocks of whole lanes of rows."""
        return max(_BAND_ROWS, LANES // math.gcd(bands, LANES)) if in_sublanes else _BAND_ROWS

    most = max(1, min(_MAX_BANDS, rows // _BAND_ROWS, block_elements // (_BAND_ROWS * columns)))
    possible = [bands for bands in range(1, most + 1) if bands == 1 or unit(bands) <= most_rows(bands)]
    bands = min(possible, key=lambda bands: (round_up(bands * words, LANES) / bands, bands))
    if round_up(bands * words, LANES) / bands >= round_up(words, LANES) and words > LANES:
        bands, words = 1, LANES
    wanted = min(block_elements // (bands * words * WORD_BITS), rows // bands, most_rows(bands))
    band_rows = max(unit(bands), wanted // unit(bands) * unit(bands))
    if bands == 1:
        band_rows = min(rows, band_rows)
    counts = pl.cdiv(rows, bands * band_rows), pl.cdiv(columns, words * WORD_BITS)
    return Blocks(counts, Places(bands, band_rows, words), in_sublanes)


def run(streams, x, keep, *, config, interpret=False):
    """Launches the kernel; see `pallas_kernels.kernel.Kernel.run`."""
    scalars = threshold(keep[:1]), keep[1:]
    view = dropout_columns.view_of(x.shape)
    if view is not None:
        return dropout_columns.run(view, streams, x, scalars, config["block_elements"], interpret)
    rows, columns = _rows(x)
    blocks = blocks_of(rows, columns, config["block_elements"])
    count = math.prod(blocks.counts)
    cores = 2 if count % 2 == 0 else 1  # as many as any TPU has; others take both halves
    steps = count // cores
    _, _, drawn = blocks.specs(lambda core, step: core * steps + jnp.minimum(step, steps - 1))
    taken, taken_words, _ = blocks.specs(lambda core, step: core * steps + jnp.maximum(step - 1, 0))
    results = [
        jax.ShapeDtypeStruct((rows, columns), x.dtype),
        jax.eval_shape(blocks.stored, jax.ShapeDtypeStruct((rows, columns // WORD_BITS), jnp.uint32)),
    ]
    operands = *scalars, streams.reshape(rows, 3), x.reshape(rows, columns)
    kernel = functools.partial(_kernel, blocks=blocks)
    ins, outs, grid = [drawn, taken], [taken, taken_words], (cores, steps + 1)
    scratch = [blocks.drawn_words, *[blocks.words_in_rows] * blocks.in_sublanes]
    y, words = launch(kernel, "dropout", grid, ins, outs, results, interpret, operands, scratch=scratch)
    return y.reshape(x.shape), blocks.stored(words).reshape(*x.shape[:-1], columns // WORD_BITS)


def run_backward(grad, words, keep, *, config, interpret=False):
    """Launches the kernel of the gradient; see `pallas_kernels.kernel.Kernel.run`."""
    view = dropout_columns.view_of(grad.shape)
    if view is not None:
        return dropout_columns.run_backward(view, grad, words, keep[1:], config["block_elements"], interpret)
    rows, columns = _rows(grad)
    blocks = blocks_of(rows, columns, config["block_elements"])
    elements, words_spec, _ = blocks.specs(lambda block: block)
    results = [jax.ShapeDtypeStruct((rows, columns), grad.dtype)]
    operands = keep[1:], grad.reshape(rows, columns), blocks.stored(words.reshape(rows, columns // WORD_BITS))
    kernel = functools.partial(_backward_kernel, in_sublanes=blocks.in_sublanes)
    ins, name, grid = [elements, words_spec], "dropout_backward", (math.prod(blocks.counts),)
    scratch = [blocks.words_in_rows]
    (out,) = launch(kernel, name, grid, ins, [elements], results, interpret, operands, scratch=scratch)
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
    """Says why the kernel cannot run; see `pallas_kernels.kernel.Kernel.refuses`."""
    return _refusal(x)


def refuses_backward(hardware, grad, words, keep) -> str | None:
    """Says why the kernel of the gradient cannot run; see `pallas_kernels.kernel.Kernel.refuses`."""
    return _refusal(grad)


def configs(hardware, *operands):
    """Lists block sizes worth trying; see `pallas_kernels.kernel.Kernel.configs`."""
    itemsize = min(jnp.dtype(x.dtype).itemsize for x in operands)
    return tuple({"block_elements": size // itemsize} for size in _BLOCK_BYTES)


def kind(hardware, streams, x, keep) -> Kind:
    """Returns what makes cases alike; see `pallas_kernels.kernel.Kernel.kind`."""
    return kind_in(hardware, x)


def kind_backward(hardware, grad, words, keep) -> Kind:
    """Returns what makes cases of the gradient alike; see `pallas_kernels.kernel.Kernel.kind`."""
    return kind_in(hardware, grad)


def kind_in(hardware, x) -> Kind:
    """Returns the kind, which depends on whether XLA's own program keeps the mask in VMEM between its two loops."""
    kind, sizes = _kind_of(x), _rows(x)
    second, minor = (sizes[axis] for axis in stored_order(sizes))
    mask_bytes = 4 * round_up(second, SUBLANES) * round_up(minor, LANES)  # a word for each element
    return kind if hardware.may_keep(mask_bytes) else kind._replace(text=f"{kind.text}, mask in HBM")


def _kind_of(x) -> Kind:
    rows, columns = _rows(x)
    lanes = "whole lanes" if columns % LANES == 0 else "part of the lanes"
    in_sublanes = dropout_columns.view_of(x.shape) is not None
    # XLA stores an array of its own so, where the lanes of rows would pad more, and copies it for the kernel.
    copied = ["copied"] * (not in_sublanes and len(x.shape) > 1 and stored_order(x.shape)[-1] != len(x.shape) - 1)
    places = "columns in sublanes" if in_sublanes else lanes
    return Kind(", ".join((dtype_names(x), places, *copied)), (rows, columns))


KERNEL = Kernel(name="mosaic_tpu", platform="tpu", run=run, refuses=refuses, configs=configs, kind=kind)
BACKWARD_KERNEL = Kernel(
    name="mosaic_tpu",
    platform="tpu",
    run=run_backward,
    refuses=refuses_backward,
    configs=configs,
    kind=kind_backward,
)
