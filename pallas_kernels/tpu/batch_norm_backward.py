"""Batch norm on TPU, backward: x, the gradient and the gate are read once for two sums, if VMEM can keep them.

As in the forward kernel, images pass twice, and a block of channels that fits is kept in VMEM in between: x, and the
gradient behind the activation, to which the gate has been applied, in float32 where that saves time. That gradient is
only stored if it is a result: the gradient of the residual.
"""

import functools

import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.batch_norm_refusals import BACKWARD_FIELDS
from pallas_kernels.kernel import Kernel
from pallas_kernels.tpu import batch_norm
from pallas_kernels.tpu.batch_norm_blocks import blocks_of
from pallas_kernels.tpu.batch_norm_streams import Phase, launch, pass_twice

# With HBM as fast as v7x's, the vector unit has no time to unpack the gradient twice.
_WIDENS_BYTES_PER_S = 2e12


def _kernel(images, results, parameters, statistics, partials, *, blocks):
    (x, grad, *gates), (dx, *residual_grads) = images, results
    sums, coefficients = partials[:3], partials[3:]
    # As in the forward kernel.
    folds = jnp.dtype(dx.dtype).itemsize == 2

    def accumulate(turn, step):
        mean_ref, *sums_refs = sums

        def begin(channels):
            mean = parameters[1][blocks.group_at(turn, channels)]
            mean_ref[channels] = jnp.broadcast_to(mean, blocks.tile)
            for sums_ref in sums_refs:
                sums_ref[channels] = jnp.zeros(blocks.tile, jnp.float32)

        pl.when(step == 0)(lambda: blocks.for_each_group(begin, at_once=8))
        wide_ref = grad.wide_vmem.at[step] if blocks.widens else None
        refs = x.block(turn, step), grad.block(turn, step), wide_ref, [gate.block(turn, step) for gate in gates]
        blocks.for_each_group(functools.partial(_accumulate, blocks, *refs, sums))

    def finish(turn):
        of_group = functools.partial(_finish, blocks, parameters, statistics, sums[1:], coefficients, folds, turn)
        blocks.for_each_group(of_group, at_once=8)

    def write(turn, step):
        x_ref, dx_ref = x.block(turn, step), dx.block(turn, step)
        grad_ref = grad.wide_vmem.at[step] if blocks.widens else grad.block(turn, step)
        gate_refs = [] if blocks.kept else [gate.block(turn, step) for gate in gates]
        residual_refs = [residual.block(turn, step) for residual in residual_grads]

        def group(channels):
            mean, factor, slope, offset = (ref[channels] for ref in coefficients)

            def differentiate(at):
                d = _gated(grad_ref, gate_refs, at)
                values = x_ref[at].astype(jnp.float32)
                dx_ref[at] = (factor * d + ((values if folds else values - mean) * slope + offset)).astype(dx_ref.dtype)
                for residual_ref in residual_refs:
                    residual_ref[at] = d.astype(residual_ref.dtype)

            blocks.fold(channels, differentiate)

        blocks.for_each_group(group)

    again = ([x, grad, *gates], [x], [])[blocks.kept]
    pass_twice(blocks, Phase(images, [], accumulate), finish, Phase(again, results, write))


def _accumulate(blocks, x_ref, grad_ref, wide_ref, gate_refs, sums, channels):
    """Adds a group of a block to its two sums, and keeps the gradient behind the activation."""
    mean_ref, *sums_refs = sums
    mean = mean_ref[channels]

    def terms(at):
        d = _gated(grad_ref, gate_refs, at)
        centred = x_ref[at].astype(jnp.float32) - mean
        if wide_ref is not None:
            # The compiler unpacks a value once for each of its uses; this one is loaded for the second.
            wide_ref[at] = d
            return d * centred, wide_ref[at]
        if gate_refs and blocks.kept:
            grad_ref[at] = d.astype(grad_ref.dtype)
        return d * centred, d

    blocks.fold(channels, terms, *sums_refs)


def _gated(grad_ref, gate_refs, at):
    """Returns a tile of the gradient behind the activation."""
    d = grad_ref[at].astype(jnp.float32)
    for gate_ref in gate_refs:
        d = jnp.where(gate_ref[at].astype(jnp.float32) > 0, d, 0.0)
    return d


def _finish(blocks, parameters, statistics, sums, coefficients, folds, turn, channels):
    """Computes the sums of a group of channels, and what dx needs of them: `mean`, `factor`, `slope` and `offset`.

    With x_hat = (x - mean) inv_std, and means over the elements of a channel:
    dx = scale inv_std (d - mean(d) - x_hat mean(d x_hat)) + (grad_mean + 2 (x - mean) grad_variance) / elements
       = factor d + (x - mean) slope + offset
    """
    at = blocks.group_at(turn, channels)
    scale, mean, inv_std, grad_mean, grad_variance = (ref[at] for ref in parameters)
    dscale, dbias = (blocks.total(sums_ref[channels]) for sums_ref in sums)
    dscale = dscale * inv_std
    for ref, values in zip(statistics, (dscale, dbias), strict=True):
        ref[at] = values
    factor = scale * inv_std
    slope = (2 * grad_variance - factor * inv_std * dscale) / blocks.elements
    offset = (grad_mean - factor * dbias) / blocks.elements
    found = mean, factor, slope, offset - mean * slope if folds else offset
    for ref, values in zip(coefficients, found, strict=True):
        ref[channels] = jnp.broadcast_to(values, blocks.tile)


def run(operands, *, axis_name, activation, residual_grad, config, interpret=False):
    """Launches the kernel; see `pallas_kernels.kernel.Kernel.run`."""
    grad, x, scale, mean, inv_std, grad_mean, grad_variance, gate = operands
    blocks = blocks_of(x.shape, x.dtype, 2, **config)
    of_grad = "wide" if blocks.widens else "kept" if blocks.kept else "both"
    of_gate = "once" if blocks.kept else "both"
    # A gate may be a mask of bools, which Mosaic does not tile like x.
    gates = [] if gate is None else [(gate.astype(x.dtype), of_gate)]
    dx, *residual, dscale, dbias = launch(
        functools.partial(_kernel, blocks=blocks),
        "batch_norm_backward",
        blocks,
        [(x, "kept" if blocks.kept == 2 else "both"), (grad, of_grad), *gates],
        [scale, mean, inv_std, grad_mean, grad_variance],
        1 + residual_grad,
        interpret,
    )
    grads = blocks.from_view(dx, x.shape), dscale.reshape(scale.shape), dbias.reshape(scale.shape)
    return (*grads, blocks.from_view(residual[0], x.shape)) if residual_grad else grads


def refuses(hardware, operands, *, axis_name, activation, residual_grad, **_) -> str | None:
    """Tells why the kernel cannot run; see `pallas_kernels.kernel.Kernel.refuses`."""
    if reason := batch_norm.refusal_of(operands.x, axis_name, activation):
        return reason
    return batch_norm.refusal_without(configs(hardware, operands, residual_grad=residual_grad), operands.x)


def configs(hardware, operands, *, residual_grad, **_):
    """Returns block sizes worth trying; see `pallas_kernels.kernel.Kernel.configs`."""
    # Images are the gradient, x, dx, a gate and the residual's gradient.
    images = 3 + (operands.gate is not None) + residual_grad
    widens = (hardware.memory_bytes_per_s or 0) > _WIDENS_BYTES_PER_S
    return batch_norm.configs_of(hardware, operands.x, 2, images, widens)


def kind(hardware, operands, *, activation, residual_grad, **_):
    """Returns what makes cases alike; see `pallas_kernels.kernel.Kernel.kind`."""
    (config, *_) = configs(hardware, operands, residual_grad=residual_grad)
    options = ["gate"] * (operands.gate is not None) + ["residual"] * residual_grad
    return batch_norm.kind_of(operands.x, 2, config, activation, options)


KERNEL = Kernel(
    name="mosaic_tpu",
    platform="tpu",
    run=run,
    refuses=refuses,
    takes=BACKWARD_FIELDS,
    configs=configs,
    kind=kind,
)
