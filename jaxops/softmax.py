"""Softmax and its logarithm over groups along any axes, with their documented gradients."""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxops._cases import BF16, F16, F32, IMAGES, LARGE_IMAGES, SMALL_IMAGES, arrays, with_gradient
from jaxops._checks.arguments import is_integer
from jaxops._checks.dtypes import accumulation_dtype, check_floating
from jaxops._checks.mcdnn import as_array, require, require_choice
from jaxops._primitive.derivative import Active, Arrays, Derivative
from jaxops._primitive.operator import Operator
from jaxops._primitive.sharding import laid_out_as, reshaped
from lowering.campaign.suite import Case
from lowering.operators import Form, Place, refusal_of_parts
from pallas_kernels.gpu import softmax as gpu
from pallas_kernels.gpu import softmax_backward as gpu_backward
from pallas_kernels.softmax_groups import Groups
from pallas_kernels.tpu import softmax as tpu
from pallas_kernels.tpu import softmax_backward as tpu_backward

ALGORITHMS = ("fast", "accurate", "log")
# From this many elements on, a product with ones sums a row faster than a sum does; measured on x86.
_LONG_ROW = 512


def softmax(x: jax.Array, *, axis: int | Sequence[int] = -1, algorithm: str = "accurate") -> jax.Array:
    """Computes the softmax `y = exp(x) / sum(exp(x))` over groups of elements, or its logarithm.

    "log" gives `y = x - log(sum(exp(x)))`. Both gradients need only y:

        grad_x = y * (grad_y - sum(y * grad_y))       "accurate" and "fast"
        grad_x = grad_y - exp(y) * sum(grad_y)        "log"

    Args:
      x: floating point, of any shape.
      axis: the axis along which a group lies, or a tuple of axes that make up one group together. As in PyTorch, an
        array without axes accepts 0 or -1 and counts as a group of one.
      algorithm: "accurate", "fast" or "log". "fast" is the same as "accurate" here. The vendor documents allow it to
        skip the maximum, and so to overflow.

    Returns:
      An array with the shape and dtype of x.

    Raises:
      BadParamError: if x is not floating point, an axis is out of range or given twice, or the algorithm is unknown.

    Numerics:
      The maximum of each group is subtracted first. Everything is computed in float32 (float64 for float64) and rounded
      once. -inf gives 0 ("log": -inf). A group of only -inf gives NaN, and so does a group with NaN or inf in it.

      Groups are never transposed, whichever axes they lie along. The gradient keeps only y. Derivatives of all modes
      and orders exist.

      There are forward and backward kernels for TPUs and for NVIDIA GPUs from Hopper on. By default one runs on TPUs at
      the sizes where evidence favours it, and on GPUs where you have measured it.

    Meshes:
      Any axis may be split, and y is laid out like x. If a group has several axes and a later one is split, devices
      exchange elements so that the first one is split instead. Elements are gathered only if the first axis cannot be
      divided by that many devices.

    Example:
      >>> print(np.asarray(jaxops.softmax(jnp.log(jnp.array([1.0, 3.0])))).round(3))
      [0.25 0.75]
      >>> y = jaxops.softmax(jnp.zeros((2, 4, 8)), axis=(1, 2))  # two groups of 32 elements
      >>> float(y[0, 0, 0])
      0.03125

    Source: mcDNN `mcdnnSoftmaxForward` and `mcdnnSoftmaxBackward`; PyTorch `torch.nn.functional.softmax`.
    """
    name = "softmax"
    x = as_array(name, "x", x)
    require_choice(name, "algorithm", algorithm, ALGORITHMS)
    check_floating(name, x=x)
    return over_groups(x, log=algorithm == "log", groups=Groups.along(x.shape, _checked_axes(x, axis)))


# Jitted as a whole, so that outside jit, too, moving groups last and back cancels out.


@functools.partial(jax.jit, static_argnames=("log", "groups"), inline=True)
def over_groups(x: jax.Array, *, log: bool, groups: Groups) -> jax.Array:
    """Computes the softmax of an array over its groups, or its logarithm."""
    (y,) = SOFTMAX(groups.of(x, reshaped), log=log, groups=groups)
    return laid_out_as(groups.in_memory(y, reshaped), jax.typeof(x).sharding)


@functools.partial(jax.jit, static_argnames=("log", "groups"), inline=True)
def gradient_over_groups(y: jax.Array, grad: jax.Array, *, log: bool, groups: Groups) -> jax.Array:
    """Computes the documented gradient, from the result and the gradient of the result."""
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
        dx = wide - jnp.exp(y) * jnp.sum(wide, groups.axes, keepdims=True)
    else:
        dx = y * (wide - jnp.sum(y * wide, groups.axes, keepdims=True))
    return (groups.of(dx.astype(grad.dtype)),)


def _backward_with_product(y: jax.Array, grad: jax.Array, *, place: Place, log: bool, groups: Groups) -> Arrays:
    """Computes `_backward` of a logarithm, with the sums of rows as a product with ones.

    XLA's CPU compiler fuses a sum of rows into whatever reads it, exponentials included. That is slower than a sum
    first and then a loop of its own for the exponentials. A product would need a wider copy of narrow dtypes.
    """
    y, grad = (groups.in_memory(array).astype(grad.dtype) for array in (y, grad))
    exponentials = jnp.exp(y)
    totals = jnp.tensordot(grad, jnp.ones(groups.sizes, grad.dtype), len(groups.sizes), precision="highest")
    return (groups.of(grad - exponentials * jnp.expand_dims(totals, groups.axes)),)


def _refuses_product(place: Place, y: Any, grad: Any, *, log: bool, groups: Groups) -> str | None:
    if not log:
        return "a product sums the gradients of logarithms alone"
    size = grad.shape[-1]
    # Rows are summed one by one, so how many there are need not be known.
    if reason := refusal_of_parts(place, jax.ShapeDtypeStruct((size,), grad.dtype)):
        return reason
    if size < _LONG_ROW:
        return f"a product sums rows of {_LONG_ROW} elements or more; these have {size}"
    if grad.dtype != accumulation_dtype(grad.dtype):
        return f"a product would need a wider copy of grad, which is {grad.dtype}"
    return "a product sums groups along the last axes; these lie along others" if any(groups.behind) else None


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
    forms=(Form("xla_sums_by_product", frozenset({"cpu"}), _backward_with_product, _refuses_product),),
)

SUITE = (
    Case(
        "softmax of rows",
        functools.partial(with_gradient, softmax),
        arrays,
        ((1, 128, F32), (33, 129, BF16), (64, 1000, F16), (8, 50257, F32)),
        ((16384, 4096, BF16), (8192, 32000, F32)),
        ((3, 130, F32),),
    ),
    Case(
        "softmax of channels",
        functools.partial(with_gradient, functools.partial(softmax, axis=1, algorithm="log")),
        arrays,
        IMAGES,
        ((32, 21, 512, 512, F32), *LARGE_IMAGES),
        SMALL_IMAGES,
    ),
)
