"""The documented calls of pooling."""

from collections.abc import Sequence
from typing import Any

import jax

from jaxops._checks import layouts
from jaxops.mcdnn.blend import Blend
from jaxops.mcdnn.checks import Call
from jaxops.mcdnn.descriptors import PoolingDescriptor
from jaxops.mcdnn.enums import NanPropagation, PoolingMode
from jaxops.pooling import AVG_POOL, AVG_POOL_BACKWARD, MAX_POOL, MAX_POOL_BACKWARD, windows

MAXIMA = (PoolingMode.MAX, PoolingMode.MAX_DETERMINISTIC)


def pooling_forward(
    desc: PoolingDescriptor,
    x: jax.Array,
    *,
    alpha: float | jax.Array = 1.0,
    beta: float | jax.Array = 0.0,
    y: jax.Array | None = None,
    layout: str | None = None,
) -> jax.Array:
    """Pools windows of images: `alpha * result + beta * y`.

    The result is the maximum of each window's elements inside x, or their sum divided by the size of the window
    (AVERAGE_COUNT_INCLUDE_PADDING) or by their number (AVERAGE_COUNT_EXCLUDE_PADDING).

    Arguments shared by all calls are described in `jaxops.mcdnn`.

    Args:
      x: images of rank 4 or 5.

    Returns:
      An array with the dtype and layout of x, and spatial extents `1 + (extent + 2 * padding - window) // stride`.

    Raises:
      BadParamError: also if the descriptor does not fit the rank, or a window is larger than x with its padding.
      NotSupportedError: also if x has another rank, or the padding is negative or not less than the window.

    Numerics: NOT_PROPAGATE_NAN passes over NaN in maxima; a window with nothing else gives -inf. Averages always
      propagate NaN.

    Example:
      >>> desc = jaxops.mcdnn.PoolingDescriptor("MAX", window=2, padding=0, stride=2)
      >>> x = jnp.arange(8.0).reshape(1, 1, 2, 4)
      >>> jaxops.mcdnn.pooling_forward(desc, x).tolist()
      [[[[5.0, 7.0]]]]

    Source: mcDNN `mcdnnPoolingForward`.
    """
    call = Call("pooling_forward")
    call.descriptor(PoolingDescriptor, desc)
    call.present(x=x)
    blend = Blend.requested(call.name, alpha=alpha, beta=beta, y=y)
    (x,) = call.arrays(x=x)
    layout, attributes = _windows(call, desc, x, layout)
    shape = _output_shape(x.shape, layout, attributes)
    blend.check(shape, x.dtype)
    call.supported_dtype("x", x)
    volume = windows.to_volume(blend.upcast(x), layout)
    if desc.mode in MAXIMA:
        (result,) = MAX_POOL(volume, **attributes, propagate_nan=_propagates(desc))
    else:
        (result,) = AVG_POOL(volume, **attributes, **_average_attributes(desc, x.shape, layout))
    return blend.apply(windows.from_volume(result, layout), x.dtype)


def pooling_backward(
    desc: PoolingDescriptor,
    y: jax.Array | None,
    dy: jax.Array,
    x: jax.Array | None,
    *,
    alpha: float | jax.Array = 1.0,
    beta: float | jax.Array = 0.0,
    dx: jax.Array | None = None,
    x_shape: Sequence[int] | None = None,
    layout: str | None = None,
) -> jax.Array:
    """Computes the gradient of `pooling_forward`: `alpha * result + beta * dx`, over the whole of dx.

    Maxima send each dy to the first maximum of its window in row-major order. Averages give `dy / divisor` to each
    element inside x. Where windows overlap, contributions add up. Arguments shared by all calls are described in
    `jaxops.mcdnn`.

    Args:
      y: the result of `pooling_forward`. Only its shape and dtype count: the maxima are found in x, so a blended y
        does no harm. May be None for averages, and so may x.
      x_shape: the shape of x, for averages without x.

    Returns:
      An array with the shape of x and the dtype of dy.

    Raises:
      BadParamError: as in `pooling_forward`, and if y or dy does not have the shape of its result, or dtypes differ.
      NotSupportedError: as in `pooling_forward`.

    Numerics: sums are always taken in the same order. With PROPAGATE_NAN a window's gradient goes to its first NaN.
      With NOT_PROPAGATE_NAN that of a window with nothing but NaN goes to its first element.

    Example:
      >>> desc = jaxops.mcdnn.PoolingDescriptor("MAX", window=2, padding=0, stride=2)
      >>> x, y, dy = (
      ...     jnp.array([[[[1.0, 2.0], [4.0, 3.0]]]]),
      ...     jnp.array([[[[4.0]]]]),
      ...     jnp.array([[[[5.0]]]]),
      ... )
      >>> jaxops.mcdnn.pooling_backward(desc, y, dy, x).tolist()
      [[[[0.0, 0.0], [5.0, 0.0]]]]

    Source: mcDNN `mcdnnPoolingBackward`.
    """
    call = Call("pooling_backward")
    call.descriptor(PoolingDescriptor, desc)
    call.present(dy=dy)
    if desc.mode in MAXIMA:
        call.present(y=y, x=x)
    blend = Blend.requested(call.name, alpha=alpha, beta=beta, dx=dx)
    y, dy, x = call.arrays(y=y, dy=dy, x=x)
    image = jax.ShapeDtypeStruct(_image_shape(call, x, x_shape), dy.dtype if x is None else x.dtype)
    layout, attributes = _windows(call, desc, image, layout)
    _check_pooled(call, y, dy, x, _output_shape(image.shape, layout, attributes))
    blend.check(image.shape, dy.dtype)
    call.supported_dtype("dy", dy)
    gradient = windows.to_volume(blend.upcast(dy), layout)
    if x is not None and desc.mode in MAXIMA:
        volume = windows.to_volume(x, layout)
        (result,) = MAX_POOL_BACKWARD(volume, gradient, **attributes, propagate_nan=_propagates(desc))
    else:
        (result,) = AVG_POOL_BACKWARD(gradient, **attributes, **_average_attributes(desc, image.shape, layout))
    return blend.apply(windows.from_volume(result, layout), dy.dtype)


def _check_pooled(call: Call, y: Any, dy: jax.Array, x: Any, shape: tuple[int, ...]) -> None:
    call.require(dy.shape == shape, "dy", f"have the shape of the pooled result, {shape}", dy)
    if y is not None:
        call.require(y.shape == dy.shape, "y", f"have the shape of dy, {dy.shape}", y)
    for argument, array in (("y", y), ("x", x)):
        if array is not None:
            call.require(array.dtype == dy.dtype, argument, f"have the dtype of dy, {dy.dtype}", array)


def _image_shape(call: Call, x: Any, x_shape: Any) -> tuple[int, ...]:
    call.require(x is not None or x_shape is not None, "x_shape", "be given where x is not", None)
    if x_shape is None:
        return x.shape
    shape = layouts.sizes(x_shape)
    call.require(shape is not None, "x_shape", "be a tuple of sizes", x_shape)
    assert shape is not None
    if x is not None:
        call.require(shape == x.shape, "x_shape", f"be the shape of x, {x.shape}", x_shape)
    return shape


def _windows(call: Call, desc: PoolingDescriptor, x: Any, layout: str | None) -> tuple[str, dict[str, Any]]:
    """Returns the layout and the windows' attributes, checked against the images."""
    layout = call.layout(x, layout)
    extents = layouts.spatial_extents(x.shape, layout)
    numbers = (("window", desc.window), ("stride", desc.stride), ("padding", desc.padding))
    window, stride, padding = (
        windows.along_axes(call.name, f"desc.{field}", value, len(extents)) for field, value in numbers
    )
    inside = all(0 <= p < w for p, w in zip(padding, window, strict=True))
    call.support(inside, "desc.padding", f"be at least 0 and less than the window {window}", padding)
    pairs = windows.both_sides(padding)
    windows.check_windows(call.name, extents, window, stride, pairs)
    return layout, windows.volume_attributes(window, stride, pairs)


def _output_shape(shape: Sequence[int], layout: str, attributes: dict[str, Any]) -> tuple[int, ...]:
    extents = layouts.spatial_extents(shape, layout)
    along = windows.spans(windows.for_volume(extents, 1), **attributes)
    outputs = [span.outputs for span in along[len(along) - len(extents) :]]
    return layouts.with_spatial_extents(shape, layout, outputs)


def _propagates(desc: PoolingDescriptor) -> bool:
    return desc.nan_propagation == NanPropagation.PROPAGATE_NAN


def _average_attributes(desc: PoolingDescriptor, shape: Sequence[int], layout: str) -> dict[str, Any]:
    return {
        "count_include_pad": desc.mode == PoolingMode.AVERAGE_COUNT_INCLUDE_PADDING,
        "extents": windows.for_volume(layouts.spatial_extents(shape, layout), 1),
    }
