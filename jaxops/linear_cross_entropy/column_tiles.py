"""Computes something for all columns of the logits, a tile at a time, without moving columns between devices."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import lowering
from jaxops._checks.dtypes import accumulation_dtype
from jaxops._primitive.derivative import Arrays
from jaxops._primitive.sharding import varying_with

# With fewer columns, matrix products are too small to be fast.
_LEAST_COLUMNS = 256
# 1 MiB of float32 logits: they stay in a processor's cache between the steps that read them.
_TILE_LOGITS = 2**18
# Under jit, a vocabulary may lie on up to this many devices without being moved. More parts would be shorter than the
# units in which memory is laid out.
_PARTS = 16
# A block of a weight gradient, in elements: it stays in a processor's cache while it is added to.
_BLOCK_SIZE = 2**20


class Tile(NamedTuple):
    """Columns of the logits: `width` positions, starting at `first`, of each of the vocabulary's `parts` parts.

    If contiguous blocks of the vocabulary lie on different devices, the same holds in every tile.
    """

    parts: int
    part_columns: int
    width: int
    first: jax.Array | int

    @property
    def columns(self) -> int:
        """How many columns the tile has."""
        return self.parts * self.width

    def of(self, array: jax.Array, axis: int = 0) -> jax.Array:
        """The tile's part of an array with all columns along `axis`; an absent operand has none and is returned."""
        if self.width == self.part_columns or array.shape[axis] == 0:
            return array
        by_part = self._by_part(array, axis)
        taken = jax.lax.dynamic_slice_in_dim(by_part, self.first, self.width, axis + 1)
        return taken.reshape(*array.shape[:axis], self.columns, *array.shape[axis + 1 :])

    def put(self, array: jax.Array, values: jax.Array, axis: int = 0) -> jax.Array:
        """The array with the tile's part replaced."""
        if self.width == self.part_columns or array.shape[axis] == 0:
            return values
        by_part = self._by_part(array, axis)
        values = values.reshape(*array.shape[:axis], self.parts, self.width, *array.shape[axis + 1 :])
        return jax.lax.dynamic_update_slice_in_dim(by_part, values, self.first, axis + 1).reshape(array.shape)

    def local(self, labels: jax.Array) -> jax.Array:
        """The tile's columns of labels; -1 for labels in other tiles and for those that are not columns."""
        if self.width == self.part_columns:
            return labels
        part, position = labels // self.part_columns, labels % self.part_columns - self.first
        is_inside = (labels >= 0) & (part < self.parts) & (position >= 0) & (position < self.width)
        return jnp.where(is_inside, part * self.width + position, -1).astype(labels.dtype)

    def precedes(self, labels: jax.Array) -> jax.Array:
        """Where labels are columns of an earlier tile."""
        is_column = (labels >= 0) & (labels < self.parts * self.part_columns)
        return is_column & (labels % self.part_columns < self.first)

    def global_columns(self, columns: jax.Array) -> jax.Array:
        """The vocabulary's columns for columns of the tile."""
        if self.width == self.part_columns:
            return columns
        return (columns // self.width * self.part_columns + columns % self.width + self.first).astype(columns.dtype)

    def _by_part(self, array: jax.Array, axis: int) -> jax.Array:
        return array.reshape(*array.shape[:axis], self.parts, self.part_columns, *array.shape[axis + 1 :])


def default_tile_logits(rows: Any, features: int) -> int:
    """How many logits a tile has, over all rows: enough that reading and writing the rows' feature sums is cheap."""
    if jax.export.is_symbolic_dim(rows * features):
        return _TILE_LOGITS
    return max(_TILE_LOGITS, rows * max(_LEAST_COLUMNS, features // 2))


def tile_columns(rows: Any, weight_shape: tuple[int, ...], tile_logits: int | None) -> int | None:
    """How many columns of all `rows` have about `tile_logits` logits; None for all columns."""
    vocabulary, features = weight_shape
    if tile_logits is None or jax.export.is_symbolic_dim(vocabulary):
        return None
    if jax.export.is_symbolic_dim(rows):
        return max(_LEAST_COLUMNS, features // 2)
    return math.ceil(tile_logits / max(1, rows))


def fold_columns(
    step: Callable[[Arrays, Tile], Arrays], start: Arrays, vocabulary: int, tile_columns: int | None
) -> Arrays:
    """Calls `carry = step(carry, tile)` for tiles of about `tile_columns` columns; None takes all at once.

    Every step is a checkpoint: differentiated again, the steps would otherwise keep their logits, just what tiles
    avoid.
    """
    if tile_columns is None or jax.export.is_symbolic_dim(vocabulary) or tile_columns >= vocabulary:
        return step(start, Tile(1, vocabulary, vocabulary, 0))
    parts = _parts(vocabulary)
    part_columns = vocabulary // parts
    wanted = max(1, min(part_columns, math.ceil(vocabulary / tile_columns)))
    even = (count for count in range(wanted, min(2 * wanted, part_columns + 1)) if part_columns % count == 0)
    width = math.ceil(part_columns / next(even, wanted))
    whole_tiles = part_columns // width

    def one(carry: Arrays, first: Any) -> tuple[Arrays, None]:
        return varying_with(step(carry, Tile(parts, part_columns, width, first)), carry), None

    carry, _ = jax.lax.scan(
        jax.checkpoint(one, prevent_cse=False), start, width * jnp.arange(whole_tiles, dtype=jnp.int32)
    )
    rest = part_columns - whole_tiles * width
    if rest:
        last = Tile(parts, part_columns, rest, whole_tiles * width)
        carry = jax.checkpoint(lambda carry: tuple(step(carry, last)))(carry)
    return carry


def add_product(
    total: jax.Array, logits_cotangent: jax.Array, x: jax.Array, factor: jax.Array | None = None
) -> jax.Array:
    """Adds to total (V, H) the product of (..., V) and (..., H) over all rows, and rounds to total's dtype.

    A factor, (), multiplies the product.
    """
    batch = tuple(range(x.ndim - 1))

    def product(columns: jax.Array, dtype: Any) -> jax.Array:
        terms = jnp.tensordot(columns, x, axes=(batch, batch), preferred_element_type=dtype)
        return terms if factor is None else factor * terms

    place = lowering.placement()
    if place is None or place.platform != "cpu" or jax.export.is_symbolic_dim(total.size):
        # Compilers for GPUs and TPUs add within the product, and move a sum over devices out of a loop.
        return total + product(logits_cotangent, total.dtype)

    # XLA's CPU compiler stores the product before it adds it. So only a block of it is computed at a time.
    vocabulary, features = total.shape
    parts = _parts(vocabulary)
    part_columns = vocabulary // parts
    width = min(part_columns, math.ceil(max(_LEAST_COLUMNS, _BLOCK_SIZE // max(1, features)) / parts))

    def add(step: jax.Array, total: jax.Array) -> jax.Array:
        # If the blocks do not fit evenly, the last one overlaps the one before; what is not new is masked.
        first = jnp.minimum(step * width, part_columns - width)
        block = Tile(parts, part_columns, width, first)
        columns = block.of(logits_cotangent, x.ndim - 1)
        is_new = first + jnp.arange(columns.shape[-1], dtype=first.dtype) % width >= step * width
        columns = jnp.where(is_new, columns, jnp.zeros_like(columns))
        old, dtype = block.of(total), accumulation_dtype(total.dtype)
        return block.put(total, (old.astype(dtype) + product(columns, dtype)).astype(old.dtype))

    return jax.lax.fori_loop(0, math.ceil(part_columns / width), add, total)


def _parts(vocabulary: int) -> int:
    """Into how many parts a vocabulary is cut so that devices that share it need nothing from each other."""
    place = lowering.placement()
    return 1 if place is not None and not place.is_split else math.gcd(vocabulary, _PARTS)
