"""Grid sampling: images interpolated between their pixels, and the gradients of the image and of the grid."""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import lowering
from jaxops._derivative import Active, Arrays, Derivative
from jaxops._dtypes import check_floating
from jaxops._errors import BAD_PARAM, require
from jaxops._operator import Operator


def grid_sample(x: jax.Array, grid: jax.Array) -> jax.Array:
    """Interpolates images bilinearly at the points of a grid, with zeros around them.

    Point (gx, gy) lies at column `px = (gx + 1) / 2 * (W_in - 1)` and row py likewise, so that -1 and 1 are the centres
    of the first and last pixels ("align corners"). With `x0 = floor(px)`, `a = px - x0`, and y0 and b likewise,

        y = x[y0, x0] (1-a)(1-b) + x[y0, x0+1] a (1-b) + x[y0+1, x0] (1-a) b + x[y0+1, x0+1] a b

    where pixels outside of the image count as 0. Each product's weight, times grad_y, is added to the pixel's gradient;
    that of gx is

        (W_in - 1) / 2 * sum over c of grad_y ((x[y0, x0+1] - x[y0, x0]) (1-b) + (x[y0+1, x0+1] - x[y0+1, x0]) b)

    and that of gy likewise.

    Args:
      x: (N, C, H_in, W_in), floating point.
      grid: (N, H, W, 2), floating point: gx and gy of each output pixel.

    Returns:
      (N, C, H, W), with the dtype of x.

    Raises:
      BadParamError: if the shapes are not these, x has no pixels, or an operand is not floating point.

    Numerics: computed in float32 (float64 where an operand is float64) and rounded once; gradients are summed so, on a
      CPU always in the same order. Points that are not finite are skipped: they give 0, and nothing of their gradient
      or of the image is read. At the centre of a pixel the gradient of the grid is the right-hand one. All modes of
      derivatives exist, to second order; the floor counts as constant. On every platform it runs as XLA's gathers and
      scatters, on a CPU image by image in the gradient, whose products then stay in the cache. There is no kernel: a
      TPU's own gather reaches over a register, not over an image, and a GPU's pixels come through its cache anyway.

    Source: mcDNN `mcdnnSpatialTfSamplerForward` and `mcdnnSpatialTfSamplerBackward`; PyTorch
    `torch.nn.functional.grid_sample(align_corners=True)`.
    """
    name = "grid_sample"
    for argument, value in (("x", x), ("grid", grid)):
        require(value is not None, name, argument, "be given", None, status=BAD_PARAM)
    x, grid = jnp.asarray(x), jnp.asarray(grid)
    require(x.ndim == 4, name, "x", "have shape (N, C, H_in, W_in)", x, status=BAD_PARAM)
    require(grid.ndim == 4, name, "grid", "have shape (N, H, W, 2)", grid, status=BAD_PARAM)
    return GRID_SAMPLE(x, grid)[0]


def _check_operands(name: str, x: Any, grid: Any) -> None:
    check_floating(name, x=x, grid=grid)
    has_pixels = len(x.shape) >= 3 and min(x.shape[-2:]) >= 1
    require(has_pixels, name, "x", "have shape (..., C, H_in, W_in) with at least one pixel", x, status=BAD_PARAM)
    batch = x.shape[:-3]
    is_grid = len(grid.shape) == len(x.shape) and grid.shape[:-3] == batch and grid.shape[-1] == 2
    require(is_grid, name, "grid", f"have shape {(*batch, 'H', 'W', 2)}", grid, status=BAD_PARAM)


def _check(x: Any, grid: Any) -> None:
    _check_operands("grid_sample", x, grid)


def _check_backward(x: Any, grid: Any, grad: Any) -> None:
    name = "grid_sample_backward"
    _check_operands(name, x, grid)
    check_floating(name, grad=grad)
    shape = (*x.shape[:-2], *grid.shape[-3:-1])
    require(grad.shape == shape, name, "grad", f"have shape {shape}", grad, status=BAD_PARAM)


class _Points(NamedTuple):
    """Where each point of a grid lies: the pixel before it, how far behind that it is, and whether it counts at all."""

    row: jax.Array
    column: jax.Array
    below: jax.Array
    right: jax.Array
    is_near: jax.Array

    @property
    def weights(self) -> tuple[jax.Array, ...]:
        """Of the four pixels around, in the order of `_CORNERS`."""
        a, b = self.right, self.below
        return (1 - a) * (1 - b), a * (1 - b), (1 - a) * b, a * b


_FEW_CHANNELS = 8
_CORNERS = ((0, 0), (0, 1), (1, 0), (1, 1))


def _points(grid: jax.Array, extents: tuple[int, ...], dtype: Any) -> _Points:
    """The points of a grid (..., 2); those that no pixel is near count as if they lay before the first."""
    height, width = extents
    x, y = ((grid[..., i].astype(dtype) + 1) / 2 * (extent - 1) for i, extent in ((0, width), (1, height)))
    is_near = (x >= -1) & (x < width) & (y >= -1) & (y < height)
    x, y = (jnp.where(is_near, p, -1) for p in (x, y))
    column, row = jnp.floor(x), jnp.floor(y)
    return _Points(row.astype(jnp.int32), column.astype(jnp.int32), y - row, x - column, is_near)


def _sample(x: jax.Array, grid: jax.Array) -> Arrays:
    shape = (*x.shape[:-2], *grid.shape[-3:-1])
    images, points_xy = _flat(x, 3), _flat(grid, 3)
    return (jax.vmap(_sample_image)(images, points_xy).reshape(shape),)


def _sample_image(x: jax.Array, grid: jax.Array) -> jax.Array:
    (channels, height, width), dtype = x.shape, _compute_dtype(x, grid)
    points = _points(grid.reshape(-1, 2), (height, width), dtype)
    pixels = x.reshape(channels, height * width)
    total = jnp.zeros((channels, points.row.size), dtype)
    for (down, right), weight in zip(_CORNERS, points.weights, strict=True):
        row, column = points.row + down, points.column + right
        is_inside = points.is_near & (row >= 0) & (row < height) & (column >= 0) & (column < width)
        index = jnp.where(is_inside, row * width + column, 0)
        values = pixels.at[:, index].get(mode="promise_in_bounds", wrap_negative_indices=False)
        total = total + jnp.where(is_inside[None], values.astype(dtype), 0) * weight[None]
    return total.astype(x.dtype)


def _sample_backward(x: jax.Array, grid: jax.Array, grad: jax.Array) -> Arrays:
    images = _flat(x, 3), _flat(grid, 3), _flat(grad, 3)
    place = lowering.placement()
    if place is not None and place.platform == "cpu" and not place.is_split:
        # Products of all images at once would be large, and to have fresh memory takes longer than to compute.
        in_cache = functools.partial(_gradients_of_image, materialized=jax.lax.optimization_barrier)
        results = jax.lax.map(lambda image: in_cache(*image), images)
    else:
        results = jax.vmap(_gradients_of_image)(*images)
    grad_x, grad_grid = results
    return grad_x.reshape(x.shape), grad_grid.reshape(grid.shape)


def _gradients_of_image(
    x: jax.Array, grid: jax.Array, grad: jax.Array, materialized: Callable[[Any], Any] = lambda arrays: arrays
) -> Arrays:
    """With channels last and a border of zeros, the two pixels on one row that a point takes are one run in memory."""
    (channels, height, width), dtype = x.shape, _compute_dtype(x, grid)
    points = _points(grid.reshape(-1, 2), (height, width), dtype)
    weights = [jnp.where(points.is_near, weight, 0)[:, None] for weight in points.weights]
    upper = ((points.row + 1) * (width + 2) + points.column + 1)[:, None] * channels
    points, weights, upper = materialized((points, weights, upper))
    starts = upper, upper + (width + 2) * channels
    dy = jnp.where(points.is_near[:, None], grad.reshape(channels, points.row.size).T.astype(dtype), 0)
    pixels = jnp.pad(jnp.moveaxis(x.astype(dtype), 0, -1), ((1, 1), (1, 1), (0, 0)))
    dy, pixels = materialized((dy, pixels))

    total = jnp.zeros(pixels.size, dtype)
    sums: list[jax.Array] = []
    for down, start in enumerate(starts):
        left, right = weights[2 * down : 2 * down + 2]
        total = _add_runs(total, start, jnp.concatenate([dy * left, dy * right], axis=1))
        pairs = _runs(pixels.ravel(), start, 2 * channels).reshape(points.row.size, 2, channels)
        sums += _sums_over_channels(pairs, dy, materialized)
    upper_left, upper_right, lower_left, lower_right = sums
    a, b = points.right, points.below
    along_x = (upper_right - upper_left) * (1 - b) + (lower_right - lower_left) * b
    along_y = (lower_left - upper_left) * (1 - a) + (lower_right - upper_right) * a
    grad_points = jnp.stack([along_x * ((width - 1) / 2), along_y * ((height - 1) / 2)], axis=-1)
    grad_points = jnp.where(points.is_near[:, None], grad_points, 0)
    grad_x = jnp.moveaxis(total.reshape(pixels.shape)[1:-1, 1:-1], -1, 0)
    return grad_x.astype(x.dtype), grad_points.reshape(grid.shape).astype(grid.dtype)


def _sums_over_channels(pairs: jax.Array, dy: jax.Array, materialized: Callable[[Any], Any]) -> list[jax.Array]:
    """For each of the two pixels, `sum over c of pixel[c] * dy[c]`; XLA adds up a last axis one by one."""
    channels = dy.shape[1]
    if channels <= _FEW_CHANNELS:
        pairs = materialized(pairs)
        zeros = jnp.zeros(dy.shape[:1], dy.dtype)
        return [sum((pairs[:, i, c] * dy[:, c] for c in range(channels)), zeros) for i in range(2)]
    products = (pairs * dy[:, None, :]).reshape(2 * dy.shape[0], channels)
    sums = jnp.dot(products, jnp.ones(channels, dy.dtype), precision=jax.lax.Precision.HIGHEST)
    return list(jnp.unstack(sums.reshape(-1, 2), axis=1))


def _runs(array: jax.Array, starts: jax.Array, length: int) -> jax.Array:
    numbers = jax.lax.GatherDimensionNumbers((1,), (), (0,))
    return jax.lax.gather(array, starts, numbers, (length,), mode="promise_in_bounds")


def _add_runs(array: jax.Array, starts: jax.Array, runs: jax.Array) -> jax.Array:
    numbers = jax.lax.ScatterDimensionNumbers((1,), (), (0,))
    return jax.lax.scatter_add(array, starts, runs, numbers, mode="promise_in_bounds")


def _flat(x: jax.Array, rank: int) -> jax.Array:
    """With a single batch axis before the last `rank`."""
    return x.reshape(math.prod(x.shape[:-rank]), *x.shape[-rank:])


def _compute_dtype(*operands: jax.Array) -> Any:
    return jnp.float64 if any(x.dtype == jnp.float64 for x in operands) else jnp.float32


def _vjp(residuals: Arrays, cotangents: Arrays, active: Active) -> Arrays:
    x, grid, _ = residuals
    grads = GRID_SAMPLE_BACKWARD(x, grid, *cotangents)
    return tuple(grad for grad, a in zip(grads, active, strict=True) if a)


GRID_SAMPLE = Operator("grid_sample", "... c h_in w_in, ... h w xy -> ... c h w", _check, _sample, Derivative(_vjp))
GRID_SAMPLE_BACKWARD = Operator(
    "grid_sample_backward",
    "... c h_in w_in, ... h w xy, ... c h w -> ... c h_in w_in, ... h w xy",
    _check_backward,
    _sample_backward,
)
