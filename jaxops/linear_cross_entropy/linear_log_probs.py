"""The public function `linear_log_probs`: log-probabilities of tokens without the logits of a vocabulary."""

from typing import Any, Literal, Unpack, overload

import jax
import jax.numpy as jnp

import lowering
from jaxops._checks.arguments import as_arrays, as_optional, require_bool, require_integer
from jaxops._checks.dtypes import accumulation_dtype, differ_from, wide_ids
from jaxops._primitive.sharding import laid_out_as
from jaxops.linear_cross_entropy import checks
from jaxops.linear_cross_entropy.batch_invariant import invariant_losses
from jaxops.linear_cross_entropy.operands import SKIPPED, Columns, Rows, RowWeights
from jaxops.linear_cross_entropy.operator import linear_row_statistics
from jaxops.linear_cross_entropy.row_statistics import zero_unless
from jaxops.linear_cross_entropy.row_targets import Vocabulary, nan_unless

_NAME = "linear_log_probs"


class _Options(checks.LayerOptions, total=False):
    """Further options whose values do not change the type of the result."""

    temperature: float | jax.Array


@overload
def linear_log_probs(
    x: jax.Array,
    weight: jax.Array,
    labels: jax.Array,
    *,
    return_entropy: Literal[False] = ...,
    **options: Unpack[_Options],
) -> jax.Array: ...
@overload
def linear_log_probs(
    x: jax.Array, weight: jax.Array, labels: jax.Array, *, return_entropy: Literal[True], **options: Unpack[_Options]
) -> tuple[jax.Array, jax.Array]: ...
def linear_log_probs(
    x: jax.Array,
    weight: jax.Array,
    labels: jax.Array,
    *,
    bias: jax.Array | None = None,
    temperature: float | jax.Array = 1.0,
    softcap: float | None = None,
    ignore_index: int = -100,
    transpose_weight: bool = False,
    vocab_axis: str | None = None,
    chunk_rows: int | None = None,
    batch_invariant: bool = False,
    return_entropy: bool = False,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Computes the log-probability of each label under softmax((x weight^T + bias) / temperature), without the logits.

    With z = x weight^T + bias (then softcap tanh(z / softcap)) and t the row's temperature, the results for a row with
    label y are

        log p_y = z_y / t - log sum_c exp(z_c / t)
        entropy = -sum_c p_c log p_c

    Policy-gradient losses such as those of PPO, GRPO and DPO, distillation and scoring are made of these.

    Args:
      x: (..., H), floating point.
      weight: (V, H), or (H, V) with `transpose_weight`; floating point. Products are computed in its dtype.
      labels: (...) integers in [0, V). The log-probability of a label that is neither a class nor `ignore_index` is
        NaN.
      bias: (V,), as in `linear_cross_entropy`, like all arguments that are not explained here.
      temperature: a positive number, a 0-d array, or (...) floating point, one for each row. Values in arrays are not
        checked, but rows whose temperature is not positive become NaN.
      softcap: the bound of the logits, before the temperature. None means unbounded.
      ignore_index: rows with this label are skipped, whatever they hold: their results and gradients are 0. Whole
        chunks of them are left out as there, unless the entropy is returned.
      transpose_weight: whether weight is (H, V).
      vocab_axis: inside shard_map, the mesh axis over which V is split. The temperature is the same along it.
      chunk_rows: as with strategy "recompute".
      batch_invariant: whether the bits of a row's results, and of the gradient of its x, must depend on nothing but the
        row: also in training and scoring alike, if both use the entropy or neither does.
      return_entropy: whether to return the entropy as well.

    Returns:
      The log-probabilities, (...); with `return_entropy`, the pair (log-probabilities, entropies in nats), each (...).
      The dtype is float32, or float64 for float64.

    Raises:
      BadParamError: if a shape, dtype or attribute differs from the above.
      NotSupportedError: with `batch_invariant`, where `linear_cross_entropy` raises it.

    Numerics:
      Logits are float32 whatever the dtype of the inputs. They are divided by the temperature there, so it costs no
      accuracy, and a large common offset of the logits costs only the digits that float32 logits lose to it.

      The gradient of the logits is rounded to the dtype of x before the matrix products, which accumulate in float32.

      Differentiable in x, weight, bias and temperature, in forward and reverse mode and repeatedly.

    Kernels:
      Those of `linear_cross_entropy` compute it where `lowering.use` asks for them, without `batch_invariant`. If the
      temperature is not the number 1, they compute values only, and XLA the gradients.

    Example:
      >>> x = jnp.array([[0.0, 0.0], [2.0, 0.0], [0.0, 0.0]])
      >>> weight = jnp.array([[1.0, 0.0], [0.0, 1.0]])  # the second row's logits are 2 and 0
      >>> log_probs, entropy = jaxops.linear_log_probs(
      ...     x, weight, jnp.array([0, 0, -100]), return_entropy=True
      ... )
      >>> # The third row is ignored.
      >>> print(np.exp(log_probs).round(3), np.asarray(entropy).round(3))
      [0.5   0.881 1.   ] [0.693 0.365 0.   ]

    Source:
      torch.nn.functional.log_softmax and gather, over a linear layer.
    """
    x, weight, labels = as_arrays(_NAME, {"x": x, "weight": weight, "labels": labels})
    bias = as_optional(_NAME, "bias", bias)
    ignore_index = require_integer(_NAME, "ignore_index", ignore_index)
    transpose_weight = require_bool(_NAME, "transpose_weight", transpose_weight)
    require_bool(_NAME, "return_entropy", return_entropy)
    softcap, chunk_rows = checks.check_softcap(_NAME, softcap), checks.check_chunk_rows(_NAME, chunk_rows)
    weight = checks.checked_layer(_NAME, x, weight, transpose_weight, bias=bias)
    if require_bool(_NAME, "batch_invariant", batch_invariant):
        checks.check_batch_invariant(_NAME, x, weight, vocab_axis)
    else:
        lowering.note(f"{_NAME}: strategy recompute, as results are rows")
    checks.check_labels(_NAME, x.shape[:-1], labels)
    rule = f"be a positive number, or a floating-point array of shape [] or {list(x.shape[:-1])}"
    temperature = checks.number_or_floats(_NAME, "temperature", temperature, x.shape[:-1], rule, above=0)
    x, labels, temperature = checks.agreeing_rows(x, labels, temperature)
    vocabulary = Vocabulary.of(_NAME, weight, vocab_axis)

    # An ignored row may hold NaN, which a gradient of zero would not remove.
    kept, labels = differ_from(labels, ignore_index), wide_ids(labels)
    x = zero_unless(kept, x)
    zeros = jnp.zeros_like(labels, accumulation_dtype(weight.dtype))  # laid out as labels are
    local = vocabulary.local(labels)
    scale, is_positive = _scale(temperature, kept, zeros)
    rows = Rows(x, jnp.where(kept, local, jnp.full_like(local, SKIPPED)), scale=scale)
    columns = Columns(weight, bias)
    options: dict[str, Any] = {"softcap": softcap, "metrics": return_entropy}
    statistics: Any
    if batch_invariant:
        losses, statistics = invariant_losses(rows, columns, RowWeights(label=zeros + 1), **options)
        log_probs = -losses
    else:
        statistics = linear_row_statistics(rows, columns, chunk_rows=chunk_rows, vocab_axis=vocab_axis, **options)
        # Both are relative to the row's maximum, so a large common offset of the logits costs no digits.
        log_probs = statistics.label_logit - statistics.log_sum_exp
    log_probs = _of_kept(kept, (labels >= 0) & (labels < vocabulary.classes) & is_positive, log_probs)
    if not return_entropy:
        return log_probs
    return log_probs, _of_kept(kept, is_positive, statistics.log_sum_exp - statistics.mean_logit)


def _of_kept(kept: jax.Array, valid: jax.Array, results: jax.Array) -> jax.Array:
    """Returns the results of kept rows, NaN where they are not valid; 0 for the others."""
    # On an explicit mesh, rows may be split in the results that are not split in the labels.
    kept, valid = (laid_out_as(rows, jax.typeof(results).sharding) for rows in (kept, valid))
    return nan_unless(~kept | valid, jnp.where(kept, results, jnp.zeros_like(results)))


def _scale(temperature: Any, kept: jax.Array, zeros: jax.Array) -> tuple[jax.Array | None, jax.Array]:
    """Returns the factor of each row's logits, None for 1; and where the temperature is positive."""
    if isinstance(temperature, float):
        scale = None if temperature == 1 else jnp.where(kept, 1 / temperature, jnp.ones_like(zeros))
        return scale, jnp.ones_like(kept)
    temperature = zeros + temperature.astype(zeros.dtype)
    is_positive = temperature > 0
    # An ignored row's temperature may be anything, too.
    return 1 / jnp.where(kept & is_positive, temperature, jnp.ones_like(temperature)), is_positive
