"""Takes the rows that count first, so that whole chunks of the others can be skipped."""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxops._primitive.sharding import varying_with
from jaxops.linear_cross_entropy.chunk_sizes import SIZES, on_all_devices
from jaxops.linear_cross_entropy.fold_rows import Step, filler, fold_rows
from jaxops.linear_cross_entropy.operands import SKIPPED, Rows
from lowering.operators import Place


class KeptRows(NamedTuple):
    """All rows in the order in which they are taken: those that count, the others, and fillers of the last chunk.

    Which steps run depends on the data, so nothing here can be differentiated in reverse mode.

    Attributes:
      is_kept: (rows,), which rows count, by position.
      order: (chunks * chunk_rows,), the position of each row; beyond the last row for fillers.
      kept: (), how many rows count.
      chunk_rows: the rows of a chunk.
      batch_shape: the batch axes.
    """

    is_kept: jax.Array
    order: jax.Array
    kept: jax.Array
    chunk_rows: int
    batch_shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """The number of rows."""
        return math.prod(self.batch_shape)

    def take(self, rows: Any, fills: Any = None) -> Any:
        """Takes (..., rest) in this order, as (chunks * chunk_rows, rest); pytrees."""
        fills = jax.tree.map(filler, rows) if fills is None else fills

        def taken(x: jax.Array, fill: float) -> jax.Array:
            return self._flat(x).at[self.order].get(mode="fill", fill_value=fill, unique_indices=True)

        return jax.tree.map(taken, rows, fills)

    def restore(self, results: Any) -> Any:
        """Computes the inverse of `take`. Where all rows count nothing moves, and vectors move in a sort.

        TPUs would gather them one by one.
        """
        positions = jnp.arange(len(self.order), dtype=self.order.dtype)
        leaves, structure = jax.tree.flatten(results)
        _, places, *vectors = jax.lax.sort(
            (self.order, positions, *(x for x in leaves if x.ndim == 1)), num_keys=1, is_stable=False
        )
        rest, moves = iter(vectors), (self.kept < self.size).astype(jnp.int32)

        def taken(x: jax.Array) -> jax.Array:
            return x.at[places[: self.size]].get(mode="promise_in_bounds", unique_indices=True)

        def restored(x: jax.Array) -> jax.Array:
            if x.ndim == 1:
                return next(rest)[: self.size]
            # A loop of one step or none, rather than a branch, so that rows that do not move stay where they are.
            return jax.lax.fori_loop(jnp.zeros_like(moves), moves, lambda _, x: taken(x), x[: self.size])

        in_place = (restored(x).reshape(*self.batch_shape, *x.shape[1:]) for x in leaves)
        return jax.tree.unflatten(structure, list(in_place))

    def fold(
        self, step: Step, sums: Any, results: Any, rows: Any, *, starts_unwritten: bool = False
    ) -> tuple[Any, Any]:
        """Calls `results, sums = step(sums, (results, rows))` on every chunk with a row that counts, all in this order.

        The other chunks keep their results. Rows behind the last one that counts in its chunk are computed as well.
        With `starts_unwritten`, sums start from 0 whatever they hold, and the first chunk is computed in any case.
        """

        def one(at: jax.Array, carry: tuple[Any, Any]) -> tuple[Any, Any]:
            results, sums = carry
            first = at * self.chunk_rows
            if starts_unwritten:
                sums = jax.tree.map(lambda x: jnp.where(at == 0, jnp.zeros_like(x), x), sums)
            part = functools.partial(jax.lax.dynamic_slice_in_dim, start_index=first, slice_size=self.chunk_rows)
            new, sums = step(sums, jax.tree.map(part, (results, rows)))
            results = jax.tree.map(
                lambda whole, part: jax.lax.dynamic_update_slice_in_dim(whole, part, first, 0), results, new
            )
            return results, sums

        chunks = jnp.maximum(-(-self.kept // self.chunk_rows), int(starts_unwritten))
        return jax.lax.fori_loop(jnp.zeros_like(chunks), chunks, one, (results, sums))

    def map(self, step: Step, sums: Any, rows: Any, *, starts_unwritten: bool = False) -> tuple[Any, Any]:
        """Calls `step` as `fold_rows` does; row results are 0 where a whole chunk is skipped.

        Vectors are taken first, and what is wider when its chunk is computed, so that it is not copied as a whole.
        """
        leaves, structure = jax.tree.flatten(rows)
        is_vector = [x.ndim == len(self.batch_shape) for x in leaves]
        taken = self.order, self._vectors([x for x, is_one in zip(leaves, is_vector, strict=True) if is_one])

        def gathering(sums: Any, chunk: Any) -> tuple[Any, Any]:
            _, (places, vectors) = chunk
            rest = iter(vectors)
            chunks = (
                next(rest)
                if is_one
                else self._flat(x).at[places].get(mode="fill", fill_value=filler(x), unique_indices=True)
                for x, is_one in zip(leaves, is_vector, strict=True)
            )
            return step(sums, jax.tree.unflatten(structure, list(chunks)))

        first = jax.eval_shape(lambda: jax.tree.map(lambda x: x[: self.chunk_rows], taken))
        shapes, _ = jax.eval_shape(gathering, sums, (None, first))
        results = jax.tree.map(lambda x: jnp.zeros((len(self.order), *x.shape[1:]), x.dtype), shapes)
        results, sums = varying_with((results, sums), rows)
        results, sums = self.fold(gathering, sums, results, taken, starts_unwritten=starts_unwritten)
        return self.restore(results), sums

    def _flat(self, x: jax.Array) -> jax.Array:
        return x.reshape(self.size, *x.shape[len(self.batch_shape) :])

    def _vectors(self, vectors: list[jax.Array]) -> list[jax.Array]:
        """Takes a value per row in this order, with fillers. TPUs gather such values one by one, and sort them fast."""
        _, *taken = jax.lax.sort((~self.is_kept, *(x.reshape(-1) for x in vectors)), num_keys=1)
        fillers = len(self.order) - self.size
        return [jnp.concatenate([x, jnp.full(fillers, filler(x), x.dtype)]) for x in taken]


def fold_kept_rows(
    step: Step,
    sums: Any,
    rows: tuple[Rows, Any],
    place: Place | None,
    chunk_rows: int | None,
    *,
    all_rows: bool,
    starts_unwritten: bool = False,
) -> tuple[Any, Any]:
    """Calls `step` as `fold_rows` does, for chunks on all devices, and without `all_rows` for the rows that count.

    With `starts_unwritten`, the sums of rows that are taken in another order start from 0, whatever they are.
    """
    kept = None if all_rows else kept_rows(rows[0], place, chunk_rows)
    if kept is None:
        batch, chunk_rows = rows[0].x.shape[:-1], on_all_devices(chunk_rows, place)
        if not is_on_one_device(place) or any(map(jax.export.is_symbolic_dim, batch)):
            return fold_rows(step, sums, rows, batch, chunk_rows)
        # A product over rows of several axes would copy the logits, to have them as rows of one.
        size = math.prod(batch)
        rows = jax.tree.map(lambda x: x.reshape(size, *x.shape[len(batch) :]), rows)
        results, sums = fold_rows(step, sums, rows, (size,), chunk_rows)
        return jax.tree.map(lambda x: x.reshape(*batch, *x.shape[1:]), results), sums
    if starts_unwritten:
        sums = jax.tree.map(lambda x: jax.lax.empty(x.shape, x.dtype), sums)
    return kept.map(step, sums, rows, starts_unwritten=starts_unwritten)


def is_on_one_device(place: Place | None) -> bool:
    """Tells whether it is known that no array is split over devices."""
    return place is not None and not place.is_split


def kept_rows(rows: Rows, place: Place | None, chunk_rows: int | None = None) -> KeptRows | None:
    """Returns the rows whose label is not `SKIPPED`, first; None if they are taken as they lie.

    Rows stay as they lie without a place, on several devices, with symbolic sizes, with probabilities, and where they
    are a single chunk.

    Args:
      rows: what each row has.
      place: where they are taken.
      chunk_rows: about how many rows are in a chunk. None: an eighth of them, and at least 512.
    """
    # To take rows in another order, a split array would have to move between devices, and probabilities are too large.
    if not is_on_one_device(place) or rows.labels is None or rows.probabilities is not None:
        return None
    if jax.export.is_symbolic_dim(rows.x.size):
        return None
    labels = rows.labels
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
    return KeptRows(is_kept, order, kept, chunk_rows, tuple(labels.shape))
