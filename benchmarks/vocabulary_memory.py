"""Memory of a language model's loss against its vocabulary, as XLA's compiler for this machine reports it.

python benchmarks/vocabulary_memory.py --output benchmarks/results/vocabulary_memory_cpu.json

Nothing is timed or run: these are the temporaries of the compiled loss with both of its gradients.
`benchmarks/plots.py` draws them.
"""

import functools
from typing import Any

import harness
import jax
import jax.numpy as jnp
import linear_cross_entropy_peers as peers

import jaxops

ROWS, HIDDEN = 2048, 512
VOCABULARIES = (8192, 16384, 32768, 65536, 131072, 262144)
QUICK_VOCABULARIES = (1024, 2048)
LOSSES = {
    "logits, optax loss": peers.with_logits,
    "jaxops.linear_cross_entropy": jaxops.linear_cross_entropy,
    'jaxops.linear_cross_entropy(strategy="recompute")': functools.partial(
        jaxops.linear_cross_entropy, strategy="recompute"
    ),
}


def temporary_mb(loss: Any, vocabulary: int) -> float:
    shapes = ((ROWS, HIDDEN), (vocabulary, HIDDEN))
    x, weight = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)
    labels = jax.ShapeDtypeStruct((ROWS,), jnp.int32)
    compiled = jax.jit(jax.value_and_grad(loss, (0, 1))).lower(x, weight, labels).compile()
    return round(compiled.memory_analysis().temp_size_in_bytes / 1e6, 3)


def case(vocabulary: int) -> dict[str, Any]:
    found = {name: {"temporary_mb": temporary_mb(loss, vocabulary)} for name, loss in LOSSES.items()}
    return {
        "name": f"x float32[{ROWS}, {HIDDEN}], weight [{vocabulary}, {HIDDEN}]",
        "vocabulary": vocabulary,
        "candidates": found,
    }


def main() -> None:
    options = harness.arguments(__doc__.splitlines()[0])
    cases = [case(vocabulary) for vocabulary in (QUICK_VOCABULARIES if options.quick else VOCABULARIES)]
    harness.report("vocabulary_memory", cases, options.output)


if __name__ == "__main__":
    main()
