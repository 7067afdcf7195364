"""Small functions in which no operator would replace anything, though many of them come near."""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import optax.contrib
from jax import lax
from patterns_planted import KEY, W, X, Y, f32

import jaxops

CLEAN: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {}


def clean(*args: Any) -> Callable[[Any], Any]:
    def enter(fn: Callable[..., Any]) -> Callable[..., Any]:
        CLEAN[fn.__name__] = (fn, args)
        return fn

    return enter


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


@clean(W, X, f32(16, 16), Y)
def conditional_random_field(w, x, transitions, labels):
    emissions = x @ w
    picked = jnp.take_along_axis(emissions, labels[:, None], 1).sum() + transitions[labels[:-1], labels[1:]].sum()

    def forward(alpha, emission):
        return jax.nn.logsumexp(alpha[:, None] + transitions, axis=0) + emission, None

    return jax.nn.logsumexp(lax.scan(forward, emissions[0], emissions[1:])[0]) - picked


@clean(f32(8, 12), X, Y)
def mixture_of_gaussians(w, x, y):
    weights, means, scales = jnp.split(x @ w, 3, axis=1)
    log_weights = jax.nn.log_softmax(weights)
    log_densities = -0.5 * (y[:, None] - means) ** 2 * jnp.exp(scales) + scales / 2
    return -jax.nn.logsumexp(log_weights + log_densities, axis=1).mean()


@clean(f32(8, 4 * 5), X, Y, f32(6, 5))
def distribution_of_values(w, x, actions, target):
    log_probs = jax.nn.log_softmax((x @ w).reshape(6, 4, 5))
    of_action = jnp.take_along_axis(log_probs, actions[:, None, None], 1)[:, 0]
    return -jnp.sum(target * of_action, axis=1).mean()


@clean(W, X, f32(6, 16))
def mixture_of_likelihoods(w, x, likelihoods):
    return -jnp.log((jax.nn.softmax(x @ w) * likelihoods).sum(-1)).mean()


@clean(W, X)
def log_of_the_probability_of_a_fixed_class(w, x):
    return -jnp.log(jax.nn.softmax(x @ w)[:, 0]).mean()


@clean(W, X)
def entropy(w, x):
    log_probs = jax.nn.log_softmax(x @ w)
    return -jnp.sum(jnp.exp(log_probs) * log_probs, axis=-1).mean()


@clean(W, X)
def entropy_of_two_softmaxes(w, x):
    return -(jax.nn.softmax(x @ w) * jax.nn.log_softmax(x @ w)).sum()


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


@clean(f32(5, 4), jax.ShapeDtypeStruct((), jnp.int32))
def flax_batch_norm(x, _):
    model = nn.BatchNorm(use_running_average=False)
    return model.init_with_output(jax.random.key(0), x)


PARAMS = {"p0": f32(3, 4), "p1": f32(4)}


def state_of(optimizer: optax.GradientTransformation) -> Any:
    return jax.eval_shape(optimizer.init, PARAMS)


def _averaged_after(optimizer: optax.GradientTransformation) -> Callable[..., Any]:
    def step(params, grads, state, average):
        updates, state = optimizer.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        return params, state, optax.incremental_update(params, average, 0.01)

    return step


# Compilers report the same bytes for an average after any of these and for ours, or fewer.
OPTIMIZERS = {
    "adamw": optax.adamw(1e-3),
    "several_steps": optax.MultiSteps(optax.adamw(1e-3), 4),
    "finite_gradients": optax.apply_if_finite(optax.adamw(1e-3), 3),
    "a_flat_vector": optax.flatten(optax.adamw(1e-3)),
    "prodigy": optax.contrib.prodigy(),
    "dadapt_adamw": optax.contrib.dadapt_adamw(),
}
for _name, _optimizer in OPTIMIZERS.items():
    CLEAN[f"average_after_{_name}"] = (_averaged_after(_optimizer), (PARAMS, PARAMS, state_of(_optimizer), PARAMS))

OURS = jaxops.ema_adam(1e-3)


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


@clean(f32(8, 8, 8, 3, 4))
def gradient_of_pooling_everything(x):
    window = (2, 2, 2, 3, 4)
    return jax.grad(lambda x: lax.reduce_window(x, -jnp.inf, lax.max, window, window, "VALID").sum())(x)


@clean(f32(2, 8, 8, 3))
def gradient_of_pooling_with_more_padding_than_window(x):
    window, sides = (1, 2, 2, 1), ((0, 0), (2, 2), (0, 0), (0, 0))
    return jax.grad(lambda x: lax.reduce_window(x, -jnp.inf, lax.max, window, window, sides).sum())(x)


@clean(KEY, f32(6, 8))
def dropout_of_whole_rows(key, x):
    return nn.Dropout(0.1, broadcast_dims=(1,), deterministic=False).apply({}, x, rngs={"dropout": key})


@clean(KEY, jax.ShapeDtypeStruct((6, 8), jnp.int32))
def masked_tokens(key, tokens):
    return jnp.where(jax.random.bernoulli(key, 0.15, tokens.shape), 103, tokens)


@clean(KEY, f32(6, 8), f32(6, 8))
def random_mixture(key, x, y):
    return jnp.where(jax.random.bernoulli(key, 0.5, x.shape), x / 2, y / 2)


@clean(KEY, f32(6, 8))
def noise(key, x):
    return x + 0.1 * jax.random.normal(key, x.shape) + jax.random.uniform(key, x.shape)


@clean(KEY, f32(6, 8))
def our_dropout(key, x):
    return jax.grad(lambda x: jnp.sum(jaxops.dropout(key, x, 0.1) ** 2))(x)
