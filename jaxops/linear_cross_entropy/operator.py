"""The operators for row statistics of a linear layer's logits, from which every cross entropy follows."""

import math
from typing import Any

from jaxops._primitive.derivative import Active, Derivative
from jaxops._primitive.operator import Operator
from jaxops.linear_cross_entropy.by_columns import gradients_by_columns, statistics_by_columns
from jaxops.linear_cross_entropy.checks import check_linear
from jaxops.linear_cross_entropy.chunk_sizes import logits_of_tile
from jaxops.linear_cross_entropy.operands import (
    COLUMNS_AXES,
    ROW_GRADIENTS_AXES,
    ROWS_AXES,
    STATISTICS_AXES,
    TERMS_AXES,
    Columns,
    Needs,
    Rows,
    RowStatistics,
)
from jaxops.linear_cross_entropy.row_statistics import scale_gradient, statistics_terms
from lowering.operators import EVERYWHERE, Form
from pallas_kernels.gpu.linear_cross_entropy import gradients as gpu_gradients
from pallas_kernels.gpu.linear_cross_entropy import statistics as gpu_statistics
from pallas_kernels.tpu.linear_cross_entropy import backward as tpu_backward
from pallas_kernels.tpu.linear_cross_entropy import statistics as tpu_statistics


def linear_row_statistics(
    rows: Rows, columns: Columns, *, softcap: float | None, chunk_rows: int | None, metrics: bool
) -> RowStatistics:
    """Computes the statistics of the logits z = x weight^T + bias, which are never needed all at once.

    Args:
      rows: what each row has.
      columns: what each column has.
      softcap: z becomes softcap tanh(z / softcap).
      chunk_rows: about how many rows' worth of z exists at a time.
      metrics: whether to compute `mean_logit` and `prediction`.
    """
    tile_logits = logits_of_tile(math.prod(rows.x.shape[:-1]), columns.weight.shape, chunk_rows)
    return _STATISTICS(rows, columns, softcap=softcap, tile_logits=tile_logits, metrics=metrics)


def check(rows: Any, columns: Any, *_: Any, **__: Any) -> None:
    """Checks the primitives' operands; the public functions have checked whatever the others are made from."""
    check_linear("linear_cross_entropy", rows.x, columns.weight)


def _vjp(residuals: Any, cotangents: RowStatistics, active: Active, *, metrics: bool, **params: Any) -> Any:
    rows, columns = residuals[:2]
    statistics = RowStatistics(*residuals[2:])
    terms = statistics_terms(cotangents, statistics)
    of_rows, of_columns = _BACKWARD(terms, rows, columns, needs=Needs.of(*active), **params)
    of_scale = of_rows.scale
    if of_scale is not None:
        of_scale = scale_gradient(of_scale, cotangents, statistics, rows, columns)
    return Rows(of_rows.x, None, of_rows.probabilities, of_scale, rows.margin), Columns(*of_columns)


_BACKWARD = Operator(
    name="linear_cross_entropy_backward",
    signature=f"{TERMS_AXES}, {ROWS_AXES}, {COLUMNS_AXES} -> {ROW_GRADIENTS_AXES}, {COLUMNS_AXES}",
    check=lambda *_, **__: None,
    reference=gradients_by_columns,
    kernels=(tpu_backward.KERNEL, gpu_gradients.KERNEL),
    forms=(Form("xla_by_columns", EVERYWHERE, gradients_by_columns),),
)

_STATISTICS = Operator(
    name="linear_cross_entropy",
    signature=f"{ROWS_AXES}, {COLUMNS_AXES} -> {STATISTICS_AXES}",
    check=check,
    reference=statistics_by_columns,
    derivative=Derivative(vjp=_vjp),
    kernels=(tpu_statistics.KERNEL, gpu_statistics.KERNEL),
    forms=(Form("xla_by_columns", EVERYWHERE, statistics_by_columns),),
)
