"""Losses as public training code computes them, each in a few lines of our own, on tiny models of several libraries."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import lax

ROWS, FEATURES, CLASSES = (2, 6), 8, 16

# Of each: the loss of (params, hidden states or inputs, labels), the params, and which rule rewrites it.
MODELS: dict[str, tuple[Callable[..., Any], Any, str]] = {}

HEAD = jax.random.normal(jax.random.key(1), (FEATURES, CLASSES)) / 2
BIAS = jax.random.normal(jax.random.key(2), (CLASSES,))
TIED = jax.random.normal(jax.random.key(3), (CLASSES, FEATURES))
X = jax.random.normal(jax.random.key(4), (*ROWS, FEATURES))
LABELS = jax.random.randint(jax.random.key(5), ROWS, 0, CLASSES)


def model(params: Any, rule: str = "cross_entropy_sum") -> Callable[[Any], Any]:
    def enter(fn: Callable[..., Any]) -> Callable[..., Any]:
        MODELS[fn.__name__] = (fn, params, rule)
        return fn

    return enter


@model({"kernel": HEAD, "bias": BIAS})
def lm1b_of_flax(params, x, labels):
    """Smoothed labels minus their entropy, weights of tokens, and metrics beside the loss."""
    logits = x @ params["kernel"] + params["bias"]
    weights = jnp.where(labels > 0, 1, 0).astype(jnp.float32)
    confidence = 0.9
    low = (1 - confidence) / (CLASSES - 1)
    constant = -(confidence * jnp.log(confidence) + (CLASSES - 1) * low * jnp.log(low + 1e-20))
    hit = labels[..., None] == jnp.arange(CLASSES).reshape((1,) * labels.ndim + (-1,))
    targets = lax.select(hit, jnp.full(hit.shape, confidence), jnp.full(hit.shape, low))
    loss = -jnp.sum(targets * nn.log_softmax(logits), axis=-1) - constant
    correct = jnp.equal(jnp.argmax(logits, axis=-1), labels)
    return (loss * weights).sum() / weights.sum(), (correct * weights).sum()


@model(TIED)
def gemma(params, x, labels):
    """A tied table, a softcap, and one-hot labels that are masked."""
    logits = jnp.dot(x, params.T)
    logits = jnp.tanh(logits / 30.0) * 30.0
    mask = (labels[:, 1:] != 0)[..., None]
    targets = jax.nn.one_hot(labels[:, 1:], CLASSES) * mask.astype(jnp.float32)
    return -jnp.sum(jax.nn.log_softmax(logits[:, :-1]) * targets) * (1 / jnp.sum(mask))


@model(TIED)
def maxtext_without_its_own_gradient(params, x, labels):
    """One-hot labels, log sum exp and its square."""
    logits = jnp.einsum("bsd,vd->bsv", x, params) / FEATURES**0.5
    targets = jax.nn.one_hot(labels, CLASSES)
    lse = jax.scipy.special.logsumexp(logits, axis=-1, keepdims=True)
    loss = -jnp.sum(targets * (logits - lse), axis=-1)
    loss = loss + 1e-4 * jnp.square(jnp.squeeze(lse, axis=-1))
    weights = labels != 0
    return jnp.sum(loss * weights) / (jnp.sum(weights) + 1e-8)


@model(HEAD)
def levanter(params, x, labels):
    """The label's logit by a product with one-hot labels."""
    logits = jnp.einsum("bpe,ev->bpv", x, params).astype(jnp.float32)
    lse = jax.nn.logsumexp(logits, axis=-1)
    loss = lse - jnp.einsum("bpv,bpv->bp", logits, jax.nn.one_hot(labels, CLASSES))
    mask = jnp.arange(labels.shape[1]) < labels.shape[1] - 1
    return jnp.mean(loss + 1e-3 * lse**2, where=mask)


@model(HEAD, "row_cone_sum")
def simply(params, x, labels):
    """A mean over kept tokens, with the entropy and the accuracy of the prediction."""
    logits = jnp.einsum("...d,dv->...v", x, params)
    log_probs = jax.nn.log_softmax(logits)
    picked = jnp.take_along_axis(log_probs, labels[..., None], axis=-1)[..., 0]
    entropy = -jnp.sum(jnp.exp(log_probs) * log_probs, axis=-1)
    mask = (labels > 1).astype(jnp.float32)
    count = jnp.maximum(mask.sum(), 1)
    accuracy = jnp.sum((jnp.argmax(logits, -1) == labels) * mask) / count
    return -(picked * mask).sum() / count + 0.01 * (entropy * mask).sum() / count, {"accuracy": accuracy}


@model(HEAD, "row_cone_sum")
def big_vision_sigmoid(params, x, labels):
    """A binary cross entropy for each class; JAX's softplus has a derivative of its own."""
    logits = jnp.einsum("bpe,ev->bpv", x, params)
    log_p, log_not_p = jax.nn.log_sigmoid(logits), jax.nn.log_sigmoid(-logits)
    targets = jax.nn.one_hot(labels, CLASSES)
    return jnp.mean(-jnp.sum(targets * log_p + (1.0 - targets) * log_not_p, axis=-1))


@model(HEAD, "row_cone_sum")
def sigmoid_focal(params, x, labels):
    """As optax computes it: each class, the less the surer, with pairs of numbers stacked."""
    return optax.sigmoid_focal_loss(x @ params, jax.nn.one_hot(labels, CLASSES), alpha=0.25).sum(-1).mean()


class TinyGPT(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        table = nn.Embed(CLASSES, FEATURES)
        x = table(tokens)
        x = x + nn.Dense(FEATURES)(nn.gelu(nn.Dense(2 * FEATURES)(nn.LayerNorm()(x))))
        return table.attend(nn.LayerNorm()(x))


GPT = TinyGPT()


@model(GPT.init(jax.random.key(0), LABELS))
def nanogpt_of_flax(params, x, labels):
    """A tied head inside of a module."""
    logits = GPT.apply(params, labels)
    return optax.softmax_cross_entropy_with_integer_labels(logits, jnp.roll(labels, -1, 1)).mean()


@model({"kernel": HEAD, "bias": BIAS}, "row_cone_sum")
def big_vision(params, x, labels):
    """Mixed labels of images, and the mean of sums."""
    logits = x.reshape(-1, FEATURES) @ params["kernel"] + params["bias"]
    targets = jax.nn.one_hot(labels.reshape(-1), CLASSES)
    targets = 0.7 * targets + 0.3 * jnp.roll(targets, 1, axis=0)
    log_p = jax.nn.log_softmax(logits, axis=-1)
    return jnp.mean(-jnp.sum(targets * log_p, axis=-1))


@model({"w": HEAD, "b": BIAS})
def haiku_transformer(params, x, labels):
    """A linear layer as haiku writes it."""
    logits = jnp.dot(x, params["w"], precision=None)
    logits = logits + jnp.broadcast_to(params["b"], logits.shape)
    likelihood = jnp.sum(jax.nn.one_hot(labels, CLASSES) * jax.nn.log_softmax(logits), axis=-1)
    mask = jnp.greater(labels, 0)
    return -jnp.sum(likelihood * mask) / jnp.sum(mask)


@model(eqx.nn.MLP(FEATURES, CLASSES, 8, 1, key=jax.random.key(0)))
def equinox_mlp(params, x, labels):
    """A module of one row, mapped over all."""
    logits = jax.vmap(jax.vmap(params))(x)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


@model(nnx.split(nnx.Linear(FEATURES, CLASSES, rngs=nnx.Rngs(0)))[1])
def nnx_linear(params, x, labels):
    """A module that is merged from its state."""
    graph = nnx.split(nnx.Linear(FEATURES, CLASSES, rngs=nnx.Rngs(0)))[0]
    logits = nnx.merge(graph, params)(x)
    return optax.softmax_cross_entropy(logits, jax.nn.one_hot(labels, CLASSES)).mean()


@model({"kernel": HEAD, "bias": BIAS}, "row_cone_sum")
def padded_vocabulary(params, x, labels):
    """Columns that only fill up the vocabulary, a temperature, and focal weights whose gradient is stopped."""
    logits = x @ params["kernel"] + params["bias"]
    logits = jnp.where(jnp.arange(CLASSES) < CLASSES - 2, logits, -1e9) / 0.7
    log_probs = jax.nn.log_softmax(logits)
    picked = jnp.take_along_axis(log_probs, jnp.minimum(labels, CLASSES - 3)[..., None], -1)[..., 0]
    weight = lax.stop_gradient((1 - jnp.exp(picked)) ** 2)
    return jnp.sum(-weight * picked)


@model(HEAD, "row_cone_sum")
def poly_loss(params, x, labels):
    """Probabilities and log-probabilities of the same logits."""
    logits = x @ params
    targets = jax.nn.one_hot(labels, CLASSES)
    pt = jnp.sum(targets * jax.nn.softmax(logits), axis=-1)
    return jnp.mean(optax.softmax_cross_entropy(logits, targets) + 2.0 * (1 - pt))


@model(HEAD)
def scanned_microbatches(params, x, labels):
    """Losses of parts of a batch in a loop of checkpoints."""

    @jax.checkpoint
    def part(params, x, labels):
        return optax.softmax_cross_entropy_with_integer_labels(x @ params, labels).sum()

    def step(total, rows):
        return total + part(params, *rows), None

    return lax.scan(step, 0.0, (x, labels))[0] / labels.size


@model(HEAD[None, None])
def convolution_of_one_pixel(params, x, labels):
    """Segmentation: classes of pixels by a 1x1 convolution."""
    logits = lax.conv_general_dilated(x[None], params, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    return optax.softmax_cross_entropy_with_integer_labels(logits[0], labels).mean()


@model(HEAD)
def hand_written_log_sum_exp(params, x, labels):
    """A maximum whose gradient is not stopped."""
    logits = x @ params
    maximum = jnp.max(logits, axis=-1, keepdims=True)
    lse = jnp.log(jnp.sum(jnp.exp(logits - maximum), axis=-1)) + maximum[..., 0]
    rows, columns = jnp.arange(ROWS[0])[:, None], jnp.arange(ROWS[1])[None]
    return jnp.mean(lse - logits[rows, columns, labels])
