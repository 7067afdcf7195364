"""The documented calls of the spatial transformer."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxops._checks import layouts
from jaxops.affine_grid import AFFINE_GRID, AFFINE_GRID_BACKWARD
from jaxops.grid_sample import GRID_SAMPLE, GRID_SAMPLE_BACKWARD, Sampling
from jaxops.mcdnn.blend import Blend
from jaxops.mcdnn.checks import Call
from jaxops.mcdnn.descriptors import SpatialTransformerDescriptor


def spatial_tf_grid_generator_forward(desc: SpatialTransformerDescriptor, theta: jax.Array) -> jax.Array:
    """Generates the points at which to sample: `grid[n, h, w] = theta[n] @ (-1 + 2 w / (W-1), -1 + 2 h / (H-1), 1)`.

    Where W or H is 1, its coordinate in this base is 0.

    Args:
      desc: the shape (N, C, H, W) of the output.
      theta: (N, 2, 3); float16, bfloat16, float32 or float64.

    Returns:
      (N, H, W, 2), with the dtype of theta; the last axis holds x and y. It is not blended.

    Raises:
      BadParamError: status MCDNN_STATUS_BAD_PARAM if desc or theta is missing, or theta is not (N, 2, 3).
      NotSupportedError: status MCDNN_STATUS_NOT_SUPPORTED for another dtype, or a descriptor with more than four axes.

    Numerics: as `jaxops.affine_grid`.

    Example:
      >>> desc = jaxops.mcdnn.SpatialTransformerDescriptor((1, 1, 1, 3))
      >>> identity = jnp.array([[[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]]])
      >>> jaxops.mcdnn.spatial_tf_grid_generator_forward(desc, identity).tolist()
      [[[[-1.0, 0.0], [0.0, 0.0], [1.0, 0.0]]]]

    Source: mcDNN `mcdnnSpatialTfGridGeneratorForward`.
    """
    call = Call("spatial_tf_grid_generator_forward")
    batch, _, *extents = _output_shape(call, desc)
    call.present(theta=theta)
    (theta,) = call.arrays(theta=theta)
    call.require(theta.shape == (batch, 2, 3), "theta", f"have shape {(batch, 2, 3)}", theta)
    call.supported_dtype("theta", theta)
    return AFFINE_GRID(theta, extents=tuple(extents), align_corners=True)[0]


def spatial_tf_grid_generator_backward(desc: SpatialTransformerDescriptor, dgrid: jax.Array) -> jax.Array:
    """Differentiates `spatial_tf_grid_generator_forward`: `dtheta[n, i] = sum over h, w of dgrid[n, h, w, i] * base`.

    Args:
      desc: that of the forward call.
      dgrid: (N, H, W, 2), the gradient of the grid.

    Returns:
      (N, 2, 3), with the dtype of dgrid. It is not blended.

    Raises:
      BadParamError: status MCDNN_STATUS_BAD_PARAM if desc or dgrid is missing, or dgrid is not (N, H, W, 2).
      NotSupportedError: as in `spatial_tf_grid_generator_forward`.

    Numerics: summed in float32 (float64 for float64) and rounded once.

    Example:
      >>> desc = jaxops.mcdnn.SpatialTransformerDescriptor((1, 1, 1, 3))
      >>> dgrid = jnp.ones((1, 1, 3, 2))
      >>> jaxops.mcdnn.spatial_tf_grid_generator_backward(desc, dgrid).tolist()
      [[[0.0, 0.0, 3.0], [0.0, 0.0, 3.0]]]

    Source: mcDNN `mcdnnSpatialTfGridGeneratorBackward`. dtheta is returned, so it cannot be missing.
    """
    call = Call("spatial_tf_grid_generator_backward")
    batch, _, *extents = _output_shape(call, desc)
    call.present(dgrid=dgrid)
    (dgrid,) = call.arrays(dgrid=dgrid)
    shape = (batch, *extents, 2)
    call.require(dgrid.shape == shape, "dgrid", f"have shape {shape}", dgrid)
    call.supported_dtype("dgrid", dgrid)
    return AFFINE_GRID_BACKWARD(dgrid, extents=tuple(extents), align_corners=True)[0]


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
    """Samples images bilinearly at the points of a grid, with zeros outside: `alpha * result + beta * y`.

    Arguments shared by all calls are described in `jaxops.mcdnn`.

    Args:
      desc: the shape (N, C, H, W) of the output, in this order whatever the layout.
      x: N images with C channels and any extents.
      grid: (N, H, W, 2); x and y, from -1 at the centre of the first pixel to 1 at that of the last.
      layout: "NCHW" or "NHWC", for x and y; None means NCHW.

    Returns:
      An array with the shape of desc in the layout, and the dtype of x.

    Raises:
      BadParamError: also if x or grid does not have the shape that desc says.
      NotSupportedError: also if x or desc has more than four axes.

    Numerics: as `jaxops.grid_sample`, blended before rounding. Points that are not finite are skipped.

    Example:
      >>> desc = jaxops.mcdnn.SpatialTransformerDescriptor((1, 1, 1, 2))
      >>> x, grid = jnp.array([[[[2.0, 4.0]]]]), jnp.array([[[[-1.0, 0.0], [0.0, 0.0]]]])
      >>> jaxops.mcdnn.spatial_tf_sampler_forward(desc, x, grid).tolist()
      [[[[2.0, 3.0]]]]

    Source: mcDNN `mcdnnSpatialTfSamplerForward`.
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
    (result,) = GRID_SAMPLE(images, grid, sampling=Sampling())
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
    """Differentiates `spatial_tf_sampler_forward`: `alpha * result + beta * dx`, and dgrid with its own factors.

    Arguments shared by all calls are described in `jaxops.mcdnn`.

    Args:
      grid: as in `spatial_tf_sampler_forward`.
      alpha_dgrid: the factor of the gradient of grid, like alpha.
      beta_dgrid: the factor of its prior, like beta.
      dgrid: its prior, with the shape and dtype of grid.
      layout: as in `spatial_tf_sampler_forward`.

    Returns:
      dx and dgrid. dgrid is summed over the channels, with respect to coordinates from -1 to 1.

    Raises:
      BadParamError: also if x, dy or grid does not have the shape that desc says, or dy not the dtype of x.
      NotSupportedError: as in `spatial_tf_sampler_forward`.

    Numerics: as `jaxops.grid_sample`, blended before rounding. A point that is not finite is skipped: its dgrid is 0,
      and it adds nothing to dx. At the centre of a pixel dgrid is the right-hand derivative.

    Example:
      >>> desc = jaxops.mcdnn.SpatialTransformerDescriptor((1, 1, 1, 1))
      >>> x, grid = jnp.array([[[[2.0, 4.0]]]]), jnp.array([[[[0.0, 0.0]]]])
      >>> dx, dgrid = jaxops.mcdnn.spatial_tf_sampler_backward(
      ...     desc, x, jnp.ones((1, 1, 1, 1)), grid
      ... )
      >>> dx.tolist(), dgrid[..., 0].tolist()
      ([[[[0.5, 0.5]]]], [[[1.0]]])

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
    operands = images, grid_blend.upcast(grid), jnp.moveaxis(dy, channels, 1)
    of_x, of_grid = GRID_SAMPLE_BACKWARD(*operands, sampling=Sampling())
    return blend.apply(jnp.moveaxis(of_x, 1, channels), x.dtype), grid_blend.apply(of_grid, grid.dtype)


def _output_shape(call: Call, desc: Any) -> tuple[int, ...]:
    call.descriptor(SpatialTransformerDescriptor, desc)
    call.support(len(desc.dims) == 4, "desc.dims", "have four sizes", desc.dims)
    return desc.dims


def _channel_axis(call: Call, desc: Any, x: Any, grid: Any, layout: str | None) -> int:
    """Returns the axis of the channels, after it has checked x and grid."""
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
