"""The documented calls of divisive normalization."""

from typing import Any

import jax

from jaxops.divisive_norm import DIVISIVE_NORM, DIVISIVE_NORM_BACKWARD, no_means, window_of
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
        s[i] = desc.k + desc.alpha / n**d * sum of (x[j] - means[i])**2 over the pixels j in the window around i

    in every channel alone, with d spatial axes. Along each the window reaches from `i - (n - 1) // 2` over n pixels: an
    even one looks one pixel further ahead. It is clipped at the border; the divisor stays n**d.

    Args:
      desc: n, alpha, beta and k.
      x: images of rank 4 or 5; float16, bfloat16, float32 or float64.
      means: with the shape and dtype of x. None stands for zeros.
      mode: the only `DivNormMode`.
      alpha: factor of the result: a Python or NumPy number, or a traced scalar.
      beta: factor of the prior, likewise; with 0 the prior is not read, but a traced beta needs one.
      y: the prior, with the shape and dtype of x.
      layout: "NCHW", "NHWC", "NCDHW" or "NDHWC"; None means NCHW or NCDHW, by the rank of x. The documents know images
        with the channels last as strides of NCHW.

    Returns:
      The shape and dtype of x.

    Raises:
      BadParamError: status MCDNN_STATUS_BAD_PARAM if desc, x, alpha, beta or a prior that beta needs is missing, the
        mode or the layout is unknown, the rank is not 4 or 5 or not that of the layout, or means or the prior differ
        from x in shape or dtype.
      NotSupportedError: status MCDNN_STATUS_NOT_SUPPORTED for another dtype or a vectorised layout.

    Numerics: computed and blended in float32 (float64 for float64) and rounded once; `jaxops.divisive_norm` says how
      digits survive large means.

    Source: mcDNN `mcdnnDivisiveNormalizationForward`. The documented errors of strides and of missing scratch memory
      (temp, temp2) or output cannot arise: JAX's arrays are packed, and XLA allocates.
    """
    call = Call("divisive_normalization_forward")
    _check_call(call, desc, mode, x=x)
    blend = Blend.requested(call.name, alpha=alpha, beta=beta, y=y)
    x, means = call.arrays(x=x, means=means)
    layout = _layout(call, x, layout)
    _check_like_x(call, x, means=means)
    blend.check(x.shape, x.dtype)
    call.supported_dtype("x", x)
    volume = windows.to_volume(blend.upcast(x), layout)
    (result,) = DIVISIVE_NORM(volume, _means(means, volume, layout), **_attributes(desc, layout))
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
    """The gradients of `divisive_normalization_forward`: `alpha * result + beta * prior`, of x and of the means.

    The means count as an input of their own. With u = -desc.beta dy x s**(-desc.beta - 1) desc.alpha / n**d,

        dx[j] = dy[j] s[j]**-desc.beta + 2 sum of u[i] (x[j] - means[i]) over the windows i that hold j
        dmeans[i] = -2 u[i] sum of (x[j] - means[i]) over the window i

    For means that were computed from x, push dmeans through that computation and add the result to dx.

    Args:
      desc: as it was given to `divisive_normalization_forward`.
      x: the images.
      means: as they were given to `divisive_normalization_forward`. None stands for zeros.
      dy: the gradient of its result, with the shape and dtype of x.
      mode: the only `DivNormMode`.
      alpha: factor of both results: a Python or NumPy number, or a traced scalar.
      beta: factor of both priors, likewise; with 0 the priors are not read, but a traced beta needs one.
      dx: the prior of the gradient of x, with its shape and dtype.
      dmeans: the prior of the gradient of the means, with the shape and dtype of x. None with a beta that is not 0,
        or that is traced, says that this gradient is not wanted.
      layout: "NCHW", "NHWC", "NCDHW" or "NDHWC"; None means NCHW or NCDHW, by the rank of x.

    Returns:
      (dx, dmeans), of the shape and dtype of x; the second is None where it is not wanted. Under jit it costs nothing
      where it is not used.

    Raises:
      BadParamError: as of `divisive_normalization_forward`; also if dy is missing or it or a prior differs from x.
      NotSupportedError: as of `divisive_normalization_forward`.

    Numerics: computed and blended in float32 (float64 for float64) and rounded once. For even windows, too, the exact
      adjoint.

    Source: mcDNN `mcdnnDivisiveNormalizationBackward`. Its status MCDNN_STATUS_UNSUPPORTED, for strides of inputs and
      outputs that differ, cannot arise, nor can its errors of missing scratch memory.
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
    volume, grad = (windows.to_volume(array, layout) for array in (x, blend.upcast(dy)))
    results = DIVISIVE_NORM_BACKWARD(volume, _means(means, volume, layout), grad, **_attributes(desc, layout))
    of_x, of_means = (windows.from_volume(result, layout) for result in results)
    return blend.apply(of_x, x.dtype), means_blend.apply(of_means, x.dtype) if wants_means else None


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


def _means(means: jax.Array | None, volume: jax.Array, layout: str) -> jax.Array:
    return no_means(volume) if means is None else windows.to_volume(means, layout)


def _attributes(desc: LRNDescriptor, layout: str) -> dict[str, Any]:
    return {"window": window_of(desc.n, layout), **desc.attributes}
