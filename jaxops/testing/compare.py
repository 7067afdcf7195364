"""Comparison of two pytrees of arrays, and in words how they differ."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxops._checks.dtypes import accumulation_dtype

# Relative, and in part relative to the largest value of an array. For float32 these are sums of some hundred terms in
# another order, for 16 bits the rounding of a result and of what it was computed from.
DEFAULTS = {"float64": 1e-9, "float32": 2e-4, "bfloat16": 2e-2, "float16": 4e-3}
# However small an element is, it may differ by this part of what the array's largest element may. Sums of terms that
# were rounded to 16 bits and cancel are off by the rounding of the terms.
_OF_LARGEST = {"float64": 0.1, "float32": 0.1, "bfloat16": 1.0, "float16": 1.0}
_TINY = 1e-300


@dataclasses.dataclass(frozen=True)
class Tolerance:
    """Largest difference allowed between two results, by the name of their dtype."""

    by_dtype: Mapping[str, float]

    def difference(self, actual: Any, expected: Any, exactly: bool = False) -> str | None:
        """Says how two pytrees of arrays differ, by the dtypes of the first one; None if they agree."""
        structures: list[Any] = [jax.tree.structure(actual), jax.tree.structure(expected)]
        if structures[0] != structures[1]:
            return f"one has the structure {structures[0]}, the other {structures[1]}"
        pairs = list(zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True))
        for index, (a, b) in enumerate(pairs):
            found = self._of_arrays(np.asarray(a), np.asarray(b), exactly)
            if found is not None:
                return found if len(pairs) == 1 else f"in array {index}, {found}"
        return None

    def _of_arrays(self, actual: np.ndarray, expected: np.ndarray, exactly: bool) -> str | None:
        if actual.shape != expected.shape:
            return f"one has the shape {list(actual.shape)}, the other {list(expected.shape)}"
        if actual.size == 0:
            return None
        if jnp.issubdtype(actual.dtype, jnp.complexfloating):
            actual, expected = (np.stack([x.real, x.imag], -1) for x in (actual, expected))
        # Expected values may be wider: what overflows in the narrower dtype is infinite there.
        with np.errstate(over="ignore", invalid="ignore"):
            got, wanted = actual.astype(np.float64), expected.astype(actual.dtype).astype(np.float64)
            same = (got == wanted) | (np.isnan(got) & np.isnan(wanted))
            off = np.nan_to_num(np.where(same, 0.0, np.abs(got - wanted)), nan=np.inf)
        allowed = np.zeros_like(off) if exactly else self._allowed(wanted, actual.dtype)
        if np.all(off <= allowed):
            return None
        with np.errstate(over="ignore"):
            excess = np.where(off > allowed, off / np.maximum(allowed, _TINY), -1.0)
        at = np.unravel_index(np.argmax(excess), off.shape)
        where = f" at {[int(i) for i in at]}" if at else ""
        bound = f"{actual.dtype} may differ by {allowed[at]:.2g}" if allowed[at] else "not one bit may differ"
        share = f" ({np.count_nonzero(off > allowed)} of {off.size} elements)" if off.size > 1 else ""
        return f"{got[at]:.8g} instead of {wanted[at]:.8g}{where}, where {bound}{share}"

    def _allowed(self, wanted: np.ndarray, dtype: Any) -> np.ndarray:
        if not jnp.issubdtype(dtype, jnp.floating):
            return np.zeros_like(wanted)
        magnitudes = np.where(np.isfinite(wanted), np.abs(wanted), 0.0)
        name = dtype.name if dtype.name in DEFAULTS else "bfloat16"
        # What should be zero but for rounding is as large as the rounding of ones, which sums in float32 at least have.
        rounding = float(jnp.finfo(accumulation_dtype(dtype)).eps) / 2
        return self.by_dtype[name] * (magnitudes + _OF_LARGEST[name] * magnitudes.max()) + rounding
