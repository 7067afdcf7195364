"""The documented calls of the negative log-likelihood family."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxops._checks.attributes import require_integer
from jaxops._checks.errors import require
from jaxops._checks.operands import as_arrays
from jaxops._primitive.operator import Operator
from jaxops.nll_loss import NLL_LOSS, NLL_LOSS2D, NLL_LOSS2D_BACKWARD, NLL_LOSS_BACKWARD, reduced

DTYPES = ("float32", "float16", "bfloat16")
TARGET_DTYPES = ("int64", "int32", "uint8")
RANKS = {"nll_loss": (1, 2), "nll_loss_backward": (1, 2), "nll_loss2d": (4,), "nll_loss2d_backward": (4,)}
REDUCTIONS = {0: "none", 1: "mean", 2: "sum"}


def nll_loss(
    x: jax.Array, target: jax.Array, weight: jax.Array, *, reduction: int, ignore_index: int
) -> tuple[jax.Array, jax.Array]:
    """The negative log-likelihood of targets: `out[n] = -weight[target[n]] * x[n, target[n]]`, and their total weight.

    Args:
      x: (N, C) or (C), log-probabilities; float32, float16 or bfloat16.
      target: (N) or (), as `x` has rows or is one; int64, int32 or uint8. Rows with a target that is neither a class
        nor `ignore_index` become NaN, as do their sums.
      weight: (C), with the dtype of `x`.
      reduction: 0 none, 1 mean (the sum divided by total_weight), 2 sum.
      ignore_index: rows with this target contribute nothing and are not read; any integer.

    Returns:
      (out, total_weight) with the dtype of `x`. `out` is (N) for reduction 0 of a two-dimensional `x`, else ().
      `total_weight` is (), the sum of `weight[target]` over rows that are not ignored; 0 for reduction 0, for which it
      is not documented.

    Raises:
      BadParamError: status 161001 if an operand is None; 161002 if a dtype, rank, shape or attribute is not as above,
        or there are targets but no classes.

    Numerics: computed in float32 and rounded once; also total_weight. The mean of nothing is NaN.

    Source: CANN `aclnnNLLLoss`.
    """
    return _forward(NLL_LOSS, x, target, weight, reduction, ignore_index)


def nll_loss2d(
    x: jax.Array, target: jax.Array, weight: jax.Array, *, reduction: int, ignore_index: int
) -> tuple[jax.Array, jax.Array]:
    """`nll_loss` of images: `out[n, h, w] = -weight[t] * x[n, t, h, w]` with `t = target[n, h, w]`.

    Args:
      x: (N, C, H, W), log-probabilities; float32, float16 or bfloat16.
      target: (N, H, W); int64, int32 or uint8.
      weight: C elements, with the dtype of `x`.
      reduction: as in `nll_loss`, over all pixels.
      ignore_index: as in `nll_loss`.

    Returns:
      (out, total_weight) as of `nll_loss`; `out` is (N, H, W) for reduction 0.

    Raises:
      BadParamError: as `nll_loss`.

    Numerics: as `nll_loss`.

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
    """The gradient of `nll_loss`: `out[n, target[n]] = -g[n] * weight[target[n]]` in rows not ignored, 0 elsewhere.

    g is `grad_output`, and `grad_output / total_weight` for the mean.

    Args:
      grad_output: (N) for reduction 0 of a two-dimensional `x`, else one element of rank 0 or 1.
      x: (N, C) or (C); only its shape is used. float32, float16 or bfloat16, and so are, alike, all but `target`.
      target: (N) or (); int64, int32 or uint8. Rows with a target that is neither a class nor `ignore_index` are 0.
      weight: (C).
      total_weight: one element; used as it is given, and for the mean only.
      reduction: 0 none, 1 mean, 2 sum.
      ignore_index: rows with this target are 0, whatever total_weight is.

    Returns:
      The shape and dtype of `x`.

    Raises:
      BadParamError: status 161001 if an operand is None; 161002 if a dtype, rank, shape or attribute is not as above.

    Numerics: quotient, then product, in float32 and rounded once.

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
    """The gradient of `nll_loss2d`; `nll_loss_backward` of images.

    Args:
      grad_output: (N, H, W) for reduction 0, else one element of rank 0 or 1.
      x: (N, C, H, W); only its shape is used. float32, float16 or bfloat16, and so are, alike, all but `target`.
      target: (N, H, W); int64, int32 or uint8.
      weight: C elements.
      total_weight: one element; used as it is given, and for the mean only.
      reduction: 0 none, 1 mean, 2 sum.
      ignore_index: pixels with this target are 0, whatever total_weight is.

    Returns:
      The shape and dtype of `x`.

    Raises:
      BadParamError: as `nll_loss_backward`.

    Numerics: as `nll_loss_backward`.

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
