"""The gradient of an embedding in each of its forms: exact where sums are exact, the same in every run, and small."""

import functools

import contract
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from embedding_oracle import expected_gradient

from jaxops.embedding import EMBEDDING_DENSE_BACKWARD, embedding
from lowering.operators import Place

FORMS = {form.name: functools.partial(form.run, place=Place("cpu")) for form in EMBEDDING_DENSE_BACKWARD.forms}
IMPLEMENTATIONS = {"reference": EMBEDDING_DENSE_BACKWARD.reference, **FORMS}
WIDTH = 5


def gradient(implementation, grad, indices, *, num_weights, padding_idx=None, scale_grad_by_freq=False):
    """Runs the reference or a form here, also one that "auto" takes elsewhere."""
    params = {"num_weights": num_weights, "padding_idx": padding_idx, "scale_grad_by_freq": scale_grad_by_freq}
    return jax.jit(functools.partial(IMPLEMENTATIONS[implementation], **params))(grad, indices)[0]


@pytest.mark.sampled
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("scale", [False, True], ids=["sum", "scaled"])
@pytest.mark.parametrize("positions", [(1,), (3, 50)], ids=str)
def test_embedding_gradient_equals_float64_in_every_form(positions, scale, dtype, implementation, rng):
    """Of more rows than positions, and of fewer; with ids out of range and padding."""
    for num_weights in (7, 160):
        grad = jnp.asarray(rng.normal(size=(*positions, WIDTH)), dtype)
        indices = np.minimum(rng.zipf(1.3, positions) - 2, num_weights + 1).astype(np.int32)
        attributes = {"padding_idx": 2, "scale_grad_by_freq": scale}
        out = gradient(implementation, grad, indices, num_weights=num_weights, **attributes)
        assert out.dtype == grad.dtype
        truth = expected_gradient(grad, indices, num_weights, **attributes)
        tolerance = 0.501 * float(jnp.finfo(dtype).eps) + 2e-6
        np.testing.assert_allclose(np.asarray(out).astype(np.float64), truth, rtol=tolerance, atol=2e-5)


@pytest.mark.sampled
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("num_weights", [2, 50257])
def test_embedding_gradient_counts_40960_ones_in_every_form(num_weights, implementation):
    ones = jnp.ones((40960, 1), jnp.bfloat16)
    out = gradient(implementation, ones, jnp.ones(40960, jnp.int32), num_weights=num_weights)
    assert out[1, 0] == 40960
    assert jnp.sum(out != 0) == 1


@pytest.mark.sampled
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("num_weights", [6, 600])
def test_embedding_gradient_keeps_nan_to_its_row_in_every_form(num_weights, implementation):
    grad = jnp.ones((6, WIDTH), jnp.bfloat16).at[jnp.array([1, 4])].set(jnp.nan).at[2].set(jnp.inf)
    out = gradient(implementation, grad, jnp.array([5, 0, 1, 5, 3, 4]), num_weights=num_weights, padding_idx=3)
    np.testing.assert_array_equal(np.asarray(out[:6, 0], np.float32), [np.nan, np.inf, 0, 0, 1, 2])


@pytest.mark.sampled
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", contract.first_in_every_run(["bfloat16", "float32"]))
def test_embedding_gradient_is_the_same_in_every_run_and_order(dtype, implementation, rng):
    """Integers sum exactly, so that the order of positions cannot matter."""
    grad = jnp.asarray(rng.integers(-8, 8, size=(500, WIDTH)), dtype)
    indices = rng.integers(0, 9, size=500).astype(np.int32)
    run = functools.partial(gradient, implementation, num_weights=900)
    first = run(grad, indices)
    np.testing.assert_array_equal(first, expected_gradient(grad, indices, 900))
    order = rng.permutation(500)
    np.testing.assert_array_equal(first, run(grad[order], indices[order]))
    # What does not sum exactly is the same where each id stands for one row, wherever they stand.
    grad = jnp.asarray(rng.normal(size=(9, WIDTH)), dtype)[indices]
    first = np.asarray(run(grad, indices))
    assert np.asarray(run(grad, indices)).tobytes() == first.tobytes()
    assert np.asarray(run(grad[order], indices[order])).tobytes() == first.tobytes()


def test_embedding_gradient_of_a_large_bfloat16_table_needs_no_float32_table():
    table, indices = jax.ShapeDtypeStruct((20000, 64), jnp.bfloat16), jax.ShapeDtypeStruct((512,), jnp.int32)
    compiled = jax.jit(jax.grad(lambda *args: jnp.sum(jnp.sin(embedding(*args))))).lower(table, indices).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 20000 * 64
