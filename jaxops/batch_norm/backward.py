"""The documented backward operator of batch normalization: plain, with an activation, and with a residual as well."""

from collections.abc import Hashable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxops._checks.dtypes import accumulation_dtype
from jaxops._checks.mcdnn import require
from jaxops._primitive.operator import Operator
from jaxops.activation.modes import IDENTITY, MASKED_MODES, Activation, scaled_by_slope
from jaxops.batch_norm.statistics import (
    Sum,
    broadcast_channels,
    centred,
    check_images,
    check_like_images,
    check_statistics,
    count,
    global_sum,
    plain_sum,
    separate_sum,
)
from lowering.operators import Form, Place
from pallas_kernels.gpu import batch_norm_backward as gpu
from pallas_kernels.tpu import batch_norm_backward as tpu


class BackwardOperands(NamedTuple):
    """Operands that a training step leaves for its gradients.

    Attributes:
      grad: the gradient of the result.
      x: the images.
      scale: what they were scaled by.
      mean: of the batch.
      inv_std: 1 / sqrt(variance + epsilon) of the batch.
      grad_mean: the gradient of the mean as a result.
      grad_variance: the gradient of the variance as a result.
      gate: determines the activation's slope: its operand or, for relu, any array that is positive where that is. None
        for the identity.
    """

    grad: jax.Array
    x: jax.Array
    scale: jax.Array
    mean: jax.Array
    inv_std: jax.Array
    grad_mean: jax.Array
    grad_variance: jax.Array
    gate: jax.Array | None = None


class Gradients(NamedTuple):
    """The gradients of a training step's operands; None for a residual that was not added, or is a constant."""

    x: jax.Array
    scale: jax.Array
    bias: jax.Array
    residual: jax.Array | None = None


def _check(operands: BackwardOperands, *, axis_name: Hashable, activation: Activation, residual_grad: bool) -> None:
    name = "batch_norm_backward"
    grad, x, scale, mean, inv_std, grad_mean, grad_variance, gate = operands
    check_images(name, x)
    check_like_images(name, x, grad=grad)
    statistics = {"scale": scale, "mean": mean, "inv_std": inv_std}
    check_statistics(name, x, **statistics, grad_mean=grad_mean, grad_variance=grad_variance)
    fits = (gate is None) == (activation.mode == "identity")
    require(fits, name, "gate", f"be given for an activation and for no identity, as {activation.mode} is", gate)
    if gate is not None:
        require(gate.shape == x.shape, name, "gate", f"have the shape of x, {x.shape}", gate)


def _backward(
    operands: BackwardOperands,
    *,
    axis_name: Hashable,
    activation: Activation,
    residual_grad: bool,
    total: Sum = plain_sum,
) -> Gradients:
    """Gradients where u = scale * xhat + bias (+ residual) and xhat = (x - mean) * inv_std, with M elements a channel.

        d = grad * activation'(u);  dbias = sum(d);  dscale = sum(d * xhat)
        dx = scale * inv_std * (d - dbias / M - xhat * dscale / M) + (grad_mean + 2 * grad_variance * (x - mean)) / M

    The last term belongs to the statistics as results of their own. The documents do not differentiate them, and there
    it is 0. Over a mesh axis, dx uses the sums over all devices, while dscale and dbias stay those of this device.
    """
    grad, x, scale, mean, inv_std, grad_mean, grad_variance, gate = operands
    dtype = accumulation_dtype(x.dtype)
    d = grad if gate is None else scaled_by_slope(activation, gate, grad.astype(dtype))
    mean = broadcast_channels(mean)
    sum_d = total(lambda d: d.astype(dtype), d)
    sum_d_centred = total(lambda d, x, mean: d.astype(dtype) * centred(x, mean), d, x, mean)
    elements = count(x, axis_name)
    factor = scale * inv_std
    slope = (2 * grad_variance - factor * jnp.square(inv_std) * global_sum(sum_d_centred, axis_name)) / elements
    offset = (grad_mean - factor * global_sum(sum_d, axis_name)) / elements
    dx = broadcast_channels(factor) * d.astype(dtype) + centred(x, mean) * broadcast_channels(slope)
    dx += broadcast_channels(offset)
    return Gradients(
        dx.astype(x.dtype), sum_d_centred * inv_std, sum_d, residual=d.astype(x.dtype) if residual_grad else None
    )


def _with_separate_sums(
    operands: BackwardOperands, *, place: Place, activation: Activation, **params: Any
) -> Gradients:
    if operands.gate is not None and activation.mode in MASKED_MODES:
        # Multiplied by 0 or 1, the gradient needs no other dtype to be stored in.
        grad = scaled_by_slope(activation, operands.gate, operands.grad.astype(operands.mean.dtype))
        operands = operands._replace(grad=grad.astype(operands.grad.dtype), gate=None)
        activation = IDENTITY
    return _backward(operands, activation=activation, **params, total=separate_sum)


_IMAGES = "... n a c b"
BATCH_NORM_BACKWARD = Operator(
    "batch_norm_backward",
    f"{_IMAGES}, {_IMAGES}, ... c, ... c, ... c, ... c, ... c, {_IMAGES} -> {_IMAGES}, ... c, ... c, {_IMAGES}",
    _check,
    _backward,
    kernels=(tpu.KERNEL, gpu.KERNEL),
    forms=(Form("xla_separate_sums", frozenset({"cpu"}), _with_separate_sums),),
)
