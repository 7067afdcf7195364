"""The gradient of max pooling on NVIDIA GPUs from Hopper on, for channels that lie last and windows that lie apart.

No two windows share an element, so every element is read once and written once. A thread block takes a run of channels
of a few windows side by side, with the pixels up to the next ones, and reads all of them before it writes any. Nothing
is shared between threads.

Functions import `mosaic_gpu` themselves: it takes a third of a second, which only those who lower for a GPU should pay.
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
from pallas_kernels._jax_private import interpret_gpu_params
from pallas_kernels.gpu import hopper
from pallas_kernels.gpu.hopper import WARPGROUP
from pallas_kernels.kernel import Kernel, Kind, dtype_names

_MAX_WINDOW = 16  # pixels from window to window: the loop over them is unrolled
_ACCESS_BYTES = 16  # of a thread, at most
_LOADED = 64  # values that a thread reads before it writes any; each takes a register
_CONFIGS = ({"width": 1024}, {"width": 512}, {"width": 256}, {"width": 128})


class Tiling(NamedTuple):
    """Tiling of images among thread blocks.

    Attributes:
      width: channels of one access of a thread block.
      vector: channels of one access of a thread.
      runs: of channels, one an access; the last thread block of them also takes the channels that are left.
      cells: windows, side by side, of one thread block.
      grid: images, rows of windows, and for each of those the windows' runs.
    """

    width: int
    vector: int
    runs: int
    cells: int
    grid: tuple[int, int, int]


def tiling_of(shape, dtypes, window, stride, width):
    """Returns how thread blocks share images of this shape (n, h, w, c)."""
    images, rows, columns, channels = shape
    widest = min(width // WARPGROUP, _ACCESS_BYTES // max(jnp.dtype(dtype).itemsize for dtype in dtypes))
    vector = math.gcd(widest, channels)
    # Of each window its pixels and its gradient.
    most = max(1, _LOADED // ((math.prod(window) + 1) * (width // WARPGROUP)))
    windows = pl.cdiv(columns, stride[1])
    cells = pl.cdiv(windows, pl.cdiv(windows, most))
    runs = channels // width
    grid = images, pl.cdiv(rows, stride[0]), pl.cdiv(windows, cells) * runs
    return Tiling(width, vector, runs, cells, grid)


class _Cell:
    """Run of channels of one window and of the pixels up to the next ones, inside a kernel."""

    def __init__(self, refs, tiling, image, row, column, first_channel, window, stride, pin_layouts):
        """Pins layouts if asked to; the interpreter of jax 0.10 has none to pin."""
        from jax.experimental.pallas import mosaic_gpu as plgpu

        self._x_gmem, self._grad_gmem, self._dx_gmem = refs
        self.row, self.column, self._window, self._stride = row, column, window, stride
        self._image, self._width = image, tiling.width
        self._run = pl.ds(first_channel, tiling.width)
        self._layout = plgpu.Layout.WG_STRIDED((tiling.width,), vec_size=tiling.vector) if pin_layouts else None

    def _load(self, ref, row, column):
        from jax.experimental.pallas import mosaic_gpu as plgpu

        _, rows, columns, _ = ref.shape
        values = ref[self._image, jnp.minimum(row, rows - 1), jnp.minimum(column, columns - 1), self._run]
        return values if self._layout is None else plgpu.layout_cast(values, self._layout)

    def _pixel(self, offset):
        return self.row * self._stride[0] + offset[0], self.column * self._stride[1] + offset[1]

    def loaded(self):
        """Loads the window's pixels, and its gradient."""
        pixels = [self._load(self._x_gmem, *self._pixel(offset)) for offset in self._offsets(self._window)]
        return pixels, self._load(self._grad_gmem, self.row, self.column)

    def _offsets(self, extents):
        return list(itertools.product(*map(range, extents)))

    def _lanes(self):
        from jax.experimental.pallas import mosaic_gpu as plgpu

        if self._layout is None:
            return lax.broadcasted_iota(jnp.int32, (self._width,), 0)
        return plgpu.broadcasted_iota(jnp.int32, (self._width,), 0, layout=self._layout)

    def store(self, pixels, grad, propagate_nan):
        """Stores the gradient at the window's largest pixel, and 0 elsewhere."""
        lanes = self._lanes()
        best, *others = (pixel.astype(jnp.float32) for pixel in pixels)
        winner = jnp.zeros_like(lanes)
        for number, value in enumerate(others, 1):
            # The first of equal values stays, and so does the first NaN, which is neither more nor less nor equal. NaN
            # beats any number if it is propagated; otherwise any number beats NaN.
            stronger, weaker = (best, value) if propagate_nan else (value, best)
            wins = jnp.where(value > best, 1, jnp.where(weaker == weaker, 0, jnp.where(stronger == stronger, 1, 0)))
            best, winner = jnp.where(wins == 1, value, best), jnp.where(wins == 1, number, winner)
        # Pixels left over at the edges fill no window, so their gradient is 0. Compared element by element, as Mosaic
        # cannot broadcast a scalar condition.
        _, rows, columns, _ = self._grad_gmem.shape
        limit = jnp.where((self.row < rows) & (self.column < columns), self._width, 0)
        grad = jnp.where(lanes < limit, grad.astype(jnp.float32), 0.0)
        _, height, width, _ = self._dx_gmem.shape
        offsets = self._offsets(self._window)
        for offset in self._offsets(self._stride):
            won = winner == offsets.index(offset) if offset in offsets else lanes < 0
            values = jnp.where(won, grad, 0.0).astype(self._dx_gmem.dtype)
            row, column = self._pixel(offset)

            @pl.when((row < height) & (column < width))
            def _(row=row, column=column, values=values):
                self._dx_gmem[self._image, row, column, self._run] = values


def _kernel(*refs, tiling, window, stride, propagate_nan, pin_layouts):
    image, row, part = hopper.place(tiling.grid)
    group, run = lax.div(part, tiling.runs), lax.rem(part, tiling.runs)
    columns = [group * tiling.cells + position for position in range(tiling.cells)]

    def process(first_channel):
        where = [(image, row, column, first_channel) for column in columns]
        cells = [_Cell(refs, tiling, *place, window, stride, pin_layouts) for place in where]
        loaded = [cell.loaded() for cell in cells]
        for cell, (pixels, grad) in zip(cells, loaded, strict=True):
            cell.store(pixels, grad, propagate_nan)

    process(run * tiling.width)
    # Accesses cannot be masked: the last one overlaps the one before. The same thread block stores the same values.
    channels = refs[0].shape[-1]
    if channels % tiling.width:
        pl.when(run == tiling.runs - 1)(lambda: process(channels - tiling.width))


def run(x, grad, *, window, stride, padding, propagate_nan, config, interpret=False):
    """Launches the kernel; see `pallas_kernels.kernel.Kernel.run`."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    images = math.prod(x.shape[:-3])
    view = (images, *x.shape[-3:])
    tiling = tiling_of(view, (x.dtype, grad.dtype), window[1:], stride[1:], config["width"])
    (dx,) = pl.kernel(
        functools.partial(
            _kernel,
            tiling=tiling,
            window=window[1:],
            stride=stride[1:],
            propagate_nan=propagate_nan,
            pin_layouts=not interpret,  # the interpreter of jax 0.10 has no layouts
        ),
        out_type=[jax.ShapeDtypeStruct(view, grad.dtype)],
        mesh=plgpu.Mesh(**hopper.grid(*tiling.grid)),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        interpret=interpret_gpu_params() if interpret is True else interpret,
        name="max_pool_backward",
    )(x.reshape(view), grad.reshape(images, *grad.shape[-3:]))
    return (dx.reshape(x.shape),)


def refuses(hardware, x, grad, *, window, stride, padding, **_) -> str | None:
    """Says why the kernel cannot run; see `pallas_kernels.kernel.Kernel.refuses`."""
    if reason := hopper.refusal(hardware, x=x, grad=grad) or whole_images.refusal(x):
        return reason
    if (window[0], stride[0], padding[0]) != (1, 1, (0, 0)):
        return "the kernel pools rows and columns; these windows reach over the depth as well"
    if any(map(any, padding)) or any(k > s for k, s in zip(window, stride, strict=True)):
        return "the kernel takes windows that share no element and no padding: others would be read several times"
    if math.prod(stride) > _MAX_WINDOW:
        return f"the kernel is written out for up to {_MAX_WINDOW} pixels from window to window; these are {stride[1:]}"
    if x.shape[-1] < WARPGROUP:
        return f"a warpgroup takes {WARPGROUP} channels that lie side by side; the last axis of x has {x.shape[-1]}"
    return None


def configs(hardware, x, *operands, **_):
    """Lists runs of channels worth trying; see `pallas_kernels.kernel.Kernel.configs`."""
    channels, most = x.shape[-1], WARPGROUP * _ACCESS_BYTES // jnp.dtype(x.dtype).itemsize
    fitting = [config for config in _CONFIGS if config["width"] <= min(channels, most)]
    # The last access may overlap the one before: first those that repeat least, and the widest of them.
    return sorted(fitting, key=lambda config: pl.cdiv(channels, config["width"]) * config["width"])


def kind(hardware, x, grad, *, window, stride, **_) -> Kind:
    """Returns what makes cases alike; see `pallas_kernels.kernel.Kernel.kind`."""
    windows = f"windows {list(window[1:])}, stride {list(stride[1:])}"
    return Kind(f"{dtype_names(x, grad)}, {windows}", (math.prod(x.shape[:-1]), x.shape[-1]))


KERNEL = Kernel(
    name="mosaic_gpu", platform="cuda", run=run, refuses=refuses, configs=configs, kind=kind, interpreter_is_pure=False
)
