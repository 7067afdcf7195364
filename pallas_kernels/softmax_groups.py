"""Where the groups of a softmax lie in memory, and what no softmax kernel takes, whatever its dialect."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


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

    def of(self, x: jax.Array) -> jax.Array:
        """(..., c): the groups of an array."""
        moved = jnp.moveaxis(x, self.axes, self._last)
        return moved.reshape(*moved.shape[: moved.ndim - len(self.sizes)], math.prod(self.sizes))

    def in_memory(self, groups: jax.Array) -> jax.Array:
        """The array that has these groups (..., c)."""
        return jnp.moveaxis(groups.reshape(*groups.shape[:-1], *self.sizes), self._last, self.axes)


class View(NamedTuple):
    """Groups as a kernel sees them: an array of which one axis is theirs.

    Attributes:
      groups: where they lie.
      shape: of the view.
      axis: of the view, along which a group lies.
      moves: whether a group's elements are put side by side first, so that the view is one of (..., c).
    """

    groups: Groups
    shape: tuple[int, ...]
    axis: int
    moves: bool

    @classmethod
    def in_memory(cls, groups: Groups, shape: Sequence[int]) -> "View":
        """Groups (..., c) of this shape as (outer, c, inner), or (1, outer, c) if nothing lies behind c."""
        *batch, c = shape
        moves = len({*groups.behind}) > 1
        behind = 0 if moves else max(groups.behind, default=0)
        outer, inner = math.prod(batch[: len(batch) - behind]), math.prod(batch[len(batch) - behind :])
        return cls(groups, (1, outer, c), 2, moves) if inner == 1 else cls(groups, (outer, c, inner), 1, moves)

    @property
    def size(self) -> int:
        """Of a group."""
        return self.shape[self.axis]

    def to_view(self, x: jax.Array) -> jax.Array:
        """Groups (..., c) in this view."""
        return (x if self.moves else self.groups.in_memory(x)).reshape(self.shape)

    def from_view(self, y: jax.Array, like: jax.Array) -> jax.Array:
        """The inverse of `to_view`, for groups of the shape of `like`."""
        if self.moves:
            return y.reshape(like.shape)
        return self.groups.of(y.reshape(jax.eval_shape(self.groups.in_memory, like).shape))


def refusal(x: Any) -> str | None:
    """Why no kernel takes groups of this shape, split over devices as x is; None if nothing is in its way."""
    if math.prod(x.shape) == 0:
        return "there is nothing to normalize"
    spec = tuple(getattr(getattr(x, "sharding", None), "spec", ()))
    if len(spec) == len(x.shape) and spec[-1] is not None:
        return f"the kernels take whole groups; x is split over a mesh as {spec}"
    return None
