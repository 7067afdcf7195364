"""The documented operators for a split vocabulary on Hopper: statistics and gradients of one device's part."""

import math

import jax.numpy as jnp

from pallas_kernels.gpu.linear_cross_entropy import gradients, statistics, tiles
from pallas_kernels.gpu.linear_cross_entropy.gradients import CotangentTerms
from pallas_kernels.kernel import Kernel


def run_max_sum(x, weight, target, start, end, *, return_logits, config, interpret=False):
    """Launches the kernel of `fused_linear_online_max_sum`; see `pallas_kernels.kernel.Kernel.run`."""
    rows = x.shape[:-1]
    mask = (target < start) | (target >= end)
    masked_target = jnp.where(mask, jnp.zeros_like(target), target - start)
    columns = jnp.where(mask, -1, masked_target.astype(jnp.int32)).reshape(-1)
    found = statistics.reduced_rows(
        x.reshape(-1, x.shape[-1]).astype(weight.dtype),
        weight,
        columns,
        softcap=None,
        metrics=False,
        config=config,
        interpret=interpret,
    )
    maximum, less_one, predicted = (values.reshape(rows) for values in (found.maximum, found.less_one, found.label))
    return maximum, 1 + less_one, predicted, mask, masked_target, None


def refuses_max_sum(hardware, x, weight, target, start, end, *, return_logits) -> str | None:
    """Says why the kernel cannot run; see `pallas_kernels.kernel.Kernel.refuses`."""
    if return_logits:
        return "the logits are asked for, which the kernel does not write"
    return tiles.refuses_linear(hardware, x, weight)


def configs_max_sum(hardware, x, weight, target, start, end, *, return_logits):
    """Lists tiles, stages and splits worth trying; see `pallas_kernels.kernel.Kernel.configs`."""
    return statistics.launch_configs(hardware, math.prod(x.shape[:-1]), *weight.shape)


def run_grad(grad, x, weight, mask, masked_target, maximum, total, softmax, *, config, interpret=False):
    """Launches the kernel of `fused_linear_cross_entropy_loss_grad`; see `pallas_kernels.kernel.Kernel.run`."""
    grad, zeros = grad.astype(jnp.float32), jnp.zeros(grad.shape, jnp.float32)
    terms = CotangentTerms(grad, zeros, jnp.where(mask, zeros, -grad), zeros, maximum, jnp.log(total))
    x_grad, weight_grad, _ = gradients.linear_gradients(
        CotangentTerms(*(values.astype(jnp.float32).reshape(-1) for values in terms)),
        x.reshape(-1, x.shape[-1]),
        weight,
        masked_target.astype(jnp.int32).reshape(-1),
        softcap=None,
        has_slope=False,
        needs=(True, True, False),
        config=config,
        interpret=interpret,
    )
    assert x_grad is not None  # it was asked for
    return x_grad.reshape(x.shape), weight_grad


def refuses_grad(hardware, grad, x, weight, mask, masked_target, maximum, total, softmax) -> str | None:
    """Tells why the kernel cannot run; see `pallas_kernels.kernel.Kernel.refuses`."""
    if softmax is not None:
        return "the softmax is given, so there are no logits to compute"
    return tiles.refuses_linear(hardware, x, weight)


def configs_grad(hardware, grad, x, weight, *_):
    """Lists tiles, stages, splits and chunks worth trying; see `pallas_kernels.kernel.Kernel.configs`."""
    return gradients.launch_configs(hardware, math.prod(x.shape[:-1]), *weight.shape)


MAX_SUM_KERNEL = Kernel(
    name="mosaic_gpu",
    platform="cuda",
    run=run_max_sum,
    refuses=refuses_max_sum,
    configs=configs_max_sum,
    interpreter_is_pure=False,
)
GRAD_KERNEL = Kernel(
    name="mosaic_gpu",
    platform="cuda",
    run=run_grad,
    refuses=refuses_grad,
    configs=configs_grad,
    interpreter_is_pure=False,
)
