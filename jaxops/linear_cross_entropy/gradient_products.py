"""Products that gradients of the weight and of x are made of: added to sums, in blocks, and in float16 with scales."""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxops._checks.dtypes import accumulation_dtype
from jaxops.linear_cross_entropy.chunk_sizes import SIZES
from pallas_kernels.float16_rows import RowPowers

# Adds to a sum (V, H) the product over all rows of a cotangent (..., V) and x (..., H), times a factor, () or None.
Adding = Callable[[jax.Array, jax.Array, jax.Array, jax.Array | None], jax.Array]


def added(total: jax.Array, cotangent: jax.Array, x: jax.Array, factor: jax.Array | None = None) -> jax.Array:
    """Adds a product to a sum: compilers for GPUs and TPUs do it within, and move a sum over devices out of a loop."""
    batch = tuple(range(x.ndim - 1))
    terms = jnp.tensordot(cotangent, x, axes=(batch, batch), preferred_element_type=total.dtype)
    return total + (terms if factor is None else factor * terms)


def added_in_blocks(total: jax.Array, cotangent: jax.Array, x: jax.Array, factor: jax.Array | None = None) -> jax.Array:
    """Adds a product to a sum (V, H), a block at a time: XLA's CPU compiler stores a product before it adds it."""
    axis, rows = int(total.shape[0] < total.shape[1]), math.prod(x.shape[:-1])
    size, other = total.shape[axis], total.shape[1 - axis]
    width = min(size, max(SIZES.least, SIZES.block // max(1, other, rows)))
    # A sum that is kept in 16 bits is rounded once for each product, after the addition.
    dtype = jnp.dtype(jnp.float32) if total.dtype == jnp.bfloat16 else total.dtype

    def add(step: jax.Array, total: jax.Array) -> jax.Array:
        # If the blocks do not fit evenly, the last one overlaps the one before; what is not new is masked.
        first, factors = jnp.minimum(step * width, size - width), [cotangent, x]
        part = jax.lax.dynamic_slice_in_dim(factors[axis], first, width, x.ndim - 1)
        is_new = first + jnp.arange(width, dtype=first.dtype) >= step * width
        factors[axis] = jnp.where(is_new, part, jnp.zeros_like(part))
        old = jax.lax.dynamic_slice_in_dim(total, first, width, axis).astype(dtype)
        new = added(old, factors[0], factors[1], factor).astype(total.dtype)
        return jax.lax.dynamic_update_slice_in_dim(total, new, first, axis)

    return jax.lax.fori_loop(0, math.ceil(size / width), add, total)


class Factors(NamedTuple):
    """The factors of the products in a backward pass, and what one of them is added to.

    Attributes:
      cotangent: (..., V), the cotangent of the logits.
      x: (..., H).
      weight: (V, H), with the dtype of x, or None if the gradient of x is not wanted.
      weight_sum: (V, H), or None if the gradient of the weight is not wanted.
    """

    cotangent: jax.Array
    x: jax.Array
    weight: jax.Array | None
    weight_sum: jax.Array | None


def rounded_products(factors: Factors, row_bound: Callable[[], jax.Array], add: Adding = added) -> tuple[Any, Any]:
    """Computes cotangent weight and weight_sum + cotangent^T x, in the cotangent's dtype; None if not wanted.

    The cotangent is rounded to the dtype of x and the weight. For float16, `row_bound` returns an upper bound for each
    of its rows, within a small factor. `add` adds the second product to the sum.
    """
    cotangent, dtype = factors.cotangent, factors.x.dtype
    if dtype == jnp.float16:
        return _float16_products(add, factors, row_bound())
    return _products(add, cotangent.dtype, factors._replace(cotangent=cotangent.astype(dtype)))


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _float16_products(add: Adding, factors: Factors, row_bound: jax.Array) -> tuple[Any, Any]:
    powers = RowPowers.of(row_bound)
    rounded = factors._replace(cotangent=powers.divided(factors.cotangent), x=powers.multiplied(factors.x))
    x_grad, weight_sum = _products(add, factors.cotangent.dtype, rounded, powers.largest)
    return None if x_grad is None else powers.rows[..., None] * x_grad, weight_sum


@_float16_products.defjvp
def _float16_products_jvp(add: Adding, primals: Any, tangents: Any) -> tuple[tuple[Any, Any], tuple[Any, Any]]:
    # Unrounded, because the powers of two that fit a cotangent need not fit its tangents.
    def unrounded(factors: Factors, _: jax.Array) -> tuple[Any, Any]:
        dtype = factors.cotangent.dtype
        return _products(add, dtype, jax.tree.map(lambda x: x.astype(dtype), factors))

    return _float16_products(add, *primals), jax.jvp(unrounded, primals, tangents)[1]


def _products(add: Adding, dtype: Any, factors: Factors, factor: jax.Array | None = None) -> tuple[Any, Any]:
    """Computes cotangent weight, accumulated in `dtype`, and weight_sum + factor cotangent^T x."""
    cotangent, x, weight, total = factors
    x_grad = None if weight is None else jnp.einsum("...v,vh->...h", cotangent, weight, preferred_element_type=dtype)
    return x_grad, None if total is None else add(total, cotangent, x, factor)


def kept_gradient(gradient: jax.Array | None, dtype: Any) -> Any:
    """Returns the gradient of an x or a weight as it is kept until the loss's cotangent multiplies it; None stays None.

    An unscaled gradient fits bfloat16's range but not float16's, and a cotangent of 1 does not round it again.
    """
    if gradient is None:
        return None
    return gradient.astype(dtype if dtype == jnp.bfloat16 else accumulation_dtype(dtype))
