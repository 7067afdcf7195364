"""`dropout`: which elements it keeps, with what statistics, and what it makes of them."""

import functools
import math

import contract
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import lowering
from jaxops import dropout
from jaxops._checks.arguments import BadParamError
from pallas_kernels.dropout_mask import threefry

KEY = jax.random.key(20)
# Rows of whole words, of words across axes, and everything as one row with bits left over.
SHAPES = [(), (0,), (1,), (7,), (1000,), (8, 64), (3, 5), (4, 6, 16), (2, 3, 4, 40), (2, 0, 64), (33, 31)]


@functools.partial(jax.jit, static_argnums=(1, 2))
def mask_of(key, count, rate):
    return dropout(key, jnp.ones(count), rate) != 0


def kept(key, count, rate):
    return np.asarray(mask_of(key, count, rate))


def value_and_gradient(key, x, dy, rate):
    y, pull_back = jax.vjp(jax.jit(lambda x: dropout(key, x, rate)), x)
    return y, pull_back(dy)[0]


def test_threefry_gives_the_published_words():
    """The known answers of Random123's Threefry-2x32 with 20 rounds."""
    ones = 0xFFFFFFFF
    pi = (0x13198A2E, 0x03707344, 0x243F6A88, 0x85A308D3)
    for inputs, words in (
        ((0, 0, 0, 0), (0x6B200159, 0x99BA4EFE)),
        ((ones, ones, ones, ones), (0x1CB996FC, 0xBB002BE7)),
        (pi, (0xC4923A9C, 0x483DF7A0)),
    ):
        assert tuple(map(int, threefry(*map(jnp.uint32, inputs)))) == words


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("shape", "rate"), [*((shape, 0.75) for shape in SHAPES), ((1000,), 0.1), ((8, 64), 0.5)], ids=str
)
def test_dropout_scales_what_it_keeps_and_zeroes_the_rest(shape, rate, rng):
    x, dy = (jnp.asarray(rng.normal(size=shape), jnp.float32) for _ in range(2))
    y, dx = value_and_gradient(KEY, x, dy, rate)
    mask = np.asarray(y) != 0
    scale = np.float32(1) / (np.float32(1) - np.float32(rate))
    np.testing.assert_array_equal(y, np.where(mask, np.asarray(x) * scale, 0))
    np.testing.assert_array_equal(dx, np.where(mask, np.asarray(dy) * scale, 0))


@pytest.mark.sampled
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_dropout_masks_elements_by_their_place_in_row_major_order(shape):
    flat = kept(KEY, math.prod(shape), 0.25)
    np.testing.assert_array_equal(np.ravel(dropout(KEY, jnp.ones(shape), 0.25)) != 0, flat)
    assert kept(KEY, 5000, 0.25)[: flat.size].tolist() == flat.tolist()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_dropout_multiplies_in_float32_and_rounds_once(dtype, rng):
    x = jnp.asarray(rng.normal(size=(40, 33)), dtype)
    y = dropout(KEY, x, 0.375)
    assert y.dtype == dtype
    exact = np.asarray(x).astype(np.float32) * (np.float32(1) / (np.float32(1) - np.float32(0.375)))
    expected = np.where(np.asarray(y) != 0, np.asarray(jnp.asarray(exact, dtype)).astype(np.float32), 0)
    np.testing.assert_array_equal(np.asarray(y).astype(np.float32), expected)


def test_dropout_keeps_float64(rng):
    with jax.enable_x64(True):
        x = rng.normal(size=200)
        y = np.asarray(dropout(KEY, x, 0.375))
        assert y.dtype == np.float64
        np.testing.assert_allclose(y[y != 0], x[y != 0] / 0.625, rtol=1e-15)


@pytest.mark.parametrize("shape", [(7,), (4, 64)], ids=str)
def test_dropout_at_rates_zero_and_one_is_exact(shape, rng):
    x = jnp.asarray(rng.normal(size=shape), jnp.float32).ravel().at[1].set(jnp.nan).reshape(shape)
    for rate, expected in ((0, x), (0.0, x), (1, jnp.zeros(shape)), (1.0, jnp.zeros(shape))):
        y, dx = value_and_gradient(KEY, x, x, rate)
        np.testing.assert_array_equal(y, expected)
        np.testing.assert_array_equal(dx, expected)


def test_dropout_at_rates_beside_zero_and_one_keeps_all_or_nothing():
    assert kept(KEY, 100, 1e-9).all()
    assert not kept(KEY, 100, 1 - 1e-9).any()


def test_dropout_leaves_nan_and_infinity_of_dropped_elements_behind(rng):
    mask = kept(KEY, 300, 0.375)
    bad = jnp.asarray(np.where(mask, 1.0, np.where(np.arange(300) % 2, np.nan, np.inf)), jnp.float32)
    y, dx = value_and_gradient(KEY, bad, bad, 0.375)
    assert np.isfinite(y).all()
    assert np.isfinite(dx).all()
    tangent = jax.jvp(lambda x: dropout(KEY, x, 0.375), (bad,), (bad,))[1]
    assert np.isfinite(tangent).all()


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9, 2**-12, 1 / 3])
def test_dropout_keeps_the_fraction_that_is_asked_for(rate):
    count = 2**20
    for seed in range(3):
        mean = kept(jax.random.key(seed), count, rate).mean()
        # Five standard deviations: one in a million such tests fails by chance.
        assert abs(mean - (1 - rate)) < 5 * math.sqrt(rate * (1 - rate) / count)


def chi_square(masks, rate):
    """Of how often each pattern of the last axis occurs, against independent draws: about normal, standardised."""
    width = masks.shape[-1]
    patterns = masks.reshape(-1, width) @ (1 << np.arange(width))
    seen = np.bincount(patterns, minlength=2**width)
    ones = np.array([pattern.bit_count() for pattern in range(2**width)])
    expected = patterns.size * (1 - rate) ** ones * rate ** (width - ones)
    freedom = 2**width - 1
    return (((seen - expected) ** 2 / expected).sum() - freedom) / math.sqrt(2 * freedom)


@pytest.mark.parametrize("rate", [0.25, 0.375])
def test_dropout_passes_chi_square_tests(rate):
    count = 2**19
    masks = np.stack([kept(jax.random.key(seed), count, rate) for seed in range(8)]).astype(np.int64)
    first = masks[0]
    grouped = {
        "neighbours": first.reshape(-1, 8),
        "the same bit of neighbouring words": first.reshape(-1, 8, 32).swapaxes(1, 2),
        "far apart": first.reshape(8, -1).T,
        "different keys": masks.T,
        "keys split from one": np.stack(
            [kept(key, 2**16, rate) for key in jax.random.split(jax.random.key(7), 8)]
        ).T.astype(np.int64),
    }
    for name, groups in grouped.items():
        assert abs(chi_square(groups, rate)) < 5, name


def test_dropout_changes_with_every_key_and_repeats_with_the_same():
    masks = [kept(jax.random.fold_in(KEY, i), 256, 0.5) for i in range(20)]
    assert len({mask.tobytes() for mask in masks}) == 20
    np.testing.assert_array_equal(masks[3], kept(jax.random.fold_in(KEY, 3), 256, 0.5))


def test_dropout_draws_nothing_that_jax_draws_from_the_same_key():
    """Half of the elements agree with the bits that `jax.random` makes of this key, as of any other."""
    count = 2**16
    words = np.asarray(jax.random.bits(KEY, (count // 32,), jnp.uint32))
    bits = (words[:, None] >> np.arange(32, dtype=np.uint32)) & 1
    agreement = (bits.ravel() == kept(KEY, count, 0.5)).mean()
    assert abs(agreement - 0.5) < 5 * 0.5 / math.sqrt(count)


@pytest.mark.sampled
@pytest.mark.parametrize("impl", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_dropout_takes_typed_and_raw_keys_of_every_implementation(impl):
    typed = jax.random.key(5, impl=impl)
    mask = kept(typed, 4096, 0.5)
    np.testing.assert_array_equal(mask, kept(jax.random.key_data(typed), 4096, 0.5))
    assert abs(mask.mean() - 0.5) < 5 * 0.5 / 64
    assert (mask != kept(jax.random.key(6, impl=impl), 4096, 0.5)).any()


@pytest.mark.sampled
@pytest.mark.parametrize("shape", [(8, 64), (8, 5), (8, 2, 3, 32), (8, 3, 4, 8)], ids=str)
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=lambda kind: kind.name)
def test_dropout_keeps_the_same_elements_however_they_are_split(axis_type, shape, rng):
    x, dy = (jnp.asarray(rng.normal(size=shape), jnp.float32) for _ in range(2))
    alone = value_and_gradient(KEY, x, dy, 0.25)
    specs = [P("a"), P("a", "b")] if shape[1] % 2 == 0 else [P("a")]
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(axis_type,) * 2)
    for spec in specs:
        split = [jax.device_put(array, NamedSharding(mesh, spec)) for array in (x, dy)]
        for actual, expected in zip(value_and_gradient(KEY, *split, 0.25), alone, strict=True):
            np.testing.assert_array_equal(actual, expected)


def test_dropout_keeps_one_bit_an_element_for_its_gradient(rng):
    x = jnp.asarray(rng.normal(size=(32, 64)), jnp.float32)
    saved = jax.tree.leaves(jax.vjp(lambda x: dropout(KEY, x, 0.25), x)[1])
    assert sum(array.nbytes for array in saved) == x.size / 8 + 8  # and what the rate says, once


@pytest.mark.slow
def test_dropout_under_vmap_keeps_what_each_key_says():
    x = jnp.ones((3, 50))
    keys = jax.random.split(KEY, 3)
    one_key = jax.vmap(lambda x: dropout(KEY, x, 0.5))(x)
    np.testing.assert_array_equal(one_key, jnp.stack([dropout(KEY, row, 0.5) for row in x]))
    each = jax.vmap(lambda key, x: dropout(key, x, 0.5))(keys, x)
    np.testing.assert_array_equal(each, jnp.stack([dropout(key, row, 0.5) for key, row in zip(keys, x, strict=True)]))


def test_explain_shows_dropout():
    rows = lowering.explain(jax.grad(lambda x: jnp.sum(dropout(KEY, x, 0.25) ** 2)), jnp.ones((4, 64))).rows
    assert [row.operator for row in rows] == ["dropout", "dropout_backward"]


X = np.zeros((4, 8), np.float32)
REFUSALS = {
    "no-key": (None, X, 0.5, "key must be given; got None"),
    "no-x": (KEY, None, 0.5, "x must be given; got None"),
    "integers": (KEY, X.astype(np.int32), 0.5, "x must be floating point; got int32[4, 8]"),
    "keys": (
        jax.random.split(KEY, 3),
        X,
        0.5,
        "key must be one key of jax.random, such as jax.random.key(0); got key<fry>",
    ),
    "seed": (np.int32(3), X, 0.5, "key must be one key of jax.random, such as jax.random.key(0); got "),
    "order-of-torch": (X, 0.5, KEY, "key must come first, as in dropout(key, x, rate); got float32[4, 8]"),
    "order-with-raw-key": (
        X,
        jax.random.PRNGKey(0),
        0.5,
        "key must come first, as in dropout(key, x, rate); got float32",
    ),
    "negative": (KEY, X, -0.1, "rate must be a number in [0, 1]; got -0.1"),
    "above": (KEY, X, 1.1, "rate must be a number in [0, 1]; got 1.1"),
    "nan": (KEY, X, math.nan, "rate must be a number in [0, 1]; got nan"),
    "bool": (KEY, X, True, "rate must be a number in [0, 1]; got True"),
    "numpy-0d": (KEY, X, np.array(1.5, np.float32), "rate must be a number in [0, 1]; got "),
    "rates": (KEY, X, np.full(2, 0.5, np.float32), "rate must be a number in [0, 1]; got float32[2]"),
}


@pytest.mark.parametrize(("key", "x", "rate", "words"), REFUSALS.values(), ids=REFUSALS)
def test_dropout_refuses_bad_input(key, x, rate, words):
    with pytest.raises(BadParamError) as refusal:
        dropout(key, x, rate)
    assert str(refusal.value).startswith(f"dropout: {words}")
    assert refusal.value.status == "MCDNN_STATUS_BAD_PARAM"


def case(name, shape, rate):
    return contract.Case(
        name,
        lambda key, x: dropout(key.astype(jnp.uint32), x, rate),
        lambda rng: (
            rng.integers(0, 2**31, 2).astype(np.int32),
            rng.uniform(0.5, 1.5, size=shape).astype(np.float32),
        ),
        differentiable=(1,),
        batched=(None, 0),
        operator="dropout",
        backward="dropout_backward",
    )


CASES = [case("words", (8, 2, 32), 0.25), case("bits-left-over", (8, 5), 0.5)]


@pytest.mark.parametrize("promise", contract.PROMISES, ids=contract.promise_name)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_dropout_keeps_promise(case, promise):
    promise(case)
