"""Ids of classes and rows, whatever integer dtype users keep them in."""

import jax
import jax.numpy as jnp


def wide_ids(ids: jax.Array) -> jax.Array:
    """Ids in a signed dtype that holds any number of classes. What does not fit becomes negative, so out of range."""
    if ids.dtype == jnp.int64:
        return ids
    return ids.astype(jnp.int64 if ids.dtype.itemsize == 8 else jnp.int32)
