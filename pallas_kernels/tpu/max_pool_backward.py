"""The gradient of max pooling on TPU, for images with their channels in lanes: each image passes through VMEM once.

A block holds some channels of an image, with the columns in sublanes and the rows before the tiles, or of rows that no
window shares with others. There the elements of all windows of a row are slices with a stride, which are compared, and
to which the gradients of those that won are added.
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

_DTYPES = ("float32", "bfloat16")
_LEAST = jnp.iinfo(jnp.int32).min  # of keys: less than any element's
_CONFIGS = ({"vmem_bytes": 12 * 2**20}, {"vmem_bytes": 6 * 2**20}, {"vmem_bytes": 3 * 2**20})
_BUFFERS = 6  # of the size of a block: x and the result, double-buffered, keys and sums


class Blocks(NamedTuple):
    """How images (b, h, w, c) and their windows are shared out.

    Attributes:
      image: extents of an image.
      outputs: of its windows.
      window: rows and columns of each.
      stride: from one to the next.
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
        """Of the image in a block."""
        return self.image[0] if self.output_rows == self.outputs[0] else self.output_rows * self.stride[0]

    @property
    def padded(self) -> tuple[int, int]:
        """Extents of what windows reach over in a block, and of the block within its padding."""
        reached = (
            (count - 1) * s + k
            for count, s, k in zip((self.output_rows, self.outputs[1]), self.stride, self.window, strict=True)
        )
        rows, columns = (
            max(size + p, least)
            for size, p, least in zip((self.rows, self.image[1]), self.before, reached, strict=True)
        )
        return rows, columns


def blocks_of(x_shape, vmem_bytes, *, window, stride, padding):
    """The largest blocks for which VMEM suffices; None if it holds not even the smallest."""
    *_, height, width, channels = x_shape
    image, window, stride, padding = (height, width), window[1:], stride[1:], padding[1:]
    outputs = tuple(1 + (n + sum(p) - k) // s for n, k, s, p in zip(image, window, stride, padding, strict=True))
    before = tuple(p[0] for p in padding)
    # In the last block, rows behind the image hold anything: no window may reach them.
    apart = window[0] <= stride[0] and padding[0] == (0, 0)
    for output_rows in range(outputs[0], 0, -1) if apart else outputs[:1]:
        # Slices with a stride are of one tile's lanes.
        blocks = Blocks(image, outputs, window, stride, before, output_rows, min(channels, LANES))
        rows, columns = blocks.padded
        if _BUFFERS * 4 * rows * round_up(columns, SUBLANES) * LANES <= vmem_bytes:
            return blocks
    return None


def _keys(x, propagate_nan):
    """Integers in the order of x: equal for equal numbers. NaN is the greatest if it is propagated, else the least."""
    x = x.astype(jnp.float32)
    bits = lax.bitcast_convert_type(jnp.where(x == 0, 0.0, x), jnp.int32)
    greatest = jnp.iinfo(jnp.int32).max
    # Negative numbers count down from the sign bit.
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

        best = keys_vmem[place(offsets[0])]
        winner = jnp.zeros_like(best)
        for i, offset in enumerate(offsets[1:], 1):
            key = keys_vmem[place(offset)]
            winner = jnp.where(key > best, i, winner)
            best = jnp.maximum(key, best)
        grad = grad_ref[0, row].astype(jnp.float32)
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
    height, width, channels = x.shape[-3:]
    images = math.prod(x.shape[:-3])
    last_band = pl.cdiv(blocks.outputs[0], blocks.output_rows) - 1  # rows may follow in which no window begins
    spec = pl.BlockSpec((1, blocks.rows, width, blocks.channels), lambda image, band, part: (image, band, 0, part))
    grad_spec = pl.BlockSpec(
        (1, blocks.output_rows, blocks.outputs[1], blocks.channels),
        lambda image, band, part: (image, jnp.minimum(band, last_band), 0, part),
    )
    scratch = (*blocks.padded, blocks.channels)
    dx = pl.pallas_call(
        functools.partial(_kernel, blocks=blocks, propagate_nan=propagate_nan),
        name="max_pool_backward",
        grid=(images, pl.cdiv(height, blocks.rows), pl.cdiv(channels, blocks.channels)),
        in_specs=[spec, grad_spec],
        out_specs=spec,
        out_shape=jax.ShapeDtypeStruct((images, height, width, channels), grad.dtype),
        scratch_shapes=[pltpu.VMEM(scratch, jnp.int32), pltpu.VMEM(scratch, jnp.float32)],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",) * 3),
        interpret=interpret,
    )(x.reshape(images, height, width, channels), grad.reshape(images, *blocks.outputs, channels))
    return (dx.reshape(x.shape),)


def refuses(hardware, x, grad, *, window, stride, padding, **_) -> str | None:
    """Why the kernel cannot run; see `pallas_kernels.kernel.Kernel.refuses`."""
    for name, operand in (("x", x), ("grad", grad)):
        if jnp.dtype(operand.dtype).name not in _DTYPES:
            return f"Mosaic TPU computes on {' and '.join(_DTYPES)}; {name} is {jnp.dtype(operand.dtype).name}"
    if reason := whole_images.refusal(x):
        return reason
    if (window[0], stride[0], padding[0]) != (1, 1, (0, 0)):
        return "the kernel pools rows and columns; these windows reach over the depth as well"
    shape = tuple(size for axis, size in enumerate(x.shape) if size > 1 or axis >= len(x.shape) - 3)
    if stored_order(shape)[-2:] != (len(shape) - 2, len(shape) - 1):
        return f"the kernel takes columns in sublanes and channels in lanes; XLA does not store {list(x.shape)} so"
    geometry = {"window": window, "stride": stride, "padding": padding}
    if blocks_of(x.shape, _CONFIGS[0]["vmem_bytes"], **geometry) is None:
        return f"VMEM holds no image of {list(x.shape[-3:-1])} pixels, nor a part that its windows leave alone"
    return None


def configs(hardware, x, grad, *, window, stride, padding, **_):
    """Sizes of blocks worth trying; see `pallas_kernels.kernel.Kernel.configs`."""
    geometry = {"window": window, "stride": stride, "padding": padding}
    return [config for config in _CONFIGS if blocks_of(x.shape, config["vmem_bytes"], **geometry) is not None]


KERNEL = Kernel(name="mosaic_tpu", platform="tpu", run=run, refuses=refuses, configs=configs)
