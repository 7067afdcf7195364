"""The operands and results of the loss's operators: records whose fields are None where they are absent.

Gradients are records of the operands' kind, where any field may be None: it is not needed, or has no gradient. Those of
columns are sums over rows.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

# The label of a row that does not count.
SKIPPED = -2


class Rows(NamedTuple):
    """Operands of each row: its features, and what its logits are compared with. The first axes are the batch's.

    Attributes:
      x: (..., H). Rounded to the weight's dtype before any product; its gradient is not.
      labels: (...), columns of the logits. Any other integer means that the row has no label; `SKIPPED` means that its
        x counts as zero as well, whatever it holds.
      probabilities: (..., V), weights t of the columns for this row.
      scale: (...), 1 / temperature, by which the row's logits are multiplied; 1 for a `SKIPPED` row.
      margin: (...), subtracted from the logit of the row's label; a constant. Not beside a scale.
    """

    x: jax.Array
    labels: jax.Array | None = None
    probabilities: jax.Array | None = None
    scale: jax.Array | None = None
    margin: jax.Array | None = None


class Columns(NamedTuple):
    """Operands of each column of the logits, which are x weight^T + bias.

    Attributes:
      weight: (V, H).
      bias: (V,).
      class_targets: (V,), weights t of the columns that all rows share.
    """

    weight: jax.Array
    bias: jax.Array | None = None
    class_targets: jax.Array | None = None


class RowWeights(NamedTuple):
    """The weights (...) of the terms in a row's loss: -log p[label], sum_c t_c (-log p_c), (log sum exp z)^2, and l.

    l is log sum exp(z - m). Only its derivative has a meaning, because m is a constant: it is for sums that rise with
    all logits. The dtype of the weights is that of the losses and of sums over rows.
    """

    label: jax.Array | None = None
    target: jax.Array | None = None
    square: jax.Array | None = None
    log_sum_exp: jax.Array | None = None


class RowStatistics(NamedTuple):
    """Statistics (...) of each row of logits z, relative to its maximum m. m is a constant, because it cancels.

    If the vocabulary is split, each device holds the statistics of its own columns. With gradients from the same pass,
    m is log sum exp z instead (`row_statistics.own_statistics`).

    Attributes:
      max_logit: m = max z, without a derivative.
      log_sum_exp: log sum exp(z - m).
      label_logit: z[label] - m; 0 if the label is not one of the columns.
      target_loss: sum t (log sum exp z - z) for the weights t of the columns.
      mean_logit: sum softmax(z) (z - m), a metric.
      prediction: argmax z, a metric.
    """

    max_logit: jax.Array
    log_sum_exp: jax.Array
    label_logit: jax.Array | None = None
    target_loss: jax.Array | None = None
    mean_logit: jax.Array | None = None
    prediction: jax.Array | None = None


class CotangentTerms(NamedTuple):
    """The coefficients (...) of the logits' cotangent, derived in `row_statistics`.

    exp(z - maximum - log_sum_exp) (softmax + slope (z - maximum)) + label onehot(label) + target t. The exponential is
    softmax(z), or its numerator: then log_sum_exp is 0, softmax is divided by the sum already, and target_shift is the
    log of the sum, which the gradient of t has.
    """

    softmax: jax.Array
    maximum: jax.Array
    log_sum_exp: jax.Array
    label: jax.Array | None = None
    target: jax.Array | None = None
    slope: jax.Array | None = None
    target_shift: jax.Array | None = None


class Needs(NamedTuple):
    """The operands that need a gradient."""

    x: bool = False
    probabilities: bool = False
    scale: bool = False
    weight: bool = False
    bias: bool = False
    class_targets: bool = False

    @classmethod
    def of(cls, rows: Any, columns: Any) -> "Needs":
        """Returns which operands need a gradient, given records of bools, None where an operand is absent."""
        return cls(*(bool(getattr(rows, name, None) or getattr(columns, name, None)) for name in cls._fields))

    def zeros(self, operands: Any, dtype: Any = None) -> Any:
        """Returns a record of zeros for the gradients that are needed of one, in its dtypes or another."""
        needed = (getattr(self, name, False) for name in operands._fields)
        return type(operands)(*(jnp.zeros_like(x, dtype) if n else None for x, n in zip(operands, needed, strict=True)))


_AXES: dict[type, str] = {
    Rows: "... h, ..., ... v, ..., ...",
    Columns: "v h, v, v",
    RowWeights: "..., ..., ..., ...",
    RowStatistics: "..., ..., ..., ..., ..., ...",
    CotangentTerms: "..., ..., ..., ..., ..., ..., ...",
}


def axes(*records: type) -> str:
    """Returns the axes of the fields of records, for the operators' signatures."""
    return ", ".join(_AXES[record] for record in records)
