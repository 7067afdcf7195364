"""The documented calls of local response normalization."""

from typing import Any

import jax

from jaxops._checks.arguments import NOT_SUPPORTED, NotSupportedError
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

        result = x * s**-desc.beta
        s[c] = desc.k + desc.alpha / n * sum of x[j]**2 for j from c - before to c + after

    with `n = desc.n`, `before = (n - 1) // 2` and `after = n - 1 - before`: an even window looks one channel further
    ahead. It is clipped at the first and last channel; the divisor stays n.

    Arguments shared by all calls are described in `jaxops.mcdnn`.

    Args:
      x: images of rank 4 or 5.
      mode: the only `LRNMode`.
      layout: "NCHW", "NHWC" or "NCDHW"; None means NCHW or NCDHW.

    Returns:
      An array with the shape and dtype of x.

    Raises:
      BadParamError: also if x has rank 2 or less, or the layout is NDHWC.
      NotSupportedError: also if x has rank 3 or more than 5, and here also if the prior differs from the output.

    Example:
      >>> desc = jaxops.mcdnn.LRNDescriptor(n=1, alpha=1.0, beta=1.0, k=1.0)
      >>> y = jaxops.mcdnn.lrn_cross_channel_forward(desc, jnp.array([[[[1.0, 3.0]]]]))
      >>> y.round(3).tolist()
      [[[[0.5, 0.3...]]]]

    Source: mcDNN `mcdnnLRNCrossChannelForward`.
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
    """Computes the gradient of `lrn_cross_channel_forward`: `alpha * result + beta * dx`.

        result[c] = dy[c] * s[c]**-desc.beta
                    - 2 * desc.alpha * desc.beta / n * x[c]
                      * sum of dy[j] * x[j] * s[j]**(-desc.beta - 1)

    over the channels j whose windows hold c, from `c - after` to `c + before`.

    Arguments shared by all calls are described in `jaxops.mcdnn`.

    Args:
      y: the result of `lrn_cross_channel_forward`. Only its shape and dtype count: it is computed again from x, so a
        blended y does no harm.
      mode, layout: as in `lrn_cross_channel_forward`.

    Returns:
      An array with the shape and dtype of x.

    Raises:
      BadParamError: as in `lrn_cross_channel_forward`.
      NotSupportedError: as in `lrn_cross_channel_forward`, and if y, dy, x and dx differ in shape or dtype.

    Example:
      >>> desc = jaxops.mcdnn.LRNDescriptor(n=1, alpha=1.0, beta=1.0, k=1.0)
      >>> x = jnp.array([[[[0.0, 1.0]]]])
      >>> dy = jnp.ones((1, 1, 1, 2))
      >>> dx = jaxops.mcdnn.lrn_cross_channel_backward(desc, x / 2, dy, x)
      >>> dx.round(3).tolist()
      [[[[1.0, 0.0]]]]

    Source: mcDNN `mcdnnLRNCrossChannelBackward`.
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
