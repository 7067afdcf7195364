"""What tests of emulation share: operands, what products and a softmax are in float64, and users' settings."""

import jax
import jax.numpy as jnp
import numpy as np


def users_promotion():
    """A fixture: other people's code adds what it likes."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def normal(rng, *shape, dtype=jnp.float32):
    return jnp.asarray(rng.normal(size=shape), dtype)


def rounded(x):
    """float64 of what the matrix unit takes of an operand."""
    return np.asarray(jnp.asarray(x).astype(jnp.bfloat16)).astype(np.float64)


def softmax(x):
    exponentials = np.exp(x - x.max(-1, keepdims=True))
    return exponentials / exponentials.sum(-1, keepdims=True)
