"""The gradients of linear cross entropy on TPU, from the terms of the logits' cotangent for each row."""

import jax.numpy as jnp

from pallas_kernels.kernel import Kernel
from pallas_kernels.tpu.linear_cross_entropy import gradients
from pallas_kernels.tpu.linear_cross_entropy.tiles import class_or_none


def run(
    softmax,
    softmax_slope,
    label_term,
    target_term,
    maximum,
    log_sum_exp,
    x,
    weight,
    bias,
    labels,
    shared_target,
    row_target,
    logits,
    *,
    softcap,
    metrics,
    needs,
    config,
    interpret=False,
    **_,
):
    """Launches the kernels; see `pallas_kernels.kernel.Kernel.run`."""
    # Without metrics the slope is not computed, and `metrics` keeps the kernel from reading it.
    batch_shape, slope = x.shape[:-1], softmax_slope if metrics else jnp.zeros_like(softmax)
    label = class_or_none(labels, weight.shape[0])
    x_grad, weight_grad, bias_grad, shared_grad = gradients.linear_gradients(
        [row.reshape(-1) for row in (softmax, slope, label_term, target_term, maximum, log_sum_exp, label)],
        x.reshape(-1, x.shape[-1]),
        weight,
        bias,
        shared_target,
        needs=needs,
        softcap=softcap,
        metrics=metrics,
        config=config,
        interpret=interpret,
    )
    return (
        x_grad.reshape(*batch_shape, x_grad.shape[-1]),
        weight_grad,
        bias_grad.astype(bias.dtype),
        shared_grad.astype(shared_target.dtype),
        jnp.zeros((*batch_shape, 0), row_target.dtype),
    )


def refuses(hardware, *operands, **params) -> str | None:
    """Why the kernels cannot run; see `pallas_kernels.kernel.Kernel.refuses`."""
    x, weight, (row_target, logits) = operands[6], operands[7], operands[11:]
    if row_target.shape[-1]:
        return "probabilities of every class are an array of the logits' size, which the kernel is there to avoid"
    if logits.shape[-1]:
        return "the logits were kept, and the kernel would compute them again: use strategy='recompute'"
    return gradients.refusal(hardware, x, weight)


def configs(hardware, *operands, **params):
    """Block sizes worth trying; see `pallas_kernels.kernel.Kernel.configs`."""
    return gradients.configs(hardware, *operands[6:8])


KERNEL = Kernel(name="mosaic_tpu", platform="tpu", run=run, refuses=refuses, configs=configs)
