r"""What `lowering.rewrite` saves in a language model that knows nothing of this library.

python benchmarks/rewriting.py --output benchmarks/results/rewriting_cpu.json

A GPT in plain Flax with a tied table, its training step, and its head alone: temporaries as XLA's compiler reports
them, times of runs, and how long a model of twelve layers takes to be traced.
"""

import time
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import harness
import jax
import jax.numpy as jnp
import optax

import lowering

REPEATS = 3
VOCABULARY, WIDTH = 50257, 512


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        mask = nn.make_causal_mask(x[..., 0])
        x = x + nn.MultiHeadDotProductAttention(8)(nn.LayerNorm()(x), mask=mask)
        return x + nn.Dense(x.shape[-1])(nn.gelu(nn.Dense(4 * x.shape[-1])(nn.LayerNorm()(x))))


class GPT(nn.Module):
    vocabulary: int
    width: int
    layers: int

    @nn.compact
    def __call__(self, tokens):
        table = nn.Embed(self.vocabulary, self.width)
        x = table(tokens) + nn.Embed(tokens.shape[1], self.width)(jnp.arange(tokens.shape[1]))
        for _ in range(self.layers):
            x = Block()(x)
        return table.attend(nn.LayerNorm()(x))


def loss_of(model: GPT) -> Callable[..., Any]:
    def loss(params, tokens):
        logits = model.apply(params, tokens[:, :-1])
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
    for name, loss in (("plain", loss_of(model)), ("rewritten", lowering.rewrite(loss_of(model)))):
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

    runs = {
        name: jax.jit(jax.value_and_grad(fn, (0, 1))).lower(x, weight).compile()
        for name, fn in (("plain", loss), ("rewritten", lowering.rewrite(loss)))
    }
    runs["rewritten gradient"] = jax.jit(lowering.rewrite(jax.value_and_grad(loss, (0, 1)))).lower(x, weight).compile()
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(1 if quick else REPEATS + 1):
        for name, run in runs.items():
            times[name].append(seconds(lambda run=run: jax.block_until_ready(run(x, weight))))
    found = {
        name: {
            "temporary_mb": round(run.memory_analysis().temp_size_in_bytes / 1e6, 1),
            "ms": round(1e3 * min(times[name]), 1),
        }
        for name, run in runs.items()
    }
    return {"name": f"head alone, with gradients: {rows} rows of {width}, V = {vocabulary}", "candidates": found}


def tracing(quick: bool) -> dict[str, Any]:
    """The fastest of several traces; each traces a new function, so JAX has cached nothing."""
    layers = 2 if quick else 12
    model = GPT(VOCABULARY, WIDTH, layers)
    tokens = jax.ShapeDtypeStruct((8, 257), jnp.int32)
    params = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((8, 256), jnp.int32))
    times: dict[str, list[float]] = {"plain": [], "rewritten": []}
    for _ in range(2 if quick else 6):
        plain, rewritten = loss_of(model), lowering.rewrite(loss_of(model))
        for name, loss in (("plain", plain), ("rewritten", rewritten)):
            times[name].append(seconds(lambda loss=loss: jax.jit(jax.value_and_grad(loss)).trace(params, tokens)))
    found = {name: {"trace_ms": round(1e3 * min(each), 1)} for name, each in times.items()}
    return {"name": f"tracing the gradient of {layers} layers", "candidates": found}


def seconds(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def main() -> None:
    options = harness.arguments(__doc__.splitlines()[0])
    cases = [make(options.quick) for make in (whole_step, head, tracing)]
    harness.report("rewriting", cases, options.output)


if __name__ == "__main__":
    main()
