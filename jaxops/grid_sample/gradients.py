"""The gradients of images and of grids: the reference, and the forms that suit CPUs and GPUs."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxops._checks.dtypes import accumulation_dtype
from jaxops._primitive.derivative import Arrays
from jaxops.embedding.sums import by_run
from jaxops.grid_sample.values import FEW_CHANNELS, pixels, sums, with_axis
from lowering.operators import Place, refusal_of_parts
from pallas_kernels.grid_sample_points import (
    Points,
    Sampling,
    corner,
    moves_of,
    one_batch,
    points_of,
    product,
    slopes,
    weights,
)

Stacked = Callable[..., jax.Array]


def gradients(x: jax.Array, grid: jax.Array, grad: jax.Array, *, sampling: Sampling) -> Arrays:
    """Computes both gradients image by image; the definition."""
    return _by_image(_gradient_of_image, x, grid, grad, sampling)


def gradients_by_run(x: jax.Array, grid: jax.Array, grad: jax.Array, *, place: Place, sampling: Sampling) -> Arrays:
    """Computes `gradients`, adding what each pixel gets in the order of the points instead of by a scatter."""
    return _by_image(_gradient_of_image_by_run, x, grid, grad, sampling)


def gradients_in_pairs(x: jax.Array, grid: jax.Array, grad: jax.Array, *, place: Place, sampling: Sampling) -> Arrays:
    """Computes `gradients` two images at a time."""
    rank = grid.shape[-1]
    starts, points = _runs_of_points(x, grid, sampling)
    grads = one_batch(grad, rank + 1)
    of_image = functools.partial(_gradient_of_image, extents=x.shape[-rank:], sampling=sampling)
    grad_x = _in_pairs(_side_by_side(of_image))(starts, points, grads)
    if sampling.mode == "nearest":
        return _like(x, grad_x), jnp.zeros_like(grid)
    of_grids = functools.partial(_gradient_of_grids, sampling=sampling)
    # With few channels, XLA stores y, and whatever is computed from y can be read without the loop over pairs.
    over_grids = of_grids if x.shape[-1 - rank] <= FEW_CHANNELS else _in_pairs(of_grids)
    grad_grid = over_grids(
        one_batch(x, rank + 1),
        points,
        moves_of(one_batch(grid, rank + 1), x.shape[-rank:], accumulation_dtype(x.dtype, grid.dtype), sampling),
        grads,
    )
    return _like(x, grad_x), _like(grid, grad_grid)


def refuses_runs(place: Place, x: Any, grid: Any, grad: Any, *, sampling: Sampling) -> str | None:
    """Says why a pixel's gradients cannot be sorted."""
    if reason := refusal_of_parts(place, x, grid):
        return reason
    return None if grad.size else "there are no points to sort"


def _by_image(of_image: Stacked, x: jax.Array, grid: jax.Array, grad: jax.Array, sampling: Sampling) -> Arrays:
    rank = grid.shape[-1]
    starts, points = _runs_of_points(x, grid, sampling)
    grads = one_batch(grad, rank + 1)
    of_image = functools.partial(of_image, extents=x.shape[-rank:], sampling=sampling)
    grad_x = jax.vmap(of_image)(starts, points, grads)
    if sampling.mode == "nearest":
        return _like(x, grad_x), jnp.zeros_like(grid)
    of_grid = functools.partial(_gradient_of_grid, sampling=sampling)
    grad_grid = jax.vmap(of_grid)(
        one_batch(x, rank + 1),
        starts,
        points,
        moves_of(one_batch(grid, rank + 1), x.shape[-rank:], accumulation_dtype(x.dtype, grid.dtype), sampling),
        grads,
    )
    return _like(x, grad_x), _like(grid, grad_grid)


def _like(operand: jax.Array, gradient: jax.Array) -> jax.Array:
    return gradient.astype(operand.dtype).reshape(operand.shape)


def _runs_of_points(x: jax.Array, grid: jax.Array, sampling: Sampling) -> tuple[jax.Array, Points]:
    """Returns the points of all images, and where their pixels begin in images with a border.

    With a border of zeros the two pixels of a point on one row are always one run of memory, channels last.
    """
    rank = grid.shape[-1]
    extents = x.shape[-rank:]
    points = points_of(one_batch(grid, rank + 1), extents, accumulation_dtype(x.dtype, grid.dtype), sampling)
    starts = points.first[0] + 1
    for pixel, extent in zip(points.first[1:], extents[1:], strict=True):
        starts = starts * (extent + 2) + pixel + 1
    return starts * x.shape[-1 - rank], points


def _gradient_of_image(
    starts: jax.Array, points: Points, grad: jax.Array, *, extents: tuple[int, ...], sampling: Sampling
) -> jax.Array:
    """Computes the gradient (C, H_in, W_in), from (C, H, W). Far points add to the border, which is cut off."""
    channels, dtype, rank = grad.shape[0], points.distance[0].dtype, len(extents)
    dy = grad.reshape(channels, starts.size).T[:, None].astype(dtype)
    along_row, *others = [distance[:, None, None] for distance in reversed(points.distance)]
    in_run = sampling.corners(1)
    shape, is_right = (starts.size, len(in_run) * channels), np.array([in_run], bool)
    bordered = (extents[0] + 3, *(extent + 2 for extent in extents[1:]))
    total = jnp.zeros(math.prod(bordered) * channels, dtype)
    runs_of_point = [(steps, product(weights(others[::-1], steps))) for steps in sampling.corners(rank - 1)]
    for steps, weight in runs_of_point:
        runs = (jnp.where(is_right, along_row, 1 - along_row) * weight * dy).reshape(shape)
        total = _add_runs(total, starts + _offset(steps, extents) * channels, runs)
    inside = (slice(1, -2), *[slice(1, -1)] * (rank - 1))
    return jnp.moveaxis(total.reshape(*bordered, channels)[inside], -1, 0)


def _gradient_of_image_by_run(
    starts: jax.Array, points: Points, grad: jax.Array, *, extents: tuple[int, ...], sampling: Sampling
) -> jax.Array:
    """Computes `_gradient_of_image` from a list of what all pixels get, sorted by pixel."""
    channels, size = grad.shape[0], math.prod(extents)
    dy = grad.reshape(channels, math.prod(grad.shape[1:])).T.astype(points.distance[0].dtype)
    corners = [corner(points, steps, extents) for steps in sampling.corners(len(extents))]
    ids = jnp.concatenate([jnp.where(is_inside, index, size) for index, is_inside, _ in corners])
    rows = jnp.concatenate([weight[:, None] * dy for *_, weight in corners])
    return by_run(rows, ids, size, averaged=False).T.reshape(channels, *extents)


def _gradient_of_grid(
    x: jax.Array, starts: jax.Array, points: Points, moves: Any, grad: jax.Array, *, sampling: Sampling
) -> jax.Array:
    """Computes the gradient (points, rank), reading a run of two pixels of every row that a point lies between."""
    (channels, *extents), dtype, rank = x.shape, points.distance[0].dtype, len(x.shape) - 1
    border = ((1, 2), *[(1, 1)] * (rank - 1), (0, 0))
    bordered = jnp.pad(jnp.moveaxis(x.astype(dtype), 0, -1), border).ravel()
    is_near = points.first[0] < extents[0]
    dy = jnp.where(is_near[:, None], grad.reshape(channels, starts.size).T.astype(dtype), 0)[:, None]
    at_corners = []
    offsets = [_offset(steps, extents) * channels if any(steps) else None for steps in sampling.corners(rank - 1)]
    for start in [starts if offset is None else starts + offset for offset in offsets]:
        pairs = _runs(bordered, start, 2 * channels).reshape(starts.size, 2, channels)
        at_corners += list(jnp.unstack((pairs * dy).sum(-1), axis=1))
    return jnp.where(is_near[:, None], jnp.stack(slopes(points, at_corners, extents, moves, sampling), axis=-1), 0)


def _gradient_of_grids(x: jax.Array, points: Points, moves: Any, grad: jax.Array, *, sampling: Sampling) -> jax.Array:
    """Computes `_gradient_of_grid` for each image of a stack, in one loop that reads pixel by pixel and stores none."""
    dtype, extents = points.distance[0].dtype, x.shape[2:]
    points, moves = with_axis((points, moves))
    corners = [corner(points, steps, extents)[:2] for steps in sampling.corners(len(extents))]
    at_corners = [pixels(x, range(x.shape[1]), index, is_inside, dtype) for index, is_inside in corners]
    dy = grad.reshape(*grad.shape[:2], points.first[0].shape[-1]).astype(dtype)
    dy = jnp.where(points.first[0] < extents[0], dy, 0)
    products = [slope * dy for slope in slopes(points, at_corners, extents, moves, sampling)]
    return jnp.stack(sums(products), axis=-1)


def _offset(steps: Sequence[int], extents: Sequence[int]) -> int:
    """Returns how many pixels of an image with a border lie between a point's first run and the one at these steps."""
    offset = 0
    for step, extent in zip(steps, extents[1:], strict=True):
        offset = (offset + step) * (extent + 2)
    return offset


def _in_pairs(fn: Stacked) -> Stacked:
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


def _side_by_side(fn: Stacked) -> Stacked:
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
