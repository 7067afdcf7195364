"""Heads of language models as people write them, in any dtype and size: the product, and the loss of its logits."""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax import nnx

# Of each: the loss of (parameters, x, labels), and the shapes of the parameters for `features` and `classes`.
FORMS: dict[str, tuple[Callable[..., Any], Callable[[int, int], Any]]] = {}


def kernel(features: int, classes: int) -> Any:
    return (features, classes)


def table(features: int, classes: int) -> Any:
    return (classes, features)


def kernel_and_bias(features: int, classes: int) -> Any:
    return (features, classes), (classes,)


def form(shapes: Callable[[int, int], Any]) -> Callable[[Any], Any]:
    def enter(fn: Callable[..., Any]) -> Callable[..., Any]:
        FORMS[fn.__name__] = fn, shapes
        return fn

    return enter


def entropies(logits: Any, labels: Any) -> Any:
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels)


def wide(array: Any) -> Any:
    return array.astype(jnp.float32)


@form(kernel)
def widened(w, x, labels):
    return entropies(wide(x @ w), labels).mean()


@form(kernel)
def as_they_are(w, x, labels):
    return entropies(x @ w, labels).mean()


@form(table)
def tied(w, x, labels):
    return entropies(wide(jnp.einsum("nh,vh->nv", x, w)), labels).mean()


@form(kernel)
def accumulated(w, x, labels):
    return entropies(jnp.dot(x, w, preferred_element_type=jnp.float32), labels).mean()


@form(kernel_and_bias)
def widened_before_the_bias(params, x, labels):
    w, bias = params
    return entropies(wide(x @ w) + wide(bias), labels).mean()


@form(kernel_and_bias)
def widened_behind_the_bias(params, x, labels):
    w, bias = params
    return entropies(wide(x @ w + bias), labels).mean()


@form(kernel)
def widened_before_the_cap(w, x, labels):
    return entropies(30 * jnp.tanh(wide(x @ w) / 30), labels).mean()


@form(kernel)
def widened_behind_the_cap(w, x, labels):
    return entropies(wide(30 * jnp.tanh((x @ w) / 30)), labels).mean()


@form(kernel)
def masked(w, x, labels):
    mask = wide(labels > 0)
    losses = entropies(wide(x @ w), labels)
    return (losses * mask).sum() / mask.sum()


@form(kernel)
def smoothed(w, x, labels):
    logits = wide(x @ w)
    targets = optax.smooth_labels(jax.nn.one_hot(labels, logits.shape[-1]), 0.1)
    return optax.softmax_cross_entropy(logits, targets).mean()


@form(kernel)
def one_hot(w, x, labels):
    logits = x @ w
    return optax.softmax_cross_entropy(wide(logits), jax.nn.one_hot(labels, logits.shape[-1])).mean()


@form(kernel)
def with_z_loss(w, x, labels):
    logits = wide(x @ w)
    lse = jax.nn.logsumexp(logits, axis=-1)
    picked = jnp.take_along_axis(logits, labels[:, None], axis=-1)[:, 0]
    return jnp.mean(lse - picked + 1e-4 * lse**2)


@form(kernel)
def of_rows(w, x, labels):
    return entropies(wide(x @ w), labels)


@form(kernel)
def focal(w, x, labels):
    log_probs = jax.nn.log_softmax(wide(x @ w))
    picked = jnp.take_along_axis(log_probs, labels[:, None], axis=-1)[:, 0]
    return -jnp.mean((1 - jnp.exp(picked)) ** 2 * picked)


@form(lambda features, classes: {"params": {"kernel": (features, classes), "bias": (classes,)}})
def dense_of_linen(params, x, labels):
    classes = params["params"]["bias"].size
    return entropies(wide(nn.Dense(classes, dtype=x.dtype).apply(params, x)), labels).mean()


@form(lambda features, classes: {"params": {"kernel": (features, classes)}})
def narrow_dense_of_linen(params, x, labels):
    classes = params["params"]["kernel"].shape[1]
    logits = nn.Dense(classes, dtype=x.dtype, use_bias=False).apply(params, x)
    return entropies(logits, labels).mean()


@form(lambda features, classes: {"params": {"embedding": (classes, features)}})
def attend_of_linen(params, x, labels):
    classes, features = params["params"]["embedding"].shape
    embed = nn.Embed(classes, features, dtype=x.dtype)
    return entropies(wide(embed.apply(params, x, method="attend")), labels).mean()


@form(kernel_and_bias)
def linear_of_nnx(params, x, labels):
    w, bias = params
    graph, state = nnx.split(nnx.eval_shape(lambda: nnx.Linear(*w.shape, dtype=x.dtype, rngs=nnx.Rngs(0))))
    state["kernel"].set_value(w)
    state["bias"].set_value(bias)
    return entropies(wide(nnx.merge(graph, state)(x)), labels).mean()


@form(table)
def attend_of_nnx(w, x, labels):
    graph, state = nnx.split(nnx.eval_shape(lambda: nnx.Embed(*w.shape, dtype=x.dtype, rngs=nnx.Rngs(0))))
    state["embedding"].set_value(w)
    return entropies(wide(nnx.merge(graph, state).attend(x)), labels).mean()


@jax.custom_vjp
def cross_entropy_with_logits(logits: Any, targets: Any, z_loss: Any) -> Any:
    """As T5X and MaxText compute it: a row's loss and its part from log sum exp, for one-hot labels."""
    lse = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    loss, z = -jnp.sum(targets * (logits - lse), axis=-1), z_loss * jnp.square(lse[..., 0])
    return loss + z, z


def _forward(logits: Any, targets: Any, z_loss: Any) -> Any:
    shifted = logits - jnp.max(logits, axis=-1, keepdims=True)
    exponentials = jnp.exp(shifted)
    total = jnp.sum(exponentials, axis=-1, keepdims=True)
    log_probs = shifted - jnp.log(total)
    lse = (jnp.log(total) + jnp.max(logits, axis=-1, keepdims=True))[..., 0]
    z = z_loss * jnp.square(lse)
    kept = logits, targets, z_loss, exponentials, total, log_probs, lse
    return (z - jnp.sum(targets * log_probs, axis=-1), z), kept


def _backward(kept: Any, cotangents: Any) -> Any:
    logits, targets, z_loss, exponentials, total, log_probs, lse = kept
    given = cotangents[0][..., None]
    slope = (1 + 2 * z_loss * lse)[..., None] * exponentials / total - targets
    return (given * slope).astype(logits.dtype), (-given * log_probs).astype(targets.dtype), jnp.zeros(())


cross_entropy_with_logits.defvjp(_forward, _backward)


@form(kernel)
def own_derivative_of_maxtext(w, x, labels):
    logits = x @ w
    losses, _ = cross_entropy_with_logits(wide(logits), jax.nn.one_hot(labels, logits.shape[-1]), 1e-4)
    weights = labels != 0
    return jnp.sum(losses * weights) / (jnp.sum(weights) + 1e-8)


@form(kernel)
def narrow_own_derivative_of_maxtext(w, x, labels):
    logits = x @ w
    losses, _ = cross_entropy_with_logits(logits, jax.nn.one_hot(labels, logits.shape[-1], dtype=x.dtype), 1e-4)
    return jnp.mean(wide(losses))


def arguments(name: str, dtype: Any, *sizes: int) -> Any:
    """The types of a form's arguments for (*rows, features, classes), in one dtype; linen's parameters are float32."""
    *rows, features, classes = sizes
    shapes = FORMS[name][1](features, classes)
    dtype_of_parameters = jnp.float32 if isinstance(shapes, dict) else dtype
    parameters = jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, dtype_of_parameters),
        shapes,
        is_leaf=lambda each: isinstance(each, tuple) and isinstance(each[0], int),
    )
    return parameters, jax.ShapeDtypeStruct((*rows, features), dtype), jax.ShapeDtypeStruct(rows, jnp.int32)


def with_gradients(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The value of a form, added up where it is one of rows, and its gradients."""
    return jax.value_and_grad(lambda *args: jnp.sum(fn(*args)), argnums=(0, 1))
