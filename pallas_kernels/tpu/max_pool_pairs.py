"""The gradient of max pooling of bfloat16 images whose columns lie in sublanes, in pairs; see `max_pool_backward`.

Two columns share each word of a register, so that windows of two columns are words, and nothing is strided. Gradients
are routed as the halves of words, never unpacked. Where the columns of the windows would not fill their tiles, XLA
stores images of the gradients in sublanes, in pairs as well, and the kernel takes them so.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.tpu.max_pool_keys import greater, keys
from pallas_kernels.tpu.max_pool_views import view_of
from pallas_kernels.tpu.max_pool_words import HIGH_HALF, words_of
from pallas_kernels.tpu.stored_order import LANES, SUBLANES, round_up

_GROUP = 2 * SUBLANES  # images in the sublanes of a register
_DEFAULT_LIMIT_BYTES = 16 * 2**20  # what XLA grants a kernel that asks for nothing


class Blocks(NamedTuple):
    """Blocks into which images (before, h, between, w, lanes) and their windows are cut.

    Attributes:
      image: rows and columns of an image.
      window_rows: of a window, as many as from one window to the next.
      is_grouped: whether images of the gradients lie beside each other in sublanes, rather than their columns.
      output_rows: windows along the rows of a block.
      is_packed: whether keys have 16 bits.
    """

    image: tuple[int, int]
    window_rows: int
    is_grouped: bool
    output_rows: int
    is_packed: bool

    @property
    def images(self) -> int:
        """The number of images in a block."""
        return _GROUP if self.is_grouped else 1

    @property
    def columns(self) -> int:
        """Windows along columns."""
        return self.image[1] // 2

    @property
    def bands(self) -> int:
        """Blocks along the rows of an image."""
        return self.image[0] // (self.output_rows * self.window_rows)

    @property
    def vmem_bytes(self) -> int:
        """Two buffers of x, dx and the gradients each, and the gradients of a row of windows as words."""
        rows = self.images * self.output_rows
        image_rows = 4 * rows * self.window_rows * round_up(self.image[1], _GROUP)
        grads = 2 * rows * round_up(self.columns, _GROUP)
        return 2 * LANES * (image_rows + grads + 2 * SUBLANES * self.columns)


def suits(x, grad, *, window, stride, padding):
    """Tells whether the kernel computes these images' gradient, and XLA stores that of windows as it takes it."""
    view = view_of(x.shape)
    sizes = [count * size for count, size in zip(grad.shape[-3:-1], window[1:], strict=True)]
    is_tiled = window == stride and not any(map(any, padding)) and sizes == list(x.shape[-3:-1])
    is_bfloat16 = x.dtype == grad.dtype == jnp.bfloat16
    if not (is_tiled and is_bfloat16 and window[2] == 2 and view.is_stored_so and not view.has_pixels_outside):
        return False
    stored = view_of(grad.shape)
    return _is_grouped(x, grad) if stored.has_pixels_outside else stored == view


def _is_grouped(x, grad):
    view, stored = view_of(x.shape), view_of(grad.shape)
    before, _, between, _, _ = view.shape(x.shape)
    is_whole = between == 1 and before % _GROUP == 0
    return stored.has_pixels_outside and stored.order[-1] == view.order[-1] and is_whole


def blocks_of(x, grad, vmem_bytes, is_packed=False, *, window, **_):
    """Returns the largest blocks that fit into VMEM; None if even the smallest does not."""
    outputs = grad.shape[-3]
    for output_rows in range(outputs, 0, -1):
        blocks = Blocks(tuple(x.shape[-3:-1]), window[1], _is_grouped(x, grad), output_rows, is_packed)
        if outputs % output_rows == 0 and blocks.vmem_bytes <= vmem_bytes:
            return blocks
    return None


class _Row(NamedTuple):
    """A row of windows of one image.

    Attributes:
      blocks: how images are cut.
      propagate_nan: whether NaN is the greatest number, or the least.
      x: the block of images.
      dx: the block of their gradients.
      image: which.
      row: which.
    """

    blocks: Blocks
    propagate_nan: bool
    x: Any
    dx: Any
    image: int
    row: Any

    def route(self, low, high):
        """Stores the gradient of each window at its first maximum.

        Args:
          low: the windows' gradients in the low halves of words, which are even columns.
          high: in the high halves.
        """
        from jax.experimental.pallas import tpu as pltpu

        places = [(self.image, self.row * self.blocks.window_rows + i) for i in range(self.blocks.window_rows)]
        found, shares = zip(*[self.searched(self.x[place], low, high) for place in places], strict=True)
        best, routed = found[0], [shares[0]]
        for key, share in zip(found[1:], shares[1:], strict=True):
            best, is_greater = greater(key, best)
            routed = [jnp.where(is_greater, 0, each) for each in routed] + [jnp.where(is_greater, share, 0)]
        for place, words in zip(places, routed, strict=True):
            self.dx[place] = pltpu.bitcast(words, self.dx.dtype)

    def searched(self, x, low, high):
        """Returns the greater key of each pair, and its window's gradient in that half."""
        if self.blocks.is_packed:
            words = words_of(keys(x, self.propagate_nan, jnp.int16))
            even, odd = words << 16, words & HIGH_HALF
        else:
            words = words_of(x)
            numbers = (lax.bitcast_convert_type(half, jnp.float32) for half in (words << 16, words & HIGH_HALF))
            even, odd = (keys(number, self.propagate_nan) for number in numbers)
        best, is_odd = greater(odd, even)
        return best, jnp.where(is_odd, high, low)


def _kernel(x_ref, grad_ref, dx_ref, *, blocks, propagate_nan):
    """Computes a block whose gradients have columns in sublanes."""

    def row(i, _):
        high = lax.bitcast_convert_type(grad_ref[0, i].astype(jnp.float32), jnp.int32)
        _Row(blocks, propagate_nan, x_ref, dx_ref, 0, i).route(lax.shift_right_logical(high, 16), high)

    lax.fori_loop(0, blocks.output_rows, row, None, unroll=math.gcd(blocks.output_rows, 4))


def _grouped_kernel(x_ref, grad_ref, dx_ref, words_vmem, *, blocks, propagate_nan):
    """Computes a block whose gradients have images in sublanes."""

    def row(i, _):
        words_vmem[...] = words_of(grad_ref[i]).reshape(words_vmem.shape)
        for pair in range(SUBLANES):
            words = words_vmem[pl.ds(pair, blocks.columns, stride=SUBLANES)]
            halves = [(words & ~HIGH_HALF, words << 16), (lax.shift_right_logical(words, 16), words & HIGH_HALF)]
            for image, (low, high) in enumerate(halves, start=2 * pair):
                _Row(blocks, propagate_nan, x_ref, dx_ref, image, i).route(low, high)

    lax.fori_loop(0, blocks.output_rows, row, None)


def launch(x, grad, config, propagate_nan, cost, interpret, **geometry):
    """Computes the gradient of images (..., h, w, c)."""
    from jax.experimental.pallas import tpu as pltpu  # here, because only lowering for a TPU needs its 0.2 s

    blocks = blocks_of(x, grad, **config, **geometry)
    view, windows = view_of(x.shape), view_of(grad.shape).of(grad)
    images = view.of(x)
    before, _, between, width, all_lanes = images.shape
    lanes = min(all_lanes, LANES)
    rows = blocks.output_rows * blocks.window_rows
    spec = pl.BlockSpec((blocks.images, rows, None, width, lanes), lambda i, j, band, part: (i, band, j, 0, part))
    scratch = []
    if blocks.is_grouped:
        windows = windows.reshape(grad.shape[-3], blocks.columns, before, all_lanes)
        block = (blocks.output_rows, blocks.columns, _GROUP, lanes)
        grad_spec = pl.BlockSpec(block, lambda i, j, band, part: (band, 0, i, part))
        scratch.append(pltpu.VMEM((blocks.columns * SUBLANES, lanes), jnp.int32))
    else:
        grad_spec = pl.BlockSpec((1, blocks.output_rows, None, blocks.columns, lanes), spec.index_map)
    dx = pl.pallas_call(
        functools.partial(
            _grouped_kernel if blocks.is_grouped else _kernel, blocks=blocks, propagate_nan=propagate_nan
        ),
        name="max_pool_backward",
        grid=(before // blocks.images, between, blocks.bands, pl.cdiv(all_lanes, lanes)),
        in_specs=[spec, grad_spec],
        out_specs=spec,
        out_shape=jax.ShapeDtypeStruct(images.shape, grad.dtype),
        scratch_shapes=scratch,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",) * 4,
            vmem_limit_bytes=max(_DEFAULT_LIMIT_BYTES, blocks.vmem_bytes * 9 // 8),
        ),
        cost_estimate=cost,
        interpret=interpret,
    )(images, windows)
    return view.back(dx, x.shape)
