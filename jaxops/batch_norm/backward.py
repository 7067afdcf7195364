"""The documented backward operator of batch normalization: plain, with an activation, and with a residual as well."""

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxops._checks.dtypes import accumulation_dtype
from jaxops._checks.mcdnn import require
from jaxops._primitive.operator import Operator
from jaxops.activation.modes import Activation, scaled_by_slope
from jaxops.batch_norm.statistics import (
    REDUCED,
    broadcast_channels,
    check_images,
    check_like_images,
    check_statistics,
    count,
    global_sum,
    local_sum,
)
from lowering.operators import Form, Place, refusal_of_parts
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


# Bytes of the copies that two loops store. From so many on, allocators ask the system for new memory at each run, whose
# first use costs more than the loops. Measured with 2^20 to 2^24 pixels, one loop takes 0.35 to 0.55 of the time above
# (at worst 1.2) and 0.7 to 1.5 below.
_LEAST_BYTES = 2**25
_PIECEWISE_LINEAR = frozenset({"identity", "relu", "clipped_relu"})
_Sums = Callable[[jax.Array, jax.Array], tuple[jax.Array, jax.Array]]


def _apart(d: jax.Array, d_centred: jax.Array) -> tuple[jax.Array, jax.Array]:
    return local_sum(d), local_sum(d_centred)


def _backward(
    operands: BackwardOperands,
    *,
    axis_name: Hashable,
    activation: Activation,
    residual_grad: bool,
    sums: _Sums = _apart,
) -> Gradients:
    """Gradients where u = scale * xhat + bias (+ residual) and xhat = (x - mean) * inv_std, with M elements a channel.

        d = grad * activation'(u);  dbias = sum(d);  dscale = sum(d * xhat)
        dx = scale * inv_std * (d - dbias / M - xhat * dscale / M) + (grad_mean + 2 * grad_variance * (x - mean)) / M

    The last term belongs to the statistics as results of their own. The documents do not differentiate them, and there
    it is 0. Over a mesh axis, dx uses the sums over all devices, while dscale and dbias stay those of this device.
    """
    grad, x, scale, mean, inv_std, grad_mean, grad_variance, gate = operands
    dtype = accumulation_dtype(x.dtype)
    d = grad.astype(dtype)
    if gate is not None:
        d = scaled_by_slope(activation, gate, d)
    centred = x.astype(dtype) - broadcast_channels(mean)
    sum_d, sum_d_centred = sums(d, d * centred)
    elements = count(x, axis_name)
    factor = scale * inv_std
    slope = (2 * grad_variance - factor * jnp.square(inv_std) * global_sum(sum_d_centred, axis_name)) / elements
    offset = (grad_mean - factor * global_sum(sum_d, axis_name)) / elements
    dx = broadcast_channels(factor) * d + centred * broadcast_channels(slope) + broadcast_channels(offset)
    return Gradients(
        dx.astype(x.dtype), sum_d_centred * inv_std, sum_d, residual=d.astype(x.dtype) if residual_grad else None
    )


def _together(d: jax.Array, d_centred: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Computes both sums in one loop, which reads 16-bit operands as they are."""
    axes = [d.ndim + axis for axis in REDUCED]
    zero = np.zeros((), d.dtype)
    of_d, of_both = jax.lax.reduce((d, d_centred), (zero, zero), lambda a, b: (a[0] + b[0], a[1] + b[1]), axes)
    return of_d, of_both


def _in_one_loop(operands: BackwardOperands, *, place: Place, **params: Any) -> Gradients:
    return _backward(operands, **params, sums=_together)


def _refuses_one_loop(place: Place, operands: BackwardOperands, *, activation: Activation, **_: Any) -> str | None:
    x = operands.x
    if reason := refusal_of_parts(place, x):
        return reason
    # XLA's CPU compiler stores what two loops read of 16-bit operands in float32.
    if any(jnp.dtype(images.dtype).itemsize != 2 for images in (operands.grad, x)):
        return "two loops are faster, unless all images have 16 bits"
    if activation.mode not in _PIECEWISE_LINEAR:
        return f"one loop would compute the slope of {activation.mode} once more"
    stored = (3 if operands.gate is None else 2) * 4 * x.size
    return None if stored >= _LEAST_BYTES else f"two loops store {stored} bytes; from {_LEAST_BYTES} on, one is faster"


_IMAGES = "... n a c b"
BATCH_NORM_BACKWARD = Operator(
    "batch_norm_backward",
    f"{_IMAGES}, {_IMAGES}, ... c, ... c, ... c, ... c, ... c, {_IMAGES} -> {_IMAGES}, ... c, ... c, {_IMAGES}",
    _check,
    _backward,
    kernels=(tpu.KERNEL, gpu.KERNEL),
    forms=(Form("xla_sums_in_one_loop", frozenset({"cpu"}), _in_one_loop, _refuses_one_loop),),
)
