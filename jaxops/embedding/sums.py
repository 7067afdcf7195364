"""Sums of gradient rows by id, in float32 and rounded once, in the form that suits the platform.

    out[w] = sum of rows[r] over {r : ids[r] = w},   optionally divided by the number of its terms

On one device every form adds the rows of an id in a fixed order, so results are the same bit by bit in every run.
"""

from typing import Any

import jax
import jax.numpy as jnp

import lowering
from jaxops._checks.dtypes import accumulation_dtype


def sums_by_id(rows: jax.Array, ids: jax.Array, size: int, *, averaged: bool) -> jax.Array:
    """Sums (size, D), in the dtype of `rows`, of rows (..., D) with ids (...) in [0, size); other ids are dropped."""
    place = lowering.placement()
    is_symbolic = any(jax.export.is_symbolic_dim(extent) for extent in (*rows.shape, size))
    if place is None or place.is_split or is_symbolic or rows.size == 0:
        return _scattered(rows, ids, size, averaged)
    rows, ids = rows.reshape(-1, rows.shape[-1]), ids.reshape(-1)
    if place.platform == "cuda":
        return _by_run(rows, ids, size, averaged)
    if rows.dtype.itemsize < 4 and ids.size < size:
        return _by_owner(rows, ids, size, averaged)
    return _scattered(rows, ids, size, averaged)


def reciprocal(counts: jax.Array, dtype: Any) -> jax.Array:
    """1 / counts, and 1 where the count is 0."""
    return 1 / jnp.maximum(counts, 1).astype(dtype)


def _scattered(rows: jax.Array, ids: jax.Array, size: int, averaged: bool) -> jax.Array:
    """One scatter, which a mesh can split. CPUs scatter in order and at memory speed; TPUs scatter without atomics."""
    sums = jnp.zeros((size, rows.shape[-1]), accumulation_dtype(rows.dtype))
    sums = sums.at[ids].add(rows.astype(sums.dtype), mode="drop")
    if averaged:
        sums = sums * reciprocal(_counts(ids, size), sums.dtype)[:, None]
    return sums.astype(rows.dtype)


def _by_owner(rows: jax.Array, ids: jax.Array, size: int, averaged: bool) -> jax.Array:
    """Sums beside the rows, rounds there, and looks the sums up, so that nothing as large as the result is float32.

    One of the positions that hold an id owns it and collects the sum. Which one makes no difference.
    """
    positions = ids.size
    owner_of_id = jnp.full(size, positions, jnp.int32).at[ids].set(jnp.arange(positions, dtype=jnp.int32), mode="drop")
    owners = owner_of_id.at[ids].get(mode="fill", fill_value=positions)
    sums = _scattered(rows, owners, positions, averaged)
    return sums.at[owner_of_id].get(mode="fill", fill_value=0)


def _by_run(rows: jax.Array, ids: jax.Array, size: int, averaged: bool) -> jax.Array:
    """Sums runs of sorted ids: GPUs scatter with atomics, in any order, and very slowly in some versions of XLA.

    The scan has logarithmic depth, so an id that fills the batch takes no longer than many different ids.
    """
    ids, order = jax.lax.sort((ids, jnp.arange(ids.size, dtype=jnp.int32)), num_keys=1)
    rows_by_id = rows[order].astype(accumulation_dtype(rows.dtype))
    changes = ids[1:] != ids[:-1]
    edge = jnp.ones(1, bool)
    is_first, is_last = jnp.concatenate([edge, changes]), jnp.concatenate([changes, edge])

    def joined(before: Any, after: Any) -> Any:
        (sums, counts, starts), (next_sums, next_counts, next_starts) = before, after
        return (
            jnp.where(next_starts[:, None], next_sums, sums + next_sums),
            jnp.where(next_starts, next_counts, counts + next_counts),
            starts | next_starts,
        )

    sums, counts, _ = jax.lax.associative_scan(joined, (rows_by_id, jnp.ones(ids.size, jnp.int32), is_first))
    if averaged:
        sums = sums * reciprocal(counts, sums.dtype)[:, None]
    # Only the last element of a run has its sum; all others are dropped.
    destinations = jnp.where(is_last, ids, size)
    out = jnp.zeros((size, rows.shape[-1]), rows.dtype)
    return out.at[destinations].set(sums.astype(rows.dtype), mode="drop", unique_indices=True)


def _counts(ids: jax.Array, size: int) -> jax.Array:
    return jnp.zeros(size, jnp.int32).at[ids].add(1, mode="drop")
