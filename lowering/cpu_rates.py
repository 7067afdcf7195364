"""Measures the rates of this machine's CPU, which no runtime reports, when a roofline first needs them."""

import dataclasses
import functools
import time
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.hardware import Hardware

_MATRIX_SIZE = 1024
_ARRAY_BYTES = 2**28  # beyond any cache
_REPEATS = 3


def with_measured_rates(cpu: Hardware, kinds: Iterable[str]) -> Hardware:
    """Adds the memory bandwidth, and the rates of these kinds of matrix products, to this machine's CPU."""
    rates = tuple((kind, _matmul_flops_per_s(kind.partition(" ")[0])) for kind in kinds)
    source = "measured on this machine, with XLA"
    return dataclasses.replace(cpu, memory_bytes_per_s=_bytes_per_s(), matmul_flops_per_s=rates, source=source)


@functools.cache
def _matmul_flops_per_s(dtype: str) -> float:
    # XLA promotes 1-byte operands, so their rate differs.
    one_byte = {"int8": jnp.int8, "float8": jnp.float8_e4m3fn}
    accumulated = {"int8": jnp.int32, "float64": jnp.float64}.get(dtype, jnp.float32)
    with jax.default_device(jax.devices("cpu")[0]):
        matrix = jnp.ones((_MATRIX_SIZE, _MATRIX_SIZE), one_byte.get(dtype, dtype))
        product = jax.jit(lambda x: jnp.matmul(x, x, preferred_element_type=accumulated))
        return 2 * _MATRIX_SIZE**3 / _least_seconds(lambda _: product(matrix), None)


@functools.cache
def _bytes_per_s() -> float:
    with jax.default_device(jax.devices("cpu")[0]):
        # In place, because mapping fresh pages takes longer than writing them.
        increment = jax.jit(lambda x: x + 1, donate_argnums=0)
        return 2 * _ARRAY_BYTES / _least_seconds(increment, jnp.zeros(_ARRAY_BYTES // 4, jnp.float32))


def _least_seconds(step: Callable[[Any], Any], state: Any) -> float:
    """Returns the least time of a few steps, which other work on the machine disturbs least."""
    times = []
    for _ in range(_REPEATS + 1):  # the first also compiles
        start = time.perf_counter()
        state = jax.block_until_ready(step(state))
        times.append(time.perf_counter() - start)
    return min(times)
