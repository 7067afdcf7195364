"""How results are blended with what the output held before: `alpha * result + beta * prior`."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxops._attributes import require_real
from jaxops._errors import BAD_PARAM, BadParamError, OperatorError, require


def check_factors(operator: str, **factors: Any) -> None:
    """Refuses alpha and beta that are not finite Python or NumPy numbers."""
    for name, value in factors.items():
        require_real(operator, name, value, status=BAD_PARAM)


def check_prior(
    operator: str,
    argument: str,
    prior: Any,
    beta: float,
    shape: Sequence[int],
    dtype: Any,
    *,
    status: str = BAD_PARAM,
    error: type[OperatorError] = BadParamError,
) -> None:
    """Refuses a prior that is missing where beta is not zero, or unlike the output: with the function's own status."""
    require(
        prior is not None or beta == 0, operator, argument, "be given where its beta is not 0", None, status=BAD_PARAM
    )
    if prior is not None:
        alike = (tuple(prior.shape), prior.dtype) == (tuple(shape), dtype)
        rule = f"have the output's shape and dtype, {dtype}{list(shape)}"
        require(alike, operator, argument, rule, prior, status=status, error=error)


def compute_dtype(dtype: Any) -> Any:
    """The dtype in which data of this one is computed and blended."""
    return jnp.float64 if dtype == jnp.float64 else jnp.float32


def is_plain(alpha: float, beta: float) -> bool:
    """Whether the result is stored as it is."""
    return alpha == 1 and beta == 0


def widened(x: jax.Array, alpha: float, beta: float) -> jax.Array:
    """Data in the dtype in which it will be blended, so that the blend is what is rounded."""
    return x if is_plain(alpha, beta) else x.astype(compute_dtype(x.dtype))


def blended(result: jax.Array, prior: jax.Array | None, alpha: float, beta: float, dtype: Any) -> jax.Array:
    """The output in its dtype, rounded once. With beta 0 the prior is not read, and may hold anything."""
    if not is_plain(alpha, beta):
        result = float(alpha) * result.astype(compute_dtype(dtype))
        if prior is not None and beta != 0:
            result = result + float(beta) * prior.astype(result.dtype)
    return result.astype(dtype)
