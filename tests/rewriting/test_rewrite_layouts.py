"""Logits in any layout of rows and classes are read by a sum of cross entropies, with the same value and gradients."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import rewrite_checks

import lowering

users_promotion = pytest.fixture(autouse=True)(rewrite_checks.users_promotion)
few_logits_count = pytest.fixture(rewrite_checks.few_logits_count)

ROWS, FEATURES, CLASSES = (4, 6), 8, 16
RNG = np.random.default_rng(0)
W, X = RNG.normal(size=(FEATURES, CLASSES)), RNG.normal(size=(*ROWS, FEATURES))
BIAS, WEIGHTS, Y = RNG.normal(size=CLASSES), RNG.random(ROWS), RNG.integers(0, CLASSES, ROWS)


def cross_entropy(logits: Any, labels: Any) -> Any:
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels)


def flat(x: Any) -> Any:
    return x.reshape(-1, x.shape[-1])


# Losses of a weight and x.
LAYOUTS: dict[str, Callable[[Any, Any], Any]] = {
    "all but the last row of a sequence": lambda w, x: cross_entropy((x @ w + BIAS)[:, :-1], Y[:, 1:]).mean(),
    "rows left out twice": lambda w, x: cross_entropy((x @ w)[1:][:, ::2], Y[1:, ::2]).mean(),
    "rows left out behind a temperature": lambda w, x: cross_entropy(
        ((x @ w) / (1 + WEIGHTS)[..., None])[:, 1:], Y[:, 1:]
    ).mean(),
    "the last row": lambda w, x: cross_entropy((x @ w)[:, -1], Y[:, -1]).mean(),
    "rows merged": lambda w, x: cross_entropy(flat(x @ w), Y.reshape(-1)).mean(),
    "rows merged in another order": lambda w, x: cross_entropy(flat(jnp.swapaxes(x @ w, 0, 1)), Y.T.reshape(-1)).mean(),
    "rows divided": lambda w, x: cross_entropy((flat(x) @ w).reshape(*ROWS, CLASSES), Y).mean(),
    "rows divided behind a bias and a cap": lambda w, x: cross_entropy(
        (3 * jnp.tanh((flat(x) @ w + BIAS) / 3)).reshape(*ROWS, CLASSES), Y
    ).mean(),
    "rows divided and left out": lambda w, x: cross_entropy(
        (flat(x) @ w + BIAS).reshape(*ROWS, CLASSES)[:, :-1], Y[:, 1:]
    ).mean(),
    "rows divided behind a temperature": lambda w, x: cross_entropy(
        ((flat(x) @ w) * (1 + WEIGHTS).reshape(-1, 1)).reshape(*ROWS, CLASSES), Y
    ).mean(),
    "the root of a size as a divisor": lambda w, x: (
        cross_entropy(z := (x @ w) / jnp.sqrt(2 * FEATURES), Y) + 0.1 * jax.nn.logsumexp(z, -1) ** 2
    ).mean(),
    "rows in another order": lambda w, x: cross_entropy(jnp.swapaxes(x @ w, 0, 1), Y.T).mean(),
    "classes between rows": lambda w, x: (
        -jnp.sum(jax.nn.one_hot(Y, CLASSES, axis=1) * jax.nn.log_softmax(jnp.swapaxes(x @ w, 1, 2), axis=1), axis=1)
    ).mean(),
    "rows and classes in one sum": lambda w, x: -jnp.sum(jax.nn.one_hot(Y, CLASSES) * jax.nn.log_softmax(x @ w)),
    "rows and classes in one product": lambda w, x: -jnp.vdot(jax.nn.one_hot(Y, CLASSES), jax.nn.log_softmax(x @ w)),
    "losses padded": lambda w, x: jnp.pad(cross_entropy(x @ w, Y), ((0, 0), (0, 2))).mean(),
    "losses added up in segments": lambda w, x: jax.ops.segment_sum(
        cross_entropy(x @ w, Y).reshape(-1), np.arange(Y.size) // 5, 5
    )[1:].sum(),
    "losses stacked": lambda w, x: jnp.stack([cross_entropy(x @ w, Y), jax.nn.logsumexp(x @ w, -1) ** 2]).mean(),
}


@pytest.mark.sampled
@pytest.mark.parametrize("name", LAYOUTS)
def test_logits_in_any_layout_are_read_by_a_sum(name: str, few_logits_count) -> None:
    few_logits_count(CLASSES * Y.size - 1)
    with jax.enable_x64():
        loss, args = LAYOUTS[name], (jnp.asarray(W), jnp.asarray(X))
        fast = lowering.rewrite(loss)
        assert [one.pattern for one in fast.report(*args).applied] == ["cross_entropy_sum"]
        found, expected = (jax.jit(jax.value_and_grad(fn, (0, 1)))(*args) for fn in (fast, loss))
        rewrite_checks.assert_alike(found, expected, 1e-9)


# Losses of as many rows as there are classes.
SQUARES: dict[str, Callable[[Any, Any], Any]] = {
    "in order": lambda w, x: cross_entropy(x @ w, LABELS).mean(),
    "transposed": lambda w, x: cross_entropy((w.T @ x.T).T, LABELS).mean(),
    "transposed, with weights of columns": lambda w, x: cross_entropy((w.T @ x.T).T + OF_COLUMNS, LABELS).mean(),
    "transposed, with temperatures of rows": lambda w, x: cross_entropy(
        (w.T @ x.T).T * OF_COLUMNS[:, None], LABELS
    ).mean(),
    "classes first": lambda w, x: (
        -jnp.mean(jax.nn.log_softmax((x @ w).T, axis=0)[LABELS, jnp.arange(CLASSES)] * OF_COLUMNS)
    ),
    "rows and columns": lambda w, x: cross_entropy(x @ w, LABELS).mean() + cross_entropy((x @ w).T, LABELS).mean(),
    "sums of rows in columns": lambda w, x: cross_entropy(
        x @ w - jax.nn.logsumexp(jax.lax.stop_gradient(x @ w), -1), LABELS
    ).mean(),
}
LABELS, OF_COLUMNS = RNG.permutation(CLASSES), RNG.random(CLASSES)


@pytest.mark.sampled
@pytest.mark.parametrize("name", SQUARES)
def test_rows_are_not_taken_for_classes_where_there_are_as_many(name: str, few_logits_count) -> None:
    few_logits_count(CLASSES**2 - 1)
    with jax.enable_x64():
        loss, args = SQUARES[name], (jnp.asarray(W), jnp.asarray(RNG.normal(size=(CLASSES, FEATURES))))
        fast = lowering.rewrite(loss)
        found, expected = (jax.jit(jax.value_and_grad(fn, (0, 1)))(*args) for fn in (fast, loss))
        rewrite_checks.assert_alike(found, expected, 1e-9)
        applied = [one.pattern for one in fast.report(*args).applied]
        assert (applied == ["cross_entropy_sum"]) == ("columns" not in name or "transposed" in name), applied


@pytest.mark.long
@pytest.mark.sampled
@pytest.mark.parametrize("pattern", ["row_cone", "row_cone_sum", "cross_entropy", "cross_entropy_sum"])
def test_labels_that_the_logits_of_other_rows_decide_are_theirs(pattern: str, few_logits_count) -> None:
    """In a square of rows, those of other rows have the same shape."""
    few_logits_count(CLASSES * 9 - 1)
    x, at = RNG.normal(size=(9, 9, FEATURES)), (np.arange(9)[:, None], np.arange(9))

    def loss(w, x):
        z = x @ w
        labels, log_probs = jnp.argmax(z, -1), jax.nn.log_softmax(z)
        return log_probs[(*at, labels.T)].mean() - 2 * log_probs[(*at, labels)].mean()

    with jax.enable_x64():
        args = jnp.asarray(W), jnp.asarray(x)
        for fn in (loss, jax.value_and_grad(loss, (0, 1))):
            rewrite_checks.assert_alike(jax.jit(lowering.rewrite(fn, only=pattern))(*args), fn(*args), 1e-9)
