"""Blends of results with what the output held before: `alpha * result + beta * prior`."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxops._checks.arguments import BAD_PARAM, BadParamError, OperatorError
from jaxops._checks.dtypes import accumulation_dtype
from jaxops._checks.mcdnn import as_optional, require, require_real
from jaxops._primitive import sharding


@dataclasses.dataclass(frozen=True)
class Blend:
    """Blend of one output of a call from its result and its prior.

    Attributes:
      operator: the name of the call, for errors.
      alpha: the factor of the result; a number, or a traced scalar.
      beta: the factor of the prior, likewise. Where it is 0 the prior is not read, and may hold anything.
      argument: the name of the prior's argument, for errors.
      prior: what the output held before, or None.
    """

    operator: str
    alpha: float | jax.Array
    beta: float | jax.Array
    argument: str
    prior: jax.Array | None

    @classmethod
    def requested(cls, operator: str, **arguments: Any) -> "Blend":
        """Makes a blend from alpha, beta and the prior, in this order, under the names of their arguments."""
        *factors, (argument, prior) = arguments.items()
        alpha, beta = (require_real(operator, *factor, traced=True) for factor in factors)
        return cls(operator, alpha, beta, argument, as_optional(operator, argument, prior))

    @property
    def reads_prior(self) -> bool:
        """Tells whether the prior is or may be read: a traced beta may be 0."""
        return isinstance(self.beta, jax.Array) or self.beta != 0

    @property
    def _is_plain(self) -> bool:
        """Tells whether the output is the result itself."""
        return not self.reads_prior and not isinstance(self.alpha, jax.Array) and self.alpha == 1

    def check(
        self, shape: Sequence[int], dtype: Any, *, status: str = BAD_PARAM, error: type[OperatorError] = BadParamError
    ) -> None:
        """Refuses a missing prior that is read, and, with the given status, one that does not match the output."""
        is_present = self.prior is not None or not self.reads_prior
        require(is_present, self.operator, self.argument, "be given where its beta is not 0", None)
        if self.prior is not None:
            same = (tuple(self.prior.shape), self.prior.dtype) == (tuple(shape), dtype)
            rule = f"have the output's shape and dtype, {dtype}{list(shape)}"
            require(same, self.operator, self.argument, rule, self.prior, status=status, error=error)

    def upcast(self, x: jax.Array) -> jax.Array:
        """Casts data to the dtype of the blend, so that only the blend is rounded."""
        return x if self._is_plain else x.astype(accumulation_dtype(x.dtype))

    def apply(self, result: jax.Array, dtype: Any) -> jax.Array:
        """Blends the output in its dtype, rounded once."""
        if self._is_plain:
            return result
        alpha, beta = (_factor(factor, accumulation_dtype(dtype)) for factor in (self.alpha, self.beta))
        result = alpha * result.astype(accumulation_dtype(dtype))
        if self.reads_prior and self.prior is not None:
            result, prior = sharding.agreeing("..., ... ->", result, self.prior)
            prior = prior.astype(result.dtype)
            result = result + beta * (jnp.where(beta == 0, 0, prior) if isinstance(beta, jax.Array) else prior)
        return result.astype(dtype)


def _factor(factor: float | jax.Array, dtype: Any) -> float | jax.Array:
    return factor.astype(dtype) if isinstance(factor, jax.Array) else factor
