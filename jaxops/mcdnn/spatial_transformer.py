"""The documented calls of the spatial transformer."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxops._checks import layouts
from jaxops.affine_grid import AFFINE_GRID, AFFINE_GRID_BACKWARD
from jaxops.grid_sample import GRID_SAMPLE, GRID_SAMPLE_BACKWARD
from jaxops.mcdnn.blend import Blend
from jaxops.mcdnn.checks import Call
from jaxops.mcdnn.descriptors import SpatialTransformerDescriptor


def spatial_tf_grid_generator_forward(desc: SpatialTransformerDescriptor, theta: jax.Array) -> jax.Array:
    """Generates the points at which to sample: `grid[n, h, w] = theta[n] @ (-1 + 2 w / (W-1), -1 + 2 h / (H-1), 1)`.

    Where H or W is 1, its base point is 0.

    Args:
      desc: the shape (N, C, H, W) of the output.
      theta: (N, 2, 3); float16, bfloat16, float32 or float64.

    Returns:
      (N, H, W, 2), with the dtype of theta; the last axis holds x and y.

    Raises:
      BadParamError: status MCDNN_STATUS_BAD_PARAM if desc or theta is missing, or theta is not (N, 2, 3).
      NotSupportedError: status MCDNN_STATUS_NOT_SUPPORTED for another dtype, or a descriptor of more than four axes.

    Numerics: as `jaxops.affine_grid`. There are no alpha and beta.

    Source: mcDNN `mcdnnSpatialTfGridGeneratorForward`. A handle that is missing cannot arise.
    """
    call = Call("spatial_tf_grid_generator_forward")
    batch, _, *extents = _output_shape(call, desc)
    call.present(theta=theta)
    (theta,) = call.arrays(theta=theta)
    call.require(theta.shape == (batch, 2, 3), "theta", f"have shape {(batch, 2, 3)}", theta)
    call.supported_dtype("theta", theta)
    return AFFINE_GRID(theta, extents=tuple(extents))[0]


def spatial_tf_grid_generator_backward(desc: SpatialTransformerDescriptor, dgrid: jax.Array) -> jax.Array:
    """The gradient of `spatial_tf_grid_generator_forward`: `dtheta[n, i] = sum over h, w of dgrid[n, h, w, i] * base`.

    Args:
      desc: as it was given to `spatial_tf_grid_generator_forward`.
      dgrid: (N, H, W, 2), the gradient of the grid.

    Returns:
      (N, 2, 3), with the dtype of dgrid; nothing is blended.

    Raises:
      BadParamError: status MCDNN_STATUS_BAD_PARAM if desc or dgrid is missing, or dgrid is not (N, H, W, 2).
      NotSupportedError: as of `spatial_tf_grid_generator_forward`.

    Numerics: summed in float32 (float64 for float64) and rounded once.

    Source: mcDNN `mcdnnSpatialTfGridGeneratorBackward`. dtheta is a result here: that it, or the handle, is missing
      cannot arise.
    """
    call = Call("spatial_tf_grid_generator_backward")
    batch, _, *extents = _output_shape(call, desc)
    call.present(dgrid=dgrid)
    (dgrid,) = call.arrays(dgrid=dgrid)
    shape = (batch, *extents, 2)
    call.require(dgrid.shape == shape, "dgrid", f"have shape {shape}", dgrid)
    call.supported_dtype("dgrid", dgrid)
    return AFFINE_GRID_BACKWARD(dgrid, extents=tuple(extents))[0]


def spatial_tf_sampler_forward(
    desc: SpatialTransformerDescriptor,
    x: jax.Array,
    grid: jax.Array,
    *,
    alpha: float | jax.Array = 1.0,
    beta: float | jax.Array = 0.0,
    y: jax.Array | None = None,
    layout: str | None = None,
) -> jax.Array:
    """Samples images bilinearly at the points of a grid, zeros around them: `alpha * result + beta * y`.

    Args:
      desc: the shape (N, C, H, W) of the output, in this order whatever the layout.
      x: N images of C channels and any extents; float16, bfloat16, float32 or float64.
      grid: (N, H, W, 2); x and y from -1, the centre of the first pixel, to 1, that of the last.
      alpha: factor of the result: a Python or NumPy number, or a traced scalar.
      beta: factor of the prior, likewise; with 0 the prior is not read, but a traced beta needs one.
      y: the prior, with the shape and dtype of the output.
      layout: "NCHW" or "NHWC", of x and y; None means NCHW.

    Returns:
      The shape of desc in the layout, with the dtype of x.

    Raises:
      BadParamError: status MCDNN_STATUS_BAD_PARAM if desc, x, grid, alpha, beta or a prior that beta needs is missing,
        x or grid has not the shape that desc says, the prior is unlike the output, or the layout is unknown.
      NotSupportedError: status MCDNN_STATUS_NOT_SUPPORTED if x or desc has more than four axes, for another dtype, or a
        vectorised layout.

    Numerics: as `jaxops.grid_sample`, blended before it is rounded. Points that are not finite are skipped.

    Source: mcDNN `mcdnnSpatialTfSamplerForward`. JAX's arrays are packed, so that errors of strides cannot arise, nor
      can a handle that is missing.
    """
    call = Call("spatial_tf_sampler_forward")
    shape = _output_shape(call, desc)
    call.present(x=x, grid=grid)
    blend = Blend.requested(call.name, alpha=alpha, beta=beta, y=y)
    x, grid = call.arrays(x=x, grid=grid)
    channels = _channel_axis(call, desc, x, grid, layout)
    expected = _from_channels_first(shape, channels)
    blend.check(expected, x.dtype)
    images = jnp.moveaxis(blend.upcast(x), channels, 1)
    (result,) = GRID_SAMPLE(images, grid)
    return blend.apply(jnp.moveaxis(result, 1, channels), x.dtype)


def spatial_tf_sampler_backward(
    desc: SpatialTransformerDescriptor,
    x: jax.Array,
    dy: jax.Array,
    grid: jax.Array,
    *,
    alpha: float | jax.Array = 1.0,
    beta: float | jax.Array = 0.0,
    dx: jax.Array | None = None,
    alpha_dgrid: float | jax.Array = 1.0,
    beta_dgrid: float | jax.Array = 0.0,
    dgrid: jax.Array | None = None,
    layout: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """The gradients of `spatial_tf_sampler_forward`: `alpha * result + beta * dx`, and dgrid with its own factors.

    Args:
      desc: as it was given to `spatial_tf_sampler_forward`.
      x: as it was given there.
      dy: the gradient of y.
      grid: as it was given there.
      alpha: factor of the gradient of x: a Python or NumPy number, or a traced scalar.
      beta: factor of its prior, likewise; with 0 that is not read, but a traced beta needs one.
      dx: the prior of the gradient of x, with the shape and dtype of x.
      alpha_dgrid: factor of the gradient of grid, likewise.
      beta_dgrid: factor of its prior, likewise; with 0 that is not read, but a traced beta needs one.
      dgrid: the prior of the gradient of grid, with the shape and dtype of grid.
      layout: "NCHW" or "NHWC", of x, dy and dx; None means NCHW.

    Returns:
      dx and dgrid. dgrid is summed over the channels, and is with respect to coordinates from -1 to 1.

    Raises:
      BadParamError: status MCDNN_STATUS_BAD_PARAM if desc, x, dy, grid, a factor or a prior that one needs is missing,
        x, dy or grid has not the shape that desc says, dy not the dtype of x, a prior is unlike its output, or the
        layout is unknown.
      NotSupportedError: as of `spatial_tf_sampler_forward`.

    Numerics: as `jaxops.grid_sample`, blended before it is rounded. Points that are not finite are skipped: their dgrid
      is 0, and nothing goes to dx. At the centre of a pixel dgrid is the right-hand derivative.

    Source: mcDNN `mcdnnSpatialTfSamplerBackward`. Its text lists a y that the signature does not have.
    """
    call = Call("spatial_tf_sampler_backward")
    shape = _output_shape(call, desc)
    call.present(x=x, dy=dy, grid=grid)
    blend = Blend.requested(call.name, alpha=alpha, beta=beta, dx=dx)
    grid_blend = Blend.requested(call.name, alpha_dgrid=alpha_dgrid, beta_dgrid=beta_dgrid, dgrid=dgrid)
    x, dy, grid = call.arrays(x=x, dy=dy, grid=grid)
    channels = _channel_axis(call, desc, x, grid, layout)
    expected = _from_channels_first(shape, channels)
    call.require(dy.shape == expected, "dy", f"have the shape of desc, {expected}", dy)
    call.require(dy.dtype == x.dtype, "dy", f"have the dtype of x, {x.dtype}", dy)
    blend.check(x.shape, x.dtype)
    grid_blend.check(grid.shape, grid.dtype)
    images = jnp.moveaxis(blend.upcast(x), channels, 1)
    of_x, of_grid = GRID_SAMPLE_BACKWARD(images, grid_blend.upcast(grid), jnp.moveaxis(dy, channels, 1))
    return blend.apply(jnp.moveaxis(of_x, 1, channels), x.dtype), grid_blend.apply(of_grid, grid.dtype)


def _output_shape(call: Call, desc: Any) -> tuple[int, ...]:
    call.descriptor(SpatialTransformerDescriptor, desc)
    call.support(len(desc.dims) == 4, "desc.dims", "have four sizes", desc.dims)
    return desc.dims


def _channel_axis(call: Call, desc: Any, x: Any, grid: Any, layout: str | None) -> int:
    """The axis of the channels, after x and grid are checked."""
    call.support(len(x.shape) <= 4, "x", "have at most four axes", x)
    call.require(len(x.shape) == 4, "x", "have four axes", x)
    channels = call.layout(x, layout).index("C")
    batch, channel_count, *extents = desc.dims
    is_image = (x.shape[0], x.shape[channels]) == (batch, channel_count)
    call.require(is_image, "x", f"be {batch} images of {channel_count} channels", x)
    pixels = layouts.spatial_extents(x.shape, "NCHW" if channels == 1 else "NHWC")
    call.require(0 not in pixels, "x", "have at least one pixel", x)
    shape = (batch, *extents, 2)
    call.require(grid.shape == shape, "grid", f"have shape {shape}", grid)
    call.supported_dtype("x", x)
    call.supported_dtype("grid", grid)
    return channels


def _from_channels_first(shape: tuple[int, ...], channels: int) -> tuple[int, ...]:
    batch, channel_count, *extents = shape
    return (batch, channel_count, *extents) if channels == 1 else (batch, *extents, channel_count)
