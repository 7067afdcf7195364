"""Losses of the next token read all rows of logits but the last: they are rewritten in functions and whole steps."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from rewrite_checks import assert_alike, assert_keeps_no_logits, few_logits_in_float64

import lowering

FEATURES, CLASSES = 3, 64
RNG = np.random.default_rng(0)
few_logits = few_logits_in_float64(3 * CLASSES)


def entropies(logits: Any, labels: Any) -> Any:
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels)


def picked(array: Any, labels: Any) -> Any:
    return jnp.take_along_axis(array, labels[..., None], axis=-1)[..., 0]


def masked_mean(losses: Any, mask: Any) -> Any:
    return (losses * mask).sum() / mask.sum()


def of_each_sequence(x: Any, w: Any, y: Any) -> Any:
    def one(x: Any, y: Any) -> Any:
        return masked_mean(entropies((x @ w)[:-1], y[1:]), y[1:] != 0)

    return jax.vmap(one)(x, y).mean()


def with_metrics(x: Any, w: Any, y: Any) -> Any:
    z = x @ w
    losses, right = entropies(z[:, :-1], y[:, 1:]), jnp.argmax(z, -1)[:, :-1] == y[:, 1:]
    return losses.mean() + 1e-2 * (jax.nn.logsumexp(z, -1) ** 2).mean(), (right.mean(), z.mean(), z.max(), z.min())


def behind_log_sum_exp(x: Any, w: Any, y: Any) -> Any:
    z = x @ w
    return (jax.nn.logsumexp(z, -1)[:, :-1] - picked(z[:, :-1], y[:, 1:])).mean()


def of_preferences(x: Any, w: Any, y: Any) -> Any:
    chosen, rejected = jnp.split(picked(jax.nn.log_softmax(x @ w)[:, :-1], y[:, 1:]).sum(-1), 2)
    return -jax.nn.log_sigmoid(0.1 * (chosen - rejected)).mean()


# Losses of x, the weight, and labels.
LOSSES: dict[str, Callable[..., Any]] = {
    "logits": lambda x, w, y: entropies((x @ w)[:, :-1], y[:, 1:]).mean(),
    "logits, labels of the last token": lambda x, w, y: entropies((x @ w)[:, 1:], y[:, :-1]).mean(),
    "logits without the ends": lambda x, w, y: masked_mean(entropies((x @ w)[:, 1:-2], y[:, 3:]), y[:, 3:] != 0),
    "log-probabilities": lambda x, w, y: -picked(jax.nn.log_softmax(x @ w)[:, :-1], y[:, 1:]).mean(),
    "logits behind their log sum exp": behind_log_sum_exp,
    "cap and mask": lambda x, w, y: masked_mean(entropies(3 * jnp.tanh((x @ w)[:, :-1] / 3), y[:, 1:]), y[:, 1:] != 0),
    "one-hot": lambda x, w, y: (
        -(jax.nn.one_hot(y[:, 1:], CLASSES) * jax.nn.log_softmax((x @ w)[:, :-1])).sum(-1).mean()
    ),
    "focal": lambda x, w, y: ((1 - jnp.exp(-(loss := entropies((x @ w)[:, :-1], y[:, 1:])))) ** 2 * loss).mean(),
    "losses": lambda x, w, y: entropies(x @ w, jnp.roll(y, -1, 1))[:, :-1].mean(),
    "flat": lambda x, w, y: entropies((x @ w)[:, :-1].reshape(-1, CLASSES), y[:, 1:].reshape(-1)).mean(),
    "indices": lambda x, w, y: (
        -jax.nn.log_softmax(x @ w)[jnp.arange(len(y))[:, None], jnp.arange(y.shape[1] - 1), y[:, 1:]].mean()
    ),
    "indices of one sequence": lambda x, w, y: (
        -jax.nn.log_softmax(x[0] @ w)[jnp.arange(1, y.shape[1]), y[0, :-1]].mean()
    ),
    "indices behind a slice": lambda x, w, y: (
        -jax.nn.log_softmax(x[0] @ w)[:-1][jnp.arange(y.shape[1] - 1), y[0, 1:]].mean()
    ),
    "the largest loss": lambda x, w, y: (
        (losses := entropies((x @ w)[:, :-1], y[:, 1:])).mean() + jax.lax.stop_gradient(losses.max() + losses.min())
    ),
    "each sequence": of_each_sequence,
    "metrics": with_metrics,
}


# The rows of two sequences are not those of one axis.
CASES = [*((name, 1) for name in LOSSES), *((name, 2) for name in ("logits", "flat", "indices", "each sequence"))]


@pytest.mark.sampled
@pytest.mark.parametrize(("name", "batch"), CASES)
def test_losses_of_the_next_token_keep_no_logits(name: str, batch: int) -> None:
    rows = 47
    x, w = RNG.normal(size=(batch, rows, FEATURES)), RNG.normal(size=(FEATURES, CLASSES))
    args = jnp.asarray(x), jnp.asarray(w), jnp.asarray(RNG.integers(0, CLASSES, (batch, rows)))
    assert_keeps_no_logits(LOSSES[name], args)


def of_each_token(x: Any, w: Any, y: Any) -> Any:
    return jax.vmap(jax.vmap(lambda x, y: entropies(x @ w, y)))(x, y).mean()


OF_OPERATOR = {
    "log-probabilities": (LOSSES["log-probabilities"], "cross_entropy_sum"),
    "logits behind their log sum exp": (behind_log_sum_exp, "cross_entropy_sum"),
    "preferences": (of_preferences, "cross_entropy"),
    "each token": (of_each_token, "cross_entropy_sum"),
}


@pytest.mark.sampled
@pytest.mark.parametrize(("fn", "pattern"), OF_OPERATOR.values(), ids=OF_OPERATOR)
def test_losses_take_the_operator(fn: Callable[..., Any], pattern: str) -> None:
    args = RNG.normal(size=(4, 129, FEATURES)), RNG.normal(size=(FEATURES, 1000)), RNG.integers(0, 1000, (4, 129))
    x, w, y = map(jnp.asarray, args)
    assert [one.pattern for one in lowering.rewrite(fn).report(x, w, y).applied] == [pattern]
    step = jax.value_and_grad(lowering.rewrite(fn), (0, 1))
    assert_alike(jax.jit(step)(x, w, y), jax.value_and_grad(fn, (0, 1))(x, w, y), 1e-9)


@pytest.mark.long
@pytest.mark.sampled
@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto], ids=["explicit", "auto"])
@pytest.mark.parametrize("name", ["log-probabilities", "focal"])
def test_sequences_may_be_split_over_devices(name: str, kind: AxisType) -> None:
    args = RNG.normal(size=(2, 11, FEATURES)), RNG.normal(size=(FEATURES, CLASSES)), RNG.integers(0, CLASSES, (2, 11))
    step = jax.value_and_grad(LOSSES[name], (0, 1))
    expected = jax.jit(step)(*args)
    mesh = jax.make_mesh((2,), ("data",), axis_types=(kind,))
    specs = P("data"), P(), P("data")
    with jax.set_mesh(mesh):
        split = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(args, specs, strict=True)]
        for fast in (jax.value_and_grad(lowering.rewrite(LOSSES[name]), (0, 1)), lowering.rewrite(step)):
            assert_alike(jax.jit(fast)(*split), expected, 1e-9)


@pytest.mark.sampled
@pytest.mark.parametrize("name", ["log-probabilities", "indices", "metrics"])
def test_second_derivatives_and_mapped_losses_are_the_same(name: str) -> None:
    args = RNG.normal(size=(2, 11, FEATURES)), RNG.normal(size=(FEATURES, CLASSES)), RNG.integers(0, CLASSES, (2, 11))
    x, w, y = map(jnp.asarray, args)

    def transformed(fn: Callable[..., Any]) -> Any:
        def loss(x: Any, w: Any) -> Any:
            found = fn(x, w, y)
            return found[0] if isinstance(found, tuple) else found

        gradient = jax.grad(loss, (0, 1))
        mapped = jax.vmap(gradient, (0, None))(jnp.stack([x, 2 * x]), w)
        return mapped, jax.jvp(gradient, (x, w), (w[0, 0] * x, x[0, 0, 0] * w))

    fast = lowering.rewrite(LOSSES[name])
    assert fast.report(x, w, y).applied
    assert_alike(jax.jit(lambda: transformed(fast))(), jax.jit(lambda: transformed(LOSSES[name]))(), 1e-9)
