"""Max pooling on TPU: of images with columns in sublanes and channels or images in lanes, as XLA stores them.

Each image passes through VMEM once. A window's rows are compared where they lie; then its columns, which are strided
slices of the row of maxima, or the halves of words. Where the columns of the windows would not fill their tiles, XLA
stores images of the result in sublanes, and so does the kernel. Where it stores pixels outside of the tiles,
`max_pool_pixel_values` runs instead.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import whole_images
from pallas_kernels.kernel import Kernel, Kind, dtype_names
from pallas_kernels.tpu import max_pool_pixel_values, max_pool_pixels
from pallas_kernels.tpu.max_pool_views import view_of
from pallas_kernels.tpu.max_pool_words import halves, joined
from pallas_kernels.tpu.stored_order import LANES, SUBLANES, round_up
from pallas_kernels.tpu.streaming_cost import streaming_cost

_DTYPES = ("float32", "bfloat16")
_MOST_BYTES = 56 * 2**20  # TPUs have 64 MiB of VMEM or more
_DEFAULT_LIMIT_BYTES = 16 * 2**20  # what XLA grants a kernel that asks for nothing
_BLOCK_BYTES = 2**21  # of a block of x, where it can be chosen
_UNROLLED_ROWS = 4
_GROUPED_ROWS = 2  # unrolled where each has several images
_MOST_ROWS = 16
_LEAST_STEPS = 8


class Blocks(NamedTuple):
    """Blocks into which images (before, h, between, w, lanes) and their windows are cut.

    Attributes:
      image: rows and columns of an image.
      outputs: how many windows it has along rows and columns.
      window: rows and columns of a window.
      stride: from one window to the next.
      before: how far the first windows reach beyond the image.
      itemsize: bytes of an element.
      is_grouped: whether images of the result lie beside each other in sublanes, rather than its columns.
      images: in a block.
      output_rows: windows along the rows of a block.
    """

    image: tuple[int, int]
    outputs: tuple[int, int]
    window: tuple[int, int]
    stride: tuple[int, int]
    before: tuple[int, int]
    itemsize: int
    is_grouped: bool
    images: int
    output_rows: int

    @property
    def rows(self) -> int:
        """The image rows in a block."""
        return self.image[0] if self.output_rows == self.outputs[0] else self.output_rows * self.stride[0]

    @property
    def has_pairs(self) -> bool:
        """Tells whether the columns of each window are the halves of a word."""
        columns = self.window[1], self.stride[1], self.before[1], self.image[1] % 2, self.itemsize
        return columns == (2, 2, 0, 0, 2)

    @property
    def first_column(self) -> int:
        """The column at which the image begins in a row of maxima: at whole tiles, behind its padding."""
        return round_up(self.before[1], SUBLANES)

    @property
    def row_columns(self) -> int:
        """The columns of a row of maxima with its padding, as far as its windows reach."""
        reached = self.first_column - self.before[1] + (self.outputs[1] - 1) * self.stride[1] + self.window[1]
        return round_up(max(self.first_column + self.image[1], reached), SUBLANES)

    @property
    def x_bytes(self) -> int:
        """A block of x in full lanes."""
        return self.itemsize * self.images * self.rows * round_up(self.image[1], 2 * SUBLANES) * LANES

    @property
    def vmem_bytes(self) -> int:
        """Two buffers of a block and of its maxima, and the scratch."""
        columns = self.outputs[1] if self.is_grouped else round_up(self.outputs[1], 2 * SUBLANES)
        y = self.itemsize * self.images * self.output_rows * columns
        rows = 4 * _UNROLLED_ROWS * (self.row_columns + self.is_grouped * self.outputs[1] * SUBLANES)
        return 2 * self.x_bytes + LANES * (2 * y + rows)

    @property
    def limit_bytes(self) -> int:
        """VMEM to ask for: these, and an eighth for what the compiler spills."""
        return max(_DEFAULT_LIMIT_BYTES, self.vmem_bytes * 9 // 8)


def blocks_of(x, *, window, stride, padding):
    """Returns the largest blocks of some MiB; whole images, if their windows overlap."""
    view = view_of(x.shape)
    image = height, _ = x.shape[-3:-1]
    window, stride, padding = window[1:], stride[1:], padding[1:]
    sizes = view.shape(x.shape)
    before, between = sizes[0], sizes[2]
    outputs = tuple(1 + (n + sum(p) - k) // s for n, k, s, p in zip(image, window, stride, padding, strict=True))
    stored = view_of((*x.shape[:-3], *outputs, x.shape[-1]))
    itemsize = jnp.dtype(x.dtype).itemsize
    group = SUBLANES * 4 // itemsize
    is_stored_so = stored.has_pixels_outside and stored.order[-1] == view.order[-1]
    is_grouped = is_stored_so and between == 1 and before % group == 0
    firsts = tuple(first for first, _ in padding)
    blocks = Blocks(
        image, outputs, window, stride, firsts, itemsize, is_grouped, group if is_grouped else 1, outputs[0]
    )
    # Bands of rows must not share windows, nor have padding.
    if window[0] <= stride[0] and padding[0] == (0, 0):
        bands = [blocks._replace(output_rows=rows) for rows in range(outputs[0], 0, -1) if outputs[0] % rows == 0]
        blocks = next((each for each in bands if each.x_bytes <= _BLOCK_BYTES), bands[-1])
    if not is_grouped and blocks.rows == height:
        most = max(_BLOCK_BYTES // blocks.x_bytes, 1)
        blocks = blocks._replace(images=next(count for count in range(most, 0, -1) if before % count == 0))
    return blocks


class _Step(NamedTuple):
    """Computation of one step.

    Attributes:
      blocks: how images are cut.
      propagate_nan: whether NaN is the greatest number, or the least.
      x: the step's block.
      maxima_vmem: scratch for rows of maxima with their padding.
    """

    blocks: Blocks
    propagate_nan: bool
    x: Any
    maxima_vmem: Any

    def maxima(self, image, row, slot):
        """Computes the maxima of a row of windows, in float32."""
        blocks, best = self.blocks, self.maxima_of_rows(image, row)
        if blocks.has_pairs:
            return jnp.maximum(*halves(best))
        first, start = blocks.first_column, blocks.first_column - blocks.before[1]
        self.maxima_vmem[slot, first : first + blocks.image[1]] = best.astype(jnp.float32)
        columns = (
            self.maxima_vmem[slot, pl.ds(start + j, blocks.outputs[1], stride=blocks.stride[1])]
            for j in range(blocks.window[1])
        )
        return functools.reduce(jnp.maximum, columns)

    def maxima_of_rows(self, image, row):
        """Computes maxima of the rows of windows. The nearest row stands for one beyond the image: they have it too."""
        blocks, begin = self.blocks, row * self.blocks.stride[0] - self.blocks.before[0]
        found = [self.x[image, jnp.clip(begin + i, 0, blocks.rows - 1)] for i in range(blocks.window[0])]
        if not self.propagate_nan:
            found = [jnp.where(jnp.isnan(each), -jnp.inf, each) for each in found]
        return functools.reduce(jnp.maximum, found)


def _kernel(x_ref, y_ref, maxima_vmem, *, blocks, propagate_nan):
    """Computes a block whose result has columns in sublanes."""
    maxima_vmem[...] = jnp.full(maxima_vmem.shape, -jnp.inf)
    step = _Step(blocks, propagate_nan, x_ref, maxima_vmem)
    unroll = math.gcd(blocks.output_rows, _UNROLLED_ROWS)

    def rows(i, _):
        image, first = lax.div(i, blocks.output_rows // unroll), lax.rem(i, blocks.output_rows // unroll) * unroll
        for slot in range(unroll):
            y_ref[image, first + slot] = step.maxima(image, first + slot, slot).astype(y_ref.dtype)

    lax.fori_loop(0, blocks.images * blocks.output_rows // unroll, rows, None)


def _grouped_kernel(x_ref, y_ref, maxima_vmem, words_vmem, *, blocks, propagate_nan):
    """Computes a block whose result has images in sublanes."""
    maxima_vmem[...] = jnp.full(maxima_vmem.shape, -jnp.inf)
    step = _Step(blocks, propagate_nan, x_ref, maxima_vmem)
    images = blocks.images // SUBLANES  # in a word
    unroll = math.gcd(blocks.output_rows, _GROUPED_ROWS)

    def rows(i, _):
        for row in range(unroll):
            for turn in range(SUBLANES):
                slot = (row * SUBLANES + turn) % _UNROLLED_ROWS
                found = [step.maxima(turn * images + image, i * unroll + row, slot) for image in range(images)]
                words_vmem[row, pl.ds(turn, blocks.outputs[1], stride=SUBLANES)] = joined(found)
            y_ref[i * unroll + row] = _as_stored(words_vmem[row], y_ref)

    lax.fori_loop(0, blocks.output_rows // unroll, rows, None)


def _as_stored(words, y_ref):
    """Returns a row of maxima of a group of images as it is stored."""
    from jax.experimental.pallas import tpu as pltpu

    words = words.reshape(y_ref.shape[1], SUBLANES, y_ref.shape[3])
    return words if words.dtype == y_ref.dtype else pltpu.bitcast(words, y_ref.dtype)


def _grid(x, blocks):
    before, _, between, _, lanes = view_of(x.shape).shape(x.shape)
    return before // blocks.images, between, blocks.outputs[0] // blocks.output_rows, pl.cdiv(lanes, LANES)


def run(x, *, window, stride, padding, propagate_nan, config, interpret=False):
    """Launches the kernel; see `pallas_kernels.kernel.Kernel.run`."""
    geometry = {"window": window, "stride": stride, "padding": padding}
    view, outputs = view_of(x.shape), blocks_of(x, **geometry).outputs
    y = jax.ShapeDtypeStruct((*x.shape[:-3], *outputs, x.shape[-1]), x.dtype)
    cost = streaming_cost((x, y), y.size, flops=math.prod(window))
    if view.has_pixels_outside:
        pooled = max_pool_pixel_values.launch(view.of(x), propagate_nan, cost, interpret, **geometry)
        return (view.back(pooled, y.shape),)
    return (_launch(x, y, propagate_nan, cost, interpret, **geometry),)


def _launch(x, y, propagate_nan, cost, interpret, **geometry):
    """Computes the maxima of images whose columns lie in sublanes, as y describes them."""
    from jax.experimental.pallas import tpu as pltpu  # here, because only lowering for a TPU needs its 0.2 s

    blocks = blocks_of(x, **geometry)
    lanes = min(view_of(x.shape).shape(x.shape)[-1], LANES)
    x_spec = pl.BlockSpec(
        (blocks.images, blocks.rows, None, blocks.image[1], lanes), lambda i, j, band, part: (i, band, j, 0, part)
    )
    scratch = [pltpu.VMEM((_UNROLLED_ROWS, blocks.row_columns, lanes), jnp.float32)]
    if blocks.is_grouped:
        words = jnp.float32 if blocks.itemsize == 4 else jnp.int32
        scratch.append(pltpu.VMEM((_GROUPED_ROWS, blocks.outputs[1] * SUBLANES, lanes), words))
    y_view, y_spec = _result(x, y, blocks, lanes, x_spec)
    pooled = pl.pallas_call(
        functools.partial(
            _grouped_kernel if blocks.is_grouped else _kernel, blocks=blocks, propagate_nan=propagate_nan
        ),
        name="max_pool",
        grid=_grid(x, blocks),
        in_specs=[x_spec],
        out_specs=y_spec,
        out_shape=y_view,
        scratch_shapes=scratch,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",) * 4, vmem_limit_bytes=blocks.limit_bytes
        ),
        cost_estimate=cost,
        interpret=interpret,
    )(view_of(x.shape).of(x))
    return (view_of(y.shape) if blocks.is_grouped else view_of(x.shape)).back(pooled, y.shape)


def _result(x, y, blocks, lanes, x_spec):
    """Returns the result as the kernel sees it, and its blocks: (h, w, before, lanes), or all five axes of the view."""
    before, _, between, _, all_lanes = view_of(x.shape).shape(x.shape)
    rows, columns = blocks.outputs
    if blocks.is_grouped:
        block = (blocks.output_rows, columns, blocks.images, lanes)
        spec = pl.BlockSpec(block, lambda i, j, band, part: (band, 0, i, part))
        return jax.ShapeDtypeStruct((rows, columns, before, all_lanes), y.dtype), spec
    spec = pl.BlockSpec((blocks.images, blocks.output_rows, None, columns, lanes), x_spec.index_map)
    return jax.ShapeDtypeStruct((before, rows, between, columns, all_lanes), y.dtype), spec


def refuses(hardware, x, *, window, stride, padding, **_) -> str | None:
    """Says why the kernel cannot run, or XLA is as fast; see `pallas_kernels.kernel.Kernel.refuses`."""
    if jnp.dtype(x.dtype).name not in _DTYPES:
        return f"Mosaic TPU computes on {' and '.join(_DTYPES)}; x is {jnp.dtype(x.dtype).name}"
    if reason := whole_images.refusal(x):
        return reason
    if (window[0], stride[0], padding[0]) != (1, 1, (0, 0)):
        return "the kernel pools rows and columns; these windows reach over the depth as well"
    if max(window) > _MOST_ROWS:
        return f"the kernel unrolls windows of at most {_MOST_ROWS} rows and columns; these have {max(window)}"
    view, geometry = view_of(x.shape), {"window": window, "stride": stride, "padding": padding}
    if not view.is_stored_so:
        return "XLA stores columns of these images in lanes, where the kernel would have to shift them"
    if view.has_pixels_outside and (reason := _pixels_refusal(hardware, x, **geometry)):
        return reason
    steps = _steps(x, **geometry)
    if steps == 0:
        return f"VMEM holds no block of images of {list(x.shape[-3:-1])} pixels"
    if steps < _LEAST_STEPS:
        return f"blocks pass through VMEM one behind the other, from {_LEAST_STEPS} on; these are {steps}"
    return None


def _pixels_refusal(hardware, x, **geometry):
    if reason := max_pool_pixels.refusal(**geometry):
        return reason
    outputs = math.prod(blocks_of(x, **geometry).outputs) * math.prod(x.shape) // math.prod(x.shape[-3:-1])
    size, held = (math.prod(x.shape) + outputs) * jnp.dtype(x.dtype).itemsize, hardware.on_chip_bytes or 0
    # By replay, XLA's own reduction then does not wait for HBM.
    return f"XLA keeps fewer than {held} bytes in VMEM; images and maxima are {size}" if size < held else None


def _steps(x, **geometry):
    """Counts the blocks that pass through VMEM; 0 if it holds none."""
    if not view_of(x.shape).has_pixels_outside:
        blocks = blocks_of(x, **geometry)
        return math.prod(_grid(x, blocks)) if blocks.limit_bytes <= _MOST_BYTES else 0
    sizes = view_of(x.shape).shape(x.shape)
    pixels = max_pool_pixel_values.blocks_of(sizes, x.dtype, **geometry)
    return 0 if pixels is None else math.prod(max_pool_pixel_values.grid_of(sizes, pixels))


def kind(hardware, x, *, window, stride, padding, **_) -> Kind:
    """Returns what makes cases alike; see `pallas_kernels.kernel.Kernel.kind`."""
    geometry = {"window": window, "stride": stride, "padding": padding}
    if view_of(x.shape).has_pixels_outside:
        way = "pixels outside of tiles"
    else:
        way = "images beside each other" if blocks_of(x, **geometry).is_grouped else "columns in tiles"
    windows = f"windows {list(window[1:])}, stride {list(stride[1:])}, padding {list(padding[1:])}"
    *others, height, width, channels = x.shape
    return Kind(f"{dtype_names(x)}, {way}, {windows}", (math.prod(others) * channels, height * width))


KERNEL = Kernel(name="mosaic_tpu", platform="tpu", run=run, refuses=refuses, kind=kind, gives_way=True)
