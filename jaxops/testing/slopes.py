"""The slope of a function along a direction: as its gradient claims it, and as differences measure it."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxops._checks.dtypes import accumulation_dtype
from jaxops.testing.trial import SkipError, replaced

# In float64 the first serve; the others are for functions that compute in float32 whatever they are given.
_STEPS = tuple(2.0**-exponent for exponent in (30, 20, 15, 11, 8, 6, 4))


def slope(
    scalar: Callable[..., jax.Array], operands: Sequence[np.ndarray], position: int, direction: np.ndarray
) -> tuple[float, float, float]:
    """Returns the derivative along a direction in one operand: as claimed, as measured, and to what accuracy.

    In float64 if the function takes it. The accuracy is how far two measurements with neighbouring steps differ, for
    the pair that agrees best.
    """
    try:
        with jax.enable_x64(True):
            return _slope(scalar, [in_float64(x) for x in operands], position, direction.astype(np.float64))
    except SkipError:
        raise
    except Exception:  # it mixes dtypes, or has kernels for narrower ones alone
        return _slope(scalar, operands, position, direction)


def in_float64(x: np.ndarray) -> np.ndarray:
    """Returns the array in float64 if it is floating point."""
    return x.astype(np.float64) if jnp.issubdtype(x.dtype, jnp.floating) else x


def widest(x: Any) -> Any:
    """Returns the dtype in which to sum an array."""
    return accumulation_dtype(x.dtype)


def _slope(
    scalar: Callable[..., jax.Array], operands: Sequence[Any], position: int, direction: np.ndarray
) -> tuple[float, float, float]:
    compiled = jax.jit(lambda *xs: scalar(*xs))
    gradient = jax.jit(jax.grad(scalar, position))(*operands)
    products = np.asarray(gradient, np.float64) * direction.astype(np.float64)

    def moved(step: float) -> float:
        x = operands[position]
        there = x.astype(np.float64) + step * direction.astype(np.float64)
        return float(compiled(*replaced(operands, position, there.astype(x.dtype))))

    measured = np.array([(moved(step) - moved(-step)) / (2 * step) for step in _STEPS])
    precision = _precision(measured, abs(moved(0.0)))
    # Of a pair of steps: how far they differ, and what rounding makes of the values, and of the claimed sum.
    with np.errstate(invalid="ignore"):
        uncertainty = 2 * np.abs(np.diff(measured)) + precision * abs(moved(0.0)) / np.array(_STEPS[:-1])
    if not np.isfinite(uncertainty).any():
        raise SkipError(f"the function is not finite around operand {position}")
    best = int(np.nanargmin(uncertainty))
    return float(products.sum()), float(measured[best]), float(uncertainty[best] + precision * np.abs(products).sum())


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
