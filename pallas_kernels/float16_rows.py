"""Powers of two for the rows of a matrix that is rounded to float16 before it is multiplied.

A gradient of logits is p / rows, or p times a loss scale: it may be below float16's smallest number 2^-24, or above its
largest. So before rounding, row r of a gradient C is divided by its own power of two s_r, which makes it about as large
as p:

    C W = s round(C / s) W,        C^T x = m round(C / s)^T (x s / m)    with m = max s

The first product is multiplied by s in float32. The second sums over the rows, so s has to go into x. As s / m is at
most 1, x overflows nowhere, and underflows only in rows that are small beside another.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

# Rows become about 2^6 large: 2^10 below the largest float16, because bounds are rough, and 2^30 above the smallest,
# because most p are far below 1.
_SIZE_EXPONENT = 6
_MOST_EXPONENT = 100  # far from the ends of float32, in which the powers are taken back


class RowPowers(NamedTuple):
    """The powers of two: s for each row, and the largest of them, m."""

    rows: jax.Array
    largest: jax.Array

    @classmethod
    def of(cls, bound: jax.Array) -> "RowPowers":
        """Returns the powers for rows (...) whose elements are at most about `bound`."""
        _, exponent = jnp.frexp(bound.astype(jnp.float32))
        # A row of zeros, such as an ignored one, must not count as the largest.
        exponent = jnp.where(bound == 0, -_MOST_EXPONENT, jnp.clip(exponent, -_MOST_EXPONENT, _MOST_EXPONENT))
        rows = jnp.ldexp(jnp.float32(1), exponent - _SIZE_EXPONENT)
        return cls(rows, jnp.max(rows, initial=2.0 ** (-_MOST_EXPONENT - _SIZE_EXPONENT)))

    def divided(self, gradient: jax.Array) -> jax.Array:
        """Computes round(C / s) of a gradient C (..., columns)."""
        return (gradient.astype(jnp.float32) * (1 / self.rows)[..., None]).astype(jnp.float16)

    def multiplied(self, x: jax.Array) -> jax.Array:
        """Computes round(x s / m), of x (..., features)."""
        return (x.astype(jnp.float32) * (self.rows / self.largest)[..., None]).astype(jnp.float16)
