"""Gathers the rows that count at the front, so that whole chunks of the others can be skipped."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import lowering
from jaxops._primitive.derivative import Arrays
from jaxops._primitive.sharding import varying_with
from jaxops.linear_cross_entropy.logits import SKIPPED

# With fewer rows, a chunk is too small for fast matrix products.
_LEAST_CHUNK_ROWS = 512
_CHUNKS = 8


class AtOnce(NamedTuple):
    """What takes the rows of several chunks at once, before others are taken.

    Attributes:
      parts: how many rows each part has; together whole chunks.
      step: as that of a chunk, but with the operands of each part in a list.
    """

    parts: Sequence[int]
    step: Callable[..., tuple[Arrays, Arrays]]


class LiveRows(NamedTuple):
    """All rows, in the order in which they are taken.

    Attributes:
      is_live: (rows,), which rows count, by position.
      order: (chunks * chunk_rows,), the position of each row; beyond the last row for fillers.
      live: (), how many rows count. They come first.
      chunk_rows: how many rows are in a chunk.
      batch_shape: the batch axes of the operands.
    """

    is_live: jax.Array
    order: jax.Array
    live: jax.Array
    chunk_rows: int
    batch_shape: tuple[int, ...]

    @property
    def chunks(self) -> int:
        """How many chunks there are."""
        return len(self.order) // self.chunk_rows

    def take(self, array: jax.Array, fill: float = 0) -> jax.Array:
        """(..., rest) in this order, as (chunks * chunk_rows, rest)."""
        rest = array.shape[len(self.batch_shape) :]
        flat = array.reshape(math.prod(self.batch_shape), *rest)
        return flat.at[self.order].get(mode="fill", fill_value=fill, unique_indices=True)

    def restore(self, rows: jax.Array) -> jax.Array:
        """The inverse of `take`."""
        size = math.prod(self.batch_shape)
        positions = jnp.arange(len(self.order), dtype=self.order.dtype)
        places = jnp.zeros_like(self.order, shape=size).at[self.order].set(positions, mode="drop", unique_indices=True)
        return rows.at[places].get(mode="promise_in_bounds").reshape(*self.batch_shape, *rows.shape[1:])

    def restore_all(self, results: Arrays) -> Arrays:
        """`restore` of what `map_in_order` returns: nothing moves where all rows count, and values move in a sort."""
        size = self.is_live.size
        positions = jnp.arange(len(self.order), dtype=self.order.dtype)
        values = [x for x in results if x.ndim == 1]
        _, places, *values = jax.lax.sort((self.order, positions, *values), num_keys=1, is_stable=False)
        sorted_values = iter(values)

        def restored(rows: jax.Array) -> jax.Array:
            if rows.ndim == 1:
                return next(sorted_values)[:size]
            gathered = functools.partial(rows.at[places[:size]].get, mode="promise_in_bounds")
            return jax.lax.cond(self.live == size, lambda: rows[:size], gathered)

        return tuple(restored(rows).reshape(*self.batch_shape, *rows.shape[1:]) for rows in results)

    def _take_values(self, arrays: Arrays) -> Arrays:
        """Values of rows in this order, with fillers: a sort moves them along. TPUs gather them one by one."""
        _, *taken = jax.lax.sort((~self.is_live, *(x.reshape(-1) for x in arrays)), num_keys=1)
        count = len(self.order) - self.is_live.size
        return tuple(jnp.concatenate([x, jnp.full(count, filler(x), x.dtype)]) for x in taken)

    def fold(
        self,
        step: Callable[..., tuple[Arrays, Arrays]],
        start: Arrays,
        rows: Arrays,
        operands: Sequence[jax.Array],
        *,
        first_writes: bool = False,
        at_once: AtOnce | None = None,
    ) -> tuple[Arrays, Arrays]:
        """Calls `rows, sums = step(sums, rows, *operands)` on every chunk with a live row; others keep their rows.

        `rows` and operands are in this order, with one entry per row. Rows behind the last live one in its chunk are
        computed as well. The number of steps depends on the data, so this cannot be differentiated in reverse mode.
        With `first_writes`, sums start from 0 whatever `start` holds, and the first chunk is computed in any case.
        What is taken `at_once` is, if all of these chunks have a live row.
        """

        def take(
            step: Callable[..., tuple[Arrays, Arrays]], size: int, first: Any, carry: tuple[Arrays, Arrays]
        ) -> tuple[Arrays, Arrays]:
            rows, sums = carry
            part = functools.partial(jax.lax.dynamic_slice_in_dim, start_index=first, slice_size=size)
            results, sums = step(sums, tuple(map(part, rows)), *map(part, operands))
            pairs = zip(rows, results, strict=True)
            return tuple(jax.lax.dynamic_update_slice_in_dim(x, new, first, 0) for x, new in pairs), tuple(sums)

        def one(at: jax.Array, carry: tuple[Arrays, Arrays]) -> tuple[Arrays, Arrays]:
            rows, sums = carry
            if first_writes:
                sums = tuple(jnp.where(at == 0, jnp.zeros_like(x), x) for x in sums)
            return take(step, self.chunk_rows, at * self.chunk_rows, (rows, sums))

        both = varying_with([*rows, *start], operands)
        carry, first = (both[: len(rows)], both[len(rows) :]), jnp.zeros_like(self.live)
        if at_once is not None:
            size = sum(at_once.parts)
            several = functools.partial(take, at_once.step, size)
            has_several = (self.live > size - self.chunk_rows).astype(first.dtype)
            # A loop of one step or none, rather than a branch, so that sums stay where they are.
            carry = jax.lax.fori_loop(0, has_several, several, carry)
            first = size // self.chunk_rows * has_several
        chunks = jnp.maximum(-(-self.live // self.chunk_rows), int(first_writes))
        return jax.lax.fori_loop(first, chunks, one, carry)

    def map(
        self,
        step: Callable[..., tuple[Arrays, Arrays]],
        start: Arrays,
        operands: Sequence[jax.Array],
        at_once: AtOnce | None = None,
    ) -> tuple[Arrays, Arrays]:
        """Like `fold_rows`, but row results are 0 where a whole chunk is skipped; `at_once` as in `fold`."""

        def taking(sums: Arrays, _: Arrays, places: jax.Array) -> tuple[Arrays, Arrays]:
            return step(sums, *self.operands_at(places, operands))

        def taking_parts(parts: AtOnce, sums: Arrays, _: Arrays, places: jax.Array) -> tuple[Arrays, Arrays]:
            starts = [sum(parts.parts[:at]) for at in range(1, len(parts.parts))]
            return parts.step(sums, [self.operands_at(part, operands) for part in jnp.split(places, starts)])

        if at_once is not None:
            at_once = at_once._replace(step=functools.partial(taking_parts, at_once))
        rows, start = self._no_rows(step, start, operands, (len(self.order),))
        rows, sums = self.fold(taking, start, rows, [self.order], at_once=at_once)
        return tuple(map(self.restore, rows)), sums

    def map_in_order(
        self, step: Callable[..., tuple[Arrays, Arrays]], start: Arrays, x: jax.Array, values: Arrays
    ) -> tuple[Arrays, Arrays]:
        """Like `map` with operands (x, *values), for TPUs: row results stay in this order; sums start from 0.

        The values are one for each row; whatever `start` holds is not read.
        """

        def taking(sums: Arrays, _: Arrays, places: jax.Array, *values: jax.Array) -> tuple[Arrays, Arrays]:
            return step(sums, *self.operands_at(places, [x]), *values)

        rows, start = self._no_rows(step, start, [x, *values], (len(self.order),))
        return self.fold(taking, start, rows, [self.order, *self._take_values(values)], first_writes=True)

    def map_in_place(
        self, step: Callable[..., tuple[Arrays, Arrays]], start: Arrays, operands: Sequence[jax.Array]
    ) -> tuple[Arrays, Arrays]:
        """Like `map`, by scattering results: without a copy of them, where that is not slow."""
        rows, start = self._no_rows(step, start, operands, self.batch_shape)
        return self.update(step, start, rows, functools.partial(self.operands_at, operands=operands))

    def _no_rows(
        self, step: Callable[..., Any], start: Arrays, operands: Sequence[jax.Array], rows: tuple[int, ...]
    ) -> tuple[Arrays, Arrays]:
        """Row results of zero for so many rows, and the sums before the first step."""
        shapes, _ = jax.eval_shape(step, start, *self.operands_at(self.order[: self.chunk_rows], operands))
        zeros = [jnp.zeros((*rows, *shape.shape[1:]), shape.dtype) for shape in shapes]
        carry = varying_with([*zeros, *start], operands)
        return carry[: len(zeros)], carry[len(zeros) :]

    def operands_at(self, places: jax.Array, operands: Sequence[jax.Array]) -> Arrays:
        """The operands' rows at these positions, all batch axes as one, and fillers beyond the last."""
        rank, size = len(self.batch_shape), math.prod(self.batch_shape)
        flat = (x.reshape(size, *x.shape[rank:]) for x in operands)
        return tuple(x.at[places].get(mode="fill", fill_value=filler(x), unique_indices=True) for x in flat)

    def update(
        self,
        step: Callable[..., tuple[Arrays, Arrays]],
        start: Arrays,
        rows: Arrays,
        operands_at: Callable[[jax.Array], Arrays],
    ) -> tuple[Arrays, Arrays]:
        """Calls `rows, sums = step(sums, *operands)` on the live rows, a chunk at a time, and replaces their rows.

        Nothing is moved beforehand, so without a live row this costs nothing. The operands are taken by position.
        """
        rank, size = len(self.batch_shape), math.prod(self.batch_shape)

        def one(at: jax.Array, carry: tuple[Arrays, Arrays]) -> tuple[Arrays, Arrays]:
            rows, sums = carry
            first = at * self.chunk_rows
            places = jax.lax.dynamic_slice_in_dim(self.order, first, self.chunk_rows)
            is_live = first + jnp.arange(self.chunk_rows, dtype=places.dtype) < self.live
            places = jnp.where(is_live, places, size + jnp.arange(self.chunk_rows, dtype=places.dtype))
            results, sums = step(sums, *operands_at(places))
            pairs = zip(rows, results, strict=True)
            return tuple(x.at[places].set(new, mode="drop", unique_indices=True) for x, new in pairs), tuple(sums)

        flat = [x.reshape(size, *x.shape[rank:]) for x in rows]
        chunks = (self.live + self.chunk_rows - 1) // self.chunk_rows
        updated, sums = jax.lax.fori_loop(0, chunks, one, (tuple(flat), tuple(start)))
        return tuple(x.reshape(*self.batch_shape, *x.shape[1:]) for x in updated), sums


def filler(operand: jax.Array) -> int:
    """What fills up a chunk's rows of an operand: labels, the integers, say that such rows do not count."""
    # Label 0 would do harm where the bias forbids that class: its loss is infinite, and times a weight of 0 not 0.
    return SKIPPED if jnp.issubdtype(operand.dtype, jnp.integer) else 0


def rows_where(is_live: jax.Array, chunk_rows: int) -> LiveRows:
    """The rows (...) where `is_live`, first; in chunks of at most so many rows."""
    size, batch_shape = is_live.size, tuple(is_live.shape)
    chunk_rows = min(chunk_rows, size)
    is_live = is_live.reshape(-1)
    order = jnp.argsort(~is_live, stable=True).astype(jnp.int32)
    # Rows that fill up the last chunk have different positions past the end.
    filling = size + jnp.arange(-size % chunk_rows, dtype=order.dtype)
    order = jnp.concatenate([order, filling])
    return LiveRows(is_live, order, jnp.sum(is_live, dtype=jnp.int32), chunk_rows, batch_shape)


def live_rows(labels: jax.Array, chunk_rows: int | None = None) -> LiveRows | None:
    """The rows whose label is not `SKIPPED`, first; None if rows must stay where they are.

    They must stay if they may be split over devices, while the reference is differentiated, and if there is one chunk.

    Args:
      labels: (...).
      chunk_rows: about how many rows are in a chunk. None: an eighth of them, and at least 512.
    """
    place = lowering.placement()
    if place is None or place.is_split or jax.export.is_symbolic_dim(labels.size):
        return None
    steps = math.ceil(labels.size / (chunk_rows or max(_LEAST_CHUNK_ROWS, labels.size // _CHUNKS)))
    return None if steps < 2 else rows_where(labels != SKIPPED, math.ceil(labels.size / steps))
