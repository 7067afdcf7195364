"""The operators of batch normalization in training and in inference, and their derivatives."""

import functools
from collections.abc import Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxops._primitive import sharding
from jaxops._primitive.derivative import Active, Arrays, Derivative
from jaxops._primitive.operator import Operator
from jaxops.activation.modes import IDENTITY, Activation, activated, scaled_by_slope
from jaxops.batch_norm.backward import (
    BATCH_NORM_ACTIVATION_BACKWARD,
    BATCH_NORM_ADD_ACTIVATION_BACKWARD,
    BATCH_NORM_BACKWARD,
)
from jaxops.batch_norm.statistics import (
    broadcast_channels,
    check_images,
    check_like_images,
    check_statistics,
    count,
    global_sum,
    local_sum,
    mean_and_variance,
)
from pallas_kernels.gpu import batch_norm as gpu
from pallas_kernels.tpu import batch_norm as tpu


def _check(x: Any, scale: Any, bias: Any, *residual: Any, name: str, **_: Any) -> None:
    check_images(name, x)
    check_statistics(name, x, scale=scale, bias=bias)
    for array in residual:
        check_like_images(name, x, residual=array)


def _forward(
    x: jax.Array,
    scale: jax.Array,
    bias: jax.Array,
    *residual: jax.Array,
    epsilon: float,
    axis_name: Hashable,
    activation: Activation = IDENTITY,
) -> Arrays:
    mean, variance = mean_and_variance(x, axis_name)
    u = pre_activation(x, scale, bias, *residual, mean=mean, inv_std=inverse_std(variance, epsilon))
    return activated(activation, u).astype(x.dtype), mean, variance


def _check_inference(
    x: Any, scale: Any, bias: Any, mean: Any, variance: Any, *residual: Any, name: str, **_: Any
) -> None:
    check_images(name, x)
    check_statistics(name, x, scale=scale, bias=bias, mean=mean, variance=variance)
    for array in residual:
        check_like_images(name, x, residual=array)


def _inference(
    x: jax.Array,
    scale: jax.Array,
    bias: jax.Array,
    mean: jax.Array,
    variance: jax.Array,
    *residual: jax.Array,
    epsilon: float,
    activation: Activation,
) -> Arrays:
    factor = scale / jnp.sqrt(variance + epsilon)
    u = (x.astype(mean.dtype) - broadcast_channels(mean)) * broadcast_channels(factor) + broadcast_channels(bias)
    for array in residual:
        u = u + array.astype(u.dtype)
    return (activated(activation, u).astype(x.dtype),)


def inverse_std(variance: jax.Array, epsilon: float) -> jax.Array:
    """1 / sqrt(variance + epsilon), which the documents call the inverse variance."""
    return jax.lax.rsqrt(variance + epsilon)


def pre_activation(
    x: jax.Array, scale: jax.Array, bias: jax.Array, *residual: jax.Array, mean: jax.Array, inv_std: jax.Array
) -> jax.Array:
    """The operand of the activation, not yet rounded."""
    u = (x.astype(mean.dtype) - broadcast_channels(mean)) * broadcast_channels(inv_std * scale) + broadcast_channels(
        bias
    )
    for array in residual:
        u = u + array.astype(u.dtype)
    return u


# The derivative keeps x, scale, the statistics and, with an activation, its gate.


def _linearize(
    operands: Sequence[jax.Array], active: Active, *, operator: str, epsilon: float, **params: Any
) -> tuple[Arrays, Arrays]:
    results = _FORWARD[operator](*operands, epsilon=epsilon, **params)
    y, mean, variance = results
    x, scale, *_ = operands
    inv_std = inverse_std(variance, epsilon)
    residuals = (x, scale, mean, inv_std)
    if "activation" not in params:
        return results, residuals
    # The result shows where relu passes. Other slopes need the operand of the activation before it was rounded.
    from_result = params["activation"].mode in ("relu", "identity")
    gate = y if from_result else pre_activation(*operands, mean=mean, inv_std=inv_std)
    return results, (*residuals, gate)


def _tangent(
    residuals: Arrays,
    tangents: Arrays,
    active: Active,
    *,
    epsilon: float,
    axis_name: Hashable,
    activation: Activation = IDENTITY,
) -> Arrays:
    x, scale, mean, inv_std, *gate = residuals
    x_dot, scale_dot, bias_dot, residual_dot = (*tangents, None)[:4]
    dtype = mean.dtype
    centred = x.astype(dtype) - broadcast_channels(mean)
    mean_dot, variance_dot = jnp.zeros_like(mean), jnp.zeros_like(mean)
    u_dot = jnp.zeros_like(centred)
    if x_dot is not None:
        x_dot, elements = x_dot.astype(dtype), count(x, axis_name)
        mean_dot = global_sum(local_sum(x_dot), axis_name) / elements
        variance_dot = 2 * global_sum(local_sum(centred * x_dot), axis_name) / elements
        inv_std_dot = -0.5 * inv_std**3 * variance_dot
        u_dot += (x_dot - broadcast_channels(mean_dot)) * broadcast_channels(
            scale * inv_std
        ) + centred * broadcast_channels(scale * inv_std_dot)
    if scale_dot is not None:
        u_dot += centred * broadcast_channels(scale_dot * inv_std)
    if bias_dot is not None:
        u_dot += broadcast_channels(bias_dot)
    if residual_dot is not None:
        u_dot += residual_dot.astype(dtype)
    for array in gate:
        u_dot = scaled_by_slope(activation, array, u_dot)
    return u_dot.astype(x.dtype), mean_dot, variance_dot


def _vjp(
    residuals: Arrays,
    cotangents: Arrays,
    active: Active,
    *,
    epsilon: float,
    axis_name: Hashable,
    activation: Activation = IDENTITY,
) -> list[Any]:
    x, scale, mean, inv_std, *gate = residuals
    grad, grad_mean, grad_variance = cotangents
    if axis_name is not None and not sharding.tracks_varying_axes(axis_name):
        grad_mean, grad_variance = jax.lax.psum((grad_mean, grad_variance), axis_name)
    operands = (grad, x, scale, mean, inv_std, grad_mean, grad_variance, *gate)
    grads: Sequence[jax.Array]
    if not gate:
        grads = BATCH_NORM_BACKWARD(*operands, axis_name=axis_name)
    elif not any(active[3:]):
        grads = BATCH_NORM_ACTIVATION_BACKWARD(*operands, axis_name=axis_name, activation=activation)
    else:
        grads = BATCH_NORM_ADD_ACTIVATION_BACKWARD(*operands, axis_name=axis_name, activation=activation)
    return [*grads, None][: len(active)]


def _operator(name: str, operands: str, residuals: str) -> Operator:
    return Operator(
        name,
        f"... n a c b, ... c, ... c{operands} -> ... n a c b, ... c, ... c",
        functools.partial(_check, name=name),
        _forward,
        Derivative(
            _vjp,
            _tangent,
            functools.partial(_linearize, operator=name),
            residuals=f"... n a c b, ... c, ... c, ... c{residuals}",
        ),
        kernels=(tpu.KERNEL, gpu.KERNEL),
    )


BATCH_NORM = _operator("batch_norm", "", "")
BATCH_NORM_ACTIVATION = _operator("batch_norm_activation", "", ", ... n a c b")
BATCH_NORM_ADD_ACTIVATION = _operator("batch_norm_add_activation", ", ... n a c b", ", ... n a c b")
_FORWARD = {operator.name: operator for operator in (BATCH_NORM, BATCH_NORM_ACTIVATION, BATCH_NORM_ADD_ACTIVATION)}

BATCH_NORM_INFERENCE = Operator(
    "batch_norm_inference",
    "... n a c b, ... c, ... c, ... c, ... c -> ... n a c b",
    functools.partial(_check_inference, name="batch_norm_inference"),
    _inference,
)
BATCH_NORM_ADD_INFERENCE = Operator(
    "batch_norm_add_inference",
    "... n a c b, ... c, ... c, ... c, ... c, ... n a c b -> ... n a c b",
    functools.partial(_check_inference, name="batch_norm_add_inference"),
    _inference,
)
