"""Local response and divisive normalization with their gradients, beside what one writes in jnp and PyTorch.

python benchmarks/local_response_norm.py --output benchmarks/results/local_response_norm_cpu.json
"""

import functools
import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

import harness
import jax
import jax.numpy as jnp
import numpy as np

from jaxops import divisive_norm, local_response_norm
from lowering.measuring import timing

ALPHA, BETA, K = 1e-4, 0.75, 2.0


def window_sum(x: jax.Array, window: Sequence[int]) -> jax.Array:
    """Over an odd window of each extent."""
    padding = [(n // 2, n // 2) for n in window]
    return jax.lax.reduce_window(x, 0.0, jax.lax.add, window, (1,) * x.ndim, padding)


def obvious_response_norm(x: jax.Array, n: int, channel_axis: int = 1) -> jax.Array:
    window = [n if axis == channel_axis else 1 for axis in range(x.ndim)]
    return x / (K + ALPHA / n * window_sum(x * x, window)) ** BETA


def obvious_divisive(x: jax.Array, n: int) -> jax.Array:
    return x / (K + ALPHA / n**2 * window_sum(x * x, (1, 1, n, n))) ** BETA


def obvious_divisive_with_means(x: jax.Array, means: jax.Array, n: int, counts: np.ndarray) -> jax.Array:
    """Loses what x and means have in common."""
    window = (1, 1, n, n)
    squares = window_sum(x * x, window) - 2 * means * window_sum(x, window) + counts * means * means
    return x / (K + ALPHA / n**2 * squares) ** BETA


def compiled(fn: Callable[..., Any], *operands: jax.Array) -> Any:
    """A candidate, and the temporaries that it takes."""
    program = jax.jit(fn).lower(*operands).compile()
    temporary_bytes = program.memory_analysis().temp_size_in_bytes
    return functools.partial(program, *operands), {"temporary_mb": round(temporary_bytes / 1e6, 3)}


def value_and_gradient(fn: Callable[..., jax.Array], *operands_and_dy: jax.Array) -> Any:
    def both(*operands_and_dy: jax.Array) -> Any:
        *operands, dy = operands_and_dy
        y, pull_back = jax.vjp(fn, *operands)
        return y, *pull_back(dy)

    return compiled(both, *operands_and_dy)


def torch_value_and_gradient(x: np.ndarray, dy: np.ndarray, n: int) -> Any:
    import torch

    x, dy = torch.tensor(x, requires_grad=True), torch.tensor(dy)

    def run() -> Any:
        y = torch.nn.functional.local_response_norm(x, n, ALPHA, BETA, K)
        return y, *torch.autograd.grad(y, x, dy)

    return run, {}


def case(name: str, candidates: dict[str, tuple[Callable[[], Any], Any]], repeats: int) -> dict[str, Any]:
    times = timing.times_ms({name: run for name, (run, _) in candidates.items()}, repeats=repeats)
    rows = {name: {**timing.summary(times[name]), **facts} for name, (_, facts) in candidates.items()}
    return {"name": name, "candidates": rows}


def response_norm_case(shape: tuple[int, int, int, int], n: int, repeats: int) -> dict[str, Any]:
    x, dy = (np.random.default_rng(seed).standard_normal(shape, np.float32) for seed in range(2))
    first = [jnp.asarray(array) for array in (x, dy)]
    last = [jnp.asarray(np.ascontiguousarray(np.moveaxis(array, 1, -1))) for array in (x, dy)]
    candidates = {
        "jaxops": value_and_gradient(functools.partial(local_response_norm, n=n, layout="NCHW"), *first),
        "reduce_window + jax.grad": value_and_gradient(functools.partial(obvious_response_norm, n=n), *first),
        "jaxops, NHWC": value_and_gradient(functools.partial(local_response_norm, n=n, layout="NHWC"), *last),
        "reduce_window + jax.grad, NHWC": value_and_gradient(
            functools.partial(obvious_response_norm, n=n, channel_axis=3), *last
        ),
    }
    if importlib.util.find_spec("torch") is not None:
        candidates["torch"] = torch_value_and_gradient(x, dy, n)
    return case(f"local response norm, n {n}, float32{list(shape)}, forward + gradient", candidates, repeats)


def divisive_case(shape: tuple[int, int, int, int], n: int, with_means: bool, repeats: int) -> dict[str, Any]:
    x, means, dy = (jnp.asarray(np.random.default_rng(seed).standard_normal(shape, np.float32)) for seed in range(3))
    # In NumPy: XLA would sum windows of ones while it compiles.
    inside = [np.convolve(np.ones(extent), np.ones(n))[n // 2 :][:extent] for extent in shape[2:]]
    counts = np.outer(*inside)[None, None].astype(np.float32)
    operands = (x, means, dy) if with_means else (x, dy)
    obvious = functools.partial(obvious_divisive_with_means, counts=counts) if with_means else obvious_divisive
    candidates = {
        "jaxops": value_and_gradient(functools.partial(divisive_norm, n=n, layout="NCHW"), *operands),
        "reduce_window + jax.grad": value_and_gradient(functools.partial(obvious, n=n), *operands),
    }
    what = "means" if with_means else "means of zero"
    return case(f"divisive norm, {what}, n {n}, float32{list(shape)}, forward + gradient", candidates, repeats)


def main() -> None:
    options = harness.arguments(__doc__.splitlines()[0])
    shape = (2, 8, 20, 20) if options.quick else (16, 64, 56, 56)
    repeats = 3 if options.quick else 15
    found = [response_norm_case(shape, 5, repeats)]
    found += [divisive_case(shape, n, with_means, repeats) for with_means in (False, True) for n in (5, 15)]
    harness.report("local_response_norm", found, options.output)


if __name__ == "__main__":
    main()
