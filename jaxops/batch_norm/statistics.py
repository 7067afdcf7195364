"""Sums over a batch of images, on one device or over the devices of a mesh axis.

The operators see images as (..., n, a, c, b) and statistics as (..., c). Each channel c is normalized separately.
n, a and b are reduced; a and b are the pixels before and behind the channels in memory.
"""

import math
from collections.abc import Callable, Hashable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxops._checks.dtypes import accumulation_dtype, check_floating
from jaxops._checks.mcdnn import require

REDUCED = (-4, -3, -1)
Sum = Callable[..., jax.Array]  # `plain_sum` or `separate_sum`


def broadcast_channels(statistic: jax.Array) -> jax.Array:
    """Statistics (..., c) with axes added, to broadcast against images."""
    return statistic[..., None, None, :, None]


def centred(x: jax.Array, mean: jax.Array) -> jax.Array:
    """Computes x - mean, in the dtype of the mean, which broadcasts to the images x."""
    return x.astype(mean.dtype) - mean


def local_sum(x: jax.Array) -> jax.Array:
    """Sums each channel over the images on this device."""
    return jnp.sum(x, REDUCED)


def plain_sum(term: Callable[..., jax.Array], *operands: jax.Array) -> jax.Array:
    """Sums each channel of `term` of images, and of statistics that broadcast to them."""
    return local_sum(term(*operands))


def separate_sum(term: Callable[..., jax.Array], *operands: jax.Array) -> jax.Array:
    """Computes the same in one pass on CPUs, whatever else reads the operands or the sum.

    XLA's CPU compiler gives a sum to a library, with the elementwise operations before it, whose values it stores only
    if others use them as well. So each sum reads its operands in a shape that no other has, by its number of operands.
    The library is slow if an axis of size 1 is behind the channels.
    """
    # The library converts no float16.
    operands = tuple(x.astype(jnp.float32) if x.dtype == jnp.float16 else x for x in operands)
    dropped = tuple(axis for axis in (-3, -1) if operands[0].shape[axis] == 1)
    added = tuple(range(len(operands) - 1))
    # Without the barrier, bfloat16 would be converted once for all sums, before the shape changes.
    views = jax.lax.optimization_barrier([jnp.expand_dims(jnp.squeeze(x, dropped), added) for x in operands])
    found = local_sum(jnp.expand_dims(jnp.squeeze(term(*views), added), dropped))
    # Changes nothing, but the library has no such operation, so it leaves what uses the sum to XLA, which is faster.
    infinity = np.asarray(np.inf, found.dtype)
    return jax.lax.clamp(-infinity, found, infinity)


def global_sum(local: jax.Array, axis_name: Hashable) -> jax.Array:
    """Sums over the devices of a mesh axis; with None, returns `local` itself."""
    return local if axis_name is None else jax.lax.psum(local, axis_name)


def count(x: jax.Array, axis_name: Hashable) -> int:
    """Counts the elements that each statistic reduces; at least 1, so that it can divide an empty sum."""
    here = math.prod(x.shape[axis] for axis in REDUCED)
    # In this order symbolic sizes, of 1 or more, can be compared.
    return max(here * (1 if axis_name is None else jax.lax.axis_size(axis_name)), 1)


def mean_and_variance(x: jax.Array, axis_name: Hashable, total: Sum = plain_sum) -> tuple[jax.Array, jax.Array]:
    """Computes the mean and biased variance of each channel, in two passes so that a large mean costs no digits."""
    dtype, elements = accumulation_dtype(x.dtype), count(x, axis_name)
    mean = global_sum(total(lambda x: x.astype(dtype), x), axis_name) / elements
    squares = total(lambda x, mean: jnp.square(centred(x, mean)), x, broadcast_channels(mean))
    return mean, global_sum(squares, axis_name) / elements


def masked_statistics(x: jax.Array, mask: jax.Array, axis_name: Hashable) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Computes the same of what a mask counts, and how much that is; 0 for a channel of which it counts nothing."""

    def total(values: jax.Array) -> jax.Array:
        return global_sum(local_sum(jnp.where(mask, values, jnp.zeros_like(values))), axis_name)

    x = x.astype(accumulation_dtype(x.dtype))
    elements = total(jnp.ones_like(x))
    divisor = jnp.maximum(elements, 1)
    mean = total(x) / divisor
    # Masked before it is squared: what does not count may be infinite.
    centred = jnp.where(mask, x - broadcast_channels(mean), jnp.zeros_like(x))
    return mean, total(jnp.square(centred)) / divisor, elements


def check_images(operator: str, x: Any) -> None:
    """Refuses arrays that are not floating-point images."""
    check_floating(operator, x=x)
    require(len(x.shape) >= 4, operator, "x", "have shape (..., n, a, c, b)", x)


def check_like_images(operator: str, x: Any, **arrays: Any) -> None:
    """Refuses arrays that differ from x in shape or dtype."""
    for argument, value in arrays.items():
        same = value.shape == x.shape and value.dtype == x.dtype
        require(same, operator, argument, f"be like x, {x.dtype}{list(x.shape)}", value)


def check_statistics(operator: str, x: Any, **statistics: Any) -> None:
    """Refuses parameters and statistics whose shape or dtype does not fit x."""
    shape, dtype = (*x.shape[:-4], x.shape[-2]), accumulation_dtype(x.dtype)
    for argument, value in statistics.items():
        fits = value.shape == shape and value.dtype == dtype
        require(fits, operator, argument, f"be {dtype}{list(shape)}", value)
