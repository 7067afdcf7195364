"""The documented calls of local response normalization."""

from typing import Any

import jax

from jaxops._checks.errors import NOT_SUPPORTED, NotSupportedError
from jaxops.local_response_norm import (
    LOCAL_RESPONSE_NORM,
    LOCAL_RESPONSE_NORM_BACKWARD,
    channels_back,
    channels_before_space,
)
from jaxops.mcdnn.blend import Blend
from jaxops.mcdnn.checks import Call
from jaxops.mcdnn.descriptors import LRNDescriptor
from jaxops.mcdnn.enums import LRNMode, member


def lrn_cross_channel_forward(
    desc: LRNDescriptor,
    x: jax.Array,
    *,
    mode: LRNMode | str | int = "CROSS_CHANNEL_DIM1",
    alpha: float | jax.Array = 1.0,
    beta: float | jax.Array = 0.0,
    y: jax.Array | None = None,
    layout: str | None = None,
) -> jax.Array:
    """Normalizes by the squares of neighbouring channels: `alpha * result + beta * y`.

        result = x * s**-desc.beta,  s[c] = desc.k + desc.alpha / n * sum of x[j]**2 for j from c - before to c + after

    with `n = desc.n`, `before = (n - 1) // 2` and `after = n - 1 - before`: an even window looks one channel further
    ahead. It is clipped at the first and last channel; the divisor stays n.

    Args:
      desc: n, alpha, beta and k.
      x: images; float16, bfloat16, float32 or float64.
      mode: the only `LRNMode`.
      alpha: factor of the result: a Python or NumPy number, or a traced scalar.
      beta: factor of the prior, likewise; with 0 the prior is not read, but a traced beta needs one.
      y: the prior, with the shape and dtype of x.
      layout: "NCHW", "NHWC" or "NCDHW"; None means NCHW or NCDHW, by the rank of x.

    Returns:
      The shape and dtype of x.

    Raises:
      BadParamError: status MCDNN_STATUS_BAD_PARAM if desc, x, alpha, beta or a prior that beta needs is missing, the
        mode or the layout is unknown or does not fit the rank, x has rank 2 or less, or five axes in another order
        than NCDHW.
      NotSupportedError: status MCDNN_STATUS_NOT_SUPPORTED for another dtype, rank 3 or more than 5, a vectorised
        layout, or a prior of another shape or dtype.

    Numerics: computed and blended in float32 (float64 for float64) and rounded once.

    Source: mcDNN `mcdnnLRNCrossChannelForward`. JAX's arrays are packed and own their memory, so the documented errors
      of strides and of a missing output cannot arise.
    """
    call = Call("lrn_cross_channel_forward")
    _check_call(call, desc, mode, x=x)
    blend = Blend.requested(call.name, alpha=alpha, beta=beta, y=y)
    (x,) = call.arrays(x=x)
    layout = _layout(call, layout, x=x)
    blend.check(x.shape, x.dtype, status=NOT_SUPPORTED, error=NotSupportedError)
    call.supported_dtype("x", x)
    images = channels_before_space(blend.upcast(x), layout)
    (result,) = LOCAL_RESPONSE_NORM(images, n=desc.n, **desc.attributes)
    return blend.apply(channels_back(result, layout), x.dtype)


def lrn_cross_channel_backward(
    desc: LRNDescriptor,
    y: jax.Array,
    dy: jax.Array,
    x: jax.Array,
    *,
    mode: LRNMode | str | int = "CROSS_CHANNEL_DIM1",
    alpha: float | jax.Array = 1.0,
    beta: float | jax.Array = 0.0,
    dx: jax.Array | None = None,
    layout: str | None = None,
) -> jax.Array:
    """The gradient of `lrn_cross_channel_forward`: `alpha * result + beta * dx`.

        result[c] = dy[c] * s[c]**-desc.beta
                    - 2 * desc.alpha * desc.beta / n * x[c] * sum of dy[j] * x[j] * s[j]**(-desc.beta - 1)

    over the channels j whose windows hold c, from `c - after` to `c + before`.

    Args:
      desc: as it was given to `lrn_cross_channel_forward`.
      y: the output of `lrn_cross_channel_forward`. Only its shape and dtype count: it is computed again from x, so
        that a blended y does no harm.
      dy: its gradient.
      x: the images.
      mode: the only `LRNMode`.
      alpha: factor of the result: a Python or NumPy number, or a traced scalar.
      beta: factor of the prior, likewise; with 0 the prior is not read, but a traced beta needs one.
      dx: the prior, with the shape and dtype of x.
      layout: "NCHW", "NHWC" or "NCDHW"; None means NCHW or NCDHW, by the rank of x.

    Returns:
      The shape and dtype of x.

    Raises:
      BadParamError: as of `lrn_cross_channel_forward`, also if y or dy is missing.
      NotSupportedError: as of `lrn_cross_channel_forward`, also if y, dy, x and dx differ in shape or dtype.

    Numerics: computed and blended in float32 (float64 for float64) and rounded once.

    Source: mcDNN `mcdnnLRNCrossChannelBackward`. The documented errors of strides cannot arise: arrays are packed.
    """
    call = Call("lrn_cross_channel_backward")
    _check_call(call, desc, mode, y=y, dy=dy, x=x)
    blend = Blend.requested(call.name, alpha=alpha, beta=beta, dx=dx)
    y, dy, x = call.arrays(y=y, dy=dy, x=x)
    layout = _layout(call, layout, x=x, y=y, dy=dy)
    for argument, array in (("y", y), ("dy", dy)):
        call.support(array.dtype == x.dtype, argument, f"have the dtype of x, {x.dtype}", array)
        call.support(array.shape == x.shape, argument, f"have the shape of x, {x.shape}", array)
    blend.check(x.shape, x.dtype, status=NOT_SUPPORTED, error=NotSupportedError)
    call.supported_dtype("x", x)
    images, grad = (channels_before_space(array, layout) for array in (x, blend.upcast(dy)))
    (result,) = LOCAL_RESPONSE_NORM_BACKWARD(images, grad, n=desc.n, **desc.attributes)
    return blend.apply(channels_back(result, layout), x.dtype)


def _check_call(call: Call, desc: Any, mode: Any, **arrays: Any) -> None:
    call.descriptor(LRNDescriptor, desc)
    member(call.name, "mode", LRNMode, mode)
    call.present(**arrays)


def _layout(call: Call, layout: str | None, **arrays: Any) -> str:
    for argument, array in arrays.items():
        call.require(array.ndim > 2, argument, "have more than two axes", array)
    layout = call.layout(arrays["x"], layout)
    call.require(layout != "NDHWC", "layout", "be NCDHW for images with five axes", layout)
    return layout
