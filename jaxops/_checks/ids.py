"""Ids of classes and rows, whatever integer dtype users keep them in."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def wide_dtype(dtype: Any) -> Any:
    """The dtype of `wide_ids` for ids of a dtype."""
    return jnp.dtype(jnp.int64 if dtype.itemsize == 8 else jnp.int32)


def wide_ids(ids: jax.Array) -> jax.Array:
    """Ids in a signed dtype that holds any number of classes. What does not fit becomes negative, so out of range."""
    return ids.astype(wide_dtype(ids.dtype))


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
