"""The documented backward operators of batch normalization: plain, with an activation, and with a residual as well."""

import functools
from collections.abc import Hashable
from typing import Any

import jax
import jax.numpy as jnp

from jaxops._checks.dtypes import accumulation_dtype
from jaxops._checks.mcdnn import require
from jaxops._primitive.derivative import Arrays
from jaxops._primitive.operator import Operator
from jaxops.activation.modes import IDENTITY, Activation, scaled_by_slope
from jaxops.batch_norm.statistics import (
    broadcast_channels,
    check_images,
    check_like_images,
    check_statistics,
    count,
    global_sum,
    local_sum,
)
from pallas_kernels.gpu import batch_norm_backward as gpu
from pallas_kernels.tpu import batch_norm_backward as tpu


def _check(
    grad: Any,
    x: Any,
    scale: Any,
    mean: Any,
    inv_std: Any,
    grad_mean: Any,
    grad_variance: Any,
    *gate: Any,
    name: str,
    **_: Any,
) -> None:
    check_images(name, x)
    check_like_images(name, x, grad=grad)
    statistics = {"scale": scale, "mean": mean, "inv_std": inv_std}
    check_statistics(name, x, **statistics, grad_mean=grad_mean, grad_variance=grad_variance)
    for array in gate:
        require(array.shape == x.shape, name, "gate", f"have the shape of x, {x.shape}", array)


def _backward(
    grad: jax.Array,
    x: jax.Array,
    scale: jax.Array,
    mean: jax.Array,
    inv_std: jax.Array,
    grad_mean: jax.Array,
    grad_variance: jax.Array,
    *gate: jax.Array,
    axis_name: Hashable,
    activation: Activation = IDENTITY,
    residual_grad: bool = False,
) -> Arrays:
    """Gradients where u = scale * xhat + bias (+ residual) and xhat = (x - mean) * inv_std, with M elements a channel.

        d = grad * activation'(u);  dbias = sum(d);  dscale = sum(d * xhat)
        dx = scale * inv_std * (d - dbias / M - xhat * dscale / M) + (grad_mean + 2 * grad_variance * (x - mean)) / M

    The last term belongs to the statistics as results of their own. The documents do not differentiate them, and there
    it is 0. Over a mesh axis, dx uses the sums over all devices, while dscale and dbias stay those of this device.
    """
    dtype = accumulation_dtype(x.dtype)
    d = grad.astype(dtype)
    for array in gate:
        d = scaled_by_slope(activation, array, d)
    centred = x.astype(dtype) - broadcast_channels(mean)
    sum_d, sum_d_centred = local_sum(d), local_sum(d * centred)
    elements = count(x, axis_name)
    factor = scale * inv_std
    slope = (2 * grad_variance - factor * jnp.square(inv_std) * global_sum(sum_d_centred, axis_name)) / elements
    offset = (grad_mean - factor * global_sum(sum_d, axis_name)) / elements
    dx = broadcast_channels(factor) * d + centred * broadcast_channels(slope) + broadcast_channels(offset)
    grads = dx.astype(x.dtype), sum_d_centred * inv_std, sum_d
    return (*grads, d.astype(x.dtype)) if residual_grad else grads


_OPERANDS = "... n a c b, ... n a c b, ... c, ... c, ... c, ... c, ... c"
_GRADS = "... n a c b, ... c, ... c"

BATCH_NORM_BACKWARD = Operator(
    "batch_norm_backward",
    f"{_OPERANDS} -> {_GRADS}",
    functools.partial(_check, name="batch_norm_backward"),
    _backward,
    kernels=(tpu.KERNEL, gpu.KERNEL),
)
# The gate determines the activation's slope: it is u or, for relu, any array that is positive where u is.
BATCH_NORM_ACTIVATION_BACKWARD = Operator(
    "batch_norm_activation_backward",
    f"{_OPERANDS}, ... n a c b -> {_GRADS}",
    functools.partial(_check, name="batch_norm_activation_backward"),
    _backward,
    kernels=(tpu.KERNEL, gpu.KERNEL),
)
BATCH_NORM_ADD_ACTIVATION_BACKWARD = Operator(
    "batch_norm_add_activation_backward",
    f"{_OPERANDS}, ... n a c b -> {_GRADS}, ... n a c b",
    functools.partial(_check, name="batch_norm_add_activation_backward"),
    functools.partial(_backward, residual_grad=True),
    kernels=(tpu.RESIDUAL_KERNEL, gpu.RESIDUAL_KERNEL),
)
