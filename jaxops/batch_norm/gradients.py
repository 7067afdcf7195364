"""The gradients of batch normalization from what a forward call stored, for documented backward calls.

They take x, the statistics of the batch, and something that tells the slope of the activation.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxops._checks.dtypes import accumulation_dtype
from jaxops._primitive import sharding
from jaxops.activation.modes import IDENTITY, MASKED_MODES, RELU, Activation, scaled_by_slope_of_result
from jaxops.batch_norm.backward import BATCH_NORM_BACKWARD, BackwardOperands, Gradients
from jaxops.batch_norm.layouts import View
from jaxops.batch_norm.operator import TrainingOperands, inverse_std, pre_activation
from jaxops.batch_norm.statistics import mean_and_variance


class Slope(NamedTuple):
    """Arrays that tell the slope of the activation: mask, bias or y, whichever is present first.

    Attributes:
      activation: the activation. The identity needs none of the others.
      mask: where relu or clipped relu has slope 1; with the shape of x.
      bias: the bias, for recomputing the pre-activation; None where a residual was added.
      y: the stored result. It comes last, as its slope is wrong if the forward call blended it.
    """

    activation: Activation = IDENTITY
    mask: jax.Array | None = None
    bias: jax.Array | None = None
    y: jax.Array | None = None

    @property
    def is_known(self) -> bool:
        """Tells whether the slope is known."""
        return self.activation.mode == "identity" or any(array is not None for array in (self.mask, self.bias, self.y))


def gradients(
    view: View,
    x: jax.Array,
    grad: jax.Array,
    scale: jax.Array,
    mean: jax.Array,
    inv_std: jax.Array,
    slope: Slope,
    *,
    has_residual: bool,
) -> Gradients:
    """Computes the gradients from `grad`, that of y. Arguments are checked; mean and inv_std have shape (c,)."""
    images, grad, factors = view.images(x), view.images(grad), view.parameters(scale)
    gate, activation, grad = _gate(view, images, grad, factors, mean, inv_std, slope)
    # The documents do not differentiate the statistics that a training call returns: their gradients are 0.
    operands = BackwardOperands(grad, images, factors, mean, inv_std, jnp.zeros_like(mean), jnp.zeros_like(mean), gate)
    # Without a gate the residual's gradient is the one that came in.
    from_operator = has_residual and gate is not None
    found = BATCH_NORM_BACKWARD(operands, axis_name=None, activation=activation, residual_grad=from_operator)
    scale_grad, bias_grad = (view.parameters_back(values, scale) for values in (found.scale, found.bias))
    of_residual = found.residual if from_operator else grad
    residual = view.images_back(of_residual, x) if has_residual else None
    return Gradients(view.images_back(found.x, x), scale_grad, bias_grad, residual)


def batch_statistics(view: View, x: jax.Array, epsilon: float) -> tuple[jax.Array, jax.Array]:
    """Computes the mean and `1 / sqrt(biased variance + epsilon)` of a batch, (c,)."""
    mean, variance = mean_and_variance(view.images(x), None)
    return mean, inverse_std(variance, epsilon)


def slope_mask(activation: Activation, y: jax.Array) -> jax.Array:
    """Returns where relu or clipped relu, with result y, has slope 1."""
    return (y > 0) & (y < activation.coef) if activation.mode == "clipped_relu" else y > 0


def _gate(
    view: View,
    images: jax.Array,
    grad: jax.Array,
    scale: jax.Array,
    mean: jax.Array,
    inv_std: jax.Array,
    slope: Slope,
) -> tuple[jax.Array | None, Activation, jax.Array]:
    """Returns the backward operator's gate, activation and gradient; without a gate the gradient is already scaled."""
    activation, mask, bias, y = slope
    if activation.mode == "identity":
        return None, IDENTITY, grad
    if mask is not None:
        # As a gate the mask makes clipped relu a relu: both have slope 1 where it is true, and 0 elsewhere.
        return view.images(mask), RELU, grad
    if bias is not None:
        operands = (images, scale, view.parameters(bias), mean, inv_std)
        aligned = sharding.agreeing("... n a c b, ... c, ... c, ... c, ... c ->", *operands)
        x, scale, bias, mean, inv_std = aligned
        return pre_activation(TrainingOperands(x, scale, bias), mean, inv_std), activation, grad
    assert y is not None
    if activation.mode in MASKED_MODES:
        return slope_mask(activation, view.images(y)), RELU, grad
    # For the other modes the operators take only the pre-activation as a gate, so the slope is applied here.
    wide_grad = grad.astype(accumulation_dtype(grad.dtype))
    y, wide_grad = sharding.agreeing("..., ... ->", view.images(y), wide_grad)
    return None, IDENTITY, scaled_by_slope_of_result(activation, y, wide_grad).astype(grad.dtype)
