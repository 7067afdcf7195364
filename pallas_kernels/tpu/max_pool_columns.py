"""The gradient of max pooling of images whose columns lie in sublanes; see `max_pool_backward`.

A block holds some lanes of a whole image, or of a band of rows that shares no window with other bands. The elements at
one offset of all windows in a row are a strided slice: the kernel compares these slices, and adds each window's
gradient to the element that won.
"""

import functools
import itertools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.tpu.max_pool_keys import LEAST, keys, shares
from pallas_kernels.tpu.stored_order import LANES, SUBLANES, round_up

_MOST_WINDOWS = 16  # at a time: more need more masks than there are registers for them
_UNROLLED_ROWS = 4
GROUP = SUBLANES  # images whose gradients lie beside each other in the sublanes of a register
_DEFAULT_LIMIT_BYTES = 16 * 2**20  # what XLA grants a kernel that asks for nothing
# Buffers of a block's size: two of x, two of the result, one of keys and one of sums.
_BUFFERS = 6


class Blocks(NamedTuple):
    """Blocks into which images (before, h, between, w, lanes) and their windows are cut.

    Attributes:
      image: rows and columns of an image.
      outputs: how many windows it has along rows and columns.
      window: rows and columns of a window.
      stride: from one window to the next.
      before: how far the first windows reach beyond the image.
      output_rows: windows along the rows of a block.
      lanes: of a block.
    """

    image: tuple[int, int]
    outputs: tuple[int, int]
    window: tuple[int, int]
    stride: tuple[int, int]
    before: tuple[int, int]
    output_rows: int
    lanes: int

    @property
    def rows(self) -> int:
        """The image rows in a block."""
        return self.image[0] if self.output_rows == self.outputs[0] else self.output_rows * self.stride[0]

    @property
    def padded(self) -> tuple[int, int]:
        """Rows and columns of a block with its padding, as far as its windows reach."""
        reached = (
            (count - 1) * s + k
            for count, s, k in zip((self.output_rows, self.outputs[1]), self.stride, self.window, strict=True)
        )
        rows, columns = (
            max(size + p, least)
            for size, p, least in zip((self.rows, self.image[1]), self.before, reached, strict=True)
        )
        return rows, columns

    @property
    def is_apart(self) -> bool:
        """Tells whether windows share no element."""
        return all(k <= s for k, s in zip(self.window, self.stride, strict=True))

    @property
    def is_tiled(self) -> bool:
        """Tells whether each element is in one window."""
        covered = tuple(n * s for n, s in zip(self.outputs, self.stride, strict=True))
        return self.window == self.stride and self.before == (0, 0) and covered == self.image

    @property
    def vmem_bytes(self) -> int:
        """The bytes of the buffers of a block's size, in float32."""
        rows, columns = self.padded
        return _BUFFERS * 4 * rows * round_up(columns, SUBLANES) * LANES

    @property
    def limit_bytes(self) -> int:
        """VMEM to ask for: these and two buffers of the gradient, and an eighth for what the compiler spills."""
        grad_bytes = 2 * 4 * self.output_rows * round_up(self.outputs[1], SUBLANES) * LANES
        return max(_DEFAULT_LIMIT_BYTES, (self.vmem_bytes + grad_bytes) * 9 // 8)


def blocks_of(view_shape, vmem_bytes, *, window, stride, padding):
    """Returns the largest blocks that fit into VMEM; None if even the smallest does not."""
    _, height, _, width, lanes = view_shape
    image, window, stride, padding = (height, width), window[1:], stride[1:], padding[1:]
    outputs = tuple(1 + (n + sum(p) - k) // s for n, k, s, p in zip(image, window, stride, padding, strict=True))
    before = tuple(p[0] for p in padding)
    # Bands of rows must not share windows. And behind the image's last row, the last band has undefined values, which
    # no window may reach.
    apart = window[0] <= stride[0] and padding[0] == (0, 0)
    for output_rows in range(outputs[0], 0, -1) if apart else outputs[:1]:
        # Strided slices are possible within one tile's 128 lanes only.
        blocks = Blocks(image, outputs, window, stride, before, output_rows, min(lanes, LANES))
        if blocks.vmem_bytes <= vmem_bytes:
            return blocks
    return None


def group_bytes(blocks):
    """Returns the VMEM of a group's gradients, in float32: two buffers, and the windows of each row together."""
    return 3 * 4 * GROUP * blocks.output_rows * blocks.outputs[1] * LANES


def _kernel(x_ref, grad_ref, dx_ref, keys_vmem, sums_vmem, *group, blocks, propagate_nan):
    inside = tuple(slice(n, n + size) for n, size in zip(blocks.before, (blocks.rows, blocks.image[1]), strict=True))
    _fill_padding(keys_vmem, inside)
    keys_vmem[inside] = keys(x_ref[...], propagate_nan)
    if not blocks.is_tiled:
        sums_vmem[...] = jnp.zeros_like(sums_vmem)
    image = pl.program_id(4)  # of a group; here, because JAX's interpreter does not know it in loops
    if group:
        pl.when(image == 0)(functools.partial(_gather, grad_ref, *group))
    offsets = list(itertools.product(*map(range, blocks.window)))

    def windows_of(row, first, count):
        places = [
            (row * blocks.stride[0] + i, pl.ds(first * blocks.stride[1] + j, count, stride=blocks.stride[1]))
            for i, j in offsets
        ]
        if group:
            grad = group[0][row, pl.ds(first * GROUP + image, count, stride=GROUP)]
        else:
            grad = grad_ref[row, first : first + count].astype(jnp.float32)
        parts = shares([keys_vmem[place] for place in places], grad)
        # Where windows overlap, sums are accumulated, in float32.
        for place, part in zip(places, parts, strict=True):
            sums_vmem[place] = part if blocks.is_apart else sums_vmem[place] + part

    def row_of_windows(row, _):
        for first in range(0, blocks.outputs[1], _MOST_WINDOWS):
            windows_of(row, first, min(_MOST_WINDOWS, blocks.outputs[1] - first))

    windows: int | jax.Array = blocks.output_rows
    # Where windows share no element, one row's comparisons run beside another's stores.
    unroll = math.gcd(blocks.output_rows, _UNROLLED_ROWS) if blocks.is_apart else 1
    if blocks.outputs[0] % windows:
        # The last block has fewer, and rows beyond the image, which are clipped.
        windows, unroll = jnp.minimum(windows, blocks.outputs[0] - pl.program_id(1) * windows), 1
    lax.fori_loop(0, windows, row_of_windows, None, unroll=unroll)
    dx_ref[...] = sums_vmem[inside].astype(dx_ref.dtype)


def _gather(grad_ref, grads_vmem):
    """Puts the windows of a row, with all images of a group, beside each other in the sublanes."""

    def row(i, _):
        grads_vmem[i] = grad_ref[i].reshape(grads_vmem.shape[1:])

    lax.fori_loop(0, grad_ref.shape[0], row, None)


def _fill_padding(keys_vmem, inside):
    """Gives all but the image the least key."""
    rows, columns = inside
    for rest in (
        (slice(0, rows.start), slice(None)),
        (slice(rows.stop, keys_vmem.shape[0]), slice(None)),
        (rows, slice(0, columns.start)),
        (rows, slice(columns.stop, keys_vmem.shape[1])),
    ):
        part = [len(range(*each.indices(size))) for each, size in zip(rest, keys_vmem.shape, strict=False)]
        if 0 not in part:
            keys_vmem[rest] = jnp.full((*part, keys_vmem.shape[2]), LEAST)


def launch(x, grad, config, propagate_nan, cost, interpret, **geometry):
    """Computes the gradient of images, a view (before, h, between, w, lanes).

    The gradients of their windows are such a view too; or, if all images are in `before`, a view (h, w, before, lanes).
    """
    from jax.experimental.pallas import tpu as pltpu  # here, because only lowering for a TPU needs its 0.2 s

    blocks = blocks_of(x.shape, **config, **geometry)
    before, height, between, width, lanes = x.shape
    is_grouped = grad.ndim < x.ndim
    groups, images = (before // GROUP, GROUP) if is_grouped else (before, 1)
    last_band = pl.cdiv(blocks.outputs[0], blocks.output_rows) - 1  # rows may follow where no window begins
    rows, columns = blocks.output_rows, blocks.outputs[1]

    def place(group, band, j, part, image):
        return group * images + image, band, j, 0, part

    def grad_place(group, band, j, part, image):
        band = jnp.minimum(band, last_band)
        return (band, 0, group, part) if is_grouped else (group, band, j, 0, part)

    spec = pl.BlockSpec((None, blocks.rows, None, width, blocks.lanes), place)
    grad_block = (rows, columns, GROUP, blocks.lanes) if is_grouped else (None, rows, None, columns, blocks.lanes)
    scratch = [pltpu.VMEM((*blocks.padded, blocks.lanes), dtype) for dtype in (jnp.int32, jnp.float32)]
    if is_grouped:
        scratch.append(pltpu.VMEM((rows, columns * GROUP, blocks.lanes), jnp.float32))
    return pl.pallas_call(
        functools.partial(_kernel, blocks=blocks, propagate_nan=propagate_nan),
        name="max_pool_backward",
        grid=(groups, pl.cdiv(height, blocks.rows), between, pl.cdiv(lanes, blocks.lanes), images),
        in_specs=[spec, pl.BlockSpec(grad_block, grad_place)],
        out_specs=spec,
        out_shape=jax.ShapeDtypeStruct(x.shape, grad.dtype),
        scratch_shapes=scratch,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",) * 4 + ("arbitrary",),
            vmem_limit_bytes=blocks.limit_bytes + is_grouped * group_bytes(blocks),
        ),
        cost_estimate=cost,
        interpret=interpret,
    )(x, grad)
