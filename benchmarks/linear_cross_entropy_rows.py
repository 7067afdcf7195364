"""Time of a language model's loss, with both gradients, against the number of rows.

python benchmarks/linear_cross_entropy_rows.py --output benchmarks/results/linear_cross_entropy_rows_cpu.json
"""

from typing import Any

import harness
import jax
import jax.numpy as jnp
import linear_cross_entropy_peers as peers
import numpy as np
from linear_cross_entropy import candidate

import jaxops
from lowering.measuring import timing

HIDDEN, CLASSES = 256, 16384
ROWS = (128, 256, 512, 1024, 2048, 4096)
QUICK_ROWS = (32, 64)
LOSSES = {"logits, optax loss": peers.with_logits, "jaxops.linear_cross_entropy": jaxops.linear_cross_entropy}


def case(rows: int, repeats: int) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    x, weight = (jnp.asarray(rng.standard_normal((size, HIDDEN), np.float32)) for size in (rows, CLASSES))
    operands = (x, weight / HIDDEN**0.5, jnp.asarray(rng.integers(0, CLASSES, rows), jnp.int32))
    candidates = {name: candidate(loss, operands) for name, loss in LOSSES.items()}
    candidates |= peers.torch_peers(operands)
    times = timing.times_ms({name: run for name, (run, _) in candidates.items()}, repeats=repeats)
    return {
        "name": f"x {x.dtype}[{rows}, {HIDDEN}], weight [{CLASSES}, {HIDDEN}], on {jax.devices()[0].platform}",
        "rows": rows,
        "candidates": {name: {**timing.summary(times[name]), **facts} for name, (_, facts) in candidates.items()},
    }


def main() -> None:
    options = harness.arguments(__doc__.splitlines()[0])
    cases = [case(rows, 3 if options.quick else 15) for rows in (QUICK_ROWS if options.quick else ROWS)]
    harness.report("linear_cross_entropy_rows", cases, options.output)


if __name__ == "__main__":
    main()
