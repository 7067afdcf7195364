"""The gradient of an embedding: ours beside jnp's scatter, `segment_sum` and, where it is installed, PyTorch.

python benchmarks/embedding.py --output benchmarks/results/embedding_cpu.json
"""

import functools
import importlib.util
from collections.abc import Callable
from typing import Any

import harness
import jax
import jax.numpy as jnp
import numpy as np

import lowering
from jaxops import embedding, embedding_row_gradients
from lowering.measuring import timing

# Rows and width of the table, positions, and how ids are drawn.
CASES = ((50257, 768, 8192, "zipf"), (1_000_000, 128, 65536, "uniform"), (50257, 768, 65536, "one"))


def draw_ids(kind: str, rows: int, positions: int) -> np.ndarray:
    rng = np.random.default_rng(0)
    if kind == "one":
        return np.full(positions, rows // 2, np.int32)
    if kind == "uniform":
        return rng.integers(0, rows, positions).astype(np.int32)
    # Word frequencies: the n-th most frequent id is drawn in proportion to 1 / n.
    frequencies = 1 / np.arange(1, rows + 1)
    return rng.choice(rows, positions, p=frequencies / frequencies.sum()).astype(np.int32)


def ours(grad: jax.Array, ids: jax.Array, rows: int) -> jax.Array:
    table = jnp.zeros((rows, grad.shape[1]), grad.dtype)
    return jax.vjp(lambda table: embedding(table, ids), table)[1](grad)[0]


def of_indexing(grad: jax.Array, ids: jax.Array, rows: int) -> jax.Array:
    """What one writes without a library; it sums 16-bit gradients in 16 bits."""
    table = jnp.zeros((rows, grad.shape[1]), grad.dtype)
    return jax.vjp(lambda table: table[ids], table)[1](grad)[0]


def by_scatter(grad: jax.Array, ids: jax.Array, rows: int) -> jax.Array:
    return jnp.zeros((rows, grad.shape[1])).at[ids].add(grad.astype(jnp.float32)).astype(grad.dtype)


def by_segment_sum(grad: jax.Array, ids: jax.Array, rows: int) -> jax.Array:
    return jax.ops.segment_sum(grad.astype(jnp.float32), ids, rows).astype(grad.dtype)


def of_rows(grad: jax.Array, ids: jax.Array, rows: int) -> Any:
    return embedding_row_gradients(grad, ids, num_weights=rows)


def compiled(fn: Callable[..., Any], grad: jax.Array, ids: jax.Array, rows: int) -> tuple[Any, dict[str, Any]]:
    program = jax.jit(functools.partial(fn, rows=rows)).lower(grad, ids).compile()
    memory = program.memory_analysis()
    return functools.partial(program, grad, ids), {"temporary_mb": round(memory.temp_size_in_bytes / 1e6, 1)}


def by_torch(grad: np.ndarray, ids: np.ndarray, rows: int, dtype: str) -> tuple[Any, dict[str, Any]]:
    import torch

    device = "cuda" if jax.devices()[0].platform == "gpu" and torch.cuda.is_available() else "cpu"
    rows_of_grad = torch.from_numpy(grad).to(device, getattr(torch, dtype))
    indices = torch.from_numpy(ids.astype(np.int64)).to(device)

    def run() -> None:
        torch.ops.aten.embedding_dense_backward(rows_of_grad, indices, rows, -1, False)
        if device == "cuda":
            torch.cuda.synchronize()

    return run, {}


def case(rows: int, width: int, positions: int, kind: str, dtype: str, repeats: int) -> dict[str, Any]:
    ids = draw_ids(kind, rows, positions)
    values = np.random.default_rng(1).standard_normal((positions, width), np.float32)
    arguments = jnp.asarray(values, dtype), jnp.asarray(ids), rows
    candidates = {
        "jaxops": compiled(ours, *arguments),
        "jaxops, rows that were looked up": compiled(of_rows, *arguments),
        "jax.grad of indexing": compiled(of_indexing, *arguments),
        "jnp scatter, in float32": compiled(by_scatter, *arguments),
        "segment_sum, in float32": compiled(by_segment_sum, *arguments),
    }
    if jax.devices()[0].platform != "cpu":
        with lowering.use(embedding_dense_backward="pallas"):
            candidates["jaxops, Pallas"] = compiled(ours, *arguments)
    if importlib.util.find_spec("torch"):
        candidates["torch"] = by_torch(values, ids, rows, dtype)
    times = timing.times_ms({name: run for name, (run, _) in candidates.items()}, repeats=repeats)
    facts = {name: {**timing.summary(times[name]), **facts} for name, (_, facts) in candidates.items()}
    distinct = len(np.unique(ids))
    return {
        "name": f"{dtype}[{rows}, {width}], {positions} positions of {distinct} ids ({kind})",
        "candidates": facts,
    }


def main() -> None:
    options = harness.arguments(__doc__.splitlines()[0])
    sizes = [(500, 128, 256, kind) for *_, kind in CASES] if options.quick else CASES
    repeats = 5 if options.quick else 21
    found = [case(*size, dtype, repeats) for size in sizes for dtype in ("float32", "bfloat16")]
    harness.report("embedding", found, options.output)


if __name__ == "__main__":
    main()
