"""Dropout on TPU where XLA stores columns before rows: columns lie in sublanes, and rows in lanes.

There a word of the mask lies in the lane of its 32 elements, and a row of words goes to all sublanes by one load. So
nothing crosses lanes, and drawing waits for nothing that could be filled with another block.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.dropout_mask import WORD_BITS
from pallas_kernels.tpu.dropout_launch import launch
from pallas_kernels.tpu.dropout_words import keep_of, long_words, short_words
from pallas_kernels.tpu.stored_order import LANES, SUBLANES, round_up, stored_order

_MOST_WORDS = 40  # of a row in a block; with more, blocks have fewer rows, and HBM is read in shorter pieces


class View(NamedTuple):
    """The axes of an array in the order in which XLA stores them, merged into (images, columns, rows).

    Attributes:
      order: the array's axes in that order; columns, its own last axis, come second to last.
      images: the product of all axes before columns and rows.
      rows: the size of the axis that is stored last.
    """

    order: tuple[int, ...]
    images: int
    rows: int

    def taken(self, x):
        """Returns an array as (images, n, rows): it has these leading axes, and n elements on the last one."""
        return x.transpose(self.order).reshape(self.images, x.shape[-1], self.rows)

    def given_back(self, x, shape):
        """Returns a result for an array of this shape, in the array's own order of axes."""
        columns = len(shape) - 1
        stored = x.reshape(*(x.shape[1] if axis == columns else shape[axis] for axis in self.order))
        return stored.transpose(tuple(map(self.order.index, range(len(shape)))))


def view_of(shape) -> View | None:
    """Returns how to view an array whose columns XLA:TPU stores in sublanes; None for others."""
    order = stored_order(shape) if len(shape) > 1 else ()
    if order[-2:-1] != (len(shape) - 1,):
        return None
    return View(order, math.prod(shape[axis] for axis in order[:-2]), shape[order[-1]])


class Blocks(NamedTuple):
    """Blocks into which an image is cut.

    Attributes:
      words: of a row in a block; a block has 32 times as many columns.
      groups: of 128 rows in a block.
    """

    words: int
    groups: int

    def grid(self, view, columns):
        """Counts the blocks of all images, along words and rows."""
        return view.images, pl.cdiv(columns, self.words * WORD_BITS), pl.cdiv(view.rows, self.groups * LANES)

    def specs(self):
        """Returns the specs of elements, words and streams."""
        rows = self.groups * LANES
        return (
            pl.BlockSpec((None, self.words * WORD_BITS, rows), lambda image, word, row: (image, word, row)),
            pl.BlockSpec((None, self.words, rows), lambda image, word, row: (image, word, row)),
            pl.BlockSpec((None, 3, rows), lambda image, word, row: (image, 0, row)),
        )


def blocks_of(view, columns, block_elements) -> Blocks:
    """Cuts blocks of at most about `block_elements`, whose words fill whole registers if there are enough rows."""
    words = columns // WORD_BITS
    if words > _MOST_WORDS:
        words = round_up(pl.cdiv(words, pl.cdiv(words, _MOST_WORDS)), SUBLANES)
    most = max(1, min(block_elements // (WORD_BITS * LANES) // words, pl.cdiv(view.rows, LANES)))
    groups = max(range(1, most + 1), key=lambda groups: (groups * words / round_up(groups * words, SUBLANES), groups))
    return Blocks(words, groups)


def _apply(words_ref, x_ref, y_ref, factor):
    """Keeps or drops the elements of a block by its words."""
    bit = jnp.uint32(1) << lax.broadcasted_iota(jnp.uint32, (WORD_BITS, x_ref.shape[1]), 0)

    def columns_of_word(word, carry):
        columns = pl.ds(pl.multiple_of(word * WORD_BITS, WORD_BITS), WORD_BITS)
        kept = words_ref[pl.ds(word, 1), :] & bit != 0
        y_ref[columns, :] = jnp.where(kept, x_ref[columns, :].astype(jnp.float32) * factor, 0.0).astype(y_ref.dtype)
        return carry

    lax.fori_loop(0, words_ref.shape[0], columns_of_word, 0)


def _kernel(below_ref, factor_ref, streams_ref, x_ref, y_ref, words_ref, *, groups):
    count = words_ref.shape[0]
    first_word = pl.program_id(1) * count
    word = (lax.broadcasted_iota(jnp.int32, (count, LANES), 0) + first_word).astype(jnp.uint32)
    rows = [slice(group * LANES, (group + 1) * LANES) for group in range(groups)]
    streams = [[jnp.broadcast_to(streams_ref[i : i + 1, part], word.shape) for i in range(3)] for part in rows]
    counters = [jnp.concatenate(each) for each in zip(*((a, b, c + word) for a, b, c in streams), strict=True)]
    padding = -counters[0].shape[0] % SUBLANES
    counters = [jnp.pad(each, ((0, padding), (0, 0))) for each in counters]
    keep = keep_of(below_ref[0])

    def draw(words_of):
        drawn = words_of(keep, counters)
        for group, part in enumerate(rows):
            words_ref[:, part] = drawn[group * count : (group + 1) * count]

    pl.when(keep.is_short)(lambda: draw(short_words))
    pl.when(~keep.is_short)(lambda: draw(long_words))
    _apply(words_ref, x_ref, y_ref, factor_ref[0])


def _backward_kernel(factor_ref, grad_ref, words_ref, out_ref):
    _apply(words_ref, grad_ref, out_ref, factor_ref[0])


def run(view, streams, x, scalars, block_elements, interpret):
    """Returns the result, and the words of its mask."""
    columns = x.shape[-1]
    blocks = blocks_of(view, columns, block_elements)
    elements, words, drawn = blocks.specs()
    results = [
        jax.ShapeDtypeStruct((view.images, columns, view.rows), x.dtype),
        jax.ShapeDtypeStruct((view.images, columns // WORD_BITS, view.rows), jnp.uint32),
    ]
    operands = *scalars, view.taken(streams), view.taken(x)
    ins, outs, grid = [drawn, elements], [elements, words], blocks.grid(view, columns)
    kernel = functools.partial(_kernel, groups=blocks.groups)
    found = launch(kernel, "dropout", grid, ins, outs, results, interpret, operands)
    return tuple(view.given_back(each, x.shape) for each in found)


def run_backward(view, grad, words, factor, block_elements, interpret):
    """Returns the gradient, as the only result."""
    blocks = blocks_of(view, grad.shape[-1], block_elements)
    elements, words_spec, _ = blocks.specs()
    operands = factor, view.taken(grad), view.taken(words)
    results, grid = [jax.ShapeDtypeStruct(operands[1].shape, grad.dtype)], blocks.grid(view, grad.shape[-1])
    ins = [elements, words_spec]
    (out,) = launch(_backward_kernel, "dropout_backward", grid, ins, [elements], results, interpret, operands)
    return (view.given_back(out, grad.shape),)
