"""Batch norm on NVIDIA GPUs from Hopper on, forward in training: one read of x for statistics, one for the result.

The first launch gives every thread block a part of the images: the pixels of one image in one channel or, if channels
lie last, some rows of pixels in some channels. It computes the part's mean and sum of squared deviations. XLA merges
those of all parts, which are few (Chan's formula loses no digits to a large mean). The second launch normalizes.

Both launches stream: an element goes from device memory to registers and back, and shared memory would save nothing.
Two launches, because thread blocks cannot wait for each other's statistics; the second read of x is the price.

Functions import `mosaic_gpu` themselves: it takes a third of a second, which only those who lower for a GPU should pay.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels._jax_private import interpret_gpu_params
from pallas_kernels.batch_norm_refusals import FORWARD_FIELDS, refusal
from pallas_kernels.gpu import hopper
from pallas_kernels.gpu.hopper import VECTOR, WARPGROUP
from pallas_kernels.kernel import Kernel

_PARTS = 1024  # thread blocks: several for each of 132 multiprocessors
_SLAB_ROWS = 16  # at least, so that the statistics of all parts are small beside x
# Loaded in a group before the first access of it is used: a thread block that waited for each access would reach about
# half of the bandwidth. Registers: of the 255 of a thread, that is 16 for each array in float32, of up to three; the
# statistics kernel also holds two sums of an access, 2 * width / 128, which is 16 for the widest.
_AHEAD_ELEMENTS = 2048
_CONFIGS = ({"width": 512}, {"width": 1024}, {"width": 256})


class Tiling(NamedTuple):
    """The view of images, and how thread blocks share it.

    Attributes:
      view: (n, c, s), or (slabs, rows, fold * c) where channels lie last.
      channels_last: which of the two.
      channels: c.
      width: elements of one access of a thread block, along the view's last axis.
      vector: elements of one access of a thread.
    """

    view: tuple[int, int, int]
    channels_last: bool
    channels: int
    width: int
    vector: int

    @property
    def grid(self) -> tuple[int, int]:
        """The thread blocks: one for each image and channel, or for each slab and run of columns."""
        outer, middle, inner = self.view
        return (outer, pl.cdiv(inner, self.width)) if self.channels_last else (outer, middle)

    @property
    def steps(self) -> int:
        """The number of accesses that cover a block's part."""
        return self.view[1] if self.channels_last else pl.cdiv(self.view[2], self.width)

    @property
    def elements(self) -> int:
        """The number of elements that each statistic of a part reduces."""
        return self.view[1] if self.channels_last else self.view[2]

    @property
    def parts_shape(self) -> tuple[int, int]:
        """The shape of one statistic of all parts."""
        return (self.view[0], self.view[2] if self.channels_last else self.view[1])

    def by_channel(self, parts: jax.Array) -> jax.Array:
        """Returns statistics of all parts as (parts, c)."""
        return parts.reshape(-1, self.channels)

    def for_parts(self, values: jax.Array) -> jax.Array:
        """Returns one number per channel as blocks read them: if channels lie last, one per column."""
        return jnp.tile(values.reshape(-1), self.view[2] // self.channels) if self.channels_last else values.reshape(-1)


class Block:
    """Part of one thread block, inside a kernel."""

    def __init__(self, tiling: Tiling, pin_layouts: bool) -> None:
        """Pins layouts if asked to; the interpreter of jax 0.10 has none to pin."""
        from jax.experimental.pallas import mosaic_gpu as plgpu

        self.tiling = tiling
        self.outer, self.inner = hopper.place(tiling.grid)
        self._layout = plgpu.Layout.WG_STRIDED((tiling.width,), vec_size=tiling.vector) if pin_layouts else None

    def _pinned(self, values):
        from jax.experimental.pallas import mosaic_gpu as plgpu

        return values if self._layout is None else plgpu.layout_cast(values, self._layout)

    def _columns(self, chunk):
        # Accesses cannot be masked: if they do not divide the view, the last one overlaps the one before.
        return pl.ds(jnp.minimum(chunk * self.tiling.width, self.tiling.view[2] - self.tiling.width), self.tiling.width)

    def _index(self, step):
        if self.tiling.channels_last:
            return self.outer, step, self._columns(self.inner)
        return self.outer, self.inner, self._columns(step)

    def zeros(self):
        """Returns one access of zeros."""
        return self._pinned(jnp.zeros((self.tiling.width,), jnp.float32))

    def load(self, ref, step):
        """Loads one access to images, in float32."""
        return self._pinned(ref[self._index(step)]).astype(jnp.float32)

    def fold(self, load, use, carry):
        """Calls `use(step, load(step), carry)` for each access in turn, with several loads ahead of their use."""
        steps = self.tiling.steps
        ahead = min(steps, max(1, _AHEAD_ELEMENTS // self.tiling.width))
        return hopper.fold(0, steps, ahead, load, use, carry)

    def store(self, ref, step, values):
        """Stores one access; overlapping ones store the same values."""
        ref[self._index(step)] = values.astype(ref.dtype)

    def new(self, step, values):
        """Returns the values of an access, with 0 for elements that the access before already had."""
        from jax.experimental.pallas import mosaic_gpu as plgpu

        width, extent = self.tiling.width, self.tiling.view[2]
        if self.tiling.channels_last or extent % width == 0:
            return values
        if self._layout is None:
            offsets = lax.broadcasted_iota(jnp.int32, (width,), 0)
        else:
            offsets = plgpu.broadcasted_iota(jnp.int32, (width,), 0, layout=self._layout)
        return jnp.where(offsets + jnp.minimum(step * width, extent - width) >= step * width, values, 0.0)

    def parameter(self, ref):
        """Loads the parameter of the block's channel, or those of its channels."""
        return self._pinned(ref[self._columns(self.inner)]) if self.tiling.channels_last else ref[self.inner]

    def first(self, ref):
        """Loads an element of each of the block's channels."""
        return self.load(ref, 0) if self.tiling.channels_last else ref[self.outer, self.inner, 0].astype(jnp.float32)

    def total(self, values):
        """Completes the sums of accesses, for each of the block's channels."""
        return values if self.tiling.channels_last else jnp.sum(values)

    def store_part(self, ref, values):
        """Stores a statistic of the part."""
        ref[(self.outer, self._columns(self.inner)) if self.tiling.channels_last else (self.outer, self.inner)] = values


def tiling_of(shape, max_width):
    """Returns how thread blocks share images (n, a, c, b); None if no access fits them."""
    n, a, c, b = shape[-4:]
    if b > 1 or c == 1:
        view = (n, c, a * b)
        if (a > 1 and c > 1) or view[2] < WARPGROUP:
            return None
        width = min(max_width, 1 << (view[2].bit_length() - 1))
        vector = min(VECTOR, width // WARPGROUP) if view[2] % VECTOR == 0 else 1
        return Tiling(view, False, c, width, vector)
    # Channels lie last. Rows of pixels are put side by side until whole warpgroups divide them, as two blocks must not
    # write the same statistics. Then a thread's columns are always of the same channels, and it sums in registers. More
    # rows make wider accesses.
    lanes = (WARPGROUP * vector for vector in (VECTOR, 2, 1) if WARPGROUP * vector <= max_width)
    folds = [fold for count in lanes if n * a % (fold := count // math.gcd(c, count)) == 0]
    if not folds:
        return None
    fold = folds[0]
    rows, columns = n * a // fold, fold * c
    width = next(width for width in (max_width >> i for i in range(max_width)) if columns % width == 0)
    most = max(1, min(_PARTS * width // columns, rows // _SLAB_ROWS))
    slabs = max(slabs for slabs in range(1, most + 1) if rows % slabs == 0)
    return Tiling((slabs, rows // slabs, columns), True, c, width, min(VECTOR, width // WARPGROUP))


def _parts_kernel(x_gmem, mean_gmem, squares_gmem, *, tiling, pin_layouts):
    block = Block(tiling, pin_layouts)
    # Sums of deviations from an element of the part: like those from its mean, they lose no digits to a large mean, and
    # they need no pass to find it.
    shift = block.first(x_gmem)

    def add(i, x, sums):
        deviations = block.new(i, x - shift)
        return sums[0] + deviations, sums[1] + deviations * deviations

    sums = block.fold(lambda i: block.load(x_gmem, i), add, (block.zeros(), block.zeros()))
    total, squares = map(block.total, sums)
    mean = total / tiling.elements
    block.store_part(mean_gmem, shift + mean)
    block.store_part(squares_gmem, squares - mean * total)


def _normalize_kernel(x_gmem, mean_gmem, factor_gmem, bias_gmem, *refs, tiling, activation, pin_layouts):
    *residual_gmem, y_gmem = refs
    block = Block(tiling, pin_layouts)
    mean, factor, bias = map(block.parameter, (mean_gmem, factor_gmem, bias_gmem))
    mode, _, propagate_nan = activation

    def load(i):
        return [block.load(ref, i) for ref in (x_gmem, *residual_gmem)]

    def normalize(i, loaded, _):
        x, *residual = loaded
        u = (x - mean) * factor + bias
        for values in residual:
            u = u + values
        if mode == "relu":
            # Both comparisons with NaN are false.
            u = jnp.where(u < 0, 0.0, u) if propagate_nan else jnp.where(u > 0, u, 0.0)
        block.store(y_gmem, i, u)

    block.fold(load, normalize, None)


def launch(kernel, name, tiling, operands, results, interpret, **params):
    """Runs a kernel on all parts."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    return pl.kernel(
        functools.partial(kernel, tiling=tiling, pin_layouts=not interpret, **params),
        out_type=results,
        mesh=plgpu.Mesh(**hopper.grid(*tiling.grid)),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        interpret=interpret_gpu_params() if interpret is True else interpret,
        name=name,
    )(*operands)


def run(operands, *, epsilon, axis_name, activation, config, interpret=False):
    """Launches the kernels; see `pallas_kernels.kernel.Kernel.run`."""
    x, scale, bias, residual = operands
    tiling = tiling_of(x.shape, config["width"])
    images = [values.reshape(tiling.view) for values in (x, residual) if values is not None]
    part = jax.ShapeDtypeStruct(tiling.parts_shape, jnp.float32)
    parts = launch(_parts_kernel, "batch_norm_statistics", tiling, images[:1], [part, part], interpret)
    means, squares = map(tiling.by_channel, parts)
    mean = jnp.mean(means, 0)
    # The variance within parts, which all have equally many elements, plus the variance between their means.
    variance = jnp.mean(squares, 0) / tiling.elements + jnp.mean(jnp.square(means - mean[None]), 0)
    factor = scale.reshape(-1) * lax.rsqrt(variance + epsilon)
    parameters = [tiling.for_parts(values) for values in (mean, factor, bias)]
    # scale and inv_std are one factor by now, so the second launch takes one multiplication and two additions.
    arrays = (images[0], *parameters, *images[1:])
    result = jax.ShapeDtypeStruct(tiling.view, x.dtype)
    (y,) = launch(_normalize_kernel, "batch_norm", tiling, arrays, [result], interpret, activation=activation)
    return y.reshape(x.shape), mean.reshape(scale.shape), variance.reshape(scale.shape)


def refuses(hardware, operands, *, axis_name, activation, **_) -> str | None:
    """Tells why the kernels cannot run; see `pallas_kernels.kernel.Kernel.refuses`."""
    x = operands.x
    if reason := hopper.refusal(hardware, x=x) or refusal(x, axis_name, activation):
        return reason
    if math.prod(x.shape[:-4]) > 1:
        return f"the kernels take one batch of images; vmap made {math.prod(x.shape[:-4])} of them"
    if tiling_of(x.shape, _CONFIGS[0]["width"]) is None:
        return f"a warpgroup reads {WARPGROUP} elements at a time; images of {list(x.shape[-3:])} have no such runs"
    return None


def configs(hardware, operands, **_):
    """Widths worth trying; see `pallas_kernels.kernel.Kernel.configs`."""
    return _CONFIGS


KERNEL = Kernel(
    name="mosaic_gpu",
    platform="cuda",
    run=run,
    refuses=refuses,
    takes=FORWARD_FIELDS,
    configs=configs,
    interpreter_is_pure=False,
)
