"""Batch norm on TPU, backward: one read of x, the gradient and the gate for two sums, one for the gradient of x.

Both reads apply the activation's derivative, so the gradient behind the activation is only stored if it is a result:
the gradient of the residual.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.batch_norm_refusals import IDENTITY
from pallas_kernels.kernel import Kernel
from pallas_kernels.tpu import batch_norm
from pallas_kernels.tpu.batch_norm import blocks_of, launch


def _kernel(grad_ref, scale_ref, mean_ref, inv_std_ref, grad_mean_ref, grad_variance_ref, x_ref, *refs, blocks, gated):
    gate_refs, (dx_ref, *residual_refs, dscale_ref, dbias_ref) = refs[:gated], refs[gated:]
    step = pl.program_id(3) * blocks.steps[2] + pl.program_id(4)
    d = grad_ref[...].astype(jnp.float32)
    for gate_ref in gate_refs:
        d = jnp.where(gate_ref[...].astype(jnp.float32) > 0, d, 0.0)
    centred = x_ref[...].astype(jnp.float32) - mean_ref[...]
    inv_std = inv_std_ref[...]

    @pl.when((pl.program_id(2) == 0) & (step == 0))
    def _():
        dscale_ref[...] = jnp.zeros_like(dscale_ref)
        dbias_ref[...] = jnp.zeros_like(dbias_ref)

    # dscale_ref and dbias_ref stay in VMEM while the block's images pass: the first phase sums them, the second reads
    # them. Only then are they written to HBM, as results.
    @pl.when(pl.program_id(2) == 0)
    def _():
        dbias_ref[...] += jnp.sum(d, blocks.reduced, keepdims=True)
        dscale_ref[...] += jnp.sum(d * centred, blocks.reduced, keepdims=True) * inv_std

    @pl.when(pl.program_id(2) == 1)
    def _():
        # With x_hat = (x - mean) inv_std, and means over the elements of a channel:
        # With x_hat = (x - mean) inv_std, and means over the elements of a channel:
        # dx = scale inv_std (d - mean(d) - x_hat mean(d x_hat)) + (grad_mean + 2 (x - mean) grad_variance) / elements
        elements = blocks.elements * blocks.steps[1] * blocks.steps[2]
        factor = scale_ref[...] * inv_std
        slope = (2 * grad_variance_ref[...] - factor * inv_std * dscale_ref[...]) / elements
        offset = (grad_mean_ref[...] - factor * dbias_ref[...]) / elements
        dx_ref[...] = (factor * d + centred * slope + offset).astype(dx_ref.dtype)
        for residual_ref in residual_refs:
            residual_ref[...] = d.astype(residual_ref.dtype)


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
    blocks = blocks_of(x.shape, x.dtype, config["block_elements"])
    # A gate may be a mask of bools, which Mosaic does not tile like x. The identity has no gate to read.
    gates = [array.astype(x.dtype) for array in gate if activation[0] == "relu"]
    statistics = jax.ShapeDtypeStruct(blocks.statistics_shape, jnp.float32)
    dx, *residual, dscale, dbias = launch(
        functools.partial(_kernel, blocks=blocks, gated=len(gates)),
        "batch_norm_backward",
        blocks,
        [(grad, True), (x, True), *((array, True) for array in gates)],
        [scale, mean, inv_std, grad_mean, grad_variance],
        [*[jax.ShapeDtypeStruct(blocks.view, x.dtype)] * (1 + residual_grad), statistics, statistics],
        interpret,
    )
    grads = blocks.from_view(dx, x.shape), dscale.reshape(scale.shape), dbias.reshape(scale.shape)
    return (*grads, blocks.from_view(residual[0], x.shape)) if residual_grad else grads


def refuses(hardware, grad, x, *operands, axis_name, **params) -> str | None:
    """Why the kernel cannot run; see `pallas_kernels.kernel.Kernel.refuses`."""
    return batch_norm.refuses(hardware, x, axis_name=axis_name, **params)


def configs(hardware, grad, x, *operands, **_):
    """Block sizes worth trying; see `pallas_kernels.kernel.Kernel.configs`."""
    return batch_norm.configs(hardware, x)


KERNEL = Kernel(name="mosaic_tpu", platform="tpu", run=run, refuses=refuses, configs=configs)
RESIDUAL_KERNEL = Kernel(
    name="mosaic_tpu",
    platform="tpu",
    run=functools.partial(run, residual_grad=True),
    refuses=refuses,
    configs=configs,
)
