"""Grid sampling with its gradients: `grid_sample` beside four gathers in jnp and, where it is installed, PyTorch.

python benchmarks/grid_sample.py --output benchmarks/results/grid_sample_cpu.json
"""

import functools
import importlib.util
from collections.abc import Callable
from typing import Any

import harness
import jax
import jax.numpy as jnp
import numpy as np

from jaxops import affine_grid, grid_sample
from lowering.measuring import timing

# Features of a network's middle, and the images of its input.
SHAPES = ((16, 64, 56, 56), (16, 3, 224, 224))
THETA = np.array([[0.9, 0.2, 0.05], [-0.2, 0.95, -0.1]], np.float32)  # a turn, a shift, and some points outside


def by_gathers(x: jax.Array, grid: jax.Array) -> jax.Array:
    """What one writes without a library."""
    height, width = x.shape[2:]
    px, py = (grid[..., 0] + 1) / 2 * (width - 1), (grid[..., 1] + 1) / 2 * (height - 1)
    column, row = jnp.floor(px), jnp.floor(py)
    a, b = (px - column)[..., None], (py - row)[..., None]
    image = jnp.arange(x.shape[0])[:, None, None]

    def pixel(down: int, right: int) -> jax.Array:
        i, j = row.astype(jnp.int32) + down, column.astype(jnp.int32) + right
        is_inside = (i >= 0) & (i < height) & (j >= 0) & (j < width)
        values = x[image, :, jnp.clip(i, 0, height - 1), jnp.clip(j, 0, width - 1)]
        return jnp.where(is_inside[..., None], values, 0)

    upper = pixel(0, 0) * (1 - a) + pixel(0, 1) * a
    lower = pixel(1, 0) * (1 - a) + pixel(1, 1) * a
    return jnp.moveaxis(upper * (1 - b) + lower * b, -1, 1)


def compiled(fn: Callable[..., Any], *operands: jax.Array) -> Any:
    """A candidate, and the temporaries that it takes."""
    program = jax.jit(fn).lower(*operands).compile()
    temporary_bytes = program.memory_analysis().temp_size_in_bytes
    return functools.partial(program, *operands), {"temporary_mb": round(temporary_bytes / 1e6, 3)}


def value_and_gradients(
    sample: Callable[[jax.Array, jax.Array], jax.Array], x: jax.Array, grid: jax.Array, dy: jax.Array
) -> Any:
    def both(x: jax.Array, grid: jax.Array, dy: jax.Array) -> Any:
        y, pull_back = jax.vjp(sample, x, grid)
        return y, *pull_back(dy)

    return compiled(both, x, grid, dy)


def by_torch(x: np.ndarray, grid: np.ndarray, dy: np.ndarray, with_gradients: bool) -> Any:
    import torch

    images, points = (torch.from_numpy(array).requires_grad_(with_gradients) for array in (x, grid))
    grad = torch.from_numpy(dy)

    def run() -> None:
        images.grad = points.grad = None
        y = torch.nn.functional.grid_sample(images, points, align_corners=True)
        if with_gradients:
            y.backward(grad)

    return run, {}


def cases(shape: tuple[int, int, int, int], repeats: int) -> list[dict[str, Any]]:
    rng = np.random.default_rng(0)
    x, dy = (rng.standard_normal(shape, np.float32) for _ in range(2))
    grid = np.array(affine_grid(np.broadcast_to(THETA, (shape[0], 2, 3)), shape))
    arrays = [jnp.asarray(array) for array in (x, grid, dy)]
    found = []
    for what, with_gradients in (("forward", False), ("forward + gradients", True)):
        make = value_and_gradients if with_gradients else lambda fn, x, grid, dy: compiled(fn, x, grid)
        candidates = {"jaxops": make(grid_sample, *arrays), "four gathers in jnp": make(by_gathers, *arrays)}
        if importlib.util.find_spec("torch") is not None:
            candidates["torch"] = by_torch(x, grid, dy, with_gradients)
        times = timing.times_ms({name: run for name, (run, _) in candidates.items()}, repeats=repeats)
        rows = {name: {**timing.summary(times[name]), **facts} for name, (_, facts) in candidates.items()}
        found.append({"name": f"{what}, float32{list(shape)}", "candidates": rows})
    return found


def main() -> None:
    options = harness.arguments(__doc__.splitlines()[0])
    shapes, repeats = (((2, 3, 16, 16),), 5) if options.quick else (SHAPES, 31)
    harness.report("grid_sample", [one for shape in shapes for one in cases(shape, repeats)], options.output)


if __name__ == "__main__":
    main()
