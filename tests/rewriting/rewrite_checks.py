"""What the tests of `lowering.rewrite` share: a loss, its arguments, and how results are compared."""

import importlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from patterns_planted import W, X, Y

import lowering


def users_promotion() -> Iterator[None]:
    """A fixture: users' code adds what it likes."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def let_few_logits_count(monkeypatch: pytest.MonkeyPatch, size: int = 0) -> None:
    """Has arrays of more elements count as logits that are worth a rewrite, and chunks of few rows."""
    chunk_sizes, savings = (
        importlib.import_module(f"jaxops.linear_cross_entropy.{name}") for name in ("chunk_sizes", "rewriting.savings")
    )
    monkeypatch.setattr(chunk_sizes, "SIZES", chunk_sizes.SIZES._replace(logits=size, least=1))
    monkeypatch.setattr(savings, "saving", lambda logits, *_, **__: savings.Saving(8 * logits.size, 8 * logits.size))


def few_logits_in_float64(size: int) -> Any:
    """Returns a fixture that lets arrays of more elements count as logits, in float64 and with the users' promotion."""

    def few_logits(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        let_few_logits_count(monkeypatch, size)
        with jax.enable_x64():
            yield from users_promotion()

    return pytest.fixture(autouse=True)(few_logits)


def few_logits_count(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """A fixture: lets arrays of more elements than a number count as logits that are worth a rewrite."""
    return lambda size: let_few_logits_count(monkeypatch, size)


def arrays_like(tree: Any) -> Any:
    rng = np.random.default_rng(0)

    def array(leaf: Any) -> Any:
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jax.random.key(0)
        is_integer = jnp.issubdtype(leaf.dtype, jnp.integer)
        return jnp.asarray(rng.integers(0, 4, leaf.shape) if is_integer else rng.normal(size=leaf.shape), leaf.dtype)

    return jax.tree.map(array, tree)


def assert_alike(found: Any, expected: Any, tolerance: float = 1e-5) -> None:
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(np.asarray(one, float), np.asarray(other, float), rtol=tolerance, atol=tolerance)


def assert_keeps_no_logits(fn: Callable[..., Any], args: Any) -> None:
    """Compares a loss, or one with metrics, and its step with the rewritten ones: equal values, half of the memory."""

    def with_metrics(fn: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args: found if isinstance(found := fn(*args), tuple) else (found, ())

    step = jax.value_and_grad(with_metrics(fn), (0, 1), has_aux=True)
    of_loss = jax.value_and_grad(with_metrics(lowering.rewrite(fn)), (0, 1), has_aux=True)
    plain, *rewritten = (jax.jit(fn).lower(*args).compile() for fn in (step, of_loss, lowering.rewrite(step)))
    for one in rewritten:
        assert_alike(one(*args), plain(*args), 1e-9)
        assert one.memory_analysis().temp_size_in_bytes < plain.memory_analysis().temp_size_in_bytes / 2


def loss(w: Any, x: Any, labels: Any) -> Any:
    return optax.softmax_cross_entropy_with_integer_labels(x @ w, labels).mean()  # here


ARGS = arrays_like((W, X, Y))
