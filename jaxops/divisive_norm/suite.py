"""Cases of divisive normalization in the suite of `jaxops tune`."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxops._cases import IMAGES, LARGE_IMAGES, SMALL_IMAGES, arrays
from jaxops.divisive_norm.api import divisive_norm
from lowering.campaign.suite import Case


def _divisive_norm(*operands: jax.Array) -> Any:
    """Computes the result, and the gradients of x and of the means if there are any."""
    y, pull_back = jax.vjp(functools.partial(divisive_norm, layout="NHWC"), *operands)
    return y, *pull_back(jnp.cos(3 * y))


SUITE = (
    Case("divisive norm", _divisive_norm, arrays, IMAGES, LARGE_IMAGES, SMALL_IMAGES),
    Case(
        "divisive norm with means",
        lambda x: _divisive_norm(x, jnp.tanh(x)),
        arrays,
        IMAGES,
        LARGE_IMAGES,
        (),
    ),
)
