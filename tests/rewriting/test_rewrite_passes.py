"""Losses whose logits meet a number of all rows are computed in several passes over chunks of rows."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from rewrite_checks import assert_keeps_no_logits, few_logits_in_float64

import lowering

ROWS, FEATURES, CLASSES = 94, 3, 64
RNG = np.random.default_rng(0)
few_logits = few_logits_in_float64(3 * CLASSES)


def entropies(logits: Any, labels: Any) -> Any:
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels)


def with_moments(x: Any, w: Any, y: Any) -> Any:
    z = x @ w
    return entropies(z, y).mean(), (z.std(), ((z - z.mean()) ** 4).mean() / z.var() ** 2)


def of_wrong_rows(x: Any, w: Any, y: Any) -> Any:
    z = x @ w
    is_wrong = jnp.argmax(z, -1) != y
    return (entropies(z, y) * is_wrong).sum() / (1 + is_wrong.sum())


def over_both_axes(x: Any, w: Any, y: Any) -> Any:
    z = x @ w
    of_rows = jnp.take_along_axis(jax.nn.softmax(z, axis=0), y[:, None], -1)
    return entropies(z, y).mean() - jnp.log(of_rows + 1e-6).mean()


def contrastive(x: Any, w: Any, y: Any) -> Any:
    z, labels = x[:CLASSES] @ w, jnp.arange(CLASSES)
    return entropies(z, labels).mean() + entropies(z.T, labels).mean()


def with_mutual_information(x: Any, w: Any, y: Any) -> Any:
    z = x @ w
    p, mean = jax.nn.softmax(z), jax.nn.softmax(z).mean(0)
    return entropies(z, y).mean() + (mean * jnp.log(mean)).sum() - (p * jax.nn.log_softmax(z)).sum(-1).mean()


def of_pairs(x: Any, w: Any, y: Any) -> Any:
    z = x @ w
    return jnp.log1p(jnp.exp((1 - 2 * jnp.eye(*z.shape, dtype=z.dtype)) * z)).sum()


# Losses of x, the weight and labels, and how many passes the loss and its gradient take; 1 is not said.
LOSSES: dict[str, tuple[Callable[..., Any], int, int]] = {
    "moments of the logits": (with_moments, 2, 2),
    "centred logits": (lambda x, w, y: entropies((z := x @ w) - z.mean(), y).mean(), 2, 3),
    "divided by the deviation": (lambda x, w, y: entropies((z := x @ w) / z.std(), y).mean(), 3, 5),
    "rows that are wrong": (of_wrong_rows, 1, 2),
    "rows above the mean": (
        lambda x, w, y: jnp.where((losses := entropies(x @ w, y)) > losses.mean(), losses, 0).mean(),
        1,
        2,
    ),
    "both axes": (over_both_axes, 3, 4),
    "pairs of both axes": (contrastive, 2, 3),
    "mutual information": (with_mutual_information, 1, 2),
    "signs by the diagonal": (of_pairs, 1, 1),
}


@pytest.mark.sampled
@pytest.mark.parametrize("name", LOSSES)
def test_what_needs_a_number_of_all_rows_takes_another_pass(name: str) -> None:
    fn, passes, passes_of_step = LOSSES[name]
    x, w = RNG.normal(size=(ROWS, FEATURES)), RNG.normal(size=(FEATURES, CLASSES))
    args = jnp.asarray(x), jnp.asarray(w), jnp.asarray(RNG.integers(0, CLASSES, ROWS))
    assert_keeps_no_logits(fn, args)
    step = jax.value_and_grad(fn, (0, 1), has_aux=fn is with_moments)
    for one, count in ((fn, passes), (step, passes_of_step)):
        (applied,) = lowering.rewrite(one).report(*args).applied
        assert applied.detail.endswith(f", {count} passes over them") == (count > 1), applied.detail
