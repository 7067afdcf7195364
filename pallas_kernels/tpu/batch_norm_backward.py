"""Batch norm on TPU, backward: x, the gradient and the gate are read once for two sums, if VMEM can keep them.

As in the forward kernel, images pass twice, and a block of channels that fits is kept in VMEM in between: x, and the
gradient behind the activation, to which the gate has been applied. That gradient is only stored if it is a result: the
gradient of the residual.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.batch_norm_refusals import IDENTITY
from pallas_kernels.kernel import Kernel
from pallas_kernels.tpu import batch_norm
from pallas_kernels.tpu.batch_norm_blocks import blocks_of, launch

# Bytes a second of HBM for each TensorCore. A register of bfloat16 takes 10 to 13 cycles in the two phases, which
# compute in float32; to read it and the gradient's and to write dx takes 13 on v6e (1.64e12), but 7 on v7x (3.7e12).
_MOST_RATE = 2e12


def _kernel(*refs, blocks, gated, residuals):
    x_ref, grad_ref, *gate_refs = refs[: 2 + gated]
    _scale_ref, mean_ref, inv_std_ref, *_others = statistics_refs = refs[2 + gated :][:5]
    dx_ref, *residual_refs = refs[7 + gated :][: 1 + residuals]
    dscale_ref, dbias_ref, *scratch = refs[8 + gated + residuals :]
    kept_refs, (partial_scale_ref, partial_bias_ref) = scratch[: blocks.kept], scratch[blocks.kept :]
    phase, step = pl.program_id(2), pl.program_id(3) * blocks.steps[2] + pl.program_id(4)

    def gated_grad(at):
        d = grad_ref[0, *at]
        for gate_ref in gate_refs:
            d = jnp.where(gate_ref[0, *at].astype(jnp.float32) > 0, d.astype(jnp.float32), 0.0)
        return d.astype(jnp.float32)

    @pl.when((phase == 0) & (step == 0))
    def _():
        partial_scale_ref[...] = jnp.zeros_like(partial_scale_ref)
        partial_bias_ref[...] = jnp.zeros_like(partial_bias_ref)

    @pl.when(phase == 0)
    def _():
        def group(channels):
            mean = blocks.of_group(mean_ref, channels)

            def add(at, sums):
                x, d = x_ref[0, *at], gated_grad(at)
                for kept_ref, values in zip(kept_refs, (d, x), strict=False):
                    kept_ref[step, *at] = values.astype(kept_ref.dtype)
                return sums[0] + d * (x.astype(jnp.float32) - mean), sums[1] + d

            sums = partial_scale_ref[channels], partial_bias_ref[channels]
            partial_scale_ref[channels], partial_bias_ref[channels] = blocks.fold(channels, add, sums)

        blocks.for_each_group(group)

    @pl.when((phase == 0) & (step == blocks.steps_of_a_phase - 1))
    def _():
        def sums(channels):
            at = blocks.group_at(channels)
            dscale_ref[at] = blocks.total(partial_scale_ref[channels]) * inv_std_ref[at]
            dbias_ref[at] = blocks.total(partial_bias_ref[channels])

        blocks.for_each_group(sums)

    @pl.when(phase == 1)
    def _():
        def group(channels):
            factor, mean, slope, offset = _coefficients(blocks, channels, (*statistics_refs, dscale_ref, dbias_ref))

            def differentiate(at, _):
                d = kept_refs[0][step, *at].astype(jnp.float32) if blocks.kept else gated_grad(at)
                x = kept_refs[1][step, *at] if blocks.kept == 2 else x_ref[0, *at]
                dx = factor * d + (x.astype(jnp.float32) - mean) * slope + offset
                dx_ref[0, *at] = dx.astype(dx_ref.dtype)
                for residual_ref in residual_refs:
                    residual_ref[0, *at] = d.astype(residual_ref.dtype)

            blocks.fold(channels, differentiate, None)

        blocks.for_each_group(group)


def _coefficients(blocks, channels, refs):
    """`factor`, `mean`, `slope` and `offset` in `dx = factor d + (x - mean) slope + offset`.

    With x_hat = (x - mean) inv_std, and means over the elements of a channel:
    dx = scale inv_std (d - mean(d) - x_hat mean(d x_hat)) + (grad_mean + 2 (x - mean) grad_variance) / elements
    """
    scale, mean, inv_std, grad_mean, grad_variance, dscale, dbias = (blocks.of_group(ref, channels) for ref in refs)
    factor = scale * inv_std
    slope = (2 * grad_variance - factor * inv_std * dscale) / blocks.elements
    return factor, mean, slope, (grad_mean - factor * dbias) / blocks.elements


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
    statistics = jax.ShapeDtypeStruct(blocks.statistics_shape, jnp.float32)
    of_grad = "first" if blocks.kept else "both"
    dx, *residual, dscale, dbias = launch(
        functools.partial(_kernel, blocks=blocks, gated=len(gates), residuals=int(residual_grad)),
        "batch_norm_backward",
        blocks,
        [(x, "first" if blocks.kept == 2 else "both"), (grad, of_grad), *((array, of_grad) for array in gates)],
        [scale, mean, inv_std, grad_mean, grad_variance],
        [*[jax.ShapeDtypeStruct(blocks.view, x.dtype)] * (1 + residual_grad), statistics, statistics],
        2,
        interpret,
    )
    grads = blocks.from_view(dx, x.shape), dscale.reshape(scale.shape), dbias.reshape(scale.shape)
    return (*grads, blocks.from_view(residual[0], x.shape)) if residual_grad else grads


def refuses(hardware, grad, x, *operands, axis_name, **params) -> str | None:
    """Why the kernel cannot run; see `pallas_kernels.kernel.Kernel.refuses`."""
    if jnp.dtype(x.dtype).itemsize == 2 and (hardware.memory_bytes_per_s or 0) / (hardware.cores or 1) > _MOST_RATE:
        return f"{hardware.name} reads HBM faster than its vector unit computes on bfloat16 in float32; XLA's is faster"
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
