"""Batch norm on TPU, forward in training: x is read from HBM once, where a block of its channels fits into VMEM.

The images of a block of channels pass twice: first their statistics are merged block by block (Chan's update of means
and sums of squared deviations, which loses no digits to a large mean), then they are normalized, while the next block
of channels is in its first phase. Between the phases they are kept in VMEM; if that is too small, they are read again,
and no two blocks of channels are worked on at a time.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.batch_norm_refusals import FORWARD_FIELDS, refusal
from pallas_kernels.kernel import Kernel, Kind, dtype_names
from pallas_kernels.tpu.batch_norm_blocks import blocks_of, most_kept_bytes
from pallas_kernels.tpu.batch_norm_streams import Phase, launch, pass_twice

_DTYPES = ("float32", "bfloat16")
# The larger a block, the less do its scalar code and the ends of its loops weigh; the smaller, the sooner does the work
# on the first begin, and the writing of the last end.
_BLOCK_BYTES = (2**21, 2**20, 2**19)
_FEW_BLOCKS = 8


def _kernel(images, results, parameters, statistics, partials, *, blocks, epsilon, activation):
    (x, *residuals), (y,) = images, results
    sums, coefficients = partials[:4], partials[4:]
    # Half of float32's digits may be a mean far above the deviation; bfloat16 has no such digits.
    folds = jnp.dtype(y.dtype).itemsize == 2
    mean_ref, factor_ref, offset_ref = coefficients
    mode, _, propagate_nan = activation

    def accumulate(turn, step):
        _accumulate(x.block(turn, step), sums, step, blocks)

    def finish(turn):
        of_group = functools.partial(_finish, blocks, parameters, statistics, sums, coefficients, epsilon, folds, turn)
        blocks.for_each_group(of_group, at_once=8)

    def write(turn, step):
        x_ref, y_ref, residual_refs = (
            x.block(turn, step),
            y.block(turn, step),
            [residual.block(turn, step) for residual in residuals],
        )

        def group(channels):
            mean, factor, offset = mean_ref[channels], factor_ref[channels], offset_ref[channels]

            def normalize(at):
                values = x_ref[at].astype(jnp.float32)
                u = (values if folds else values - mean) * factor + offset
                for residual_ref in residual_refs:
                    u = u + residual_ref[at].astype(jnp.float32)
                # jnp.maximum propagates NaN, and a comparison with NaN is false.
                if mode == "relu":
                    u = jnp.maximum(u, 0.0) if propagate_nan else jnp.where(u > 0, u, 0.0)
                y_ref[at] = u.astype(y_ref.dtype)

            blocks.fold(channels, normalize)

        blocks.for_each_group(group)

    again = residuals if blocks.kept else [x, *residuals]
    pass_twice(blocks, Phase([x], [], accumulate), finish, Phase(again, [y], write))


def _finish(blocks, parameters, statistics, sums, coefficients, epsilon, folds, turn, channels):
    """Combines the partial statistics of a channel's positions, and computes what y needs of them.

    That has a tile's shape: to broadcast it at each step would wait for the cross-lane unit.
    """
    (scale_ref, bias_ref), (mean_ref, variance_ref) = parameters, statistics
    partial_mean_ref, partial_deviations_ref, *_ = sums
    # Positions have equally many elements.
    positions = blocks.elements // (blocks.tiles * blocks.steps_of_a_phase)
    partial_mean = partial_mean_ref[channels]
    mean = blocks.total(partial_mean) / positions
    between = jnp.square(partial_mean - mean) * (blocks.elements // positions)
    variance = blocks.total(partial_deviations_ref[channels] + between) / blocks.elements
    at = blocks.group_at(turn, channels)
    mean_ref[at], variance_ref[at] = mean, variance
    factor, bias = scale_ref[at] * jax.lax.rsqrt(variance + epsilon), bias_ref[at]
    values = mean, factor, bias - mean * factor if folds else bias
    for ref, value in zip(coefficients, values, strict=True):
        ref[channels] = jnp.broadcast_to(value, blocks.tile)


def _accumulate(x_ref, sums, step, blocks):
    """Merges a block into the partial means and sums of squared deviations."""
    partial_mean_ref, partial_deviations_ref, total_ref, squares_ref = sums
    before = step.astype(jnp.float32)

    def group(channels):
        zeros = jnp.zeros(blocks.tile, jnp.float32)

        @pl.when(step == 0)
        def _():
            total_ref[channels] = zeros
            blocks.fold(channels, lambda at: (x_ref[at].astype(jnp.float32),), total_ref)
            partial_mean_ref[channels] = total_ref[channels] / blocks.tiles
            partial_deviations_ref[channels] = zeros

        # Sums around the mean of the blocks before, or of this block if it is the first. Where this block's mean is
        # far from it, the variance is as large, so that the difference of sums below loses no digits that count.
        shift = partial_mean_ref[channels]

        def terms(at):
            centred = x_ref[at].astype(jnp.float32) - shift
            return centred, jnp.square(centred)

        total_ref[channels] = zeros
        squares_ref[channels] = zeros
        blocks.fold(channels, terms, total_ref, squares_ref)
        total = total_ref[channels]
        mean = total / blocks.tiles
        deviations = jnp.maximum(squares_ref[channels] - total * mean, 0.0)
        # Blocks have equally many elements, so this one has this weight in the mean. A scalar division would go through
        # the vector unit and back: 60 bundles for each block.
        weight = 1 / jnp.broadcast_to(before + 1, blocks.tile)
        partial_mean_ref[channels] = shift + mean * weight
        partial_deviations_ref[channels] += deviations + jnp.square(mean) * (blocks.tiles * before * weight)

    blocks.for_each_group(group)


def run(operands, *, epsilon, axis_name, activation, config, interpret=False):
    """Launches the kernel; see `pallas_kernels.kernel.Kernel.run`."""
    x, scale, bias, residual = operands
    added = [] if residual is None else [(residual, "once")]
    blocks = blocks_of(x.shape, x.dtype, 1, **config)
    y, mean, variance = launch(
        functools.partial(_kernel, blocks=blocks, epsilon=epsilon, activation=activation),
        "batch_norm",
        blocks,
        [(x, "kept" if blocks.kept else "both"), *added],
        [scale, bias],
        1,
        interpret,
    )
    return blocks.from_view(y, x.shape), mean.reshape(scale.shape), variance.reshape(scale.shape)


def refuses(hardware, operands, *, axis_name, activation, **_) -> str | None:
    """Tells why the kernel cannot run; see `pallas_kernels.kernel.Kernel.refuses`."""
    return refusal_of(operands.x, axis_name, activation) or refusal_without(configs(hardware, operands), operands.x)


def refusal_of(x, axis_name, activation) -> str | None:
    """Tells why the kernels cannot run on images, whatever their size."""
    if jnp.dtype(x.dtype).name not in _DTYPES:
        return f"Mosaic TPU computes on {' and '.join(_DTYPES)}; x is {jnp.dtype(x.dtype).name}"
    return refusal(x, axis_name, activation)


def refusal_without(offered, x) -> str | None:
    """Tells that there is no block size, if none is offered."""
    return None if offered else f"no block of whole tiles divides images of {list(x.shape[-3:])} and fits VMEM"


def configs(hardware, operands, **_):
    """Returns block sizes worth trying; see `pallas_kernels.kernel.Kernel.configs`."""
    # Images are x, y and a residual.
    return configs_of(hardware, operands.x, 1, images=2 + (operands.residual is not None))


def configs_of(hardware, x, arrays, images, widens=False):
    """Lists block sizes for a kernel with so many images: it keeps up to `arrays` in VMEM, and `widens` one."""
    found = []
    for size in (block_bytes // jnp.dtype(x.dtype).itemsize for block_bytes in _BLOCK_BYTES):
        config = {"block_elements": size}
        if widens:
            config["widens"] = True
        if (hardware.cores or 1) > 1:
            config["parts"] = hardware.cores
        config["kept_bytes"] = most_kept_bytes(hardware.on_chip_bytes, x.dtype, images - 1, size)
        blocks = blocks_of(x.shape, x.dtype, arrays, **config)
        if blocks and blocks.vmem_bytes(x.dtype, images) <= (hardware.on_chip_bytes or math.inf):
            found.append((-blocks.kept, -blocks.widens, config))
    # The more arrays stay in VMEM, the less is read from HBM; blocks of equal standing remain in the order above.
    return [config for *_, config in sorted(found, key=lambda found: found[:-1])]


def kind(hardware, operands, *, activation, **_) -> Kind:
    """Returns what makes cases alike; see `pallas_kernels.kernel.Kernel.kind`."""
    (config, *_) = configs(hardware, operands)
    return kind_of(operands.x, 1, config, activation, ["residual"] * (operands.residual is not None))


def kind_of(x, arrays, config, activation, options) -> Kind:
    """Returns the kind of a kernel that keeps up to so many arrays of images like x in VMEM."""
    blocks, channels = blocks_of(x.shape, x.dtype, arrays, **config), x.shape[-2]
    words = dtype_names(x), f"stored as {blocks.order}", f"{blocks.kept} in VMEM", activation.mode, *options
    # An extent without suitable divisors leaves many blocks so small that copies wait for HBM's latency.
    block_bytes = math.prod(blocks.block) * jnp.dtype(x.dtype).itemsize
    is_slow = blocks.steps_of_a_phase > _FEW_BLOCKS and block_bytes < min(_BLOCK_BYTES) // 2
    # Images are as high as wide, if nothing else is known: XLA pads each row of theirs to whole tiles, and copies them
    # for the kernel, whose pixels follow each other.
    is_padded = blocks.order == "nsc" and x.shape[-3] * x.shape[-1] % 8**2 != 0
    found = ["small blocks"] * is_slow + ["padded rows"] * is_padded
    return Kind(", ".join((*words, *found)), (channels, math.prod(x.shape) // channels))


KERNEL = Kernel(
    name="mosaic_tpu", platform="tpu", run=run, refuses=refuses, takes=FORWARD_FIELDS, configs=configs, kind=kind
)
