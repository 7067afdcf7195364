"""Cases of batch normalization in the suite of `jaxops tune`."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxops._cases import F32, IMAGES, LARGE_IMAGES, SMALL_IMAGES, arrays, normal, with_gradient
from jaxops.batch_norm.api import batch_norm
from lowering.campaign.suite import Case


def _batch_norm_arguments(*sizes: Any) -> tuple[jax.Array, ...]:
    (x,) = arrays(*sizes)
    channels = x.shape[1]
    return x, 1 + 0.1 * normal(1, (channels,), F32), normal(2, (channels,), F32)


def _normalized(activation: str | None, has_residual: bool, x: jax.Array, scale: jax.Array, bias: jax.Array) -> Any:
    def normalized(x: jax.Array, scale: jax.Array, bias: jax.Array, *residual: jax.Array) -> jax.Array:
        return batch_norm(
            x, scale, bias, activation=activation, residual=residual[0] if residual else None, layout="NCHW"
        ).y

    return with_gradient(normalized, x, scale, bias, *([jnp.flip(x, 0)] if has_residual else []))


SUITE = (
    *(
        Case(
            name,
            functools.partial(_normalized, activation, has_residual),
            _batch_norm_arguments,
            IMAGES,
            LARGE_IMAGES,
            SMALL_IMAGES if has_residual else (),
        )
        for name, activation, has_residual in (
            ("batch norm", None, False),
            ("batch norm, relu", "relu", False),
            ("batch norm, residual, relu", "relu", True),
        )
    ),
)
