"""The public function `linear_cross_entropy`: the loss of a language model without its logits."""

from typing import Any, Literal, NamedTuple, Unpack, overload

import jax
import jax.numpy as jnp

import lowering
from jaxops._checks import arguments
from jaxops._checks.dtypes import accumulation_dtype, wide_ids
from jaxops._primitive.results import exportable
from jaxops.linear_cross_entropy import checks
from jaxops.linear_cross_entropy.batch_invariant import invariant_losses
from jaxops.linear_cross_entropy.operands import SKIPPED, Columns, RowStatistics
from jaxops.linear_cross_entropy.operator import linear_row_statistics
from jaxops.linear_cross_entropy.row_statistics import row_losses, zero_unless
from jaxops.linear_cross_entropy.row_targets import Targets, Vocabulary, nan_unless
from jaxops.linear_cross_entropy.sum_operator import summed_cross_entropy

_NAME = "linear_cross_entropy"
_REDUCTIONS = ("none", "mean", "sum")
_STRATEGIES = ("auto", "grad_in_forward", "recompute")
_INVARIANT_STRATEGIES = ("auto", "recompute")


@exportable
class LinearCrossEntropyAux(NamedTuple):
    """Metrics of each row, without derivatives; every field has shape (...).

    `linear_log_probs` and `z_loss` are the ways to differentiate an entropy and log sum exp. Ignored rows are treated
    like all others, except that an ignored row whose x is not finite counts as x = 0.

    Attributes:
      lse: log sum exp of the logits. z_loss * lse^2 is what the z-loss adds to a row of weight 1.
      accuracy: 1.0 where the row is kept and the prediction is its label (for probabilities: the likeliest class), else
        0.0.
      prediction: int32, the class of the largest logit; of equal ones, the first.
      entropy: the entropy of softmax(logits), in nats.
      kept: bool, whether the row counts: its label is not ignore_index.
    """

    lse: jax.Array
    accuracy: jax.Array
    prediction: jax.Array
    entropy: jax.Array
    kept: jax.Array


class _Options(checks.LayerOptions, total=False):
    """Further options whose values do not change the type of the result."""

    class_weight: jax.Array | None
    row_weight: jax.Array | None
    label_smoothing: float
    margin: float | jax.Array | None
    z_loss: float | jax.Array
    reduction: str
    strategy: str
    weight_grad_dtype: Any


@overload
def linear_cross_entropy(
    x: jax.Array, weight: jax.Array, labels: jax.Array, *, return_aux: Literal[False] = ..., **options: Unpack[_Options]
) -> jax.Array: ...
@overload
def linear_cross_entropy(
    x: jax.Array, weight: jax.Array, labels: jax.Array, *, return_aux: Literal[True], **options: Unpack[_Options]
) -> tuple[jax.Array, LinearCrossEntropyAux]: ...
def linear_cross_entropy(
    x: jax.Array,
    weight: jax.Array,
    labels: jax.Array,
    *,
    bias: jax.Array | None = None,
    class_weight: jax.Array | None = None,
    row_weight: jax.Array | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    margin: float | jax.Array | None = None,
    z_loss: float | jax.Array = 0.0,
    softcap: float | None = None,
    reduction: str = "mean",
    transpose_weight: bool = False,
    vocab_axis: str | None = None,
    strategy: str = "auto",
    chunk_rows: int | None = None,
    weight_grad_dtype: Any = None,
    batch_invariant: bool = False,
    return_aux: bool = False,
) -> jax.Array | tuple[jax.Array, LinearCrossEntropyAux]:
    """Computes the cross entropy between labels and the softmax of x weight^T + bias, without keeping the logits.

    With z = x weight^T + bias (then softcap tanh(z / softcap), then less the margin at the label), lse =
    log sum_c exp z_c, class weights w, smoothing s and V classes, the loss of a row with label y and row weight r is

        r ((1 - s) w_y (lse - z_y) + s / V sum_c w_c (lse - z_c) + z_loss lse^2)

    and with label probabilities q it is r (sum_c ((1 - s) q_c + s / V) w_c (lse - z_c) + z_loss lse^2). Both are
    PyTorch's. "mean" is the sum of the losses, divided by the sum of r w_y over the kept rows, or of r with
    probabilities.

    Args:
      x: (..., H), floating point.
      weight: (V, H), or (H, V) with `transpose_weight`; floating point. Products are computed in its dtype, to which x
        is rounded; each of the two gets its gradient in its own.
      labels: (...) integers in [0, V), or (..., V) floating-point probabilities. A label that is neither a class nor
        `ignore_index` makes the loss NaN.
      bias: (V,), floating point. None means no bias.
      class_weight: (V,), floating point. None means ones.
      row_weight: (...), floating point or a mask, the shape of the rows. None means ones. That of an ignored row counts
        nowhere, whatever it is. A weight of 0 takes a row out of the loss, but its x must be finite.
      ignore_index: rows with this label are skipped, whatever they hold: their loss and gradients are 0. On one device
        and inside shard_map, the matrix products leave out whole chunks of skipped rows, wherever those rows lie,
        unless aux is returned. Has no effect on probabilities.
      label_smoothing: s, from 0 to 1. The label's target is 1 - s + s / V and that of each other class s / V, as with
        PyTorch and `optax.smooth_labels`. Flax's examples have 1 - s and s / (V - 1) instead, which is s V / (V - 1)
        here, and subtract the entropy of these targets, a constant.
      margin: subtracted from the logit z_y of each row's label, behind the softcap, as in additive-margin softmax: a
        number, or (V,) floating point, one for each class. None means 0. It has no derivative.
      z_loss: the weight of lse^2, at least 0. It may be a 0-d array, traced or not, whose value is not checked. "mean"
        divides it by what the rest is divided by: with class weights by their sum over the rows, where Liger divides by
        the number of rows.
      softcap: the bound of the logits. None means unbounded.
      reduction: "none", "sum" or "mean". The mean of no rows, or of weights that add up to 0, is NaN, with gradients of
        zero.
      transpose_weight: whether weight is (H, V).
      vocab_axis: inside shard_map, the mesh axis over which V is split. weight, bias, class_weight and probabilities
        are then this device's part, while labels and predictions count all classes. x and labels are the same along the
        axis, which nothing checks: rows that in_specs splits over it give wrong losses. A weight that in_specs does not
        split over the axis is refused, unless `check_vma` is off: then nothing tells it from a part, and the loss
        counts every class once for each device.
      strategy: how the derivative is computed. Values do not depend on it beyond rounding.
        "grad_in_forward" computes a chunk of logits, its loss and its gradients at once (three products, no logits
        kept). It needs a scalar loss on one shard; otherwise "recompute" takes its place.
        "recompute" computes each chunk of logits in both passes (four products, least memory).
        "auto" is "grad_in_forward". Kernels take part in both.
      chunk_rows: about how many rows' worth of logits exists at a time.
        "grad_in_forward" takes that many rows on each device. None: as many as have 2^24 logits (2^23 on a CPU where
        that takes as much memory: in 16 bits, with a bias, softcap, smoothing or `return_aux`), or about 2^28 on TPUs
        and with kernels (2^27 with `return_aux`), and at least 256 and H / 4.
        "recompute" takes that many logits over all devices, in tiles of some columns. None: all of up to 2^24 logits,
        on TPUs for the value alone of an eighth of the rows; of more, 2^18, and at least 256 and H / 2 columns of all.
        When exported with a symbolic number of rows, all rows are one chunk.
      weight_grad_dtype: the dtype in which "grad_in_forward" adds up the gradient of the weight over chunks. None:
        float32, or float64 for float64. For a bfloat16 weight it may be bfloat16, which saves the sum in float32,
        4 V H bytes, and rounds once more in every chunk; see below. The other strategies have no such sum.
      batch_invariant: whether a row's bits must depend on nothing but the row; see below. `strategy` is then "auto" or
        "recompute", and `chunk_rows` has no effect.
      return_aux: whether to return `LinearCrossEntropyAux` as well.

    Returns:
      The loss, () or (...); with `return_aux`, the pair (loss, `LinearCrossEntropyAux`). The dtype is float32, or
      float64 for float64.

    Raises:
      BadParamError: if a shape, dtype or attribute differs from the above.
      NotSupportedError: with `batch_invariant`, when compiled for TPUs, or for absent chips, on a mesh with automatic
        axes outside shard_map.

    Numerics:
      Logits are float32 whatever the dtype of the inputs, and never rounded to 16 bits. A large common offset of the
      logits costs only the digits that float32 logits lose to it.

      The gradient of the logits is rounded to the dtype of x before the matrix products, which accumulate in float32.
      For float16 each row is first scaled by a power of two, so that neither a mean over many rows nor a loss scale
      takes it out of range.

      On TPUs, and where kernels take part, "grad_in_forward" rounds exp(z - r) instead, where r, from the label and
      the first columns, is known before z, and multiplies rows by their factors in float32. What cancels at the label
      is float32, too. A chunk with a row whose logits exceed r by 59 or more is computed again by the rows' maxima.

      In bfloat16, "grad_in_forward" keeps the gradients of x and weight in bfloat16 until they are multiplied by the
      cotangent of the loss. That rounds them once more unless it is a power of two. If the loss is a mean and nothing
      follows it, its cotangent is 1.

      With `weight_grad_dtype=jnp.bfloat16`, the gradient of the weight over n chunks is off by about 0.6 sqrt(n) 2^-9
      of its norm: 1.8 times 2^-9 over 8 chunks, where the sum in float32 is off by 0.9 times 2^-9.

      Differentiable in x, weight, bias, class_weight, row_weight and probabilities, in forward and reverse mode and
      repeatedly.

    Meshes:
      Any axis may be split. On an explicit mesh, labels and row weights that are split differently from the rows of x
      are resharded. As plain JAX does, devices gather a weight that is split by its features over the axis of the rows.
      An axis that splits both the rows and the vocabulary gathers rows, a chunk at a time; `vocab_axis` gathers none.

    Batch invariance:
      With `batch_invariant`, a row's loss, its aux and the gradient of its x have the same bits whatever other rows
      there are, wherever the row stands among them, and on whatever mesh, without `vocab_axis`. This holds on one
      kind of machine, with one version of JAX and the same options (with `transpose_weight`, under jit). A program that
      uses other results, such as aux, may round otherwise. So may one whose losses have other cotangents: those of a
      mean contain its divisor. Gradients of parameters are sums over rows and not covered. Neither are forward mode and
      second derivatives, which are right all the same.

      Rows are computed in blocks of 64, at least two of them, so a single row costs as much as 128. No chunks of
      skipped rows are left out, and kernels have no part. The gradients of parameters take another two products. On
      automatic and explicit meshes, each device takes the whole weight, however it is split.

    Example:
      >>> x = jnp.array([[1.0, 0.0], [0.0, 1.0]])
      >>> # All logits are 0, so each of the four classes has probability 1/4.
      >>> weight = jnp.zeros((4, 2))
      >>> loss = jaxops.linear_cross_entropy(x, weight, jnp.array([3, -100]), reduction="sum")
      >>> print(np.asarray(loss).round(3), np.log(4).round(3))  # the second row is ignored
      1.386 1.386

    Source:
      torch.nn.functional.cross_entropy; aclnnFusedLinearOnlineMaxSum and its companions for the split vocabulary.
    """
    x, weight, labels = arguments.as_arrays(_NAME, {"x": x, "weight": weight, "labels": labels})
    bias = arguments.as_optional(_NAME, "bias", bias)
    class_weight = arguments.as_optional(_NAME, "class_weight", class_weight)
    row_weight = arguments.as_optional(_NAME, "row_weight", row_weight)
    ignore_index = arguments.require_integer(_NAME, "ignore_index", ignore_index)
    rule = "be a number from 0 to 1"
    label_smoothing = arguments.require_real(_NAME, "label_smoothing", label_smoothing, rule, least=0, most=1)
    z_loss = arguments.require_real(_NAME, "z_loss", z_loss, "be a finite number or a 0-d array of one", traced=True)
    arguments.require_real(_NAME, "z_loss", z_loss, "be at least 0", least=0, traced=True)
    arguments.require_choice(_NAME, "reduction", reduction, _REDUCTIONS)
    arguments.require_choice(_NAME, "strategy", strategy, _STRATEGIES)
    transpose_weight = arguments.require_bool(_NAME, "transpose_weight", transpose_weight)
    arguments.require_bool(_NAME, "return_aux", return_aux)
    if arguments.require_bool(_NAME, "batch_invariant", batch_invariant):
        arguments.require_choice(_NAME, "strategy", strategy, _INVARIANT_STRATEGIES)
        checks.check_batch_invariant(_NAME, x, weight, vocab_axis)
    softcap, chunk_rows = checks.check_softcap(_NAME, softcap), checks.check_chunk_rows(_NAME, chunk_rows)
    weight = checks.checked_layer(_NAME, x, weight, transpose_weight, bias=bias, class_weight=class_weight)
    margin = checks.checked_margin(_NAME, margin, labels, weight.shape[0])
    weight_grad_dtype = checks.check_weight_grad_dtype(_NAME, weight_grad_dtype, weight)
    checks.check_labels(_NAME, x.shape[:-1], labels, weight.shape[0])
    row_weight = checks.check_row_weight(_NAME, x.shape[:-1], row_weight)
    x, labels, row_weight = checks.agreeing_rows(x, labels, row_weight)
    vocabulary = Vocabulary.of(_NAME, weight, vocab_axis)
    targets = Targets(labels, class_weight, row_weight, margin, ignore_index, label_smoothing, z_loss, reduction)
    losses = targets.losses(x, vocabulary, accumulation_dtype(weight.dtype))
    is_sum = not batch_invariant and _is_sum(strategy, reduction, vocabulary)
    rows, columns, weights = losses.rows, Columns(weight, bias, losses.class_targets), losses.weights
    # A skipped row may hold NaN, which a gradient of zero would not remove. Aux describes skipped rows, too.
    live = losses.kept | jnp.all(jnp.isfinite(x), axis=-1) if return_aux else losses.kept
    if rows.labels is not None:
        rows = rows._replace(labels=jnp.where(live, rows.labels, SKIPPED))
    if return_aux or not is_sum:  # a sum does it chunk by chunk
        rows = rows._replace(x=zero_unless(live, x))
    options: dict[str, Any] = {"softcap": softcap, "metrics": return_aux}
    if batch_invariant:
        loss, statistics = invariant_losses(rows, columns, weights, **options)
    elif is_sum:
        options |= {"chunk_rows": chunk_rows, "weight_grad_dtype": weight_grad_dtype}
        loss, statistics = summed_cross_entropy(rows, columns, weights, **options)
    else:
        statistics = linear_row_statistics(rows, columns, chunk_rows=chunk_rows, vocab_axis=vocab_axis, **options)
        loss = row_losses(statistics, weights)
    loss = jnp.sum(loss) if reduction != "none" else loss
    loss = loss if losses.has_mean is None else nan_unless(losses.has_mean, loss)
    return (loss, _aux(statistics, labels, losses.kept, vocabulary)) if return_aux else loss


def _aux(
    statistics: RowStatistics, labels: jax.Array, kept: jax.Array, vocabulary: Vocabulary
) -> LinearCrossEntropyAux:
    max_logit, log_sum_exp, _, _, mean_logit, prediction = jax.tree.map(jax.lax.stop_gradient, statistics)
    lse = max_logit + log_sum_exp
    likeliest = vocabulary.argmax(labels) if arguments.is_floating(labels) else wide_ids(labels)
    correct = kept & (prediction.astype(likeliest.dtype) == likeliest)
    return LinearCrossEntropyAux(lse, correct.astype(lse.dtype), prediction, log_sum_exp - mean_logit, kept)


def _is_sum(strategy: str, reduction: str, vocabulary: Vocabulary) -> bool:
    """Tells whether the strategy that runs computes a sum with its gradients."""
    reason = "as it takes the fewest products" if strategy == "auto" else "as asked"
    if strategy != "recompute" and (reduction == "none" or vocabulary.axis is not None):
        strategy, reason = "recompute", "as the loss is not a scalar on one shard"
    strategy = "grad_in_forward" if strategy == "auto" else strategy
    lowering.note(f"{_NAME}: strategy {strategy}, {reason}")
    return strategy == "grad_in_forward"
