"""The points of a grid: where they lie among the pixels, and which pixels each of them reads, with what weights.

A grid holds the coordinates x, y and, for volumes, z. The axes of images and volumes come in the opposite order:
(depth,) row, column. Here lists by axis are in the order of the axes.
"""

import functools
import itertools
import math
import operator
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

MODES = ("bilinear", "nearest")
PADDING_MODES = ("zeros", "border", "reflection")


class Sampling(NamedTuple):
    """The options of grid sampling, as an attribute of its operators.

    Attributes:
      mode: one of MODES.
      padding_mode: one of PADDING_MODES.
      align_corners: whether -1 and 1 are the centres of the first and last pixels, or their outer edges.
    """

    mode: str = "bilinear"
    padding_mode: str = "zeros"
    align_corners: bool = True

    def corners(self, rank: int) -> tuple[tuple[int, ...], ...]:
        """Returns the pixels that a point reads, as steps along each axis from the first of them."""
        return tuple(itertools.product((0,) if self.mode == "nearest" else (0, 1), repeat=rank))


class Points(NamedTuple):
    """Points by axis: the first pixel that each reads, and the distance from it. Each array is (..., points)."""

    first: tuple[jax.Array, ...]
    distance: tuple[jax.Array, ...]


def one_batch(x: jax.Array, rank: int) -> jax.Array:
    """Returns an array with a single batch axis before its last `rank` axes."""
    return x.reshape(math.prod(x.shape[:-rank]), *x.shape[-rank:])


def points_of(grid: jax.Array, extents: Sequence[int], dtype: Any, sampling: Sampling) -> Points:
    """Returns the points of a grid. One that reads no pixel counts as if it lay behind the last pixel of its axis 0."""
    positions = [
        _position(coordinate, extent, sampling)
        for coordinate, extent in zip(_coordinates(grid, dtype), extents[::-1], strict=True)
    ]
    is_near = _all_within(positions, -1, extents[::-1])
    behind = (*[0] * (len(extents) - 1), extents[0])
    positions = [jnp.where(is_near, position, far) for position, far in zip(positions, behind, strict=True)]
    if sampling.mode == "nearest":
        first = [jax.lax.round(position, jax.lax.RoundingMethod.TO_NEAREST_EVEN) for position in positions]
        return Points(_as_indices(first), tuple(jnp.zeros_like(position) for position in positions))
    first = [jnp.floor(position) for position in positions]
    before = zip(reversed(positions), reversed(first), strict=True)
    return Points(_as_indices(first), tuple(position - pixel for position, pixel in before))


def moves_of(grid: jax.Array, extents: Sequence[int], dtype: Any, sampling: Sampling) -> tuple[jax.Array, ...] | None:
    """Returns the derivatives of a point's position by each coordinate; None where they are the same everywhere."""
    if sampling.padding_mode == "zeros":
        return None
    pairs = zip(_coordinates(grid, dtype), extents[::-1], strict=True)
    positions = [(functools.partial(_position, extent=extent, sampling=sampling), x) for x, extent in pairs]
    return tuple(jax.jvp(position, (x,), (jnp.ones_like(x),))[1] for position, x in positions)


def _coordinates(grid: jax.Array, dtype: Any) -> Iterator[jax.Array]:
    rank = grid.shape[-1]
    grid = grid.reshape(*grid.shape[: -1 - rank], math.prod(grid.shape[-1 - rank : -1]), rank).astype(dtype)
    return (grid[..., i] for i in range(rank))


def _position(coordinate: jax.Array, extent: int, sampling: Sampling) -> jax.Array:
    """Finds the position along an axis whose pixels are 0, 1, ...; with padding by pixels, inside the image."""
    if sampling.padding_mode == "border":
        coordinate = jnp.clip(coordinate, -2, 2)  # as far outside as infinity, but 0 times it is 0
    from_edge = coordinate + 1
    position = from_edge / 2 * (extent - 1) if sampling.align_corners else (from_edge * extent - 1) / 2
    if sampling.padding_mode == "zeros":
        return position
    if sampling.padding_mode == "reflection":
        position = _reflected(position, extent, sampling.align_corners)
    # At the border itself the derivative is 0, as in PyTorch. NaN stays NaN.
    return jnp.where(position <= 0, 0, jnp.where(position >= extent - 1, extent - 1, position))


def _reflected(position: jax.Array, extent: int, align_corners: bool) -> jax.Array:
    """Reflects positions at the centres of the first and last pixels, or at their outer edges."""
    least, span = (0, extent - 1) if align_corners else (-0.5, extent)
    period = jnp.maximum(jnp.asarray(2 * span, position.dtype), 1)  # of a single pixel, any will do
    away = jnp.where(position < least, least - position, position - least)
    away = jnp.fmod(away, period)
    return least + jnp.where(away < span, away, period - away)


def _all_within(positions: Sequence[jax.Array], least: int, extents: Sequence[int]) -> jax.Array:
    """Tells where every position is at least `least` and less than its extent."""
    (position, extent), *others = zip(positions, extents, strict=True)
    is_within = (position >= least) & (position < extent)
    for position, extent in others:
        is_within = is_within & (position >= least) & (position < extent)
    return is_within


def _as_indices(pixels: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
    return tuple(pixel.astype(jnp.int32) for pixel in reversed(pixels))


def corner(points: Points, steps: Sequence[Any], extents: Sequence[int]) -> tuple[jax.Array, ...]:
    """Finds the pixels at one corner of the points: their indices, whether they lie in the image, and their weights."""
    pixels = [pixel + step for pixel, step in zip(points.first, steps, strict=True)]
    is_inside = _all_within(pixels, 0, extents)
    pairs = zip(points.distance, steps, strict=True)
    weight = product([jnp.where(step, distance, 1 - distance) for distance, step in pairs])
    index = pixels[0]
    for pixel, extent in zip(pixels[1:], extents[1:], strict=True):
        index = index * extent + pixel
    return jnp.where(is_inside, index, 0), is_inside, weight


def slopes(
    points: Points, corners: Sequence[jax.Array], extents: Sequence[int], moves: Any, sampling: Sampling
) -> list[jax.Array]:
    """Computes the derivatives by each coordinate, from the values at all corners of each point and from `moves_of`.

    Along an axis they are the differences of neighbours, interpolated along the other axes.
    """
    rank = len(extents)
    values = dict(zip(itertools.product((0, 1), repeat=rank), corners, strict=True))
    found = []
    for axis in reversed(range(rank)):
        others = [*points.distance[:axis], *points.distance[axis + 1 :]]
        terms = []
        for steps in itertools.product((0, 1), repeat=rank - 1):
            before, behind = ((*steps[:axis], step, *steps[axis:]) for step in (0, 1))
            terms.append(product([values[behind] - values[before], *weights(others, steps)]))
        found.append(functools.reduce(operator.add, terms))
    if moves is None:
        moves = [(extent - sampling.align_corners) / 2 for extent in reversed(extents)]
    return [slope * move for slope, move in zip(found, moves, strict=True)]


def weights(distances: Sequence[jax.Array], steps: Sequence[int]) -> list[jax.Array]:
    """Returns what a corner's steps, which are numbers, contribute to its weight along each axis."""
    return [distance if step else 1 - distance for distance, step in zip(distances, steps, strict=True)]


def product(factors: Sequence[jax.Array]) -> jax.Array:
    """Multiplies arrays, from the first to the last."""
    return functools.reduce(operator.mul, factors)
