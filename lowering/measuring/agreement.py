"""Agreement of a kernel's results with the reference's, as far as both are from the truth."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lowering.measurements import WRONG
from lowering.operators import type_text

# How far a kernel may be off, relative to the largest value of a result and beyond the reference's own error; by the
# narrowest dtype among the operands and the result.
_TOLERANCES = {"float64": 1e-10, "float32": 1e-5, "float16": 4e-3, "bfloat16": 3e-2}

Results = tuple[jax.Array, ...]


def truth_in_float64(meaning: Callable[..., Results], operands: Sequence[jax.Array]) -> Results:
    """Computes the reference in float64, on the host; where it cannot be, in float32 on the device."""
    try:
        with jax.enable_x64(True), jax.default_device(_host()):
            return jax.block_until_ready(jax.jit(meaning)(*map(_widened, operands)))
    except Exception:  # whatever an operator or a compiler raises about float64
        return truth_in_float32(meaning, operands)


def truth_in_float32(meaning: Callable[..., Results], operands: Sequence[jax.Array]) -> Results:
    """Computes the reference in float32, with the most exact products that the device has."""
    upcast = [x.astype(jnp.float32) if _bits(x) < 32 else x for x in operands]
    with jax.default_matmul_precision("highest"):
        return jax.block_until_ready(jax.jit(meaning)(*upcast))


def reason_to_discard(results: Results, expected: Results, truth: Results, operands: Sequence[jax.Array]) -> str:
    """Says what is wrong with the results, or ""."""
    types, right_types = (", ".join(map(type_text, arrays)) for arrays in (results, expected))
    if types != right_types:
        return f"{WRONG}results are {types} instead of {right_types}"
    for position, (result, reference, exact) in enumerate(zip(results, expected, truth, strict=True)):
        if not jnp.issubdtype(result.dtype, jnp.inexact):
            different = int(jnp.sum(result != reference))
            if different:
                return f"{WRONG}{different} of {result.size} elements of result {position} differ"
            continue
        narrowest = min([result, *(x for x in operands if jnp.issubdtype(x.dtype, jnp.floating))], key=_bits)
        own_error = _relative_error(reference, exact)
        allowed = _TOLERANCES.get(narrowest.dtype.name, 0.1) + (own_error if math.isfinite(own_error) else 0.0)
        error = _relative_error(result, exact)
        if not math.isfinite(error):
            return f"{WRONG}result {position} is not finite where the reference is"
        if error > allowed:
            return (
                f"{WRONG}result {position} is off by {error:.2g} of its largest value, where {allowed:.2g} is allowed"
            )
    return ""


def fault_of(results: Any, expected: Results, truth: Results, operands: Sequence[jax.Array]) -> str:
    """Compares results on the host, as `reason_to_discard` does."""
    with jax.enable_x64(True), jax.default_device(_host()):
        arrays = (results, expected, truth, operands)
        return reason_to_discard(*(tuple(jnp.asarray(on_host(x)) for x in each) for each in arrays))


def failure(error: Exception) -> str:
    """Says why something is discarded that raises this."""
    return f"fails with {type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def _relative_error(x: jax.Array, exact: jax.Array) -> float:
    """Returns the largest error relative to the largest value; not finite if only `x` has a value that is not."""
    is_known = jnp.isfinite(exact)
    difference = jnp.max(jnp.where(is_known, jnp.abs(x.astype(exact.dtype) - exact), 0), initial=0)
    scale = float(jnp.max(jnp.where(is_known, jnp.abs(exact), 0), initial=0))
    return float(difference) / (scale or 1.0)


def _bits(x: Any) -> int:
    return jnp.finfo(x.dtype).bits if jnp.issubdtype(x.dtype, jnp.inexact) else 64


def _host() -> Any:
    """Returns the processor beside the device; the device itself where JAX has no other."""
    try:
        return jax.devices("cpu")[0]
    except RuntimeError:
        return jax.devices()[0]


def on_host(x: Any) -> np.ndarray:
    """Returns an array as NumPy has it; the data of a key."""
    return np.asarray(jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x)


def _widened(x: jax.Array) -> jax.Array:
    """Returns an operand on the host, in float64 if it holds floats."""
    host = on_host(x)
    return jnp.asarray(host.astype(np.float64) if jnp.issubdtype(x.dtype, jnp.floating) else host)
