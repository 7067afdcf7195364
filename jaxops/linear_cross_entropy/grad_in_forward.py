"""The summed cross entropy of rows, with gradients computed in the same pass: three matrix products, chunk by chunk."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxops._checks.dtypes import accumulation_dtype
from jaxops._primitive.derivative import Active, Arrays, Derivative
from jaxops._primitive.operator import Operator
from jaxops._primitive.sharding import laid_out_as
from jaxops.linear_cross_entropy import fixed_reference, operator
from jaxops.linear_cross_entropy.chunk_gradients import (
    Operands,
    by_fixed_reference,
    by_maximum,
    weighted,
)
from jaxops.linear_cross_entropy.logits import (
    SKIPPED,
    Needs,
    RowStatistics,
    RowWeights,
    Targets,
    cross_entropy_terms,
    metrics_of,
    target_total,
    zero_unless,
)
from jaxops.linear_cross_entropy.operator import known_row_statistics
from jaxops.linear_cross_entropy.row_chunks import default_chunk_rows, of_all_devices
from jaxops.linear_cross_entropy.tiled import tiled_statistics
from pallas_kernels.gpu.linear_cross_entropy import exponentials as gpu_exponentials
from pallas_kernels.gpu.linear_cross_entropy import statistics as gpu_statistics
from pallas_kernels.kernel import Kernel
from pallas_kernels.tpu.linear_cross_entropy import exponentials as tpu_exponentials
from pallas_kernels.tpu.linear_cross_entropy import statistics as tpu_statistics

_OPERANDS = "... h, v h, v, ..., v, ... v, ..., ..., ..."


def summed_cross_entropy(
    x: jax.Array,
    weight: jax.Array,
    bias: jax.Array,
    targets: Targets,
    weights: RowWeights,
    *,
    softcap: float | None,
    chunk_rows: int | None,
    metrics: bool,
    weight_grad_dtype: Any = None,
) -> tuple[jax.Array, Arrays, RowStatistics | None]:
    """The sum of `row_losses`, and what is known of rows; operands as `linear_row_statistics` has.

    The x of a `SKIPPED` row may hold anything. Gradients are kept before the loss's own cotangent is known. A cotangent
    of 1 costs nothing, which is what a mean leaves if the weights have its divisor already.

    Returns:
      The sum; the `cross_entropy_terms` of rows, without derivatives; and with metrics their statistics.
    """
    params: dict[str, Any] = {"softcap": softcap, "chunk_rows": chunk_rows, "metrics": metrics}
    params["weight_grad_dtype"] = weight_grad_dtype or accumulation_dtype(weight.dtype)
    total, *of_rows, numbers, predictions = _SUM(x, weight, bias, *targets, *weights, **params)
    terms = tuple(map(jax.lax.stop_gradient, of_rows))
    if not metrics:
        return total, terms, None
    maximum, log_sum_exp, mean = (numbers[..., position] for position in range(3))
    zeros = jnp.zeros_like(maximum)
    rows = RowStatistics(maximum, log_sum_exp, zeros, zeros, mean, predictions[..., 0])
    # They are by-products: differentiated, they take the products that they need themselves.
    tile_logits = (chunk_rows or default_chunk_rows(*weight.shape)) * weight.shape[0]
    known = known_row_statistics(x, weight, bias, targets, rows, softcap=softcap, tile_logits=tile_logits)
    return total, terms, known


def _reference(
    x: jax.Array,
    weight: jax.Array,
    bias: jax.Array,
    labels: jax.Array,
    shared_target: jax.Array,
    row_target: jax.Array,
    *weights: jax.Array,
    softcap: float | None,
    chunk_rows: int | None,
    metrics: bool,
    weight_grad_dtype: Any,
) -> Arrays:
    tile_logits = of_all_devices(chunk_rows or default_chunk_rows(*weight.shape)) * weight.shape[0]
    operands = (zero_unless(labels != SKIPPED, x), weight, bias, labels, shared_target, row_target)
    rows = RowStatistics(*tiled_statistics(*operands, softcap=softcap, tile_logits=tile_logits, metrics=metrics))
    return _summed(rows, Operands(*operands, *weights), metrics)


def _summed(rows: RowStatistics, operands: Operands, metrics: bool) -> Arrays:
    terms = cross_entropy_terms(rows, target_total(Targets(*operands[3:6]), rows.max_logit))
    return jnp.sum(weighted(terms, RowWeights(*operands[6:]))), *terms, *metrics_of(rows, metrics)


def _reference_with_gradients(*operands: jax.Array, **params: Any) -> Arrays:
    arrays = Operands(*operands)
    if fixed_reference.fuses_here() and _refuses_reference(*operands, **params) is None:
        return by_fixed_reference(arrays, fixed_reference.exponentials, **params)
    return by_maximum(arrays, **params)


def _refuses_reference(
    x: Any,
    weight: Any,
    bias: Any,
    labels: Any,
    shared_target: Any,
    row_target: Any,
    *weights: Any,
    softcap: float | None,
    needs: Needs,
    **_: Any,
) -> str | None:
    return fixed_reference.refusal(x, weight, shared_target, row_target, softcap, needs)


def _linearize(operands: Sequence[jax.Array], active: Active, **params: Any) -> tuple[Arrays, Arrays]:
    before, after = active[: operator.LABELS], active[operator.LABELS + 1 : 6]
    loss, *gradients, numbers, predictions = _SUM_WITH_GRADIENTS(*operands, needs=Needs(*before, *after), **params)
    # The terms of rows are the gradients of their weights.
    return (loss, *gradients[-3:], numbers, predictions), (*operands, *gradients)


def _gradients_of_operands(residuals: Sequence[jax.Array], active: Active) -> list[jax.Array | None]:
    """The gradient of each active operand as it was added up, on an explicit mesh laid out like the operand."""
    operands, gradients = list(residuals[: len(active)]), list(residuals[len(active) :])
    gradients.insert(operator.LABELS, operands[operator.LABELS])
    triples = zip(operands, gradients, active, strict=True)
    return [laid_out_as(gradient, jax.typeof(x).sharding) if a else None for x, gradient, a in triples]


def _tangent(
    residuals: Sequence[jax.Array], tangents: Sequence[Any], active: Active, *, metrics: bool, **_: Any
) -> Arrays:
    pairs, dtype = zip(_gradients_of_operands(residuals, active), tangents, strict=True), residuals[6].dtype
    products = [jnp.sum(x.astype(dtype) * tangent.astype(dtype)) for x, tangent in pairs if x is not None]
    zeros = jnp.zeros_like(residuals[6])
    of_row = jnp.broadcast_to(zeros[..., None], (*zeros.shape, 3 if metrics else 0))
    return sum(products[1:], products[0]), zeros, zeros, zeros, of_row


def _vjp(residuals: Sequence[jax.Array], cotangents: Sequence[Any], active: Active, **_: Any) -> list[Any]:
    factor = cotangents[0]  # those of terms and numbers are zero: see `summed_cross_entropy`
    gradients = _gradients_of_operands(residuals, active)
    pairs = zip(residuals[: len(active)], gradients, strict=True)
    return [None if of is None else (factor * of.astype(factor.dtype)).astype(x.dtype) for x, of in pairs]


_GRADIENTS = "... h, v h, v, v, ... v, ..., ..., ..."
_METRICS = "... m, ... p"


def _summing(kernel: Kernel) -> Kernel:
    """The kernel of the rows' statistics, for their sum."""

    def run(
        *operands: jax.Array, metrics: bool, chunk_rows: int | None, weight_grad_dtype: Any, **params: Any
    ) -> Arrays:
        x, weight, bias, labels, *targets = operands[:6]
        x = zero_unless(labels != SKIPPED, x)
        rows = RowStatistics(*kernel.run(x, weight, bias, labels, *targets, metrics=metrics, **params))
        return _summed(rows, Operands(*operands), metrics)

    def refuses(
        hardware: Any, *operands: Any, chunk_rows: int | None, weight_grad_dtype: Any, **params: Any
    ) -> str | None:
        return kernel.refuses(hardware, *operands[:6], **params)

    def configs(hardware: Any, *operands: Any, chunk_rows: int | None, weight_grad_dtype: Any, **params: Any) -> Any:
        return kernel.configs(hardware, *operands[:6], **params)

    return dataclasses.replace(kernel, run=run, refuses=refuses, configs=configs)


def _with_exponentials(name: str, platform: str, launcher: Any, *, interpreter_is_pure: bool = True) -> Kernel:
    """The gradients by a fixed reference, with exponentials from a kernel."""

    def run(*operands: jax.Array, config: Any, interpret: Any = False, chunk_rows: int | None, **params: Any) -> Arrays:
        blocks = {name: value for name, value in config.items() if name != "chunk_rows"}
        # A value of its own, so that its layout can be the kernel's, once for all chunks.
        own_weight = jax.lax.optimization_barrier(operands[1])

        def exponentials(
            shared: fixed_reference.Shared, x: jax.Array, labels: jax.Array, reference: jax.Array
        ) -> fixed_reference.Exponentials:
            results = launcher.exponentials(
                x.reshape(-1, x.shape[-1]),
                own_weight,
                shared.bias,
                shared.target,
                labels.reshape(-1),
                reference.reshape(-1),
                softcap=shared.softcap,
                most_excess=fixed_reference.MOST_EXCESS,
                config=blocks,
                interpret=interpret,
            )
            by_row = (result.reshape(*labels.shape, *result.shape[1:]) for result in results)
            return fixed_reference.Exponentials(*by_row)

        return by_fixed_reference(Operands(*operands), exponentials, chunk_rows=config["chunk_rows"], **params)

    def refuses(hardware: Any, *operands: Any, metrics: bool, **params: Any) -> str | None:
        if metrics:
            return "what `return_aux` returns needs the logits themselves, column by column"
        return _refuses_reference(*operands, **params) or launcher.refusal(hardware, *operands[:2])

    def configs(hardware: Any, x: Any, weight: Any, *_: Any, chunk_rows: int | None, **__: Any) -> Any:
        rows = chunk_rows or fixed_reference.chunk_rows_on(hardware, *weight.shape)
        return [config | {"chunk_rows": rows} for config in launcher.configs(hardware, x, weight, rows)]

    return Kernel(name, platform, run, refuses, configs, interpreter_is_pure=interpreter_is_pure)


_SUM_WITH_GRADIENTS = Operator(
    name="linear_cross_entropy_sum_with_gradients",
    signature=f"{_OPERANDS} -> , {_GRADIENTS}, {_METRICS}",
    check=operator.check,
    reference=_reference_with_gradients,
    kernels=(
        _with_exponentials("mosaic_tpu", "tpu", tpu_exponentials),
        _with_exponentials("mosaic_gpu", "cuda", gpu_exponentials, interpreter_is_pure=False),
    ),
)

_SUM = Operator(
    name="linear_cross_entropy_sum",
    signature=f"{_OPERANDS} -> , ..., ..., ..., {_METRICS}",
    check=operator.check,
    reference=_reference,
    derivative=Derivative(vjp=_vjp, tangent=_tangent, linearize=_linearize, residuals=f"{_OPERANDS}, {_GRADIENTS}"),
    kernels=(_summing(tpu_statistics.KERNEL), _summing(gpu_statistics.KERNEL)),
)
