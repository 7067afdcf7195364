"""Rows of the TPU kernels of divisive normalization: what windows hold of them along the row.

With means, the squares of a window are taken about each mean. Of a row, the part of a window has an origin, the pixel
in its middle; a mean, as an `offset` from there; and `squares`, the squared deviations from that mean. With
`d = (origin - m) + offset` the part adds `count d**2 + squares` to the window's sum, where m is the mean that was given
and count is how many columns the part has. No term is negative, so nothing cancels.

The gradient of x adds `u (x - m)` over windows. Of a row, the part is `total (x - origin) - moment`: its origin is the
given mean in its middle, `total` adds up u, and `moment` adds up u times the distances of means from there. Both are
kept of -2 u.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.tpu.local_response_norm_sums import add, windows
from pallas_kernels.tpu.stored_order import SUBLANES

Kept = dict[str, jax.Array]
# The pixels of a piece that begins at a column, or those so many columns further on: zeros outside, or None for all.
Row = Callable[..., Any]
_LARGEST = float(jnp.finfo(jnp.float32).max)


class Columns:
    """Pieces of a row, which are computed one after the other so that few values need registers at a time.

    Where columns lie before the registers, a piece is one column, and what two columns have in common is computed once.
    Where they lie in sublanes it fills them. Loads may begin at any sublane, while a shift in registers is a rotation
    and a selection; so these rows go by way of scratch, where they lie between zeros.
    """

    def __init__(self, width: int, scratch: Any) -> None:
        """Takes scratch for some rows, `scratch[row]`; None if columns lie before the registers."""
        self.starts = range(0, width, 1 if scratch is None else SUBLANES)
        self._width, self._scratch, self._rows = width, scratch, 0

    def place(self, start: int, moved: int = 0) -> tuple[Any, ...]:
        """Returns the indices of a piece in a tile, if need be moved by some columns."""
        return (start,) if self._scratch is None else (slice(None), pl.ds(start + moved, self._size(start)))

    def row(self, piece: Callable[[int], jax.Array]) -> Row:
        """Returns the row that has these pieces."""
        if self._scratch is None:
            known = functools.cache(piece)
            return lambda start, step=0: known(start + step) if 0 <= start + step < self._width else None
        row, edge = self._scratch.at[self._rows], (self._scratch.shape[-2] - self._width) // 2
        self._rows += 1
        for start in self.starts:
            row[self.place(start, edge)] = piece(start)
        return functools.cache(lambda start, step=0: row[self.place(start, edge + step)])

    def _size(self, start: int) -> int:
        return min(SUBLANES, self._width - start)

    def sums(self, row: Row, before: int, after: int) -> Callable[[int], Any]:
        """Adds up windows."""
        if self._scratch is None:
            total = windows(row, before + after + 1)
            return lambda start: total(start - before)
        return lambda start: added(row(start, step) for step in range(-before, after + 1))

    def apart(self, row: Row) -> tuple[Row, Row]:
        """Returns by how much the pixels some columns further on exceed each, and the squares of that."""

        @functools.cache
        def exceeding(start, step):
            if self._is_known_from_behind(step):
                other = exceeding(start + step, -step)
                return None if other is None else -other
            here, there = row(start), row(start, step)
            return None if here is None or there is None else self._inside(there - here, start, step)

        @functools.cache
        def squared(start, step):
            if self._is_known_from_behind(step):
                return squared(start + step, -step)
            difference = exceeding(start, step)
            return None if difference is None else difference * difference

        return exceeding, squared

    def count(self, start: int, before: int, after: int) -> Any:
        """Counts the columns of windows."""
        if self._scratch is None:
            return float(min(start, before) + min(self._width - 1 - start, after) + 1)
        size = self._size(start)
        if start >= before and start + size + after <= self._width:
            return float(before + after + 1)
        column = start + lax.broadcasted_iota(jnp.int32, (1, size, self._scratch.shape[-1]), 1)
        return (jnp.minimum(column, before) + jnp.minimum(self._width - 1 - column, after) + 1).astype(jnp.float32)

    def _is_known_from_behind(self, step: int) -> bool:
        return self._scratch is None and step < 0

    def _inside(self, x: jax.Array, start: int, step: int) -> jax.Array:
        """Puts zeros where the pixel so many columns further on is outside."""
        size = self._size(start)
        if self._scratch is None or (start + step >= 0 and start + size + step <= self._width):
            return x
        column = start + lax.broadcasted_iota(jnp.int32, x.shape, 1)
        return jnp.where(column >= -step if step < 0 else column < self._width - step, x, 0)


def added(parts: Any) -> Any:
    """Adds up those that are not None."""
    return functools.reduce(add, parts, None)


def _steps(before: int, after: int) -> list[int]:
    return [step for step in range(-before, after + 1) if step]


def of_x(columns: Columns, x: Callable[[int], jax.Array], norm: Any) -> Callable[[int], Kept]:
    """Returns what is kept of each piece of a row of x."""
    if not norm.has_means:
        x = functools.cache(x)
        squares = columns.sums(columns.row(lambda start: x(start) * x(start)), *norm.columns)
        deviation = columns.sums(columns.row(x), *norm.columns) if norm.means_grad else None
        return lambda start: {
            "pixels": x(start),
            "squares": squares(start),
            **({} if deviation is None else {"deviation": deviation(start)}),
        }
    # Differences from this limit, and sums of them, are finite, but squares are infinite, as they must be for infinite
    # pixels.
    limit = _LARGEST / (4 * (sum(norm.columns) + 1))
    row = columns.row(lambda start: jnp.clip(x(start), -limit, limit))
    apart, squared = columns.apart(row)
    steps = _steps(*norm.columns)

    def kept(start):
        pixels, finite = x(start), row(start)
        total = added(apart(start, step) for step in steps)
        if total is None:
            return {"pixels": pixels, "finite": finite, **dict.fromkeys(("offset", "squares"), jnp.zeros_like(pixels))}
        offset = total * (1 / columns.count(start, *norm.columns))
        # The origin is one of the pixels, so no more than a factor of their count cancels. Infinity less infinity would
        # be no number.
        squares = added(squared(start, step) for step in steps) - jnp.minimum(total * offset, _LARGEST)
        return {"pixels": pixels, "finite": finite, "offset": offset, "squares": squares}

    return kept


def of_u(columns: Columns, u: Row, means: Row | None, norm: Any) -> Callable[[int], Kept]:
    """Returns what is kept of each piece of u; the windows that hold a pixel are the mirror image of its own."""
    after, before = norm.columns
    total = columns.sums(u, before, after)
    if means is None:
        return lambda start: {"total": total(start)}
    apart, _ = columns.apart(means)

    def kept(start):
        near = [step for step in _steps(before, after) if apart(start, step) is not None]
        moment = added(u(start, step) * apart(start, step) for step in near)
        moment = jnp.zeros_like(means(start)) if moment is None else moment
        return {"total": total(start), "mean": means(start), "moment": moment}

    return kept
