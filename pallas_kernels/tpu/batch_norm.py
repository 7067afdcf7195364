"""Batch norm on TPU, forward in training: one read of x for the statistics, one for the result.

The kernel works on one block of channels at a time. Its images pass through VMEM twice: first their statistics are
merged block by block (Chan's update of means and sums of squared deviations, which loses no digits to a large mean),
then they are normalized. Images are (..., n, a, c, b), as in the operator, with a = 1 or b = 1. Statistics do not
depend on the order of the other axes, so the kernel takes the order in which XLA stores them.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.batch_norm_refusals import IDENTITY, refusal
from pallas_kernels.kernel import Kernel
from pallas_kernels.tpu.streaming_cost import streaming_cost

_LANES = 128
_SUBLANES = 8
_DTYPES = ("float32", "bfloat16")
# VMEM, in float32: at most seven blocks of images (backward: the gradient, x, a gate, dx, the residual's gradient, and
# two values computed from them) of 4 * block_elements bytes, two buffers each: 2 * 7 * 512 KiB = 7 MiB for the largest,
# within the 16 MiB that XLA grants. Statistics and parameters are a vector of the block's channels each.
_CONFIGS = ({"block_elements": 131072}, {"block_elements": 65536}, {"block_elements": 32768})


class Blocks(NamedTuple):
    """The view of images as (batch, images, rows, columns), and its cut into blocks of (1, images, rows, columns).

    Attributes:
      order: which of n, c and s (the extent of a and b) are images, rows and columns: "nsc", "snc" or "ncs".
      view: the shape of the images.
      block: the shape of a block; each size divides the view's.
    """

    order: str
    view: tuple[int, int, int, int]
    block: tuple[int, int, int, int]

    @property
    def channel_axis(self) -> int:
        """The axis of the view."""
        return 1 + self.order.index("c")

    def to_view(self, x: jax.Array) -> jax.Array:
        """The operator's images in this view."""
        n, a, c, b = x.shape[-4:]
        stored = "nsc" if b == 1 else "ncs"
        shape = (self.view[0], *({"n": n, "c": c, "s": a * b}[axis] for axis in stored))
        return jnp.transpose(x.reshape(shape), (0, *(1 + stored.index(axis) for axis in self.order)))

    def from_view(self, x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """The inverse of `to_view`, for images of this shape."""
        stored = "nsc" if shape[-1] == 1 else "ncs"
        return jnp.transpose(x, (0, *(1 + self.order.index(axis) for axis in stored))).reshape(shape)

    @property
    def steps(self) -> tuple[int, int, int]:
        """The number of blocks along the channels, along n, and along the remaining axis."""
        counts = [extent // size for extent, size in zip(self.view, self.block, strict=True)]
        return counts[self.channel_axis], counts[1], counts[5 - self.channel_axis]

    @property
    def reduced(self) -> tuple[int, ...]:
        """The axes of a block that statistics reduce."""
        return 0, 1, 5 - self.channel_axis

    @property
    def elements(self) -> int:
        """The number of elements of a block that each statistic reduces."""
        return math.prod(self.block[axis] for axis in self.reduced)

    @property
    def statistics_shape(self) -> tuple[int, ...]:
        """The shape of parameters and statistics, to broadcast against the view."""
        return tuple(extent if axis in (0, self.channel_axis) else 1 for axis, extent in enumerate(self.view))

    def images_spec(self, always: bool) -> pl.BlockSpec:
        """Blocks of images; unless `always`, the first phase has only the block that the second phase begins with."""
        # The pipeline copies a block when its index changes. Times the phase, the index is 0 throughout the first one.

        def index(batch, channel, phase, image, rest):
            image, rest = (image, rest) if always else (image * phase, rest * phase)
            return (batch, image, rest, channel) if self.channel_axis == 3 else (batch, image, channel, rest)

        return pl.BlockSpec(self.block, index)

    def statistics_spec(self) -> pl.BlockSpec:
        """The parameters or statistics of a block of channels."""
        shape = [self.block[axis] if axis == self.channel_axis else 1 for axis in range(4)]
        return pl.BlockSpec(
            shape,
            lambda batch, channel, *_: (batch, 0, 0, channel) if self.channel_axis == 3 else (batch, 0, channel, 0),
        )


def blocks_of(shape, dtype, block_elements):
    """Blocks of at most `block_elements` padded elements; None if no division of the images is that small."""
    n, a, c, b = shape[-4:]
    if 1 not in (a, b):
        return None
    order = _order(n, c, a * b, channels_last=b == 1)
    extents = {"n": n, "c": c, "s": a * b}
    view = (math.prod(shape[:-4]), *(extents[axis] for axis in order))
    row_multiple = 32 // jnp.dtype(dtype).itemsize
    # Blocks divide the view, as values beyond its edge would enter the statistics. All columns if possible, then as
    # many rows as fit, then as many images.
    for columns in _divisors(view[3], _LANES):
        for rows in _divisors(view[2], row_multiple):
            padded = _round_up(rows, row_multiple) * _round_up(columns, _LANES)
            if padded <= block_elements:
                images = max(size for size in _divisors(view[1], 1) if size * padded <= block_elements)
                return Blocks(order, view, (1, images, rows, columns))
    return None


def _order(n: int, c: int, s: int, channels_last: bool) -> str:
    """The order of axes in which XLA:TPU most likely stores the images, so that this view moves nothing.

    XLA pads the two minor axes to tiles and picks the pair that pads least: channels in lanes if there are enough, and
    in sublanes the width of the images or the batch. The width is unknown here; the root of the extent stands in for
    it. A wrong guess costs copies, never the result.
    """
    if not channels_last and c < _LANES:
        return "ncs"
    width = math.isqrt(s) if math.isqrt(s) ** 2 == s else s
    return "snc" if _padding(n) < _padding(width) else "nsc"


def _padding(extent: int) -> float:
    return _round_up(extent, _SUBLANES) / extent


def _divisors(extent: int, multiple: int) -> list[int]:
    """The extent itself, then its divisors that are multiples, the largest first."""
    return [extent, *(size for size in range(extent - 1, 0, -1) if extent % size == 0 and size % multiple == 0)]


def _round_up(size: int, multiple: int) -> int:
    return pl.cdiv(size, multiple) * multiple


def _kernel(x_ref, scale_ref, bias_ref, *refs, blocks, epsilon, activation):
    *residual_refs, y_ref, mean_ref, variance_ref = refs
    images, rest = pl.program_id(3), pl.program_id(4)
    steps_of_images, steps_of_rest = blocks.steps[1:]
    step = images * steps_of_rest + rest
    x = x_ref[...].astype(jnp.float32)

    @pl.when((pl.program_id(2) == 0) & (step == 0))
    def _():
        mean_ref[...] = jnp.zeros_like(mean_ref)
        variance_ref[...] = jnp.zeros_like(variance_ref)

    @pl.when(pl.program_id(2) == 0)
    def _():
        # So far mean_ref and variance_ref hold the mean and the sum of squared deviations of the blocks before. Blocks
        # have equally many elements, so this one has the weight 1 / (before + 1) in the mean.
        mean = jnp.sum(x, blocks.reduced, keepdims=True) / blocks.elements
        deviations = jnp.sum(jnp.square(x - mean), blocks.reduced, keepdims=True)
        before = step.astype(jnp.float32)
        shift = mean - mean_ref[...]
        mean_ref[...] += shift / (before + 1)
        variance_ref[...] += deviations + jnp.square(shift) * (blocks.elements * before / (before + 1))

    @pl.when((pl.program_id(2) == 0) & (step == steps_of_images * steps_of_rest - 1))
    def _():
        variance_ref[...] = variance_ref[...] / (blocks.elements * steps_of_images * steps_of_rest)

    @pl.when(pl.program_id(2) == 1)
    def _():
        factor = scale_ref[...] * jax.lax.rsqrt(variance_ref[...] + epsilon)
        u = (x - mean_ref[...]) * factor + bias_ref[...]
        for residual_ref in residual_refs:
            u = u + residual_ref[...].astype(jnp.float32)
        mode, _, propagate_nan = activation
        # jnp.maximum propagates NaN, and a comparison with NaN is false.
        if mode == "relu":
            u = jnp.maximum(u, 0.0) if propagate_nan else jnp.where(u > 0, u, 0.0)
        y_ref[...] = u.astype(y_ref.dtype)


def run(x, scale, bias, *residual, epsilon, axis_name, config, activation=IDENTITY, interpret=False):
    """Launches the kernel; see `pallas_kernels.kernel.Kernel.run`."""
    blocks = blocks_of(x.shape, x.dtype, config["block_elements"])
    statistics = jax.ShapeDtypeStruct(blocks.statistics_shape, jnp.float32)
    y, mean, variance = launch(
        functools.partial(_kernel, blocks=blocks, epsilon=epsilon, activation=activation),
        "batch_norm",
        blocks,
        [(x, True), *((values, False) for values in residual)],
        [scale, bias],
        [jax.ShapeDtypeStruct(blocks.view, x.dtype), statistics, statistics],
        interpret,
    )
    return blocks.from_view(y, x.shape), mean.reshape(scale.shape), variance.reshape(scale.shape)


def launch(body, name, blocks, images, statistics, results, interpret):
    """Runs a body over the blocks in two phases.

    Its refs are the first of `images`, the `statistics`, the other images, and the results. `images` are pairs of an
    array and whether the first phase reads it. Results with the view's shape are written in the second phase.
    """
    from jax.experimental.pallas import tpu as pltpu  # here, because only lowering for a TPU needs its 0.2 s

    (first, first_always), *others = images
    operands = [
        blocks.to_view(first),
        *(values.reshape(blocks.statistics_shape) for values in statistics),
        *(blocks.to_view(values) for values, _ in others),
    ]
    in_specs = [
        blocks.images_spec(first_always),
        *[blocks.statistics_spec()] * len(statistics),
        *(blocks.images_spec(always) for _, always in others),
    ]
    out_specs = [
        blocks.images_spec(False) if result.shape == blocks.view else blocks.statistics_spec() for result in results
    ]
    channels, steps_of_images, steps_of_rest = blocks.steps
    # The phase lies inside the channels: all images of a block of channels pass twice before the next block, and its
    # statistics stay in VMEM from the first step to the last.
    return pl.pallas_call(
        body,
        name=name,
        grid=(blocks.view[0], channels, 2, steps_of_images, steps_of_rest),
        in_specs=in_specs,
        out_specs=out_specs,
        out_shape=results,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary", "arbitrary", "arbitrary")
        ),
        # The first phase reads what it needs of the images; the second reads all. Some ten operations per element.
        cost_estimate=streaming_cost(
            (*(values for values, always in images if always), *operands, *results), first.size, flops=10
        ),
        interpret=interpret,
    )(*operands)


def refuses(hardware, x, *operands, axis_name, activation=IDENTITY, **_) -> str | None:
    """Why the kernel cannot run; see `pallas_kernels.kernel.Kernel.refuses`."""
    if jnp.dtype(x.dtype).name not in _DTYPES:
        return f"Mosaic TPU computes on {' and '.join(_DTYPES)}; x is {jnp.dtype(x.dtype).name}"
    if reason := refusal(x, axis_name, activation):
        return reason
    if blocks_of(x.shape, x.dtype, _CONFIGS[0]["block_elements"]) is None:
        return f"no block of whole tiles divides images of {list(x.shape[-3:])} and fits VMEM"
    return None


def configs(hardware, x, *operands, **_):
    """Block sizes worth trying; see `pallas_kernels.kernel.Kernel.configs`."""
    sizes = (config["block_elements"] for config in _CONFIGS)
    return [{"block_elements": size} for size in sizes if blocks_of(x.shape, x.dtype, size) is not None]


KERNEL = Kernel(name="mosaic_tpu", platform="tpu", run=run, refuses=refuses, configs=configs)
