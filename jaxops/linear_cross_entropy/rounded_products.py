"""The matrix products of a linear layer's backward pass, with the logits' cotangent rounded to the operands' dtype."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxops._primitive.derivative import Arrays
from jaxops.linear_cross_entropy.column_tiles import add_product
from pallas_kernels.float16_rows import RowPowers

# Whether x and the weight need a gradient.
Needed = tuple[bool, bool]


def rounded_products(
    needed: Needed,
    cotangent: jax.Array,
    row_bound: Callable[[], jax.Array],
    x: jax.Array,
    weight: jax.Array,
    weight_sum: jax.Array | None = None,
) -> Arrays:
    """The gradients cotangent weight and weight_sum + cotangent^T x, in the cotangent's dtype; empty if not needed.

    Args:
      needed: which of the two to compute.
      cotangent: (..., V), the cotangent of the logits, in float32 or float64.
      row_bound: returns an upper bound for each of its rows (...), within a small factor. Called for float16 only.
      x: (..., H).
      weight: (V, H), with the dtype of x, to which the cotangent is rounded.
      weight_sum: (V, H), or None for zeros.
    """
    if x.dtype == jnp.float16:
        return _float16_products(needed, cotangent, row_bound(), x, weight, weight_sum)
    return _products(needed, cotangent.dtype, cotangent.astype(x.dtype), x, weight, weight_sum)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _float16_products(
    needed: Needed,
    cotangent: jax.Array,
    row_bound: jax.Array,
    x: jax.Array,
    weight: jax.Array,
    weight_sum: jax.Array | None,
) -> Arrays:
    powers = RowPowers.of(row_bound)
    rounded, scaled_x = powers.divided(cotangent), powers.multiplied(x)
    x_grad, weight_grad = _products(needed, cotangent.dtype, rounded, scaled_x, weight, weight_sum, powers.largest)
    return powers.rows[..., None] * x_grad, weight_grad


@_float16_products.defjvp
def _float16_products_jvp(needed: Needed, primals: Any, tangents: Any) -> tuple[Arrays, Arrays]:
    # Unrounded, because the powers of two that fit a cotangent need not fit its tangents.
    def unrounded(cotangent: jax.Array, _: jax.Array, x: jax.Array, weight: jax.Array, weight_sum: Any) -> Arrays:
        dtype = cotangent.dtype
        return _products(needed, dtype, cotangent, x.astype(dtype), weight.astype(dtype), weight_sum)

    return _float16_products(needed, *primals), jax.jvp(unrounded, primals, tangents)[1]


def _products(
    needed: Needed,
    dtype: Any,
    cotangent: jax.Array,
    x: jax.Array,
    weight: jax.Array,
    weight_sum: jax.Array | None,
    factor: jax.Array | None = None,
) -> Arrays:
    """Cotangent weight, and weight_sum + factor cotangent^T x, accumulated in `dtype`."""
    needs_x, needs_weight = needed
    x_grad, weight_grad = jnp.zeros((*x.shape[:-1], 0), dtype), jnp.zeros((0, x.shape[-1]), dtype)
    if needs_x:
        x_grad = jnp.einsum("...v,vh->...h", cotangent, weight, preferred_element_type=dtype)
    if needs_weight and weight_sum is not None:
        weight_grad = add_product(weight_sum, cotangent, x, factor)
    elif needs_weight:
        batch = tuple(range(x.ndim - 1))
        weight_grad = jnp.tensordot(cotangent, x, axes=(batch, batch), preferred_element_type=dtype)
        weight_grad = weight_grad if factor is None else factor * weight_grad
    return x_grad, weight_grad
