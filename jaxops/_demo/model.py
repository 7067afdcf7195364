"""A small decoder-only transformer in plain JAX: the parameters are a pytree, the model is a function.

What the library is for is passed in: how tokens are embedded. The loss on top of the hidden states belongs to training.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

Params = dict[str, Any]
Embedding = Callable[[jax.Array, jax.Array], jax.Array]


class Shape(NamedTuple):
    """The sizes of the model."""

    vocabulary: int
    width: int = 160
    heads: int = 4
    depth: int = 4
    context: int = 64


def init(key: jax.Array, shape: Shape) -> Params:
    """Draws random parameters. Those of blocks are stacked over the depth; one table embeds tokens and scores them."""
    keys = iter(jax.random.split(key, 4))
    width, depth = shape.width, shape.depth

    def normal(*dimensions: int, fan_in: int) -> jax.Array:
        return jax.random.normal(next(keys), dimensions) / math.sqrt(fan_in)

    return {
        "table": normal(shape.vocabulary, width, fan_in=4 * width),
        "positions": normal(shape.context, width, fan_in=4 * width),
        "blocks": {
            "query_key_value": normal(depth, width, 3 * width, fan_in=width),
            "attention_out": jnp.zeros((depth, width, width)),  # At first, each block passes on what it gets.
            "mlp_in": normal(depth, width, 4 * width, fan_in=width),
            "mlp_out": jnp.zeros((depth, 4 * width, width)),
        },
    }


def hidden_states(params: Params, tokens: jax.Array, shape: Shape, embedding: Embedding) -> jax.Array:
    """Computes the last block's output at each position: int32 (batch, length) -> float32 (batch, length, width)."""
    x = _rms_norm(embedding(params["table"], tokens) + params["positions"][None, : tokens.shape[1]])

    # The backward pass keeps the matrix products and recomputes what lies between them, which is cheap.
    @functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.dots_saveable)
    def block(x: jax.Array, layer: Params) -> tuple[jax.Array, None]:
        x = x + _attention(layer, _rms_norm(x), shape.heads)
        return x + _mlp(layer, _rms_norm(x)), None

    x, _ = jax.lax.scan(block, x, params["blocks"])
    return _rms_norm(x)


def _attention(layer: Params, x: jax.Array, heads: int) -> jax.Array:
    batch, length, width = x.shape
    query, key, value = jnp.moveaxis((x @ layer["query_key_value"]).reshape(batch, length, 3, heads, -1), 2, 0)
    mixed = jax.nn.dot_product_attention(query, key, value, is_causal=True)
    return mixed.reshape(batch, length, width) @ layer["attention_out"]


def _mlp(layer: Params, x: jax.Array) -> jax.Array:
    return jnp.square(jax.nn.relu(x @ layer["mlp_in"])) @ layer["mlp_out"]


def _rms_norm(x: jax.Array) -> jax.Array:
    """Scales rows to a root mean square of one. No gain: the matrix that follows has it."""
    return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + 1e-6)
