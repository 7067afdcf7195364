"""Poolings, lookups and dropout are rewritten."""

import importlib
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rewrite_checks
from rewrite_checks import assert_alike

import lowering

users_promotion = pytest.fixture(autouse=True)(rewrite_checks.users_promotion)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("window", "strides", "padding"),
    [((3, 3), (2, 2), "SAME"), ((2, 2), (2, 2), "VALID"), ((3, 2), (1, 2), ((1, 2), (1, 0)))],
    ids=["same", "valid", "pairs"],
)
def test_pooling_has_the_same_bits(window, strides, padding) -> None:
    x = jax.random.normal(jax.random.key(0), (2, 9, 8, 3))

    def pooled(x):
        return nn.max_pool(x, window, strides, padding)

    fast = lowering.rewrite(pooled)
    assert [one.pattern for one in fast.report(x).applied] == ["max_pool"]
    assert lowering.rewrite(fast).report(x).applied == ()
    np.testing.assert_array_equal(fast(x), pooled(x))
    assert_alike(jax.grad(lambda x: jnp.sum(fast(x) ** 2))(x), jax.grad(lambda x: jnp.sum(pooled(x) ** 2))(x))


LOOKUPS = {
    "indexing": lambda table, ids: table[ids],
    "take": lambda table, ids: jnp.take(table, ids, axis=0),
    "clip": lambda table, ids: table.at[ids].get(mode="clip"),
    "one-hot": lambda table, ids: jax.nn.one_hot(ids, 16) @ table,
    "flax": lambda table, ids: nn.Embed(16, 4).apply({"params": {"embedding": table}}, ids),
}


@pytest.mark.sampled
@pytest.mark.parametrize("name", LOOKUPS)
def test_lookups_give_the_same_rows(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.import_module("jaxops.embedding.rewrites"), "LEAST_ELEMENTS", 0)
    table, ids = jax.random.normal(jax.random.key(0), (16, 4)), jnp.array([[0, 3, 15], [-1, 17, -20]])
    lookup = LOOKUPS[name]
    fast = lowering.rewrite(lookup)
    assert [one.pattern for one in fast.report(table, ids).applied] == ["embedding"]
    assert lowering.rewrite(fast).report(table, ids).applied == ()  # nothing is left to do
    np.testing.assert_array_equal(fast(table, ids), lookup(table, ids))

    def gradient(fn: Callable[..., Any]) -> Any:
        return jax.grad(lambda table: jnp.nansum(jnp.sin(fn(table, ids))))(table)

    assert_alike(gradient(fast), gradient(lookup))


def test_a_lookup_saves_memory_where_its_gradient_is_still_to_come_but_on_no_tpu() -> None:
    args = jax.ShapeDtypeStruct((32000, 64), jnp.bfloat16), jax.ShapeDtypeStruct((8, 100), jnp.int32)

    def loss(table, ids):
        return jnp.sum(table[ids].astype(jnp.float32) ** 2)

    saved = [lowering.rewrite(fn).report(*args).applied[0].saved_bytes for fn in (loss, jax.grad(loss))]
    assert saved == [4 * 32000 * 64, 0]
    advised = [bool(lowering.explain(loss, *args, target=name).rewrites) for name in ("cpu", "tpu-v5e", "cuda-h100")]
    assert advised == [True, False, True]


def test_dropout_is_rewritten_where_it_is_asked_for() -> None:
    def dropped(key, x):
        return nn.Dropout(0.25, deterministic=False).apply({}, x, rngs={"dropout": key})

    def of_other_numbers(key, x):
        return jnp.where(jax.random.uniform(key, x.shape, minval=0.5) < 0.9, x / 0.9, 0)

    key, x = jax.random.key(0), jnp.ones((100, 100))
    assert lowering.rewrite(dropped).report(key, x).applied == ()
    assert lowering.rewrite(of_other_numbers, only="dropout").report(key, x).applied == ()
    fast = lowering.rewrite(dropped, only="dropout")
    assert [one.pattern for one in fast.report(key, x).applied] == ["dropout"]
    y = np.asarray(jax.jit(fast)(key, x))
    np.testing.assert_allclose(np.unique(y), [0, 1 / 0.75], rtol=1e-6)
    assert abs((y != 0).mean() - 0.75) < 0.02
