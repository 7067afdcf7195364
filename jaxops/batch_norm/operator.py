"""The operators of batch normalization in training and in inference, and their derivatives."""

from collections.abc import Hashable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxops._primitive import sharding
from jaxops._primitive.derivative import Active, Arrays, Derivative
from jaxops._primitive.operator import Operator
from jaxops.activation.modes import Activation, activated, scaled_by_slope
from jaxops.batch_norm.backward import BATCH_NORM_BACKWARD, BackwardOperands
from jaxops.batch_norm.statistics import (
    Sum,
    broadcast_channels,
    check_images,
    check_like_images,
    check_statistics,
    count,
    global_sum,
    local_sum,
    mean_and_variance,
    plain_sum,
    separate_sum,
)
from lowering.operators import Form, Place
from pallas_kernels.gpu import batch_norm as gpu
from pallas_kernels.tpu import batch_norm as tpu


class TrainingOperands(NamedTuple):
    """Images, and what they are scaled and shifted by; a residual is added before the activation."""

    x: jax.Array
    scale: jax.Array
    bias: jax.Array
    residual: jax.Array | None = None


class Normalized(NamedTuple):
    """Normalized images, and the mean and biased variance of their batch."""

    y: jax.Array
    mean: jax.Array
    variance: jax.Array


class InferenceOperands(NamedTuple):
    """As `TrainingOperands`, with the statistics to normalize by."""

    x: jax.Array
    scale: jax.Array
    bias: jax.Array
    mean: jax.Array
    variance: jax.Array
    residual: jax.Array | None = None


def _check(operands: TrainingOperands, **_: Any) -> None:
    name, x = "batch_norm", operands.x
    check_images(name, x)
    check_statistics(name, x, scale=operands.scale, bias=operands.bias)
    if operands.residual is not None:
        check_like_images(name, x, residual=operands.residual)


def _forward(
    operands: TrainingOperands,
    *,
    epsilon: float,
    axis_name: Hashable,
    activation: Activation,
    total: Sum = plain_sum,
) -> Normalized:
    mean, variance = mean_and_variance(operands.x, axis_name, total)
    u = pre_activation(operands, mean, inverse_std(variance, epsilon))
    return Normalized(activated(activation, u).astype(operands.x.dtype), mean, variance)


def _with_separate_sums(operands: TrainingOperands, *, place: Place, **params: Any) -> Normalized:
    return _forward(operands, **params, total=separate_sum)


def _check_inference(operands: InferenceOperands, **_: Any) -> None:
    name, (x, scale, bias, mean, variance, residual) = "batch_norm_inference", operands
    check_images(name, x)
    check_statistics(name, x, scale=scale, bias=bias, mean=mean, variance=variance)
    if residual is not None:
        check_like_images(name, x, residual=residual)


def _inference(operands: InferenceOperands, *, epsilon: float, activation: Activation) -> Arrays:
    x, scale, bias, mean, variance, residual = operands
    factor = scale / jnp.sqrt(variance + epsilon)
    u = (x.astype(mean.dtype) - broadcast_channels(mean)) * broadcast_channels(factor) + broadcast_channels(bias)
    if residual is not None:
        u = u + residual.astype(u.dtype)
    return (activated(activation, u).astype(x.dtype),)


def inverse_std(variance: jax.Array, epsilon: float) -> jax.Array:
    """Computes 1 / sqrt(variance + epsilon), which the documents call the inverse variance."""
    return jax.lax.rsqrt(variance + epsilon)


def pre_activation(operands: TrainingOperands, mean: jax.Array, inv_std: jax.Array) -> jax.Array:
    """Computes the operand of the activation, not yet rounded."""
    x, scale, bias, residual = operands
    u = (x.astype(mean.dtype) - broadcast_channels(mean)) * broadcast_channels(inv_std * scale) + broadcast_channels(
        bias
    )
    return u if residual is None else u + residual.astype(u.dtype)


class _Residuals(NamedTuple):
    """Residuals of the derivative: the statistics, and the gate unless the activation is the identity."""

    x: jax.Array
    scale: jax.Array
    mean: jax.Array
    inv_std: jax.Array
    gate: jax.Array | None


def _linearize(
    operands: tuple[TrainingOperands], active: Active, *, epsilon: float, activation: Activation, **params: Any
) -> tuple[Normalized, _Residuals]:
    (given,) = operands
    results: Normalized = BATCH_NORM(given, epsilon=epsilon, activation=activation, **params)
    inv_std = inverse_std(results.variance, epsilon)
    gate = None
    if activation.mode == "relu":  # whose result shows where it passes
        gate = results.y
    elif activation.mode != "identity":  # other slopes need the operand of the activation before it was rounded
        gate = pre_activation(given, results.mean, inv_std)
    return results, _Residuals(given.x, given.scale, results.mean, inv_std, gate)


def _tangent(
    residuals: _Residuals,
    tangents: tuple[TrainingOperands],
    active: Active,
    *,
    epsilon: float,
    axis_name: Hashable,
    activation: Activation,
) -> Normalized:
    x, scale, mean, inv_std, gate = residuals
    (dot,) = tangents
    dtype = mean.dtype
    centred = x.astype(dtype) - broadcast_channels(mean)
    mean_dot, variance_dot = jnp.zeros_like(mean), jnp.zeros_like(mean)
    u_dot = jnp.zeros_like(centred)
    if dot.x is not None:
        x_dot, elements = dot.x.astype(dtype), count(x, axis_name)
        mean_dot = global_sum(local_sum(x_dot), axis_name) / elements
        variance_dot = 2 * global_sum(local_sum(centred * x_dot), axis_name) / elements
        inv_std_dot = -0.5 * inv_std**3 * variance_dot
        u_dot += (x_dot - broadcast_channels(mean_dot)) * broadcast_channels(
            scale * inv_std
        ) + centred * broadcast_channels(scale * inv_std_dot)
    if dot.scale is not None:
        u_dot += centred * broadcast_channels(dot.scale * inv_std)
    if dot.bias is not None:
        u_dot += broadcast_channels(dot.bias)
    if dot.residual is not None:
        u_dot += dot.residual.astype(dtype)
    if gate is not None:
        u_dot = scaled_by_slope(activation, gate, u_dot)
    return Normalized(u_dot.astype(x.dtype), mean_dot, variance_dot)


def _vjp(
    residuals: _Residuals,
    cotangents: Normalized,
    active: tuple[TrainingOperands],
    *,
    epsilon: float,
    axis_name: Hashable,
    activation: Activation,
) -> tuple[TrainingOperands]:
    grad, grad_mean, grad_variance = cotangents
    if axis_name is not None and not sharding.tracks_varying_axes(axis_name):
        grad_mean, grad_variance = jax.lax.psum((grad_mean, grad_variance), axis_name)
    x, scale, mean, inv_std, gate = residuals
    operands = BackwardOperands(grad, x, scale, mean, inv_std, grad_mean, grad_variance, gate)
    wants_residual = bool(active[0].residual)
    grads = BATCH_NORM_BACKWARD(operands, axis_name=axis_name, activation=activation, residual_grad=wants_residual)
    return (TrainingOperands(grads.x, grads.scale, grads.bias, grads.residual),)


BATCH_NORM = Operator(
    "batch_norm",
    "... n a c b, ... c, ... c, ... n a c b -> ... n a c b, ... c, ... c",
    _check,
    _forward,
    Derivative(_vjp, _tangent, _linearize, residuals="... n a c b, ... c, ... c, ... c, ... n a c b"),
    kernels=(tpu.KERNEL, gpu.KERNEL),
    forms=(Form("xla_separate_sums", frozenset({"cpu"}), _with_separate_sums),),
)
BATCH_NORM_INFERENCE = Operator(
    "batch_norm_inference",
    "... n a c b, ... c, ... c, ... c, ... c, ... n a c b -> ... n a c b",
    _check_inference,
    _inference,
    no_kernel="XLA fuses it with what surrounds it",
)
