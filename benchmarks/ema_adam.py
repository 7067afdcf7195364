"""A step of AdamW with an average of the parameters: `ema_adam` beside optax and, where it is installed, PyTorch.

python benchmarks/ema_adam.py --output benchmarks/results/ema_adam_cpu.json
"""

import functools
import importlib.util
import math
import time
from collections.abc import Callable
from typing import Any

import harness
import jax
import jax.numpy as jnp
import numpy as np
import optax

import lowering
from jaxops import ema_adam, fused_apply
from lowering.measuring import timing

LEARNING_RATE, WEIGHT_DECAY, EMA_DECAY = 1e-3, 1e-2, 0.9999


def transformer_shapes(layers: int, width: int = 768) -> list[tuple[int, ...]]:
    """The parameters of a vision transformer's trunk: 86 million in 172 arrays with 12 layers."""
    norm = [(width,), (width,)]
    attention = [*[(width, width)] * 4, (3 * width,), (width,)]
    feed_forward = [(width, 4 * width), (4 * width,), (4 * width, width), (width,)]
    return [*(norm + attention + norm + feed_forward) * layers, *norm, (197, width), (width,)]


def jax_candidate(
    make_step: Callable[..., Any], init: Callable[[Any], Any], params: Any, grads: Any
) -> tuple[Any, dict[str, Any]]:
    """A step that updates its own copy of parameters and state in place, and what compiling it took."""
    params = jax.tree.map(functools.partial(jnp.array, copy=True), params)
    carry = [params, init(params)]
    start = time.perf_counter()
    traced = jax.jit(make_step, donate_argnums=(0, 1)).trace(*carry, grads)
    trace_s = time.perf_counter() - start
    compiled = traced.lower().compile()
    memory = compiled.memory_analysis()

    def run() -> Any:
        carry[:] = compiled(*carry, grads)
        return carry

    return run, {"temporary_mb": round(memory.temp_size_in_bytes / 1e6, 3), "trace_s": round(trace_s, 2)}


def optax_candidate(params: Any, grads: Any, *, of_optax: bool) -> Any:
    """AdamW of optax, and an average in float32: optax's own, or as one writes it."""
    optimizer = optax.adamw(LEARNING_RATE, weight_decay=WEIGHT_DECAY)

    def step(params: Any, state: Any, grads: Any) -> Any:
        opt_state, ema = state
        updates, opt_state = optimizer.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        if of_optax:
            return params, (opt_state, optax.incremental_update(params, ema, 1 - EMA_DECAY))
        ema = jax.tree.map(lambda s, p: EMA_DECAY * s + (1 - EMA_DECAY) * p.astype(s.dtype), ema, params)
        return params, (opt_state, ema)

    def init(params: Any) -> Any:
        return optimizer.init(params), jax.tree.map(functools.partial(jnp.array, copy=True, dtype=jnp.float32), params)

    return jax_candidate(step, init, params, grads)


def our_candidate(params: Any, grads: Any, *, fused: bool) -> Any:
    optimizer = ema_adam(LEARNING_RATE, weight_decay=WEIGHT_DECAY, ema_decay=EMA_DECAY)

    def step(params: Any, opt_state: Any, grads: Any) -> Any:
        if fused:
            return fused_apply(optimizer, grads, opt_state, params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    return jax_candidate(step, optimizer.init, params, grads)


def torch_candidate(shapes: list[tuple[int, ...]], dtype: str) -> Any:
    """PyTorch's fused AdamW, and a horizontally fused lerp for the average."""
    import torch

    torch_dtype = getattr(torch, dtype)
    device = "cuda" if jax.devices()[0].platform == "gpu" and torch.cuda.is_available() else "cpu"
    params = [torch.randn(shape, device=device, dtype=torch_dtype) for shape in shapes]
    averages = [x.clone() for x in params]
    for x in params:
        x.grad = torch.randn_like(x)
    optimizer = torch.optim.AdamW(params, lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, fused=True)

    def run() -> None:
        with torch.no_grad():
            optimizer.step()
            torch._foreach_lerp_(averages, params, 1 - EMA_DECAY)
        if device == "cuda":
            torch.cuda.synchronize()

    return run, {}


def case(shapes: list[tuple[int, ...]], dtype: str, repeats: int) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    params = [jnp.asarray(rng.standard_normal(shape, np.float32), dtype) for shape in shapes]
    grads = [jnp.asarray(rng.standard_normal(shape, np.float32), dtype) for shape in shapes]
    candidates = {
        "jaxops fused_apply": our_candidate(params, grads, fused=True),
        "jaxops update, apply_updates": our_candidate(params, grads, fused=False),
        "optax adamw + incremental_update": optax_candidate(params, grads, of_optax=True),
        "optax adamw + jnp average": optax_candidate(params, grads, of_optax=False),
    }
    if jax.devices()[0].platform != "cpu":
        with lowering.use("pallas"):
            candidates["jaxops fused_apply, Pallas"] = our_candidate(params, grads, fused=True)
    if importlib.util.find_spec("torch"):
        candidates["torch fused AdamW + lerp"] = torch_candidate(shapes, dtype)
    times = timing.times_ms({name: run for name, (run, _) in candidates.items()}, repeats=repeats)
    rows = {name: {**timing.summary(times[name]), **facts} for name, (_, facts) in candidates.items()}
    elements = sum(map(math.prod, shapes))
    return {"name": f"{elements / 1e6:.1f} M parameters in {len(shapes)} arrays, {dtype}", "candidates": rows}


def main() -> None:
    options = harness.arguments(__doc__.splitlines()[0])
    shapes = transformer_shapes(layers=1 if options.quick else 12)
    repeats = 5 if options.quick else 20
    harness.report("ema_adam", [case(shapes, dtype, repeats) for dtype in ("float32", "bfloat16")], options.output)


if __name__ == "__main__":
    main()
