"""A train step in plain JAX that knows nothing of jaxops, for `docs/compiler.md`."""

import jax
import jax.numpy as jnp


def loss_fn(params, tokens, labels):
    logits = jnp.tanh(params["table"][tokens]) @ params["head"].T
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], axis=-1)
    return -jnp.mean(picked)


def step(params, tokens, labels):
    loss, grads = jax.value_and_grad(loss_fn)(params, tokens, labels)
    return jax.tree.map(lambda param, grad: param - 0.1 * grad, params, grads), loss


table = jax.ShapeDtypeStruct((8192, 256), jnp.float32)
tokens = jax.ShapeDtypeStruct((16, 256), jnp.int32)
example_args = ({"table": table, "head": table}, tokens, tokens)
