"""Batch norm on NVIDIA GPUs from Hopper on, backward: one read for two sums, one for the gradient of x.

Both reads apply the activation's derivative, so the gradient behind the activation is only stored if it is a result:
the gradient of the residual. The thread blocks have the parts of the forward kernel.
"""

import math

import jax
import jax.numpy as jnp

from pallas_kernels.batch_norm_refusals import BACKWARD_FIELDS
from pallas_kernels.gpu import batch_norm
from pallas_kernels.gpu.batch_norm import Block, launch, tiling_of
from pallas_kernels.kernel import Kernel


def _passed(grad, gate):
    """Returns the gradient that the activation lets through."""
    for values in gate:
        grad = jnp.where(values > 0, grad, 0.0)
    return grad


def _sums_kernel(grad_gmem, x_gmem, mean_gmem, *refs, tiling, pin_layouts):
    *gate_gmem, sum_gmem, centred_sum_gmem = refs
    block = Block(tiling, pin_layouts)
    mean = block.parameter(mean_gmem)

    def load(i):
        return [block.load(ref, i) for ref in (grad_gmem, x_gmem, *gate_gmem)]

    def add(i, loaded, sums):
        grad, x, *gate = loaded
        d = block.new(i, _passed(grad, gate))
        return sums[0] + d, sums[1] + d * (x - mean)

    # Kept apart for each element of an access, in registers; threads add up only after the last access.
    sums = block.fold(load, add, (block.zeros(), block.zeros()))
    for ref, values in zip((sum_gmem, centred_sum_gmem), sums, strict=True):
        block.store_part(ref, block.total(values))


def _gradient_kernel(
    grad_gmem, x_gmem, mean_gmem, factor_gmem, slope_gmem, offset_gmem, *refs, gates, tiling, pin_layouts
):
    gate_gmem, (dx_gmem, *residual_gmem) = refs[:gates], refs[gates:]
    block = Block(tiling, pin_layouts)
    mean, factor, slope, offset = map(block.parameter, (mean_gmem, factor_gmem, slope_gmem, offset_gmem))

    def load(i):
        return [block.load(ref, i) for ref in (grad_gmem, x_gmem, *gate_gmem)]

    def differentiate(i, loaded, _):
        grad, x, *gate = loaded
        d = _passed(grad, gate)
        block.store(dx_gmem, i, factor * d + (x - mean) * slope + offset)
        for ref in residual_gmem:
            block.store(ref, i, d)

    block.fold(load, differentiate, None)


def run(operands, *, axis_name, activation, residual_grad, config, interpret=False):
    """Launches the kernels; see `pallas_kernels.kernel.Kernel.run`."""
    grad, x, scale, mean, inv_std, grad_mean, grad_variance, gate = operands
    tiling = tiling_of(x.shape, config["width"])
    # A gate may be a mask of bools.
    gates = [] if gate is None else [gate.astype(x.dtype).reshape(tiling.view)]
    images = [values.reshape(tiling.view) for values in (grad, x)]
    part = jax.ShapeDtypeStruct(tiling.parts_shape, jnp.float32)
    arrays = (*images, tiling.for_parts(mean), *gates)
    parts = launch(_sums_kernel, "batch_norm_sums", tiling, arrays, [part, part], interpret)
    sum_d, sum_d_centred = (jnp.sum(tiling.by_channel(values), 0).reshape(scale.shape) for values in parts)
    # With x_hat = (x - mean) inv_std, and means over the elements of a channel:
    # dx = scale inv_std (d - mean(d) - x_hat mean(d x_hat)) + (grad_mean + 2 (x - mean) grad_variance) / elements,
    # written as factor * d + slope * (x - mean) + offset with one number per channel each.
    elements = math.prod(x.shape) // tiling.channels
    factor = scale * inv_std
    slope = (2 * grad_variance - factor * jnp.square(inv_std) * sum_d_centred) / elements
    offset = (grad_mean - factor * sum_d) / elements
    parameters = [tiling.for_parts(values) for values in (mean, factor, slope, offset)]
    results = [jax.ShapeDtypeStruct(tiling.view, x.dtype)] * (1 + residual_grad)
    arrays = (*images, *parameters, *gates)
    dx, *residual = launch(
        _gradient_kernel, "batch_norm_backward", tiling, arrays, results, interpret, gates=len(gates)
    )
    grads = dx.reshape(x.shape), sum_d_centred * inv_std, sum_d
    return (*grads, residual[0].reshape(x.shape)) if residual_grad else grads


KERNEL = Kernel(
    name="mosaic_gpu",
    platform="cuda",
    run=run,
    refuses=batch_norm.refuses,
    takes=BACKWARD_FIELDS,
    configs=batch_norm.configs,
    interpreter_is_pure=False,
)
