"""Memory and registers of the linear cross entropy for a GPU that is not here, as NVIDIA's compilers report them.

python benchmarks/linear_cross_entropy_compiled.py --output benchmarks/results/linear_cross_entropy_h100.compiled.json

Nothing is timed or run. `jaxops targets --install cuda` brings the compilers.
"""

from typing import Any

import harness
import jax
import jax.numpy as jnp

import lowering
from jaxops import linear_cross_entropy

TARGET = "cuda-h100"
SHAPES = ((16384, 4096, 128256), (8192, 2048, 50304))
QUICK_SHAPES = ((1024, 256, 32768),)
CANDIDATES: dict[str, tuple[str, dict[str, Any]]] = {
    "kernel, sum in float32": ("pallas", {}),
    "kernel, sum in bfloat16": ("pallas", {"weight_grad_dtype": "bfloat16"}),
    "XLA, sum in float32": ("reference", {}),
    'kernels, strategy="recompute"': ("pallas", {"strategy": "recompute"}),
    'XLA, strategy="full"': ("reference", {"strategy": "full"}),
}


def compiled(shape: tuple[int, int, int], implementation: str, options: dict[str, Any]) -> dict[str, Any]:
    rows, hidden, classes = shape
    x, weight = (jax.ShapeDtypeStruct((size, hidden), jnp.bfloat16) for size in (rows, classes))

    def loss(x: jax.Array, weight: jax.Array, labels: jax.Array) -> jax.Array:
        return linear_cross_entropy(x, weight, labels, **options)

    labels = jax.ShapeDtypeStruct((rows,), jnp.int32)
    with lowering.use(implementation):
        report = lowering.compile(jax.value_and_grad(loss, (0, 1)), x, weight, labels, target=TARGET)
    memory = report.memory
    return {
        "peak_mb": round((memory.arguments + memory.outputs + memory.temporaries) / 1e6, 1),
        "temporary_mb": round(memory.temporaries / 1e6, 1),
        "kernels": report.kernels,
        "registers": max((used.registers for used in report.gpu_resources), default=None),
        "spilled_bytes": max((used.spilled_bytes for used in report.gpu_resources), default=None),
    }


def case(shape: tuple[int, int, int]) -> dict[str, Any]:
    name = f"value and both gradients, bf16 {'x'.join(map(str, shape))}, {TARGET}"
    return {"name": name, "candidates": {key: compiled(shape, *options) for key, options in CANDIDATES.items()}}


if __name__ == "__main__":
    args = harness.arguments(__doc__.splitlines()[0])
    shapes = QUICK_SHAPES if args.quick else SHAPES
    harness.report("linear_cross_entropy, compiled", [case(shape) for shape in shapes], args.output)
