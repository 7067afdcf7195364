"""The kernels of grid sampling on TPU: pixels are rows of lanes in VMEM, and each point takes two pairs of neighbours.

The image is stored with a border of zeros, so a pair is two sublanes of memory wherever a point lies. A load may begin
at any sublane: eight are loaded such that a point's pair comes to the two sublanes that are its own in a tile of four
points. So no register moves: four loads, three selections, and a tile is there. Its sums over pairs are a store, and
two loads with a stride.

What limits them is the scalar unit, which gets each point's address, and that few loads start in a cycle. Latency is
hidden by many points without a loop. In the gradient, each addition to a pixel waits for the one before; so there are
several arrays of sums, which points use by turns. Each adds in the order of the points.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.tpu.stored_order import LANES, SUBLANES, round_up

POINTS = SUBLANES // 2  # of a tile
SUMS = 2  # arrays of sums for each of the two rows of pixels that a point reads


class Plan(NamedTuple):
    """Plan that the kernels are traced for.

    Attributes:
      image: how many rows and columns.
      channels: of an image.
      points: of an image.
      strips: how many strips of 128 channels a step takes.
      block_points: how many points a step takes.
      tiles: how many tiles of points a group has, which is computed without a loop: an even number, at most 64.
    """

    image: tuple[int, int]
    channels: int
    points: int
    strips: int
    block_points: int
    tiles: int

    @property
    def pitch(self) -> int:
        """The number of sublanes from one row of pixels to the next, at least one of them a border."""
        return round_up(self.image[1] + 1, SUBLANES)

    @property
    def first(self) -> int:
        """The sublane of the first pixel, after the border and what loads for a last pair in a tile begin with."""
        return self.pitch + SUBLANES

    @property
    def behind(self) -> int:
        """The sublane after the last row of pixels: a point there reads nothing but zeros."""
        return self.first + self.image[0] * self.pitch

    @property
    def sublanes(self) -> int:
        """The number of sublanes of an image."""
        return self.behind + 2 * self.pitch + SUBLANES

    @property
    def width(self) -> int:
        """The number of channels that a step takes."""
        return min(self.channels, self.strips * LANES)

    @property
    def blocks(self) -> int:
        """The number of blocks of points."""
        return pl.cdiv(self.points, self.block_points)

    @property
    def together(self) -> int:
        """The number of points of a group."""
        return self.tiles * POINTS

    @property
    def groups(self) -> int:
        """The number of groups of a block."""
        return pl.cdiv(self.block_points, self.together)

    def over_strips(self) -> Iterator[tuple[int, slice, slice]]:
        """Yields each strip, where its channels are in a block, and which of 128 lanes they take."""
        for strip in range(self.strips):
            begin, end = strip * LANES, min(self.width, (strip + 1) * LANES)
            yield strip, slice(begin, end), slice(0, end - begin)

    def window(self, start: Any, point: int, row: int) -> Any:
        """Returns the sublanes of which a tile takes the pair of a point, in its first or second row of pixels."""
        return pl.ds(start - 2 * point + row * self.pitch, SUBLANES)

    def pairs(self, strip: int, tile: int) -> slice:
        """Returns where the pairs of a tile are, of those of a group."""
        begin = (strip * self.tiles + tile) * SUBLANES
        return slice(begin, begin + SUBLANES)

    def side(self, strip: int, side: int, count: int) -> Any:
        """Returns where the left or the right pixels of the pairs of points are, of those of a group."""
        return pl.ds(self.pairs(strip, 0).start + side, count, stride=2)


def forward_kernel(
    starts_ref: Any, weights_ref: Any, x_ref: Any, y_ref: Any, image_ref: Any, pairs_ref: Any, *, plan: Plan
) -> None:
    """Samples a block of points of an image."""

    @pl.when(pl.program_id(2) == 0)
    def _() -> None:
        _store_image(x_ref, image_ref, plan)

    def sample(group: Any, first: Any, count: int) -> None:
        weights = weights_ref[0, group]
        for tile in range(pl.cdiv(count, POINTS)):
            starts = _starts(starts_ref, first, tile)
            upper, lower = _columns(weights, tile, plan)
            for strip, _, lanes in plan.over_strips():
                top, bottom = (_pairs(image_ref, strip, lanes, starts, row, plan) for row in range(2))
                pairs_ref[plan.pairs(strip, tile), lanes] = top * upper + bottom * lower
        for strip, channels, lanes in plan.over_strips():
            left, right = (pairs_ref[plan.side(strip, side, count), lanes] for side in range(2))
            y_ref[0, pl.ds(first, count), channels] = (left + right).astype(y_ref.dtype)

    _over_groups(plan, sample)


def backward_kernel(
    starts_ref: Any,
    weights_ref: Any,
    x_ref: Any,
    grad_ref: Any,
    dx_ref: Any,
    products_ref: Any,
    image_ref: Any,
    pairs_ref: Any,
    terms_ref: Any,
    *sums_refs: Any,
    plan: Plan,
) -> None:
    """Adds a block of points to the gradient of an image, and multiplies their gradients with the pixels they read."""

    @pl.when(pl.program_id(2) == 0)
    def _() -> None:
        _store_image(x_ref, image_ref, plan)
        for ref in sums_refs:
            _store_zeros(ref, plan)

    def add(group: Any, first: Any, count: int) -> None:
        weights = weights_ref[0, group]
        for strip, channels, lanes in plan.over_strips():
            grad = grad_ref[0, pl.ds(first, count), channels].astype(jnp.float32)
            for side in range(2):
                pairs_ref[plan.side(strip, side, count), lanes] = grad
            if missing := -count % POINTS:
                behind = plan.pairs(strip, 0).start + 2 * count
                pairs_ref[behind : behind + 2 * missing, lanes] = jnp.zeros((2 * missing, lanes.stop))
        tiles = range(pl.cdiv(count, POINTS))
        for tile in tiles:
            starts = _starts(starts_ref, first, tile)
            for row, column in enumerate(_columns(weights, tile, plan)):
                for strip, _, lanes in plan.over_strips():
                    grad = pairs_ref[plan.pairs(strip, tile), lanes]
                    term = _pairs(image_ref, strip, lanes, starts, row, plan) * grad
                    place = plan.pairs(row, tile), lanes
                    terms_ref[place] = terms_ref[place] + term if strip else term
                    _add_pairs(sums_refs[row::2], strip, lanes, starts, row, grad * column, plan)
        # Behind all columns of weights: sums over lanes among them keep the same unit waiting, for 1.3 times as long.
        lane = lax.broadcasted_iota(jnp.int32, (SUBLANES, LANES), 1)
        products = jnp.zeros((SUBLANES, LANES), jnp.float32)
        for row in range(2):
            for tile in tiles:
                terms = terms_ref[plan.pairs(row, tile), : min(plan.width, LANES)]
                total = jnp.sum(terms, axis=1, keepdims=True)
                products = jnp.where(lane == row * plan.tiles + tile, total, products)
        products_ref[0, 0, group] = products

    _over_groups(plan, add)

    @pl.when(pl.program_id(2) == plan.blocks - 1)
    def _() -> None:
        def store(y: Any, at: Any) -> None:
            for strip, channels, lanes in plan.over_strips():
                parts = [ref[strip, pl.ds(at, plan.image[1]), lanes] for ref in sums_refs]
                dx_ref[0, y, :, channels] = sum(parts[1:], parts[0]).astype(dx_ref.dtype)

        _over_rows(plan, store)


def _over_groups(plan: Plan, compute: Callable[[Any, Any, int], None]) -> None:
    """Calls a function for each group of points of a block, with its number, its first point and how many it has."""
    together = plan.together
    groups, left = divmod(plan.block_points, together)
    if groups:
        lax.fori_loop(
            0, groups, lambda group, _: compute(group, pl.multiple_of(group * together, together), together), None
        )
    if left:
        compute(groups, groups * together, left)


def _over_rows(plan: Plan, compute: Callable[[Any, Any], None]) -> None:
    """Calls a function for each row of pixels, with its number and the sublane of its first pixel."""

    def of_row(y: Any, _: Any) -> None:
        compute(y, pl.multiple_of(plan.first + y * plan.pitch, SUBLANES))

    lax.fori_loop(0, plan.image[0], of_row, None)


def _store_image(x_ref: Any, image_ref: Any, plan: Plan) -> None:
    """Stores an image in its border of zeros."""
    width = plan.image[1]
    for strip, _, lanes in plan.over_strips():
        for begin, end in ((0, plan.first), (plan.behind, plan.sublanes)):
            image_ref[strip, begin:end, lanes] = jnp.zeros((end - begin, lanes.stop), jnp.float32)

    def store(y: Any, at: Any) -> None:
        for strip, channels, lanes in plan.over_strips():
            image_ref[strip, pl.ds(at, width), lanes] = x_ref[0, y, :, channels].astype(jnp.float32)
            border = jnp.zeros((plan.pitch - width, lanes.stop), jnp.float32)
            image_ref[strip, pl.ds(at + width, plan.pitch - width), lanes] = border

    _over_rows(plan, store)


def _store_zeros(ref: Any, plan: Plan) -> None:
    def store(register: Any, _: Any) -> None:
        at = pl.ds(pl.multiple_of(register * SUBLANES, SUBLANES), SUBLANES)
        for strip in range(plan.strips):
            ref[strip, at] = jnp.zeros((SUBLANES, LANES), jnp.float32)

    lax.fori_loop(0, plan.sublanes // SUBLANES, store, None, unroll=8)


def _starts(starts_ref: Any, first: Any, tile: int) -> list[Any]:
    """Returns where the pixels of the points of a tile begin, which is a tile of those from the first one on."""
    return [starts_ref[0, 0, 0, first + tile * POINTS + point] for point in range(POINTS)]


def _columns(weights: jax.Array, tile: int, plan: Plan) -> tuple[jax.Array, jax.Array]:
    """Returns the weights of the pairs of a tile, in their first and their second row of pixels."""
    upper, lower = (weights[:, row * plan.tiles + tile][:, None] for row in range(2))
    return upper, lower


def _pairs(image_ref: Any, strip: int, lanes: slice, starts: list[Any], row: int, plan: Plan) -> jax.Array:
    """Reads the pairs of a tile in one of their rows of pixels."""
    windows = [image_ref[strip, plan.window(start, point, row), lanes] for point, start in enumerate(starts)]
    sublane = lax.broadcasted_iota(jnp.int32, windows[0].shape, 0)
    pairs = windows[0]
    for point, window in enumerate(windows[1:], start=1):
        pairs = jnp.where(sublane >= 2 * point, window, pairs)
    return pairs


def _add_pairs(
    refs: tuple[Any, ...], strip: int, lanes: slice, starts: list[Any], row: int, pairs: jax.Array, plan: Plan
) -> None:
    """Adds pairs of a tile to the sums of their pixels. The other sublanes that a window covers get zeros."""
    sublane = lax.broadcasted_iota(jnp.int32, pairs.shape, 0)
    for point, start in enumerate(starts):
        is_own = (sublane >= 2 * point) & (sublane < 2 * point + 2)
        refs[point % len(refs)][strip, plan.window(start, point, row), lanes] += jnp.where(is_own, pairs, 0)
