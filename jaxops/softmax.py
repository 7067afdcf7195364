"""Softmax: the operator and its logarithm over groups of any axes, and the gradients that are documented for them."""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

import lowering
from jaxops._checks.attributes import is_integer
from jaxops._checks.dtypes import accumulation_dtype, check_floating
from jaxops._checks.mcdnn import as_array, require, require_choice
from jaxops._primitive.derivative import Active, Arrays, Derivative
from jaxops._primitive.operator import Operator
from jaxops._primitive.sharding import laid_out_as, reshaped
from pallas_kernels.gpu import softmax as gpu
from pallas_kernels.gpu import softmax_backward as gpu_backward
from pallas_kernels.softmax_groups import Groups
from pallas_kernels.tpu import softmax as tpu
from pallas_kernels.tpu import softmax_backward as tpu_backward

ALGORITHMS = ("fast", "accurate", "log")
# From how many elements on a product with ones sums a row faster than a sum, measured on x86.
_LONG_ROW = 512


def softmax(x: jax.Array, *, axis: int | Sequence[int] = -1, algorithm: str = "accurate") -> jax.Array:
    """Exponentials that add up to 1: `y = exp(x) / sum(exp(x))` over each group of elements.

    "log" gives the logarithm of that: `y = x - log(sum(exp(x)))`. The gradients, of y alone:

        grad_x = y * (grad_y - sum(y * grad_y))
        grad_x = grad_y - exp(y) * sum(grad_y)        "log"

    Args:
      x: floating point, of any shape.
      axis: a group has the elements along this axis, or along all axes of this tuple. As in PyTorch an array without
        axes may be given 0 or -1, and is a group of one.
      algorithm: "accurate", "fast" or "log". "fast" is "accurate" here: the documents let it leave out the maximum, and
        overflow.

    Returns:
      The shape and dtype of x.

    Raises:
      BadParamError: if x is not floating point, an axis is out of range or given twice, or the algorithm is none of the
        above.

    Numerics: the maximum of a group is subtracted first; computed in float32 (float64 for float64) and rounded once.
      -inf gives 0 (-inf for "log"); a group of nothing but -inf gives NaN, as does one with NaN or inf in it. The
      gradient keeps y alone; all modes and orders of derivatives exist. Groups may lie along any axes without being
      transposed. Kernels for TPU and for NVIDIA GPUs from Hopper on, forward and backward, run where
      `jaxops.use("pallas")` asks for them, as they have not been measured on those chips.

    Meshes: any axis may be split, and y lies as x does. Groups of several axes that are split behind their first are
      exchanged between devices, so that they are split along the first; they are gathered only if it cannot be divided
      by as many devices.

    Source: mcDNN `mcdnnSoftmaxForward` and `mcdnnSoftmaxBackward`; PyTorch `torch.nn.functional.softmax`.
    """
    name = "softmax"
    x = as_array(name, "x", x)
    require_choice(name, "algorithm", algorithm, ALGORITHMS)
    check_floating(name, x=x)
    return over_groups(x, log=algorithm == "log", groups=Groups.along(x.shape, _checked_axes(x, axis)))


# Compiled as a whole outside of jit, too, so that what puts groups last and back cancels out there as well.


@functools.partial(jax.jit, static_argnames=("log", "groups"), inline=True)
def over_groups(x: jax.Array, *, log: bool, groups: Groups) -> jax.Array:
    """The softmax, or its logarithm, of an array over its groups."""
    (y,) = SOFTMAX(groups.of(x, reshaped), log=log, groups=groups)
    return laid_out_as(groups.in_memory(y, reshaped), jax.typeof(x).sharding)


@functools.partial(jax.jit, static_argnames=("log", "groups"), inline=True)
def gradient_over_groups(y: jax.Array, grad: jax.Array, *, log: bool, groups: Groups) -> jax.Array:
    """The documented gradient of that, of its result and the result's gradient."""
    (dx,) = SOFTMAX_BACKWARD(groups.of(y, reshaped), groups.of(grad, reshaped), log=log, groups=groups)
    return laid_out_as(groups.in_memory(dx, reshaped), jax.typeof(grad).sharding)


def _checked_axes(x: jax.Array, axis: Any) -> tuple[int, ...]:
    axes = tuple(axis) if isinstance(axis, tuple | list) else (axis,)
    rank = max(x.ndim, 1)
    rule = f"be an integer in [{-rank}, {rank}) or a tuple of different ones"
    fits = all(is_integer(a) and -rank <= int(a) < rank for a in axes)
    require(fits, "softmax", "axis", rule, axis)
    axes = tuple(sorted(int(a) % rank for a in axes))
    require(len({*axes}) == len(axes), "softmax", "axis", rule, axis)
    return axes if x.ndim else ()


def _check(x: Any, *, log: bool, groups: Groups) -> None:
    check_floating("softmax", x=x)
    _check_groups("softmax", "x", x, groups)


def _check_backward(y: Any, grad: Any, *, log: bool, groups: Groups) -> None:
    name = "softmax_backward"
    check_floating(name, y=y, grad=grad)
    _check_groups(name, "grad", grad, groups)
    require(y.shape == grad.shape, name, "y", f"have the shape of grad, {grad.shape}", y)


def _check_groups(operator: str, argument: str, x: Any, groups: Groups) -> None:
    size, behind = math.prod(groups.sizes), max(groups.behind, default=0)
    fits = len(x.shape) > behind and x.shape[-1] == size
    rule = f"have shape (..., {size}) and {behind} more axes at least"
    require(fits, operator, argument, rule, x)


def _forward(x: jax.Array, *, log: bool, groups: Groups) -> Arrays:
    wide = groups.in_memory(x).astype(accumulation_dtype(x.dtype))
    shifted = wide - jnp.max(wide, groups.axes, keepdims=True, initial=-jnp.inf)
    exponentials = jnp.exp(shifted)
    total = jnp.sum(exponentials, groups.axes, keepdims=True)
    y = shifted - jnp.log(total) if log else exponentials / total
    return (groups.of(y.astype(x.dtype)),)


def _backward(y: jax.Array, grad: jax.Array, *, log: bool, groups: Groups) -> Arrays:
    y, wide = (groups.in_memory(array).astype(accumulation_dtype(grad.dtype)) for array in (y, grad))
    if log:
        dx = wide - jnp.exp(y) * _totals(grad, groups)
    else:
        dx = y * (wide - jnp.sum(y * wide, groups.axes, keepdims=True))
    return (groups.of(dx.astype(grad.dtype)),)


def _totals(grad: jax.Array, groups: Groups) -> jax.Array:
    """The sum of each group (..., c), in the array that has them."""
    array = groups.in_memory(grad)
    if not _sums_rows_by_product(grad, groups):
        return jnp.sum(array, groups.axes, keepdims=True, dtype=accumulation_dtype(grad.dtype))
    total = jnp.tensordot(array, jnp.ones(groups.sizes, array.dtype), len(groups.sizes), precision="highest")
    return jnp.expand_dims(total, groups.axes)


def _sums_rows_by_product(grad: jax.Array, groups: Groups) -> bool:
    """Whether groups are rows whose sum is better a product with ones.

    XLA's CPU compiler fuses a sum of rows with what reads it, exponentials too, and that is slower than a sum first and
    then the exponentials in a loop of their own. A product would need a wider copy of what is narrow.
    """
    size = grad.shape[-1]
    is_long = not jax.export.is_symbolic_dim(size) and size >= _LONG_ROW
    is_wide = grad.dtype == accumulation_dtype(grad.dtype)
    return lowering.is_on_one_cpu() and is_long and is_wide and not any(groups.behind)


# The derivative keeps y. The Jacobian of a softmax is symmetric, that of its logarithm is not.


def _linearize(operands: Sequence[jax.Array], active: Active, **params: Any) -> tuple[Arrays, Arrays]:
    results = SOFTMAX(*operands, **params)
    return results, results


def _vjp(residuals: Arrays, cotangents: Arrays, active: Active, **params: Any) -> Arrays:
    return SOFTMAX_BACKWARD(*residuals, *cotangents, **params)


def _tangent(residuals: Arrays, tangents: Arrays, active: Active, *, log: bool, groups: Groups) -> Arrays:
    if not log:
        return SOFTMAX_BACKWARD(*residuals, *tangents, log=log, groups=groups)
    (x_dot,) = tangents
    y, wide = (
        groups.in_memory(array, reshaped).astype(accumulation_dtype(x_dot.dtype)) for array in (*residuals, x_dot)
    )
    y_dot = wide - jnp.sum(jnp.exp(y) * wide, groups.axes, keepdims=True)
    return (groups.of(y_dot.astype(x_dot.dtype), reshaped),)


SOFTMAX = Operator(
    "softmax",
    "... c -> ... c",
    _check,
    _forward,
    Derivative(_vjp, _tangent, _linearize, residuals="... c"),
    kernels=(tpu.KERNEL, gpu.KERNEL),
)
SOFTMAX_BACKWARD = Operator(
    "softmax_backward",
    "... c, ... c -> ... c",
    _check_backward,
    _backward,
    kernels=(tpu_backward.KERNEL, gpu_backward.KERNEL),
)
