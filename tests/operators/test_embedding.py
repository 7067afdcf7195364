"""`embedding`: values and gradients against NumPy float64, bad input, and the promises of every operator."""

import contract
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from embedding_oracle import expected_gradient

import lowering
from jaxops._checks.arguments import BadParamError
from jaxops.embedding import embedding

WIDTH = 3


def gradient(table, indices, cotangent, **attributes):
    return jax.vjp(lambda table: embedding(table, indices, **attributes), table)[1](cotangent)[0]


def make_table(rng, rows=5, dtype="float32"):
    return jnp.asarray(rng.normal(size=(rows, WIDTH)), dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("shape", [(), (0,), (1,), (7,), (2, 0, 3), (2, 3, 5)], ids=str)
def test_embedding_looks_up_rows(shape, dtype, rng):
    table, indices = make_table(rng, dtype=dtype), rng.integers(0, 5, size=shape)
    out = embedding(table, indices)
    assert out.dtype == table.dtype
    np.testing.assert_array_equal(out, np.asarray(table)[indices])


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint16", "int32", "uint32"])
def test_embedding_takes_ids_of_any_integer_dtype(dtype, rng):
    table = make_table(rng, rows=300)  # more rows than 8 bits can count
    indices = np.array([0, 127, 3], dtype)
    np.testing.assert_array_equal(embedding(table, indices), np.asarray(table)[[0, 127, 3]])
    np.testing.assert_array_equal(
        gradient(table, indices, jnp.ones((3, WIDTH)))[:, 0], np.isin(np.arange(300), indices)
    )


def test_embedding_gives_nan_and_no_gradient_for_ids_out_of_range(rng):
    table, indices = make_table(rng), np.array([0, -1, 5, 4, -(2**31), 2**31 - 1])
    out = embedding(table, indices)
    np.testing.assert_array_equal(np.isnan(out[:, 0]), [False, True, True, False, True, True])
    grad = gradient(table, indices, jnp.ones_like(out))
    np.testing.assert_array_equal(grad[:, 0], [1, 0, 0, 0, 1])
    tangent = jax.jvp(lambda table: embedding(table, indices), (table,), (jnp.ones_like(table),))[1]
    np.testing.assert_array_equal(tangent[:, 0], [1, 0, 0, 1, 0, 0])


def test_embedding_cuts_no_ids_of_64_bits(rng):
    with jax.enable_x64(True):
        out = embedding(make_table(rng), jnp.asarray([2**32 + 1, 2**32, -(2**32), 1]))
    np.testing.assert_array_equal(np.isnan(out[:, 0]), [True, True, True, False])


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("scale", [False, True], ids=["sum", "scaled"])
@pytest.mark.parametrize("padding_idx", [None, 0, 4, -1, -5])
def test_embedding_gradient_equals_float64(padding_idx, scale, dtype, rng):
    attributes = {"padding_idx": padding_idx, "scale_grad_by_freq": scale}
    table, indices = make_table(rng, dtype=dtype), rng.integers(0, 5, size=(3, 7))
    cotangent = jnp.asarray(rng.normal(size=(3, 7, WIDTH)), dtype)
    actual = gradient(table, indices, cotangent, **attributes)
    assert actual.dtype == table.dtype
    one_rounding = 0.501 * float(jnp.finfo(dtype).eps) + 1e-6
    truth = expected_gradient(cotangent, indices, 5, **attributes)
    np.testing.assert_allclose(np.asarray(actual, np.float64), truth, rtol=one_rounding, atol=1e-6)


def test_embedding_gradient_of_many_bfloat16_ones_is_their_count():
    table, indices = jnp.zeros((2, 1), jnp.bfloat16), np.ones(40960, np.int32)
    assert gradient(table, indices, jnp.ones((40960, 1), jnp.bfloat16))[1, 0] == 40960
    scaled = gradient(table, indices, jnp.full((40960, 1), 100, jnp.bfloat16), scale_grad_by_freq=True)
    assert scaled[1, 0] == 100


def test_embedding_skips_nan_of_padding(rng):
    table, indices = make_table(rng), np.array([1, 4, 1])
    cotangent = jnp.ones((3, WIDTH)).at[1].set(jnp.nan)
    for scale in (False, True):
        grad = gradient(table, indices, cotangent, padding_idx=-1, scale_grad_by_freq=scale)
        np.testing.assert_array_equal(grad[:, 0], [0, 1 if scale else 2, 0, 0, 0])
    lookup = lambda table: embedding(table, indices, padding_idx=4)  # noqa: E731
    tangent = jax.jvp(lookup, (table,), (jnp.ones_like(table).at[4].set(jnp.nan),))[1]
    np.testing.assert_array_equal(tangent[:, 0], [1, 0, 1])


def test_embedding_keeps_float64():
    with jax.enable_x64(True):
        table = jnp.full((2, 1), 1 + 1e-12)
        assert table.dtype == jnp.float64
        indices = jnp.asarray(np.array([1, 1, 1], np.int64))
        assert embedding(table, indices)[0, 0] == 1 + 1e-12
        assert gradient(table, indices, jnp.full((3, 1), 1 + 1e-12))[1, 0] == 3 * (1 + 1e-12)


@pytest.mark.slow
def test_embedding_counts_frequencies_within_each_mapped_call(rng):
    table, indices = make_table(rng), np.array([[[1, 1, 2], [1, 3, 3]], [[1, 1, 1], [0, 4, 2]]])
    weights = jnp.asarray(rng.normal(size=(3, WIDTH)), jnp.float32)

    def loss(table, indices):
        return jnp.sum(weights * embedding(table, indices, padding_idx=3, scale_grad_by_freq=True))

    def mapped(table):
        return jnp.sum(jax.vmap(jax.vmap(loss, (None, 0)), (None, 0))(table, indices))

    expected = sum(expected_gradient(weights, one, 5, 3, True) for one in indices.reshape(4, 3))
    np.testing.assert_allclose(jax.grad(mapped)(table), expected, rtol=1e-6)
    np.testing.assert_allclose(jax.jacfwd(mapped)(table), expected, rtol=1e-6)


def test_embedding_of_an_empty_table(rng):
    table, no_indices = jnp.zeros((0, WIDTH)), np.zeros((2, 0), np.int32)
    assert embedding(table, no_indices).shape == (2, 0, WIDTH)
    assert gradient(table, no_indices, jnp.zeros((2, 0, WIDTH))).shape == (0, WIDTH)
    assert embedding(jnp.zeros((4, 0)), np.array([3, 1])).shape == (2, 0)


TABLE, INDICES = np.zeros((4, 3), np.float32), np.zeros((2,), np.int32)
REFUSALS = {
    "table-rank": ((TABLE[0], INDICES), {}, "table must have shape (V, D); got float32[3]"),
    "table-dtype": ((TABLE.astype(np.int32), INDICES), {}, "table must be floating point; got int32[4, 3]"),
    "float-indices": ((TABLE, INDICES.astype(np.float32)), {}, "indices must be integers; got float32[2]"),
    "bool-indices": ((TABLE, INDICES.astype(bool)), {}, "indices must be integers; got bool[2]"),
    "no-rows": ((TABLE[:0], INDICES), {}, "table must have at least one row; got float32[0, 3]"),
    "padding-above": ((TABLE, INDICES), {"padding_idx": 4}, "padding_idx must be in [-4, 4); got 4"),
    "padding-below": ((TABLE, INDICES), {"padding_idx": -5}, "padding_idx must be in [-4, 4); got -5"),
    "padding-float": ((TABLE, INDICES), {"padding_idx": 1.0}, "padding_idx must be an integer or None; got 1.0"),
    "scale": ((TABLE, INDICES), {"scale_grad_by_freq": "no"}, "scale_grad_by_freq must be a bool; got 'no'"),
    "padding-list": ((TABLE, INDICES), {"padding_idx": [1]}, "padding_idx must be an integer or None; got [1]"),
}


@pytest.mark.parametrize(("operands", "attributes", "words"), REFUSALS.values(), ids=REFUSALS)
def test_embedding_refuses_bad_input(operands, attributes, words):
    def call(*operands):
        return embedding(*operands, **attributes)

    for ask in (call, jax.jit(call), lambda *operands: lowering.explain(call, *operands)):
        with pytest.raises(BadParamError) as refusal:
            ask(*operands)
        assert str(refusal.value) == f"embedding: {words}"
        assert refusal.value.status == 161002


@pytest.mark.parametrize(("given", "missing"), [((None, INDICES), "table"), ((TABLE, None), "indices")])
def test_embedding_refuses_none(given, missing):
    with pytest.raises(BadParamError, match=f"embedding: {missing} must be given; got None") as refusal:
        embedding(*given)
    assert refusal.value.status == 161001


def operands(rng):
    return rng.normal(size=(6, WIDTH)).astype(np.float32), rng.integers(0, 6, size=(8, 2)).astype(np.int32)


PROMISED = {
    "differentiable": (0,),
    "batched": (None, 0),
    "operator": "embedding",
    "backward": "embedding_dense_backward",
}
CASES = [
    contract.Case("plain", embedding, operands, **PROMISED),
    contract.Case(
        "padding-scaled",
        lambda table, indices: embedding(table, indices, padding_idx=-1, scale_grad_by_freq=True),
        operands,
        **PROMISED,
        exact_derivative=False,
    ),
]


@pytest.mark.parametrize("promise", contract.PROMISES, ids=contract.promise_name)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_embedding_keeps_promise(case, promise):
    promise(case)
