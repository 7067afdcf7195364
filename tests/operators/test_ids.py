"""Ids at the ends of their dtypes: unsigned ones, ids that are ignored, ids that are nothing, and ids from NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxops
from jaxops import BadParamError, RowGradients, ema_adam, ema_adam_rows, embedding, fused_apply, linear_cross_entropy

LOG_PROBS = np.log(np.float32([[0.5, 0.25, 0.25], [0.1, 0.2, 0.7], [0.2, 0.2, 0.6]]))
# The dtype of labels, its greatest id, and whether it takes x64.
UNSIGNED = [(np.uint8, False), (np.uint32, False), (np.uint32, True), (np.uint64, True)]


@pytest.mark.sampled
@pytest.mark.parametrize(("dtype", "x64"), UNSIGNED, ids=lambda x: getattr(x, "__name__", x))
@pytest.mark.parametrize("ignored", ["greatest", 2**31, 2**64, -1])
def test_any_integer_may_be_ignored_among_unsigned_labels(dtype, x64, ignored):
    """The mean of two rows of three where the third has the label that is ignored, else NaN: it is no class."""
    greatest = int(np.iinfo(dtype).max)
    labels = np.array([0, 2, greatest], dtype)
    ignored = greatest if ignored == "greatest" else ignored
    kept_mean = -(np.log(0.5) + np.log(0.7)) / 2
    expected = kept_mean if ignored == greatest else np.nan
    with jax.enable_x64(x64):
        loss = jaxops.nll_loss(LOG_PROBS, labels, ignore_index=ignored)
        np.testing.assert_allclose(loss, expected, rtol=1e-6)
        # Logits that are log-probabilities are their own log-softmax.
        of_linear = linear_cross_entropy(LOG_PROBS, np.eye(3, dtype=np.float32), labels, ignore_index=ignored)
        np.testing.assert_allclose(of_linear, expected, rtol=1e-6)


def test_rows_that_are_none_change_no_table():
    """Handmade rows of -1 name no row; the row that is named takes the step that a table of it alone takes."""
    table = np.arange(12, dtype=np.float32).reshape(4, 3)
    gradient = np.float32([[7, 7, 7], [1, -2, 3]])
    touched = RowGradients(jnp.array([-1, 1], jnp.int32), jnp.asarray(gradient))
    transform = ema_adam_rows(0.1)
    params, state = fused_apply(transform, {"t": touched}, transform.init({"t": table}), {"t": table})
    alone = ema_adam(0.1)
    row, _ = fused_apply(alone, gradient[1:], alone.init(table[1:2]), table[1:2])
    np.testing.assert_allclose(params["t"][1:2], row, rtol=1e-6)
    np.testing.assert_array_equal(params["t"][np.array([0, 2, 3])], table[np.array([0, 2, 3])])
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state))


def test_ids_of_the_host_are_looked_up_or_refused():
    table = np.arange(6, dtype=np.float32).reshape(3, 2)
    np.testing.assert_array_equal(embedding(table, np.array([2, 0])), table[[2, 0]])
    with pytest.raises(
        BadParamError, match=r"^embedding: indices must hold integers that fit int32.*; got 4294967297$"
    ):
        embedding(table, np.array([0, 2**32 + 1]))
    with jax.enable_x64(True):
        assert np.isnan(embedding(table, np.array([0, 2**32 + 1]))[1]).all()
