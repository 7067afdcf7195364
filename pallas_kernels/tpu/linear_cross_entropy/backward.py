"""The gradients of linear cross entropy on TPU, from the terms of the logits' cotangent for each row."""

import jax.numpy as jnp

from pallas_kernels.kernel import Kernel
from pallas_kernels.tpu.linear_cross_entropy import gradients
from pallas_kernels.tpu.linear_cross_entropy.statistics import label_refusal
from pallas_kernels.tpu.linear_cross_entropy.tiles import class_or_none


def run(terms, rows, columns, *, softcap, needs, config, interpret=False, **_):
    """Launches the kernels; see `pallas_kernels.kernel.Kernel.run`."""
    x, weight, zeros = rows.x.astype(columns.weight.dtype), columns.weight, jnp.zeros_like(terms.softmax)
    slope, label, target = (zeros if term is None else term for term in (terms.slope, terms.label, terms.target))
    by_row = (terms.softmax, slope, label, target, terms.maximum, terms.log_sum_exp)
    x_grad, weight_grad, bias_grad, target_grad = gradients.linear_gradients(
        [row.reshape(-1) for row in (*by_row, class_or_none(rows.labels, weight.shape[0]))],
        x.reshape(-1, x.shape[-1]),
        weight,
        bias=columns.bias,
        target=columns.class_targets,
        needs=(needs.x, needs.weight, needs.bias, needs.class_targets),
        softcap=softcap,
        metrics=terms.slope is not None,
        config=config,
        interpret=interpret,
    )
    x_grad = None if x_grad is None else x_grad.reshape(x.shape).astype(rows.x.dtype)
    bias_grad = None if bias_grad is None else bias_grad.astype(columns.bias.dtype)
    if target_grad is not None:
        target_grad = (target_grad - jnp.sum(target * terms.log_sum_exp)).astype(columns.class_targets.dtype)
    return (x_grad, None, None), (weight_grad, bias_grad, target_grad)


def refuses(hardware, terms, rows, columns, **params) -> str | None:
    """Tells why the kernels cannot run; see `pallas_kernels.kernel.Kernel.refuses`."""
    return label_refusal(rows) or gradients.refusal(hardware, rows.x, columns.weight)


def configs(hardware, terms, rows, columns, **params):
    """Returns block sizes worth trying; see `pallas_kernels.kernel.Kernel.configs`."""
    return gradients.configs(hardware, rows.x, columns.weight)


TAKES = frozenset({"x", "labels", "weight", "bias", "class_targets"})
KERNEL = Kernel(
    name="mosaic_tpu",
    platform="tpu",
    run=run,
    refuses=refuses,
    configs=configs,
    takes=TAKES | {"softmax", "maximum", "log_sum_exp", "label", "target", "slope"},
    yields_to=frozenset({"scale"}),
)
