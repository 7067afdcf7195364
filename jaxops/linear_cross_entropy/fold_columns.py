"""Computes something for all columns of the logits, a tile at a time, without moving columns between devices.

Sums over several sets of columns, of tiles or of devices, are merged.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxops._checks.dtypes import accumulation_dtype
from jaxops._primitive.sharding import varying_with
from jaxops.linear_cross_entropy.chunk_sizes import SIZES, columns_of_tile
from jaxops.linear_cross_entropy.fold_rows import KeptRows, even_steps, fuses, is_on_one_device
from jaxops.linear_cross_entropy.operands import Columns, Rows
from jaxops.linear_cross_entropy.row_statistics import RowSums, finite
from lowering.operators import Place


class Tile(NamedTuple):
    """Columns of the logits: `width` positions, starting at `first`, of each of the vocabulary's `parts` parts.

    If contiguous blocks of the vocabulary lie on different devices, the same holds in every tile.
    """

    parts: int
    part_columns: int
    width: int
    first: jax.Array | int

    def of(self, array: jax.Array, axis: int = 0) -> jax.Array:
        """Returns the tile's part of an array with all columns along `axis`."""
        taken = jax.lax.dynamic_slice_in_dim(self._by_part(array, axis), self.first, self.width, axis + 1)
        return taken.reshape(*array.shape[:axis], self.parts * self.width, *array.shape[axis + 1 :])

    def put(self, array: jax.Array, values: jax.Array, axis: int = 0) -> jax.Array:
        """Returns the array with the tile's part replaced."""
        shape = *array.shape[:axis], self.parts, self.width, *array.shape[axis + 1 :]
        values = values.astype(array.dtype).reshape(shape)
        by_part = self._by_part(array, axis)
        return jax.lax.dynamic_update_slice_in_dim(by_part, values, self.first, axis + 1).reshape(array.shape)

    def rows(self, rows: Rows) -> Rows:
        """Returns what each row has, of this tile: labels of other tiles become -1."""
        labels = rows.labels
        if labels is not None:
            part, position = labels // self.part_columns, labels % self.part_columns - self.first
            is_inside = (labels >= 0) & (part < self.parts) & (position >= 0) & (position < self.width)
            # Not `SKIPPED`: such a row has a label in another tile, so its x counts in this one, too.
            labels = jnp.where(is_inside, part * self.width + position, -1)
        probabilities = jax.tree.map(lambda x: self.of(x, x.ndim - 1), rows.probabilities)
        return rows._replace(labels=labels, probabilities=probabilities)

    def sums(self, sums: RowSums) -> RowSums:
        """Returns the sums over the tile's columns, with predictions that count all columns."""
        if sums.prediction is None:
            return sums
        # The tile's columns are no neighbours in the vocabulary: each part has `width` of them.
        at = sums.prediction
        at = at // self.width * self.part_columns + at % self.width + self.first
        return sums._replace(prediction=at.astype(sums.prediction.dtype))

    def _by_part(self, array: jax.Array, axis: int) -> jax.Array:
        return array.reshape(*array.shape[:axis], self.parts, self.part_columns, *array.shape[axis + 1 :])


def fold_columns(
    step: Callable[[Tile, Columns, Any, Any], tuple[Any, Any]],
    of_rows: Any,
    of_columns: Any,
    rows: Any,
    columns: Columns,
    chunk_rows: int | None,
    kept: KeptRows | None,
    place: Place | None,
) -> tuple[Any, Any]:
    """Calls `of_rows, sums = step(tile, columns in the tile, sums, (of_rows, rows))` for tiles of columns.

    `columns_of_tile` says how many columns a tile has, of all rows or of a chunk of those that are kept. The sums start
    from 0 in the dtype of losses. With a tile's they are complete and are written to `of_columns`, rounded once. Every
    step is a checkpoint: differentiated again, the steps would otherwise keep their logits, just what tiles avoid.
    """
    vocabulary, dtype = columns.weight.shape[0], accumulation_dtype(columns.weight.dtype)

    def add_tile(carry: tuple[Any, Any], tile: Tile) -> tuple[Any, Any]:
        of_rows, of_columns = carry
        add = functools.partial(step, tile, jax.tree.map(tile.of, columns))
        sums = jax.tree.map(lambda x: jnp.zeros_like(tile.of(x), dtype), of_columns)
        of_rows, sums = add(sums, (of_rows, rows)) if kept is None else kept.fold(add, sums, of_rows, rows)
        return of_rows, jax.tree.map(tile.put, of_columns, sums)

    carry = varying_with((of_rows, of_columns), (rows, columns))
    count = math.prod(jax.tree.leaves(rows)[0].shape[:-1])
    all_rows, at_once = (count, count) if kept is None else (kept.is_kept.size, kept.chunk_rows)
    tile_logits = SIZES.tile_logits
    if fuses(place) and of_columns is None:
        all_rows, tile_logits = at_once, SIZES.fused_logits  # a tile writes nothing of its own
    tile_columns = columns_of_tile(all_rows, at_once, columns.weight.shape, chunk_rows, tile_logits)
    if tile_columns is None or tile_columns >= vocabulary:
        return add_tile(carry, Tile(1, vocabulary, vocabulary, 0))
    # Devices that share a vocabulary need nothing from each other if it is cut into parts. On a single device, nothing
    # can move between devices, and neighbouring columns are read as one piece.
    parts = 1 if is_on_one_device(place) else math.gcd(vocabulary, SIZES.vocabulary_parts)
    part_columns = vocabulary // parts
    # A few more tiles than asked for are better than a rest, for which the step would be compiled a second time.
    width = math.ceil(part_columns / even_steps(part_columns, math.ceil(vocabulary / tile_columns)))
    whole_tiles = part_columns // width

    def one(state: tuple[jax.Array, Any], _: None) -> tuple[tuple[jax.Array, Any], None]:
        first, carry = state
        return (first + width, varying_with(add_tile(carry, Tile(parts, part_columns, width, first)), carry)), None

    state = jnp.zeros((), jnp.int32), carry
    (first, carry), _ = jax.lax.scan(jax.checkpoint(one, prevent_cse=False), state, length=whole_tiles)
    rest = part_columns - whole_tiles * width
    if rest:
        # What is left begins where the loop says: at a place that it knows, XLA would update a copy of a gradient.
        last = jax.checkpoint(lambda first, carry: add_tile(carry, Tile(parts, part_columns, rest, first)))
        carry = last(first, carry)
    return carry


def merged(parts: RowSums, axis: str | None = None) -> RowSums:
    """Merges the sums over disjoint columns, along the arrays' first axis or a mesh axis; predictions count all."""
    of_arrays, of_devices = (jnp.max, jnp.sum, jnp.min), (jax.lax.pmax, jax.lax.psum, jax.lax.pmin)
    if axis is None:
        largest, total, least = (functools.partial(reduction, axis=0, keepdims=True) for reduction in of_arrays)
        index: Any = jax.lax.broadcasted_iota(jnp.int32, parts.max_logit.shape, 0)
    else:
        largest, total, least = (functools.partial(reduction, axis_name=axis) for reduction in of_devices)
        index = jax.lax.axis_index(axis)
    sum_exp = parts.sum_exp
    is_empty = sum_exp == 0
    maxima = jnp.where(is_empty, -jnp.inf, jax.lax.stop_gradient(parts.max_logit))
    top = jax.lax.stop_gradient(largest(maxima))
    maximum = finite(top)
    shift = jnp.where(is_empty, jnp.zeros_like(maxima), maxima - maximum)
    share = jnp.exp(shift)
    # The first part that has the maximum counts without the 1 that this adds.
    first = least(jnp.where(maxima == top, index, jnp.iinfo(jnp.int32).max))
    sums = RowSums(maximum, total(jnp.where(index == first, parts.less_one, share * sum_exp)))
    if parts.label_logit is not None and parts.has_label is not None:
        # Not has_label times shift: the label's logit may be -inf.
        label_logit = jnp.where(parts.has_label > 0, parts.label_logit + shift, jnp.zeros_like(shift))
        sums = sums._replace(label_logit=total(label_logit), has_label=total(parts.has_label))
    if parts.target_logit is not None and parts.target_total is not None:
        target_logit = total(parts.target_logit + parts.target_total * shift)
        sums = sums._replace(target_logit=target_logit, target_total=total(parts.target_total))
    if parts.weighted_logit is not None and parts.prediction is not None:
        weighted = total(share * (parts.weighted_logit + shift * sum_exp))
        # Of equal maxima, the first counts.
        candidates = jnp.where(maxima == top, parts.prediction, jnp.iinfo(jnp.int32).max)
        sums = sums._replace(weighted_logit=weighted, prediction=least(candidates))
    return sums if axis is not None else jax.tree.map(lambda x: x[0], sums)
