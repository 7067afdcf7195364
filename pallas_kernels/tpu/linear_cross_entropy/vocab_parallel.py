"""The documented operators for a split vocabulary on TPU, by the kernels for a whole vocabulary."""

import jax.numpy as jnp

from pallas_kernels.kernel import Kernel
from pallas_kernels.tpu.linear_cross_entropy import gradients, statistics
from pallas_kernels.tpu.linear_cross_entropy.tiles import class_or_none


def _run_max_sum(x, weight, target, start, end, *, return_logits, config, interpret=False):
    mask = (target < start) | (target >= end)
    masked_target = jnp.where(mask, jnp.zeros_like(target), target - start)
    rows = statistics.online_statistics(
        x.reshape(-1, x.shape[-1]),
        weight,
        _label(mask, masked_target, weight),
        softcap=None,
        metrics=False,
        config=config,
        interpret=interpret,
    )
    maximum, less_one, predicted = (row.reshape(target.shape) for row in rows[:3])
    return maximum, 1 + less_one, predicted, mask, masked_target, None


def _label(mask, masked_target, weight):
    return jnp.where(mask, -1, class_or_none(masked_target, weight.shape[0])).reshape(-1)


def _max_sum_refuses(hardware, x, weight, target, start, end, *, return_logits) -> str | None:
    if return_logits:
        return "the kernel computes no logits that could be returned"
    return statistics.refusal(hardware, x, weight)


def _run_grad(grad, x, weight, mask, masked_target, maximum, total, softmax, *, config, interpret=False):
    grad, maximum, total = (row.reshape(-1).astype(jnp.float32) for row in (grad, maximum, total))
    zeros = jnp.zeros_like(grad)
    # softmax = exp(z - maximum) / total. The kernel computes exp(z - maximum - log_sum_exp): with 0 for the logarithm,
    # the factor takes the divisor.
    rows = (grad / total, zeros, -grad, zeros, maximum, zeros, _label(mask, masked_target, weight))
    x_grad, weight_grad, _, _ = gradients.linear_gradients(
        rows,
        x.reshape(-1, x.shape[-1]),
        weight,
        needs=(True, True, False, False),
        softcap=None,
        metrics=False,
        config=config,
        interpret=interpret,
    )
    return x_grad.reshape(x.shape), weight_grad


def _grad_refuses(hardware, grad, x, weight, mask, masked_target, maximum, total, softmax) -> str | None:
    if softmax is not None:
        return "the softmax was given, and the kernel would compute it again: give logits_max and sum_exp_logits"
    for name, row in {"grad": grad, "logits_max": maximum, "sum_exp_logits": total}.items():
        if jnp.dtype(row.dtype).name == "float64":
            return f"Mosaic TPU computes in float32; {name} is float64"
    return gradients.refusal(hardware, x, weight)


def _grad_configs(hardware, grad, x, weight, *operands):
    return gradients.configs(hardware, x, weight)


def _max_sum_configs(hardware, x, weight, *operands, **params):
    return statistics.launch_configs(hardware, x, weight)


MAX_SUM_KERNEL = Kernel("mosaic_tpu", "tpu", _run_max_sum, _max_sum_refuses, _max_sum_configs)
GRAD_KERNEL = Kernel("mosaic_tpu", "tpu", _run_grad, _grad_refuses, _grad_configs)
