"""The dtypes that floating-point operators take, and those in which they compute."""

from typing import Any

import jax.numpy as jnp

from jaxops._checks.mcdnn import require


def accumulation_dtype(*dtypes: Any) -> Any:
    """Returns the dtype to compute and sum data of these dtypes in: float64 if one of them is, else float32."""
    return jnp.dtype(jnp.float64 if jnp.dtype(jnp.float64) in dtypes else jnp.float32)


def check_floating(operator: str, **operands: Any) -> None:
    """Refuses operands that are not floating point."""
    for argument, x in operands.items():
        require(jnp.issubdtype(x.dtype, jnp.floating), operator, argument, "be floating point", x)
