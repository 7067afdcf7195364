"""Pooling with its gradient: `max_pool` and `avg_pool` beside XLA's windows, flax and, where it is installed, PyTorch.

python benchmarks/pooling.py --output benchmarks/results/pooling_cpu.json
"""

import functools
import importlib.util
from collections.abc import Callable
from typing import Any

import flax.linen
import harness
import jax
import jax.numpy as jnp
import numpy as np

from jaxops import avg_pool, max_pool, mcdnn
from lowering.measuring import timing

# window, stride, padding
GEOMETRIES = ((3, 2, 1), (2, 2, 0))


def by_xla(kind: str, window: int, stride: int, padding: int) -> Callable[[jax.Array], jax.Array]:
    """What one writes without a library, for images with the channels first."""
    shape, strides, paddings = ((1, 1, n, n) for n in (window, stride, padding))
    paddings = [(0, 0), (0, 0), (padding, padding), (padding, padding)]
    if kind == "max":
        return lambda x: jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, shape, strides, paddings)
    return lambda x: jax.lax.reduce_window(x, 0.0, jax.lax.add, shape, strides, paddings) / window**2


def by_flax(kind: str, window: int, stride: int, padding: int) -> Callable[[jax.Array], jax.Array]:
    pool = flax.linen.max_pool if kind == "max" else flax.linen.avg_pool
    return lambda x: pool(x, (window,) * 2, (stride,) * 2, ((padding, padding),) * 2)


def by_us(kind: str, window: int, stride: int, padding: int, layout: str) -> Callable[[jax.Array], jax.Array]:
    pool = max_pool if kind == "max" else avg_pool
    return functools.partial(pool, window=window, stride=stride, padding=padding, layout=layout)


def compiled(fn: Callable[..., Any], *operands: jax.Array) -> Any:
    """A candidate, and the temporaries that it takes."""
    program = jax.jit(fn).lower(*operands).compile()
    temporary_bytes = program.memory_analysis().temp_size_in_bytes
    return functools.partial(program, *operands), {"temporary_mb": round(temporary_bytes / 1e6, 3)}


def value_and_gradient(pool: Callable[[jax.Array], jax.Array], x: jax.Array, dy: jax.Array) -> Any:
    def both(x: jax.Array, dy: jax.Array) -> Any:
        y, pull_back = jax.vjp(pool, x)
        return y, *pull_back(dy)

    return compiled(both, x, dy)


def torch_value_and_gradient(kind: str, x: np.ndarray, dy: np.ndarray, geometry: tuple[int, ...]) -> Any:
    import torch

    pool = torch.nn.functional.max_pool2d if kind == "max" else torch.nn.functional.avg_pool2d
    images, grad = torch.from_numpy(x).requires_grad_(), torch.from_numpy(dy)

    def run() -> None:
        images.grad = None
        pool(images, *geometry).backward(grad)

    return run, {}


def torch_backward(x: np.ndarray, dy: np.ndarray, geometry: tuple[int, ...]) -> Any:
    """The gradient alone, from the indices that the forward pass has saved."""
    import torch

    images, grad = torch.from_numpy(x), torch.from_numpy(dy)
    indices = torch.nn.functional.max_pool2d(images, *geometry, return_indices=True)[1]
    window, stride, padding = ((n, n) for n in geometry)

    def run() -> None:
        torch.ops.aten.max_pool2d_with_indices_backward(grad, images, window, stride, padding, (1, 1), False, indices)

    return run, {}


def case(name: str, candidates: dict[str, Any], repeats: int) -> dict[str, Any]:
    times = timing.times_ms({name: run for name, (run, _) in candidates.items()}, repeats=repeats)
    rows = {name: {**timing.summary(times[name]), **facts} for name, (_, facts) in candidates.items()}
    return {"name": name, "candidates": rows}


def cases(shape: tuple[int, int, int, int], geometry: tuple[int, int, int], repeats: int) -> list[dict[str, Any]]:
    window, stride, padding = geometry
    rng = np.random.default_rng(0)
    outputs = tuple(1 + (n + 2 * padding - window) // stride for n in shape[2:])
    x, dy = (rng.standard_normal(size, np.float32) for size in (shape, (*shape[:2], *outputs)))
    first = [jnp.asarray(array) for array in (x, dy)]
    last = [jnp.asarray(np.ascontiguousarray(np.moveaxis(array, 1, -1))) for array in (x, dy)]
    with_torch = importlib.util.find_spec("torch") is not None
    what = f"{window}x{window} / {stride}, padding {padding}, float32{list(shape)}"
    found = []
    for kind in ("max", "mean"):
        candidates = {
            "jaxops": value_and_gradient(by_us(kind, *geometry, "NCHW"), *first),
            "reduce_window + jax.grad": value_and_gradient(by_xla(kind, *geometry), *first),
            "jaxops, NHWC": value_and_gradient(by_us(kind, *geometry, "NHWC"), *last),
            "flax, NHWC": value_and_gradient(by_flax(kind, *geometry), *last),
        }
        if with_torch:
            candidates["torch"] = torch_value_and_gradient(kind, x, dy, geometry)
        found.append(case(f"{kind} {what}, forward + gradient", candidates, repeats))
    desc = mcdnn.PoolingDescriptor("MAX", window, padding, stride, "PROPAGATE_NAN")
    y = max_pool(first[0], window, stride=stride, padding=padding, layout="NCHW")
    candidates = {
        "jaxops, from x": compiled(functools.partial(mcdnn.pooling_backward, desc), y, first[1], first[0]),
        "select-and-scatter, from x": compiled(lambda x, dy: jax.vjp(by_xla("max", *geometry), x)[1](dy)[0], *first),
    }
    if with_torch:
        candidates["torch, from saved indices"] = torch_backward(x, dy, geometry)
    found.append(case(f"max {what}, gradient alone", candidates, repeats))
    return found


def main() -> None:
    options = harness.arguments(__doc__.splitlines()[0])
    shape = (2, 4, 16, 16) if options.quick else (16, 64, 56, 56)
    repeats = 5 if options.quick else 31
    found = [one for geometry in GEOMETRIES for one in cases(shape, geometry, repeats)]
    harness.report("pooling", found, options.output)


if __name__ == "__main__":
    main()
