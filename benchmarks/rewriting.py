r"""What `lowering.rewrite` saves in a language model that knows nothing of this library.

python benchmarks/rewriting.py --output benchmarks/results/rewriting_cpu.json

A GPT in plain Flax with a tied table, its training step, and its head alone: temporaries as XLA's compiler reports
them, times of runs, and how long a model of twelve layers takes to be traced. The time of all processors changes least
with what else a machine does. `docs/rewriting.md` shows the results.
"""

import functools
import gc
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import harness
import jax
import jax.numpy as jnp
import optax

import lowering

REPEATS = 5
VOCABULARY, WIDTH = 50257, 512


class Block(nn.Module):
    dtype: Any = None

    @nn.compact
    def __call__(self, x):
        mask, norm = nn.make_causal_mask(x[..., 0]), functools.partial(nn.LayerNorm, dtype=self.dtype)
        dense = functools.partial(nn.Dense, dtype=self.dtype)
        x = x + nn.MultiHeadDotProductAttention(8, self.dtype)(norm()(x), mask=mask)
        return x + dense(x.shape[-1])(nn.gelu(dense(4 * x.shape[-1])(norm()(x))))


class GPT(nn.Module):
    vocabulary: int
    width: int
    layers: int
    dtype: Any = None

    @nn.compact
    def __call__(self, tokens):
        table = nn.Embed(self.vocabulary, self.width, self.dtype)
        x = table(tokens) + nn.Embed(tokens.shape[1], self.width, self.dtype)(jnp.arange(tokens.shape[1]))
        for _ in range(self.layers):
            x = Block(self.dtype)(x)
        return table.attend(nn.LayerNorm(dtype=self.dtype)(x))


def loss_of(model: GPT) -> Callable[..., Any]:
    def loss(params, tokens):
        logits = model.apply(params, tokens[:, :-1]).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    return loss


def step_of(loss: Callable[..., Any]) -> Callable[..., Any]:
    optimizer = optax.adamw(1e-3)

    def step(params, state, tokens):
        value, grads = jax.value_and_grad(loss)(params, tokens)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    return step


def whole_step(quick: bool) -> dict[str, Any]:
    vocabulary, width, layers, batch, length = (1024, 32, 1, 2, 16) if quick else (VOCABULARY, WIDTH, 4, 8, 256)
    model = GPT(vocabulary, width, layers)
    tokens = jax.ShapeDtypeStruct((batch, length + 1), jnp.int32)
    params = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((batch, length), jnp.int32))
    state = jax.eval_shape(optax.adamw(1e-3).init, params)
    found = {}
    for name, loss in (("plain", loss_of(model)), ("rewritten loss", lowering.rewrite(loss_of(model)))):
        compiled = jax.jit(step_of(loss), donate_argnums=(0, 1)).lower(params, state, tokens).compile()
        found[name] = {"temporary_mb": round(compiled.memory_analysis().temp_size_in_bytes / 1e6, 1)}
    tensor = f"{layers} layers of width {width}, {batch} x {length} tokens, V = {vocabulary}"
    return {"name": f"training step of a GPT: {tensor}", "candidates": found}


def head(quick: bool) -> dict[str, Any]:
    rows, width, vocabulary = (64, 16, 512) if quick else (2048, WIDTH, VOCABULARY)
    x, weight = (jax.random.normal(jax.random.key(i), (n, width)) / 8 for i, n in enumerate((rows, vocabulary)))
    labels = jnp.arange(rows) % vocabulary

    def loss(x, weight):
        return optax.softmax_cross_entropy_with_integer_labels(x @ weight.T, labels).mean()

    functions = {
        "plain": jax.value_and_grad(loss, (0, 1)),
        "rewritten loss": jax.value_and_grad(lowering.rewrite(loss), (0, 1)),
        "its statistics": jax.value_and_grad(lowering.rewrite(loss, off=("cross_entropy_sum", "row_cone_sum")), (0, 1)),
        "rewritten gradient": lowering.rewrite(jax.value_and_grad(loss, (0, 1))),
    }
    runs = {name: jax.jit(fn).lower(x, weight).compile() for name, fn in functions.items()}
    found: dict[str, Any] = {}
    for name, run in runs.items():
        found[name] = {"temporary_mb": round(run.memory_analysis().temp_size_in_bytes / 1e6, 1)}
    cotangent = x @ weight.T
    products = {
        "logits": (jax.jit(lambda x, weight: x @ weight.T), x, weight),
        "gradient of x": (jax.jit(lambda cotangent, weight: cotangent @ weight), cotangent, weight),
        "gradient of the weight": (jax.jit(lambda cotangent, x: cotangent.T @ x), cotangent, x),
    }
    tasks = {name: [(run, x, weight)] for name, run in runs.items()} | {"three products": [*products.values()]}
    times: dict[str, list[Times]] = {name: [] for name in tasks}
    for _ in range(2 if quick else REPEATS + 1):
        for name, calls in tasks.items():
            each = [taken(lambda fn=fn, args=args: jax.block_until_ready(fn(*args))) for fn, *args in calls]
            times[name].append(Times(*map(sum, zip(*each, strict=True))))
    for name, each in times.items():
        found.setdefault(name, {}).update(medians(each[1:]))  # the first may compile
    return {"name": f"head alone, with gradients: {rows} rows of {width}, V = {vocabulary}", "candidates": found}


def tracing(quick: bool) -> dict[str, Any]:
    """The median of several traces; each traces a new function, so JAX has cached nothing."""
    layers = 2 if quick else 12
    model = GPT(VOCABULARY, WIDTH, layers)
    tokens = jax.ShapeDtypeStruct((8, 257), jnp.int32)
    params = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((8, 256), jnp.int32))
    state = jax.eval_shape(optax.adamw(1e-3).init, params)
    times: dict[str, list[Times]] = {"plain": [], "rewritten loss": [], "rewritten step": []}
    for _ in range(2 if quick else 2 * REPEATS):
        steps = {
            "plain": step_of(loss_of(model)),
            "rewritten loss": step_of(lowering.rewrite(loss_of(model))),
            "rewritten step": lowering.rewrite(step_of(loss_of(model))),
        }
        for name, step in steps.items():
            times[name].append(taken(lambda step=step: jax.jit(step).trace(params, state, tokens)))
    return {
        "name": f"tracing a training step of {layers} layers",
        "candidates": {name: medians(each) for name, each in times.items()},
    }


class Times(NamedTuple):
    """Milliseconds on the clock, and of all processors together."""

    ms: float
    processor_ms: float


def taken(run: Callable[[], Any]) -> Times:
    gc.collect()
    gc.disable()  # as timeit does
    start, processor_start = time.perf_counter(), time.process_time()
    run()
    times = Times(1e3 * (time.perf_counter() - start), 1e3 * (time.process_time() - processor_start))
    gc.enable()
    return times


def medians(times: list[Times]) -> dict[str, int]:
    columns = zip(Times._fields, zip(*times, strict=True), strict=True)
    return {name: round(statistics.median(each)) for name, each in columns}


SHOWN = {"temporary_mb": "temporaries, MB", "processor_ms": "processor time, ms"}
COLUMNS = ("plain", "three products", "rewritten loss", "its statistics", "rewritten gradient", "rewritten step")


def table(results: dict[str, Any]) -> str:
    """The results as a table of the page."""
    lines = [f"| | {' | '.join(COLUMNS)} |", "| --- " * (len(COLUMNS) + 1) + "|"]
    for case in results["cases"]:
        for measured, unit in SHOWN.items():
            found = [case["candidates"].get(column, {}).get(measured, "") for column in COLUMNS]
            if any(found):
                lines.append(" | ".join([f"| {case['name']}: {unit}", *map(str, found)]) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    options = harness.arguments(__doc__.splitlines()[0])
    cases = [make(options.quick) for make in (whole_step, head, tracing)]
    harness.report("rewriting", cases, options.output)


if __name__ == "__main__":
    main()
