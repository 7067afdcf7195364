"""Functions that look like a cross entropy and are not quite one have their own values and gradients."""

import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import rewrite_checks
from jax import lax

import lowering

users_promotion = pytest.fixture(autouse=True)(rewrite_checks.users_promotion)
few_logits_count = pytest.fixture(rewrite_checks.few_logits_count)

ROWS, FEATURES, CLASSES = 4, 3, 7
RNG = np.random.default_rng(0)
X, W, OTHER = RNG.normal(size=(ROWS, FEATURES)), RNG.normal(size=(FEATURES, CLASSES)), RNG.normal(size=(ROWS, CLASSES))
Y = np.array([1, 2, 0, 6])

logsumexp, log_softmax = functools.partial(jax.nn.logsumexp, axis=-1), jax.nn.log_softmax
cross_entropy = optax.softmax_cross_entropy_with_integer_labels


def picked(z: Any, labels: Any = Y) -> Any:
    return z[jnp.arange(len(labels)), labels]


def repeated(z: Any) -> Any:
    base = z
    for _ in range(40):
        z = z * jax.nn.sigmoid(z)
    return (logsumexp(base) - picked(z)).sum()


# Losses of logits z, some of them of large numbers.
TRAPS: dict[str, Callable[[Any], Any]] = {
    "a product with as many rows": lambda z: -jnp.trace(log_softmax(z) @ OTHER.T),
    "a product with a number for each row of another": lambda z: -jnp.tensordot(log_softmax(z), Y / 3, 0)[0, 1].sum(),
    "small terms that nearly cancel": lambda z: 1e7 * (2e-7 * logsumexp(20 * z) - 1e-7 * picked(20 * z)).sum(),
    "a small term beside": lambda z: (logsumexp(20 * z) - picked(20 * z) + 9e-7 * logsumexp(20 * z)).sum(),
    "a small number per row": lambda z: jnp.sin(9e-1 * (9e-7 * logsumexp(20 * z) - 0 * picked(20 * z)) * 1e6).sum(),
    "a slice of all numbers": lambda z: (
        logsumexp(z).sum() - lax.dynamic_slice(z.reshape(-1), (Y[0] + 2,), (ROWS,)).sum()
    ),
    "labels between classes": lambda z: (
        logsumexp(z) - jnp.sum((jnp.array([0.5, 1, 2, 3])[:, None] == jnp.arange(CLASSES)) * z, -1)
    ).sum(),
    "a scale of zero": lambda z: (logsumexp(z * jnp.array([1.0, 0, 1, 2])[:, None]) - picked(z)).sum(),
    "nearly a softcap": lambda z: cross_entropy(30 * jnp.tanh(20 * z * 0.03333333), Y).sum(),
    "transposed twice": lambda z: (cross_entropy(z[:, :ROWS].T, Y % ROWS) * Y).sum() + cross_entropy(z, Y).sum(),
    "many steps that share what is before": repeated,
}


@pytest.mark.sampled
@pytest.mark.parametrize(
    "pattern", ["cross_entropy", "cross_entropy_sum", ("row_cone_sum", "row_cone")], ids=["rows", "sum", "chunks"]
)
@pytest.mark.parametrize("name", TRAPS)
def test_what_is_no_cross_entropy_keeps_its_values(name: str, pattern: str, few_logits_count) -> None:
    few_logits_count(ROWS * CLASSES - 1)
    with jax.enable_x64():
        loss, args = (lambda x, w: TRAPS[name](x @ w)), (jnp.asarray(X), jnp.asarray(W))
        begin = time.monotonic()
        fast = lowering.rewrite(loss, only=pattern)
        fast.report(*args)
        assert time.monotonic() - begin < 20
        found, expected = (jax.value_and_grad(fn, (0, 1))(*args) for fn in (fast, loss))
        rewrite_checks.assert_alike(found, expected, 1e-9)


@pytest.mark.sampled
@pytest.mark.parametrize("pattern", ["cross_entropy", "cross_entropy_sum"])
def test_numbers_in_the_code_have_the_dtype_of_the_program(pattern: str, few_logits_count) -> None:
    few_logits_count(ROWS * CLASSES - 1)

    def with_accuracy(x: Any, w: Any) -> Any:
        z = x @ w
        return (cross_entropy(z, Y) + 0.5 * (jnp.argmax(z, -1) == Y)).sum()

    with jax.enable_x64():
        args = jnp.asarray(X, jnp.float32), jnp.asarray(W, jnp.float32)
        fast = lowering.rewrite(with_accuracy, only=pattern)
        assert fast.report(*args).applied
        rewrite_checks.assert_alike(fast(*args), with_accuracy(*args))


@pytest.mark.parametrize("dtype", ["uint8", "int8", "int16"])
def test_classes_are_not_counted_in_a_dtype_that_is_too_narrow(dtype: str, few_logits_count) -> None:
    few_logits_count(ROWS * 300 - 1)
    labels, weight = jnp.array([1, 3, 120, 40], dtype), jnp.asarray(np.tile(W, (1, 43))[:, :300])

    def loss(x: Any, w: Any) -> Any:
        z = x @ w
        return (logsumexp(z) - jnp.sum(jax.nn.one_hot(labels, 300) * z, -1)).sum()

    with jax.enable_x64():
        args = jnp.asarray(X), weight
        for pattern in ("cross_entropy", "cross_entropy_sum"):
            fast = lowering.rewrite(loss, only=pattern)
            rewrite_checks.assert_alike(*(jax.value_and_grad(fn, (0, 1))(*args) for fn in (fast, loss)), 1e-9)
