"""Text that the trained model writes."""

from typing import Any

import jax
import jax.numpy as jnp

import jaxops
from jaxops._demo import model
from jaxops._demo.model import Params, Shape

PROMPT = "import os\n\n\nclass "
TOKENS = 120
TEMPERATURE = 0.7


def written(params: Params, shape: Shape, tokenizer: Any, key: jax.Array) -> str:
    """Continues `PROMPT`, a token at a time, each drawn by its probability."""
    tokens = tokenizer.encode(PROMPT).ids

    @jax.jit
    def draw(window: jax.Array, last: jax.Array, key: jax.Array) -> jax.Array:
        hidden = model.hidden_states(params, window[None], shape, jaxops.embedding)[0, last]
        return jax.random.categorical(key, params["table"] @ hidden / TEMPERATURE)

    for key_of_token in jax.random.split(key, TOKENS):
        window = tokens[-shape.context :]
        # What lies behind the last token is not seen by it.
        padded = jnp.asarray(window + [0] * (shape.context - len(window)), jnp.int32)
        tokens.append(int(draw(padded, jnp.asarray(len(window) - 1), key_of_token)))
    return tokenizer.decode(tokens)
