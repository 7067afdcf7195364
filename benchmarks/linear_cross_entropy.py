"""The loss of a language model's last layer, with its gradients: `linear_cross_entropy` beside what others offer.

python benchmarks/linear_cross_entropy.py --output benchmarks/results/linear_cross_entropy_cpu.json

On a GPU that PyTorch shares, XLA_PYTHON_CLIENT_PREALLOCATE=false leaves it memory. A candidate that fails, as where
memory does not suffice, is reported with its error.
"""

import functools
import statistics
from collections.abc import Callable
from typing import Any

import harness
import jax
import jax.numpy as jnp
import linear_cross_entropy_peers as peers
import numpy as np

import lowering
from jaxops.linear_cross_entropy import linear_cross_entropy
from lowering.measuring import timing

STRATEGIES = ("grad_in_forward", "recompute")
# Rows, hidden size, vocabulary.
CPU_SHAPES = ((2048, 512, 32000), (1024, 768, 50257))
GPU_SHAPES = ((16384, 4096, 128256), (16384, 4096, 131072), (8192, 2304, 256000), (4096, 4096, 151936))
QUICK_SHAPES = ((256, 64, 4096),)


def candidate(loss: Callable[..., Any], operands: tuple[jax.Array, ...]) -> Any:
    """The loss and the gradients of x and weight, compiled, and the temporaries that they take."""
    compiled = jax.jit(jax.value_and_grad(loss, (0, 1))).lower(*operands).compile()
    temporary_bytes = compiled.memory_analysis().temp_size_in_bytes
    run = functools.partial(compiled, *operands)
    jax.block_until_ready(run())
    return run, {"temporary_mb": round(temporary_bytes / 1e6, 3)}


def case(rows: int, hidden: int, classes: int, dtype: str, repeats: int) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    x, weight = (
        jnp.asarray(rng.standard_normal(shape, np.float32), dtype) for shape in ((rows, hidden), (classes, hidden))
    )
    operands = (x, weight / hidden**0.5, jnp.asarray(rng.integers(0, classes, rows), jnp.int32))
    ours = {f"jaxops {name}": functools.partial(linear_cross_entropy, strategy=name) for name in STRATEGIES}
    invariant = {"jaxops batch_invariant": functools.partial(linear_cross_entropy, batch_invariant=True)}
    candidates, failed = {}, {}
    for name, loss in {**peers.jax_peers(), **ours, **invariant}.items():
        for request in ("auto", "pallas") if name in ours and jax.devices()[0].platform != "cpu" else ("auto",):
            label = name if request == "auto" else f"{name}, Pallas"
            try:
                with lowering.use(request):
                    candidates[label] = candidate(loss, operands)
            except (jax.errors.JaxRuntimeError, lowering.NotSupportedError) as error:
                failed[label] = {"error": str(error).splitlines()[0][:200]}
    candidates |= peers.torch_peers(operands)
    times = timing.times_ms({name: run for name, (run, _) in candidates.items()}, repeats=repeats)
    found = {name: {**timing.summary(times[name]), **facts} for name, (_, facts) in candidates.items()}
    baseline = times.get("logits, optax loss")
    for name in found if baseline else ():
        # Of runs that were neighbours: what slowed the machine slowed both.
        found[name]["times_of_logits"] = round(
            statistics.median(a / b for a, b in zip(times[name], baseline, strict=True)), 3
        )
    return {"name": f"x {dtype}[{rows}, {hidden}], weight [{classes}, {hidden}]", "candidates": {**found, **failed}}


def main() -> None:
    options = harness.arguments(__doc__.splitlines()[0])
    on_gpu = jax.devices()[0].platform == "gpu"
    shapes = QUICK_SHAPES if options.quick else GPU_SHAPES if on_gpu else CPU_SHAPES
    dtype = "bfloat16" if on_gpu else "float32"
    repeats = 5 if options.quick else 11
    harness.report("linear_cross_entropy", [case(*shape, dtype, repeats) for shape in shapes], options.output)


if __name__ == "__main__":
    main()
