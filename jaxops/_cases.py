"""Parts that operators' cases of the suite share: sizes of images, arrays to draw, and the gradient of a function."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

F32, BF16, F16 = "float32", "bfloat16", "float16"
IMAGES = ((2, 3, 8, 16, F32), (3, 21, 17, 19, BF16), (8, 64, 28, 28, F32))
LARGE_IMAGES = ((32, 64, 56, 56, BF16), (32, 256, 28, 28, F32))
SMALL_IMAGES = ((2, 5, 9, 16, F32),)


def with_gradient(fn: Callable[..., jax.Array], *operands: jax.Array) -> Any:
    """Computes the result, and gradients from cotangents that do not cancel."""
    y, pull_back = jax.vjp(fn, *operands)
    return y, pull_back(jnp.cos(3 * y))


def normal(seed: int, shape: tuple[int, ...], dtype: str, scale: float = 1.0) -> jax.Array:
    """Draws normal numbers."""
    return (scale * jax.random.normal(jax.random.key(seed), shape)).astype(dtype)


def ids(seed: int, count: int, classes: int) -> jax.Array:
    """Draws ids below a number."""
    return jax.random.randint(jax.random.key(seed), (count,), 0, classes)


def arrays(*sizes: Any) -> tuple[jax.Array]:
    """Draws one array; the last of the sizes is its dtype."""
    *shape, dtype = sizes
    return (normal(0, tuple(shape), dtype, 2.0),)
