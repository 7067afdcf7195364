"""Images as XLA:TPU stores them, for the kernels of max pooling."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.tpu.stored_order import stored_order


class View(NamedTuple):
    """View of images (..., h, w, c), or of their windows, as a kernel sees them.

    Attributes:
      order: the axes of the images in the order of the view's.
      cuts: where in this order the axes of the view begin, apart from the first: those between two cuts are merged.
      is_stored_so: whether XLA most likely stores the images in this order; otherwise they are transposed.
    """

    order: tuple[int, ...]
    cuts: tuple[int, ...]
    is_stored_so: bool

    @property
    def has_pixels_outside(self) -> bool:
        """Tells whether rows and columns both lie outside of the tiles.

        The view is then (before, h, w, between, sublanes, lanes), otherwise (before, h, between, w, lanes).
        """
        return len(self.cuts) == 5

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape of the view of an array of this shape."""
        sizes = [shape[axis] for axis in self.order]
        ends = zip((0, *self.cuts), (*self.cuts, len(sizes)), strict=True)
        return tuple(math.prod(sizes[begin:end]) for begin, end in ends)

    def of(self, x: jax.Array) -> jax.Array:
        """Returns an array in this view."""
        return jnp.transpose(x, self.order).reshape(self.shape(x.shape))

    def back(self, x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """Inverts `of`, for an array of this shape."""
        places = [self.order.index(axis) for axis in range(len(shape))]
        return jnp.transpose(x.reshape([shape[axis] for axis in self.order]), places)


def view_of(shape: tuple[int, ...]) -> View:
    """Returns the view of images (..., h, w, c) whose windows lie along rows or columns."""
    rank = len(shape)
    height, width, channels = rank - 3, rank - 2, rank - 1
    # Axes of size 1 take no space; those of pixels and channels are kept, as every view has them.
    kept = [axis for axis, size in enumerate(shape) if size > 1 or axis in (height, width)]
    kept = kept if len(kept) > 2 else [*kept, channels]
    order = tuple(kept[i] for i in stored_order(tuple(shape[axis] for axis in kept)))
    order = (*(axis for axis in range(rank) if axis not in kept), *order)
    row, column = order.index(height), order.index(width)
    if column < rank - 2 and row + 1 == column:
        return View(order, (row, column, column + 1, rank - 2, rank - 1), True)
    if column == rank - 2 and row < column:
        return View(order, (row, row + 1, column, rank - 1), True)
    # Columns would lie in lanes, or rows in sublanes.
    return transposed(shape)


def transposed(shape: tuple[int, ...]) -> View:
    """Returns the view with the channels of all images beside each other in lanes, as XLA does not store them."""
    height, width = len(shape) - 3, len(shape) - 2
    others = tuple(axis for axis in range(len(shape)) if axis not in (height, width))
    return View((height, width, *others), (0, 1, 1, 2), False)
