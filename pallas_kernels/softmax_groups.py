"""Groups of a softmax in memory, and those that no kernel takes, whatever its dialect."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

Reshape = Callable[[jax.Array, tuple[int, ...]], jax.Array]


class Groups(NamedTuple):
    """Groups of elements in an array; the operator sees them as (..., c).

    `of` and `in_memory` are inverse to each other. The operator's caller applies `of` to operands and `in_memory` to
    results; inside, the reference and the kernels do the reverse. All of this cancels out in XLA, so nothing is moved,
    even if a group has several axes with others in between.

    Attributes:
      sizes: of a group's axes, in the order of the array.
      behind: for each of these axes, how many axes outside of the group come after it.
    """

    sizes: tuple[int, ...]
    behind: tuple[int, ...]

    @classmethod
    def along(cls, shape: Sequence[int], axes: Sequence[int]) -> "Groups":
        """Makes the groups of an array along these axes, in ascending order."""
        behind = [len(shape) - 1 - axis - sum(other > axis for other in axes) for axis in axes]
        return cls(tuple(shape[axis] for axis in axes), tuple(behind))

    @property
    def axes(self) -> tuple[int, ...]:
        """A group's axes in the array, counted from its end, so that batch axes may come before all others."""
        count = len(self.sizes)
        return tuple(position - count - behind for position, behind in enumerate(self.behind))

    @property
    def _last(self) -> tuple[int, ...]:
        return tuple(range(-len(self.sizes), 0))

    def of(self, x: jax.Array, reshape: Reshape = jnp.reshape) -> jax.Array:
        """Returns the groups (..., c) of an array."""
        grouped = jnp.moveaxis(x, self.axes, self._last)
        return reshape(grouped, (*grouped.shape[: grouped.ndim - len(self.sizes)], math.prod(self.sizes)))

    def in_memory(self, groups: jax.Array, reshape: Reshape = jnp.reshape) -> jax.Array:
        """Returns the array that has these groups (..., c)."""
        return jnp.moveaxis(reshape(groups, (*groups.shape[:-1], *self.sizes)), self._last, self.axes)


class View(NamedTuple):
    """Groups as a kernel sees them: an array with a single axis along the groups.

    Attributes:
      groups: where they lie.
      order: the array's axes in the order of the view, which merges some of them. None if the view is of the groups
        (..., c) instead, whose elements XLA puts side by side first.
      shape: of the view.
      axis: the view's axis along the groups.
    """

    groups: Groups
    order: tuple[int, ...] | None
    shape: tuple[int, ...]
    axis: int

    @classmethod
    def in_memory(cls, groups: Groups, shape: Sequence[int]) -> "View":
        """Makes the view of groups (..., c) of this shape: (outer, c, inner), or (1, outer, c) if c comes last."""
        *batch, c = shape
        array = array_shape(groups, shape)
        # With other axes between a group's own, no merge of neighbouring axes makes the group one axis.
        is_parted = len({*groups.behind}) > 1
        order = None if is_parted else tuple(range(len(array)))
        behind = 0 if is_parted else max(groups.behind, default=0)
        outer, inner = math.prod(batch[: len(batch) - behind]), math.prod(batch[len(batch) - behind :])
        return cls(groups, order, (1, outer, c), 2) if inner == 1 else cls(groups, order, (outer, c, inner), 1)

    @property
    def size(self) -> int:
        """The number of elements of a group."""
        return self.shape[self.axis]

    def to_view(self, x: jax.Array) -> jax.Array:
        """Returns groups (..., c) in this view."""
        if self.order is not None:
            x = jnp.transpose(self.groups.in_memory(x), self.order)
        return x.reshape(self.shape)

    def from_view(self, y: jax.Array, shape: Sequence[int]) -> jax.Array:
        """Inverts `to_view`, for groups of this shape."""
        if self.order is None:
            return y.reshape(shape)
        array = array_shape(self.groups, shape)
        y = y.reshape([array[axis] for axis in self.order])
        return self.groups.of(jnp.transpose(y, [self.order.index(axis) for axis in range(len(array))]))


def array_shape(groups: Groups, shape: Sequence[int]) -> tuple[int, ...]:
    """Returns the shape of the array that has groups (..., c) of this shape."""
    return jax.eval_shape(groups.in_memory, jax.ShapeDtypeStruct(shape, jnp.float32)).shape


def refusal(x: Any) -> str | None:
    """Says why no kernel takes groups of this shape, split over devices like x; None if kernels may."""
    if math.prod(x.shape) == 0:
        return "there is nothing to normalize"
    spec = tuple(getattr(getattr(x, "sharding", None), "spec", ()))
    if len(spec) == len(x.shape) and spec[-1] is not None:
        return f"the kernels take whole groups; x is split over a mesh as {spec}"
    return None
