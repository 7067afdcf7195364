"""Cases of grid sampling in the suite of `jaxops tune`."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxops._cases import F32, IMAGES, LARGE_IMAGES, arrays
from jaxops.affine_grid import affine_grid
from jaxops.grid_sample.api import grid_sample
from lowering.campaign.suite import Case


def _sampled(x: jax.Array) -> Any:
    """Computes images that are turned, and the gradients of the images and of the grid."""
    theta = jnp.broadcast_to(jnp.array([[0.9, 0.3, 0.1], [-0.3, 1.1, -0.2]], x.dtype), (x.shape[0], 2, 3))
    y, pull_back = jax.vjp(grid_sample, x, affine_grid(theta, x.shape))
    return y, *pull_back(jnp.cos(3 * y))


SUITE = (Case("grid sample", _sampled, arrays, IMAGES, LARGE_IMAGES, ((1, 3, 4, 6, F32),)),)
