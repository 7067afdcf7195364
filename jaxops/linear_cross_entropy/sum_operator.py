"""The operators of the summed cross entropy of rows: its value, and its value with gradients from the same pass.

Differentiating the sum computes its gradients in the forward pass, three matrix products in all. The tangent is their
inner product with the tangents of the operands, and reverse mode multiplies them by the loss's cotangent.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from jaxops._checks.dtypes import accumulation_dtype
from jaxops._primitive.derivative import Active, Derivative
from jaxops._primitive.operator import Operator
from jaxops._primitive.sharding import laid_out_as
from jaxops.linear_cross_entropy import prior_shift
from jaxops.linear_cross_entropy.by_columns import statistics_by_columns
from jaxops.linear_cross_entropy.by_rows import metrics_of, on_all_devices, summed_by_rows
from jaxops.linear_cross_entropy.chunk_sizes import logits_of_tile, rows_of_exponentials_on
from jaxops.linear_cross_entropy.operands import (
    COLUMNS_AXES,
    ROW_RESULTS_AXES,
    ROWS_AXES,
    SKIPPED,
    WEIGHTS_AXES,
    Columns,
    Metrics,
    Needs,
    RowGradients,
    RowResults,
    Rows,
    RowStatistics,
    RowWeights,
)
from jaxops.linear_cross_entropy.operator import check
from jaxops.linear_cross_entropy.row_statistics import loss_terms, of_present, target_total, weighted, zero_unless
from lowering.forms import EVERYWHERE, Form, Place
from lowering.structures import fields, is_absent_field
from pallas_kernels.gpu.linear_cross_entropy import exponentials as gpu_exponentials
from pallas_kernels.gpu.linear_cross_entropy import statistics as gpu_statistics
from pallas_kernels.kernel import Kernel
from pallas_kernels.tpu.linear_cross_entropy import exponentials as tpu_exponentials
from pallas_kernels.tpu.linear_cross_entropy import statistics as tpu_statistics


def summed_cross_entropy(
    rows: Rows,
    columns: Columns,
    weights: RowWeights,
    *,
    softcap: float | None,
    chunk_rows: int | None,
    metrics: bool,
    weight_grad_dtype: Any = None,
) -> tuple[jax.Array, RowResults]:
    """Computes the sum of `row_losses`, and what is known of rows, which has no derivative.

    The x of a `SKIPPED` row may hold anything. Gradients are kept before the loss's own cotangent is known. A cotangent
    of 1 costs nothing, which is what a mean leaves if the weights have its divisor already.
    """
    dtype = weight_grad_dtype or accumulation_dtype(columns.weight.dtype)
    params = {"softcap": softcap, "chunk_rows": chunk_rows, "metrics": metrics, "weight_grad_dtype": dtype}
    total, of_rows = _SUM(rows, columns, weights, **params)
    return total, jax.tree.map(jax.lax.stop_gradient, of_rows)


def _value(
    rows: Rows,
    columns: Columns,
    weights: RowWeights,
    *,
    softcap: float | None,
    chunk_rows: int | None,
    metrics: bool,
    weight_grad_dtype: Any,
    place: Place | None = None,
) -> tuple[jax.Array, RowResults]:
    # The tiles of the rows' statistics, so that what users subtract, as from another head, is rounded alike.
    size, chunk_rows = math.prod(rows.x.shape[:-1]), on_all_devices(chunk_rows, place)
    tile_logits = logits_of_tile(size, columns.weight.shape, chunk_rows)
    params: dict[str, Any] = {"softcap": softcap, "tile_logits": tile_logits, "metrics": metrics, "place": place}
    statistics = statistics_by_columns(_with_zeros(rows), columns, **params)
    return _summed(statistics, rows, columns, weights, metrics)


def _with_zeros(rows: Rows) -> Rows:
    return rows if rows.labels is None else rows._replace(x=zero_unless(rows.labels != SKIPPED, rows.x))


def _summed(
    statistics: RowStatistics, rows: Rows, columns: Columns, weights: RowWeights, metrics: bool
) -> tuple[jax.Array, RowResults]:
    terms = loss_terms(statistics, target_total(rows, columns, statistics.max_logit))
    results = RowResults(of_present(terms, weights), metrics_of(statistics, metrics))
    return jnp.sum(weighted(terms, weights)), results


def _linearize(operands: Any, active: Active, **params: Any) -> tuple[Any, Any]:
    needs = Needs.of(*active[:2])
    loss, of_rows, of_columns = _SUM_WITH_GRADIENTS(*operands, needs=needs, **params)
    x_grad, probabilities_grad, _ = of_rows.gradients
    # The terms of rows are the gradients of their weights.
    gradients = Rows(x_grad, probabilities=probabilities_grad), Columns(*of_columns), of_rows.terms

    def laid_out(x: Any, gradient: Any) -> Any:
        return None if x is None or gradient is None else laid_out_as(gradient, jax.typeof(x).sharding)

    # On an explicit mesh, a tangent and a gradient can only be multiplied if they are split alike.
    gradients = jax.tree.map(laid_out, operands, gradients, is_leaf=is_absent_field)
    return (loss, of_rows._replace(gradients=RowGradients())), (*gradients, *operands)


def _tangent(residuals: Any, tangents: Any, active: Active, *, metrics: bool, **_: Any) -> Any:
    gradients, (rows, columns, weights) = residuals[:3], residuals[3:]
    dtype = accumulation_dtype(columns.weight.dtype)
    pairs = zip(fields(gradients), fields(tangents), strict=True)
    # In 16 bits a sum of V H products would soon be too large for the next product to change it.
    products = [jnp.sum(x.astype(dtype) * dot.astype(dtype)) for x, dot in pairs if dot is not None]
    zeros = jnp.zeros_like(rows.x, dtype, shape=rows.x.shape[:-1])
    none = RowResults(
        jax.tree.map(lambda _: zeros, weights), Metrics(zeros, zeros, zeros) if metrics else Metrics(), RowGradients()
    )
    return sum(products[1:], products[0]), none


def _vjp(residuals: Any, cotangents: Any, active: Active, **_: Any) -> Any:
    # Those of the rows' results are zero: see `summed_cross_entropy`.
    factor, _ = cotangents

    # Multiplied before it is rounded: only the product need fit the range of float16.
    def scaled(x: Any, gradient: Any, is_active: Any) -> Any:
        return (factor * gradient.astype(factor.dtype)).astype(x.dtype) if is_active else None

    return jax.tree.map(scaled, tuple(residuals[3:]), tuple(residuals[:3]), active, is_leaf=is_absent_field)


def _of_statistics(kernel: Kernel) -> Kernel:
    """Returns the kernel of the rows' statistics, for their sum."""

    def run(
        rows: Rows,
        columns: Columns,
        weights: RowWeights,
        *,
        metrics: bool,
        chunk_rows: int | None,
        weight_grad_dtype: Any,
        **params: Any,
    ) -> Any:
        # Beside the products, the sum reads next to nothing: a few numbers of each row.
        statistics = RowStatistics(*kernel.run(_with_zeros(rows), columns, metrics=metrics, **params))
        return _summed(statistics, rows, columns, weights, metrics)

    def refuses(hardware: Any, rows: Any, columns: Any, *_: Any, **params: Any) -> str | None:
        return kernel.refuses(hardware, rows, columns, **params)

    def configs(hardware: Any, rows: Any, columns: Any, *_: Any, **params: Any) -> Any:
        return kernel.configs(hardware, rows, columns, **params)

    takes = None if kernel.takes is None else kernel.takes | set(RowWeights._fields)
    return dataclasses.replace(kernel, run=run, refuses=refuses, configs=configs, takes=takes)


def _exponentiating(launcher: Any, name: str, platform: str, *, interpreter_is_pure: bool = True) -> Kernel:
    """Returns the kernel of gradients by a prior shift, with exponentials from a launcher of theirs."""

    def run(
        rows: Rows,
        columns: Columns,
        weights: RowWeights,
        *,
        config: Any,
        interpret: Any = False,
        chunk_rows: int | None,
        **params: Any,
    ) -> Any:
        blocks = {name: value for name, value in config.items() if name != "chunk_rows"}
        # A value of its own, so that its layout can be the kernel's, once for all chunks.
        own_weight = jax.lax.optimization_barrier(columns.weight)

        def exponentials(
            shared: prior_shift.Shared, x: jax.Array, labels: jax.Array, shift: jax.Array
        ) -> prior_shift.Exponentials:
            results = launcher.exponentials(
                x.reshape(-1, x.shape[-1]),
                own_weight,
                shared.columns.bias,
                shared.targets,
                labels.reshape(-1),
                shift.reshape(-1),
                softcap=shared.softcap,
                most_excess=prior_shift.MOST_EXCESS,
                config=blocks,
                interpret=interpret,
            )
            return prior_shift.Exponentials(*(x.reshape(*labels.shape, *x.shape[1:]) for x in results))

        # A kernel sees one device's part.
        params |= {"place": Place("cpu" if interpret else platform), "exponentiating": exponentials}
        return prior_shift.summed_by_prior_shift(rows, columns, weights, chunk_rows=config["chunk_rows"], **params)

    def refuses(
        hardware: Any, rows: Any, columns: Any, weights: Any, *, metrics: bool, softcap: Any, needs: Needs, **_: Any
    ) -> str | None:
        if metrics:
            return "what `return_aux` returns needs the logits themselves, column by column"
        reason = prior_shift.refusal(rows, columns, softcap, needs)
        return reason or launcher.refusal(hardware, rows.x, columns.weight)

    def configs(hardware: Any, rows: Any, columns: Any, *_: Any, chunk_rows: int | None, **__: Any) -> Any:
        size = chunk_rows or rows_of_exponentials_on(hardware, *columns.weight.shape)
        offered = launcher.configs(hardware, rows.x, columns.weight, size)
        return [config | {"chunk_rows": size} for config in offered]

    return Kernel(name, platform, run, refuses, configs, interpreter_is_pure=interpreter_is_pure, takes=_OF_LABELS)


def _refuses_prior_shift(
    place: Place, rows: Any, columns: Any, *_: Any, softcap: float | None, needs: Needs, **__: Any
) -> str | None:
    return prior_shift.refusal(rows, columns, softcap, needs)


_OF_LABELS = frozenset({"x", "labels", "weight", "bias", "class_targets", *RowWeights._fields})
_SUMMANDS = f"{ROWS_AXES}, {COLUMNS_AXES}, {WEIGHTS_AXES}"

_SUM_WITH_GRADIENTS = Operator(
    name="linear_cross_entropy_sum_with_gradients",
    signature=f"{_SUMMANDS} -> , {ROW_RESULTS_AXES}, {COLUMNS_AXES}",
    check=check,
    reference=summed_by_rows,
    kernels=(
        _exponentiating(tpu_exponentials, "mosaic_tpu", "tpu"),
        _exponentiating(gpu_exponentials, "mosaic_gpu", "cuda", interpreter_is_pure=False),
    ),
    forms=(
        # On TPUs, XLA fuses the exponentials into the product that makes the logits.
        Form("xla_prior_shift", frozenset({"tpu"}), prior_shift.summed_by_prior_shift, _refuses_prior_shift),
        Form("xla_by_rows", EVERYWHERE, summed_by_rows),
    ),
)

_SUM = Operator(
    name="linear_cross_entropy_sum",
    signature=f"{_SUMMANDS} -> , {ROW_RESULTS_AXES}",
    check=check,
    reference=_value,
    derivative=Derivative(vjp=_vjp, tangent=_tangent, linearize=_linearize, residuals=f"{_SUMMANDS}, {_SUMMANDS}"),
    kernels=(_of_statistics(tpu_statistics.KERNEL), _of_statistics(gpu_statistics.KERNEL)),
    forms=(Form("xla_by_columns", EVERYWHERE, _value),),
)
