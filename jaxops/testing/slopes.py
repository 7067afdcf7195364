"""Slopes of a function along directions: as its gradient claims it, and as differences measure it."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxops._checks.dtypes import accumulation_dtype
from jaxops.testing.trial import replaced

# In float64 the first serve; the others are for functions that compute in float32 whatever they are given.
_STEPS = tuple(2.0**-exponent for exponent in (30, 20, 15, 11, 8, 6, 4))


class Slope(NamedTuple):
    """Derivative of a function along a direction: as claimed, as measured, and to what accuracy.

    The accuracy is how far two measurements with neighbouring steps differ, for the pair that agrees best.
    """

    claimed: float
    measured: float
    uncertainty: float


def slopes(
    scalar: Callable[..., jax.Array], operands: Sequence[np.ndarray], along: Mapping[int, np.ndarray]
) -> list[Slope | None]:
    """Returns the derivative along one direction for each of some operands; None where the function is not finite.

    In float64 if the function takes it. The function and its gradient are compiled once.
    """
    try:
        with jax.enable_x64(True):
            return _slopes(scalar, [in_float64(x) for x in operands], along)
    except Exception:  # it mixes dtypes, or has kernels for narrower ones alone
        return _slopes(scalar, operands, along)


def in_float64(x: np.ndarray) -> np.ndarray:
    """Returns the array in float64 if it is floating point."""
    return x.astype(np.float64) if jnp.issubdtype(x.dtype, jnp.floating) else x


def widest(x: Any) -> Any:
    """Returns the dtype in which to sum an array."""
    return accumulation_dtype(x.dtype)


def _slopes(
    scalar: Callable[..., jax.Array], operands: Sequence[Any], along: Mapping[int, np.ndarray]
) -> list[Slope | None]:
    compiled = jax.jit(lambda *xs: scalar(*xs))
    gradients = jax.jit(jax.grad(scalar, tuple(along)))(*operands)

    def of(position: int, gradient: jax.Array) -> Slope | None:
        x, direction = operands[position], along[position].astype(np.float64)

        def moved(step: float) -> float:
            there = x.astype(np.float64) + step * direction
            return float(compiled(*replaced(operands, position, there.astype(x.dtype))))

        return _slope(moved, np.asarray(gradient, np.float64) * direction)

    return [of(position, gradient) for position, gradient in zip(along, gradients, strict=True)]


def _slope(moved: Callable[[float], float], products: np.ndarray) -> Slope | None:
    """Measures the slope of a function of one step; the products add up to the slope that its gradient claims."""
    measured = np.array([(moved(step) - moved(-step)) / (2 * step) for step in _STEPS])
    magnitude = abs(moved(0.0))
    precision = _precision(measured, magnitude)
    # Of a pair of steps: how far they differ, and what rounding makes of the values, and of the claimed sum.
    with np.errstate(invalid="ignore"):
        uncertainty = 2 * np.abs(np.diff(measured)) + precision * magnitude / np.array(_STEPS[:-1])
    if not np.isfinite(uncertainty).any():
        return None
    best = int(np.nanargmin(uncertainty))
    rounding = precision * np.abs(products).sum()
    return Slope(float(products.sum()), float(measured[best]), float(uncertainty[best] + rounding))


def _precision(measured: np.ndarray, magnitude: float) -> float:
    """Estimates the relative error of the function's values: the rounding of float64, or else of float32.

    Whatever computes in float32 is a staircase, where two of the smallest steps find no slope, or different ones.
    """
    rounding = float(np.finfo(np.float64).eps) * 8
    if not np.isfinite(measured[:2]).all():
        return float(np.finfo(np.float32).eps) * 8
    finest = 4 * rounding * magnitude / _STEPS[0] + 1e-3 * np.abs(measured[:2]).max()
    is_level = not measured[0] and not measured[1] and measured.any()
    is_float64 = abs(measured[0] - measured[1]) <= finest and not is_level
    return rounding if is_float64 else float(np.finfo(np.float32).eps) * 8
