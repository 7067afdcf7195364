"""Softmax and activations with their gradients, beside the obvious jnp and, where it is installed, PyTorch.

python benchmarks/softmax.py --output benchmarks/results/softmax_cpu.json
"""

import functools
import importlib.util
from collections.abc import Callable
from typing import Any

import harness
import jax
import jax.numpy as jnp
import numpy as np

from jaxops import activation, softmax
from lowering.measuring import timing

# What one writes without a library.
JNP = {
    "sigmoid": jax.nn.sigmoid,
    "relu": jax.nn.relu,
    "tanh": jnp.tanh,
    "clipped_relu": lambda x: jnp.clip(x, 0, 6),
    "elu": jax.nn.elu,
    "swish": jax.nn.swish,
}
TORCH = {
    "sigmoid": "sigmoid",
    "relu": "relu",
    "tanh": "tanh",
    "clipped_relu": "relu6",
    "elu": "elu",
    "swish": "silu",
}


def value_and_gradient(fn: Callable[[jax.Array], jax.Array], x: jax.Array, dy: jax.Array) -> Any:
    """A candidate, and the temporaries that it takes."""

    def both(x: jax.Array, dy: jax.Array) -> Any:
        y, pull_back = jax.vjp(fn, x)
        return y, *pull_back(dy)

    program = jax.jit(both).lower(x, dy).compile()
    temporary_bytes = program.memory_analysis().temp_size_in_bytes
    return functools.partial(program, x, dy), {"temporary_mb": round(temporary_bytes / 1e6, 3)}


def torch_value_and_gradient(fn: Callable[[Any], Any], x: jax.Array, dy: jax.Array) -> Any:
    import torch

    # Through float32, because NumPy has no bfloat16 of its own.
    dtype = getattr(torch, x.dtype.name)
    operand, grad = (torch.from_numpy(np.array(array, np.float32)).to(dtype) for array in (x, dy))
    operand.requires_grad_()

    def run() -> None:
        operand.grad = None
        fn(operand).backward(grad)

    return run, {}


def case(name: str, candidates: dict[str, Any], repeats: int) -> dict[str, Any]:
    times = timing.times_ms({name: run for name, (run, _) in candidates.items()}, repeats=repeats)
    rows = {name: {**timing.summary(times[name]), **facts} for name, (_, facts) in candidates.items()}
    return {"name": name, "candidates": rows}


def operands(shape: tuple[int, ...], dtype: str) -> list[jax.Array]:
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.standard_normal(shape, np.float32), dtype) for _ in range(2)]


def softmax_case(
    what: str, shape: tuple[int, ...], axis: int | tuple[int, ...], dtype: str, log: bool, repeats: int
) -> dict[str, Any]:
    x, dy = operands(shape, dtype)
    algorithm = "log" if log else "accurate"
    obvious = jax.nn.log_softmax if log else jax.nn.softmax
    candidates = {
        "jaxops": value_and_gradient(functools.partial(softmax, axis=axis, algorithm=algorithm), x, dy),
        f"jax.nn.{obvious.__name__}": value_and_gradient(functools.partial(obvious, axis=axis), x, dy),
    }
    if importlib.util.find_spec("torch") is not None:
        import torch

        theirs = torch.log_softmax if log else torch.softmax

        def by_torch(tensor: Any) -> Any:
            # A group over several axes is one axis of a view, which costs nothing.
            return theirs(tensor, axis) if isinstance(axis, int) else theirs(tensor.flatten(axis[0]), axis[0])

        flat_dy = dy if isinstance(axis, int) else dy.reshape(*dy.shape[: axis[0]], -1)
        candidates["torch"] = torch_value_and_gradient(by_torch, x, flat_dy)
    name = f"{'log ' * log}softmax, {what}, {dtype}{list(shape)}, forward + gradient"
    return case(name, candidates, repeats)


def activation_case(mode: str, shape: tuple[int, ...], dtype: str, repeats: int) -> dict[str, Any]:
    x, dy = operands(shape, dtype)
    ours = functools.partial(activation, mode=mode, coef=6.0 if mode == "clipped_relu" else None)
    candidates = {"jaxops": value_and_gradient(ours, x, dy), "jax.nn": value_and_gradient(JNP[mode], x, dy)}
    if importlib.util.find_spec("torch") is not None:
        import torch

        fn = getattr(torch.nn.functional, TORCH[mode])
        candidates["torch"] = torch_value_and_gradient(fn, x, dy)
    return case(f"{mode}, {dtype}{list(shape)}, forward + gradient", candidates, repeats)


def main() -> None:
    options = harness.arguments(__doc__.splitlines()[0])
    repeats = 5 if options.quick else 501
    rows, images = ((8, 50), (2, 4, 7, 7)) if options.quick else ((1024, 1000), (16, 64, 56, 56))
    softmaxes = [("last axis", rows, -1), ("CHANNEL", images, 1), ("INSTANCE", images, (1, 2, 3))]
    found = [
        softmax_case(*one, dtype, log, repeats)
        for one in softmaxes
        for dtype in ("float32", "bfloat16")
        for log in (False, True)
    ]
    found += [activation_case(mode, images, dtype, repeats) for mode in JNP for dtype in ("float32", "bfloat16")]
    harness.report("softmax", found, options.output)


if __name__ == "__main__":
    main()
