"""`aclnn.embedding_dense_backward` against the documents' examples, NumPy float64 and PyTorch's cases."""

import functools

import contract
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from embedding_oracle import expected_gradient

import lowering
from jaxops._checks.arguments import BadParamError
from jaxops.aclnn.embedding import embedding_dense_backward

EXAMPLES = {  # grad, indices, attributes, the rows of the result that are not zero
    "example": ([[1, 2, 3], [4, 5, 6]], [1, 2], {"num_weights": 4, "padding_idx": 0}, {1: [1, 2, 3], 2: [4, 5, 6]}),
    "unit-test": (
        [[0.1, 0.2, 0.3], [0.4, 0.5, 0.6], [0.7, 0.8, 0.9], [1.0, 1.1, 1.2]],
        [1, 2, 3, 4],
        {"num_weights": 10, "padding_idx": 0},
        {1: [0.1, 0.2, 0.3], 2: [0.4, 0.5, 0.6], 3: [0.7, 0.8, 0.9], 4: [1.0, 1.1, 1.2]},
    ),
    "duplicate": ([[1, 2], [3, 4], [5, 6]], [1, 3, 1], {"num_weights": 4}, {1: [6, 8], 3: [3, 4]}),
    "duplicate-scaled": (
        [[1, 2], [3, 4], [5, 6]],
        [1, 3, 1],
        {"num_weights": 4, "scale_grad_by_freq": True},
        {1: [3, 4], 3: [3, 4]},
    ),
    "padding": ([[1, 2], [3, 4], [5, 6]], [1, 3, 1], {"num_weights": 4, "padding_idx": 1}, {3: [3, 4]}),
}


@pytest.mark.parametrize(("grad", "indices", "attributes", "nonzero"), EXAMPLES.values(), ids=EXAMPLES)
def test_embedding_dense_backward_gives_the_documented_examples(grad, indices, attributes, nonzero):
    out = embedding_dense_backward(jnp.array(grad, jnp.float32), jnp.array(indices), **attributes)
    truth = np.zeros((attributes["num_weights"], len(grad[0])), np.float32)
    for row, values in nonzero.items():
        truth[row] = values
    np.testing.assert_array_equal(out, truth)


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("scale", [False, True], ids=["sum", "scaled"])
@pytest.mark.parametrize("padding_idx", [3, 0, -1, 7, -1819776, 392092, 2**64 - 1])
def test_embedding_dense_backward_equals_float64(padding_idx, scale, dtype, rng):
    """Padding that is no row has no effect: it does not count from the end."""
    grad, indices = jnp.asarray(rng.normal(size=(4, 5, 3)), dtype), rng.integers(0, 7, size=(5, 2, 2))
    out = embedding_dense_backward(grad, indices, num_weights=7, padding_idx=padding_idx, scale_grad_by_freq=scale)
    assert out.dtype == grad.dtype
    truth = expected_gradient(grad, indices, 7, padding_idx if 0 <= padding_idx < 7 else None, scale)
    one_rounding = 0.501 * float(jnp.finfo(dtype).eps) + 1e-6
    np.testing.assert_allclose(np.asarray(out).astype(np.float64), truth, rtol=one_rounding, atol=1e-6)


@pytest.mark.parametrize("dtype", ["int64", "int32", "int16", "int8", "uint8", "bool", "float64", "float32", "float16"])
def test_embedding_dense_backward_takes_every_index_dtype(dtype):
    with jax.enable_x64(True):
        grad, indices = jnp.array([[1.0], [2.0], [4.0]], jnp.float32), jnp.array([1, 0, 1], dtype)
        assert indices.dtype == dtype
        out = embedding_dense_backward(grad, indices, num_weights=300)  # more rows than 8 bits can count
        np.testing.assert_array_equal(out[:3, 0], [2, 5, 0])


def test_embedding_dense_backward_takes_indices_of_another_shape():
    grad, indices = jnp.ones((192, 5, 1, 1, 1, 1, 1)), jnp.zeros((1, 4, 3, 8, 2, 5, 1), jnp.int32)
    np.testing.assert_array_equal(embedding_dense_backward(grad, indices, num_weights=2), [[960], [0]])


@pytest.mark.parametrize("scale", [False, True], ids=["sum", "scaled"])
def test_embedding_dense_backward_drops_indices_out_of_range(scale):
    indices = jnp.array([0, -1, 4, 2**31 - 1, -(2**31)])
    out = embedding_dense_backward(jnp.ones((5, 1)), indices, num_weights=4, scale_grad_by_freq=scale)
    np.testing.assert_array_equal(out, [[1], [0], [0], [0]])


def test_embedding_dense_backward_drops_indices_that_are_no_numbers():
    indices = jnp.array([0.0, jnp.nan, jnp.inf, -jnp.inf])
    np.testing.assert_array_equal(embedding_dense_backward(jnp.ones((4, 1)), indices, num_weights=2), [[1], [0]])


def test_embedding_dense_backward_keeps_nan_and_infinity_to_their_rows():
    grad = jnp.array([[jnp.nan], [1.0], [jnp.inf], [jnp.nan]])
    out = embedding_dense_backward(grad, jnp.array([0, 1, 2, 3]), num_weights=4, padding_idx=3)
    np.testing.assert_array_equal(out[:, 0], [np.nan, 1, np.inf, 0])


def test_embedding_dense_backward_sums_and_scales_in_float32():
    ids = jnp.zeros(4096, jnp.int32)
    assert embedding_dense_backward(jnp.ones((4096, 1), jnp.bfloat16), ids, num_weights=1)[0, 0] == 4096
    hundreds = jnp.full((1000, 1), 100, jnp.float16)
    assert embedding_dense_backward(hundreds, ids[:1000], num_weights=1, scale_grad_by_freq=True)[0, 0] == 100
    assert embedding_dense_backward(hundreds, ids[:1000], num_weights=1)[0, 0] == np.inf


@pytest.mark.parametrize("grad_shape", [(0, 4), (2, 0, 4), (3, 0), (0, 0)], ids=str)
@pytest.mark.parametrize("scale", [False, True], ids=["sum", "scaled"])
def test_embedding_dense_backward_of_nothing_is_zero(grad_shape, scale):
    indices = jnp.zeros((5,) if grad_shape[-1] == 0 else (0, 2), jnp.int32)  # any number of them where D is 0
    out = embedding_dense_backward(jnp.ones(grad_shape), indices, num_weights=7, scale_grad_by_freq=scale)
    np.testing.assert_array_equal(out, np.zeros((7, grad_shape[-1])))


GRAD, INDICES = np.ones((2, 3, 4), np.float32), np.zeros((2, 3), np.int32)
WEIGHTS = {"num_weights": 5}
DTYPES = "grad must be one of float32, float16, bfloat16"
INDEX_DTYPES = "indices must be one of int64, int32, int16, int8, uint8, bool, float32, float16, float64"
REFUSALS = {
    "no-grad": ((None, INDICES), WEIGHTS, 161001, "grad must be given; got None"),
    "no-indices": ((GRAD, None), WEIGHTS, 161001, "indices must be given; got None"),
    "null-before-dtype": ((GRAD.astype(int), None), WEIGHTS, 161001, "indices must be given; got None"),
    "int-grad": ((GRAD.astype(np.int32), INDICES), WEIGHTS, 161002, f"{DTYPES}; got int32[2, 3, 4]"),
    "bool-grad": ((GRAD.astype(bool), INDICES), WEIGHTS, 161002, f"{DTYPES}; got bool[2, 3, 4]"),
    "complex-grad": ((GRAD.astype(np.complex64), INDICES), WEIGHTS, 161002, f"{DTYPES}; got complex64[2, 3, 4]"),
    "bf16-indices": ((GRAD, INDICES.astype(jnp.bfloat16)), WEIGHTS, 161002, f"{INDEX_DTYPES}; got bfloat16[2, 3]"),
    "complex-indices": ((GRAD, INDICES.astype("c8")), WEIGHTS, 161002, f"{INDEX_DTYPES}; got complex64[2, 3]"),
    "grad-rank-1": ((GRAD[0, 0], INDICES[:1, :1]), WEIGHTS, 161002, "grad must have rank 2 to 8; got float32[4]"),
    "grad-rank-9": ((np.ones((1,) * 9, "f4"), INDICES[:1, 0]), WEIGHTS, 161002, "grad must have rank 2 to 8; got"),
    "indices-rank-0": ((GRAD[:1, 0], INDICES[0, 0]), WEIGHTS, 161002, "indices must have rank 1 to 8; got int32[]"),
    "indices-rank-9": ((GRAD[:1, 0], np.ones((1,) * 9, "i4")), WEIGHTS, 161002, "indices must have rank 1 to 8; got"),
    "rows": (
        (GRAD, INDICES[:1]),
        WEIGHTS,
        161002,
        "indices must have 6 elements, one for each row of grad; got int32[1",
    ),
    "rows-of-empty": ((GRAD[:0], INDICES), WEIGHTS, 161002, "indices must have 0 elements, one for each row of grad;"),
    "negative-weights": (
        (GRAD, INDICES),
        {"num_weights": -1},
        161002,
        "num_weights must be a non-negative integer; got",
    ),
    "float-weights": ((GRAD, INDICES), {"num_weights": 5.0}, 161002, "num_weights must be a non-negative integer; got"),
    "no-weights": (
        (GRAD, INDICES),
        {"num_weights": 0},
        161002,
        "num_weights must be positive where there are indices;",
    ),
    "scale": ((GRAD, INDICES), {**WEIGHTS, "scale_grad_by_freq": "no"}, 161002, "scale_grad_by_freq must be a bool;"),
    "padding": ((GRAD, INDICES), {**WEIGHTS, "padding_idx": None}, 161002, "padding_idx must be an integer; got None"),
}


@pytest.mark.parametrize(("operands", "attributes", "status", "words"), REFUSALS.values(), ids=REFUSALS)
def test_embedding_dense_backward_refuses_bad_input(operands, attributes, status, words):
    def call(*operands):
        return embedding_dense_backward(*operands, **attributes)

    for ask in (call, jax.jit(call), lambda *operands: lowering.explain(call, *operands)):
        with pytest.raises(BadParamError) as refusal:
            ask(*operands)
        assert str(refusal.value).startswith(f"embedding_dense_backward: {words}")
        assert refusal.value.status == status


def test_embedding_dense_backward_refuses_float64():
    with jax.enable_x64(True), pytest.raises(BadParamError, match=DTYPES):
        embedding_dense_backward(GRAD.astype(np.float64), INDICES, **WEIGHTS)


CASES = [
    contract.Case(
        "padding-scaled",
        functools.partial(embedding_dense_backward, num_weights=5, padding_idx=2, scale_grad_by_freq=True),
        lambda rng: (rng.normal(size=(8, 2, 3)).astype(np.float32), rng.integers(0, 5, size=(8, 2)).astype(np.int32)),
        (0,),
        (0, 0),
        "embedding_dense_backward",
        exact_derivative=False,  # it is exact, but the promise is kept in float64, which this layer refuses
    )
]


@pytest.mark.parametrize("promise", contract.PROMISES, ids=contract.promise_name)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_embedding_dense_backward_keeps_promise(case, promise):
    promise(case)
