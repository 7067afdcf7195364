"""The operators for row statistics of a linear layer's logits, from which every cross entropy follows."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxops._checks.dtypes import accumulation_dtype
from jaxops._checks.errors import require
from jaxops._primitive.derivative import Active, Arrays, Derivative
from jaxops._primitive.operator import Operator
from jaxops.linear_cross_entropy.logits import (
    Needs,
    RowStatistics,
    Targets,
    is_present,
    linear_logits,
    row_statistics,
)
from jaxops.linear_cross_entropy.patterns import LOGITS_CROSS_ENTROPY
from jaxops.linear_cross_entropy.tiled import tiled_gradients, tiled_statistics
from pallas_kernels.gpu.linear_cross_entropy import gradients as gpu_gradients
from pallas_kernels.gpu.linear_cross_entropy import statistics as gpu_statistics
from pallas_kernels.tpu.linear_cross_entropy import backward as tpu_backward
from pallas_kernels.tpu.linear_cross_entropy import statistics as tpu_statistics

_OPERANDS = "... h, v h, v, ..., v, ... v"
_RESULTS = "..., ..., ..., ..., ..., ..."


# The position of the labels among the operands. Being integers, they have no gradient.
LABELS = 3


def linear_row_statistics(
    x: jax.Array,
    weight: jax.Array,
    bias: jax.Array,
    targets: Targets,
    *,
    softcap: float | None,
    tile_logits: int | None,
    keep_logits: bool,
    metrics: bool,
) -> RowStatistics:
    """The statistics of the logits z = x weight^T + bias, which are never needed all at once.

    Args:
      x: (..., H), with the dtype of the weight. A wider x is rounded before any product; its gradient is not.
      weight: (V, H).
      bias: (V,), or empty for none.
      targets: labels (...), columns of z. Any other integer means that the row has no label; `SKIPPED` means that its x
        is zero as well. Weights of the columns for `target_logit`: `shared` (V,) by all rows, or empty; per `row` (...,
        V), or (..., 0).
      softcap: z becomes softcap tanh(z / softcap).
      tile_logits: about how many elements of z exist at a time; None for all.
      keep_logits: whether reverse mode keeps z between its passes (three matrix products) or computes it twice (four).
      metrics: whether to compute `mean_logit` and `prediction`.
    """
    params = {"softcap": softcap, "tile_logits": tile_logits, "keep_logits": keep_logits, "metrics": metrics}
    return RowStatistics(*_STATISTICS(x, weight, bias, *targets, **params))


def check_linear(x: Any, weight: Any) -> None:
    """Checks a linear layer's operands, in the words of the public function."""

    def rule(condition: bool, argument: str, must: str, got: Any) -> None:
        require(condition, "linear_cross_entropy", argument, must, got)

    rule(
        x.ndim >= 1 and bool(jnp.issubdtype(x.dtype, jnp.floating)),
        "x",
        "be a floating-point array of shape (..., H)",
        x,
    )
    rule(
        weight.ndim == 2 and weight.shape[1] == x.shape[-1],
        "weight",
        f"have shape (V, {x.shape[-1]}), as x has features",
        weight,
    )
    rule(weight.shape[0] > 0, "weight", "have a vocabulary of at least 1", weight)


def check(x: Any, weight: Any, *_: Any, **__: Any) -> None:
    """The primitives' check; the public function has checked whatever the other operands are made from."""
    check_linear(x, weight)


def _reference(*operands: jax.Array, keep_logits: bool, **params: Any) -> Arrays:
    return tiled_statistics(*operands, **params)


def _reference_with_logits(
    x: jax.Array, weight: jax.Array, bias: jax.Array, *targets: jax.Array, softcap: float | None, metrics: bool
) -> Arrays:
    logits = linear_logits(x.astype(weight.dtype), weight, bias, softcap)
    return (*row_statistics(logits, Targets(*targets), metrics=metrics), logits)


def _linearize(operands: Sequence[jax.Array], active: Active, **params: Any) -> tuple[Arrays, Arrays]:
    if params["keep_logits"]:
        *statistics, logits = _WITH_LOGITS(*operands, softcap=params["softcap"], metrics=params["metrics"])
    else:
        statistics = list(_STATISTICS(*operands, **params))
        logits = jnp.zeros((*operands[0].shape[:-1], 0), accumulation_dtype(operands[0].dtype))
    return tuple(statistics), (*operands, *statistics, logits)


def _vjp(
    residuals: Sequence[jax.Array],
    cotangents: Sequence[jax.Array],
    active: Active,
    *,
    keep_logits: bool,
    **params: Any,
) -> list[jax.Array]:
    operands, rows, logits = residuals[:6], RowStatistics(*residuals[6:12]), residuals[12]
    # max_logit has no derivative, and prediction no cotangent.
    _, for_log_sum_exp, for_label, for_target, for_mean = cotangents[:5]
    # A row without a finite logit has no probabilities: exp(-inf - 0) = 0.
    log_sum_exp = jnp.where(rows.log_sum_exp == -jnp.inf, jnp.zeros_like(rows.log_sum_exp), rows.log_sum_exp)
    softmax = for_log_sum_exp + for_mean * (1 - rows.mean_logit)
    terms = (softmax, for_mean, for_label, for_target, rows.max_logit, log_sum_exp)
    needs = Needs(*active[:LABELS], *active[LABELS + 1 :])
    backward = _BACKWARD_OF_LOGITS if is_present(logits) else _BACKWARD
    x_grad, weight_grad, bias_grad, shared_grad, row_grad = backward(*terms, *operands, logits, needs=needs, **params)
    gradients = (x_grad, weight_grad, bias_grad, None, shared_grad, row_grad)
    return [gradient for gradient, a in zip(gradients, active, strict=True) if a and gradient is not None]


_BACKWARD = Operator(
    name="linear_cross_entropy_backward",
    signature=f"..., ..., ..., ..., ..., ..., {_OPERANDS}, ... v -> ... h, v h, v, v, ... v",
    check=lambda *operands, **_: None,
    reference=tiled_gradients,
    kernels=(tpu_backward.KERNEL, gpu_gradients.KERNEL),
)

# With the logits kept, a kernel would have nothing to gain.
_BACKWARD_OF_LOGITS = Operator(
    name="linear_cross_entropy_backward_of_logits",
    signature=_BACKWARD.signature,
    check=_BACKWARD.check,
    reference=tiled_gradients,
)

_WITH_LOGITS = Operator(
    name="linear_cross_entropy_with_logits",
    signature=f"{_OPERANDS} -> {_RESULTS}, ... v",
    check=check,
    reference=_reference_with_logits,
)

_STATISTICS = Operator(
    name="linear_cross_entropy",
    signature=f"{_OPERANDS} -> {_RESULTS}",
    check=check,
    reference=_reference,
    derivative=Derivative(vjp=_vjp, linearize=_linearize, residuals=f"{_OPERANDS}, {_RESULTS}, ... v"),
    kernels=(tpu_statistics.KERNEL, gpu_statistics.KERNEL),
    patterns=(LOGITS_CROSS_ENTROPY,),
)
