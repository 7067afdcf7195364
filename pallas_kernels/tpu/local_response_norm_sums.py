"""Sums over a window of channels, for the TPU kernels of local response normalization."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def in_scratch(x: jax.Array, before: int, after: int, ref: Any, edge: int) -> jax.Array:
    """Sums `x[i + step]` for steps from -before to after, by way of `ref`, where x lies between edges of zeros.

    Loads may begin at any sublane. A shift in registers is a rotation and a selection, both of the vector unit.
    """
    rows, lanes = x.shape
    ref[edge : edge + rows, :lanes] = x
    return functools.reduce(add, (ref[edge + step : edge + step + rows, :lanes] for step in range(-before, after + 1)))


def in_registers(x: jax.Array, before: int, after: int, axis: int) -> jax.Array:
    """Sums `x[i + step]` for steps from -before to after."""
    total = _run_of(x, after + 1, 1, axis)
    return total + _shifted(_run_of(x, before, -1, axis), -1, axis) if before else total


def _run_of(x: jax.Array, count: int, direction: int, axis: int) -> jax.Array:
    """Sums `x[i + direction * step]` for steps below count, by doubling: about log2(count) shifts each way."""
    pieces, covered, width = [], 0, 1
    while covered < count:
        if count & width:
            pieces.append(_shifted(x, direction * covered, axis))
            covered += width
        if covered < count:
            x = x + _shifted(x, direction * width, axis)
            width *= 2
    return functools.reduce(add, pieces)


def _shifted(x: jax.Array, steps: int, axis: int) -> jax.Array:
    """Returns `x[i + steps]`, with zeros beyond the edge."""
    if steps == 0:
        return x
    size, zeros = x.shape[axis], list(x.shape)
    zeros[axis] = abs(steps)
    edge = jnp.zeros(zeros, x.dtype)
    if steps > 0:
        return jnp.concatenate([lax.slice_in_dim(x, steps, size, axis=axis), edge], axis)
    return jnp.concatenate([edge, lax.slice_in_dim(x, 0, size + steps, axis=axis)], axis)


def windows(element: Callable[[int], Any], size: int, constant: float | None = None) -> Callable[[int], Any]:
    """Returns a function of i that adds `element(j)` for j from i to i + size - 1 and a constant.

    Elements beyond the edges are None. Two windows beside each other share all but their first and last elements, and
    what they share is a window of sums of pairs: 2 additions for each of 5 elements, where doubling takes 3.
    """
    if size == 1:
        return lambda i: add(element(i), constant)

    @functools.cache
    def pair(j):
        return add(element(2 * j + 1), element(2 * j + 2))

    pairs = windows(pair, (size - 1) // 2) if size > 2 else lambda j: None

    @functools.cache
    def shared(j):
        total = pairs(j) if size % 2 else add(pairs(j), element(2 * j + size - 1))
        return add(total, constant)

    return lambda i: add(shared(i // 2), element(i + size - 1 if i % 2 else i))


def add(a: Any, b: Any) -> Any:
    """Adds those that are not None."""
    return b if a is None else a if b is None else a + b
