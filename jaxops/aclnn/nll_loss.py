"""The `aclnn` calls for the negative log-likelihood."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxops._checks.arguments import as_arrays, require, require_integer
from jaxops._primitive.operator import Operator
from jaxops.nll_loss import NLL_LOSS, NLL_LOSS2D, NLL_LOSS2D_BACKWARD, NLL_LOSS_BACKWARD, reduced

DTYPES = ("float32", "float16", "bfloat16")
TARGET_DTYPES = ("int64", "int32", "uint8")
RANKS = {"nll_loss": (1, 2), "nll_loss_backward": (1, 2), "nll_loss2d": (4,), "nll_loss2d_backward": (4,)}
REDUCTIONS = {0: "none", 1: "mean", 2: "sum"}


def nll_loss(
    x: jax.Array, target: jax.Array, weight: jax.Array, *, reduction: int, ignore_index: int
) -> tuple[jax.Array, jax.Array]:
    """Computes the negative log-likelihood `out[n] = -weight[target[n]] * x[n, target[n]]` and the total weight.

    Args:
      x: (N, C) or (C), log-probabilities; float32, float16 or bfloat16.
      target: (N), or () if x is (C); int64, int32 or uint8. A target that is neither a class nor `ignore_index` makes
        its row NaN, and with it a sum or mean.
      weight: (C), with the dtype of `x`.
      reduction: 0 none, 1 mean (the sum divided by total_weight), 2 sum.
      ignore_index: rows with this target contribute nothing and are not read; any integer.

    Returns:
      (out, total_weight), with the dtype of `x`. `out` is (N) for reduction 0 of a two-dimensional `x`, else ().
      `total_weight` is (), the sum of `weight[target]` over rows that are not ignored; for reduction 0 it is 0, where
      the documents say nothing.

    Raises:
      BadParamError: with status 161001 if an operand is None; with 161002 if a dtype, rank, shape or attribute differs
        from the above, or there are targets but no classes.

    Numerics:
      Both results are computed in float32 and rounded once. The mean of nothing is NaN.

    Example:
      >>> x, weight = jnp.array([[-1.0, -2.0], [-3.0, -4.0]]), jnp.array([1.0, 3.0])
      >>> # (1 + 12) / (1 + 3)
      >>> jaxops.aclnn.nll_loss(x, jnp.array([0, 1]), weight, reduction=1, ignore_index=-100)
      (Array(3.25, dtype=float32), Array(4., dtype=float32))

    Source: CANN `aclnnNLLLoss`.
    """
    return _forward(NLL_LOSS, x, target, weight, reduction, ignore_index)


def nll_loss2d(
    x: jax.Array, target: jax.Array, weight: jax.Array, *, reduction: int, ignore_index: int
) -> tuple[jax.Array, jax.Array]:
    """Computes `nll_loss` for images: `out[n, h, w] = -weight[t] * x[n, t, h, w]` with `t = target[n, h, w]`.

    Args:
      x: (N, C, H, W), log-probabilities; float32, float16 or bfloat16.
      target: (N, H, W); int64, int32 or uint8.
      weight: C elements, with the dtype of `x`.
      reduction: as in `nll_loss`, over all pixels.
      ignore_index: as in `nll_loss`.

    Returns:
      (out, total_weight) as in `nll_loss`; `out` is (N, H, W) for reduction 0.

    Raises:
      BadParamError: as `nll_loss`.

    Numerics:
      As in `nll_loss`.

    Example:
      >>> x = jnp.array([-1.0, -2.0]).reshape(1, 2, 1, 1)  # one pixel, two classes
      >>> out, _ = jaxops.aclnn.nll_loss2d(
      ...     x, jnp.array([[[1]]]), jnp.ones(2), reduction=2, ignore_index=-100
      ... )
      >>> out
      Array(2., dtype=float32)

    Source: CANN `aclnnNLLLoss2d`.
    """
    return _forward(NLL_LOSS2D, x, target, weight, reduction, ignore_index)


def nll_loss_backward(
    grad_output: jax.Array,
    x: jax.Array,
    target: jax.Array,
    weight: jax.Array,
    total_weight: jax.Array,
    *,
    reduction: int,
    ignore_index: int,
) -> jax.Array:
    """Computes the gradient of `nll_loss`: `out[n, target[n]] = -g[n] * weight[target[n]]` in kept rows, 0 elsewhere.

    g is `grad_output`, or `grad_output / total_weight` for the mean.

    Args:
      grad_output: (N) for reduction 0 of a two-dimensional `x`, else one element of rank 0 or 1.
      x: (N, C) or (C); only its shape is used. float32, float16 or bfloat16; all operands but `target` have this dtype.
      target: (N) or (); int64, int32 or uint8. The row of a target that is neither a class nor `ignore_index` is 0.
      weight: (C).
      total_weight: one element; used for the mean only, and as it is given.
      reduction: 0 none, 1 mean, 2 sum.
      ignore_index: rows with this target are 0, whatever total_weight is.

    Returns:
      An array with the shape and dtype of `x`.

    Raises:
      BadParamError: with status 161001 if an operand is None; with 161002 if a dtype, rank, shape or attribute differs
        from the above.

    Numerics:
      The quotient and then the product are computed in float32 and rounded once.

    Example:
      >>> x, weight = jnp.zeros((2, 2)), jnp.array([1.0, 3.0])
      >>> jaxops.aclnn.nll_loss_backward(
      ...     jnp.ones(()),
      ...     x,
      ...     jnp.array([0, 1]),
      ...     weight,
      ...     jnp.array(4.0),
      ...     reduction=1,
      ...     ignore_index=-100,
      ... ).tolist()
      [[-0.25, 0.0], [0.0, -0.75]]

    Source: CANN `aclnnNLLLossBackward`.
    """
    operands = (grad_output, x, target, weight, total_weight)
    return _backward(NLL_LOSS_BACKWARD, operands, reduction, ignore_index)


def nll_loss2d_backward(
    grad_output: jax.Array,
    x: jax.Array,
    target: jax.Array,
    weight: jax.Array,
    total_weight: jax.Array,
    *,
    reduction: int,
    ignore_index: int,
) -> jax.Array:
    """Computes the gradient of `nll_loss2d`: `nll_loss_backward` for images.

    Args:
      grad_output: (N, H, W) for reduction 0, else one element of rank 0 or 1.
      x: (N, C, H, W); only its shape is used. float32, float16 or bfloat16; all operands but `target` have this dtype.
      target: (N, H, W); int64, int32 or uint8.
      weight: C elements.
      total_weight: one element; used for the mean only, and as it is given.
      reduction: 0 none, 1 mean, 2 sum.
      ignore_index: pixels with this target are 0, whatever total_weight is.

    Returns:
      An array with the shape and dtype of `x`.

    Raises:
      BadParamError: as `nll_loss_backward`.

    Numerics:
      As in `nll_loss_backward`.

    Example:
      >>> x, target = jnp.zeros((1, 2, 1, 1)), jnp.array([[[1]]])
      >>> jaxops.aclnn.nll_loss2d_backward(
      ...     jnp.array(5.0),
      ...     x,
      ...     target,
      ...     jnp.ones(2),
      ...     jnp.ones(()),
      ...     reduction=2,
      ...     ignore_index=-100,
      ... ).ravel().tolist()
      [0.0, -5.0]

    Source: CANN `aclnnNLLLoss2dBackward`.
    """
    operands = (grad_output, x, target, weight, total_weight)
    return _backward(NLL_LOSS2D_BACKWARD, operands, reduction, ignore_index)


def _forward(
    operator: Operator, x: Any, target: Any, weight: Any, reduction: int, ignore_index: int
) -> tuple[jax.Array, jax.Array]:
    x, target, weight = as_arrays(operator.name, {"x": x, "target": target, "weight": weight})
    _check_dtypes(operator.name, x, target, weight=weight)
    _check_attributes(operator.name, reduction, ignore_index)
    _check_shapes(operator.name, x, target, weight)
    require(weight.size > 0 or target.size == 0, operator.name, "x", "have at least one class", x)
    losses, weights = operator(x, target, weight.reshape(-1), ignore_index=int(ignore_index))
    total_weight = jnp.sum(weights) if reduction else jnp.zeros((), weights.dtype)
    return reduced(losses, weights, REDUCTIONS[reduction]).astype(x.dtype), total_weight.astype(x.dtype)


def _backward(operator: Operator, operands: tuple[Any, ...], reduction: int, ignore_index: int) -> jax.Array:
    names = ("grad_output", "x", "target", "weight", "total_weight")
    grad, x, target, weight, total_weight = as_arrays(operator.name, dict(zip(names, operands, strict=True)))
    _check_dtypes(operator.name, x, target, grad_output=grad, weight=weight, total_weight=total_weight)
    _check_attributes(operator.name, reduction, ignore_index)
    _check_shapes(operator.name, x, target, weight)
    require(total_weight.size == 1, operator.name, "total_weight", "have one element", total_weight)
    if REDUCTIONS[reduction] == "none" and target.ndim:
        require(grad.shape == target.shape, operator.name, "grad_output", f"have shape {target.shape}", grad)
    else:
        require(grad.shape in ((), (1,)), operator.name, "grad_output", "have shape () or (1,)", grad)
        grad = grad.reshape(())
    grad = grad.astype(jnp.float32)
    if REDUCTIONS[reduction] == "mean":
        grad = grad / total_weight.astype(jnp.float32).reshape(())
    rows = jnp.broadcast_to(grad, target.shape)
    return operator(rows, target, weight.reshape(-1), ignore_index=int(ignore_index), dtype=x.dtype)[0]


def _check_dtypes(name: str, x: Any, target: Any, **like_x: Any) -> None:
    require(x.dtype.name in DTYPES, name, "x", f"be one of {', '.join(DTYPES)}", x)
    require(target.dtype.name in TARGET_DTYPES, name, "target", f"be one of {', '.join(TARGET_DTYPES)}", target)
    for argument, value in like_x.items():
        require(value.dtype == x.dtype, name, argument, f"have the dtype of x, {x.dtype}", value)


def _check_attributes(name: str, reduction: Any, ignore_index: Any) -> None:
    require_integer(name, "reduction", reduction, "be 0, 1 or 2", least=0, most=2)
    require_integer(name, "ignore_index", ignore_index)


def _check_shapes(name: str, x: Any, target: Any, weight: Any) -> None:
    ranks = RANKS[name]
    require(x.ndim in ranks, name, "x", f"have rank {' or '.join(map(str, ranks))}", x)
    *batch, classes = x.shape if x.ndim < 4 else (*x.shape[:1], *x.shape[2:], x.shape[1])
    require(target.shape == tuple(batch), name, "target", f"have shape {tuple(batch)}, as x without classes", target)
    fits = weight.size == classes and (weight.ndim == 1 or x.ndim == 4)
    require(fits, name, "weight", f"have shape ({classes},), one for each class", weight)
