"""The documented calls of activations."""

from typing import Any

import jax

from jaxops._checks.arguments import NOT_SUPPORTED, NotSupportedError
from jaxops._checks.mcdnn import require_bool
from jaxops.activation.api import apply
from jaxops.activation.modes import Activation
from jaxops.activation.operator import ACTIVATION_BACKWARD, reads_result
from jaxops.mcdnn.blend import Blend
from jaxops.mcdnn.checks import Call
from jaxops.mcdnn.descriptors import ActivationDescriptor
from jaxops.mcdnn.enums import ActivationMode, NanPropagation, member


def activation_forward(
    desc: ActivationDescriptor,
    x: jax.Array,
    *,
    alpha: float | jax.Array = 1.0,
    beta: float | jax.Array = 0.0,
    y: jax.Array | None = None,
    layout: str | None = None,
    strict: bool = False,
) -> jax.Array:
    """Applies an activation to each element: `alpha * activation(x) + beta * y`.

    Arguments shared by all calls are described in `jaxops.mcdnn`.

    Args:
      desc: the mode and its coefficient, and what RELU and CLIPPED_RELU do with NaN: under NOT_PROPAGATE_NAN it
        becomes 0. RELU ignores `coef`.
      x: a tensor of four to eight axes.
      layout: has no effect on values. It must be None for more than five axes.

    Returns:
      An array with the shape and dtype of x.

    Raises:
      BadParamError: also if x has another rank.
      NotSupportedError: also for IDENTITY if strict: the documents offer it only inside fused calls.

    Numerics: see `jaxops.activation`.

    Example:
      >>> relu = jaxops.mcdnn.ActivationDescriptor("RELU")
      >>> x = jnp.array([-1.0, 2.0]).reshape(1, 1, 1, 2)
      >>> jaxops.mcdnn.activation_forward(relu, x, alpha=3.0).tolist()
      [[[[0.0, 6.0]]]]

    Source: mcDNN `mcdnnActivationForward`.
    """
    call = Call("activation_forward")
    call.descriptor(ActivationDescriptor, desc)
    call.present(x=x)
    blend = Blend.requested(call.name, alpha=alpha, beta=beta, y=y)
    (x,) = call.arrays(x=x)
    call.channel_axis(x, layout)
    blend.check(x.shape, x.dtype)
    call.supported_dtype("x", x)
    _check_mode(call, desc, strict)
    result = apply(blend.upcast(x), requested(desc))
    return blend.apply(result, x.dtype)


def activation_backward(
    desc: ActivationDescriptor,
    y: jax.Array,
    dy: jax.Array,
    x: jax.Array,
    *,
    alpha: float | jax.Array = 1.0,
    beta: float | jax.Array = 0.0,
    dx: jax.Array | None = None,
    layout: str | None = None,
    strict: bool = False,
) -> jax.Array:
    """Computes the gradient of `activation_forward`: `alpha * dy * slope + beta * dx`.

        SIGMOID       y * (1 - y)
        RELU          1 if y > 0 else 0
        TANH          1 - y**2
        CLIPPED_RELU  1 if 0 < x < coef else 0
        ELU           1 if y > 0 else y + coef
        IDENTITY      1
        SWISH         s + swish_beta * x * s * (1 - s), where s = 1 / (1 + exp(-swish_beta * x))

    y is the stored result: if it was blended, the slopes are those at the blended values.
    Arguments shared by all calls are described in `jaxops.mcdnn`.

    Returns:
      An array with the shape and dtype of dy.

    Raises:
      BadParamError: also if dy does not have four to eight axes.
      NotSupportedError: also if y, dy, x and dx differ in shape or dtype, and for IDENTITY if strict.

    Numerics: where RELU or CLIPPED_RELU has slope 0 (at NaN too, whatever `nan_propagation`), NaN in dy is dropped.

    Example:
      >>> relu = jaxops.mcdnn.ActivationDescriptor("RELU")
      >>> y, dy = jnp.array([[[[0.0, 2.0]]]]), jnp.array([[[[5.0, 7.0]]]])
      >>> jaxops.mcdnn.activation_backward(relu, y, dy, y).tolist()
      [[[[0.0, 7.0]]]]

    Source: mcDNN `mcdnnActivationBackward`.
    """
    call = Call("activation_backward")
    call.descriptor(ActivationDescriptor, desc)
    call.present(y=y, dy=dy, x=x)
    blend = Blend.requested(call.name, alpha=alpha, beta=beta, dx=dx)
    y, dy, x = call.arrays(y=y, dy=dy, x=x)
    call.channel_axis(dy, layout, "dy")
    for argument, array in (("y", y), ("x", x)):
        same = (array.shape, array.dtype) == (dy.shape, dy.dtype)
        call.support(same, argument, f"have the shape and dtype of dy, {dy.dtype}{list(dy.shape)}", array)
    blend.check(dy.shape, dy.dtype, status=NOT_SUPPORTED, error=NotSupportedError)
    call.supported_dtype("dy", dy)
    _check_mode(call, desc, strict)
    activation = requested(desc)
    result = blend.upcast(dy)
    if activation.mode != "identity":
        of_result = reads_result(activation)
        (result,) = ACTIVATION_BACKWARD(y if of_result else x, result, activation=activation, of_result=of_result)
    return blend.apply(result, dy.dtype)


def requested(descriptor: ActivationDescriptor) -> Activation:
    """Returns the activation that a descriptor describes, as an attribute of operators."""
    mode = member("ActivationDescriptor", "mode", ActivationMode, descriptor.mode)
    coef = descriptor.swish_beta if mode == ActivationMode.SWISH else descriptor.coef
    propagates = descriptor.nan_propagation == NanPropagation.PROPAGATE_NAN
    return Activation(mode.name.lower(), coef, propagates)


def _check_mode(call: Call, desc: ActivationDescriptor, strict: Any) -> None:
    strict = require_bool(call.name, "strict", strict, or_int=True)
    is_identity = desc.mode == ActivationMode.IDENTITY
    call.support(not (strict and is_identity), "desc.mode", "not be IDENTITY outside of fused calls", "IDENTITY")
