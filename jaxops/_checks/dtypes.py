"""Which dtypes operators on floating-point data take, and in which they compute."""

from typing import Any

import jax.numpy as jnp

from jaxops._checks.errors import BAD_PARAM, require


def accumulator(dtype: Any) -> Any:
    """The dtype of arithmetic and sums for data of a dtype."""
    return jnp.float64 if dtype == jnp.float64 else jnp.float32


def check_floating(operator: str, **operands: Any) -> None:
    """Refuses operands that are not floating point."""
    for argument, x in operands.items():
        require(jnp.issubdtype(x.dtype, jnp.floating), operator, argument, "be floating point", x, status=BAD_PARAM)
