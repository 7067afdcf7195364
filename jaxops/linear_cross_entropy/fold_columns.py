"""Computes something for all columns of the logits, a tile at a time, without moving columns between devices."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxops._checks.dtypes import accumulation_dtype
from jaxops._primitive.sharding import varying_with
from jaxops.linear_cross_entropy.chunk_sizes import SIZES
from jaxops.linear_cross_entropy.operands import Columns, Rows
from jaxops.linear_cross_entropy.rounded_products import product
from jaxops.linear_cross_entropy.row_statistics import RowSums


class Tile(NamedTuple):
    """Columns of the logits: `width` positions, starting at `first`, of each of the vocabulary's `parts` parts.

    If contiguous blocks of the vocabulary lie on different devices, the same holds in every tile.
    """

    parts: int
    part_columns: int
    width: int
    first: jax.Array | int

    @property
    def is_whole(self) -> bool:
        """Tells whether the tile has all columns."""
        return self.width == self.part_columns

    def of(self, array: jax.Array, axis: int = 0) -> jax.Array:
        """Returns the tile's part of an array with all columns along `axis`."""
        if self.is_whole:
            return array
        taken = jax.lax.dynamic_slice_in_dim(self._by_part(array, axis), self.first, self.width, axis + 1)
        return taken.reshape(*array.shape[:axis], self.parts * self.width, *array.shape[axis + 1 :])

    def put(self, array: jax.Array, values: jax.Array, axis: int = 0) -> jax.Array:
        """Returns the array with the tile's part replaced."""
        if self.is_whole:
            return values
        values = values.reshape(*array.shape[:axis], self.parts, self.width, *array.shape[axis + 1 :])
        by_part = self._by_part(array, axis)
        return jax.lax.dynamic_update_slice_in_dim(by_part, values, self.first, axis + 1).reshape(array.shape)

    def columns(self, columns: Columns) -> Columns:
        """Returns the tile's part of what each column has."""
        return jax.tree.map(self.of, columns)

    def rows(self, rows: Rows) -> Rows:
        """Returns what each row has, of this tile: labels of other tiles become -1."""
        labels = rows.labels
        if labels is not None and not self.is_whole:
            part, position = labels // self.part_columns, labels % self.part_columns - self.first
            is_inside = (labels >= 0) & (part < self.parts) & (position >= 0) & (position < self.width)
            # Not `SKIPPED`: such a row has a label in another tile, so its x counts in this one, too.
            labels = jnp.where(is_inside, part * self.width + position, -1).astype(labels.dtype)
        probabilities = rows.probabilities
        if probabilities is not None:
            probabilities = self.of(probabilities, probabilities.ndim - 1)
        return rows._replace(labels=labels, probabilities=probabilities)

    def sums(self, sums: RowSums) -> RowSums:
        """Returns the sums over the tile's columns, with predictions that count all columns."""
        if sums.prediction is None or self.is_whole:
            return sums
        # The tile's columns are no neighbours in the vocabulary: each part has `width` of them.
        at = sums.prediction
        at = at // self.width * self.part_columns + at % self.width + self.first
        return sums._replace(prediction=at.astype(sums.prediction.dtype))

    def _by_part(self, array: jax.Array, axis: int) -> jax.Array:
        return array.reshape(*array.shape[:axis], self.parts, self.part_columns, *array.shape[axis + 1 :])


def parts_of(vocabulary: int) -> int:
    """Returns into how many parts a vocabulary is cut so that devices that share it need nothing from each other."""
    return math.gcd(vocabulary, SIZES.vocabulary_parts)


def fold_columns(
    step: Callable[[Any, Tile], Any], carry: Any, vocabulary: int, tile_columns: int | None, parts: int
) -> Any:
    """Calls `carry = step(carry, tile)` for tiles of about `tile_columns` columns; None takes all at once.

    Every step is a checkpoint: differentiated again, the steps would otherwise keep their logits, just what tiles
    avoid.
    """
    if tile_columns is None or jax.export.is_symbolic_dim(vocabulary) or tile_columns >= vocabulary:
        return step(carry, Tile(1, vocabulary, vocabulary, 0))
    part_columns = vocabulary // parts
    wanted = max(1, min(part_columns, math.ceil(vocabulary / tile_columns)))
    # A few more tiles than wanted are better than a rest, for which the step would be compiled a second time.
    even = (count for count in range(wanted, min(2 * wanted, part_columns + 1)) if part_columns % count == 0)
    width = math.ceil(part_columns / next(even, wanted))
    whole_tiles = part_columns // width

    def one(state: tuple[jax.Array, Any], _: None) -> tuple[tuple[jax.Array, Any], None]:
        first, carry = state
        return (first + width, varying_with(step(carry, Tile(parts, part_columns, width, first)), carry)), None

    state = jnp.zeros((), jnp.int32), carry
    (first, carry), _ = jax.lax.scan(jax.checkpoint(one, prevent_cse=False), state, length=whole_tiles)
    rest = part_columns - whole_tiles * width
    if rest:
        # What is left begins where the loop says: at a place that it knows, XLA would update a copy of a gradient.
        carry = jax.checkpoint(lambda first, carry: step(carry, Tile(parts, part_columns, rest, first)))(first, carry)
    return carry


def added_in_blocks(total: jax.Array, cotangent: jax.Array, x: jax.Array, factor: jax.Array | None = None) -> jax.Array:
    """Adds a product to a sum (V, H), a block at a time: XLA's CPU compiler stores a product before it adds it."""
    vocabulary, features = total.shape
    rows = math.prod(x.shape[:-1])
    width = min(vocabulary, max(SIZES.least_columns, SIZES.block // max(1, features, rows)))

    def add(step: jax.Array, total: jax.Array) -> jax.Array:
        # If the blocks do not fit evenly, the last one overlaps the one before; what is not new is masked.
        first = jnp.minimum(step * width, vocabulary - width)
        block = Tile(1, vocabulary, width, first)
        part = block.of(cotangent, x.ndim - 1)
        is_new = first + jnp.arange(part.shape[-1], dtype=first.dtype) >= step * width
        part = jnp.where(is_new, part, jnp.zeros_like(part))
        old, dtype = block.of(total), accumulation_dtype(total.dtype)
        terms = product(part, x, dtype, factor)
        # A sum that is kept in 16 bits is rounded once for each product, after the addition.
        return block.put(total, (old.astype(dtype) + terms).astype(old.dtype))

    return jax.lax.fori_loop(0, math.ceil(vocabulary / width), add, total)
