"""Computes something for all rows, a chunk of them at a time, without moving rows between devices.

On a single device, the rows that count may go first, so that whole chunks of the others are skipped.
"""

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxops._primitive.sharding import varying_with
from jaxops.linear_cross_entropy.chunk_sizes import SIZES
from jaxops.linear_cross_entropy.operands import SKIPPED, Rows
from lowering.operators import Place

# `results, sums = step(sums, rows)`: results begin with the batch axes, sums lack them. All are pytrees of arrays.
Step = Callable[[Any, Any], tuple[Any, Any]]


def filler(rows: jax.Array) -> int:
    """Returns what fills up a chunk's rows: labels, the integers, say that such rows do not count."""
    # Label 0 would do harm where the bias forbids that class: its loss is infinite, and times a weight of 0 not 0.
    return SKIPPED if jnp.issubdtype(rows.dtype, jnp.integer) else 0


def fold_rows(
    step: Step, sums: Any, rows: Any, batch_shape: Sequence[int], chunk_rows: int | None, place: Place | None
) -> tuple[Any, Any]:
    """Calls `results, sums = step(sums, chunk of rows)` for each chunk; returns all results and the sums.

    A batch axis of n * c positions is split into n parts of c positions, and step j takes position j of every part. So
    if contiguous blocks of an axis lie on different devices, the same holds in every chunk, and nothing is gathered.

    A chunk has about `chunk_rows` rows on each device of the place, None being one; without `chunk_rows`, all. With
    fewer, a device would mostly read the weight, once for each chunk. If an axis does not split evenly, the last rows
    are filled up with `filler`. The sums must not depend on such rows.
    """
    if chunk_rows is not None and place is not None:
        chunk_rows *= place.device_count
    splits, sums = _splits(batch_shape, chunk_rows), varying_with(sums, rows)
    if math.prod(splits) == 1:
        return step(sums, rows)
    parts = jax.tree.map(lambda x: _split(x, splits), rows)

    def one(sums: Any, at: jax.Array) -> tuple[Any, Any]:
        results, sums = step(sums, jax.tree.map(lambda x: _chunk(x, splits, at), parts))
        return sums, results

    # Differentiated again, every step would keep its logits, together just what the chunks are there to avoid.
    one = jax.checkpoint(one, prevent_cse=False)
    sums, results = jax.lax.scan(one, sums, jnp.arange(math.prod(splits)))
    return jax.tree.map(lambda x: _join(x, splits, batch_shape), results), sums


def even_steps(size: int, steps: int) -> int:
    """Returns in how many steps to take a size: as many as asked for, or a few more that are even."""
    wanted = max(1, min(steps, size))
    return next((count for count in range(wanted, min(2 * wanted, size + 1)) if size % count == 0), wanted)


def padded(array: jax.Array, missing: Sequence[int]) -> jax.Array:
    """Appends as many fillers as are missing along each of the first axes."""
    padding = [*((0, count) for count in missing), *((0, 0),) * (array.ndim - len(missing))]
    return jnp.pad(array, padding, constant_values=jnp.asarray(filler(array), array.dtype))


def _splits(batch_shape: Sequence[int], chunk_rows: int | None) -> tuple[int, ...]:
    """Returns how many steps split each batch axis, the last axis first: users split the first over devices."""
    if any(jax.export.is_symbolic_dim(size) for size in batch_shape):
        return (1,) * len(batch_shape)
    rows = math.prod(batch_shape)
    steps = max(1, math.ceil(rows / chunk_rows)) if chunk_rows else 1
    splits: list[int] = []
    for size in reversed(batch_shape):
        splits.append(even_steps(size, steps))
        steps = math.ceil(steps / splits[-1])
    return tuple(reversed(splits))


def _split(array: jax.Array, splits: tuple[int, ...]) -> jax.Array:
    """Splits (n1 * c1, n2 * c2, ..., rest) -> (n1, c1, n2, c2, ..., rest), which moves nothing if it splits evenly."""
    rest = array.shape[len(splits) :]
    parts = tuple(math.ceil(size / count) for size, count in zip(array.shape, splits, strict=False))
    missing = [n * c - size for n, c, size in zip(parts, splits, array.shape, strict=False)]
    array = padded(array, missing) if any(missing) else array
    return array.reshape(*(size for pair in zip(parts, splits, strict=True) for size in pair), *rest)


def _chunk(array: jax.Array, splits: tuple[int, ...], step: jax.Array) -> jax.Array:
    """Takes the part of an array from `_split` that one step needs: (n1, n2, ..., rest)."""
    positions = jnp.unravel_index(step, splits)
    # The last axis first, so that the positions of those before it do not change.
    for axis, at in reversed([*enumerate(positions)]):
        array = jax.lax.dynamic_index_in_dim(array, at, 2 * axis + 1, keepdims=False)
    return array


def _join(array: jax.Array, splits: tuple[int, ...], batch_shape: Sequence[int]) -> jax.Array:
    """Joins the results (c1 * c2 * ..., n1, n2, ..., rest) of all steps as (n1 * c1, ..., rest), without fillers."""
    rank = len(splits)
    parts, rest = array.shape[1 : rank + 1], array.shape[rank + 1 :]
    array = jnp.moveaxis(array.reshape(*splits, *parts, *rest), range(rank), range(1, 2 * rank, 2))
    array = array.reshape(*(n * c for n, c in zip(parts, splits, strict=True)), *rest)
    return array[tuple(slice(size) for size in batch_shape)]


class KeptRows(NamedTuple):
    """All rows in the order in which they are taken: those that count, the others, and fillers of the last chunk.

    Which steps run depends on the data, so nothing here can be differentiated in reverse mode.

    Attributes:
      is_kept: (rows,), which rows count, by position.
      order: (chunks * chunk_rows,), the position of each row; beyond the last row for fillers.
      kept: (), how many rows count.
      chunk_rows: the rows of a chunk.
      batch_shape: the batch axes.
      fuses: whether the compiler selects within a product, so that sums need no zeros in memory to start from.
    """

    is_kept: jax.Array
    order: jax.Array
    kept: jax.Array
    chunk_rows: int
    batch_shape: tuple[int, ...]
    fuses: bool

    def take(self, rows: Any) -> Any:
        """Takes (..., rest) in this order, as (chunks * chunk_rows, rest), with fillers; pytrees."""
        return self._gathered(rows, self._vectors(rows), self.order)

    def restore(self, results: Any) -> Any:
        """Computes the inverse of `take`, in which nothing moves where all rows count."""
        size, positions = self.is_kept.size, jnp.arange(len(self.order), dtype=self.order.dtype)
        leaves, structure = jax.tree.flatten(results)
        by_order = self.order, positions, *(x for x in leaves if x.ndim == 1)
        _, places, *vectors = jax.lax.sort(by_order, num_keys=1, is_stable=False)
        rest, moves = iter(vectors), (self.kept < size).astype(jnp.int32)

        def moved(_: jax.Array, x: jax.Array) -> jax.Array:
            return x.at[places[:size]].get(mode="promise_in_bounds", unique_indices=True)

        def restored(x: jax.Array) -> jax.Array:
            if x.ndim == 1:
                return next(rest)[:size]
            # A loop of one step or none, rather than a branch, so that rows that do not move stay where they are.
            return jax.lax.fori_loop(jnp.zeros_like(moves), moves, moved, x[:size])

        return jax.tree.unflatten(structure, [restored(x).reshape(*self.batch_shape, *x.shape[1:]) for x in leaves])

    def fold(self, step: Step, sums: Any, results: Any, rows: Any) -> tuple[Any, Any]:
        """Calls `results, sums = step(sums, (results, rows))` on every chunk with a row that counts, all in this order.

        The other chunks keep their results. Rows behind the last one that counts in its chunk are computed as well. The
        sums that are given are zeros.
        """
        chunks = -(-self.kept // self.chunk_rows)
        if self.fuses:
            sums, chunks = jax.tree.map(lambda x: jax.lax.empty(x.shape, x.dtype), sums), jnp.maximum(chunks, 1)

        def one(at: jax.Array, carry: tuple[Any, Any]) -> tuple[Any, Any]:
            results, sums = carry
            if self.fuses:
                sums = jax.tree.map(lambda x: jnp.where(at == 0, jnp.zeros_like(x), x), sums)
            first = at * self.chunk_rows
            taken = functools.partial(jax.lax.dynamic_slice_in_dim, start_index=first, slice_size=self.chunk_rows)
            put = functools.partial(jax.lax.dynamic_update_slice_in_dim, start_index=first, axis=0)
            new, sums = step(sums, jax.tree.map(taken, (results, rows)))
            return jax.tree.map(put, results, new), sums

        return jax.lax.fori_loop(jnp.zeros_like(chunks), chunks, one, (results, sums))

    def map(self, step: Step, sums: Any, rows: Any) -> tuple[Any, Any]:
        """Calls `step` as `fold_rows` does; row results are 0 where a whole chunk is skipped.

        Vectors are taken first, and what is wider when its chunk is computed, so that it is not copied as a whole.
        """
        taken = self.order, list(self._vectors(rows))

        def gathering(sums: Any, chunk: Any) -> tuple[Any, Any]:
            _, (places, vectors) = chunk
            return step(sums, self._gathered(rows, iter(vectors), places))

        first = jax.eval_shape(lambda: jax.tree.map(lambda x: x[: self.chunk_rows], taken))
        shapes, _ = jax.eval_shape(gathering, sums, (None, first))
        results = jax.tree.map(lambda x: jnp.zeros((len(self.order), *x.shape[1:]), x.dtype), shapes)
        results, sums = varying_with((results, sums), rows)
        results, sums = self.fold(gathering, sums, results, taken)
        return self.restore(results), sums

    def _vectors(self, rows: Any) -> Iterator[jax.Array]:
        """Takes the vectors in this order, with fillers. They move in a sort: TPUs would gather them one by one."""
        flat = (x.reshape(-1) for x in jax.tree.leaves(rows) if x.ndim == len(self.batch_shape))
        _, *vectors = jax.lax.sort((~self.is_kept, *flat), num_keys=1)
        fillers = len(self.order) - self.is_kept.size
        return (jnp.concatenate([x, jnp.full(fillers, filler(x), x.dtype)]) for x in vectors)

    def _gathered(self, rows: Any, vectors: Iterator[jax.Array], places: jax.Array) -> Any:
        """Gathers the rows at some places; their vectors have been taken already."""

        def gathered(x: jax.Array) -> jax.Array:
            if x.ndim == len(self.batch_shape):
                return next(vectors)
            flat = x.reshape(self.is_kept.size, *x.shape[len(self.batch_shape) :])
            return flat.at[places].get(mode="fill", fill_value=filler(x), unique_indices=True)

        return jax.tree.map(gathered, rows)


def fold_kept_rows(
    step: Step, sums: Any, rows: tuple[Rows, Any], place: Place | None, chunk_rows: int | None, *, all_rows: bool
) -> tuple[Any, Any]:
    """Calls `step` as `fold_rows` does, from sums of 0, and without `all_rows` for the rows that count."""
    kept = None if all_rows else kept_rows(rows[0], place, chunk_rows)
    if kept is not None:
        return kept.map(step, sums, rows)
    batch = rows[0].x.shape[:-1]
    if not is_on_one_device(place) or any(map(jax.export.is_symbolic_dim, batch)):
        return fold_rows(step, sums, rows, batch, chunk_rows, place)
    # A product over rows of several axes would copy the logits, to have them as rows of one.
    size = math.prod(batch)
    rows = jax.tree.map(lambda x: x.reshape(size, *x.shape[len(batch) :]), rows)
    results, sums = fold_rows(step, sums, rows, (size,), chunk_rows, place)
    return jax.tree.map(lambda x: x.reshape(*batch, *x.shape[1:]), results), sums


def fuses(place: Place | None) -> bool:
    """Tells whether XLA computes what is elementwise within the product that makes or reads it."""
    return place is not None and place.platform == "tpu"


def is_on_one_device(place: Place | None) -> bool:
    """Tells whether it is known that no array is split over devices."""
    return place is not None and place.device_count == 1


def kept_rows(rows: Rows, place: Place | None, chunk_rows: int | None = None) -> KeptRows | None:
    """Returns the rows whose label is not `SKIPPED`, first; None if they are taken as they lie.

    Rows stay as they lie without a place, on several devices, with symbolic sizes, with probabilities, and where they
    are a single chunk. A chunk has about `chunk_rows` of them. None: an eighth, and at least 512.
    """
    # To take rows in another order, a split array would have to move between devices, and probabilities are too large.
    labels, is_known = rows.labels, is_on_one_device(place) and not jax.export.is_symbolic_dim(rows.x.size)
    if not is_known or labels is None or rows.probabilities is not None:
        return None
    wanted = chunk_rows or max(SIZES.least_kept_rows, labels.size // SIZES.kept_chunks)
    steps = math.ceil(labels.size / wanted)
    if steps < 2:
        return None
    chunk_rows = math.ceil(labels.size / steps)
    is_kept = labels.reshape(-1) != SKIPPED
    order = jnp.argsort(~is_kept, stable=True).astype(jnp.int32)
    # Rows that fill up the last chunk have different positions past the end.
    fillers = labels.size + jnp.arange(-labels.size % chunk_rows, dtype=order.dtype)
    order, kept = jnp.concatenate([order, fillers]), jnp.sum(is_kept, dtype=jnp.int32)
    return KeptRows(is_kept, order, kept, chunk_rows, tuple(labels.shape), fuses(place))
