"""Batch norm on TPU, forward in training: x is read from HBM once, where a block of its channels fits into VMEM.

The kernel works on one block of channels at a time. Its images pass twice: first their statistics are merged block by
block (Chan's update of means and sums of squared deviations, which loses no digits to a large mean), then they are
normalized. Between the phases they are kept in VMEM; if that is too small, they are read again.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.batch_norm_refusals import IDENTITY, refusal
from pallas_kernels.kernel import Kernel
from pallas_kernels.tpu.batch_norm_blocks import blocks_of, launch, most_kept_bytes

_DTYPES = ("float32", "bfloat16")
# DMAs of 0.5 to 4 MiB. The larger a block, the less do its DMA's latency and the about 300 bundles of scalar code and
# statistics around each step weigh beside its time in HBM.
_BLOCK_ELEMENTS = (2**20, 2**19, 2**18)


def _kernel(x_ref, *refs, blocks, epsilon, activation, residuals):
    residual_refs, (scale_ref, bias_ref, y_ref, mean_ref, variance_ref) = refs[:residuals], refs[residuals:][:5]
    *kept_refs, partial_mean_ref, partial_deviations_ref = refs[residuals + 5 :]
    phase, step = pl.program_id(2), pl.program_id(3) * blocks.steps[2] + pl.program_id(4)

    @pl.when(phase == 0)
    def _():
        _accumulate(x_ref, kept_refs, partial_mean_ref, partial_deviations_ref, step, blocks)

    @pl.when((phase == 0) & (step == blocks.steps_of_a_phase - 1))
    def _():
        # The partial statistics of the channel's positions are of equally many elements each.
        positions = blocks.elements // (blocks.tiles * blocks.steps_of_a_phase)

        def statistics(channels):
            partial_mean = partial_mean_ref[channels]
            mean = blocks.total(partial_mean) / positions
            between = jnp.square(partial_mean - mean) * (blocks.elements // positions)
            mean_ref[blocks.group_at(channels)] = mean
            deviations = blocks.total(partial_deviations_ref[channels] + between)
            variance_ref[blocks.group_at(channels)] = deviations / blocks.elements

        blocks.for_each_group(statistics)

    @pl.when(phase == 1)
    def _():
        source, at_step = (kept_refs[0], step) if kept_refs else (x_ref, 0)
        mode, _, propagate_nan = activation

        def group(channels):
            mean, bias = blocks.of_group(mean_ref, channels), blocks.of_group(bias_ref, channels)
            inv_std = jax.lax.rsqrt(blocks.of_group(variance_ref, channels) + epsilon)
            factor = blocks.of_group(scale_ref, channels) * inv_std

            def normalize(at, _):
                u = (source[at_step, *at].astype(jnp.float32) - mean) * factor + bias
                for residual_ref in residual_refs:
                    u = u + residual_ref[0, *at].astype(jnp.float32)
                # jnp.maximum propagates NaN, and a comparison with NaN is false.
                if mode == "relu":
                    u = jnp.maximum(u, 0.0) if propagate_nan else jnp.where(u > 0, u, 0.0)
                y_ref[0, *at] = u.astype(y_ref.dtype)

            blocks.fold(channels, normalize, None)

        blocks.for_each_group(group)


def _accumulate(x_ref, kept_refs, partial_mean_ref, partial_deviations_ref, step, blocks):
    """Merges a block into the partial means and sums of squared deviations, and keeps it."""
    before = step.astype(jnp.float32)
    weight = 1 / (before + 1)

    def group(channels):
        @pl.when(step == 0)
        def _():
            zeros = jnp.zeros(blocks.partial_shape[1:], jnp.float32)
            total = blocks.fold(channels, lambda at, total: total + x_ref[0, *at].astype(jnp.float32), zeros)
            partial_mean_ref[channels] = total / blocks.tiles
            partial_deviations_ref[channels] = zeros

        # Sums around the mean of the blocks before, or of this block if it is the first. Where this block's mean is
        # far from it, the variance is as large, so that the difference of sums below loses no digits that count.
        shift = partial_mean_ref[channels]

        def add(at, sums):
            x = x_ref[0, *at]
            for kept_ref in kept_refs:
                kept_ref[step, *at] = x
            centred = x.astype(jnp.float32) - shift
            return sums[0] + centred, sums[1] + jnp.square(centred)

        total, squares = blocks.fold(channels, add, (jnp.zeros_like(shift), jnp.zeros_like(shift)))
        mean = total / blocks.tiles
        deviations = jnp.maximum(squares - total * mean, 0.0)
        # Blocks have equally many elements, so this one has the weight 1 / (before + 1) in the mean.
        partial_mean_ref[channels] = shift + mean * weight
        partial_deviations_ref[channels] += deviations + jnp.square(mean) * (blocks.tiles * before * weight)

    blocks.for_each_group(group)


def run(x, scale, bias, *residual, epsilon, axis_name, config, activation=IDENTITY, interpret=False):
    """Launches the kernel; see `pallas_kernels.kernel.Kernel.run`."""
    blocks = blocks_of(x.shape, x.dtype, 1, **config)
    statistics = jax.ShapeDtypeStruct(blocks.statistics_shape, jnp.float32)
    y, mean, variance = launch(
        functools.partial(_kernel, blocks=blocks, epsilon=epsilon, activation=activation, residuals=len(residual)),
        "batch_norm",
        blocks,
        [(x, "first" if blocks.kept else "both"), *((values, "second") for values in residual)],
        [scale, bias],
        [jax.ShapeDtypeStruct(blocks.view, x.dtype), statistics, statistics],
        2,
        interpret,
    )
    return blocks.from_view(y, x.shape), mean.reshape(scale.shape), variance.reshape(scale.shape)


def refuses(hardware, x, *operands, axis_name, activation=IDENTITY, **_) -> str | None:
    """Why the kernel cannot run; see `pallas_kernels.kernel.Kernel.refuses`."""
    if jnp.dtype(x.dtype).name not in _DTYPES:
        return f"Mosaic TPU computes on {' and '.join(_DTYPES)}; x is {jnp.dtype(x.dtype).name}"
    if reason := refusal(x, axis_name, activation):
        return reason
    if not configs(hardware, x):
        return f"no block of whole tiles divides images of {list(x.shape[-3:])} and fits VMEM"
    return None


def configs(hardware, x, *operands, **_):
    """Block sizes worth trying; see `pallas_kernels.kernel.Kernel.configs`."""
    # Images are x, y and a residual, which follows scale and bias.
    return configs_of(hardware, x, 1, images=2 + len(operands[2:]))


def configs_of(hardware, x, arrays, images):
    """Block sizes for a kernel with this many images; it can keep up to `arrays` of them in VMEM."""
    found = []
    for size in _BLOCK_ELEMENTS:
        config = {"block_elements": size}
        config["kept_bytes"] = most_kept_bytes(hardware.on_chip_bytes, x.dtype, images, size)
        if blocks := blocks_of(x.shape, x.dtype, arrays, **config):
            found.append((-blocks.kept, config))
    # The more arrays stay in VMEM, the less is read from HBM; blocks of equal standing remain in the order above.
    return [config for _, config in sorted(found, key=lambda pair: pair[0])]


KERNEL = Kernel(name="mosaic_tpu", platform="tpu", run=run, refuses=refuses, configs=configs)
