"""The loss of a language model's last layer, with its gradients: `linear_cross_entropy` beside logits and optax.

python benchmarks/linear_cross_entropy.py --output benchmarks/results/linear_cross_entropy_cpu.json
"""

import functools
from typing import Any

import harness
import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxops.linear_cross_entropy import linear_cross_entropy
from lowering import timing

STRATEGIES = ("full", "grad_in_forward", "recompute")


def with_logits(x: jax.Array, weight: jax.Array, labels: jax.Array) -> jax.Array:
    """What one writes without the library."""
    logits = jnp.einsum("nh,vh->nv", x, weight, preferred_element_type=jnp.float32)
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, labels))


def candidate(loss: Any, operands: tuple[jax.Array, ...]) -> Any:
    """The loss and the gradients of x and weight, compiled, and the temporaries that they take."""
    compiled = jax.jit(jax.value_and_grad(loss, (0, 1))).lower(*operands).compile()
    temporary_bytes = compiled.memory_analysis().temp_size_in_bytes
    return functools.partial(compiled, *operands), {"temporary_mb": round(temporary_bytes / 1e6, 3)}


def case(rows: int, hidden: int, classes: int, dtype: str, repeats: int) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    x, weight = (
        jnp.asarray(rng.standard_normal(shape, np.float32), dtype) for shape in ((rows, hidden), (classes, hidden))
    )
    operands = (x, weight / hidden**0.5, jnp.asarray(rng.integers(0, classes, rows), jnp.int32))
    candidates = {"logits, optax loss": candidate(with_logits, operands)}
    for strategy in STRATEGIES:
        loss = functools.partial(linear_cross_entropy, strategy=strategy)
        candidates[f"jaxops {strategy}"] = candidate(loss, operands)
    times = timing.times_ms({name: run for name, (run, _) in candidates.items()}, repeats=repeats)
    found = {name: {**timing.summary(times[name]), **facts} for name, (_, facts) in candidates.items()}
    return {"name": f"x {dtype}[{rows}, {hidden}], weight [{classes}, {hidden}]", "candidates": found}


def main() -> None:
    options = harness.arguments(__doc__.splitlines()[0])
    sizes = (256, 64, 4096) if options.quick else (2048, 512, 32000)
    repeats = 5 if options.quick else 11
    harness.report("linear_cross_entropy", [case(*sizes, "float32", repeats)], options.output)


if __name__ == "__main__":
    main()
