"""What people do with logits beside a plain loss: losses and whole steps still store none."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from rewrite_checks import assert_keeps_no_logits, few_logits_in_float64

BATCH, LENGTH, FEATURES, CLASSES = 2, 47, 3, 64
RNG = np.random.default_rng(0)
TEACHER, BANK = RNG.normal(size=(FEATURES, CLASSES)), RNG.normal(size=(FEATURES, 1))
few_logits = few_logits_in_float64(3 * CLASSES)


def mean(logits: Any, labels: Any) -> Any:
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def of_teacher(x: Any, w: Any, y: Any) -> Any:
    targets = jax.nn.softmax(jax.lax.stop_gradient(x @ TEACHER))
    return -(targets * jax.nn.log_softmax(x @ w)).sum(-1).mean()


def with_mixed_labels(x: Any, w: Any, y: Any) -> Any:
    targets = 0.7 * jax.nn.one_hot(y, CLASSES) + 0.3 * jax.nn.one_hot((y + 3) % CLASSES, CLASSES)
    return optax.softmax_cross_entropy(x @ w, targets).mean()


# Losses of x, the weight and labels, some with metrics.
LOSSES: dict[str, Callable[..., Any]] = {
    "a padded vocabulary is cut": lambda x, w, y: mean((x @ w)[..., :60], y % 60),
    "padding is set": lambda x, w, y: mean((x @ w).at[..., 60:].set(-1e9), y % 60),
    "a class is forbidden": lambda x, w, y: mean((x @ w).at[..., 0].set(-jnp.inf), 1 + y % 63),
    "a class is added": lambda x, w, y: mean(jnp.concatenate([x @ BANK, x @ w], -1), y),
    "logits are checked": lambda x, w, y: (mean(z := x @ w, y), (jnp.isnan(z).any(), jnp.isfinite(z).all())),
    "the last logits are read": lambda x, w, y: (mean(z := x @ w, y), (z[:, -1].argmax(-1), z[:, -1].max(-1))),
    "the end of the sequence counts": lambda x, w, y: (
        -jnp.take_along_axis(jax.nn.log_softmax(x @ w)[:, 30:-1], y[:, 31:, None], -1).mean()
    ),
    "each class by itself": lambda x, w, y: (
        optax.sigmoid_binary_cross_entropy(x @ w, jax.nn.one_hot(y, CLASSES)).sum(-1).mean()
    ),
    "likelihoods are mixed": lambda x, w, y: (
        -jnp.logaddexp(jnp.take_along_axis(jax.nn.log_softmax(x @ w), y[..., None], -1), -9.0).mean()
    ),
    "a teacher": of_teacher,
    "mixed labels": with_mixed_labels,
}


@pytest.mark.sampled
@pytest.mark.parametrize("name", LOSSES)
def test_readers_of_logits_keep_none(name: str) -> None:
    x, w = RNG.normal(size=(BATCH, LENGTH, FEATURES)), RNG.normal(size=(FEATURES, CLASSES))
    labels = jnp.asarray(RNG.integers(0, CLASSES, (BATCH, LENGTH)))
    assert_keeps_no_logits(LOSSES[name], (jnp.asarray(x), jnp.asarray(w), labels))
