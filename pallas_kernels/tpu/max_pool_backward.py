"""The gradient of max pooling on TPU: each image passes through VMEM once, with channels in lanes.

A block holds some channels of a whole image, or of a band of rows that shares no window with other bands. Columns lie
in sublanes, rows outside of the tiles. So the elements at one offset of all windows in a row are a strided slice: the
kernel compares these slices, and adds each window's gradient to the element that won. Where XLA stores images in
another order, they are transposed on the way in and out, with the channels of all images beside each other in full
lanes: two more passes over x and two over the result, where XLA's own program takes some ten passes.
"""

import functools
import itertools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import whole_images
from pallas_kernels.kernel import Kernel
from pallas_kernels.tpu.stored_order import LANES, SUBLANES, round_up, stored_order
from pallas_kernels.tpu.streaming_cost import streaming_cost

_DTYPES = ("float32", "bfloat16")
_LEAST = jnp.iinfo(jnp.int32).min  # the key of padding, below the key of any element
_MIB = 2**20
_LEAST_TRANSPOSED = 2**22  # elements of images that are stored in another order: 16 MiB in float32
_DEFAULT_LIMIT_BYTES = 16 * _MIB  # what XLA grants a kernel that asks for nothing
# The largest holds an image of 112 by 112 pixels, 40 MiB with its padding; TPUs have 64 MiB or more.
_CONFIGS = tuple({"vmem_bytes": size * _MIB} for size in (12, 6, 3, 42))
# Buffers of a block's size: two of x, two of the result, one of keys and one of sums.
_BUFFERS = 6


class Blocks(NamedTuple):
    """How images (b, h, w, c) and their windows are cut into blocks.

    Attributes:
      image: rows and columns of an image.
      outputs: how many windows it has along rows and columns.
      window: rows and columns of a window.
      stride: from one window to the next.
      before: how far the first windows reach beyond the image.
      output_rows: windows along the rows of a block.
      channels: of a block.
    """

    image: tuple[int, int]
    outputs: tuple[int, int]
    window: tuple[int, int]
    stride: tuple[int, int]
    before: tuple[int, int]
    output_rows: int
    channels: int

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
    def vmem_bytes(self) -> int:
        """What the buffers of a block's size take, in float32."""
        rows, columns = self.padded
        return _BUFFERS * 4 * rows * round_up(columns, SUBLANES) * LANES

    @property
    def limit_bytes(self) -> int:
        """VMEM to ask for: these and two buffers of the gradient, and an eighth for what the compiler spills."""
        grad_bytes = 2 * 4 * self.output_rows * round_up(self.outputs[1], SUBLANES) * LANES
        return max(_DEFAULT_LIMIT_BYTES, (self.vmem_bytes + grad_bytes) * 9 // 8)


def _is_stored_so(shape):
    """Whether XLA most likely stores images (..., h, w, c) with columns in sublanes and channels in lanes."""
    shape = tuple(size for axis, size in enumerate(shape) if size > 1 or axis >= len(shape) - 3)
    return stored_order(shape)[-2:] == (len(shape) - 2, len(shape) - 1)


def _to_view(x, is_stored_so):
    """Images as (images, h, w, lanes): as they are, or with all images and channels beside each other in the lanes."""
    *lead, height, width, channels = x.shape
    images = x.reshape(math.prod(lead), height, width, channels)
    if is_stored_so:
        return images
    return jnp.transpose(images, (1, 2, 0, 3)).reshape(1, height, width, math.prod(lead) * channels)


def _from_view(x, shape, is_stored_so):
    """The inverse of `_to_view`."""
    *lead, height, width, channels = shape
    if is_stored_so:
        return x.reshape(shape)
    return jnp.transpose(x.reshape(height, width, math.prod(lead), channels), (2, 0, 1, 3)).reshape(shape)


def _view_shape(shape):
    *lead, height, width, channels = shape
    images = math.prod(lead)
    return (images, height, width, channels) if _is_stored_so(shape) else (1, height, width, images * channels)


def blocks_of(x_shape, vmem_bytes, *, window, stride, padding):
    """The largest blocks that fit into VMEM; None if even the smallest does not."""
    _, height, width, channels = _view_shape(x_shape)
    image, window, stride, padding = (height, width), window[1:], stride[1:], padding[1:]
    outputs = tuple(1 + (n + sum(p) - k) // s for n, k, s, p in zip(image, window, stride, padding, strict=True))
    before = tuple(p[0] for p in padding)
    # Bands of rows must not share windows. And behind the image's last row, the last band has undefined values, which
    # no window may reach.
    apart = window[0] <= stride[0] and padding[0] == (0, 0)
    for output_rows in range(outputs[0], 0, -1) if apart else outputs[:1]:
        # Strided slices are possible within one tile's 128 lanes only.
        blocks = Blocks(image, outputs, window, stride, before, output_rows, min(channels, LANES))
        if blocks.vmem_bytes <= vmem_bytes:
            return blocks
    return None


def _keys(x, propagate_nan):
    """Integers in the order of x, equal for equal numbers; NaN is the largest if propagated, else the smallest."""
    # Comparing integers settles ties and NaN at once; padding has a key of its own, below that of -inf.
    x = x.astype(jnp.float32)
    bits = lax.bitcast_convert_type(jnp.where(x == 0, 0.0, x), jnp.int32)
    greatest = jnp.iinfo(jnp.int32).max
    # Read as integers, negative floats are in reverse order; flipping all bits but the sign puts them right.
    return jnp.where(
        jnp.isnan(x), greatest if propagate_nan else _LEAST + 1, jnp.where(bits < 0, bits ^ greatest, bits)
    )


def _kernel(x_ref, grad_ref, dx_ref, keys_vmem, sums_vmem, *, blocks, propagate_nan):
    (top, left), (height, width) = blocks.before, (blocks.rows, blocks.image[1])
    keys_vmem[...] = jnp.full_like(keys_vmem, _LEAST)
    sums_vmem[...] = jnp.zeros_like(sums_vmem)
    keys_vmem[top : top + height, left : left + width] = _keys(x_ref[0], propagate_nan)
    offsets = list(itertools.product(*map(range, blocks.window)))

    def row_of_windows(row, _):
        def place(offset):
            columns = pl.ds(offset[1], blocks.outputs[1], stride=blocks.stride[1])
            return row * blocks.stride[0] + offset[0], columns

        # Only a larger key replaces the best, so the first of equal ones wins.
        best = keys_vmem[place(offsets[0])]
        winner = jnp.zeros_like(best)
        for i, offset in enumerate(offsets[1:], 1):
            key = keys_vmem[place(offset)]
            winner = jnp.where(key > best, i, winner)
            best = jnp.maximum(key, best)
        grad = grad_ref[0, row].astype(jnp.float32)
        # Windows may overlap, so sums are accumulated, in float32.
        for i, offset in enumerate(offsets):
            sums_vmem[place(offset)] += jnp.where(winner == i, grad, 0.0)
        return 0

    # The last block may have fewer windows, and rows beyond the image, which are clipped.
    windows = jnp.minimum(blocks.output_rows, blocks.outputs[0] - pl.program_id(1) * blocks.output_rows)
    lax.fori_loop(0, windows, row_of_windows, 0)
    dx_ref[0] = sums_vmem[top : top + height, left : left + width].astype(dx_ref.dtype)


def run(x, grad, *, window, stride, padding, propagate_nan, config, interpret=False):
    """Launches the kernel; see `pallas_kernels.kernel.Kernel.run`."""
    from jax.experimental.pallas import tpu as pltpu  # here, because only lowering for a TPU needs its 0.2 s

    blocks = blocks_of(x.shape, config["vmem_bytes"], window=window, stride=stride, padding=padding)
    is_stored_so = _is_stored_so(x.shape)
    images, height, width, channels = _view_shape(x.shape)
    last_band = pl.cdiv(blocks.outputs[0], blocks.output_rows) - 1  # rows may follow where no window begins
    spec = pl.BlockSpec((1, blocks.rows, width, blocks.channels), lambda image, band, part: (image, band, 0, part))
    grad_spec = pl.BlockSpec(
        (1, blocks.output_rows, blocks.outputs[1], blocks.channels),
        lambda image, band, part: (image, jnp.minimum(band, last_band), 0, part),
    )
    scratch = (*blocks.padded, blocks.channels)
    result = jax.ShapeDtypeStruct((images, height, width, channels), grad.dtype)
    dx = pl.pallas_call(
        functools.partial(_kernel, blocks=blocks, propagate_nan=propagate_nan),
        name="max_pool_backward",
        grid=(images, pl.cdiv(height, blocks.rows), pl.cdiv(channels, blocks.channels)),
        in_specs=[spec, grad_spec],
        out_specs=spec,
        out_shape=result,
        scratch_shapes=[pltpu.VMEM(scratch, jnp.int32), pltpu.VMEM(scratch, jnp.float32)],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",) * 3, vmem_limit_bytes=blocks.limit_bytes
        ),
        # Per element of a window: compare and keep the larger key and its place; compare the place, select and add.
        cost_estimate=streaming_cost((x, grad, result), grad.size, flops=6 * math.prod(blocks.window)),
        interpret=interpret,
    )(_to_view(x, is_stored_so), _to_view(grad, is_stored_so))
    return (_from_view(dx, x.shape, is_stored_so),)


def refuses(hardware, x, grad, *, window, stride, padding, **_) -> str | None:
    """Why the kernel cannot run; see `pallas_kernels.kernel.Kernel.refuses`."""
    for name, operand in (("x", x), ("grad", grad)):
        if jnp.dtype(operand.dtype).name not in _DTYPES:
            return f"Mosaic TPU computes on {' and '.join(_DTYPES)}; {name} is {jnp.dtype(operand.dtype).name}"
    if reason := whole_images.refusal(x):
        return reason
    if (window[0], stride[0], padding[0]) != (1, 1, (0, 0)):
        return "the kernel pools rows and columns; these windows reach over the depth as well"
    if not _is_stored_so(x.shape):
        if (lanes := _view_shape(x.shape)[-1]) < LANES:
            return f"images and channels lie beside each other in {LANES} lanes; these are {lanes}"
        if math.prod(x.shape) < _LEAST_TRANSPOSED:
            return f"XLA keeps fewer than {_LEAST_TRANSPOSED} elements in VMEM; the kernel would transpose them in HBM"
    geometry = {"window": window, "stride": stride, "padding": padding}
    if not configs(hardware, x, grad, **geometry):
        return f"VMEM holds no image of {list(x.shape[-3:-1])} pixels, nor a part that its windows leave alone"
    return None


def configs(hardware, x, grad, *, window, stride, padding, **_):
    """Sizes of blocks worth trying; see `pallas_kernels.kernel.Kernel.configs`."""
    geometry = {"window": window, "stride": stride, "padding": padding}
    return [config for config in _CONFIGS if blocks_of(x.shape, config["vmem_bytes"], **geometry) is not None]


KERNEL = Kernel(name="mosaic_tpu", platform="tpu", run=run, refuses=refuses, configs=configs)
