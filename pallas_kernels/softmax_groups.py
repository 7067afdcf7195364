"""Where the groups of a softmax lie in memory, and what no softmax kernel takes, whatever its dialect."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

Reshape = Callable[[jax.Array, tuple[int, ...]], jax.Array]


class Groups(NamedTuple):
    """How groups of elements that an operator sees as (..., c) lie in an array.

    The reference and the kernels undo what `of` does before they compute anything, and `in_memory` undoes what they do
    after it. The two cancel out in XLA, so that nothing is moved: not even where a group has several axes, with others
    between them.

    Attributes:
      sizes: of the axes of a group, in the order of the array.
      behind: for each of them, how many axes that are none of a group lie behind it.
    """

    sizes: tuple[int, ...]
    behind: tuple[int, ...]

    @classmethod
    def along(cls, shape: Sequence[int], axes: Sequence[int]) -> "Groups":
        """The groups of an array along these axes, which ascend."""
        behind = [len(shape) - 1 - axis - sum(other > axis for other in axes) for axis in axes]
        return cls(tuple(shape[axis] for axis in axes), tuple(behind))

    @property
    def axes(self) -> tuple[int, ...]:
        """Those of a group in the array, counted from its end, so that batch axes may come before all others."""
        count = len(self.sizes)
        return tuple(position - count - behind for position, behind in enumerate(self.behind))

    @property
    def _last(self) -> tuple[int, ...]:
        return tuple(range(-len(self.sizes), 0))

    def of(self, x: jax.Array, reshape: Reshape = jnp.reshape) -> jax.Array:
        """(..., c): the groups of an array."""
        moved = jnp.moveaxis(x, self.axes, self._last)
        return reshape(moved, (*moved.shape[: moved.ndim - len(self.sizes)], math.prod(self.sizes)))

    def in_memory(self, groups: jax.Array, reshape: Reshape = jnp.reshape) -> jax.Array:
        """The array that has these groups (..., c)."""
        return jnp.moveaxis(reshape(groups, (*groups.shape[:-1], *self.sizes)), self._last, self.axes)


class View(NamedTuple):
    """Groups as a kernel sees them: an array of which one axis is theirs.

    Attributes:
      groups: where they lie.
      order: the array's axes in the order of the view, which merges some of them; None if the view is not of the array
        but of its groups (..., c), whose elements are put side by side first.
      shape: of the view.
      axis: of the view, along which a group lies.
    """

    groups: Groups
    order: tuple[int, ...] | None
    shape: tuple[int, ...]
    axis: int

    @classmethod
    def in_memory(cls, groups: Groups, shape: Sequence[int]) -> "View":
        """Groups (..., c) of this shape as (outer, c, inner), or (1, outer, c) if nothing lies behind c."""
        *batch, c = shape
        array = array_shape(groups, shape)
        is_parted = len({*groups.behind}) > 1
        order = None if is_parted else tuple(range(len(array)))
        behind = 0 if is_parted else max(groups.behind, default=0)
        outer, inner = math.prod(batch[: len(batch) - behind]), math.prod(batch[len(batch) - behind :])
        return cls(groups, order, (1, outer, c), 2) if inner == 1 else cls(groups, order, (outer, c, inner), 1)

    @property
    def size(self) -> int:
        """Of a group."""
        return self.shape[self.axis]

    def to_view(self, x: jax.Array) -> jax.Array:
        """Groups (..., c) in this view."""
        if self.order is not None:
            x = jnp.transpose(self.groups.in_memory(x), self.order)
        return x.reshape(self.shape)

    def from_view(self, y: jax.Array, shape: Sequence[int]) -> jax.Array:
        """The inverse of `to_view`, for groups of this shape."""
        if self.order is None:
            return y.reshape(shape)
        array = array_shape(self.groups, shape)
        y = y.reshape([array[axis] for axis in self.order])
        return self.groups.of(jnp.transpose(y, [self.order.index(axis) for axis in range(len(array))]))


def array_shape(groups: Groups, shape: Sequence[int]) -> tuple[int, ...]:
    """The shape of the array that has groups (..., c) of this shape."""
    return jax.eval_shape(groups.in_memory, jax.ShapeDtypeStruct(shape, jnp.float32)).shape


def refusal(x: Any) -> str | None:
    """Why no kernel takes groups of this shape, split over devices as x is; None if nothing is in its way."""
    if math.prod(x.shape) == 0:
        return "there is nothing to normalize"
    spec = tuple(getattr(getattr(x, "sharding", None), "spec", ()))
    if len(spec) == len(x.shape) and spec[-1] is not None:
        return f"the kernels take whole groups; x is split over a mesh as {spec}"
    return None
