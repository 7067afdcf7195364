"""Ids of classes and rows, whatever integer dtype users keep them in."""

import jax
import jax.numpy as jnp
import numpy as np


def wide_ids(ids: jax.Array) -> jax.Array:
    """Ids in a signed dtype that holds any number of classes. What does not fit becomes negative, so out of range."""
    if ids.dtype == jnp.int64:
        return ids
    return ids.astype(jnp.int64 if ids.dtype.itemsize == 8 else jnp.int32)


def differ_from(ids: jax.Array, one: int) -> jax.Array:
    """Where ids are not this one, which their dtype may be unable to hold."""
    limits = jnp.iinfo(ids.dtype)
    if not limits.min <= one <= limits.max:
        return jnp.ones_like(ids, dtype=bool)
    # In the ids' own dtype: JAX would take a Python number as a signed one, which may not hold it.
    return ids != np.asarray(one, ids.dtype)


def ids_of_part(ids: jax.Array, size: int, axis_name: str) -> tuple[jax.Array, jax.Array]:
    """Ids as counted from the first of the `size` that this device has, -1 where it has them not; and where it has."""
    ids = wide_ids(ids)
    start = (jax.lax.axis_index(axis_name) * size).astype(ids.dtype)
    is_here = (ids >= start) & (ids < start + size)
    return jnp.where(is_here, ids - start, -jnp.ones_like(ids)), is_here
