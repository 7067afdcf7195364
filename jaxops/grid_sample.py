"""Grid sampling: images interpolated between their pixels, and the gradients of the image and of the grid."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxops._checks.dtypes import accumulation_dtype, check_floating
from jaxops._checks.mcdnn import as_arrays, require
from jaxops._primitive.derivative import Active, Arrays, Derivative
from jaxops._primitive.operator import Operator
from lowering.operators import Form, Place, refusal_of_parts


def grid_sample(x: jax.Array, grid: jax.Array) -> jax.Array:
    """Interpolates images bilinearly at the points of a grid, with zeros outside the images.

    The point (gx, gy) lies at column `px = (gx + 1) / 2 * (W_in - 1)` and, likewise, at row py. So -1 and 1 are the
    centres of the first and last pixels ("align corners"). With `x0 = floor(px)` and `a = px - x0`, and y0 and b
    likewise,

        y = x[y0, x0] (1-a)(1-b) + x[y0, x0+1] a (1-b) + x[y0+1, x0] (1-a) b + x[y0+1, x0+1] a b

    where pixels outside the image count as 0. The gradient of a pixel is the sum of grad_y times the weights that the
    pixel had. The gradient of gx is

        (W_in - 1) / 2 * sum over c of grad_y ((x[y0, x0+1] - x[y0, x0]) (1-b) + (x[y0+1, x0+1] - x[y0+1, x0]) b)

    and that of gy likewise.

    Args:
      x: (N, C, H_in, W_in), floating point.
      grid: (N, H, W, 2), floating point: the gx and gy of each output pixel.

    Returns:
      (N, C, H, W), with the dtype of x.

    Raises:
      BadParamError: if a shape differs from the above, an operand is not floating point, x has no pixels, or one of its
        images has 2**31 elements or more.

    Numerics:
      Computed in float32 (float64 where an operand is float64) and rounded once. Gradients are summed in the same
      dtype; on a CPU always in the same order.

      Points that are not finite give 0. Their gradient is ignored, and the image is not read for them. At the centre of
      a pixel, the gradient of the grid is the right-hand one.

      Derivatives of all modes exist up to second order. The floor counts as constant.

      On every platform this runs as XLA's gathers and scatters. On a CPU it avoids temporaries that hold every product
      (`xla_few_channels`), and computes the gradient of x two images at a time (`xla_image_pairs`). A kernel would gain
      nothing: a TPU's own gather reaches over a register, not over an image, and a GPU's pixels come through its cache
      anyway.

    Example:
      >>> x = jnp.array([[[[0.0, 10.0], [20.0, 30.0]]]])
      >>> grid = jnp.array([[[[-1.0, -1.0], [0.0, 0.0], [1.0, 0.0]]]])  # the first pixel, the middle, the right edge
      >>> jaxops.grid_sample(x, grid).tolist()
      [[[[0.0, 15.0, 20.0]]]]

    Source: mcDNN `mcdnnSpatialTfSamplerForward` and `mcdnnSpatialTfSamplerBackward`; PyTorch
    `torch.nn.functional.grid_sample(align_corners=True)`.
    """
    name = "grid_sample"
    x, grid = as_arrays(name, {"x": x, "grid": grid})
    require(x.ndim == 4, name, "x", "have shape (N, C, H_in, W_in)", x)
    require(grid.ndim == 4, name, "grid", "have shape (N, H, W, 2)", grid)
    return GRID_SAMPLE(x, grid)[0]


def _check_operands(name: str, x: Any, grid: Any) -> None:
    check_floating(name, x=x, grid=grid)
    has_pixels = len(x.shape) >= 3 and 0 not in x.shape[-2:]
    require(has_pixels, name, "x", "have shape (..., C, H_in, W_in) with at least one pixel", x)
    channels, height, width = x.shape[-3:]
    elements = channels * (height + 3) * (width + 2)  # of the gradient of an image, with its border
    is_indexed = jax.export.is_symbolic_dim(elements) or elements < 2**31
    require(is_indexed, name, "x", "have images of less than 2**31 elements", x)
    batch = x.shape[:-3]
    is_grid = len(grid.shape) == len(x.shape) and grid.shape[:-3] == batch and grid.shape[-1] == 2
    require(is_grid, name, "grid", f"have shape {(*batch, 'H', 'W', 2)}", grid)


def _check(x: Any, grid: Any) -> None:
    _check_operands("grid_sample", x, grid)


def _check_backward(x: Any, grid: Any, grad: Any) -> None:
    name = "grid_sample_backward"
    _check_operands(name, x, grid)
    check_floating(name, grad=grad)
    shape = (*x.shape[:-2], *grid.shape[-3:-1])
    require(grad.shape == shape, name, "grad", f"have shape {shape}", grad)


class _Points(NamedTuple):
    """The points of a grid: the pixel before each, and the distances from it. Each array is (..., H * W)."""

    row: jax.Array
    column: jax.Array
    below: jax.Array
    right: jax.Array


# The pixels around a point, as steps down and to the right.
_CORNERS = ((0, 0), (0, 1), (1, 0), (1, 1))
# With at most this many channels, a CPU samples all of them in one loop over the points.
_FEW_CHANNELS = 4


def _points(grid: jax.Array, extents: tuple[int, ...], dtype: Any) -> _Points:
    """Returns the points of a grid (..., H, W, 2). A point near no pixel counts as if it lay below the last row."""
    grid = grid.reshape(*grid.shape[:-3], math.prod(grid.shape[-3:-1]), 2).astype(dtype)
    height, width = extents
    x, y = ((grid[..., i] + 1) / 2 * (extent - 1) for i, extent in ((0, width), (1, height)))
    is_near = (x >= -1) & (x < width) & (y >= -1) & (y < height)
    x, y = jnp.where(is_near, x, 0), jnp.where(is_near, y, height)
    column, row = jnp.floor(x), jnp.floor(y)
    return _Points(row.astype(jnp.int32), column.astype(jnp.int32), y - row, x - column)


def _corner(points: _Points, corner: tuple[Any, Any], extents: tuple[int, ...]) -> tuple[jax.Array, ...]:
    """Finds the pixels at one corner of the points: their indices, whether they lie in the image, and their weights."""
    (down, right), (height, width) = corner, extents
    row, column = points.row + down, points.column + right
    is_inside = (row >= 0) & (row < height) & (column >= 0) & (column < width)
    weight = jnp.where(down, points.below, 1 - points.below) * jnp.where(right, points.right, 1 - points.right)
    return jnp.where(is_inside, row * width + column, 0), is_inside, weight


def _slopes(points: _Points, corners: Sequence[jax.Array], extents: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
    """Computes the derivatives with respect to a grid's x and y, from the values at the four corners of each point."""
    (upper_left, upper_right, lower_left, lower_right), (height, width) = corners, extents
    a, b = points.right, points.below
    along_x = (upper_right - upper_left) * (1 - b) + (lower_right - lower_left) * b
    along_y = (lower_left - upper_left) * (1 - a) + (lower_right - upper_right) * a
    return along_x * ((width - 1) / 2), along_y * ((height - 1) / 2)


def _sample(x: jax.Array, grid: jax.Array) -> Arrays:
    y = jax.vmap(_sample_image)(_flat(x, 3), _flat(grid, 3))
    return (y.reshape(*x.shape[:-2], *grid.shape[-3:-1]),)


def _sample_few_channels(x: jax.Array, grid: jax.Array, *, place: Place) -> Arrays:
    """Samples with the corners along an axis, so that what channels share is computed once."""
    images, grids = _flat(x, 3), _flat(grid, 3)
    dtype, extents = accumulation_dtype(x.dtype, grid.dtype), x.shape[-2:]
    points = _with_axis(_points(grids, extents, dtype))
    down, right = jnp.asarray(_CORNERS, jnp.int32).T[:, None, :, None]
    index, is_inside, weight = _corner(points, (down, right), extents)
    channels = [_pixels(images, [i], index, is_inside, dtype) * weight for i in range(x.shape[-3])]
    y = jnp.stack(_sums(channels), axis=1).astype(x.dtype)
    return (y.reshape(*x.shape[:-2], *grid.shape[-3:-1]),)


def _refuses_few_channels(place: Place, x: Any, grid: Any) -> str | None:
    if reason := _refuses_stack(place, x, grid):
        return reason
    channels = x.shape[-3]
    is_few = 1 <= channels <= _FEW_CHANNELS
    return None if is_few else f"one loop over the points samples 1 to {_FEW_CHANNELS} channels; x has {channels}"


def _sample_image(x: jax.Array, grid: jax.Array) -> jax.Array:
    dtype = accumulation_dtype(x.dtype, grid.dtype)
    points, pixels = _points(grid, x.shape[1:], dtype), x.reshape(x.shape[0], math.prod(x.shape[1:]))
    total = jnp.zeros((), dtype)
    for corner in _CORNERS:
        index, is_inside, weight = _corner(points, corner, x.shape[1:])
        values = pixels.at[:, index].get(mode="promise_in_bounds", wrap_negative_indices=False)
        total = total + jnp.where(is_inside[None], values.astype(dtype), 0) * weight[None]
    return total.astype(x.dtype)


def _sample_backward(x: jax.Array, grid: jax.Array, grad: jax.Array) -> Arrays:
    starts, points = _runs_of_points(x, grid)
    grads = _flat(grad, 3)
    grad_x = jax.vmap(functools.partial(_gradient_of_image, extents=x.shape[-2:]))(starts, points, grads)
    grad_grid = jax.vmap(_gradient_of_grid)(_flat(x, 3), starts, points, grads)
    return grad_x.astype(x.dtype).reshape(x.shape), grad_grid.astype(grid.dtype).reshape(grid.shape)


def _sample_backward_in_pairs(x: jax.Array, grid: jax.Array, grad: jax.Array, *, place: Place) -> Arrays:
    """Computes `_sample_backward` two images at a time."""
    starts, points = _runs_of_points(x, grid)
    grads = _flat(grad, 3)
    of_image = functools.partial(_gradient_of_image, extents=x.shape[-2:])
    grad_x = _in_pairs(_side_by_side(of_image))(starts, points, grads)
    # With few channels, XLA stores y, and whatever is computed from y can be read without the loop over pairs.
    over_grids = _gradient_of_grids if x.shape[-3] <= _FEW_CHANNELS else _in_pairs(_gradient_of_grids)
    grad_grid = over_grids(_flat(x, 3), points, grads)
    return grad_x.astype(x.dtype).reshape(x.shape), grad_grid.astype(grid.dtype).reshape(grid.shape)


def _refuses_stack(place: Place, x: Any, *others: Any) -> str | None:
    """Says why no index reaches into all images at once."""
    if reason := refusal_of_parts(place, x):
        return reason
    return None if x.size < 2**31 else f"one index reaches 2**31 - 1 elements of all images; x has {x.size}"


def _runs_of_points(x: jax.Array, grid: jax.Array) -> tuple[jax.Array, _Points]:
    """Returns the points of all images, and where their pixels begin in images with a border.

    With a border of zeros the two pixels of a point on one row are always one run of memory, channels last.
    """
    points = _points(_flat(grid, 3), x.shape[-2:], accumulation_dtype(x.dtype, grid.dtype))
    return ((points.row + 1) * (x.shape[-1] + 2) + points.column + 1) * x.shape[-3], points


def _gradient_of_image(starts: jax.Array, points: _Points, grad: jax.Array, *, extents: tuple[int, ...]) -> jax.Array:
    """Computes the gradient (C, H_in, W_in), from (C, H, W). Far points add to the border, which is cut off."""
    channels, (height, width), dtype = grad.shape[0], extents, points.below.dtype
    dy = grad.reshape(channels, starts.size).T[:, None].astype(dtype)
    a, b, is_right = points.right[:, None, None], points.below[:, None, None], np.array([[[False], [True]]])
    total = jnp.zeros((height + 3) * (width + 2) * channels, dtype)
    for down, weight in enumerate((1 - b, b)):
        runs = (jnp.where(is_right, a, 1 - a) * weight * dy).reshape(starts.size, 2 * channels)
        total = _add_runs(total, starts + down * (width + 2) * channels, runs)
    return jnp.moveaxis(total.reshape(height + 3, width + 2, channels)[1:-2, 1:-1], -1, 0)


def _gradient_of_grid(x: jax.Array, starts: jax.Array, points: _Points, grad: jax.Array) -> jax.Array:
    """Computes the gradient (H * W, 2), reading two runs of pixels for each point."""
    (channels, height, width), dtype = x.shape, points.below.dtype
    pixels = jnp.pad(jnp.moveaxis(x.astype(dtype), 0, -1), ((1, 2), (1, 1), (0, 0))).ravel()
    is_near = points.row < height
    dy = jnp.where(is_near[:, None], grad.reshape(channels, starts.size).T.astype(dtype), 0)[:, None]
    sums = []
    for start in (starts, starts + (width + 2) * channels):
        pairs = _runs(pixels, start, 2 * channels).reshape(starts.size, 2, channels)
        sums += list(jnp.unstack((pairs * dy).sum(-1), axis=1))
    return jnp.where(is_near[:, None], jnp.stack(_slopes(points, sums, (height, width)), axis=-1), 0)


def _gradient_of_grids(x: jax.Array, points: _Points, grad: jax.Array) -> jax.Array:
    """Computes `_gradient_of_grid` for each image of a stack, in one loop that reads pixel by pixel and stores none."""
    dtype, extents = points.below.dtype, x.shape[2:]
    points = _with_axis(points)
    corners = [_corner(points, corner, extents)[:2] for corner in _CORNERS]
    pixels = [_pixels(x, range(x.shape[1]), index, is_inside, dtype) for index, is_inside in corners]
    dy = grad.reshape(*grad.shape[:2], points.row.shape[-1]).astype(dtype)
    dy = jnp.where(points.row < extents[0], dy, 0)
    return jnp.stack(_sums([slope * dy for slope in _slopes(points, pixels, extents)]), axis=-1)


def _with_axis(points: _Points) -> _Points:
    """Returns the points of a stack, with an axis for channels or corners: (N, 1, H * W)."""
    return _Points(*(array[:, None] for array in points))


def _pixels(x: jax.Array, channels: Sequence[int], index: jax.Array, is_inside: jax.Array, dtype: Any) -> jax.Array:
    """Pixels of some channels of each image. XLA need not store an index into the whole stack before it reads."""
    planes = jnp.arange(x.shape[0], dtype=jnp.int32)[:, None] * x.shape[1] + jnp.asarray(channels, jnp.int32)[None]
    index = planes[..., None] * math.prod(x.shape[2:]) + index
    values = x.ravel().at[index].get(mode="promise_in_bounds", wrap_negative_indices=False)
    return jnp.where(is_inside, values.astype(dtype), 0)


def _sums(arrays: list[jax.Array]) -> tuple[jax.Array, ...]:
    """Sums each array along its second axis, in one loop that computes shared operands once."""
    zeros = [np.zeros((), array.dtype) for array in arrays]
    return tuple(jax.lax.reduce(arrays, zeros, lambda a, b: [p + q for p, q in zip(a, b, strict=True)], (1,)))


def _in_pairs(fn: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """Maps a function of stacks of images over stacks of two.

    Temporaries then stay in the cache, and XLA computes an operand first instead of again for each element read.
    """

    def mapped(*stacks: Any) -> jax.Array:
        count = jax.tree.leaves(stacks)[0].shape[0]
        even = count - count % 2
        pairs = jax.tree.map(lambda array: array[:even].reshape(even // 2, 2, *array.shape[1:]), stacks)
        results = jax.lax.map(lambda pair: fn(*pair), pairs)
        results = results.reshape(even, *results.shape[2:])
        last = jax.tree.map(lambda array: array[even:], stacks)
        return jnp.concatenate([results, fn(*last)]) if count % 2 else results

    return mapped


def _side_by_side(fn: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """Returns a function of one image, for a stack. XLA runs each call in one thread, but calls in parallel."""

    def stacked(*stacks: Any) -> jax.Array:
        count = jax.tree.leaves(stacks)[0].shape[0]
        return jnp.stack([fn(*jax.tree.map(lambda array, i=i: array[i], stacks)) for i in range(count)])

    return stacked


def _runs(array: jax.Array, starts: jax.Array, length: int) -> jax.Array:
    numbers = jax.lax.GatherDimensionNumbers((1,), (), (0,))
    return jax.lax.gather(array, starts[:, None], numbers, (length,), mode="promise_in_bounds")


def _add_runs(array: jax.Array, starts: jax.Array, runs: jax.Array) -> jax.Array:
    numbers = jax.lax.ScatterDimensionNumbers((1,), (), (0,))
    return jax.lax.scatter_add(array, starts[:, None], runs, numbers, mode="promise_in_bounds")


def _flat(x: jax.Array, rank: int) -> jax.Array:
    """Returns an array with a single batch axis before its last `rank` axes."""
    return x.reshape(math.prod(x.shape[:-rank]), *x.shape[-rank:])


def _vjp(residuals: Arrays, cotangents: Arrays, active: Active) -> Arrays:
    x, grid, _ = residuals
    return GRID_SAMPLE_BACKWARD(x, grid, *cotangents)


GRID_SAMPLE = Operator(
    "grid_sample",
    "... c h_in w_in, ... h w xy -> ... c h w",
    _check,
    _sample,
    Derivative(_vjp),
    forms=(Form("xla_few_channels", frozenset({"cpu"}), _sample_few_channels, _refuses_few_channels),),
)
GRID_SAMPLE_BACKWARD = Operator(
    "grid_sample_backward",
    "... c h_in w_in, ... h w xy, ... c h w -> ... c h_in w_in, ... h w xy",
    _check_backward,
    _sample_backward,
    forms=(Form("xla_image_pairs", frozenset({"cpu"}), _sample_backward_in_pairs, _refuses_stack),),
)
