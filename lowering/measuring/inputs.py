"""Makes up arrays to run a computation on when only shapes and dtypes are known."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp


def made_up(types: Sequence[Any], attributes: Sequence[Any] = ()) -> list[jax.Array]:
    """Makes random arrays of these shapes and dtypes, the same in every call.

    Floats lie in [0.1, 1), where square roots and logarithms are defined. Integers may be indices into an axis of
    another array, or below a size that is an attribute, so they lie in [0, the smallest of these sizes).
    """
    keys = jax.random.split(jax.random.key(0), max(1, len(types)))
    arrays = []
    for position, (x, key) in enumerate(zip(types, keys, strict=False)):
        others = [*types[:position], *types[position + 1 :]]
        sizes = [size for other in others for size in _without_batch(other.shape, x.shape)]
        arrays.append(_made_up(x, key, [*sizes, *(size for size in attributes if isinstance(size, int))]))
    return arrays


def _without_batch(shape: Sequence[int], indices_shape: Sequence[int]) -> Sequence[int]:
    """Returns the sizes that indices may refer to: without axes that both share, except for a vector of indices."""
    rank = len(indices_shape)
    return shape[rank:] if rank >= 2 and tuple(shape[:rank]) == tuple(indices_shape) else shape


def _made_up(x: Any, key: jax.Array, sizes: Sequence[int]) -> jax.Array:
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return jax.random.split(key, x.shape)
    if x.dtype == bool:
        return jax.random.bernoulli(key, shape=x.shape)
    if jnp.issubdtype(x.dtype, jnp.integer):
        bound = min([size for size in sizes if size > 1], default=2)
        return jax.random.randint(key, x.shape, 0, min(bound, jnp.iinfo(x.dtype).max), x.dtype)
    drawn = jnp.float64 if jnp.finfo(x.dtype).bits == 64 else jnp.float32
    return jax.random.uniform(key, x.shape, drawn, 0.1, 1.0).astype(x.dtype)
