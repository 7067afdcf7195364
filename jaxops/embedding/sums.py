"""Sums of gradient rows by id, in float32 and rounded once.

    out[w] = sum of rows[r] over {r : ids[r] = w},   optionally divided by the number of its terms

Each function takes rows (..., D) and ids (...) in [0, size), drops other ids, and returns sums (size, D) in the dtype
of the rows. On one device each adds the rows of an id in a fixed order, so results are the same bit by bit in every
run.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jaxops._checks.dtypes import accumulation_dtype


def reciprocal(counts: jax.Array, dtype: Any) -> jax.Array:
    """Computes 1 / counts, and 1 where the count is 0."""
    return 1 / jnp.maximum(counts, 1).astype(dtype)


def scattered(rows: jax.Array, ids: jax.Array, size: int, *, averaged: bool) -> jax.Array:
    """Sums by one scatter, which a mesh can split. CPUs scatter in order and at memory speed, TPUs without atomics."""
    sums = jnp.zeros((size, rows.shape[-1]), accumulation_dtype(rows.dtype))
    sums = sums.at[ids].add(rows.astype(sums.dtype), mode="drop")
    if averaged:
        sums = sums * reciprocal(_counts(ids, size), sums.dtype)[:, None]
    return sums.astype(rows.dtype)


def scattered_flat(rows: jax.Array, ids: jax.Array, size: int, *, averaged: bool) -> jax.Array:
    """Sums by one scatter of rows that lie along a single axis, which no mesh could split."""
    return scattered(*_in_one_batch(rows, ids), size, averaged=averaged)


def by_owner(rows: jax.Array, ids: jax.Array, size: int, *, averaged: bool) -> jax.Array:
    """Sums beside the rows, rounds there, and looks the sums up, so that nothing as large as the result is float32.

    One of the positions that hold an id owns it and collects the sum. Which one makes no difference.
    """
    rows, ids = _in_one_batch(rows, ids)
    positions = ids.size
    owner_of_id = jnp.full(size, positions, jnp.int32).at[ids].set(jnp.arange(positions, dtype=jnp.int32), mode="drop")
    owners = owner_of_id.at[ids].get(mode="fill", fill_value=positions)
    sums = scattered(rows, owners, positions, averaged=averaged)
    return sums.at[owner_of_id].get(mode="fill", fill_value=0)


def by_run(rows: jax.Array, ids: jax.Array, size: int, *, averaged: bool) -> jax.Array:
    """Sums runs of sorted ids: GPUs scatter with atomics, in any order, and very slowly in some versions of XLA.

    The scan has logarithmic depth, so an id that fills the batch takes no longer than many different ids.
    """
    rows, ids = _in_one_batch(rows, ids)
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


def _in_one_batch(rows: jax.Array, ids: jax.Array) -> tuple[jax.Array, jax.Array]:
    return rows.reshape(-1, rows.shape[-1]), ids.reshape(-1)


def _counts(ids: jax.Array, size: int) -> jax.Array:
    return jnp.zeros(size, jnp.int32).at[ids].add(1, mode="drop")
