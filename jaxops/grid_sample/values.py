"""The values at the points of a grid: the reference, and the form for few channels on a CPU."""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxops._checks.dtypes import accumulation_dtype
from jaxops._primitive.derivative import Arrays
from lowering.operators import Place, refusal_of_parts
from pallas_kernels.grid_sample_points import Sampling, corner, one_batch, points_of

# With at most this many channels, a CPU samples all of them in one loop over the points.
FEW_CHANNELS = 4


def sampled(x: jax.Array, grid: jax.Array, *, sampling: Sampling) -> Arrays:
    """Samples image by image; the definition of grid sampling."""
    rank = grid.shape[-1]
    of_image = functools.partial(_sample_image, sampling=sampling)
    y = jax.vmap(of_image)(one_batch(x, rank + 1), one_batch(grid, rank + 1))
    return (y.reshape(*x.shape[:-rank], *grid.shape[-1 - rank : -1]),)


def sampled_few_channels(x: jax.Array, grid: jax.Array, *, place: Place, sampling: Sampling) -> Arrays:
    """Samples with the corners along an axis, so that what channels share is computed once."""
    rank = grid.shape[-1]
    images, grids = one_batch(x, rank + 1), one_batch(grid, rank + 1)
    dtype, extents = accumulation_dtype(x.dtype, grid.dtype), x.shape[-rank:]
    points = with_axis(points_of(grids, extents, dtype, sampling))
    steps = jnp.asarray(sampling.corners(rank), jnp.int32).T[:, None, :, None]
    index, is_inside, weight = corner(points, tuple(steps), extents)
    channels = [pixels(images, [i], index, is_inside, dtype) * weight for i in range(x.shape[-1 - rank])]
    y = jnp.stack(sums(channels), axis=1).astype(x.dtype)
    return (y.reshape(*x.shape[:-rank], *grid.shape[-1 - rank : -1]),)


def refuses_few_channels(place: Place, x: Any, grid: Any, *, sampling: Sampling) -> str | None:
    """Says why one loop over the points is not for these operands."""
    if reason := refuses_stack(place, x, grid):
        return reason
    if grid.shape[-1] != 2 or sampling.mode == "nearest":
        return "one loop over the points takes longer for volumes, and for the nearest pixels of few channels"
    channels = x.shape[-3]
    is_few = 1 <= channels <= FEW_CHANNELS
    return None if is_few else f"one loop over the points samples 1 to {FEW_CHANNELS} channels; x has {channels}"


def refuses_stack(place: Place, x: Any, *others: Any, **_: Any) -> str | None:
    """Says why no index reaches into all images at once."""
    if reason := refusal_of_parts(place, x):
        return reason
    return None if x.size < 2**31 else f"one index reaches 2**31 - 1 elements of all images; x has {x.size}"


def _sample_image(x: jax.Array, grid: jax.Array, *, sampling: Sampling) -> jax.Array:
    dtype, extents = accumulation_dtype(x.dtype, grid.dtype), x.shape[1:]
    points, flat = points_of(grid, extents, dtype, sampling), x.reshape(x.shape[0], math.prod(extents))
    total = jnp.zeros((), dtype)
    for steps in sampling.corners(len(extents)):
        index, is_inside, weight = corner(points, steps, extents)
        values = flat.at[:, index].get(mode="promise_in_bounds", wrap_negative_indices=False)
        total = total + jnp.where(is_inside[None], values.astype(dtype), 0) * weight[None]
    return total.astype(x.dtype)


def with_axis(arrays: Any) -> Any:
    """Returns arrays (N, points) of a stack with an axis for channels or corners: (N, 1, points)."""
    return jax.tree.map(lambda array: array[:, None], arrays)


def pixels(x: jax.Array, channels: Sequence[int], index: jax.Array, is_inside: jax.Array, dtype: Any) -> jax.Array:
    """Reads pixels of some channels of each image. XLA need not store an index into the whole stack before it reads."""
    planes = jnp.arange(x.shape[0], dtype=jnp.int32)[:, None] * x.shape[1] + jnp.asarray(channels, jnp.int32)[None]
    index = planes[..., None] * math.prod(x.shape[2:]) + index
    values = x.ravel().at[index].get(mode="promise_in_bounds", wrap_negative_indices=False)
    return jnp.where(is_inside, values.astype(dtype), 0)


def sums(arrays: list[jax.Array]) -> tuple[jax.Array, ...]:
    """Sums each array along its second axis, in one loop that computes shared operands once."""
    zeros = [np.zeros((), array.dtype) for array in arrays]
    return tuple(jax.lax.reduce(arrays, zeros, lambda a, b: [p + q for p, q in zip(a, b, strict=True)], (1,)))
