"""Chunks of rows with their gradients on CPUs: tile by tile of columns, which stay in a cache.

XLA's CPU compiler writes what it computes of a chunk's logits before it multiplies them, and it stores a product before
it adds it to a sum. So the logits are read in tiles, and the gradient of the weight is added to, or written, in tiles.

The first chunks are taken at once. Until it is written, the gradient (V, H) has room for the logits of H rows, beside
those of one chunk: tile by tile they are computed and kept there, and read again before the gradient is written there.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp

import lowering
from jaxops._checks.dtypes import accumulation_dtype
from jaxops._primitive.derivative import Arrays
from jaxops._primitive.sharding import varying_with
from jaxops.linear_cross_entropy.column_tiles import Tile
from jaxops.linear_cross_entropy.logits import (
    Needs,
    RowStatistics,
    RowSums,
    RowWeights,
    Targets,
    cotangent_terms,
    linear_gradients,
    linear_logits,
    no_columns,
)
from jaxops.linear_cross_entropy.tiled import with_tile

# 2 MiB of float32, of the larger of a tile's logits and of its weight: they stay in a processor's cache.
_TILE_SIZE = 2**19
_LEAST_COLUMNS = 256
# With fewer, smaller tiles of more rows cost more than the sums that are saved.
_LEAST_CHUNKS_AT_ONCE = 3

_Carry = TypeVar("_Carry")


class Part(NamedTuple):
    """Some rows: their x (R, H), what their logits are compared with, and the weights of their losses' terms."""

    x: jax.Array
    targets: Targets
    by: RowWeights


def takes_tiles() -> bool:
    """Whether what is lowered now is for a CPU that has all columns."""
    place = lowering.placement()
    return place is not None and place.platform == "cpu" and not place.is_split


def parts_at_once(weight_grad: jax.Array, dtype: jax.typing.DTypeLike, chunk_rows: int, chunks: int) -> list[int]:
    """How many rows of at most so many chunks are taken at once: those kept in the gradient (V, H), and the others.

    Empty if one chunk after the other is as good, as where the gradient cannot hold logits of this dtype.
    """
    features = weight_grad.shape[1]
    chunks = min(chunks, 1 + features // chunk_rows)
    if not takes_tiles() or weight_grad.dtype != dtype or weight_grad.size == 0 or chunks < _LEAST_CHUNKS_AT_ONCE:
        return []
    rows = chunks * chunk_rows
    return [features, rows - features] if rows > features else [rows]


def _put(place: jax.Array, tile: Tile, logits: jax.Array) -> jax.Array:
    """Keeps the logits (R, tile's columns) in the first R of each column's features (V, H)."""
    # Not transposed, but in the same order in memory: a tile is written and read as a whole.
    return jax.lax.dynamic_update_slice(place, logits.reshape(tile.columns, len(logits)), (tile.first, 0))


def _get(place: jax.Array, tile: Tile, rows: int) -> jax.Array:
    return jax.lax.dynamic_slice(place, (tile.first, 0), (tile.columns, rows)).reshape(rows, tile.columns)


def _fold(step: Callable[[_Carry, Tile], _Carry], carry: _Carry, parts: Sequence[Part], weight: jax.Array) -> _Carry:
    """Calls `carry = step(carry, tile)` for tiles of columns that a cache holds, and for the few that are left.

    `column_tiles.fold_columns` is for columns that devices may share, and can be differentiated.
    """
    classes, features = weight.shape
    most = min(classes, max(_LEAST_COLUMNS, _TILE_SIZE // max(sum(len(part.x) for part in parts), features)))
    # The fewer are left, the less memory of their own they take.
    width = min(range(most, most * 3 // 4, -1), key=lambda width: classes % width)
    tiles, rest = divmod(classes, width)

    def varying(carry: _Carry, operands: Any) -> _Carry:
        leaves, structure = jax.tree.flatten(carry)
        return jax.tree.unflatten(structure, varying_with(leaves, jax.tree.leaves(operands)))

    def one(_: Any, carry: tuple[jax.Array, _Carry]) -> tuple[jax.Array, _Carry]:
        first, before = carry
        return first + width, varying(step(before, Tile(1, classes, width, first)), before)

    carry = varying(carry, (weight, parts))
    # What is left begins where the loop says: at a place that it knows, XLA would update a copy of a gradient.
    first, carry = jax.lax.fori_loop(0, tiles, one, (jnp.zeros((), jnp.int32), carry))
    return step(carry, Tile(1, classes, rest, first)) if rest else carry


def _in_tile(targets: Targets, tile: Tile) -> Targets:
    return targets._replace(labels=tile.local(targets.labels), shared=tile.of(targets.shared))


def with_gradients(
    parts: Sequence[Part],
    weight: jax.Array,
    bias: jax.Array,
    softcap: float | None,
    needs: Needs,
    weight_grad: jax.Array,
    *,
    metrics: bool,
    are_first: bool,
) -> tuple[list[RowStatistics], tuple[Arrays, Arrays]]:
    """The statistics of each part's rows, and the `linear_gradients` of all parts' losses, added to `weight_grad`.

    If they `are_first`, the parts have as many rows as `parts_at_once` says, and `weight_grad` is written over.
    """
    dtype = accumulation_dtype(weight.dtype)
    beside = [linear_logits(part.x, weight, bias, softcap) for part in parts[are_first:]]

    def add_logits(carry: tuple[jax.Array, list[RowSums]], tile: Tile) -> tuple[jax.Array, list[RowSums]]:
        kept, sums = carry
        logits = [tile.of(array, 1) for array in beside]
        if are_first:
            first = linear_logits(parts[0].x, tile.of(weight), tile.of(bias), softcap)
            kept, logits = _put(kept, tile, first), [first, *logits]
        of_parts = []
        for before, z, part in zip(sums, logits, parts, strict=True):
            targets = part.targets._replace(shared=tile.of(part.targets.shared))
            of_parts.append(with_tile(before, tile, z, targets, metrics=metrics))
        return kept, of_parts

    start = weight_grad, [no_columns(part.x.shape[:1], dtype) for part in parts]
    kept, sums = _fold(add_logits, start, parts, weight)
    statistics = [of_part.statistics for of_part in sums]
    terms = [cotangent_terms(part.by, part.targets, rows) for part, rows in zip(parts, statistics, strict=True)]

    def add_gradients(carry: Arrays, tile: Tile) -> Arrays:
        weight_grad, x_grad, *of_columns = carry
        logits = [tile.of(array, 1) for array in beside]
        sums: list[tuple[Any, ...]] = []
        if are_first:
            logits = [_get(weight_grad, tile, len(parts[0].x)), *logits]
        elif needs.weight:
            sums = [(tile.of(weight_grad).astype(dtype), 0, 0)]
        first = 0
        for part, of_part, z in zip(parts, terms, logits, strict=True):
            linear = part.x, tile.of(weight), _in_tile(part.targets, tile), z, softcap
            (of_x, _), new = linear_gradients(of_part, *linear, needs)
            x_grad = x_grad.at[first : first + len(part.x)].add(of_x)
            sums.append(new)
            first += len(part.x)
        totals = (functools.reduce(jnp.add, of_parts) for of_parts in zip(*sums, strict=True))
        places = zip((weight_grad, *of_columns), totals, strict=True)
        weight_grad, *of_columns = (tile.put(place, total.astype(place.dtype)) for place, total in places)
        return weight_grad, x_grad, *of_columns

    rows, shared = sum(len(part.x) for part in parts), parts[0].targets.shared
    shapes = (rows, weight.shape[1] if needs.x else 0), bias.size if needs.bias else 0
    zeros = (jnp.zeros(shape, dtype) for shape in (*shapes, shared.size if needs.shared_target else 0))
    weight_grad, x_grad, *others = _fold(add_gradients, (kept, *zeros), parts, weight)
    return statistics, ((x_grad, jnp.zeros((rows, 0), dtype)), (weight_grad, *others))
