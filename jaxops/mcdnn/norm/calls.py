"""What the calls of batch normalization and normalization do once their enumerations are read: check, run, blend."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxops._checks.dtypes import accumulation_dtype
from jaxops._primitive import sharding
from jaxops.activation.modes import IDENTITY, RELU, Activation, scaled_by_slope_of_result
from jaxops.batch_norm import (
    BATCH_NORM_ACTIVATION_BACKWARD,
    BATCH_NORM_ADD_ACTIVATION_BACKWARD,
    BATCH_NORM_BACKWARD,
)
from jaxops.batch_norm.api import infer, train, updated_statistics
from jaxops.batch_norm.layouts import View
from jaxops.batch_norm.operator import inverse_std, pre_activation
from jaxops.batch_norm.statistics import mean_and_variance
from jaxops.mcdnn import reserve_space
from jaxops.mcdnn.blend import Blend
from jaxops.mcdnn.checks import DTYPES
from jaxops.mcdnn.enums import ActivationMode
from jaxops.mcdnn.norm.checks import NormCall

FORWARD_ACTIVATIONS = (ActivationMode.RELU, ActivationMode.SWISH)
BACKWARD_ACTIVATIONS = (ActivationMode.RELU,)
_MASKED = ("relu", "clipped_relu")


class BatchNormTrainingEx(NamedTuple):
    """What a training call returns.

    Attributes:
      y: like x.
      running_mean: the moved average, or None where none was given.
      running_variance: the moved average of unbiased variances, or None.
      saved_mean: the mean of this batch.
      saved_inv_variance: 1 / sqrt(biased variance + epsilon) of this batch.
      reserve_space: uint8, a bit for each element of x, set where the activation passes; empty without an activation.
    """

    y: jax.Array
    running_mean: jax.Array | None
    running_variance: jax.Array | None
    saved_mean: jax.Array
    saved_inv_variance: jax.Array
    reserve_space: jax.Array


def forward_training(
    call: NormCall,
    x: Any,
    scale: Any,
    bias: Any,
    z: Any,
    *,
    exponential_average_factor: float | jax.Array,
    running_mean: Any,
    running_variance: Any,
    epsilon: float,
    alpha: float | jax.Array,
    beta: float | jax.Array,
    y: Any,
    layout: str | None,
    dtypes: tuple[str, ...] = DTYPES,
) -> BatchNormTrainingEx:
    """Checks and runs a training call."""
    call.present(x=x, scale=scale, bias=bias)
    if call.adds:
        call.present(z=z)
    blend = Blend.requested(call.name, alpha=alpha, beta=beta, y=y)
    x, scale, bias, z = call.arrays(x=x, scale=scale, bias=bias, z=z if call.adds else None)
    running_mean, running_variance = call.arrays(running_mean=running_mean, running_variance=running_variance)
    view = call.view(x, layout)
    call.alike(x, z=z)
    blend.check(x.shape, x.dtype)
    call.pair(running_mean=running_mean, running_variance=running_variance)
    given = {"scale": scale, "bias": bias, "running_mean": running_mean, "running_variance": running_variance}
    call.parameters(view, **given)
    epsilon = call.epsilon(epsilon)
    factor = call.factor(exponential_average_factor)
    call.dtypes(x, dtypes, **given)
    call.supported_ops(view, x, FORWARD_ACTIVATIONS)
    data = blend.widen(x)
    residual = None if z is None else z.astype(data.dtype)
    result, mean, variance = train(view, data, scale, bias, residual, call.activation, epsilon=epsilon)
    if running_mean is not None:
        old = (running_mean, running_variance)
        running_mean, running_variance = updated_statistics(view, old, mean, variance, momentum=factor)
    kept = jnp.zeros(0, jnp.uint8)
    if call.activation is not None:
        kept = reserve_space.packed(_passes(call.activation, result))
    return BatchNormTrainingEx(
        blend.apply(result, x.dtype),
        running_mean,
        running_variance,
        view.parameters_back(mean, scale),
        view.parameters_back(inverse_std(variance, epsilon), scale),
        kept,
    )


def forward_inference(
    call: NormCall,
    x: Any,
    scale: Any,
    bias: Any,
    estimated_mean: Any,
    estimated_variance: Any,
    z: Any,
    *,
    epsilon: float,
    alpha: float | jax.Array,
    beta: float | jax.Array,
    y: Any,
    layout: str | None,
) -> jax.Array:
    """Checks and runs an inference call."""
    given = {"scale": scale, "bias": bias, "estimated_mean": estimated_mean, "estimated_variance": estimated_variance}
    call.present(x=x, **given)
    if call.adds:
        call.present(z=z)
    blend = Blend.requested(call.name, alpha=alpha, beta=beta, y=y)
    x, z = call.arrays(x=x, z=z if call.adds else None)
    given = dict(zip(given, call.arrays(**given), strict=True))
    view = call.view(x, layout)
    call.alike(x, z=z)
    blend.check(x.shape, x.dtype)
    call.parameters(view, **given)
    epsilon = call.epsilon(epsilon)
    call.dtypes(x, DTYPES, **given)
    call.supported_ops(view, x, FORWARD_ACTIVATIONS)
    data = blend.widen(x)
    residual = None if z is None else z.astype(data.dtype)
    activation = call.activation or IDENTITY
    result = infer(view, data, list(given.values()), residual, activation, epsilon=epsilon)
    return blend.apply(result, x.dtype)


def backward(
    call: NormCall,
    x: Any,
    dy: Any,
    scale: Any,
    *,
    y: Any = None,
    bias: Any = None,
    kept: Any = None,
    epsilon: float,
    saved_mean: Any,
    saved_inv_variance: Any,
    alpha_data_diff: float | jax.Array,
    beta_data_diff: float | jax.Array,
    alpha_param_diff: float | jax.Array,
    beta_param_diff: float | jax.Array,
    dx: Any,
    dscale: Any,
    dbias: Any,
    layout: str | None,
    dtypes: tuple[str, ...] = DTYPES,
) -> tuple[jax.Array, jax.Array | None, jax.Array, jax.Array]:
    """Checks and runs a backward call. Gives dx, dz (None without a residual), dscale and dbias."""
    call.present(x=x, dy=dy, scale=scale)
    param_factors = {"alpha_param_diff": alpha_param_diff, "beta_param_diff": beta_param_diff}
    blend = Blend.requested(call.name, alpha_data_diff=alpha_data_diff, beta_data_diff=beta_data_diff, dx=dx)
    param_blends = [
        Blend.requested(call.name, **param_factors, **prior) for prior in ({"dscale": dscale}, {"dbias": dbias})
    ]
    x, dy, scale, y, bias, kept = call.arrays(x=x, dy=dy, scale=scale, y=y, bias=bias, reserve_space=kept)
    saved_mean, saved_inv_variance = call.arrays(saved_mean=saved_mean, saved_inv_variance=saved_inv_variance)
    view = call.view(x, layout)
    call.alike(x, dy=dy, y=y)
    blend.check(x.shape, x.dtype)
    call.pair(saved_mean=saved_mean, saved_inv_variance=saved_inv_variance)
    given = {"scale": scale, "bias": bias, "saved_mean": saved_mean, "saved_inv_variance": saved_inv_variance}
    call.parameters(view, **given)
    for param_blend in param_blends:
        param_blend.check(scale.shape, scale.dtype)
    epsilon = call.epsilon(epsilon)
    _check_reserve_space(call, x, kept)
    call.dtypes(x, dtypes, **given)
    call.supported_ops(view, x, BACKWARD_ACTIVATIONS)
    has_backward = call.activation is None or call.activation.mode != "swish"
    call.support(has_backward, "activation", "not be SWISH, which has no fused gradient", "SWISH")

    data, grad = (view.images(blend.widen(array)) for array in (x, dy))
    mean, inv_std = _statistics(view, x, saved_mean, saved_inv_variance, epsilon)
    factors = view.parameters(scale)
    activation, gate = RELU, None
    if call.activation is not None and call.activation.mode != "identity":
        offsets = None if bias is None or call.adds else view.parameters(bias)
        y, mask = (None if array is None else view.images(array) for array in (y, _mask(call, kept, x)))
        activation, gate, grad = _gated(call, data, grad, y, mask, factors, offsets, mean, inv_std)
    operands = (grad, data, factors, mean, inv_std, jnp.zeros_like(mean), jnp.zeros_like(mean))
    result_dz = grad
    if gate is None:
        result_dx, *result_params = BATCH_NORM_BACKWARD(*operands, axis_name=None)
    elif call.adds:
        results = BATCH_NORM_ADD_ACTIVATION_BACKWARD(*operands, gate, axis_name=None, activation=activation)
        result_dx, *result_params, result_dz = results
    else:
        results = BATCH_NORM_ACTIVATION_BACKWARD(*operands, gate, axis_name=None, activation=activation)
        result_dx, *result_params = results
    result_dscale, result_dbias = (
        param_blend.apply(view.parameters_back(result, scale), scale.dtype)
        for param_blend, result in zip(param_blends, result_params, strict=True)
    )
    dz = view.images_back(result_dz, x).astype(x.dtype) if call.adds else None
    return blend.apply(view.images_back(result_dx, x), x.dtype), dz, result_dscale, result_dbias


def _gated(
    call: NormCall,
    data: jax.Array,
    grad: jax.Array,
    y: jax.Array | None,
    mask: jax.Array | None,
    scale: jax.Array,
    bias: jax.Array | None,
    mean: jax.Array,
    inv_std: jax.Array,
) -> tuple[Activation, jax.Array | None, jax.Array]:
    """The activation and gate of the backward operator, and its gradient; no gate where that has been scaled already.

    Before y, which may have been blended, come what the reserve space keeps and the recomputed pre-activation.
    """
    assert call.activation is not None
    if mask is not None:
        return RELU, mask, grad
    if bias is not None:
        operands = sharding.agreeing("... n a c b, ... c, ... c, ... c, ... c ->", data, scale, bias, mean, inv_std)
        data, scale, bias, mean, inv_std = operands
        return call.activation, pre_activation(data, scale, bias, mean=mean, inv_std=inv_std), grad
    call.require(y is not None, "y", "be given with an activation where the reserve space does not tell its slope", y)
    assert y is not None
    if call.activation.mode in _MASKED:
        return RELU, _passes(call.activation, y), grad
    y, wide_grad = sharding.agreeing("..., ... ->", y, grad.astype(accumulation_dtype(grad.dtype)))
    return call.activation, None, scaled_by_slope_of_result(call.activation, y, wide_grad).astype(grad.dtype)


def _passes(activation: Activation, y: jax.Array) -> jax.Array:
    """Where relu and clipped_relu, whose result is y, have slope 1."""
    return (y > 0) & (y < activation.coef) if activation.mode == "clipped_relu" else y > 0


def _mask(call: NormCall, kept: jax.Array | None, x: jax.Array) -> jax.Array | None:
    masked = call.activation is not None and call.activation.mode in _MASKED
    return reserve_space.unpacked(kept, x.shape) if masked and kept is not None else None


def _check_reserve_space(call: NormCall, x: jax.Array, kept: jax.Array | None) -> None:
    if kept is not None and call.activation is not None:
        size = reserve_space.size_bytes(x.size)
        fits = kept.ndim == 1 and kept.dtype == jnp.uint8 and kept.size >= size
        call.require(fits, "reserve_space", f"be uint8 of {size} bytes or more", kept)


def _statistics(
    view: View, x: jax.Array, saved_mean: jax.Array | None, saved_inv_variance: jax.Array | None, epsilon: float
) -> tuple[jax.Array, jax.Array]:
    if saved_mean is not None and saved_inv_variance is not None:
        return view.parameters(saved_mean), view.parameters(saved_inv_variance)
    mean, variance = mean_and_variance(view.images(x), None)
    return mean, inverse_std(variance, epsilon)
