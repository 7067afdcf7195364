"""Changes of the axes of row-sized arrays; further axes behind those of the rows stay as they are."""

import math
from collections.abc import Sequence
from typing import Any

from jax import lax

from jaxops.linear_cross_entropy.rewriting.rows import Change


def reshaped(before: Sequence[int], after: Sequence[int]) -> Change:
    """Reshapes rows from `before` to `after`."""

    def to(shape: Sequence[int], array: Any, rank: int) -> Any:
        return lax.reshape(array, (*shape, *array.shape[rank:]))

    return Change(
        ("reshape", tuple(before), tuple(after)),
        lambda array: to(after, array, len(before)),
        lambda array: to(before, array, len(after)),
    )


def transposed(order: Sequence[int]) -> Change:
    """Puts the axes of rows in another order."""
    inverse = [list(order).index(axis) for axis in range(len(order))]

    def permute(array: Any, order: Sequence[int]) -> Any:
        return lax.transpose(array, (*order, *range(len(order), array.ndim)))

    return Change(
        ("transpose", tuple(order)), lambda array: permute(array, order), lambda array: permute(array, inverse)
    )


def sliced(starts: Sequence[int], limits: Sequence[int], strides: Sequence[int]) -> Change:
    """Slices the rows."""

    def cut(array: Any) -> Any:
        behind = array.shape[len(starts) :]
        return lax.slice(array, (*starts, *(0 for _ in behind)), (*limits, *behind), (*strides, *(1 for _ in behind)))

    return Change(("slice", tuple(starts), tuple(limits), tuple(strides)), cut)


def spread(before: Sequence[int], after: Sequence[int], axes: Sequence[int]) -> Change:
    """Broadcasts rows of shape `before`, whose axes become these axes of shape `after`."""
    if math.prod(before) == math.prod(after):
        return reshaped(before, after)
    return Change(
        ("spread", tuple(before), tuple(after), tuple(axes)),
        lambda array: lax.broadcast_in_dim(array, tuple(after), tuple(axes)),
    )


def without_axis(shape: Sequence[int], axis: int) -> tuple[int, ...]:
    """Returns a shape without one of its axes."""
    return (*shape[:axis], *shape[axis + 1 :])
