"""The matrix products of a linear layer's backward pass, with the logits' cotangent rounded to the operands' dtype."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.float16_rows import RowPowers

# Adds to a sum (V, H) the product over all rows of a cotangent (..., V) and x (..., H), times a factor, () or None.
Adding = Callable[[jax.Array, jax.Array, jax.Array, jax.Array | None], jax.Array]
Gradients = tuple[jax.Array | None, jax.Array | None]


class Products(NamedTuple):
    """The products to compute: those for x and for the weight, and what adds the latter to a sum, None for `added`."""

    x: bool
    weight: bool
    add: Adding | None = None


def rounded_products(
    products: Products,
    cotangent: jax.Array,
    row_bound: Callable[[], jax.Array],
    x: jax.Array,
    weight: jax.Array,
    weight_sum: jax.Array | None = None,
) -> Gradients:
    """Computes cotangent weight and weight_sum + cotangent^T x, in the cotangent's dtype; None if not wanted.

    Args:
      products: which of the two to compute.
      cotangent: (..., V), the cotangent of the logits, in float32 or float64.
      row_bound: returns an upper bound for each of its rows (...), within a small factor. Called for float16 only.
      x: (..., H).
      weight: (V, H), with the dtype of x, to which the cotangent is rounded.
      weight_sum: (V, H), or None for zeros.
    """
    if x.dtype == jnp.float16:
        return _float16_products(products, cotangent, row_bound(), x, weight, weight_sum)
    return _products(products, cotangent.dtype, cotangent.astype(x.dtype), x, weight, weight_sum)


def product(cotangent: jax.Array, x: jax.Array, dtype: Any, factor: jax.Array | None = None) -> jax.Array:
    """Computes the product (V, H) of (..., V) and (..., H) over all rows, accumulated in `dtype`, times a factor."""
    batch = tuple(range(x.ndim - 1))
    terms = jnp.tensordot(cotangent, x, axes=(batch, batch), preferred_element_type=dtype)
    return terms if factor is None else factor * terms


def added(total: jax.Array, cotangent: jax.Array, x: jax.Array, factor: jax.Array | None = None) -> jax.Array:
    """Adds a product to a sum: compilers for GPUs and TPUs do it within, and move a sum over devices out of a loop."""
    return total + product(cotangent, x, total.dtype, factor)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _float16_products(
    products: Products,
    cotangent: jax.Array,
    row_bound: jax.Array,
    x: jax.Array,
    weight: jax.Array,
    weight_sum: jax.Array | None,
) -> Gradients:
    powers = RowPowers.of(row_bound)
    rounded, scaled_x = powers.divided(cotangent), powers.multiplied(x)
    x_grad, weight_grad = _products(products, cotangent.dtype, rounded, scaled_x, weight, weight_sum, powers.largest)
    return None if x_grad is None else powers.rows[..., None] * x_grad, weight_grad


@_float16_products.defjvp
def _float16_products_jvp(products: Products, primals: Any, tangents: Any) -> tuple[Gradients, Gradients]:
    # Unrounded, because the powers of two that fit a cotangent need not fit its tangents.
    def unrounded(cotangent: jax.Array, _: jax.Array, x: jax.Array, weight: jax.Array, weight_sum: Any) -> Gradients:
        dtype = cotangent.dtype
        return _products(products, dtype, cotangent, x.astype(dtype), weight.astype(dtype), weight_sum)

    return _float16_products(products, *primals), jax.jvp(unrounded, primals, tangents)[1]


def _products(
    products: Products,
    dtype: Any,
    cotangent: jax.Array,
    x: jax.Array,
    weight: jax.Array,
    weight_sum: jax.Array | None,
    factor: jax.Array | None = None,
) -> Gradients:
    """Computes cotangent weight, and weight_sum + factor cotangent^T x, accumulated in `dtype`."""
    x_grad = weight_grad = None
    if products.x:
        x_grad = jnp.einsum("...v,vh->...h", cotangent, weight, preferred_element_type=dtype)
    if products.weight and weight_sum is not None:
        weight_grad = (products.add or added)(weight_sum, cotangent, x, factor)
    elif products.weight:
        weight_grad = product(cotangent, x, dtype, factor)
    return x_grad, weight_grad
