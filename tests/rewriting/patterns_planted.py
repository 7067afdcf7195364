"""Small functions that have a pattern which an operator would replace, on the line that ends in `# here`."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P

import jaxops

LOGITS, POOLING, DROPOUT = "jaxops.linear_cross_entropy", "jaxops.max_pool", "jaxops.dropout"

# Of each function: itself, its arguments, what would replace the pattern, and how often that is run.
PLANTED: dict[str, tuple[Callable[..., Any], tuple[Any, ...], str, int]] = {}


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def planted(replacement: str, *args: Any, count: int = 1) -> Callable[[Any], Any]:
    def enter(fn: Callable[..., Any]) -> Callable[..., Any]:
        PLANTED[fn.__name__] = (fn, args, replacement, count)
        return fn

    return enter


X, W, Y = f32(6, 8), f32(8, 16), jax.ShapeDtypeStruct((6,), jnp.int32)

# Cross entropies of a linear layer.


@planted(LOGITS, W, X, Y)
def optax_integer_labels(w, x, labels):
    logits = x @ w  # here
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


@planted(LOGITS, W, X, Y)
def optax_one_hot(w, x, labels):
    logits = jnp.einsum("nh,hv->nv", x, w)  # here
    return optax.softmax_cross_entropy(logits, jax.nn.one_hot(labels, 16)).mean()


@planted(LOGITS, W, X, Y)
def log_of_picked_probabilities(w, x, labels):
    probabilities = jax.nn.softmax(x @ w)  # here
    return -jnp.log(jnp.take_along_axis(probabilities, labels[:, None], axis=-1)).mean()


@planted(LOGITS, W, X, Y)
def gradient_of_the_log_of_picked_probabilities(w, x, labels):
    def loss(w):
        probabilities = jax.nn.softmax(x @ w, axis=-1)  # here
        return -jnp.mean(jnp.log(probabilities[jnp.arange(6), labels] + 1e-9))

    return jax.value_and_grad(loss)(w)


@planted(LOGITS, W, X, Y)
def log_of_probabilities_by_one_hot(w, x, labels):
    exponentials = jnp.exp(x @ w)  # here
    probabilities = exponentials / exponentials.sum(-1, keepdims=True)
    return -jnp.log((probabilities * jax.nn.one_hot(labels, 16)).sum(-1)).sum()


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


@planted(LOGITS, X, X)
def contrastive(images, texts):
    similarities = images @ texts.T  # here
    return optax.softmax_cross_entropy_with_integer_labels(similarities, jnp.arange(6)).mean()


@planted(LOGITS, W, X, Y)
def one_hot_by_einsum(w, x, labels):
    log_probs = jax.nn.log_softmax(x @ w)  # here
    return -jnp.einsum("nv,nv->n", log_probs, jax.nn.one_hot(labels, 16)).mean()


@planted(
    LOGITS,
    jax.ShapeDtypeStruct((8, 16), jnp.bfloat16),
    jax.ShapeDtypeStruct((600, 8), jnp.bfloat16),
    jax.ShapeDtypeStruct((600,), jnp.int32),
)
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
def flax_linen_head_in_lifted_transforms(x, labels):
    class Head(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(16)(x)  # here

    model = nn.jit(nn.remat(Head))()

    def loss(params):
        return optax.softmax_cross_entropy_with_integer_labels(model.apply(params, x), labels).mean()

    return jax.value_and_grad(loss)(model.init(jax.random.key(0), x))


@planted(LOGITS, X, Y)
def flax_nnx_head(x, labels):
    model = nnx.Linear(8, 16, rngs=nnx.Rngs(0))

    @nnx.jit
    def loss(model):
        logits = model(x)  # here
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    return nnx.value_and_grad(loss)(model)[0]


@planted(LOGITS, W, f32(7, 8), jax.ShapeDtypeStruct((7,), jnp.int32))
def second_of_two_alike(w, x, labels):
    # What JAX jits inside remembers the line of its first caller, which is not the one in question.
    jnp.take_along_axis(jnp.sin(x @ w), labels[:, None], axis=-1)
    jax.nn.log_softmax(x @ w)
    log_probs = jax.nn.log_softmax(x @ w)  # here
    return -jnp.take_along_axis(log_probs, labels[:, None], axis=-1).mean()  # picked


# Gradients of max pooling.


@planted(POOLING, f32(2, 8, 8, 3))
def reverse_mode_of_max_pooling(x):
    return jax.grad(lambda x: nn.max_pool(jnp.sin(x), (3, 3), (2, 2), "SAME").sum())(x)  # here


@planted(POOLING, f32(2, 8, 8, 3))
def forward_mode_of_max_pooling(x):
    return jax.jvp(lambda x: nn.max_pool(x, (2, 2), (2, 2)), (x,), (x,))  # here


@planted(POOLING, f32(2, 3, 8, 8))
def loss_after_reduce_window(x):
    def loss(x):
        y = lax.reduce_window(x, -jnp.inf, lax.max, (1, 1, 2, 2), (1, 1, 2, 2), "VALID")  # here
        return jnp.sum(y * y)

    return jax.value_and_grad(loss)(x)


@planted(POOLING, f32(2, 5, 8, 8, 3))
def pooling_of_volumes_with_padding_of_its_own(x):
    padding = ((0, 0), (1, 0), (0, 2), (1, 1), (0, 0))

    def loss(x):
        y = lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 3, 3, 1), (1, 1, 2, 2, 1), padding)  # here
        return jnp.sum(y * y)

    return jax.grad(loss)(x)


# Dropout.

KEY = jax.eval_shape(lambda: jax.random.key(0))


@planted(DROPOUT, KEY, f32(6, 8))
def flax_dropout(key, x):
    return nn.Dropout(0.1, deterministic=False).apply({}, x, rngs={"dropout": key})  # here


@planted(DROPOUT, KEY, f32(6, 8))
def gradient_of_equinox_dropout(key, x):
    return jax.grad(lambda x: jnp.sum(eqx.nn.Dropout(0.5)(x, key=key) ** 2))(x)  # here


@planted(DROPOUT, jax.ShapeDtypeStruct((2,), jnp.uint32), jax.ShapeDtypeStruct((6, 8), jnp.bfloat16))
def dropout_by_a_product(key, x):
    kept = jax.random.bernoulli(key, 0.9, x.shape)
    return x * kept / 0.9  # here


@planted(DROPOUT, KEY, f32(6, 8))
def dropout_that_scales_afterwards(key, x):
    dropped = jax.random.uniform(key, x.shape) < 0.1
    return jnp.where(dropped, 0.0, x) / 0.9  # here
