"""Where pooling windows lie, and images of every layout seen as volumes with their channels last."""

from collections.abc import Callable, Sequence
from numbers import Integral
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxops import _layouts
from jaxops._dtypes import check_floating
from jaxops._errors import BAD_PARAM, require

Ints = int | Sequence[int]

# The operators see (..., D, H, W, C). Channels that come first are batch axes, and the last axis is then 1 long; so is
# the depth of a flat image. Below are the axes of length 1 that make a volume of each layout.
_ADDED_AXES = {"NCHW": (2, 5), "NHWC": (1,), "NCDHW": (5,), "NDHWC": ()}
VOLUME_AXES = (-4, -3, -2)


class Span(NamedTuple):
    """The windows along one axis of a volume: `stride` apart, the first one starting `padding` before the volume."""

    axis: int
    extent: int
    window: int
    stride: int
    padding: int

    @property
    def outputs(self) -> int:
        """How many windows there are."""
        return 1 + (self.extent + 2 * self.padding - self.window) // self.stride


def spans(
    extents: Sequence[int], window: Sequence[int], stride: Sequence[int], padding: Sequence[int]
) -> tuple[Span, ...]:
    """The windows along depth, height and width."""
    along_each = (Span(*along) for along in zip(VOLUME_AXES, extents, window, stride, padding, strict=True))
    # A single window has any stride that reaches beyond the end; this one makes the shortest gradients.
    return tuple(
        span._replace(stride=span.extent + 2 * span.padding) if span.outputs == 1 else span for span in along_each
    )


def squeezed(volume: jax.Array, along: Sequence[Span]) -> tuple[jax.Array, list[Span]]:
    """A volume as an image again, without depth or channels of length 1, and the spans that do something, in it.

    XLA finds worse layouts for arrays with such axes.
    """
    spans = [span for span in along if (span.window, span.stride, span.padding) != (1, 1, 0)]
    axes = _ones(volume, along)
    return jnp.squeeze(volume, axes), [span._replace(axis=span.axis + (-1 in axes)) for span in spans]


def unsqueezed(image: jax.Array, volume: jax.Array, along: Sequence[Span]) -> jax.Array:
    """A volume again: of what was made of `squeezed(volume, along)`."""
    return jnp.expand_dims(image, _ones(volume, along))


def _ones(volume: jax.Array, along: Sequence[Span]) -> tuple[int, ...]:
    flat = along[0][1:] == (1, 1, 1, 0)
    return (-4,) * flat + (-1,) * (volume.shape[-1] == 1)


def pooled_along(x: jax.Array, span: Span, initial: float, computation: Callable[..., Any]) -> jax.Array:
    """Reduces the windows along one axis; axis by axis costs the sum of a window's extents, not their product."""
    padding = (span.padding, span.padding)
    return reduced_along(x, span.axis, initial, computation, span.window, stride=span.stride, padding=padding)


def reduced_along(
    x: jax.Array,
    axis: int,
    initial: float,
    computation: Callable[..., Any],
    window: int,
    *,
    stride: int = 1,
    padding: tuple[int, int] = (0, 0),
    dilation: int = 1,
) -> jax.Array:
    """`jax.lax.reduce_window` along one axis."""
    shape, strides, paddings, dilations = [1] * x.ndim, [1] * x.ndim, [(0, 0)] * x.ndim, [1] * x.ndim
    shape[axis], strides[axis], paddings[axis], dilations[axis] = window, stride, padding, dilation
    start = np.asarray(initial, x.dtype)  # a constant also under jit: JAX differentiates sums that it recognizes
    return jax.lax.reduce_window(x, start, computation, shape, strides, paddings, base_dilation=dilations)


def positions(shape: Sequence[int], axis: int) -> jax.Array:
    """Coordinates along one axis, which is counted from the last; the other axes are 1 long."""
    along = [size if i == axis else 1 for i, size in enumerate(shape, -len(shape))]
    return jax.lax.broadcasted_iota(jnp.int32, along, len(shape) + axis)


def to_volume(x: jax.Array, layout: str) -> jax.Array:
    """An image of any layout as the operators see it: nothing is transposed."""
    return jnp.expand_dims(x, _ADDED_AXES[layout])


def from_volume(x: jax.Array, layout: str) -> jax.Array:
    """The inverse of `to_volume`."""
    return jnp.squeeze(x, _ADDED_AXES[layout])


def for_volume(numbers: Sequence[int], flat: int) -> tuple[int, ...]:
    """One number for each axis of a volume; `flat` is that of the depth of a flat image."""
    return (flat,) * (len(VOLUME_AXES) - len(numbers)) + tuple(numbers)


def volume_attributes(window: Sequence[int], stride: Sequence[int], padding: Sequence[int]) -> dict[str, Any]:
    """The attributes with which the operators take windows of two or three axes."""
    return {
        "window": for_volume(window, 1),
        "stride": for_volume(stride, 1),
        "padding": for_volume(padding, 0),
    }


def along_axes(operator: str, argument: str, value: Any, count: int) -> tuple[int, ...]:
    """An integer for each of the spatial axes, from one for all of them or a sequence."""
    values = (value,) * count if isinstance(value, Integral) else value
    are_integers = isinstance(values, tuple | list) and len(values) == count
    are_integers = are_integers and all(isinstance(x, Integral) and not isinstance(x, bool) for x in values)
    require(are_integers, operator, argument, f"be an integer or {count} of them", value, status=BAD_PARAM)
    return tuple(map(int, values))


def requested(
    operator: str, x: Any, window: Ints, stride: Ints | None, padding: Ints, layout: str | None
) -> tuple[str, dict[str, Any]]:
    """Checks what a user asks for. Gives the layout and the operator's attributes."""
    require(x is not None, operator, "x", "be given", None, status=BAD_PARAM)
    layout = _layouts.resolved(operator, x, layout)
    extents = _layouts.spatial_extents(x.shape, layout)
    check_floating(operator, x=x)
    window = along_axes(operator, "window", window, len(extents))
    stride = window if stride is None else along_axes(operator, "stride", stride, len(extents))
    padding = along_axes(operator, "padding", padding, len(extents))
    check_windows(operator, extents, window, stride, padding)
    return layout, volume_attributes(window, stride, padding)


def check_windows(
    operator: str,
    extents: Sequence[int],
    window: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
) -> None:
    """Refuses windows that do not lie in an image of these extents, or are nothing but padding."""
    require(min(window) >= 1, operator, "window", "be at least 1", window, status=BAD_PARAM)
    require(min(stride) >= 1, operator, "stride", "be at least 1", stride, status=BAD_PARAM)
    fits = all(0 <= p < w for p, w in zip(padding, window, strict=True))
    require(fits, operator, "padding", f"be at least 0 and less than the window {window}", padding, status=BAD_PARAM)
    has_pixels = all(extent >= 1 for extent in extents)
    require(has_pixels, operator, "x", "have spatial extents of at least 1", extents, status=BAD_PARAM)
    padded = tuple(n + 2 * p for n, p in zip(extents, padding, strict=True))
    fits = all(w <= n for w, n in zip(window, padded, strict=True))
    require(fits, operator, "window", f"be no larger than x with its padding, {padded}", window, status=BAD_PARAM)


def check_volume(operator: str, argument: str, x: Any) -> None:
    """Refuses operands that are no floating-point volumes."""
    check_floating(operator, **{argument: x})
    require(len(x.shape) >= 4, operator, argument, "have shape (..., D, H, W, C)", x, status=BAD_PARAM)


def pooled_shape(shape: Sequence[int], **attributes: Sequence[int]) -> tuple[int, ...]:
    """The shape of a volume's windows."""
    along = spans(shape[-4:-1], attributes["window"], attributes["stride"], attributes["padding"])
    return (*shape[:-4], *(span.outputs for span in along), shape[-1])
