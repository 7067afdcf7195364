"""Batch norm with and without gradients: `batch_norm` beside the formula in jnp, both flaxes and PyTorch, if installed.

python benchmarks/batch_norm.py --output benchmarks/results/batch_norm_cpu.json
"""

import importlib.util
from collections.abc import Callable
from typing import Any

import flax.linen
import harness
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import lowering
from jaxops import batch_norm
from lowering.measuring import timing

EPSILON, MOMENTUM = 1e-5, 0.1
# The axes of NCHW images in each layout.
LAYOUTS = {"NCHW": (0, 1, 2, 3), "NHWC": (0, 2, 3, 1)}


def ours(layout: str, fused: bool) -> Callable[..., Any]:
    def forward(x: Any, scale: Any, bias: Any, residual: Any, mean: Any, var: Any) -> Any:
        extra = {"activation": "relu", "residual": residual} if fused else {}
        out = batch_norm(x, scale, bias, mean, var, momentum=MOMENTUM, epsilon=EPSILON, layout=layout, **extra)
        return out.y, (out.running_mean, out.running_var)

    return forward


def formula(layout: str, fused: bool) -> Callable[..., Any]:
    """What one writes first, with JAX's own derivative."""
    channels = layout.index("C")
    reduced = tuple(axis for axis in range(4) if axis != channels)
    shape = [1 if axis in reduced else -1 for axis in range(4)]

    def forward(x: Any, scale: Any, bias: Any, residual: Any, mean: Any, var: Any) -> Any:
        wide = x.astype(jnp.float32)
        batch_mean = jnp.mean(wide, reduced, keepdims=True)
        batch_var = jnp.mean(jnp.square(wide - batch_mean), reduced, keepdims=True)
        y = (wide - batch_mean) * jax.lax.rsqrt(batch_var + EPSILON) * scale.reshape(shape) + bias.reshape(shape)
        y = jax.nn.relu(y + residual) if fused else y
        moved = [
            (1 - MOMENTUM) * old + MOMENTUM * new.reshape(-1)
            for old, new in ((mean, batch_mean), (var, batch_var * (x.size / (x.size - scale.size))))
        ]
        return y.astype(x.dtype), jax.lax.stop_gradient(moved)

    return forward


def flax_module(layout: str, fused: bool, **options: Any) -> Callable[..., Any]:
    module = flax.linen.BatchNorm(
        use_running_average=False, momentum=1 - MOMENTUM, epsilon=EPSILON, axis=layout.index("C"), **options
    )

    def forward(x: Any, scale: Any, bias: Any, residual: Any, mean: Any, var: Any) -> Any:
        variables = {"params": {"scale": scale, "bias": bias}, "batch_stats": {"mean": mean, "var": var}}
        y, moved = module.apply(variables, x, mutable=["batch_stats"])
        return (jax.nn.relu(y + residual) if fused else y).astype(x.dtype), moved

    return forward


def nnx_module(layout: str, fused: bool) -> Callable[..., Any]:
    def forward(x: Any, scale: Any, bias: Any, residual: Any, mean: Any, var: Any) -> Any:
        axis, rngs = layout.index("C"), nnx.Rngs(0)
        module = nnx.BatchNorm(scale.size, momentum=1 - MOMENTUM, epsilon=EPSILON, axis=axis, rngs=rngs)
        module.scale, module.bias = nnx.Param(scale), nnx.Param(bias)
        module.mean, module.var = nnx.BatchStat(mean), nnx.BatchStat(var)
        y = module(x)
        y = jax.nn.relu(y + residual) if fused else y
        return y.astype(x.dtype), (module.mean.get_value(), module.var.get_value())

    return forward


def jax_candidate(
    forward: Callable[..., Any], operands: Any, fused: bool, gradients: bool
) -> tuple[Any, dict[str, Any]]:
    *inputs, mean, var, grad = operands
    active = (0, 1, 2, 3) if fused else (0, 1, 2)

    def step(*inputs: Any) -> Any:
        *inputs, mean, var, grad = inputs

        def of_active(*moving: Any) -> Any:
            return forward(*moving, *inputs[len(active) :], mean, var)

        y, pull_back, moved = jax.vjp(of_active, *inputs[: len(active)], has_aux=True)
        return y, moved, pull_back(grad)

    def value(*inputs: Any) -> Any:
        return forward(*inputs[:-1])

    compiled = jax.jit(step if gradients else value).lower(*inputs, mean, var, grad).compile()
    memory = compiled.memory_analysis()
    return lambda: compiled(*inputs, mean, var, grad), {"temporary_mb": round(memory.temp_size_in_bytes / 1e6, 3)}


def torch_candidate(operands: Any, layout: str, fused: bool, gradients: bool) -> tuple[Any, dict[str, Any]]:
    """PyTorch's batch norm, and its addition and relu as the operators of their own that they are there."""
    import torch

    device = "cuda" if jax.devices()[0].platform == "gpu" and torch.cuda.is_available() else "cpu"
    back = np.argsort(LAYOUTS[layout])

    def tensor(array: Any) -> Any:
        wide = np.asarray(array).astype(np.float32)
        made = torch.from_numpy(wide.copy()).to(device, getattr(torch, str(array.dtype)))
        # A permuted view of NHWC is what PyTorch calls channels_last.
        return made.permute(*back) if made.ndim == 4 else made

    x, scale, bias, residual, mean, var, grad = map(tensor, operands)
    active = [x, scale, bias, residual] if fused else [x, scale, bias]
    for one in active:
        one.requires_grad_(gradients)

    def run() -> None:
        y = torch.nn.functional.batch_norm(x, mean, var, scale, bias, True, MOMENTUM, EPSILON)
        y = torch.relu(y + residual) if fused else y
        if gradients:
            torch.autograd.grad(y, active, grad)
        if device == "cuda":
            torch.cuda.synchronize()

    return run, {"threads": torch.get_num_threads()}


def case(shape: tuple[int, ...], layout: str, dtype: str, fused: bool, gradients: bool, repeats: int) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    x, residual, grad = (
        jnp.asarray(rng.standard_normal(shape, np.float32).transpose(LAYOUTS[layout]), dtype) for _ in range(3)
    )
    ones, zeros = jnp.ones(shape[1]), jnp.zeros(shape[1])
    operands = (x, ones, zeros, residual, zeros, ones, grad)
    candidates = {"jaxops": jax_candidate(ours(layout, fused), operands, fused, gradients)}
    if jax.devices()[0].platform != "cpu":
        with lowering.use("pallas"):
            candidates["jaxops, Pallas"] = jax_candidate(ours(layout, fused), operands, fused, gradients)
    for name, forward in (
        ("jnp formula", formula(layout, fused)),
        ("flax BatchNorm", flax_module(layout, fused)),
        ("flax, use_fast_variance=False", flax_module(layout, fused, use_fast_variance=False)),
        ("flax nnx BatchNorm", nnx_module(layout, fused)),
    ):
        candidates[name] = jax_candidate(forward, operands, fused, gradients)
    if importlib.util.find_spec("torch"):
        candidates["torch"] = torch_candidate(operands, layout, fused, gradients)
    times = timing.times_ms({name: run for name, (run, _) in candidates.items()}, repeats=repeats)
    rows = {name: {**timing.summary(times[name]), **facts} for name, (_, facts) in candidates.items()}
    if "torch" in times:
        for row in rows.values():
            row["of_torch"] = round(row["median_ms"] / rows["torch"]["median_ms"], 2)
    size = "x".join(map(str, shape))
    what = (" + residual + relu" if fused else "") + ("" if gradients else ", value alone")
    return {"name": f"{size} {layout} {dtype}{what}", "candidates": rows}


def main() -> None:
    options = harness.arguments(__doc__.splitlines()[0])
    shape = (4, 16, 14, 14) if options.quick else (16, 64, 56, 56)
    repeats = 5 if options.quick else 200
    cases = [
        case(shape, layout, dtype, fused, gradients, repeats)
        for dtype in ("float32", "bfloat16")
        for layout in LAYOUTS
        for fused, gradients in ((False, True), (True, True), (False, False))
    ]
    harness.report("batch_norm", cases, options.output)


if __name__ == "__main__":
    main()
