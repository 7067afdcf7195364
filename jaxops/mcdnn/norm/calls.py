"""Norm calls once their enumerations are read: check, compute, blend."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxops._primitive.results import exportable
from jaxops.activation.modes import IDENTITY, MASKED_MODES
from jaxops.batch_norm.api import infer, train, updated_statistics
from jaxops.batch_norm.gradients import Slope, batch_statistics, gradients, slope_mask
from jaxops.batch_norm.operator import inverse_std
from jaxops.mcdnn import reserve_space as bits
from jaxops.mcdnn.blend import Blend
from jaxops.mcdnn.checks import DTYPES
from jaxops.mcdnn.enums import ActivationMode
from jaxops.mcdnn.norm.checks import NormCall

FORWARD_ACTIVATIONS = (ActivationMode.RELU, ActivationMode.SWISH)
BACKWARD_ACTIVATIONS = (ActivationMode.RELU,)


@exportable
class BatchNormTrainingEx(NamedTuple):
    """Results of a training call.

    Attributes:
      y: like x.
      running_mean: the updated average, or None if none was passed.
      running_variance: the updated average of unbiased variances, or None.
      saved_mean: the mean of this batch.
      saved_inv_variance: 1 / sqrt(biased variance + epsilon) of this batch.
      reserve_space: uint8, a bit for each element of x, set where the activation's result, before it is blended, is
        positive (for CLIPPED_RELU also less than coef); empty without an activation.
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
    call.like_x(x, z=z)
    blend.check(x.shape, x.dtype)
    call.pair(running_mean=running_mean, running_variance=running_variance)
    parameters = {"scale": scale, "bias": bias, "running_mean": running_mean, "running_variance": running_variance}
    call.parameters(view, **parameters)
    epsilon = call.epsilon(epsilon)
    factor = call.factor(exponential_average_factor)
    call.dtypes(x, dtypes, **parameters)
    call.supported_ops(view, x, FORWARD_ACTIVATIONS)
    data = blend.upcast(x)
    residual = None if z is None else z.astype(data.dtype)
    activation = call.activation or IDENTITY
    result, of_batch = train(call.name, view, data, scale, bias, residual, activation, epsilon=epsilon)
    if running_mean is not None:
        old = (running_mean, running_variance)
        running_mean, running_variance = updated_statistics(view, old, of_batch, momentum=factor)
    reserve_space = jnp.zeros(0, jnp.uint8)
    if call.activation is not None:
        reserve_space = bits.packed(slope_mask(call.activation, result))
    return BatchNormTrainingEx(
        blend.apply(result, x.dtype),
        running_mean,
        running_variance,
        view.parameters_back(of_batch.mean, scale),
        view.parameters_back(inverse_std(of_batch.variance, epsilon), scale),
        reserve_space,
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
    parameters = {
        "scale": scale,
        "bias": bias,
        "estimated_mean": estimated_mean,
        "estimated_variance": estimated_variance,
    }
    call.present(x=x, **parameters)
    if call.adds:
        call.present(z=z)
    blend = Blend.requested(call.name, alpha=alpha, beta=beta, y=y)
    x, z = call.arrays(x=x, z=z if call.adds else None)
    parameters = dict(zip(parameters, call.arrays(**parameters), strict=True))
    view = call.view(x, layout)
    call.like_x(x, z=z)
    blend.check(x.shape, x.dtype)
    call.parameters(view, **parameters)
    epsilon = call.epsilon(epsilon)
    call.dtypes(x, DTYPES, **parameters)
    call.supported_ops(view, x, FORWARD_ACTIVATIONS)
    data = blend.upcast(x)
    residual = None if z is None else z.astype(data.dtype)
    activation = call.activation or IDENTITY
    result = infer(view, data, list(parameters.values()), residual, activation, epsilon=epsilon)
    return blend.apply(result, x.dtype)


class GradientBlend(NamedTuple):
    """Factors and priors that a backward call blends its gradients with, under the names of its arguments."""

    alpha_data_diff: float | jax.Array
    beta_data_diff: float | jax.Array
    alpha_param_diff: float | jax.Array
    beta_param_diff: float | jax.Array
    dx: Any
    dscale: Any
    dbias: Any

    def requested(self, name: str) -> tuple[Blend, Blend, Blend]:
        """Returns the blends of dx, dscale and dbias."""
        data = {"alpha_data_diff": self.alpha_data_diff, "beta_data_diff": self.beta_data_diff}
        params = {"alpha_param_diff": self.alpha_param_diff, "beta_param_diff": self.beta_param_diff}
        return (
            Blend.requested(name, **data, dx=self.dx),
            Blend.requested(name, **params, dscale=self.dscale),
            Blend.requested(name, **params, dbias=self.dbias),
        )


def backward(
    call: NormCall,
    x: Any,
    dy: Any,
    scale: Any,
    *,
    y: Any = None,
    bias: Any = None,
    reserve_space: Any = None,
    epsilon: float,
    saved_mean: Any,
    saved_inv_variance: Any,
    blend: GradientBlend,
    layout: str | None,
    dtypes: tuple[str, ...] = DTYPES,
) -> tuple[jax.Array, jax.Array | None, jax.Array, jax.Array]:
    """Checks and runs a backward call. Returns dx, dz (None without a residual), dscale and dbias."""
    call.present(x=x, dy=dy, scale=scale)
    x_blend, scale_blend, bias_blend = blend.requested(call.name)
    x, dy, scale, y, bias = call.arrays(x=x, dy=dy, scale=scale, y=y, bias=bias)
    (reserve_space,) = call.arrays(reserve_space=reserve_space)
    saved_mean, saved_inv_variance = call.arrays(saved_mean=saved_mean, saved_inv_variance=saved_inv_variance)
    view = call.view(x, layout)
    call.like_x(x, dy=dy, y=y)
    x_blend.check(x.shape, x.dtype)
    call.pair(saved_mean=saved_mean, saved_inv_variance=saved_inv_variance)
    parameters = {"scale": scale, "bias": bias, "saved_mean": saved_mean, "saved_inv_variance": saved_inv_variance}
    call.parameters(view, **parameters)
    for parameter_blend in (scale_blend, bias_blend):
        parameter_blend.check(scale.shape, scale.dtype)
    epsilon = call.epsilon(epsilon)
    _check_reserve_space(call, x, reserve_space)
    call.dtypes(x, dtypes, **parameters)
    call.supported_ops(view, x, BACKWARD_ACTIVATIONS)
    slope = _slope(call, x, y, bias, reserve_space)
    if saved_mean is None:
        mean, inv_std = batch_statistics(view, x, epsilon)
    else:
        mean, inv_std = view.parameters(saved_mean), view.parameters(saved_inv_variance)
    data, grad = x_blend.upcast(x), x_blend.upcast(dy)
    result = gradients(view, data, grad, scale, mean, inv_std, slope, has_residual=call.adds)
    return (
        x_blend.apply(result.x, x.dtype),
        None if result.residual is None else result.residual.astype(x.dtype),
        scale_blend.apply(result.scale, scale.dtype),
        bias_blend.apply(result.bias, scale.dtype),
    )


def _check_reserve_space(call: NormCall, x: jax.Array, reserve_space: jax.Array | None) -> None:
    if reserve_space is not None and call.activation is not None:
        size = bits.size_bytes(x.size)
        fits = reserve_space.ndim == 1 and reserve_space.dtype == jnp.uint8 and reserve_space.size >= size
        call.require(fits, "reserve_space", f"be uint8 of {size} bytes or more", reserve_space)


def _slope(call: NormCall, x: jax.Array, y: Any, bias: Any, reserve_space: jax.Array | None) -> Slope:
    """Returns what tells the activation's slope; refuses a call in which nothing does."""
    activation = call.activation or IDENTITY
    call.support(activation.mode != "swish", "activation", "not be SWISH, which has no fused gradient", "SWISH")
    mask = None
    if reserve_space is not None and activation.mode in MASKED_MODES:
        mask = bits.unpacked(reserve_space, x.shape)
    # A backward call does not take z, without which the pre-activation cannot be recomputed.
    slope = Slope(activation, mask, None if call.adds else bias, y)
    rule = "be given with an activation where the reserve space does not tell its slope"
    call.require(slope.is_known, "y", rule, y)
    return slope
