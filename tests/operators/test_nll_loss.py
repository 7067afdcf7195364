"""`nll_loss`: values and gradients against NumPy float64, bad input, and the promises of every operator."""

import math
import re

import contract
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from nll_loss_oracle import IGNORED, assert_rounded_once, expected, make_case

import lowering
from jaxops._checks.arguments import BadParamError
from jaxops.nll_loss import nll_loss


def value_and_gradients(log_probs, labels, weight, **attributes):
    def total(log_probs, weight):
        loss = nll_loss(log_probs, labels, weight, **attributes)
        return jnp.sum(loss.astype(jnp.float32)), loss

    (_, loss), grads = jax.value_and_grad(total, (0, 1), has_aux=True)(log_probs, weight)
    return loss, *grads


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_nll_loss_equals_float64(reduction, dtype, rng):
    log_probs, labels, weight = make_case(rng, dtype=dtype)
    truth = expected(log_probs, labels, weight, reduction=reduction)
    actual = value_and_gradients(log_probs, labels, weight, reduction=reduction)
    for result, true in zip(actual, truth, strict=True):
        assert_rounded_once(result, true, jnp.dtype(dtype))
    unweighted = nll_loss(log_probs, labels, reduction=reduction)
    assert_rounded_once(unweighted, expected(log_probs, labels, reduction=reduction)[0], jnp.dtype(dtype))


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("shape", "axis"),
    [((), 0), ((1,), -1), ((7,), 0), ((2, 3), 1), ((2, 3, 4), 1), ((2, 3, 4), -3), ((2, 3, 4, 2), 1), ((2, 3, 4), 0)],
    ids=str,
)
def test_nll_loss_takes_classes_on_any_axis(shape, axis, rng):
    log_probs, labels, weight = make_case(rng, shape, axis=axis)
    for reduction in ("none", "mean"):
        truth = expected(log_probs, labels, weight, axis=axis, reduction=reduction)
        actual = value_and_gradients(log_probs, labels, weight, axis=axis, reduction=reduction)
        for result, true in zip(actual, truth, strict=True):
            assert_rounded_once(result, true, jnp.float32)


@pytest.mark.parametrize("axis", [-1, -2, -3, -4])
def test_nll_loss_transposes_nothing(axis, rng):
    log_probs, labels, weight = make_case(rng, (2, 3, 4, 2), axis=axis)
    used = contract.primitives(jax.grad(lambda x: nll_loss(x, labels, weight, axis=axis)), log_probs)
    assert "transpose" not in used
    assert ("nll_loss_backward" if axis == -1 else "nll_loss2d_backward") in used


@pytest.mark.slow
def test_nll_loss_does_not_read_what_is_ignored():
    log_probs = jnp.array([[jnp.nan, -jnp.inf, jnp.nan], [-1.0, -2.0, -3.0]])
    weight = jnp.array([0.5, 2.0, jnp.nan])
    labels = np.array([2, 1], np.int32)  # 2 is a class, and ignored
    truth = expected(log_probs[1:], labels[1:], jnp.array([0.5, 2.0, 0.0]), ignore_index=2)
    loss, grad_x, grad_w = value_and_gradients(log_probs, labels, weight, ignore_index=2)
    assert loss == truth[0]
    np.testing.assert_array_equal(grad_x, [[0, 0, 0], [0, -1, 0]])
    np.testing.assert_array_equal(grad_w, truth[2])
    curvature = jax.hessian(lambda w: nll_loss(log_probs, labels, w, ignore_index=2))(weight)
    assert np.all(np.isfinite(curvature))
    mixed = jax.jacrev(jax.grad(lambda w, x: nll_loss(x, labels, w, ignore_index=2)), 1)(weight, log_probs)
    assert np.all(np.isfinite(mixed))


def test_nll_loss_of_only_ignored_labels_is_nan_as_a_mean_with_zero_gradient():
    log_probs, labels, weight = jnp.full((2, 3), jnp.nan), np.full(2, IGNORED), jnp.ones(3)
    loss, grad_x, grad_w = value_and_gradients(log_probs, labels, weight)
    assert np.isnan(loss)
    assert not np.any(grad_x)
    assert not np.any(grad_w)
    assert nll_loss(log_probs, labels, reduction="sum") == 0
    np.testing.assert_array_equal(nll_loss(log_probs, labels, reduction="none"), [0, 0])


def test_nll_loss_of_zero_weights_is_nan_as_a_mean(rng):
    log_probs, labels, weight = make_case(rng)
    assert np.isnan(nll_loss(log_probs, labels, 0 * weight))
    assert nll_loss(log_probs, labels, 0 * weight, reduction="sum") == 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("shape", "axis"), [((512, 300), -1), ((2, 30, 16, 20), 1)], ids=str)
def test_nll_loss_writes_its_gradient_once(shape, axis, dtype):
    log_probs, labels = jax.ShapeDtypeStruct(shape, dtype), jax.ShapeDtypeStruct(np.delete(shape, axis), np.int32)
    compiled = jax.jit(jax.grad(lambda x, labels: nll_loss(x, labels, axis=axis))).lower(log_probs, labels).compile()
    entry = compiled.as_text().split("ENTRY")[1]
    arrays = re.findall(rf"= \w+\[{','.join(map(str, shape))}\]\S* (\w+)", entry)
    assert sorted(arrays) == ["fusion", "parameter"]
    assert compiled.memory_analysis().temp_size_in_bytes < 20 * math.prod(labels.shape)


@pytest.mark.parametrize("label", [3, -1, -2147483648, 2147483647])
def test_nll_loss_is_nan_for_labels_out_of_range(label):
    log_probs, labels = -jnp.ones((2, 3)), np.array([label, 1], np.int32)
    np.testing.assert_array_equal(nll_loss(log_probs, labels, reduction="none"), [np.nan, 1])
    assert np.isnan(nll_loss(log_probs, labels))
    grad = jax.grad(nll_loss)(log_probs, labels, reduction="sum")
    np.testing.assert_array_equal(grad, [[0, 0, 0], [0, -1, 0]])


@pytest.mark.parametrize("ignore_index", [-100, 255, 256, 2**40, -(2**70), np.int64(255)], ids=str)
def test_nll_loss_ignores_any_integer(ignore_index):
    log_probs, labels = -jnp.arange(600.0).reshape(2, 300), np.array([255, 7], np.uint8)
    losses = nll_loss(log_probs, labels, ignore_index=ignore_index, reduction="none")
    np.testing.assert_array_equal(losses, [0 if ignore_index == 255 else 255, 307])


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint32"])
def test_nll_loss_takes_labels_of_any_integer_dtype(dtype):
    log_probs, labels = -jnp.arange(600.0).reshape(2, 300), np.array([127, 0], dtype)
    assert nll_loss(log_probs, labels, reduction="sum") == 427
    assert jax.grad(nll_loss)(log_probs, labels, reduction="sum")[0, 127] == -1


def test_nll_loss_of_nothing():
    for shape in ((0, 3), (0, 0), (2, 0, 3)):
        log_probs, labels = jnp.zeros(shape), np.zeros(shape[:-1], np.int32)
        assert nll_loss(log_probs, labels, reduction="none").shape == labels.shape
        assert nll_loss(log_probs, labels, reduction="sum") == 0
        assert np.isnan(nll_loss(log_probs, labels))
        assert jax.grad(nll_loss)(log_probs, labels).shape == shape
    assert nll_loss(jnp.zeros((2, 3, 0, 4)), np.zeros((2, 0, 4), np.int32), axis=1, reduction="none").shape == (2, 0, 4)


def test_nll_loss_sums_bfloat16_in_float32():
    log_probs, labels = jnp.full((4096, 2), -1, jnp.bfloat16), np.zeros(4096, np.int32)
    assert nll_loss(log_probs, labels, reduction="sum") == 4096
    assert nll_loss(log_probs, labels, jnp.full(2, 3, jnp.bfloat16)) == 1


def test_nll_loss_mean_divides_before_it_multiplies():
    """The product of cotangent and weight alone would overflow float16."""
    log_probs, labels, weight = -jnp.ones((8, 2), jnp.float16), np.zeros(8, np.int32), jnp.full(2, 60000, jnp.float16)
    loss, pull_back = jax.vjp(lambda x: nll_loss(x, labels, weight), log_probs)
    assert loss == 1
    np.testing.assert_array_equal(pull_back(jnp.float16(80))[0][:, 0], np.full(8, -10))


def test_nll_loss_keeps_float64():
    with jax.enable_x64(True):
        loss = nll_loss(jnp.full((1, 2), -1 - 1e-12), jnp.zeros(1, jnp.int64), jnp.ones(2))
        assert loss.dtype == jnp.float64
        assert loss == 1 + 1e-12


def test_nll_loss_gradient_is_written_once():
    """No temporary as large as the gradient: one fusion writes it."""
    labels, log_probs = np.zeros(512, np.int32), jax.ShapeDtypeStruct((512, 1000), jnp.float32)
    compiled = jax.jit(jax.grad(lambda x: nll_loss(x, labels))).lower(log_probs).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 512 * 1000


X, LABELS, WEIGHT = np.zeros((2, 3), np.float32), np.zeros(2, np.int32), np.ones(3, np.float32)
REFUSALS = {
    "dtype": ((X.astype(np.int32), LABELS), {}, "log_probs must be floating point; got int32[2, 3]"),
    "rank": ((X[0, 0], LABELS), {}, "log_probs must have an axis of classes; got float32[]"),
    "float-labels": ((X, LABELS.astype(np.float32)), {}, "labels must be integers; got float32[2]"),
    "labels-shape": ((X, LABELS[:1]), {}, "labels must have shape (2,), as log_probs without classes; got int32[1]"),
    "axis-labels": (
        (X, LABELS),
        {"axis": 0},
        "labels must have shape (3,), as log_probs without classes; got int32[2]",
    ),
    "axis": ((X, LABELS), {"axis": 2}, "axis must be in [-2, 2); got 2"),
    "axis-float": ((X, LABELS), {"axis": 1.0}, "axis must be in [-2, 2); got 1.0"),
    "no-classes": ((X[:, :0], LABELS), {}, "log_probs must have at least one class; got float32[2, 0]"),
    "weight-shape": (
        (X, LABELS, WEIGHT[:2]),
        {},
        "weight must have shape (3,), one for each class; got float32[2]",
    ),
    "weight-dtype": ((X, LABELS, WEIGHT.astype(np.int32)), {}, "weight must be floating point; got int32[3]"),
    "reduction": ((X, LABELS), {"reduction": "avg"}, "reduction must be one of none, mean, sum; got 'avg'"),
    "ignore-index": ((X, LABELS), {"ignore_index": 0.5}, "ignore_index must be an integer; got 0.5"),
    "ignore-none": ((X, LABELS), {"ignore_index": None}, "ignore_index must be an integer; got None"),
}


@pytest.mark.parametrize(("operands", "attributes", "words"), REFUSALS.values(), ids=REFUSALS)
def test_nll_loss_refuses_bad_input(operands, attributes, words):
    def call(*operands):
        return nll_loss(*operands, **attributes)

    for ask in (call, jax.jit(call), lambda *operands: lowering.explain(call, *operands)):
        with pytest.raises(BadParamError) as refusal:
            ask(*operands)
        assert str(refusal.value) == f"nll_loss: {words}"
        assert refusal.value.status == 161002


@pytest.mark.parametrize(("given", "missing"), [((None, LABELS), "log_probs"), ((X, None), "labels")])
def test_nll_loss_refuses_none(given, missing):
    with pytest.raises(BadParamError, match=f"nll_loss: {missing} must be given; got None") as refusal:
        nll_loss(*given)
    assert refusal.value.status == 161001


def rows(rng):
    log_probs, labels, weight = make_case(rng, (16,), 3)
    return np.asarray(log_probs), labels, np.asarray(weight)


def images(rng):
    log_probs, labels, weight = make_case(rng, (8, 2, 1), 3, axis=1)
    return np.asarray(log_probs), labels, np.asarray(weight)


CASES = [
    contract.Case("mean", nll_loss, rows, (0, 2), (0, 0, None), "nll_loss", "nll_loss_backward"),
    contract.Case(
        "images",
        lambda x, labels, weight: nll_loss(x, labels, weight, axis=1, reduction="none"),
        images,
        (0, 2),
        (0, 0, None),
        "nll_loss2d",
        "nll_loss2d_backward",
    ),
]


@pytest.mark.parametrize("promise", contract.PROMISES, ids=contract.promise_name)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_nll_loss_keeps_promise(case, promise):
    promise(case)
