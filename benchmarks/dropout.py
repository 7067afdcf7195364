"""Dropout: `dropout` beside `jax.random.bernoulli` with a select and, where it is installed, PyTorch.

python benchmarks/dropout.py --output benchmarks/results/dropout_cpu.json
"""

import functools
import importlib.util
from collections.abc import Callable
from typing import Any

import harness
import jax
import jax.numpy as jnp
import numpy as np

from jaxops import dropout
from lowering.measuring import timing

Dropout = Callable[[jax.Array, jax.Array, float], jax.Array]


def by_bernoulli(key: jax.Array, x: jax.Array, rate: float) -> jax.Array:
    """What one writes without a library."""
    return jnp.where(jax.random.bernoulli(key, 1 - rate, x.shape), x / (1 - rate), jnp.zeros((), x.dtype))


def compiled(fn: Callable[..., Any], *operands: jax.Array) -> Any:
    """A candidate, and the temporaries that it takes."""
    program = jax.jit(fn).lower(*operands).compile()
    temporary_bytes = program.memory_analysis().temp_size_in_bytes
    return functools.partial(program, *operands), {"temporary_mb": round(temporary_bytes / 1e6, 3)}


def forward(drop: Dropout, rate: float, key: jax.Array, x: jax.Array, dy: jax.Array) -> Any:
    return compiled(lambda key, x: drop(key, x, rate), key, x)


def value_and_gradient(drop: Dropout, rate: float, key: jax.Array, x: jax.Array, dy: jax.Array) -> Any:
    def both(key: jax.Array, x: jax.Array, dy: jax.Array) -> Any:
        y, pull_back = jax.vjp(lambda x: drop(key, x, rate), x)
        return y, *pull_back(dy)

    return compiled(both, key, x, dy)


def by_torch(rate: float, x: jax.Array, dy: jax.Array, with_gradient: bool) -> Any:
    import torch

    dtype = getattr(torch, x.dtype.name)
    activations, grad = (torch.from_numpy(np.array(array, np.float32)).to(dtype) for array in (x, dy))
    activations.requires_grad_(with_gradient)

    def run() -> None:
        activations.grad = None
        y = torch.nn.functional.dropout(activations, rate)
        if with_gradient:
            y.backward(grad)

    return run, {}


def cases(shape: tuple[int, ...], dtype: str, rate: float, repeats: int) -> list[dict[str, Any]]:
    rng = np.random.default_rng(0)
    x, dy = (jnp.asarray(rng.standard_normal(shape, np.float32), dtype) for _ in range(2))
    key = jax.random.key(0)
    found = []
    for what, make in (("forward", forward), ("forward + gradient", value_and_gradient)):
        candidates = {
            "jaxops": make(dropout, rate, key, x, dy),
            "bernoulli + where": make(by_bernoulli, rate, key, x, dy),
        }
        if importlib.util.find_spec("torch") is not None:
            candidates["torch"] = by_torch(rate, x, dy, make is value_and_gradient)
        times = timing.times_ms({name: run for name, (run, _) in candidates.items()}, repeats=repeats)
        rows = {name: {**timing.summary(times[name]), **facts} for name, (_, facts) in candidates.items()}
        found.append({"name": f"{what}, rate {rate}, {dtype}{list(shape)}", "candidates": rows})
    return found


def main() -> None:
    options = harness.arguments(__doc__.splitlines()[0])
    shape, repeats = ((64, 256), 5) if options.quick else ((1024, 4096), 31)
    found = [
        one for case in (("float32", 0.1), ("float32", 0.5), ("bfloat16", 0.1)) for one in cases(shape, *case, repeats)
    ]
    harness.report("dropout", found, options.output)


if __name__ == "__main__":
    main()
