"""The documented calls of divisive normalization."""

from typing import Any

import jax

from jaxops.divisive_norm import DIVISIVE_NORM, DIVISIVE_NORM_BACKWARD, Images, window_of
from jaxops.mcdnn.blend import Blend
from jaxops.mcdnn.checks import Call
from jaxops.mcdnn.descriptors import LRNDescriptor
from jaxops.mcdnn.enums import DivNormMode, member
from jaxops.pooling import windows


def divisive_normalization_forward(
    desc: LRNDescriptor,
    x: jax.Array,
    means: jax.Array | None = None,
    *,
    mode: DivNormMode | str | int = "PRECOMPUTED_MEANS",
    alpha: float | jax.Array = 1.0,
    beta: float | jax.Array = 0.0,
    y: jax.Array | None = None,
    layout: str | None = None,
) -> jax.Array:
    """Normalizes by the deviations around each pixel: `alpha * result + beta * y`.

        result = x * s**-desc.beta
        s[i] = desc.k + desc.alpha / n**d * sum of (x[j] - means[i])**2
               over the pixels j in the window around i

    Each channel is normalized alone, over its d spatial axes. Along each axis the window holds n pixels, from
    `i - (n - 1) // 2` on: an even one looks one pixel further ahead. It is clipped at the border; the divisor stays
    n**d.

    Arguments shared by all calls are described in `jaxops.mcdnn`.

    Args:
      x: images of rank 4 or 5.
      means: with the shape and dtype of x. None stands for zeros.
      mode: the only `DivNormMode`.
      layout: the documents describe images with channels last by the strides of NCHW.

    Returns:
      An array with the shape and dtype of x.

    Raises:
      BadParamError: also if x has another rank, or means differs from x in shape or dtype.

    Numerics: `jaxops.divisive_norm` says how digits survive large means.

    Example:
      >>> desc = jaxops.mcdnn.LRNDescriptor(n=1, alpha=1.0, beta=1.0, k=1.0)
      >>> x, means = jnp.array([[[[2.0, 3.0]]]]), jnp.array([[[[1.0, 3.0]]]])
      >>> jaxops.mcdnn.divisive_normalization_forward(desc, x, means).round().tolist()
      [[[[1.0, 3.0]]]]

    Source: mcDNN `mcdnnDivisiveNormalizationForward`.
    """
    call = Call("divisive_normalization_forward")
    _check_call(call, desc, mode, x=x)
    blend = Blend.requested(call.name, alpha=alpha, beta=beta, y=y)
    x, means = call.arrays(x=x, means=means)
    layout = _layout(call, x, layout)
    _check_like_x(call, x, means=means)
    blend.check(x.shape, x.dtype)
    call.supported_dtype("x", x)
    (result,) = DIVISIVE_NORM(_images(blend.upcast(x), means, layout), **_attributes(desc, layout))
    return blend.apply(windows.from_volume(result, layout), x.dtype)


def divisive_normalization_backward(
    desc: LRNDescriptor,
    x: jax.Array,
    means: jax.Array | None,
    dy: jax.Array,
    *,
    mode: DivNormMode | str | int = "PRECOMPUTED_MEANS",
    alpha: float | jax.Array = 1.0,
    beta: float | jax.Array = 0.0,
    dx: jax.Array | None = None,
    dmeans: jax.Array | None = None,
    layout: str | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """Computes the exact gradients of `divisive_normalization_forward` in x and means: `alpha * result + beta * prior`.

    The means count as an input of their own. With u = -desc.beta dy x s**(-desc.beta - 1) desc.alpha / n**d,

        dx[j] = dy[j] s[j]**-desc.beta + 2 sum of u[i] (x[j] - means[i])
                over the windows i that hold j
        dmeans[i] = -2 u[i] sum of (x[j] - means[i]) over the window i

    If the means were computed from x, push dmeans through that computation and add the result to dx.

    Arguments shared by all calls are described in `jaxops.mcdnn`.

    Args:
      means, mode: as in `divisive_normalization_forward`.
      dmeans: the prior of the gradient of the means, with the shape and dtype of x. If it is None while beta is traced
        or not 0, this gradient is not computed.

    Returns:
      (dx, dmeans), each with the shape and dtype of x; dmeans may be None, see above. Under jit an unused one is free.

    Raises:
      BadParamError: as in `divisive_normalization_forward`, and if dy differs from x in shape or dtype.

    Example:
      >>> desc = jaxops.mcdnn.LRNDescriptor(n=1, alpha=1.0, beta=1.0, k=1.0)
      >>> x, means, dy = (
      ...     jnp.array([[[[2.0]]]]),
      ...     jnp.array([[[[1.0]]]]),
      ...     jnp.array([[[[1.0]]]]),
      ... )
      >>> dx, dmeans = jaxops.mcdnn.divisive_normalization_backward(desc, x, means, dy)
      >>> dx.round(3).item(), dmeans.round(3).item()
      (-0.5, 1.0)

    Source: mcDNN `mcdnnDivisiveNormalizationBackward`. Its MCDNN_STATUS_UNSUPPORTED is about strides and cannot arise.
    """
    call = Call("divisive_normalization_backward")
    _check_call(call, desc, mode, x=x, dy=dy)
    blend = Blend.requested(call.name, alpha=alpha, beta=beta, dx=dx)
    means_blend = Blend.requested(call.name, alpha=alpha, beta=beta, dmeans=dmeans)
    wants_means = means_blend.prior is not None or not means_blend.reads_prior
    x, means, dy = call.arrays(x=x, means=means, dy=dy)
    layout = _layout(call, x, layout)
    _check_like_x(call, x, means=means, dy=dy)
    blend.check(x.shape, x.dtype)
    if wants_means:
        means_blend.check(x.shape, x.dtype)
    call.supported_dtype("x", x)
    grad, images = windows.to_volume(blend.upcast(dy), layout), _images(x, means, layout)
    results = DIVISIVE_NORM_BACKWARD(images, grad, means_grad=wants_means, **_attributes(desc, layout))
    of_x = blend.apply(windows.from_volume(results.x, layout), x.dtype)
    if results.means is None:
        return of_x, None
    return of_x, means_blend.apply(windows.from_volume(results.means, layout), x.dtype)


def _check_call(call: Call, desc: Any, mode: Any, **arrays: Any) -> None:
    call.descriptor(LRNDescriptor, desc)
    member(call.name, "mode", DivNormMode, mode)
    call.present(**arrays)


def _layout(call: Call, x: jax.Array, layout: str | None) -> str:
    call.require(x.ndim in (4, 5), "x", "have two or three spatial axes", x)
    return call.layout(x, layout)


def _check_like_x(call: Call, x: jax.Array, **arrays: Any) -> None:
    for argument, array in arrays.items():
        same = array is None or (array.shape, array.dtype) == (x.shape, x.dtype)
        call.require(same, argument, f"have x's shape and dtype, {x.dtype}{list(x.shape)}", array)


def _images(x: jax.Array, means: jax.Array | None, layout: str) -> Images:
    return Images(windows.to_volume(x, layout), None if means is None else windows.to_volume(means, layout))


def _attributes(desc: LRNDescriptor, layout: str) -> dict[str, Any]:
    return {"window": window_of(desc.n, layout), **desc.attributes}
