"""The documented calls of activations."""

from typing import Any

import jax

from jaxops._checks.errors import NOT_SUPPORTED, NotSupportedError
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
    """Applies an activation to each element: `alpha * result + beta * y`.

    Args:
      desc: the mode with its coefficients and, for RELU and CLIPPED_RELU, what NaN does: with NOT_PROPAGATE_NAN it
        becomes 0. RELU ignores `coef`.
      x: a tensor of four to eight axes; float16, bfloat16, float32 or float64.
      alpha: factor of the result: a Python or NumPy number, or a traced scalar.
      beta: factor of the prior, likewise; with 0 the prior is not read, but a traced beta needs one.
      y: the prior, with the shape and dtype of x.
      layout: "NCHW", "NHWC", "NCDHW" or "NDHWC"; None is the one with the channels first. Of no effect on values.
      strict: whether to refuse IDENTITY, which the documents have as a part of fused calls only.

    Returns:
      The shape and dtype of x.

    Raises:
      BadParamError: status MCDNN_STATUS_BAD_PARAM if desc, x, alpha, beta or a prior that beta needs is missing, the
        prior is unlike x, x has another rank, or the layout is unknown or not that of the rank.
      NotSupportedError: status MCDNN_STATUS_NOT_SUPPORTED for another dtype, a vectorised layout and, if strict,
        IDENTITY.

    Numerics: computed and blended in float32 (float64 for float64) and rounded once; see `jaxops.activation`.

    Source: mcDNN `mcdnnActivationForward`. JAX's arrays are packed, so that equal shapes have equal strides, and a
      result never lies in an operand: the documented errors of strides and of calls in place cannot arise. To reuse a
      buffer, donate it to jit.
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
    """The gradient of `activation_forward`: `alpha * dy * slope + beta * dx`.

        SIGMOID       y * (1 - y)
        RELU          1 if y > 0 else 0
        TANH          1 - y**2
        CLIPPED_RELU  1 if 0 < x < coef else 0
        ELU           1 if y > 0 else y + coef
        IDENTITY      1
        SWISH         s + swish_beta * x * s * (1 - s), where s = 1 / (1 + exp(-swish_beta * x))

    Args:
      desc: as it was given to `activation_forward`.
      y: the output of `activation_forward`, as it was stored: where it was blended, the slopes above are those of what
        it holds, and not the derivative of the blend.
      dy: its gradient.
      x: what the activation was applied to.
      alpha: factor of the result: a Python or NumPy number, or a traced scalar.
      beta: factor of the prior, likewise; with 0 the prior is not read, but a traced beta needs one.
      dx: the prior, with the shape and dtype of dy.
      layout: "NCHW", "NHWC", "NCDHW" or "NDHWC"; None is the one with the channels first. Of no effect on values.
      strict: whether to refuse IDENTITY, which the documents have as a part of fused calls only.

    Returns:
      The shape and dtype of dy.

    Raises:
      BadParamError: status MCDNN_STATUS_BAD_PARAM if desc, y, dy, x, alpha, beta or a prior that beta needs is missing,
        dy has another rank than four to eight, or the layout is unknown or not that of the rank.
      NotSupportedError: status MCDNN_STATUS_NOT_SUPPORTED if shapes or dtypes of y, dy, x and dx are not all equal, for
        another dtype, a vectorised layout and, if strict, IDENTITY.

    Numerics: computed and blended in float32 (float64 for float64) and rounded once. Where RELU or CLIPPED_RELU has
      slope 0, which is so for NaN whatever `nan_propagation` says, NaN in dy goes nowhere.

    Source: mcDNN `mcdnnActivationBackward`. As to strides and calls in place, see `activation_forward`.
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
    """The activation that a descriptor describes, as an attribute of operators."""
    mode = member("ActivationDescriptor", "mode", ActivationMode, descriptor.mode)
    coef = descriptor.swish_beta if mode == ActivationMode.SWISH else descriptor.coef
    propagates = descriptor.nan_propagation == NanPropagation.PROPAGATE_NAN
    return Activation(mode.name.lower(), coef, propagates)


def _check_mode(call: Call, desc: ActivationDescriptor, strict: Any) -> None:
    strict = require_bool(call.name, "strict", strict, or_int=True)
    is_identity = desc.mode == ActivationMode.IDENTITY
    call.support(not (strict and is_identity), "desc.mode", "not be IDENTITY outside of fused calls", "IDENTITY")
