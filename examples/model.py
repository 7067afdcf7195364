"""A train step with operators of this library, as `docs/compiler.md` compiles and exports it."""

import jax
import jax.numpy as jnp

import jaxops
import lowering

params = {
    "table": 0.02 * jax.random.normal(jax.random.key(0), (8192, 256)),
    "head": 0.02 * jax.random.normal(jax.random.key(1), (8192, 256)),
}
optimizer = jaxops.ema_adam(3e-3, ema_decay=0.99)  # an optax transform; optax.chain, masked, schedules ... work
opt_state = optimizer.init(params)


def loss_fn(params, tokens, labels):
    x = jnp.tanh(jaxops.embedding(params["table"], tokens))
    return jaxops.linear_cross_entropy(x, params["head"], labels)  # label -100 is ignored


def step(params, opt_state, tokens, labels):
    loss, grads = jax.value_and_grad(loss_fn)(params, tokens, labels)
    params, opt_state = jaxops.fused_apply(optimizer, grads, opt_state, params)
    return params, opt_state, loss


tokens = jnp.arange(64).reshape(4, 16)
params, opt_state, loss = jax.jit(step, donate_argnums=(0, 1))(params, opt_state, tokens, tokens + 1)
averaged = jaxops.ema_params(opt_state)

# Under a name of its own for the command line, with donated arguments; and what to trace it with.
step = jax.jit(step, donate_argnums=(0, 1))
example_args = (params, opt_state, tokens, tokens + 1)

if __name__ == "__main__":
    large = {name: jax.ShapeDtypeStruct((32768, 512), jnp.float32) for name in params}
    text = jax.ShapeDtypeStruct((16, 1024), jnp.int32)
    print(lowering.explain(step, large, jax.eval_shape(optimizer.init, large), text, text, target="tpu-v5e"))
