"""The operators of divisive normalization and its gradient."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxops._checks.dtypes import accumulation_dtype, check_floating
from jaxops._checks.mcdnn import require
from jaxops._primitive.derivative import Active, Arrays, Derivative
from jaxops._primitive.operator import Operator
from jaxops.divisive_norm import moments
from jaxops.local_response_norm import negative_power, reach
from jaxops.pooling import windows
from jaxops.pooling.windows import Span
from pallas_kernels.tpu import divisive_norm as tpu


class Images(NamedTuple):
    """Operands of the norm.

    Attributes:
      x: images (..., D, H, W, C).
      means: what deviations are measured from, one for each window, with the shape of x; None stands for zeros.
    """

    x: jax.Array
    means: jax.Array | None = None


class Gradients(NamedTuple):
    """The gradients of x and of the means; None for means that are absent or constants."""

    x: jax.Array
    means: jax.Array | None = None


def window_of(n: int, layout: str) -> tuple[int, ...]:
    """Returns the extents of a window of a volume: n along each spatial axis of the layout."""
    return windows.for_volume((n,) * (len(layout) - 2), 1)


def _check(images: Images, *, name: str = "divisive_norm", **_: Any) -> None:
    x, means = images
    windows.check_volume(name, "x", x)
    if means is not None:
        check_floating(name, means=means)
        require(means.shape == x.shape, name, "means", f"have the shape of x, {x.shape}", means)


def _check_backward(images: Images, grad: Any, **_: Any) -> None:
    name, x = "divisive_norm_backward", images.x
    _check(images, name=name)
    check_floating(name, grad=grad)
    require(grad.shape == x.shape, name, "grad", f"have the shape of x, {x.shape}", grad)


def _forward(images: Images, *, window: tuple[int, ...], alpha: float, beta: float, k: float) -> Arrays:
    x, means = images
    along = _spans(x, window)
    wide, spans = windows.squeezed(x.astype(accumulation_dtype(x.dtype)), along)
    _, squares = _deviations(wide, _squeezed_means(means, x, along), spans)
    y = wide * negative_power(k + alpha / math.prod(window) * squares, beta)
    return (windows.unsqueezed(y.astype(x.dtype), x, along),)


def _backward(
    images: Images,
    grad: jax.Array,
    *,
    window: tuple[int, ...],
    alpha: float,
    beta: float,
    k: float,
    means_grad: bool,
) -> Gradients:
    """Computes the gradients of x and of the means, where u = -beta dy x s**(-beta - 1) alpha / n**d.

    dx[j] = dy[j] s[j]**-beta + 2 sum of u[i] (x[j] - means[i]) over the windows i that hold j
    dmeans[i] = -2 u[i] sum of (x[j] - means[i]) over the window i
    """
    x, means = images
    along = _spans(x, window)
    dtype = accumulation_dtype(x.dtype)
    wide, spans = windows.squeezed(x.astype(dtype), along)
    dy, _ = windows.squeezed(grad.astype(dtype), along)
    m = _squeezed_means(means, x, along)
    share = alpha / math.prod(window)
    deviation, squares = _deviations(wide, m, spans)
    s = k + share * squares
    scaled = dy * negative_power(s, beta)
    u = (-beta * share) * scaled * wide / s
    # The centres of the windows that hold a pixel lie in the mirror image of its own window.
    dx = scaled + 2 * _weighted_deviations(u, wide, m, [_mirrored(span) for span in spans])
    dmeans = -2 * u * deviation
    of_x, of_means = (windows.unsqueezed(one.astype(grad.dtype), x, along) for one in (dx, dmeans))
    return Gradients(of_x, of_means if means_grad else None)


def _deviations(x: jax.Array, means: jax.Array | None, spans: Sequence[Span]) -> tuple[jax.Array, jax.Array]:
    """Sums, over each window, the deviations from the mean at its centre, and their squares."""
    if means is None:
        return _summed(x, spans), _summed(jnp.square(x), spans)
    # Differences of numbers up to this limit are finite, but their squares are infinite, as they must be for infinite
    # pixels.
    largest = float(jnp.finfo(x.dtype).max) / 8
    origin, offset, variance = moments.deviations(jnp.clip(x, -largest, largest), spans)
    size = jnp.asarray(moments.counts(x, spans))
    deviation = (origin - means) + (0 if offset is None else offset)
    return size * deviation, size * ((0 if variance is None else variance) + jnp.square(deviation))


def _weighted_deviations(u: jax.Array, x: jax.Array, means: jax.Array | None, spans: Sequence[Span]) -> jax.Array:
    """Sums `u[i] (x[j] - means[i])` over each window of i."""
    if means is None:
        return x * _summed(u, spans)
    origin, total, moment = moments.weights(u, means, spans)
    return (x - origin) * total - (0 if moment is None else moment)


def _summed(x: jax.Array, spans: Sequence[Span]) -> jax.Array:
    for span in spans:
        x = windows.pooled(x, [span], 0.0, jax.lax.add)
    return x


def _spans(x: jax.Array, window: tuple[int, ...]) -> tuple[Span, ...]:
    """Returns the windows along depth, height and width, without the parts that never lie in x."""
    spans = []
    for axis, n in zip(windows.VOLUME_AXES, window, strict=True):
        extent = x.shape[axis]
        farthest = n if jax.export.is_symbolic_dim(extent) else max(extent - 1, 0)
        before, after = (min(steps, farthest) for steps in reach(n))
        spans.append(Span(axis, extent, before + after + 1, 1, before, after))
    return tuple(spans)


def _mirrored(span: Span) -> Span:
    return span._replace(before=span.behind, behind=span.before)


def _squeezed_means(means: jax.Array | None, x: jax.Array, along: Sequence[Span]) -> jax.Array | None:
    if means is None:
        return None
    return windows.squeezed(means.astype(accumulation_dtype(x.dtype)), along)[0]


# The derivative keeps x and means, not y.


def _linearize(operands: tuple[Images], active: Active, **params: Any) -> tuple[Arrays, tuple[Images]]:
    return DIVISIVE_NORM(*operands, **params), operands


def _vjp(residuals: tuple[Images], cotangents: Arrays, active: tuple[Images], **params: Any) -> tuple[Images]:
    gradients = DIVISIVE_NORM_BACKWARD(*residuals, *cotangents, means_grad=bool(active[0].means), **params)
    return (Images(*gradients),)


_IMAGES = "... d h w c"
DIVISIVE_NORM = Operator(
    "divisive_norm",
    f"{_IMAGES}, {_IMAGES} -> {_IMAGES}",
    _check,
    _forward,
    Derivative(_vjp, linearize=_linearize, residuals=f"{_IMAGES}, {_IMAGES}"),
    kernels=(tpu.KERNEL,),
)
DIVISIVE_NORM_BACKWARD = Operator(
    "divisive_norm_backward",
    f"{_IMAGES}, {_IMAGES}, {_IMAGES} -> {_IMAGES}, {_IMAGES}",
    _check_backward,
    _backward,
    kernels=(tpu.BACKWARD_KERNEL,),
)
