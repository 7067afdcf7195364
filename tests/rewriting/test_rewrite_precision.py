"""Rewritten values are as near to float64 as the function's own, also where large numbers nearly cancel."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import rewrite_checks
from scipy.special import log_softmax

import lowering

users_promotion = pytest.fixture(autouse=True)(rewrite_checks.users_promotion)
few_logits_count = pytest.fixture(rewrite_checks.few_logits_count)

ROWS, FEATURES, CLASSES = 48, 8, 96
RNG = np.random.default_rng(0)
X = RNG.normal(size=(ROWS, FEATURES)).astype(np.float32)
W, NOISE = RNG.normal(size=(2, 16, FEATURES, CLASSES)).astype(np.float32)
LABELS = RNG.integers(0, CLASSES, ROWS)

# Of each: the function of two weights, and its value by NumPy from the log-probabilities of both.
DIFFERENCES: dict[str, tuple[Callable[[Any, Any], Any], Callable[[Any, Any], Any]]] = {}


def difference(truth: Callable[[Any, Any], Any]) -> Callable[[Any], Any]:
    def enter(fn: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        DIFFERENCES[fn.__name__] = fn, truth
        return fn

    return enter


def divergence(p: Any, q: Any) -> Any:
    return (np.exp(p) * (p - q)).sum(-1)


def jensen_shannon(p: Any, q: Any) -> Any:
    middle = np.log((np.exp(p) + np.exp(q)) / 2)
    return (divergence(p, middle) + divergence(q, middle)) / 2


@difference(lambda p, q: divergence(q, p).mean())
def distillation(w, teacher):
    targets = jax.nn.softmax(X @ teacher)
    return optax.losses.kl_divergence(jax.nn.log_softmax(X @ w), jax.lax.stop_gradient(targets)).mean()


@difference(lambda p, q: divergence(q, p).mean())
def divergence_with_log_targets(w, teacher):
    return optax.losses.kl_divergence_with_log_targets(
        jax.nn.log_softmax(X @ w), jax.nn.log_softmax(X @ teacher)
    ).mean()


@difference(lambda p, q: divergence(p, q).mean())
def reverse_divergence(w, teacher):
    log_probs, others = jax.nn.log_softmax(X @ w), jax.nn.log_softmax(X @ teacher)
    return jnp.mean(jnp.sum(jnp.exp(log_probs) * (log_probs - others), axis=-1))


@difference(lambda p, q: jensen_shannon(p, q).mean())
def jensen_shannon_divergence(w, teacher):
    log_probs, others = jax.nn.log_softmax(X @ w), jax.nn.log_softmax(X @ teacher)
    middle = jnp.logaddexp(log_probs, others) - np.float32(np.log(2))
    parts = jnp.exp(log_probs) * (log_probs - middle) + jnp.exp(others) * (others - middle)
    return jnp.mean(jnp.sum(parts, axis=-1)) / 2


@difference(lambda p, q: ((np.exp(q) * q).sum(-1) - (np.exp(p) * p).sum(-1)).mean())
def difference_of_entropies(w, teacher):
    def entropy(weight):
        log_probs = jax.nn.log_softmax(X @ weight)
        return -jnp.sum(jnp.exp(log_probs) * log_probs, axis=-1)

    return jnp.mean(entropy(w) - entropy(teacher))


@difference(lambda p, q: (p - q)[np.arange(ROWS), LABELS].mean())
def difference_of_log_probabilities(w, reference):
    def picked(weight):
        return jax.nn.log_softmax(X @ weight)[jnp.arange(ROWS), LABELS]

    return jnp.mean(picked(w) - picked(reference))


@difference(lambda p, q: (np.expm1((q - p)[np.arange(ROWS), LABELS]) + (p - q)[np.arange(ROWS), LABELS]).mean())
def estimated_divergence(w, reference):
    """As policies are kept near a reference: exp(d) - 1 - d, for the labels' difference d of log-probabilities."""

    def picked(weight):
        return -optax.softmax_cross_entropy_with_integer_labels(X @ weight, LABELS)

    ratio = picked(reference) - picked(w)
    return jnp.mean(jnp.expm1(ratio) - ratio)


@difference(lambda p, q: divergence(np.logaddexp(np.log(0.9) + q, np.log(0.1 / CLASSES)), p).mean())
def smoothed_distillation(w, teacher):
    targets = optax.smooth_labels(jax.nn.softmax(X @ teacher), 0.1)
    return optax.losses.kl_divergence(jax.nn.log_softmax(X @ w), jax.lax.stop_gradient(targets)).mean()


@pytest.mark.sampled
@pytest.mark.parametrize("name", DIFFERENCES)
def test_value_is_as_near_to_float64_as_the_functions_own(name: str, few_logits_count) -> None:
    few_logits_count(64)
    fn, truth = DIFFERENCES[name]
    fast = lowering.rewrite(fn)
    applied = fast.report(jnp.asarray(W[0]), jnp.asarray(W[0])).applied
    assert applied or name == "difference_of_entropies"
    own, found = jax.jit(jax.vmap(fn)), jax.jit(jax.vmap(fast))
    for distance in (0, 2.0**-4, 2.0**-8, 2.0**-12):
        others = W + np.float32(distance) * NOISE
        log_probs = (log_softmax(X.astype(float) @ each.astype(float), axis=-1) for each in (W, others))
        expected = np.array([truth(*each) for each in zip(*log_probs, strict=True)])
        errors = [float(np.sqrt(np.mean((f(W, others) - expected) ** 2))) for f in (own, found)]
        # Log-probabilities of about 5 are rounded by 2e-7 before they are subtracted, and 48 rows are averaged.
        assert errors[1] <= 1.5 * errors[0] + 2e-7 * np.abs(expected).max() + 1e-8


@pytest.mark.long
@pytest.mark.parametrize("scale", [1, 0.5], ids=["plain", "temperature"])
def test_gradient_is_as_near_to_float64_where_targets_nearly_cancel_it(scale: float, few_logits_count) -> None:
    few_logits_count(64)
    rows, features, classes = 64, 32, 16384
    rng = np.random.default_rng(1)
    x = rng.normal(size=(rows, features)).astype(np.float32)
    w = (rng.normal(size=(features, classes)) / 4).astype(np.float32)
    teacher = w + 1e-4 * rng.normal(size=w.shape)
    targets = np.exp(log_softmax(scale * (x.astype(float) @ teacher), axis=-1)).astype(np.float32)

    def distillation(x, w, targets):
        return optax.softmax_cross_entropy(scale * (x @ w), targets).mean()

    fast = lowering.rewrite(distillation)
    assert [one.pattern for one in fast.report(x, w, targets).applied] == ["cross_entropy_sum"]
    log_probs = log_softmax(scale * (x.astype(float) @ w.astype(float)), axis=-1)
    cotangent = scale / rows * (np.exp(log_probs) * targets.astype(float).sum(-1, keepdims=True) - targets)
    expected = cotangent @ w.T.astype(float), x.T.astype(float) @ cotangent
    own, found = (jax.jit(jax.grad(f, (0, 1)))(x, w, targets) for f in (distillation, fast))
    for of_own, of_found, truth in zip(own, found, expected, strict=True):
        assert np.linalg.norm(of_found - truth) <= 1.25 * np.linalg.norm(of_own - truth)
