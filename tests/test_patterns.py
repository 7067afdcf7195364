"""Plain JAX that an operator would replace is named with its line, and nothing else is."""

import inspect
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P
from typer.testing import CliRunner

import jaxops
import lowering
from jaxops.__main__ import app
from jaxops.pooling_patterns import SELECT_AND_SCATTER
from lowering.patterns import graphs, opportunities
from lowering.register import patterns

LOGITS, ADAM, POOLING = "jaxops.linear_cross_entropy", "jaxops.ema_adam", "jaxops.max_pool"


@pytest.fixture(autouse=True)
def _users_promotion() -> Iterator[None]:
    """What users have: optax itself needs it."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


X, W, Y = f32(6, 8), f32(8, 16), jax.ShapeDtypeStruct((6,), jnp.int32)
PLANTED: dict[str, tuple[Callable[..., Any], tuple[Any, ...], str, int]] = {}
CLEAN: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {}


def planted(replacement: str, *args: Any, count: int = 1) -> Callable[[Any], Any]:
    """Enters a function which has the pattern on the line that is marked with `# here`."""

    def enter(fn: Callable[..., Any]) -> Callable[..., Any]:
        PLANTED[fn.__name__] = (fn, args, replacement, count)
        return fn

    return enter


def clean(*args: Any) -> Callable[[Any], Any]:
    def enter(fn: Callable[..., Any]) -> Callable[..., Any]:
        CLEAN[fn.__name__] = (fn, args)
        return fn

    return enter


# Cross entropies of a linear layer.


@planted(LOGITS, W, X, Y)
def optax_integer_labels(w, x, labels):
    logits = x @ w  # here
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


@planted(LOGITS, W, X, Y)
def optax_one_hot(w, x, labels):
    logits = jnp.einsum("nh,hv->nv", x, w)  # here
    return optax.softmax_cross_entropy(logits, jax.nn.one_hot(labels, 16)).mean()


@planted(LOGITS, W, X, f32(6, 16))
def optax_probabilities(w, x, probabilities):
    return optax.softmax_cross_entropy(x @ w, probabilities).sum()  # here


@planted(LOGITS, W, X, f32(6, 16))
def distillation(w, x, teacher):
    student = jax.nn.log_softmax(x @ w / 2.0)  # here
    return optax.losses.kl_divergence(student, jax.nn.softmax(teacher)).mean()


@planted(LOGITS, W, X, Y)
def take_along_axis(w, x, labels):
    log_probs = jax.nn.log_softmax(jnp.dot(x, w))  # here
    return -jnp.take_along_axis(log_probs, labels[:, None], axis=-1).mean()


@planted(LOGITS, W, X, Y)
def advanced_indexing(w, x, labels):
    log_probs = jax.nn.log_softmax(x @ w)  # here
    return -log_probs[jnp.arange(6), labels].sum()


@planted(LOGITS, f32(16, 8), f32(2, 3, 8), jax.ShapeDtypeStruct((2, 3), jnp.int32))
def sequences_with_a_tied_table(table, x, labels):
    logits = jnp.einsum("bsh,vh->bsv", x, table)  # here
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    kept = labels >= 0
    return jnp.sum(jnp.where(kept, losses, 0)) / jnp.sum(kept)


@planted(LOGITS, f32(8, 16), f32(2, 4, 8), jax.ShapeDtypeStruct((2, 4), jnp.int32))
def shifted_tokens(w, x, tokens):
    logits = x @ w  # here
    log_probs = jax.nn.log_softmax(logits[:, :-1])
    return -jnp.take_along_axis(log_probs, tokens[:, 1:, None], 2).mean()


@planted(LOGITS, W, f32(16), X, Y)
def hand_written(w, bias, x, labels):
    logits = x @ w + bias  # here
    logits = 30 * jnp.tanh(logits / 30)
    logits = jnp.where(jnp.arange(16) < 15, logits, -1e9)
    maximum = jnp.max(logits, axis=1, keepdims=True)
    lse = jnp.log(jnp.sum(jnp.exp(logits - maximum), axis=1)) + maximum[:, 0]
    return jnp.mean(lse - jnp.sum(jnp.where(labels[:, None] == jnp.arange(16), logits, 0), axis=1))


@planted(LOGITS, W, X, Y)
def log_of_softmax(w, x, labels):
    probabilities = jax.nn.softmax(x @ w)  # here
    return -jnp.sum(jax.nn.one_hot(labels, 16) * jnp.log(probabilities + 1e-9)) / 6


@planted(LOGITS, W, X, Y)
def one_hot_by_einsum(w, x, labels):
    log_probs = jax.nn.log_softmax(x @ w)  # here
    return -jnp.einsum("nv,nv->n", log_probs, jax.nn.one_hot(labels, 16)).mean()


@planted(LOGITS, jax.ShapeDtypeStruct((8, 16), jnp.bfloat16), jax.ShapeDtypeStruct((6, 8), jnp.bfloat16), Y)
def sixteen_bits(w, x, labels):
    logits = (x @ w).astype(jnp.float32)  # here
    lse = jax.nn.logsumexp(logits, axis=-1)
    picked = jnp.take_along_axis(logits, labels[:, None], -1)[:, 0]
    return (lse - picked + 1e-4 * lse**2).mean()


@planted(LOGITS, W, X, Y)
def our_own_nll_loss(w, x, labels):
    return jaxops.nll_loss(jax.nn.log_softmax(x @ w), labels)  # here


@planted(LOGITS, W, X, Y)
def smoothed_labels(w, x, labels):
    targets = optax.smooth_labels(jax.nn.one_hot(labels, 16), 0.1)
    return optax.softmax_cross_entropy(x @ w, targets).mean()  # here


@planted(LOGITS, W, f32(8), jax.ShapeDtypeStruct((), jnp.int32))
def one_row(w, x, label):
    return -jax.nn.log_softmax(x @ w)[label]  # here


@planted(LOGITS, W, X, Y)
def vmap_over_rows(w, x, labels):
    def row(x, label):
        return -jax.nn.log_softmax(x @ w)[label]  # here

    return jax.vmap(row)(x, labels).mean()


@planted(LOGITS, W, X, Y)
def value_and_grad(w, x, labels):
    def loss(w):
        logits = x @ w  # here
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    return jax.value_and_grad(loss)(w)


@planted(LOGITS, W, X, Y)
def gradient_of_jit_and_checkpoint(w, x, labels):
    @jax.jit
    @jax.checkpoint
    def loss(w, x):
        return optax.softmax_cross_entropy(x @ w, jax.nn.one_hot(labels, 16)).mean()  # here

    return jax.jit(jax.grad(loss, argnums=(0, 1)))(w, x)


@planted(LOGITS, W, X, Y)
def forward_mode_of_a_gradient(w, x, labels):
    def loss(w):
        return -jnp.take_along_axis(jax.nn.log_softmax(x @ w), labels[:, None], 1).mean()  # here

    return jax.jvp(jax.grad(loss), (w,), (w,))


@planted(LOGITS, W, f32(5, 6, 8), jax.ShapeDtypeStruct((5, 6), jnp.int32), count=5)
def gradient_of_scan(w, x, labels):
    def total(w):
        def chunk(total, rows):
            logits = rows[0] @ w  # here
            return total + optax.softmax_cross_entropy_with_integer_labels(logits, rows[1]).sum(), None

        return lax.scan(chunk, 0.0, (x, labels))[0]

    return jax.value_and_grad(total)(w)


@planted(LOGITS, W, f32(5, 6, 8), jax.ShapeDtypeStruct((5, 6), jnp.int32), count=5)
def gradient_of_scanned_checkpoints(w, x, labels):
    def total(w):
        @jax.checkpoint
        def chunk(total, rows):
            losses = optax.softmax_cross_entropy_with_integer_labels(rows[0] @ w, rows[1])  # here
            return total + losses.sum(), None

        return lax.scan(chunk, 0.0, (x, labels))[0]

    return jax.grad(total)(w)


@planted(LOGITS, W, X, Y)
def branch_of_cond(w, x, labels):
    def loss():
        return optax.softmax_cross_entropy_with_integer_labels(x @ w, labels).mean()  # here

    return lax.cond(labels[0] > 0, loss, lambda: 0.0)


@planted(LOGITS, W, f32(8, 8), jax.ShapeDtypeStruct((8,), jnp.int32))
def shard_map(w, x, labels):
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))

    def loss(w, x, labels):
        local = optax.softmax_cross_entropy_with_integer_labels(x @ w, labels).mean()  # here
        return lax.pmean(local, "data")

    return jax.shard_map(loss, mesh=mesh, in_specs=(P(), P("data"), P("data")), out_specs=P())(w, x, labels)


@planted(LOGITS, X, Y)
def flax_linen_head(x, labels):
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.gelu(nn.LayerNorm()(nn.Dense(8)(x)))
            return nn.Dense(16, name="head")(x)  # here

    model = Model()
    params = jax.eval_shape(model.init, jax.random.key(0), x)
    params = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), params)

    def loss(params):
        logits = model.apply(params, x)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    return jax.value_and_grad(loss)(params)


@planted(LOGITS, X, Y)
def flax_nnx_head(x, labels):
    model = nnx.Linear(8, 16, rngs=nnx.Rngs(0))

    @nnx.jit
    def loss(model):
        logits = model(x)  # here
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    return nnx.value_and_grad(loss)(model)[0]


@planted(LOGITS, W, X, Y)
def second_of_two_alike(w, x, labels):
    # What JAX jits inside remembers the line of its first caller, which is not this one.
    jax.nn.log_softmax(x @ w)
    log_probs = jax.nn.log_softmax(x @ w)  # here
    return -jnp.take_along_axis(log_probs, labels[:, None], axis=-1).mean()


# Adam, then an average.


def params_like(*shapes: tuple[int, ...]) -> dict[str, jax.ShapeDtypeStruct]:
    return {f"p{i}": f32(*shape) for i, shape in enumerate(shapes)}


PARAMS = params_like((3, 4), (4,))


def state_of(optimizer: optax.GradientTransformation, params: Any = None) -> Any:
    return jax.eval_shape(optimizer.init, PARAMS if params is None else params)


ADAMW = optax.adamw(1e-3)
CHAIN = optax.chain(
    optax.clip_by_global_norm(1.0), optax.adamw(optax.cosine_decay_schedule(1e-3, 100), mu_dtype="bfloat16")
)
HYPERPARAMS = optax.inject_hyperparams(optax.adamw)(1e-3)
FROM_OPTAX_EMA = optax.ema(0.99, debias=True)


@planted(ADAM, PARAMS, PARAMS, state_of(ADAMW), PARAMS, count=2)
def adamw_and_incremental_update(params, grads, state, average):
    updates, state = ADAMW.update(grads, state, params)  # here
    params = optax.apply_updates(params, updates)
    return params, state, optax.incremental_update(params, average, 0.01)


@planted(ADAM, PARAMS, PARAMS, state_of(CHAIN), PARAMS, f32(), count=2)
def chain_and_lerp_with_a_traced_decay(params, grads, state, average, decay):
    updates, state = CHAIN.update(grads, state, params)  # here
    params = optax.apply_updates(params, updates)
    return params, state, jax.tree.map(lambda e, p: decay * e + (1 - decay) * p, average, params)


@planted(ADAM, PARAMS, PARAMS, state_of(HYPERPARAMS), PARAMS, count=2)
def injected_hyperparams_and_increment(params, grads, state, average):
    updates, state = HYPERPARAMS.update(grads, state, params)  # here
    params = optax.apply_updates(params, updates)
    return params, state, jax.tree.map(lambda e, p: e + 0.01 * (p - e), average, params)


@planted(ADAM, PARAMS, PARAMS, state_of(ADAMW), state_of(FROM_OPTAX_EMA), count=2)
def adamw_and_optax_ema(params, grads, state, average):
    updates, state = ADAMW.update(grads, state, params)  # here
    params = optax.apply_updates(params, updates)
    return params, state, FROM_OPTAX_EMA.update(params, average)


@planted(ADAM, *(f32(5),) * 5, jax.ShapeDtypeStruct((), jnp.int32))
def hand_written_adam(param, grad, mu, nu, average, step):
    mu = 0.9 * mu + 0.1 * grad
    nu = 0.999 * nu + (1 - 0.999) * grad * grad
    mu_hat, nu_hat = mu / (1 - 0.9**step), nu / (1 - 0.999**step)
    param = param * (1 - 1e-5) - 1e-3 * mu_hat / (jnp.sqrt(nu_hat) + 1e-8)  # here
    return param, mu, nu, 0.99 * average + 0.01 * param


@planted(ADAM, *(f32(5),) * 5)
def hand_written_adam_by_rsqrt(param, grad, mu, nu, average):
    grad = grad + 0.01 * param
    mu = mu + 0.1 * (grad - mu)
    nu = nu + 0.001 * (jnp.square(grad) - nu)
    param = param - 1e-3 * (mu * lax.rsqrt(nu + 1e-8))  # here
    average = param + 0.99 * (average - param)
    return param, mu, nu, average


@planted(ADAM, *(f32(),) * 4, state_of(ADAMW, f32()))
def a_scalar_parameter(param, x, average, grad_scale, state):
    grad = jax.grad(lambda p: jnp.sin(p * x))(param) * grad_scale
    updates, state = ADAMW.update(grad, state, param)  # here
    param = optax.apply_updates(param, updates)
    return param, state, 0.9 * average + 0.1 * param


@planted(ADAM, PARAMS, state_of(optax.adam(1e-2)), PARAMS, f32(7, 3), count=14)
def training_loop(params, state, average, batches):
    optimizer = optax.adam(1e-2)

    def loss(params, x):
        return jnp.mean(jnp.tanh(x @ params["p0"] + params["p1"]) ** 2)

    @jax.jit
    def step(carry, x):
        params, state, average = carry
        grads = jax.grad(loss)(params, x)
        updates, state = optimizer.update(grads, state, params)  # here
        params = optax.apply_updates(params, updates)
        return (params, state, optax.incremental_update(params, average, 0.01)), None

    return lax.scan(step, (params, state, average), batches)[0]


@planted(ADAM, PARAMS, [PARAMS, PARAMS], state_of(ADAMW), PARAMS, count=4)
def two_steps_unrolled(params, gradients, state, average):
    for grads in gradients:
        updates, state = ADAMW.update(grads, state, params)  # here
        params = optax.apply_updates(params, updates)
        average = optax.incremental_update(params, average, 0.01)
    return params, state, average


# Functions that have nothing to replace.


@clean(W, X)
def classifier_output(w, x):
    return jax.nn.log_softmax(x @ w)


@clean(W, X)
def probability_of_one_class(w, x):
    return jax.nn.log_softmax(x @ w)[:, 1]


@clean(W, X)
def gradient_of_an_output(w, x):
    return jax.grad(lambda w: jax.nn.log_softmax(x @ w).sum())(w)


@clean(*(f32(2, 3, 6, 8),) * 3)
def attention(query, key, value):
    scores = jnp.einsum("bhqd,bhkd->bhqk", query, key) / 8**0.5
    scores = jnp.where(jnp.tril(jnp.ones((6, 6), bool)), scores, -jnp.inf)
    return jnp.einsum("bhqk,bhkd->bhqd", jax.nn.softmax(scores), value)


@clean(*(f32(2, 6, 3, 8),) * 3)
def gradient_of_attention(query, key, value):
    return jax.grad(lambda *qkv: jax.nn.dot_product_attention(*qkv, is_causal=True).sum(), (0, 1, 2))(query, key, value)


@clean(*(f32(6, 8),) * 3)
def attention_with_its_log_sum_exp(query, key, value):
    scores = query @ key.T
    lse = jax.nn.logsumexp(scores, axis=-1, keepdims=True)
    return jnp.exp(scores - lse) @ value, lse


@clean(f32(8, 4), X, f32(4, 8, 8))
def router_with_z_loss_and_balance(w, x, experts):
    logits = x @ w
    probabilities = jax.nn.softmax(logits)
    gates, chosen = lax.top_k(probabilities, 2)
    load = jax.nn.one_hot(chosen[:, 0], 4).mean(0)
    balance = 4 * jnp.sum(load * probabilities.mean(0))
    z_loss = jnp.mean(jax.nn.logsumexp(logits, axis=-1) ** 2)
    outputs = jnp.einsum("nh,nkhd->nkd", x, experts[chosen])
    return jnp.einsum("nk,nkd->nd", gates, outputs), balance + z_loss


@clean(W, X, jax.eval_shape(lambda: jax.random.key(0)))
def policy_that_samples_its_actions(w, x, key):
    logits = x @ w
    actions = jax.random.categorical(key, logits)
    return jnp.take_along_axis(jax.nn.log_softmax(logits), actions[:, None], 1)


@clean(W, X)
def entropy(w, x):
    log_probs = jax.nn.log_softmax(x @ w)
    return -jnp.sum(jnp.exp(log_probs) * log_probs, axis=-1).mean()


@clean(W, X, Y)
def values_of_actions(w, x, actions):
    return jnp.take_along_axis(x @ w, actions[:, None], 1).mean()


@clean(f32(6, 16), Y)
def loss_of_given_logits(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


@clean(f32(8, 1), X, f32(6))
def binary_cross_entropy(w, x, labels):
    return optax.sigmoid_binary_cross_entropy((x @ w)[:, 0], labels).mean()


@clean(W, X, f32(6, 16))
def squared_error(w, x, y):
    return jax.value_and_grad(lambda w: optax.l2_loss(jnp.tanh(x @ w), y).mean())(w)


@clean(f32(8, 16), f32(2, 10, 8), jax.ShapeDtypeStruct((2, 3), jnp.int32))
def connectionist_temporal_classification(w, x, labels):
    return jax.grad(lambda w: optax.ctc_loss(x @ w, jnp.zeros((2, 10)), labels, jnp.zeros((2, 3))).mean())(w)


@clean(f32(16, 8), X, Y)
def our_cross_entropy(w, x, labels):
    return jax.value_and_grad(lambda w: jaxops.linear_cross_entropy(x, w, labels))(w)


@clean(f32(16, 8), X, Y)
def second_derivatives_of_our_cross_entropy(w, x, labels):
    def loss(w):
        return jaxops.linear_cross_entropy(x, w, labels, strategy="recompute")

    return jax.jvp(jax.grad(loss), (w,), (w,))


@clean(PARAMS, PARAMS, state_of(ADAMW))
def adam_without_an_average(params, grads, state):
    updates, state = ADAMW.update(grads, state, params)
    return optax.apply_updates(params, updates), state


@clean(PARAMS, PARAMS, state_of(ADAMW), PARAMS)
def average_of_the_parameters_before(params, grads, state, average):
    average = optax.incremental_update(params, average, 0.01)
    updates, state = ADAMW.update(grads, state, params)
    return optax.apply_updates(params, updates), state, average


@clean(PARAMS, PARAMS, state_of(ADAMW), PARAMS)
def distance_to_the_first_parameters(params, grads, state, first):
    updates, state = ADAMW.update(grads, state, params)
    params = optax.apply_updates(params, updates)
    return params, state, optax.tree.norm(optax.tree.sub(params, first))


@clean(f32(3, 4), f32(3, 4), f32(4), f32(4), state_of(ADAMW, f32(3, 4)))
def adam_and_batch_norm_statistics(x, w, mean, var, state):
    updates, state = ADAMW.update(x, state, w)
    mean = 0.9 * mean + 0.1 * x.mean(0)
    var = 0.9 * var + 0.1 * x.var(0)
    return optax.apply_updates(w, updates), (x - mean) / jnp.sqrt(var + 1e-5), mean, var, state


@clean(f32(5, 4), jax.ShapeDtypeStruct((), jnp.int32))
def flax_batch_norm(x, _):
    model = nn.BatchNorm(use_running_average=False)
    return model.init_with_output(jax.random.key(0), x)


OTHER_OPTIMIZERS = {
    "sgd": optax.sgd(1e-2, momentum=0.9),
    "rmsprop": optax.rmsprop(1e-3),
    "lion": optax.lion(1e-3),
    "lamb": optax.lamb(1e-3),
    "nadam": optax.nadam(1e-3),
    "adabelief": optax.adabelief(1e-3),
    "amsgrad": optax.amsgrad(1e-3),
    "adamax": optax.adamax(1e-3),
    "adafactor": optax.adafactor(1e-3),
}


def _averaged_after(optimizer: optax.GradientTransformation) -> Callable[..., Any]:
    def step(params, grads, state, average):
        updates, state = optimizer.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        return params, state, optax.incremental_update(params, average, 0.01)

    return step


for _name, _optimizer in OTHER_OPTIMIZERS.items():
    CLEAN[f"average_after_{_name}"] = (_averaged_after(_optimizer), (PARAMS, PARAMS, state_of(_optimizer), PARAMS))

ADAM_WITH_MOMENTUM = optax.chain(optax.adam(1e-3), optax.trace(0.9))
OURS = jaxops.ema_adam(1e-3)


@clean(PARAMS, PARAMS, state_of(ADAM_WITH_MOMENTUM))
def momentum_of_updates(params, grads, state):
    updates, state = ADAM_WITH_MOMENTUM.update(grads, state, params)
    return optax.apply_updates(params, updates), state


@clean(PARAMS, PARAMS, state_of(OURS))
def our_optimizer(params, grads, state):
    updates, state = OURS.update(grads, state, params)
    return optax.apply_updates(params, updates), state


@clean(PARAMS, PARAMS, state_of(OURS))
def derivative_of_our_optimizer(params, grads, state):
    def after(params):
        params, new_state = jaxops.fused_apply(OURS, grads, state, params)
        return optax.tree.norm(params) + optax.tree.norm(jaxops.ema_params(new_state))

    return jax.grad(after)(params)


@clean(f32(2, 8, 8, 3))
def pooling_without_a_gradient(x):
    return nn.max_pool(x, (2, 2), (2, 2))


@clean(f32(2, 8, 8, 3))
def gradient_of_average_pooling(x):
    return jax.grad(lambda x: nn.avg_pool(x, (2, 2), (2, 2)).sum())(x)


@clean(f32(2, 8, 8, 3))
def gradient_of_min_pooling(x):
    window = (1, 2, 2, 1)
    return jax.grad(lambda x: lax.reduce_window(x, jnp.inf, lax.min, window, window, "VALID").sum())(x)


@clean(f32())
def nothing_at_all(x):
    return x


def marked_line(fn: Callable[..., Any]) -> int:
    lines, first = inspect.getsourcelines(fn)
    (offset,) = (i for i, line in enumerate(lines) if line.rstrip().endswith("# here"))
    return first + offset


@pytest.mark.parametrize("name", PLANTED)
def test_explain_finds_what_is_planted(name: str) -> None:
    fn, args, replacement, count = PLANTED[name]
    (found,) = lowering.explain(fn, *args).opportunities
    assert found.replacement == replacement
    assert found.source.startswith(f"test_patterns.py:{marked_line(fn)} (")
    assert found.count == count


@pytest.mark.parametrize("name", CLEAN)
def test_explain_finds_nothing_in_clean_functions(name: str) -> None:
    fn, args = CLEAN[name]
    assert lowering.explain(fn, *args).opportunities == ()


@pytest.mark.parametrize("name", [name for name in PLANTED if "shard" not in name])
def test_explain_finds_the_same_under_vmap(name: str) -> None:
    fn, args, replacement, _ = PLANTED[name]
    batched = jax.tree.map(lambda x: jax.ShapeDtypeStruct((2, *x.shape), x.dtype), args)
    (found,) = lowering.explain(jax.vmap(fn), *batched).opportunities
    assert found.replacement == replacement


POOL = (f32(2, 8, 8, 3),)


def forward_pooling_gradient(x):
    return jax.jvp(lambda x: nn.max_pool(x, (2, 2), (2, 2)), (x,), (x,))  # here


def reverse_pooling_gradient(x):
    return jax.grad(lambda x: nn.max_pool(jnp.sin(x), (3, 3), (2, 2), "SAME").sum())(x)  # here


@pytest.mark.parametrize("fn", [forward_pooling_gradient, reverse_pooling_gradient], ids=lambda fn: fn.__name__)
def test_pattern_of_pooling_is_found(fn: Callable[..., Any]) -> None:
    (found,) = opportunities(jax.make_jaxpr(fn)(*POOL).jaxpr, [SELECT_AND_SCATTER])
    assert found.replacement == POOLING
    assert found.source.startswith(f"test_patterns.py:{marked_line(fn)} (")
    assert "float32[2,8,8,3]" in found.detail


@pytest.mark.parametrize("name", [*CLEAN, *PLANTED])
def test_pattern_of_pooling_is_found_nowhere_else(name: str) -> None:
    fn, args = (CLEAN | PLANTED)[name][:2]
    assert opportunities(jax.make_jaxpr(fn)(*args).jaxpr, [SELECT_AND_SCATTER]) == ()


def test_explanation_shows_opportunities_below_the_table() -> None:
    explanation = lowering.explain(sixteen_bits, *PLANTED["sixteen_bits"][1])
    line = str(explanation).splitlines()[-1]
    (shown,) = json.loads(explanation.to_json())["opportunities"]
    assert line == str(explanation.opportunities[0])
    # 6 x 16 logits of two bytes
    assert "bfloat16[6,16] (192 bytes)" in line
    assert shown["source"].endswith("(sixteen_bits)")
    assert shown["count"] == 1


def test_command_shows_opportunities_below_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = inspect.getsource(optax_integer_labels).replace("@planted(LOGITS, W, X, Y)", "import optax")
    (tmp_path / "head.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    arguments = ("--arg", "f32[8,16]", "--arg", "f32[6,8]", "--arg", "i32[6]")
    result = CliRunner().invoke(app, ["explain", "head.py:optax_integer_labels", *arguments])
    assert result.stdout.splitlines()[-1] == (
        "head.py:3 (optax_integer_labels): logits float32[6,16] (384 bytes) for a log-softmax that labels pick from on "
        "head.py:4 (optax_integer_labels): jaxops.linear_cross_entropy would replace this"
    )


def test_explanation_shows_nothing_where_there_is_none() -> None:
    assert str(lowering.explain(nothing_at_all, *CLEAN["nothing_at_all"][1])).splitlines()[-1].startswith("└")


def test_explain_finds_patterns_under_x64() -> None:
    with jax.enable_x64():
        wide = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.float64), (W, X))
        labels = jax.ShapeDtypeStruct((6,), jnp.int64)
        (found,) = lowering.explain(take_along_axis, *wide, labels).opportunities
    # 6 x 16 logits of eight bytes
    assert "float64[6,16] (768 bytes)" in found.detail


def test_explain_finds_patterns_of_symbolic_shapes() -> None:
    rows, classes = jax.export.symbolic_shape("n, v")
    args = (f32(8, classes), f32(rows, 8), jax.ShapeDtypeStruct((rows,), jnp.int32))
    (found,) = opportunities(jax.make_jaxpr(take_along_axis)(*args).jaxpr, patterns())
    assert "float32[n,v] for" in found.detail


def test_graphs_take_any_jaxpr() -> None:
    def fn(x, key):
        y = lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, jnp.sin(c[1])), (0, x))[1]
        y = jax.pure_callback(lambda y: np.asarray(y), f32(4), y) + jax.random.normal(key, (4,))
        return (
            lax.sort(lax.associative_scan(jnp.add, y)),
            jnp.linalg.qr(jnp.outer(y, y)),
            lax.reduce(y, 0.0, lax.add, [0]),
        )

    jaxpr = jax.make_jaxpr(fn)(f32(4), jax.random.key(0)).jaxpr
    # The function itself, and the condition and the body of its loop.
    assert [graph.count for graph in graphs(jaxpr)] == [1, 1, 1]
