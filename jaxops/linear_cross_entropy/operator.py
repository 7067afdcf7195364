"""The operators for row statistics of a linear layer's logits, from which every cross entropy follows."""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

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
    scaled,
    target_total,
)
from jaxops.linear_cross_entropy.patterns import LOGITS_CROSS_ENTROPY
from jaxops.linear_cross_entropy.tiled import tiled_gradients, tiled_statistics
from pallas_kernels.gpu.linear_cross_entropy import gradients as gpu_gradients
from pallas_kernels.gpu.linear_cross_entropy import statistics as gpu_statistics
from pallas_kernels.kernel import Kernel
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
    scale: jax.Array | None = None,
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
      scale: (...), by which the logits of each row are multiplied last, in their own dtype; 1 for a `SKIPPED` row. None
        means 1, and costs nothing.
    """
    params = {"softcap": softcap, "tile_logits": tile_logits, "keep_logits": keep_logits, "metrics": metrics}
    if scale is None:
        return RowStatistics(*_STATISTICS(x, weight, bias, *targets, **params))
    return RowStatistics(*_SCALED.statistics(x, weight, bias, *targets, scale, **params))


def known_row_statistics(
    x: jax.Array,
    weight: jax.Array,
    bias: jax.Array,
    targets: Targets,
    rows: RowStatistics,
    *,
    softcap: float | None,
    tile_logits: int | None,
) -> RowStatistics:
    """`linear_row_statistics` whose values are known already: they cost products only where they are differentiated.

    The statistics of labels and targets may be anything, if nothing reads them.
    """
    params = {"softcap": softcap, "tile_logits": tile_logits, "metrics": True}
    return RowStatistics(*_KNOWN(x, weight, bias, *targets, *map(jax.lax.stop_gradient, rows), **params))


def check_linear(x: Any, weight: Any, operator: str = "linear_cross_entropy") -> None:
    """Checks a linear layer's operands, in the words of the public function."""

    def rule(condition: bool, argument: str, must: str, got: Any) -> None:
        require(condition, operator, argument, must, got)

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
    x: jax.Array,
    weight: jax.Array,
    bias: jax.Array,
    labels: jax.Array,
    shared_target: jax.Array,
    row_target: jax.Array,
    *scale: jax.Array,
    softcap: float | None,
    metrics: bool,
) -> Arrays:
    logits = linear_logits(x.astype(weight.dtype), weight, bias, softcap)
    targets = Targets(labels, shared_target, row_target)
    return (*row_statistics(scaled(logits, scale), targets, metrics=metrics), logits)


class _Operators(NamedTuple):
    """The operators that compute and differentiate the statistics of rows: of plain logits, or of scaled ones."""

    statistics: Operator
    with_logits: Operator
    backward: Operator
    backward_of_logits: Operator


def _linearize(operands: Sequence[jax.Array], active: Active, **params: Any) -> tuple[Arrays, Arrays]:
    operators = _operators_of(operands)
    if params["keep_logits"]:
        *statistics, logits = operators.with_logits(*operands, softcap=params["softcap"], metrics=params["metrics"])
    else:
        statistics = list(operators.statistics(*operands, **params))
        logits = jnp.zeros((*operands[0].shape[:-1], 0), accumulation_dtype(operands[0].dtype))
    return tuple(statistics), (*operands, *statistics, logits)


def _vjp(
    residuals: Sequence[jax.Array],
    cotangents: Sequence[jax.Array],
    active: Active,
    *,
    keep_logits: bool,
    **params: Any,
) -> list[Any]:
    operands, rest = residuals[: len(active)], residuals[len(active) :]
    rows, logits, scale = RowStatistics(*rest[:6]), rest[6], operands[_UNSCALED:]
    # max_logit has no derivative, and prediction no cotangent.
    _, for_log_sum_exp, for_label, for_target, for_mean = cotangents[:5]
    # A row without a finite logit has no probabilities: exp(-inf - 0) = 0.
    log_sum_exp = jnp.where(rows.log_sum_exp == -jnp.inf, jnp.zeros_like(rows.log_sum_exp), rows.log_sum_exp)
    softmax = for_log_sum_exp + for_mean * (1 - rows.mean_logit)
    terms = (softmax, for_mean, for_label, for_target, rows.max_logit, log_sum_exp)
    needs = Needs(*active[:LABELS], *active[LABELS + 1 : _UNSCALED])
    operators = _operators_of(operands)
    backward = operators.backward_of_logits if is_present(logits) else operators.backward
    gradients = backward(*terms, *operands[:_UNSCALED], logits, *scale, needs=needs, **params)
    x_grad, weight_grad, bias_grad, shared_grad, row_grad, *along_logits = gradients
    of_operands: list[Any] = [x_grad, weight_grad, bias_grad, None, shared_grad, row_grad]
    if scale:
        # The scale's gradient is the sum over columns of the scaled logits' cotangent times the logits. The maximum is
        # added apart, times the cotangent's known sum: if that is zero, a large common offset costs no digits.
        targets = Targets(*operands[LABELS:_UNSCALED])
        is_column = (targets.labels >= 0) & (targets.labels < operands[1].shape[0])
        total = for_log_sum_exp + for_mean + is_column.astype(for_label.dtype) * for_label
        total = total + for_target * target_total(targets, for_target)
        of_operands.append((along_logits[0] + rows.max_logit * total) / scale[0])
    return of_operands


def _operators_of(operands: Sequence[Any]) -> _Operators:
    return _PLAIN if len(operands) == _UNSCALED else _SCALED


# How many operands there are without the scale, which is the last.
_UNSCALED = 6
_DERIVATIVE = functools.partial(Derivative, vjp=_vjp, linearize=_linearize)
_TERMS = "..., ..., ..., ..., ..., ..."
_GRADIENTS = "... h, v h, v, v, ... v"


def _backward(name: str, signature: str, kernels: tuple[Kernel, ...] = ()) -> Operator:
    return Operator(name, signature, lambda *operands, **_: None, tiled_gradients, kernels=kernels)


_BACKWARD = _backward(
    "linear_cross_entropy_backward",
    f"{_TERMS}, {_OPERANDS}, ... v -> {_GRADIENTS}",
    (tpu_backward.KERNEL, gpu_gradients.KERNEL),
)

# With the logits kept, a kernel would have nothing to gain.
_BACKWARD_OF_LOGITS = _backward("linear_cross_entropy_backward_of_logits", _BACKWARD.signature)

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
    derivative=_DERIVATIVE(residuals=f"{_OPERANDS}, {_RESULTS}, ... v"),
    kernels=(tpu_statistics.KERNEL, gpu_statistics.KERNEL),
    patterns=(LOGITS_CROSS_ENTROPY,),
)

_PLAIN = _Operators(_STATISTICS, _WITH_LOGITS, _BACKWARD, _BACKWARD_OF_LOGITS)

# With a scale of each row, the last operand.
_SCALED_SIGNATURE = f"{_TERMS}, {_OPERANDS}, ... v, ... -> {_GRADIENTS}, ..."
_SCALED = _Operators(
    Operator(
        name="scaled_cross_entropy",
        signature=f"{_OPERANDS}, ... -> {_RESULTS}",
        check=check,
        reference=_reference,
        derivative=_DERIVATIVE(residuals=f"{_OPERANDS}, ..., {_RESULTS}, ... v"),
        kernels=(tpu_statistics.KERNEL, gpu_statistics.KERNEL),
    ),
    Operator(
        name="scaled_cross_entropy_with_logits",
        signature=f"{_OPERANDS}, ... -> {_RESULTS}, ... v",
        check=check,
        reference=_reference_with_logits,
    ),
    _backward("scaled_cross_entropy_backward", _SCALED_SIGNATURE),
    _backward("scaled_cross_entropy_backward_of_logits", _SCALED_SIGNATURE),
)


def _linearize_known(operands: Sequence[jax.Array], active: Active, **params: Any) -> tuple[Arrays, Arrays]:
    # Bound again, as the statistics are residuals, too: differentiated once more, they must depend on x.
    rows = _KNOWN(*operands, **params)
    no_logits = jnp.zeros((*operands[0].shape[:-1], 0), accumulation_dtype(operands[0].dtype))
    return rows, (*operands[:_UNSCALED], *rows, no_logits)


def _vjp_known(
    residuals: Sequence[jax.Array], cotangents: Sequence[jax.Array], active: Active, **params: Any
) -> list[jax.Array]:
    return [*_vjp(residuals, cotangents, active[:_UNSCALED], keep_logits=False, **params), *active[_UNSCALED:]]


def _tangent_known(
    residuals: Sequence[jax.Array], tangents: Sequence[jax.Array], active: Active, **params: Any
) -> list[jax.Array]:
    operands = residuals[:_UNSCALED]

    def of_active(*varying: jax.Array) -> list[jax.Array]:
        rest = iter(varying)
        primals = [next(rest) if a else x for x, a in zip(operands, active[:_UNSCALED], strict=True)]
        # The last, the prediction, is an integer.
        return list(_STATISTICS(*primals, keep_logits=False, **params)[:-1])

    varying = [x for x, a in zip(operands, active[:_UNSCALED], strict=True) if a]
    return jax.jvp(of_active, varying, [tangent for tangent in tangents if tangent is not None])[1]


_KNOWN = Operator(
    name="linear_cross_entropy_known",
    signature=f"{_OPERANDS}, {_RESULTS} -> {_RESULTS}",
    check=check,
    reference=lambda *operands, **_: operands[_UNSCALED:],
    derivative=Derivative(
        vjp=_vjp_known,
        tangent=_tangent_known,
        linearize=_linearize_known,
        residuals=f"{_OPERANDS}, {_RESULTS}, ... v",
    ),
)
