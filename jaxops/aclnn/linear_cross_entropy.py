"""The documented calls of linear cross entropy over a vocabulary that is split between devices."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxops._checks.attributes import require_bool, require_integer, require_real
from jaxops._checks.errors import require, require_present
from jaxops._checks.operands import as_array, as_arrays, as_optional
from jaxops.linear_cross_entropy import OnlineMaxSum as OnlineMaxSum
from jaxops.linear_cross_entropy import vocab_parallel

INPUT_DTYPES = ("float16", "bfloat16")
TARGET_DTYPES = ("int32", "int64")
LOGITS_DTYPES = ("float32", "float16", "bfloat16")
LEAST_VOCABULARY_WITH_SOFTMAX = 128
_INT64_MAX = 2**63 - 1


def fused_linear_online_max_sum(
    input: jax.Array,
    weight: jax.Array,
    target: jax.Array,
    *,
    vocab_start_index: Any,
    vocab_end_index: Any,
    return_logits: bool = False,
) -> OnlineMaxSum:
    """Computes the statistics of one part of the vocabulary that its devices combine to a cross entropy.

    With L = input weight^T, m = max_n L[b, n] and masked = target < start or target >= end:

        logits_max_local[b] = m
        sum_exp_logits_local[b] = sum_n exp(L[b, n] - m)
        masked_target[b] = 0 if masked else target[b] - start
        predicted_logits_local[b] = 0 if masked else L[b, target[b] - start] - m

    Sum and prediction are relative to the local maximum: rebase them to the global one before adding over devices.

    Args:
      input: (BT, H), float16 or bfloat16.
      weight: (V, H), V > 0, of the input's dtype: the rows of classes from `vocab_start_index`.
      target: (BT), int32 or int64.
      vocab_start_index: the part's first class, not negative. May be a traced (), as it differs between devices in
        shard_map.
      vocab_end_index: the class after its last (the documents' formula includes it; their kernels do not), at least
        the start.
      return_logits: whether the logits are returned.

    Returns:
      OnlineMaxSum: float32 statistics (BT); `target_mask` uint8 (ceil(BT / 8)) with a bit for each row, lowest bit
      first, 1 where the target belongs to another part; `masked_target` (BT) of the target's dtype;
      `vocab_parallel_logits` (BT, V) of the input's dtype, or None.

    Raises:
      BadParamError: status 161001 for None, 161002 for other dtypes, ranks, shapes or indices.

    Numerics:
      The statistics come from float32 logits, also where rounded ones are returned. The documented limit H <= 65534 is
      the vendor's hardware's and not enforced.

    Source:
      CANN aclnnFusedLinearOnlineMaxSum.
    """
    name = "fused_linear_online_max_sum"
    x, weight, target = as_arrays(name, {"input": input, "weight": weight, "target": target})
    _check_dtype(name, "input", x, INPUT_DTYPES)
    require(weight.dtype == x.dtype, name, "weight", f"have the input's dtype {x.dtype}", weight)
    _check_dtype(name, "target", target, TARGET_DTYPES)
    start = require_integer(name, "vocab_start_index", vocab_start_index, most=_INT64_MAX, traced=True)
    end = require_integer(name, "vocab_end_index", vocab_end_index, most=_INT64_MAX, traced=True)
    return_logits = require_bool(name, "return_logits", return_logits, or_int=True)
    if isinstance(start, int):
        require(start >= 0, name, "vocab_start_index", "not be negative", start)
        if isinstance(end, int):
            require(end >= start, name, "vocab_end_index", f"be at least vocab_start_index {start}", end)
    _check_rank(name, 2, input=x, weight=weight)
    return vocab_parallel.fused_linear_online_max_sum(
        x, weight, target, start=start, end=end, return_logits=return_logits
    )


def fused_cross_entropy_loss_with_max_sum(
    logits_max: jax.Array,
    sum_exp_logits: jax.Array,
    predicted_logits: jax.Array,
    *,
    label_smoothing: float = 0.0,
    vocab_parallel_logits: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """Computes each row's loss from statistics of all its logits, and the softmax of one part's logits if given.

        loss = log(sum_exp_logits) - predicted_logits
        softmax = exp(vocab_parallel_logits - logits_max[:, None]) / sum_exp_logits[:, None]

    Args:
      logits_max: (BT) float32, over all devices.
      sum_exp_logits: (BT) float32, over all devices.
      predicted_logits: (BT) float32, over all devices.
      label_smoothing: must be 0.
      vocab_parallel_logits: (BT, V), float32, float16 or bfloat16.

    Returns:
      The loss (BT) and softmax (BT, V), both float32, or None for the latter. Rows of one part's softmax do not sum to
      1.

    Raises:
      BadParamError: status 161001 for None, 161002 for other dtypes, ranks, shapes or label_smoothing.

    Numerics:
      float32 throughout. A sum of 0 gives -inf, a negative one NaN.

    Source:
      CANN aclnnFusedCrossEntropyLossWithMaxSum.
    """
    name = "fused_cross_entropy_loss_with_max_sum"
    statistics = {"logits_max": logits_max, "sum_exp_logits": sum_exp_logits, "predicted_logits": predicted_logits}
    maximum, total, predicted = as_arrays(name, statistics)
    for argument, value in zip(statistics, (maximum, total, predicted), strict=True):
        _check_dtype(name, argument, value, ("float32",))
    logits = as_optional(name, "vocab_parallel_logits", vocab_parallel_logits)
    if logits is not None:
        _check_dtype(name, "vocab_parallel_logits", logits, LOGITS_DTYPES)
    _check_no_smoothing(name, label_smoothing)
    _check_rank(name, 1, logits_max=maximum)
    if logits is not None:
        _check_rank(name, 2, vocab_parallel_logits=logits)
    return vocab_parallel.fused_cross_entropy_loss_with_max_sum(maximum, total, predicted, logits)


def fused_linear_cross_entropy_loss_grad(
    grad: jax.Array,
    input: jax.Array,
    weight: jax.Array,
    target_mask: jax.Array,
    masked_target: jax.Array,
    *,
    label_smoothing: float = 0.0,
    logits_max: jax.Array | None = None,
    sum_exp_logits: jax.Array | None = None,
    softmax: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Computes the gradients of input and weight for one part of the vocabulary.

        P = softmax, or exp(input weight^T - logits_max[:, None]) / sum_exp_logits[:, None] where it is not given
        P[b, masked_target[b]] -= 1 where the target is on this part;  P *= grad[:, None]
        input_grad = round(P) weight;  weight_grad = round(P)^T input

    Args:
      grad: (BT) float32, the gradient of each row's loss.
      input: (BT, H), float16 or bfloat16.
      weight: (V, H) of the input's dtype.
      target_mask: as `fused_linear_online_max_sum` returns it, uint8 with at least BT bits; or (BT) bool.
      masked_target: (BT), int32 or int64, as returned there.
      label_smoothing: must be 0.
      logits_max: (BT) float32, over all devices. Needed without `softmax`, ignored with it.
      sum_exp_logits: (BT) float32, over all devices. Needed without `softmax`, ignored with it.
      softmax: (BT, V) float32, V >= 128. None computes the logits once more instead, in less memory.

    Returns:
      input_grad (BT, H), to be summed over the devices, and weight_grad (V, H), of the input's dtype.

    Raises:
      BadParamError: status 161001 for None, 161002 for other dtypes, ranks, shapes or label_smoothing.

    Numerics:
      P is float32 and rounded to the input's dtype before both products, which accumulate in float32. To float16 a row
      is rounded after it was divided by a power of two near its `grad`, which the products take back: what a small or
      large `grad` would take out of float16's range keeps its digits. The documented kernel destroys `softmax`; here it
      stays. Its tiling limits (BT, V, H <= 65535) are not enforced.

    Source:
      CANN aclnnFusedLinearCrossEntropyLossGrad.
    """
    name = "fused_linear_cross_entropy_loss_grad"
    required = {
        "grad": grad,
        "input": input,
        "weight": weight,
        "target_mask": target_mask,
        "masked_target": masked_target,
    }
    require_present(name, required)
    if softmax is None:
        require_present(name, {"logits_max": logits_max, "sum_exp_logits": sum_exp_logits})
    else:
        logits_max = sum_exp_logits = None
    grad, x, weight, target_mask, masked_target = as_arrays(name, required)
    optional = {"logits_max": logits_max, "sum_exp_logits": sum_exp_logits, "softmax": softmax}
    given = {argument: as_array(name, argument, value) for argument, value in optional.items() if value is not None}
    for argument, value in {"grad": grad, **given}.items():
        _check_dtype(name, argument, value, ("float32",))
    _check_dtype(name, "input", x, INPUT_DTYPES)
    require(weight.dtype == x.dtype, name, "weight", f"have the input's dtype {x.dtype}", weight)
    _check_dtype(name, "target_mask", target_mask, ("uint8", "bool"))
    _check_dtype(name, "masked_target", masked_target, TARGET_DTYPES)
    _check_no_smoothing(name, label_smoothing)
    _check_rank(name, 2, input=x, weight=weight)
    _check_rank(name, 1, target_mask=target_mask)
    rows = x.shape[0]
    if target_mask.dtype == jnp.uint8:
        require(8 * target_mask.size >= rows, name, "target_mask", f"have a bit for each of {rows} rows", target_mask)
    if softmax is not None:
        shape = (rows, weight.shape[0])
        require(given["softmax"].shape == shape, name, "softmax", f"have shape {list(shape)}", softmax)
        rule = f"be empty, or at least {LEAST_VOCABULARY_WITH_SOFTMAX} long in V where softmax is given"
        fits = weight.shape[0] >= LEAST_VOCABULARY_WITH_SOFTMAX or weight.size == 0
        require(fits, name, "weight", rule, weight)
    return vocab_parallel.fused_linear_cross_entropy_loss_grad(grad, x, weight, target_mask, masked_target, **given)


def _check_dtype(name: str, argument: str, value: jax.Array, dtypes: tuple[str, ...]) -> None:
    require(value.dtype.name in dtypes, name, argument, f"be {' or '.join(dtypes)}", value)


def _check_rank(name: str, rank: int, **arguments: jax.Array) -> None:
    for argument, value in arguments.items():
        require(value.ndim == rank, name, argument, f"have rank {rank}", value)


def _check_no_smoothing(name: str, label_smoothing: float) -> None:
    require_real(name, "label_smoothing", label_smoothing, "be 0", least=0, most=0)
