"""What a user writes, checked by `mypy --strict` against the types that the packages ship."""

from typing import assert_type

import jax
import jax.numpy as jnp
import optax

import jaxops
import lowering
from jaxops import aclnn, mcdnn

Params = dict[str, jax.Array]
Step = tuple[Params, optax.OptState, jax.Array]

optimizer = jaxops.ema_adam(optax.cosine_decay_schedule(3e-3, 100), ema_decay=0.99)


def loss_fn(params: Params, tokens: jax.Array, labels: jax.Array) -> jax.Array:
    x = jnp.tanh(jaxops.embedding(params["table"], tokens))
    loss, aux = jaxops.linear_cross_entropy(x, params["head"], labels, return_aux=True)
    assert_type(aux, jaxops.LinearCrossEntropyAux)
    log_probs = jaxops.linear_log_probs(x, params["head"], labels)
    assert_type(log_probs, jax.Array)
    _, entropy = jaxops.linear_log_probs(x, params["head"], labels, temperature=0.7, return_entropy=True)
    assert_type(entropy, jax.Array)
    return loss + jaxops.linear_cross_entropy(x, params["head"], labels, row_weight=log_probs, reduction="sum")


def step(params: Params, opt_state: optax.OptState, tokens: jax.Array, labels: jax.Array) -> Step:
    loss, grads = jax.value_and_grad(loss_fn)(params, tokens, labels)
    params, opt_state = jaxops.fused_apply(optimizer, grads, opt_state, params)
    return params, opt_state, loss


def vision(x: jax.Array, scale: jax.Array, key: jax.Array) -> jax.Array:
    out = jaxops.batch_norm(x, scale, scale, layout="NCHW")
    assert_type(out, jaxops.BatchNormOutput)
    assert_type(jaxops.max_pool(out.y, 2, layout="NCHW"), jax.Array)
    with jaxops.use("pallas", softmax="reference"):
        return jaxops.dropout(key, jaxops.softmax(out.y, axis=(1, 2)), 0.1)


def ported(x: jax.Array, target: jax.Array, weight: jax.Array) -> jax.Array:
    y = mcdnn.softmax_forward(mcdnn.SoftmaxAlgorithm.ACCURATE, mcdnn.SoftmaxMode.CHANNEL, x)
    assert_type(y, jax.Array)
    losses, total = aclnn.nll_loss(x, target, weight, reduction=1, ignore_index=-100)
    assert_type(total, jax.Array)
    return losses


def compiler(params: Params, tokens: jax.Array) -> int:
    report = lowering.compile(loss_fn, params, tokens, tokens, target="tpu-v5e")
    assert_type(report, lowering.CompiledReport)
    assert_type(lowering.explain(loss_fn, params, tokens, tokens, target="cuda-h100"), lowering.Explanation)
    lowering.export(loss_fn, params, tokens, tokens).save("loss.jaxops")
    return report.memory.peak
