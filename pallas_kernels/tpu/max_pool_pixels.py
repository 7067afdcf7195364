"""The gradient of max pooling of images whose pixels lie outside of the tiles; see `max_pool_backward`.

Sublanes and lanes then hold channels and images, so that pixels are whole registers and nothing is shifted or strided.
A step takes as many rows as there are from one window to the next, and finishes the rows before them: a window's rows
lie in these two blocks. Of each row that the next windows need as well, the step keeps the greatest key of each
window's columns, which column has it, and the gradient that the row has won so far; so each row is searched once.
"""

import functools
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.tpu.max_pool_keys import greater, keys, least_of, shares
from pallas_kernels.tpu.stored_order import LANES, SUBLANES, round_up

_SUBLANES_OF_BFLOAT16 = 2 * SUBLANES
_MOST_REGISTERS = 4  # of each value, computed at a time
_DEFAULT_LIMIT_BYTES = 16 * 2**20  # what XLA grants a kernel that asks for nothing


class Blocks(NamedTuple):
    """Blocks into which images (before, h, w, between, sublanes, lanes) and their windows are cut.

    Attributes:
      image: rows and columns of an image.
      outputs: how many windows it has along rows and columns.
      window: rows and columns of a window.
      stride: from one window to the next.
      left: how far the first windows reach beyond the image's first column.
      first: the row of the block before in which the windows of a step begin; at least `stride` if in the step's own.
      delay: the step at which the first windows are computed.
      tile: sublanes and lanes of a block.
      is_packed: whether keys and gradients have 16 bits, so that a register holds twice as many.
    """

    image: tuple[int, int]
    outputs: tuple[int, int]
    window: tuple[int, int]
    stride: tuple[int, int]
    left: int
    first: int
    delay: int
    tile: tuple[int, int]
    is_packed: bool

    @property
    def key_dtype(self) -> Any:
        """The dtype of what is compared."""
        return jnp.int16 if self.is_packed else jnp.int32

    @property
    def grad_dtype(self) -> Any:
        """The dtype in which one window's gradient is routed; where it is added to another's, in float32."""
        return jnp.bfloat16 if self.is_packed else jnp.float32

    @property
    def row_blocks(self) -> int:
        """Blocks of rows of an image."""
        return pl.cdiv(self.image[0], self.stride[0])

    @property
    def is_late(self) -> bool:
        """Tells whether a block of rows is finished by the step after its own."""
        return self.first < self.stride[0]

    @property
    def open_rows(self) -> range:
        """The rows of a block that the windows of the next step need."""
        return range(min(self.first, self.stride[0]), self.stride[0])

    @property
    def own_rows(self) -> range:
        """The rows of a step's own block that its windows need."""
        return range(max(self.first - self.stride[0], 0), self.first + self.window[0] - self.stride[0])

    @property
    def searched_rows(self) -> list[int]:
        """The rows of a block that any windows need."""
        return sorted({*self.own_rows, *self.open_rows})

    @property
    def rows_behind(self) -> range:
        """The rows of a block that may lie behind the image, where it holds anything, in a step that has windows."""
        if self.is_late and self.outputs[0] + self.delay > self.row_blocks:
            return range(self.stride[0])
        return range(self.image[0] % self.stride[0] or self.stride[0], self.stride[0])

    @property
    def shared_columns(self) -> int:
        """The columns that a window shares with the next."""
        return max(self.window[1] - self.stride[1], 0)

    @property
    def chunk(self) -> tuple[int, int]:
        """Sublanes and lanes that are computed at a time."""
        sublanes, lanes = self.tile
        most = _MOST_REGISTERS * SUBLANES * (2 if self.is_packed else 1)
        fits = (size for size in (most, 32, 16, 8) if sublanes % size == 0)
        return next(fits, sublanes), min(lanes, LANES)

    @property
    def vmem_bytes(self) -> int:
        """The bytes of its buffers: two of x, dx and the gradient, and what is kept."""
        (rows, columns), (_, windows) = (self.stride[0], self.image[1]), self.outputs
        late_rows = self.open_rows.start if self.is_late else 0
        pixels = (4 * rows + late_rows) * columns + (2 + 3 * len(self.open_rows)) * windows
        return self.key_dtype(0).itemsize * pixels * round_up(self.tile[0], SUBLANES) * round_up(self.tile[1], LANES)


def refusal(*, window, stride, padding) -> str | None:
    """Says why a step cannot compute these windows; None if it can."""
    _, first = _place(window[1], stride[1], padding[1][0])
    return None if first >= 0 else "the rows of a window lie in more than two blocks of as many rows as its stride"


def _place(window, stride, before):
    """Returns the step at which the first window is computed, and the row of the block before it in which it begins."""
    delay = (window - 1 - before) // stride
    return delay, stride * (1 - delay) - before


def blocks_of(view_shape, vmem_bytes, is_packed=False, *, window, stride, padding):
    """Returns the largest blocks that fit into VMEM; None if even the smallest does not."""
    *_, height, width, _, sublanes, lanes = view_shape
    image, window, stride, padding = (height, width), window[1:], stride[1:], padding[1:]
    outputs = tuple(1 + (n + sum(p) - k) // s for n, k, s, p in zip(image, window, stride, padding, strict=True))
    delay, first = _place(window[0], stride[0], padding[0][0])
    # Lanes before sublanes: longer runs in HBM are copied faster.
    least = min(sublanes, _SUBLANES_OF_BFLOAT16)
    tiles = [(size, min(lanes, LANES)) for size in _sizes(sublanes, _SUBLANES_OF_BFLOAT16)]
    tiles += [(least, size) for size in _sizes(lanes, LANES)]
    found = [Blocks(image, outputs, window, stride, padding[1][0], first, delay, tile, is_packed) for tile in tiles]
    fits = [blocks for blocks in found if blocks.vmem_bytes <= vmem_bytes]
    return max(fits, key=lambda blocks: blocks.tile[0] * blocks.tile[1], default=None)


def _sizes(size, unit):
    """Lists sizes of blocks along an axis: all of it, or multiples of a unit."""
    return [size, *range(size // unit * unit, 0, -unit)]


class _Step(NamedTuple):
    """One step's computation for some sublanes and lanes of a block.

    Attributes:
      blocks: what is computed.
      propagate_nan: whether NaN is the greatest number, or the least.
      x: the step's own block of rows.
      grad: the gradients of its windows.
      dx: the block of rows that it finishes.
      kept: scratch; see `_scratch`.
      place: which sublanes and lanes.
      step: which of the image's.
    """

    blocks: Blocks
    propagate_nan: bool
    x: Any
    grad: Any
    dx: Any
    kept: Sequence[Any]
    place: tuple[Any, ...]
    step: Any

    def compute(self):
        """Goes through the windows along columns; those that reach beyond the image are unrolled."""
        blocks = self.blocks
        (_, width), (_, outputs), (_, stride) = blocks.image, blocks.outputs, blocks.stride
        begin = min(pl.cdiv(blocks.left, stride), outputs)
        end = min(max((width - max(blocks.window[1], stride) + blocks.left) // stride + 1, begin), outputs)
        zeros = jnp.zeros(blocks.chunk, jnp.float32)
        sums = [
            [jnp.zeros(blocks.chunk, self.sum_dtype(row))] * blocks.shared_columns for row in range(blocks.stride[0])
        ]
        for i in range(begin):
            sums, _ = self.window(i, sums, None)
        if begin < end:
            shared = range(begin * stride - blocks.left, begin * stride - blocks.left + blocks.shared_columns)
            found = {row: [self.key(row, column) for column in shared] for row in blocks.searched_rows}
            sums, _ = lax.fori_loop(begin, end, lambda i, state: self.window(i, *state), (sums, found))
        for i in range(end, outputs):
            sums, _ = self.window(i, sums, None)
        rest = range(outputs * stride - blocks.left, width)
        for row, values in enumerate(sums):
            for column, value in itertools.zip_longest(rest, values[: len(rest)], fillvalue=zeros):
                self.store(row, column, value)

    def window(self, i, sums, found):
        """Computes one window along columns.

        Args:
          i: which.
          sums: for each finished row, the gradients so far in those columns that the window before has as well.
          found: for each searched row, the keys in these columns; None if the window may reach beyond the image.

        Returns:
          The same for the next window.
        """
        blocks = self.blocks
        (_, window), (_, stride), shared = blocks.window, blocks.stride, blocks.shared_columns
        start = i * stride - blocks.left
        inside = [j for j in range(max(window, stride)) if found is not None or 0 <= start + j < blocks.image[1]]
        searched = [j for j in inside if j < window]
        held = {row: () if found is None else found[row] for row in blocks.searched_rows}
        row_keys = {
            row: [each[j] if j < len(each) else self.key(row, start + j) for j in searched]
            for row, each in held.items()
        }
        won = self.routed(i, {row: self.searched(row, each, searched) for row, each in row_keys.items()})
        following = []
        for row, (before, each) in enumerate(zip(sums, won, strict=True)):
            totals = [*before, *[jnp.zeros(blocks.chunk, jnp.float32)] * (max(window, stride) - shared)]
            for j, share in zip(searched, each(row_keys, searched), strict=False):
                totals[j] = totals[j] + share.astype(totals[j].dtype) if j < shared else share
            for j in inside:
                if j < stride:
                    self.store(row, start + j, totals[j])
            following.append([total.astype(self.sum_dtype(row)) for total in totals[stride:]])
        return following, {row: each[stride:] for row, each in row_keys.items()}

    def key(self, row, column):
        return keys(self.x[(row, column, *self.place)], self.propagate_nan, self.blocks.key_dtype)

    def sum_dtype(self, row):
        """Returns the dtype of sums: two bfloat16s add up as in float32, rounded; rows of two blocks have four."""
        return self.blocks.grad_dtype if row < self.blocks.open_rows.start else jnp.float32

    def searched(self, row, found, places):
        """Returns the greatest of the keys in a window's columns, and the first column that has it."""
        best, column = found[0], jnp.full_like(found[0], places[0])
        for key, place in zip(found[1:], places[1:], strict=True):
            best, is_greater = greater(key, best)
            column = jnp.where(is_greater, jnp.asarray(place, column.dtype), column)
        if row in self.blocks.rows_behind:
            is_inside = self.step * self.blocks.stride[0] + row < self.blocks.image[0]
            best = jnp.where(is_inside, best, jnp.asarray(least_of(best.dtype), best.dtype))
        return best, column

    def routed(self, i, found):
        """Returns, for each finished row, a function of its keys and columns: what they get from the rows' windows.

        Args:
          i: which window along columns.
          found: for each searched row, the greatest key and its column.
        """
        blocks = self.blocks
        at = [(row - blocks.open_rows.start, i, *self.place) for row in blocks.open_rows]
        earlier = [tuple(ref[place] for ref in self.kept[:3]) for place in at]
        rows = [*(key for key, _, _ in earlier), *(found[row][0] for row in blocks.own_rows)]
        window = self.step - blocks.delay
        is_window = (window >= 0) & (window < blocks.outputs[0])
        grad = self.grad[(i, *self.place)].astype(blocks.grad_dtype)
        # As integers, or Mosaic would select in half-filled registers, as they are loaded.
        bits = lax.bitcast_convert_type(grad, blocks.key_dtype)
        grad = lax.bitcast_convert_type(jnp.where(is_window, bits, jnp.zeros((), bits.dtype)), grad.dtype)
        parts = shares(rows, grad)
        own = dict(zip(blocks.own_rows, parts[len(earlier) :], strict=True))
        for row, place in zip(blocks.open_rows, at, strict=True):
            for ref, value in zip(self.kept, (*found[row], own.get(row, jnp.zeros_like(grad))), strict=False):
                ref[place] = value
        # A row that is finished at once needs no column: the comparisons of its keys are still there.
        begun = [functools.partial(self.split, row, own.get(row)) for row in range(blocks.open_rows.start)]
        ended = [
            functools.partial(self.chosen, column, total, share)
            for (_, column, total), share in zip(earlier, parts, strict=False)
        ]
        return [*begun, *ended]

    def split(self, row, grad, row_keys, columns):
        return () if grad is None else shares(row_keys[row], grad)

    def chosen(self, column, total, share, row_keys, columns):
        # Masks of 16-bit comparisons do not select float32.
        once = column, total + share
        shared = column.astype(jnp.int32), total.astype(jnp.float32) + share.astype(jnp.float32)
        return [self.where_equal(j, *(once if self.is_in_one_window(j) else shared)) for j in columns]

    def where_equal(self, j, column, grad):
        return jnp.where(column == jnp.asarray(j, column.dtype), grad, jnp.zeros((), grad.dtype))

    def is_in_one_window(self, j):
        """Tells whether a window's column j is in no other window."""
        return self.blocks.shared_columns <= j < self.blocks.stride[1]

    def store(self, row, column, value):
        """Stores an element of a finished row."""
        at = (row, column, *self.place)
        if self.blocks.is_late and row not in self.blocks.open_rows:
            late = self.kept[3]
            self.dx[at] = late[at]
            late[at] = value.astype(late.dtype)
        else:
            self.dx[at] = value.astype(self.dx.dtype)


def _kernel(x_ref, grad_ref, dx_ref, *kept, blocks, propagate_nan):
    (sublanes, lanes), (tile_sublanes, tile_lanes) = blocks.chunk, blocks.tile
    step = pl.program_id(4)  # here, because JAX's interpreter does not know it in loops

    @pl.when(step == 0)
    def _():
        # There is nothing before the image.
        for ref, value in zip(kept, (least_of(blocks.key_dtype), 0, 0.0), strict=False):

            def fill(i, _, ref=ref, value=value):
                ref[:, i] = jnp.full((ref.shape[0], *ref.shape[2:]), value, ref.dtype)

            lax.fori_loop(0, blocks.outputs[1], fill, None)

    def compute(i, _):
        def compute_lanes(j, _):
            place = (
                pl.ds(pl.multiple_of(i * sublanes, sublanes), sublanes),
                pl.ds(pl.multiple_of(j * lanes, lanes), lanes),
            )
            _Step(blocks, propagate_nan, x_ref, grad_ref, dx_ref, kept, place, step).compute()

        lax.fori_loop(0, tile_lanes // lanes, compute_lanes, None)

    lax.fori_loop(0, tile_sublanes // sublanes, compute, None)


def _scratch(blocks, dtype):
    """Returns what a step keeps for the next.

    Of the rows that its windows need: for each window along columns the greatest key, the first column that has it, and
    the gradient won so far. And rows that are finished, but belong to a block that the next step stores.
    """
    from jax.experimental.pallas import tpu as pltpu

    if not blocks.is_late:
        return []
    shape = (len(blocks.open_rows), blocks.outputs[1], *blocks.tile)
    scratch = [pltpu.VMEM(shape, each) for each in (blocks.key_dtype, blocks.key_dtype, blocks.grad_dtype)]
    if late_rows := blocks.open_rows.start:
        scratch.append(pltpu.VMEM((late_rows, blocks.image[1], *blocks.tile), dtype))
    return scratch


def launch(x, grad, config, propagate_nan, cost, interpret, **geometry):
    """Computes the gradient of images, both views (before, h, w, between, sublanes, lanes)."""
    from jax.experimental.pallas import tpu as pltpu  # here, because only lowering for a TPU needs its 0.2 s

    blocks = blocks_of(x.shape, **config, **geometry)
    before, _, width, between, sublanes, lanes = x.shape

    def spec(rows, columns, index):
        return pl.BlockSpec(
            (None, rows, columns, None, *blocks.tile),
            lambda i, j, part, lane_part, step: (i, index(step), 0, j, part, lane_part),
        )

    last_rows, last_window = blocks.row_blocks - 1, blocks.outputs[0] - 1
    return pl.pallas_call(
        functools.partial(_kernel, blocks=blocks, propagate_nan=propagate_nan),
        name="max_pool_backward",
        grid=(
            *(before, between, pl.cdiv(sublanes, blocks.tile[0]), pl.cdiv(lanes, blocks.tile[1])),
            blocks.row_blocks + blocks.is_late,
        ),
        in_specs=[
            spec(blocks.stride[0], width, lambda step: jnp.minimum(step, last_rows)),
            spec(None, blocks.outputs[1], lambda step: jnp.clip(step - blocks.delay, 0, last_window)),
        ],
        out_specs=spec(blocks.stride[0], width, lambda step: jnp.maximum(step - int(blocks.is_late), 0)),
        out_shape=jax.ShapeDtypeStruct(x.shape, grad.dtype),
        scratch_shapes=_scratch(blocks, grad.dtype),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",) * 4 + ("arbitrary",),
            vmem_limit_bytes=max(_DEFAULT_LIMIT_BYTES, blocks.vmem_bytes * 9 // 8),
        ),
        cost_estimate=cost,
        interpret=interpret,
    )(x, grad)
