"""Negative log-likelihood: the loss of a label is minus its log-probability, times the weight of its class.

A kernel would gain nothing here. The loss reads one element per position. The gradient compares labels with classes,
which XLA compiles to one loop that writes every element once. On TPUs and GPUs the loop also fuses into the gradient of
a log-softmax, so that this gradient is never stored at all. A kernel would end such a fusion.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from jaxops._checks.arguments import as_arrays, as_optional, require, require_choice, require_integer
from jaxops._checks.dtypes import accumulation_dtype, differ_from, require_numbered, wide_ids
from jaxops._primitive.derivative import Active, Arrays, Derivative
from jaxops._primitive.operator import Operator
from jaxops._primitive.sharding import reshaped, sharding_of_result
from jaxops.embedding import EMBEDDING_DENSE_BACKWARD

REDUCTIONS = ("none", "mean", "sum")


def nll_loss(
    log_probs: jax.Array,
    labels: jax.Array,
    weight: jax.Array | None = None,
    *,
    axis: int = -1,
    ignore_index: int = -100,
    reduction: str = "mean",
) -> jax.Array:
    """Computes the negative log-likelihood of labels: `-weight[label] * log_probs[label]`, or 0 where ignored.

    "none" returns this loss at every position. "sum" adds the losses up, and "mean" returns
    `sum(loss) / sum(weight[label])` over the positions that are not ignored.

    Args:
      log_probs: (..., C), or with the classes along `axis`; floating point.
      labels: (...), integers in [0, C) or `ignore_index`. Any other label makes the loss NaN at its position, and with
        it a sum or mean; its row of the gradient of a sum is zero. It raises no error because values are unknown under
        jit.
      weight: (C,), floating point: the weight of each class. None means ones.
      axis: the axis of `log_probs` that holds the classes. Nothing is transposed.
      ignore_index: the label of positions to skip. Their log-probabilities are not read, nor is the weight of this
        class. Any integer is allowed, even one that is not a class or that the dtype of `labels` cannot hold.
      reduction: "none", "mean" or "sum".

    Returns:
      A scalar, or an array with the shape of `labels` for "none"; the dtype is that of `log_probs`.

    Raises:
      BadParamError: if a dtype or shape differs from the above, if there are labels but no classes, or if `axis`,
        `ignore_index` or `reduction` is not one of the values above.

    Numerics:
      Computed in float32 (float64 for float64 `log_probs`) and rounded once.

      If there is nothing to divide by (all positions ignored, or zero weights), a mean is NaN, as in PyTorch. If all
      positions are ignored, its gradient is zero.

      The gradient writes the whole array once. Derivatives of all modes and orders exist in `log_probs` and `weight`.

    Meshes:
      Any axis may be split. If three or more axes follow the classes and the third or a later one is split, devices
      exchange elements so that the second one is split instead. Elements are gathered only if the second axis cannot be
      divided by that many devices.

    Example:
      >>> log_probs = jnp.log(jnp.array([[0.5, 0.5], [0.25, 0.75], [0.1, 0.9]]))
      >>> labels = jnp.array([0, 0, -100])
      >>> # Log 2, log 4, ignored.
      >>> print(np.asarray(jaxops.nll_loss(log_probs, labels, reduction="none")).round(3))
      [0.693 1.386 0.   ]

    Source: CANN `aclnnNLLLoss` and `aclnnNLLLoss2d`; PyTorch `torch.nn.functional.nll_loss`.
    """
    log_probs, labels = as_arrays("nll_loss", {"log_probs": log_probs, "labels": labels})
    weight = as_optional("nll_loss", "weight", weight)
    require_choice("nll_loss", "reduction", reduction, REDUCTIONS)
    require(log_probs.ndim > 0, "nll_loss", "log_probs", "have an axis of classes", log_probs)
    rank = log_probs.ndim
    axis = require_integer("nll_loss", "axis", axis, f"be in [{-rank}, {rank})", least=-rank, most=rank - 1)
    axis = axis % rank - rank
    ignore_index = require_integer("nll_loss", "ignore_index", ignore_index)
    _check(log_probs, labels, weight, name="nll_loss", axis=axis, ignore_index=ignore_index)
    if weight is None:
        weight = jnp.ones(log_probs.shape[axis], jnp.float32)
    losses, weights = _at_positions(log_probs, labels, weight, axis=axis, ignore_index=ignore_index)
    return reduced(losses, weights, reduction).astype(log_probs.dtype)


def reduced(losses: jax.Array, weights: jax.Array, reduction: str) -> jax.Array:
    """Reduces the losses of all positions, without rounding them yet."""
    if reduction == "none":
        return losses
    total = jnp.sum(losses)
    return total / jnp.sum(weights) if reduction == "mean" else total


def _at_positions(
    log_probs: jax.Array, labels: jax.Array, weight: jax.Array, *, axis: int, ignore_index: int
) -> Arrays:
    """Computes the loss and weight at each position."""
    if axis == -1:
        return NLL_LOSS(log_probs, labels, weight, ignore_index=ignore_index)
    # Any axes behind the classes can be viewed as the two axes of an image, without moving data.
    before, classes, behind = log_probs.shape[:axis], log_probs.shape[axis], log_probs.shape[axis + 1 :]
    image = (behind[0], math.prod(behind[1:]))
    images = reshaped(log_probs, (*before, classes, *image)), reshaped(labels, (*before, *image))
    results = NLL_LOSS2D(*images, weight, ignore_index=ignore_index)
    axes = " ".join(f"axis{i}" for i in range(len(behind)))
    sharding = sharding_of_result(f"... c {axes}, ... {axes} -> ... {axes}", log_probs, labels)
    losses, weights = (reshaped(result, labels.shape, sharding=sharding) for result in results)
    return losses, weights


def _check(log_probs: Any, labels: Any, weight: Any, *, name: str, axis: int, ignore_index: int) -> None:
    require(jnp.issubdtype(log_probs.dtype, jnp.floating), name, "log_probs", "be floating point", log_probs)
    require(log_probs.ndim >= -axis, name, "log_probs", f"have rank {-axis} or more", log_probs)
    require(jnp.issubdtype(labels.dtype, jnp.integer), name, "labels", "be integers", labels)
    positions = tuple(size for at, size in enumerate(log_probs.shape, -log_probs.ndim) if at != axis)
    require(labels.shape == positions, name, "labels", f"have shape {positions}, as log_probs without classes", labels)
    classes = log_probs.shape[axis]
    require(classes > 0 or labels.size == 0, name, "log_probs", "have at least one class", log_probs)
    require_numbered(name, "log_probs", log_probs, classes, labels)
    if weight is not None:
        require(weight.shape == (classes,), name, "weight", f"have shape ({classes},), one for each class", weight)
        require(jnp.issubdtype(weight.dtype, jnp.floating), name, "weight", "be floating point", weight)


def _check_backward(grad: Any, labels: Any, weight: Any, *, name: str, ignore_index: int, dtype: Any) -> None:
    require(jnp.issubdtype(labels.dtype, jnp.integer), name, "labels", "be integers", labels)
    require(grad.shape == labels.shape, name, "grad", f"have the shape of labels, {labels.shape}", grad)
    require(weight.ndim == 1, name, "weight", "have shape (C,)", weight)
    for argument, value in (("grad", grad), ("weight", weight)):
        require(jnp.issubdtype(value.dtype, jnp.floating), name, argument, "be floating point", value)


def _loss(log_probs: jax.Array, labels: jax.Array, weight: jax.Array, *, axis: int, ignore_index: int) -> Arrays:
    ids, kept, live = _classify(labels, weight.shape[0], ignore_index)
    safe_ids = jnp.expand_dims(jnp.where(live, ids, 0), axis)
    picked = jnp.take_along_axis(log_probs, safe_ids, axis, mode="clip").squeeze(axis)
    dtype = accumulation_dtype(log_probs.dtype)
    # Masked here and not only in the result, because a skipped NaN must not reach derivatives either.
    picked = jnp.where(live, picked, jnp.zeros((), picked.dtype)).astype(dtype)
    weights = _weights(weight, ids, live, dtype)
    elsewhere = jnp.where(kept, jnp.array(jnp.nan, dtype), jnp.zeros((), dtype))
    return jnp.where(live, -weights * picked, elsewhere), jnp.where(live, weights, elsewhere)


def _backward(
    grad: jax.Array, labels: jax.Array, weight: jax.Array, *, axis: int, ignore_index: int, dtype: Any
) -> Arrays:
    ids, _, live = _classify(labels, weight.shape[0], ignore_index)
    weights = _weights(weight, ids, live, accumulation_dtype(grad.dtype))
    values = (-grad.astype(weights.dtype) * weights).astype(dtype)
    # A comparison writes the zeros and the values in one pass; a scatter writes the zeros first.
    shape = list(labels.shape)
    shape.insert(len(shape) + 1 + axis, weight.shape[0])
    classes = jax.lax.broadcasted_iota(ids.dtype, shape, len(shape) + axis)
    hit = jnp.expand_dims(jnp.where(live, ids, -1), axis) == classes
    return (jnp.where(hit, jnp.expand_dims(values, axis), jnp.zeros((), dtype)),)


def _classify(labels: jax.Array, classes: int, ignore_index: int) -> Arrays:
    """Returns labels as ids, where they are not ignored, and where they are also classes."""
    ids = wide_ids(labels)
    kept = differ_from(labels, ignore_index)
    return ids, kept, kept & (ids >= 0) & (ids < classes)


def _weights(weight: jax.Array, ids: jax.Array, live: jax.Array, dtype: Any) -> jax.Array:
    if weight.size == 0:
        return jnp.zeros_like(ids, dtype)
    picked = weight.at[jnp.where(live, ids, 0)].get(mode="clip").astype(dtype)
    return jnp.where(live, picked, jnp.zeros((), dtype))


def _vjp(residuals: Arrays, cotangents: Arrays, active: Active, *, axis: int, ignore_index: int) -> list[Any]:
    log_probs, labels, weight, *_ = residuals
    grad_losses, grad_weights = cotangents
    forward, backward = (NLL_LOSS, NLL_LOSS_BACKWARD) if axis == -1 else (NLL_LOSS2D, NLL_LOSS2D_BACKWARD)
    has_log_probs, _, has_weight = active
    log_probs_grad = weight_grad = None
    if has_log_probs:
        (log_probs_grad,) = backward(grad_losses, labels, weight, ignore_index=ignore_index, dtype=log_probs.dtype)
    if has_weight:
        # The loss is linear in the weights. Their gradient sums positions by class, like an embedding of width one.
        unweighted, _ = forward(log_probs, labels, jnp.ones_like(weight), ignore_index=ignore_index)
        by_position = unweighted * grad_losses + grad_weights
        classes = weight.shape[0]
        padding_idx = ignore_index if 0 <= ignore_index < classes else None
        attributes = {"num_weights": classes, "padding_idx": padding_idx, "scale_grad_by_freq": False}
        (by_class,) = EMBEDDING_DENSE_BACKWARD(by_position[..., None], labels, **attributes)
        weight_grad = by_class[:, 0].astype(weight.dtype)
    return [log_probs_grad, None, weight_grad]


_ONE_PASS = "XLA picks a value of each row, and writes the gradient in one pass"
NLL_LOSS = Operator(
    "nll_loss",
    "... c, ..., c -> ..., ...",
    functools.partial(_check, name="nll_loss", axis=-1),
    functools.partial(_loss, axis=-1),
    Derivative(functools.partial(_vjp, axis=-1)),
    no_kernel=_ONE_PASS,
)
NLL_LOSS_BACKWARD = Operator(
    "nll_loss_backward",
    "..., ..., c -> ... c",
    functools.partial(_check_backward, name="nll_loss_backward"),
    functools.partial(_backward, axis=-1),
    no_kernel=_ONE_PASS,
)
NLL_LOSS2D = Operator(
    "nll_loss2d",
    "... c h w, ... h w, c -> ... h w, ... h w",
    functools.partial(_check, name="nll_loss2d", axis=-3),
    functools.partial(_loss, axis=-3),
    Derivative(functools.partial(_vjp, axis=-3)),
    no_kernel=_ONE_PASS,
)
NLL_LOSS2D_BACKWARD = Operator(
    "nll_loss2d_backward",
    "... h w, ... h w, c -> ... c h w",
    functools.partial(_check_backward, name="nll_loss2d_backward"),
    functools.partial(_backward, axis=-3),
    no_kernel=_ONE_PASS,
)
