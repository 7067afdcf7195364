"""Computes something for all rows, a chunk of them at a time, without moving rows between devices."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxops._primitive.sharding import varying_with
from jaxops.linear_cross_entropy.operands import SKIPPED

# `results, sums = step(sums, rows)`: results begin with the batch axes, sums lack them. All are pytrees of arrays.
Step = Callable[[Any, Any], tuple[Any, Any]]


def filler(rows: jax.Array) -> int:
    """Returns what fills up a chunk's rows: labels, the integers, say that such rows do not count."""
    # Label 0 would do harm where the bias forbids that class: its loss is infinite, and times a weight of 0 not 0.
    return SKIPPED if jnp.issubdtype(rows.dtype, jnp.integer) else 0


def fold_rows(
    step: Step, sums: Any, rows: Any, batch_shape: Sequence[int], chunk_rows: int | None, fills: Any = None
) -> tuple[Any, Any]:
    """Calls `results, sums = step(sums, chunk of rows)` for each chunk; returns all results and the sums.

    A batch axis of n * c positions is split into n parts of c positions, and step j takes position j of every part. So
    if contiguous blocks of an axis lie on different devices, the same holds in every chunk, and nothing is gathered.

    Args:
      step: takes and returns the sums so far.
      sums: those before the first step.
      rows: a pytree of arrays that begin with the batch axes.
      batch_shape: the batch axes.
      chunk_rows: about how many rows are in a chunk; None takes all at once.
      fills: a pytree like `rows` of the values that fill up the last rows if an axis does not split evenly; None takes
        `filler`. The sums must not depend on such rows.
    """
    splits = _splits(batch_shape, chunk_rows)
    if math.prod(splits) == 1:
        return step(sums, rows)
    fills = jax.tree.map(filler, rows) if fills is None else fills
    parts = jax.tree.map(lambda x, fill: _split(x, splits, fill), rows, fills)

    def one(sums: Any, at: jax.Array) -> tuple[Any, Any]:
        results, sums = step(sums, jax.tree.map(lambda x: _chunk(x, splits, at), parts))
        return sums, results

    # Differentiated again, every step would keep its logits, together just what the chunks are there to avoid.
    one = jax.checkpoint(one, prevent_cse=False)
    sums, results = jax.lax.scan(one, varying_with(sums, rows), jnp.arange(math.prod(splits)))
    return jax.tree.map(lambda x: _join(x, splits, batch_shape), results), sums


def _splits(batch_shape: Sequence[int], chunk_rows: int | None) -> tuple[int, ...]:
    """Returns how many steps split each batch axis, the last axis first: users split the first over devices."""
    if any(jax.export.is_symbolic_dim(size) for size in batch_shape):
        return (1,) * len(batch_shape)
    rows = math.prod(batch_shape)
    steps = max(1, math.ceil(rows / chunk_rows)) if chunk_rows else 1
    splits: list[int] = []
    for size in reversed(batch_shape):
        wanted = max(1, min(steps, size))
        even = (count for count in range(wanted, min(2 * wanted, size + 1)) if size % count == 0)
        splits.append(next(even, wanted))
        steps = math.ceil(steps / splits[-1])
    return tuple(reversed(splits))


def _split(array: jax.Array, splits: tuple[int, ...], fill: float) -> jax.Array:
    """Splits (n1 * c1, n2 * c2, ..., rest) -> (n1, c1, n2, c2, ..., rest), which moves nothing if it splits evenly."""
    rest = array.shape[len(splits) :]
    parts = tuple(math.ceil(size / count) for size, count in zip(array.shape, splits, strict=False))
    missing = [(0, n * c - size) for n, c, size in zip(parts, splits, array.shape, strict=False)]
    if any(after for _, after in missing):
        array = jnp.pad(array, [*missing, *((0, 0),) * len(rest)], constant_values=jnp.asarray(fill, array.dtype))
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
