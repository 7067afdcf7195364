"""Dropout as people write it becomes the operator, with the same rate and scale; what only resembles it does not."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import flax.linen as nn
import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
import rewrite_checks
from flax import nnx

import lowering

users_promotion = pytest.fixture(autouse=True)(rewrite_checks.users_promotion)

KEEP = 0.75
KEY = jax.random.key(7)
X = jax.random.normal(jax.random.key(1), (64, 200)) + 4  # no element is 0 before it is dropped


def uniform(key: Any, x: Any) -> Any:
    return jax.random.uniform(key, x.shape)


def bernoulli(key: Any, x: Any, rate: float = KEEP) -> Any:
    return jax.random.bernoulli(key, rate, x.shape)


def haiku(key: Any, x: Any) -> Any:
    """As `haiku.dropout` writes it."""
    rate = 1 - KEEP
    keep_rate = 1.0 - rate
    mask = jax.random.bernoulli(key, keep_rate, shape=x.shape)
    return mask * x / keep_rate


FORMS: dict[str, Callable[[Any, Any], Any]] = {
    "where uniform is less": lambda key, x: jnp.where(uniform(key, x) < KEEP, x / KEEP, 0),
    "where uniform is at least": lambda key, x: jnp.where(uniform(key, x) >= 1 - KEEP, x / KEEP, 0.0),
    "where uniform is dropped": lambda key, x: jnp.where(uniform(key, x) < 1 - KEEP, 0.0, x / KEEP),
    "number first": lambda key, x: jnp.where(jnp.greater(KEEP, uniform(key, x)), x / KEEP, 0),
    "where bernoulli": lambda key, x: jnp.where(bernoulli(key, x), x / KEEP, 0),
    "one less a mask": lambda key, x: x * (1 - bernoulli(key, x, 1 - KEEP)) / KEEP,
    "negated": lambda key, x: jnp.where(~bernoulli(key, x, 1 - KEEP), x / KEEP, 0),
    "inverse rate": lambda key, x: jnp.where(bernoulli(key, x), x * (1 / KEEP), 0),
    "scaled after": lambda key, x: jnp.where(bernoulli(key, x), x, 0) / KEEP,
    "scaled before and otherwise": lambda key, x: jnp.where(bernoulli(key, x), (x * 0.125) / KEEP, 0) * 8,
    "product with a mask": lambda key, x: x * bernoulli(key, x).astype(x.dtype) / KEEP,
    "product after scaling": lambda key, x: (x / KEEP) * bernoulli(key, x),
    "product with a scaled mask": lambda key, x: x * (bernoulli(key, x) / KEEP),
    "product with a mask by where": lambda key, x: x * jnp.where(bernoulli(key, x), 1 / KEEP, 0.0),
    "flat numbers": lambda key, x: jnp.where(jax.random.bernoulli(key, KEEP, x.size).reshape(x.shape), x / KEEP, 0),
    "raw key": lambda key, x: jnp.where(bernoulli(jax.random.key_data(key), x), x / KEEP, 0),
    "equinox": lambda key, x: eqx.nn.Dropout(1 - KEEP)(x, key=key),
    "flax linen": lambda key, x: nn.Dropout(1 - KEEP, deterministic=False).apply({}, x, rngs={"dropout": key}),
    "flax nnx": lambda key, x: nnx.Dropout(1 - KEEP, rngs=nnx.Rngs(dropout=key), deterministic=False)(x),
    "haiku": haiku,
    "a key for each row": lambda key, x: jax.vmap(FORMS["equinox"])(jax.random.split(key, len(x)), x),
}


HALVES = ("where bernoulli", "inverse rate", "product with a scaled mask", "equinox", "flax linen", "haiku")


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("name", "dtype"), [*((name, "float32") for name in FORMS), *((name, "bfloat16") for name in HALVES)]
)
def test_dropout_is_found_and_keeps_its_rate_and_scale(name: str, dtype: str) -> None:
    fn, x = FORMS[name], X.astype(dtype)
    (opportunity,) = lowering.explain(fn, KEY, x, target="cpu").opportunities
    assert opportunity.replacement == "jaxops.dropout"
    fast = lowering.rewrite(fn, only="dropout")
    assert [one.pattern for one in fast.report(KEY, x).applied] == ["dropout"]
    assert lowering.explain(fast, KEY, x, target="cpu").rows[0].operator == "dropout"
    y, pull_back = jax.vjp(lambda x: jax.jit(fast)(KEY, x), x)
    assert y.dtype == fn(KEY, x).dtype == x.dtype
    kept = np.asarray(y) != 0
    deviation = np.sqrt(KEEP * (1 - KEEP) / kept.size)
    assert abs(kept.mean() - KEEP) < 4 * deviation
    # Truth in NumPy's float64, rounded once or twice.
    tolerance = 4 * float(jnp.finfo(dtype).eps)
    expected = np.where(kept, np.asarray(x, np.float64) / KEEP, 0)
    np.testing.assert_allclose(np.asarray(y, np.float64), expected, rtol=tolerance)
    cotangent = X[::-1].astype(dtype)
    expected = np.where(kept, np.asarray(cotangent, np.float64) / KEEP, 0)
    np.testing.assert_allclose(np.asarray(pull_back(cotangent)[0], np.float64), expected, rtol=tolerance)


def scaled(x: Any, mask: Any) -> Any:
    return jnp.where(mask, x / KEEP, 0)


def counted(key: Any, x: Any) -> Any:
    mask = bernoulli(key, x)
    return scaled(x, mask) / jnp.sum(mask)


def shared_with_noise(key: Any, x: Any) -> Any:
    numbers = uniform(key, x)
    return scaled(x, numbers < KEEP) + numbers


OTHER_RATE = "what is kept is not divided by the rate at which it is kept"
SHARED = "the elements do not have a random number each"
# Each, and what is said of it; nothing where it is not like dropout at all.
LIKENESSES: dict[str, tuple[Callable[[Any, Any], Any], str | tuple[str, ...]]] = {
    "another rate": (lambda key, x: jnp.where(bernoulli(key, x), x / 0.7, 0), OTHER_RATE),
    "no scale": (lambda key, x: jnp.where(bernoulli(key, x), x, 0), OTHER_RATE),
    "product without a scale": (lambda key, x: x * bernoulli(key, x), OTHER_RATE),
    "scale of some": (lambda key, x: (lambda y: y / KEEP + y)(jnp.where(bernoulli(key, x), x, 0)), OTHER_RATE),
    "mask is returned": (
        lambda key, x: (lambda mask: (scaled(x, mask), mask))(bernoulli(key, x)),
        "its mask, or what that is made of, is a result too",
    ),
    "mask is counted": (counted, "its mask is read by reduce_sum too"),
    "what is dropped is noise": (
        lambda key, x: scaled(x, bernoulli(key, x)) * (1 - bernoulli(key, x)),
        (
            "its key draws numbers for something else too, which would no longer agree",
            "what is kept is not divided by the rate at which it is kept",
        ),
    ),
    "numbers are added": (shared_with_noise, "its random numbers are read by add too"),
    "two masks of the same numbers": (
        lambda key, x: (lambda u: scaled(x, u < KEEP) + jnp.where(u < 0.5, x, 0))(uniform(key, x)),
        OTHER_RATE,
    ),
    "rows": (lambda key, x: scaled(x, jax.random.bernoulli(key, KEEP, (x.shape[0], 1))), SHARED),
    "rows by a product": (lambda key, x: x * jax.random.bernoulli(key, KEEP, (x.shape[0], 1)) / KEEP, SHARED),
    "rows of flax": (
        lambda key, x: nn.Dropout(1 - KEEP, (1,), deterministic=False).apply({}, x, rngs={"dropout": key}),
        SHARED,
    ),
    "one key for a batch": (jax.vmap(lambda key, x: scaled(x, bernoulli(key, x)), (None, 0)), SHARED),
    "a key and a flat mask for each": (
        lambda key, x: jax.vmap(FORMS["flat numbers"])(jax.random.split(key, len(x)), x.reshape(len(x), -1, 2)),
        "each of several keys draws a mask that is reshaped",
    ),
    "transposed": (lambda key, x: scaled(x, jax.random.bernoulli(key, KEEP, x.shape[::-1]).T), ""),
    "other bounds": (lambda key, x: scaled(x, jax.random.uniform(key, x.shape, minval=-1) < KEEP), ""),
    "normal numbers": (lambda key, x: scaled(x, jax.random.normal(key, x.shape) < KEEP), ""),
    "rates of elements": (
        lambda key, x: scaled(x, jax.random.bernoulli(key, jnp.linspace(0.1, 0.9, x.shape[-1]), x.shape)),
        "",
    ),
    "another filling": (lambda key, x: jnp.where(bernoulli(key, x), x / KEEP, -1), ""),
    "a mask that is no chance": (lambda key, x: scaled(x, jnp.arange(x.size).reshape(x.shape) % 4 > 0), ""),
    "noise": (lambda key, x: x + uniform(key, x), ""),
    "a traced rate": (lambda key, x: (lambda rate: jnp.where(uniform(key, x) < rate, x / rate, 0))(x[0, 0] / 9), ""),
}


@pytest.mark.sampled
@pytest.mark.parametrize("name", LIKENESSES)
def test_what_only_resembles_dropout_is_left_alone(name: str) -> None:
    fn, reason = LIKENESSES[name]
    fast = lowering.rewrite(fn, only="dropout")
    report = fast.report(KEY, X)
    assert report.applied == ()
    reasons = (reason,) if isinstance(reason, str) else reason
    assert [one.reason for one in report.refused] == [*filter(None, reasons)]
    if "for each" not in name:  # called by hand under vmap, the operator can do that
        assert lowering.explain(fn, KEY, X, target="cpu").opportunities == ()
    jax.tree.map(np.testing.assert_array_equal, fast(KEY, X), fn(KEY, X))


def test_arrays_that_share_a_mask_keep_the_same_elements() -> None:
    def both(key: Any, x: Any) -> Any:
        mask = bernoulli(key, x)
        return scaled(x, mask), scaled(jnp.sin(x) + 2, mask)

    fast = lowering.rewrite(only="dropout")(both)  # as a decorator
    assert len(fast.report(KEY, X).applied) == 1
    first, second = (np.asarray(y) for y in fast(KEY, X))
    np.testing.assert_array_equal(first != 0, second != 0)
    assert 0.7 < (first != 0).mean() < 0.8


def squares(key: Any, x: Any) -> Any:
    return jnp.sum(jnp.sin(scaled(x, bernoulli(key, x))) ** 2)


def test_gradients_see_the_mask_of_the_value() -> None:
    """A gradient may be rewritten as a whole: both of its dropouts keep the same elements."""

    def step(x: Any) -> Any:
        return jax.value_and_grad(lambda x: squares(KEY, x))(x)

    value, gradient = lowering.rewrite(step, only="dropout")(X)
    expected = jax.value_and_grad(lambda x: lowering.rewrite(squares, only="dropout")(KEY, x))(X)
    np.testing.assert_allclose(value, expected[0], rtol=1e-6)
    np.testing.assert_allclose(gradient, expected[1], rtol=1e-5)
    assert not np.array_equal(gradient == 0, step(X)[1] == 0)  # the bits are others


def test_gradients_that_draw_again_in_a_checkpoint_are_left_alone() -> None:
    """Only the forward pass could be rewritten, whose mask the gradient would not see."""

    def step(x: Any) -> Any:
        return jax.value_and_grad(lambda x: jax.checkpoint(squares)(KEY, x))(x)

    fast = lowering.rewrite(step, only="dropout")
    (refused,) = fast.report(X).refused
    assert refused.reason.endswith("rewrite the function before it is differentiated")
    assert fast.report(X).applied == ()
    jax.tree.map(np.testing.assert_array_equal, fast(X), step(X))
    before = lowering.rewrite(lambda x: jax.checkpoint(squares)(KEY, x), only="dropout")
    assert len(before.report(X).applied) == 1
    expected = jax.grad(lambda x: lowering.rewrite(squares, only="dropout")(KEY, x))(X)
    np.testing.assert_allclose(jax.grad(before)(X), expected, rtol=1e-5)


def test_symbolic_sizes_are_compared() -> None:
    x = jax.ShapeDtypeStruct(jax.export.symbolic_shape("b, 200"), jnp.float32)
    for name in ("where bernoulli", "flax linen"):
        assert len(lowering.rewrite(FORMS[name], only="dropout").report(KEY, x).applied) == 1
    for name in ("rows", "rows by a product"):
        assert lowering.rewrite(LIKENESSES[name][0], only="dropout").report(KEY, x).refused[0].reason == SHARED
