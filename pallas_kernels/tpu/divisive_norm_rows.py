"""Rows of the TPU kernels of divisive normalization: what windows hold of them along the row.

With means, the squares of a window are taken about each mean. Of a row, the part of a window has an origin, the pixel
in its middle; a mean, as an `offset` from there; and `squares`, the squared deviations from that mean. With
`d = (origin - m) + offset` the part adds `count d**2 + squares` to the window's sum, where m is the mean that was given
and count is how many columns the part has. No term is negative, so nothing cancels.

The gradient of x adds `u (x - m)` over windows. Of a row, the part is `total (x - origin) - moment`: its origin is the
given mean in its middle, `total` adds up u, and `moment` adds up u times the distances of means from there.
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.tpu.local_response_norm_sums import in_registers

Kept = dict[str, jax.Array]


class Along:
    """Neighbours of the pixels of a row, whose columns are the first axis of a tile: before the registers, or sublanes.

    Between registers nothing moves. Loads may begin at any sublane, while a shift in registers is a rotation and a
    selection; so rows in sublanes go by way of scratch, where they lie between zeros.
    """

    def __init__(self, scratch: Any, tile: Any) -> None:
        """Takes scratch for some rows of a tile, `scratch[row, tile]`; None if columns lie before the registers."""
        self._scratch, self._tile, self._rows = scratch, tile, 0

    def neighbours(self, x: jax.Array) -> Callable[[int], jax.Array]:
        """Returns a function of a step that returns the pixels so many columns further on, and zeros outside."""
        if self._scratch is None:
            return lambda step: self._shifted(x, step)
        row, width = self._rows, x.shape[0]
        self._rows += 1
        edge = (self._scratch.shape[2] - width) // 2
        self._scratch[row, self._tile, edge : edge + width] = x
        return lambda step: self._scratch[row, self._tile, edge + step : edge + step + width]

    def inside(self, x: jax.Array, step: int) -> jax.Array:
        """Puts zeros where the pixel so many columns further on is outside."""
        if self._scratch is None:
            return self._shifted(self._shifted(x, -step), step)
        column = lax.broadcasted_iota(jnp.int32, x.shape, 0)
        return jnp.where(column >= -step if step < 0 else column < x.shape[0] - step, x, 0)

    def sums(self, x: jax.Array, before: int, after: int) -> jax.Array:
        """Adds up windows."""
        if self._scratch is None:
            return in_registers(x, before, after, 0)
        near = self.neighbours(x)
        return sum((near(step) for step in _steps(before, after)), x)

    @staticmethod
    def _shifted(x: jax.Array, step: int) -> jax.Array:
        width = x.shape[0]
        before, behind = (jnp.zeros((count, *x.shape[1:]), x.dtype) for count in (max(-step, 0), max(step, 0)))
        kept = x[max(step, 0) : width + min(step, 0)]
        return jnp.concatenate([part for part in (before, kept, behind) if part.shape[0]], axis=0)


def _steps(before: int, after: int) -> list[int]:
    return [step for step in range(-before, after + 1) if step]


def _total(parts: Iterable[jax.Array]) -> jax.Array:
    return functools.reduce(jnp.add, parts)


def of_x(along: Along, x: jax.Array, norm: Any, inverse_count: Any) -> Kept:
    """Computes what is kept of a row of x."""
    if not norm.has_means:
        kept = {"pixels": x, "squares": along.sums(x * x, *norm.columns)}
        return kept | ({"deviation": along.sums(x, *norm.columns)} if norm.means_grad else {})
    # Differences of numbers up to this limit are finite, but their squares are infinite, as they must be for infinite
    # pixels.
    largest = float(jnp.finfo(jnp.float32).max) / 8
    finite = jnp.clip(x, -largest, largest)
    near = along.neighbours(finite)
    apart = {step: along.inside(near(step) - finite, step) for step in _steps(*norm.columns)}
    if not apart:
        return {"pixels": x, "finite": finite, "offset": jnp.zeros_like(x), "squares": jnp.zeros_like(x)}
    offset = _total(apart.values()) * inverse_count
    rest = {step: part - offset for step, part in apart.items()}
    squares = _total([offset * offset, *(along.inside(part * part, step) for step, part in rest.items())])
    return {"pixels": x, "finite": finite, "offset": offset, "squares": squares}


def of_u(along: Along, u: jax.Array, means: jax.Array | None, columns: tuple[int, int]) -> Kept:
    """Computes what is kept of a row of u; the windows that hold a pixel are the mirror image of its own."""
    after, before = columns
    if means is None:
        return {"total": along.sums(u, before, after)}
    near_u, near_means = along.neighbours(u), along.neighbours(means)
    steps = _steps(before, after)
    # Outside, u is zero.
    total = _total([u, *map(near_u, steps)])
    moments = [near_u(step) * (near_means(step) - means) for step in steps]
    return {"total": total, "mean": means, "moment": _total(moments or [jnp.zeros_like(u)])}
