"""Where the groups of a softmax lie in memory, and what no softmax kernel takes, whatever its dialect."""

import math
from collections.abc import Sequence
from typing import NamedTuple

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
