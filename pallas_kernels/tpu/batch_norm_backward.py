"""Batch norm on TPU, backward: x, the gradient and the gate are read once for two sums, if VMEM can keep them.

As in the forward kernel, images pass twice, and a block of channels that fits is kept in VMEM in between: x, and the
gradient behind the activation, to which the gate has been applied. That gradient is only stored if it is a result: the
gradient of the residual.
"""

import functools

import jax.numpy as jnp

from pallas_kernels.batch_norm_refusals import IDENTITY
from pallas_kernels.kernel import Kernel
from pallas_kernels.tpu import batch_norm
from pallas_kernels.tpu.batch_norm_blocks import blocks_of
from pallas_kernels.tpu.batch_norm_streams import launch, pass_over


def _kernel(images, results, parameters, statistics, partials, *, blocks):
    (x, grad, *gates), (dx, *residual_grads) = images, results
    mean_ref, *sums_refs, _ = partials
    for stream in images:
        stream.begin()

    def begin(channels):
        mean_ref[channels] = jnp.broadcast_to(parameters[1][blocks.group_at(channels)], blocks.tile)
        for sums_ref in sums_refs:
            sums_ref[channels] = jnp.zeros(blocks.tile, jnp.float32)

    blocks.for_each_group(begin, at_once=8)

    def step_of_sums(step):
        x_ref, grad_ref, gate_refs = x.block(step), grad.block(step), [gate.block(step) for gate in gates]

        def group(channels):
            mean = mean_ref[channels]

            def add(at, sums):
                d = _gated(grad_ref, gate_refs, at)
                if gate_refs and blocks.kept:
                    grad_ref[at] = d.astype(grad_ref.dtype)
                return sums[0] + d * (x_ref[at].astype(jnp.float32) - mean), sums[1] + d

            blocks.fold(channels, add, *sums_refs)

        blocks.for_each_group(group)

    pass_over(images, [], step_of_sums)
    again = ([x, grad, *gates], [x], [])[blocks.kept]
    for stream in again:
        stream.begin()
    # As in the forward kernel.
    folds = jnp.dtype(dx.dtype).itemsize == 2
    finish = functools.partial(_finish, blocks, parameters, statistics, partials, folds)
    blocks.for_each_group(finish, at_once=8)

    def step_of_dx(step):
        x_ref, grad_ref, dx_ref = x.block(step), grad.block(step), dx.block(step)
        gate_refs = [] if blocks.kept else [gate.block(step) for gate in gates]
        residual_refs = [residual.block(step) for residual in residual_grads]

        def group(channels):
            mean, factor, slope, offset = (ref[channels] for ref in partials)

            def differentiate(at, _):
                d = _gated(grad_ref, gate_refs, at)
                values = x_ref[at].astype(jnp.float32)
                dx_ref[at] = (factor * d + ((values if folds else values - mean) * slope + offset)).astype(dx_ref.dtype)
                for residual_ref in residual_refs:
                    residual_ref[at] = d.astype(residual_ref.dtype)

            blocks.fold(channels, differentiate)

        blocks.for_each_group(group)

    pass_over(again, results, step_of_dx)


def _gated(grad_ref, gate_refs, at):
    """A tile of the gradient behind the activation."""
    d = grad_ref[at].astype(jnp.float32)
    for gate_ref in gate_refs:
        d = jnp.where(gate_ref[at].astype(jnp.float32) > 0, d, 0.0)
    return d


def _finish(blocks, parameters, statistics, partials, folds, channels):
    """The sums of a group of channels, and in place of its partial ones `factor`, `slope` and `offset`.

    With x_hat = (x - mean) inv_std, and means over the elements of a channel:
    dx = scale inv_std (d - mean(d) - x_hat mean(d x_hat)) + (grad_mean + 2 (x - mean) grad_variance) / elements
       = factor d + (x - mean) slope + offset
    """
    at = blocks.group_at(channels)
    scale, mean, inv_std, grad_mean, grad_variance = (ref[at] for ref in parameters)
    dscale, dbias = (blocks.total(sums_ref[channels]) for sums_ref in partials[1:3])
    dscale = dscale * inv_std
    for ref, values in zip(statistics, (dscale, dbias), strict=True):
        ref[at] = values
    factor = scale * inv_std
    slope = (2 * grad_variance - factor * inv_std * dscale) / blocks.elements
    offset = (grad_mean - factor * dbias) / blocks.elements
    for ref, values in zip(partials[1:], (factor, slope, offset - mean * slope if folds else offset), strict=True):
        ref[channels] = jnp.broadcast_to(values, blocks.tile)


def run(
    grad,
    x,
    scale,
    mean,
    inv_std,
    grad_mean,
    grad_variance,
    *gate,
    axis_name,
    config,
    activation=IDENTITY,
    residual_grad=False,
    interpret=False,
):
    """Launches the kernel; see `pallas_kernels.kernel.Kernel.run`."""
    blocks = blocks_of(x.shape, x.dtype, 2, **config)
    # A gate may be a mask of bools, which Mosaic does not tile like x. The identity has no gate to read.
    gates = [array.astype(x.dtype) for array in gate if activation[0] == "relu"]
    of_grad = "kept" if blocks.kept else "both"
    of_gate = "once" if blocks.kept else "both"
    dx, *residual, dscale, dbias = launch(
        functools.partial(_kernel, blocks=blocks),
        "batch_norm_backward",
        blocks,
        [(x, "kept" if blocks.kept == 2 else "both"), (grad, of_grad), *((array, of_gate) for array in gates)],
        [scale, mean, inv_std, grad_mean, grad_variance],
        1 + residual_grad,
        interpret,
    )
    grads = blocks.from_view(dx, x.shape), dscale.reshape(scale.shape), dbias.reshape(scale.shape)
    return (*grads, blocks.from_view(residual[0], x.shape)) if residual_grad else grads


def refuses(hardware, grad, x, *operands, axis_name, **params) -> str | None:
    """Why the kernel cannot run; see `pallas_kernels.kernel.Kernel.refuses`."""
    return batch_norm.refuses(hardware, x, axis_name=axis_name, **params)


def configs(hardware, grad, x, *operands, residual_grad=False, **_):
    """Block sizes worth trying; see `pallas_kernels.kernel.Kernel.configs`."""
    # Images are the gradient, x, dx, a gate, which follows the five statistics, and the residual's gradient.
    return batch_norm.configs_of(hardware, x, 2, images=3 + len(operands[5:]) + residual_grad)


KERNEL = Kernel(name="mosaic_tpu", platform="tpu", run=run, refuses=refuses, configs=configs)
RESIDUAL_KERNEL = Kernel(
    name="mosaic_tpu",
    platform="tpu",
    run=functools.partial(run, residual_grad=True),
    refuses=refuses,
    configs=functools.partial(configs, residual_grad=True),
)
