"""The `aclnn` calls for linear cross entropy over a vocabulary that is split between devices."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxops._checks.arguments import (
    as_array,
    as_arrays,
    as_optional,
    require,
    require_bool,
    require_integer,
    require_present,
    require_real,
)
from jaxops._primitive.sharding import require_split
from jaxops.linear_cross_entropy import vocab_parallel
from jaxops.linear_cross_entropy.vocab_parallel import OnlineMaxSum as OnlineMaxSum

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
    """Computes the statistics of one part of the vocabulary, from which the devices together get a cross entropy.

    With L = input weight^T, m = max_n L[b, n] and masked = target < start or target >= end:

        logits_max_local[b] = m
        sum_exp_logits_local[b] = sum_n exp(L[b, n] - m)
        masked_target[b] = 0 if masked else target[b] - start
        predicted_logits_local[b] = 0 if masked else L[b, target[b] - start] - m

    The sum and the predicted logits are relative to the local maximum. Rebase them to the global one before adding over
    devices.

    Args:
      input: (BT, H), float16 or bfloat16.
      weight: (V, H), V > 0, with the input's dtype: the rows of the classes from `vocab_start_index` on.
      target: (BT), int32 or int64.
      vocab_start_index: the part's first class; not negative. May be a traced (), because it differs between the
        devices of a shard_map.
      vocab_end_index: the class after the part's last; at least the start. (The documents' formula includes it; their
        kernels do not.)
      return_logits: whether to return the logits.

    Returns:
      An `OnlineMaxSum`. The statistics are float32 (BT). `target_mask` is uint8 (ceil(BT / 8)) with one bit per row,
      lowest bit first, 1 where the target belongs to another part. `masked_target` is (BT) with the target's dtype.
      `vocab_parallel_logits` is (BT, V) with the input's dtype, or None.

    Raises:
      BadParamError: with status 161001 if an operand is None, 161002 if a dtype, rank, shape or index is wrong, or if
        the devices of a shard_map have different first classes but, as its in_specs say, one weight. With `check_vma`
        off nothing says so, and all classes of that weight count once for each device.

    Numerics:
      The statistics come from float32 logits even if rounded ones are returned. The documented limit H <= 65534 belongs
      to the vendor's hardware and is not enforced.

    Example:
      >>> x, weight = jnp.ones((2, 1), jnp.bfloat16), jnp.zeros((4, 1), jnp.bfloat16)
      >>> part = jaxops.aclnn.fused_linear_online_max_sum(
      ...     x, weight, jnp.array([5, 9]), vocab_start_index=4, vocab_end_index=8
      ... )  # four equal logits a row; class 5 is here, class 9 is not
      >>> part.sum_exp_logits_local.tolist(), part.masked_target.tolist()
      ([4.0, 4.0], [1, 0])

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
    _check_weight(name, x, weight)
    require(weight.shape[0] > 0, name, "weight", "have a vocabulary of at least 1", weight)
    _check_shapes(name, x.shape[:1], "", target=target)
    if isinstance(start, jax.Array):
        # Parts that begin at different classes are different parts of a weight.
        require_split(name, "weight", weight, start)
    largest = jnp.iinfo(target.dtype).max
    start, end = (jnp.asarray(min(at, largest) if isinstance(at, int) else at, target.dtype) for at in (start, end))
    found = vocab_parallel.ONLINE_MAX_SUM(x, weight, target, start, end, return_logits=return_logits)
    # As in the documented kernel, the bits after the last row are those of target 0.
    return found._replace(target_mask=vocab_parallel.PACK(found.target_mask, (start > 0) | (end <= 0)))


def fused_cross_entropy_loss_with_max_sum(
    logits_max: jax.Array,
    sum_exp_logits: jax.Array,
    predicted_logits: jax.Array,
    *,
    label_smoothing: float = 0.0,
    vocab_parallel_logits: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """Computes each row's loss from the statistics of all its logits, and the softmax of one part's logits if given.

        loss = log(sum_exp_logits) - predicted_logits
        softmax = exp(vocab_parallel_logits - logits_max[:, None]) / sum_exp_logits[:, None]

    Args:
      logits_max: (BT) float32, over all devices.
      sum_exp_logits: (BT) float32, over all devices.
      predicted_logits: (BT) float32, over all devices.
      label_smoothing: must be 0.
      vocab_parallel_logits: (BT, V), float32, float16 or bfloat16.

    Returns:
      The loss (BT) and the softmax (BT, V), both float32; None instead of the softmax without logits. The rows of one
      part's softmax do not sum to 1.

    Raises:
      BadParamError: with status 161001 if an operand is None, 161002 if a dtype, rank, shape or label_smoothing is
        wrong.

    Numerics:
      float32 throughout. A sum of 0 gives -inf, a negative one NaN.

    Example:
      >>> maximum, total, predicted = jnp.array([0.0]), jnp.array([4.0]), jnp.array([0.0])
      >>> loss, _ = jaxops.aclnn.fused_cross_entropy_loss_with_max_sum(
      ...     maximum, total, predicted
      ... )
      >>> print(np.asarray(loss).round(3))  # four equal logits: log 4
      [1.386]

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
    rows = maximum.shape
    for argument, value in {"sum_exp_logits": total, "predicted_logits": predicted}.items():
        require(value.shape == rows, name, argument, f"have logits_max's shape {list(rows)}", value)
    if logits is not None:
        _check_rank(name, 2, vocab_parallel_logits=logits)
        rule = f"have shape [{rows[0]}, V]"
        require(logits.shape[:1] == rows, name, "vocab_parallel_logits", rule, logits)
    loss, _ = vocab_parallel.LOSS(maximum, total, predicted, None)
    # Two calls, because inside shard_map the loss is the same on all devices and the softmax is not.
    return loss, None if logits is None else vocab_parallel.LOSS(maximum, total, predicted, logits)[1]


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

        P = softmax; if it is not given,
        P = exp(input weight^T - logits_max[:, None]) / sum_exp_logits[:, None]
        P[b, masked_target[b]] -= 1 where the target is on this part;  P *= grad[:, None]
        input_grad = round(P) weight;  weight_grad = round(P)^T input

    Args:
      grad: (BT) float32, the gradient of each row's loss.
      input: (BT, H), float16 or bfloat16.
      weight: (V, H), with the input's dtype.
      target_mask: as `fused_linear_online_max_sum` returns it, uint8 with at least BT bits; or (BT) bool.
      masked_target: (BT), int32 or int64, as returned there.
      label_smoothing: must be 0.
      logits_max: (BT) float32, over all devices. Needed without `softmax`, ignored with it.
      sum_exp_logits: (BT) float32, over all devices. Needed without `softmax`, ignored with it.
      softmax: (BT, V) float32, V >= 128. None computes the logits again instead, in less memory.

    Returns:
      input_grad (BT, H), still to be summed over the devices, and weight_grad (V, H), both with the input's dtype.

    Raises:
      BadParamError: with status 161001 if an operand is None, 161002 if a dtype, rank, shape or label_smoothing is
        wrong.

    Numerics:
      P is float32 and is rounded to the input's dtype before both products, which accumulate in float32. For float16,
      each row is divided by a power of two near its `grad` before it is rounded, and the products multiply it back. So
      a very small or large `grad` keeps its digits instead of leaving float16's range.

      The documented kernel destroys `softmax`; here it stays. Its tiling limits (BT, V, H <= 65535) are not enforced.

    Example:
      >>> x, weight = jnp.ones((1, 1), jnp.bfloat16), jnp.zeros((4, 1), jnp.bfloat16)
      >>> _, weight_grad = jaxops.aclnn.fused_linear_cross_entropy_loss_grad(
      ...     jnp.ones(1), x, weight, jnp.array([False]), jnp.array([2]),
      ...     logits_max=jnp.zeros(1), sum_exp_logits=jnp.full(1, 4.0),
      ... )
      >>> weight_grad.ravel().tolist()  # the softmax, 1/4 each, minus 1 at the target
      [0.25, 0.25, -0.75, 0.25]

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
    present = {argument: as_array(name, argument, value) for argument, value in optional.items() if value is not None}
    for argument, value in {"grad": grad, **present}.items():
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
        rule = f"be empty, or at least {LEAST_VOCABULARY_WITH_SOFTMAX} long in V where softmax is given"
        fits = weight.shape[0] >= LEAST_VOCABULARY_WITH_SOFTMAX or weight.size == 0
        require(fits, name, "weight", rule, weight)
    _check_weight(name, x, weight)
    mask = target_mask if target_mask.dtype == jnp.bool_ else None
    statistics = {argument: present.get(argument) for argument in ("logits_max", "sum_exp_logits")}
    of_rows = {"grad": grad, "target_mask": mask, "masked_target": masked_target, **statistics}
    _check_shapes(name, (rows,), ", as input has rows", **of_rows)
    _check_shapes(name, (rows, weight.shape[0]), "", softmax=present.get("softmax"))
    mask = vocab_parallel.UNPACK(target_mask, grad) if mask is None else mask
    return vocab_parallel.LOSS_GRAD(grad, x, weight, mask, masked_target, *statistics.values(), present.get("softmax"))


def _check_dtype(name: str, argument: str, value: jax.Array, dtypes: tuple[str, ...]) -> None:
    require(value.dtype.name in dtypes, name, argument, f"be {' or '.join(dtypes)}", value)


def _check_rank(name: str, rank: int, **arguments: jax.Array) -> None:
    for argument, value in arguments.items():
        require(value.ndim == rank, name, argument, f"have rank {rank}", value)


def _check_weight(name: str, x: jax.Array, weight: jax.Array) -> None:
    require(weight.shape[1] == x.shape[1], name, "weight", f"have shape (V, {x.shape[1]})", weight)


def _check_shapes(name: str, shape: tuple[int, ...], reason: str, **arguments: jax.Array | None) -> None:
    for argument, value in arguments.items():
        fits = value is None or value.shape == shape
        require(fits, name, argument, f"have shape {list(shape)}{reason}", value)


def _check_no_smoothing(name: str, label_smoothing: float) -> None:
    require_real(name, "label_smoothing", label_smoothing, "be 0", least=0, most=0)
