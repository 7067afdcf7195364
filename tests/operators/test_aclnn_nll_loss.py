"""The aclnn calls of the negative log-likelihood family against the documents' examples and NumPy float64."""

import contract
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from nll_loss_oracle import assert_rounded_once, expected, make_case

import lowering
from jaxops._checks.arguments import BadParamError
from jaxops.aclnn.nll_loss import nll_loss, nll_loss2d, nll_loss2d_backward, nll_loss_backward

NONE, MEAN, SUM = 0, 1, 2
REDUCTIONS = {NONE: "none", MEAN: "mean", SUM: "sum"}
WEIGHT = np.array([1.1, 1.2, 1.3], np.float32)
TARGET = np.array([0, 2], np.int32)


def total_weight_of(labels, weight):
    return np.asarray(weight).astype(np.float64)[labels[labels >= 0]].sum()


def test_nll_loss_gives_the_documented_example():
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    out, total_weight = nll_loss(x, TARGET, WEIGHT, reduction=NONE, ignore_index=-100)
    np.testing.assert_array_equal(out, np.array([0, -6.5], np.float32))
    assert total_weight == 0
    out, total_weight = nll_loss(x, TARGET, WEIGHT, reduction=MEAN, ignore_index=-100)
    np.testing.assert_allclose(out, -6.5 / 2.4, rtol=1e-6)
    np.testing.assert_allclose(total_weight, 2.4, rtol=1e-6)
    out, total_weight = nll_loss(x, TARGET, WEIGHT, reduction=SUM, ignore_index=0)
    np.testing.assert_array_equal(out, np.float32(-6.5))
    np.testing.assert_array_equal(total_weight, np.float32(1.3))


def test_nll_loss_backward_gives_the_documented_example():
    grad, total_weight = np.array([3.1, 6.5], np.float32), np.ones(1, np.float32)
    x = np.full((2, 3), np.nan, np.float32)  # only its shape counts
    out = nll_loss_backward(grad, x, TARGET, WEIGHT, total_weight, reduction=NONE, ignore_index=-100)
    np.testing.assert_allclose(out, [[-3.41, 0, 0], [0, 0, -8.45]], rtol=1e-6)


def test_nll_loss2d_backward_gives_the_documented_example():
    """Its gradients and targets, with weights of powers of two."""
    grad = np.array([2.7, 2.6, 2.5], np.float32).reshape(1, 1, 3)
    target = np.array([2, 3, 1], np.int32).reshape(1, 1, 3)
    x, weight, total_weight = np.zeros((1, 4, 1, 3), np.float32), np.array([1, 2, 4, 8], np.float32), np.float32(7)
    out = nll_loss2d_backward(grad, x, target, weight, total_weight, reduction=NONE, ignore_index=-100)
    truth = np.zeros((4, 3), np.float32)
    truth[[2, 3, 1], [0, 1, 2]] = np.float32([-2.7, -2.6, -2.5]) * np.float32([4, 8, 2])
    np.testing.assert_array_equal(out.reshape(4, 3), truth)


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("shape", [(), (1,), (7,), (2, 3, 5)], ids=str)
def test_nll_loss_and_backward_equal_float64(shape, reduction, dtype, rng):
    axis = 1 if len(shape) == 3 else -1
    forward, backward = (nll_loss2d, nll_loss2d_backward) if len(shape) == 3 else (nll_loss, nll_loss_backward)
    x, target, weight = make_case(rng, shape, dtype=dtype, axis=axis)
    truth, grad_truth, _ = expected(x, target, weight, axis=axis, reduction=REDUCTIONS[reduction])
    out, total_weight = forward(x, target, weight, reduction=reduction, ignore_index=-100)
    assert_rounded_once(out, truth, x.dtype)
    assert total_weight.shape == ()
    assert_rounded_once(total_weight, total_weight_of(target, weight) if reduction else 0, x.dtype)
    given = jnp.asarray(total_weight_of(target, weight), x.dtype)
    grad_truth = grad_truth * (total_weight_of(target, weight) / float(given) if reduction == MEAN else 1)
    grad = backward(jnp.ones_like(out), x, target, weight, given, reduction=reduction, ignore_index=-100)
    assert_rounded_once(grad, grad_truth, x.dtype)


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", ["int64", "int32", "uint8"])
@pytest.mark.parametrize("ignore_index", [-100, 2, 255, 2**40], ids=str)
def test_nll_loss_takes_every_target_dtype_and_ignore_index(ignore_index, dtype):
    with jax.enable_x64(True):
        x, target = -jnp.ones((3, 3), jnp.float32), jnp.array([0, 2, 1], dtype)
        assert target.dtype == dtype
        out, total_weight = nll_loss(x, target, jnp.asarray(WEIGHT), reduction=SUM, ignore_index=ignore_index)
        assert out == total_weight
        np.testing.assert_allclose(out, 2.3 if ignore_index == 2 else 3.6, rtol=1e-6)


def test_nll_loss_does_not_read_ignored_rows():
    x = jnp.array([[jnp.nan, -jnp.inf, jnp.nan], [-1.0, -2.0, -3.0]])
    weight = jnp.array([jnp.nan, 2.0, 1.0])
    out, total_weight = nll_loss(x, jnp.array([0, 1]), weight, reduction=MEAN, ignore_index=0)
    assert (out, total_weight) == (2, 2)
    grads = jnp.array([jnp.nan, 3.0])
    grad = nll_loss_backward(grads, x, jnp.array([0, 1]), weight, jnp.ones(1), reduction=NONE, ignore_index=0)
    np.testing.assert_array_equal(grad, [[0, 0, 0], [0, -6, 0]])


@pytest.mark.parametrize("weight", [1.0, 0.0])
def test_nll_loss_mean_of_no_weight_is_nan(weight):
    ignore_index = 1 if weight else -100
    attributes = {"reduction": MEAN, "ignore_index": ignore_index}
    out, total_weight = nll_loss(jnp.ones((2, 3)), jnp.ones(2, jnp.int32), jnp.full(3, weight), **attributes)
    assert np.isnan(out)
    assert total_weight == 0


def test_nll_loss_rounds_total_weight_once():
    x, target = -jnp.ones((300, 2), jnp.bfloat16), jnp.zeros(300, jnp.int32)
    out, total_weight = nll_loss(x, target, jnp.ones(2, jnp.bfloat16), reduction=SUM, ignore_index=-100)
    assert (out, total_weight) == (300, 300)


def test_nll_loss_is_nan_and_its_gradient_zero_for_targets_out_of_range():
    x, target, weight = -jnp.ones((3, 3)), jnp.array([3, -1, 1]), jnp.ones(3)
    out, _ = nll_loss(x, target, weight, reduction=NONE, ignore_index=-100)
    np.testing.assert_array_equal(out, [np.nan, np.nan, 1])
    grad = nll_loss_backward(jnp.ones(3), x, target, weight, jnp.ones(()), reduction=NONE, ignore_index=-100)
    np.testing.assert_array_equal(grad, [[0, 0, 0], [0, 0, 0], [0, -1, 0]])


def test_nll_loss_backward_divides_by_the_given_total_weight_first():
    """float16 could hold neither the product 100 * 1000 nor its own quotient of 3 exactly."""
    x, target, weight = jnp.zeros((2, 3), jnp.float16), jnp.array([0, 2]), jnp.full(3, 1000, jnp.float16)
    grad, total_weight = jnp.full(1, 100, jnp.float16), jnp.full(1, 3, jnp.float16)
    out = nll_loss_backward(grad, x, target, weight, total_weight, reduction=MEAN, ignore_index=-100)
    assert out[0, 0] == np.float16(-100 / 3 * 1000)
    summed = nll_loss_backward(grad[0], x, target, weight, 0 * total_weight, reduction=SUM, ignore_index=-100)
    assert summed[0, 0] == -np.inf  # total_weight is for the mean only


def test_nll_loss_backward_is_zero_if_everything_is_ignored():
    ones, target = jnp.ones((2, 3)), jnp.full(2, -100)
    attributes = {"reduction": MEAN, "ignore_index": -100}
    assert not np.any(nll_loss_backward(jnp.ones(()), ones, target, jnp.ones(3), jnp.zeros(()), **attributes))
    images, target = jnp.ones((2, 3, 1, 1)), jnp.full((2, 1, 1), -100)
    assert not np.any(nll_loss2d_backward(jnp.ones(1), images, target, jnp.ones(3), jnp.zeros(1), **attributes))


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("shape", [(0, 3), (0, 0), (0, 3, 2, 2), (2, 3, 0, 4), (2, 0, 0, 4)], ids=str)
def test_nll_loss_of_nothing(shape, reduction):
    forward, backward = (nll_loss2d, nll_loss2d_backward) if len(shape) == 4 else (nll_loss, nll_loss_backward)
    x, target, weight = jnp.zeros(shape), jnp.zeros((shape[0], *shape[2:]), jnp.int32), jnp.ones(shape[1])
    out, total_weight = forward(x, target, weight, reduction=reduction, ignore_index=-100)
    truth = {NONE: np.zeros(target.shape), MEAN: np.nan, SUM: 0.0}[reduction]
    np.testing.assert_array_equal(out, truth)
    assert total_weight == 0
    grad = backward(jnp.ones_like(out), x, target, weight, jnp.ones(1), reduction=reduction, ignore_index=-100)
    np.testing.assert_array_equal(grad, np.zeros(shape))


@pytest.mark.parametrize("shape", [(2, 0), (2, 0, 2, 2)], ids=str)
def test_nll_loss_backward_of_no_classes_is_empty(shape):
    backward = nll_loss2d_backward if len(shape) == 4 else nll_loss_backward
    target = jnp.zeros((shape[0], *shape[2:]), jnp.int32)
    attributes = {"reduction": SUM, "ignore_index": 0}
    assert backward(jnp.ones(()), jnp.ones(shape), target, jnp.ones(0), jnp.ones(()), **attributes).shape == shape


def test_nll_loss2d_takes_weight_of_any_shape():
    x, target = -jnp.ones((1, 3, 2, 1)), jnp.zeros((1, 2, 1), jnp.int32)
    out, _ = nll_loss2d(x, target, jnp.asarray(WEIGHT).reshape(1, 3), reduction=SUM, ignore_index=-100)
    np.testing.assert_allclose(out, 2.2, rtol=1e-6)


X, X2D = np.zeros((2, 3), np.float32), np.zeros((2, 3, 4, 5), np.float32)
TARGET2D = np.zeros((2, 4, 5), np.int32)
FORWARD = {"reduction": MEAN, "ignore_index": -100}
EACH = {**FORWARD, "reduction": NONE}
ONE, TWO = np.ones((), np.float32), np.ones(2, np.float32)
DTYPES, TARGET_DTYPES = "x must be one of float32, float16, bfloat16", "target must be one of int64, int32, uint8"
REFUSALS = [
    (nll_loss, (None, TARGET, WEIGHT), FORWARD, 161001, "x must be given; got None"),
    (nll_loss, (X, None, WEIGHT), FORWARD, 161001, "target must be given; got None"),
    (nll_loss, (X, TARGET, None), FORWARD, 161001, "weight must be given; got None"),
    (nll_loss, (X.astype(np.int32), TARGET, WEIGHT), FORWARD, 161002, f"{DTYPES}; got int32[2, 3]"),
    (nll_loss, (X, TARGET.astype(np.int16), WEIGHT), FORWARD, 161002, f"{TARGET_DTYPES}; got int16[2]"),
    (nll_loss, (X, TARGET.astype("f4"), WEIGHT), FORWARD, 161002, f"{TARGET_DTYPES}; got float32[2]"),
    (
        nll_loss,
        (X, TARGET, WEIGHT.astype("f2")),
        FORWARD,
        161002,
        "weight must have the dtype of x, float32; got float16",
    ),
    (nll_loss, (X, TARGET, WEIGHT), {**FORWARD, "reduction": 3}, 161002, "reduction must be 0, 1 or 2; got 3"),
    (nll_loss, (X, TARGET, WEIGHT), {**FORWARD, "reduction": -1}, 161002, "reduction must be 0, 1 or 2; got -1"),
    (
        nll_loss,
        (X, TARGET, WEIGHT),
        {**FORWARD, "reduction": "mean"},
        161002,
        "reduction must be 0, 1 or 2; got 'mean'",
    ),
    (
        nll_loss,
        (X, TARGET, WEIGHT),
        {**FORWARD, "ignore_index": 0.5},
        161002,
        "ignore_index must be an integer; got 0.5",
    ),
    (nll_loss, (X[None], TARGET, WEIGHT), FORWARD, 161002, "x must have rank 1 or 2; got float32[1, 2, 3]"),
    (nll_loss, (X[0, 0], TARGET[0], WEIGHT), FORWARD, 161002, "x must have rank 1 or 2; got float32[]"),
    (nll_loss, (X, TARGET[None], WEIGHT), FORWARD, 161002, "target must have shape (2,), as x without classes; got"),
    (nll_loss, (X, TARGET[:1], WEIGHT), FORWARD, 161002, "target must have shape (2,), as x without classes; got"),
    (nll_loss, (X[0, :1], TARGET[:1], WEIGHT[:1]), FORWARD, 161002, "target must have shape (), as x without classes;"),
    (
        nll_loss,
        (X, TARGET, WEIGHT[:2]),
        FORWARD,
        161002,
        "weight must have shape (3,), one for each class; got float32[2]",
    ),
    (nll_loss, (X, TARGET, WEIGHT[None]), FORWARD, 161002, "weight must have shape (3,), one for each class; got"),
    (nll_loss, (X[:, :0], TARGET, WEIGHT[:0]), FORWARD, 161002, "x must have at least one class; got float32[2, 0]"),
    (nll_loss2d, (X, TARGET, WEIGHT), FORWARD, 161002, "x must have rank 4; got float32[2, 3]"),
    (nll_loss2d, (X2D[None], TARGET2D, WEIGHT), FORWARD, 161002, "x must have rank 4; got float32[1, 2, 3, 4, 5]"),
    (
        nll_loss2d,
        (X2D, TARGET2D[0], WEIGHT),
        FORWARD,
        161002,
        "target must have shape (2, 4, 5), as x without classes;",
    ),
    (nll_loss2d, (X2D, TARGET2D, WEIGHT[:2]), FORWARD, 161002, "weight must have shape (3,), one for each class; got"),
    (nll_loss2d, (X2D, None, WEIGHT), FORWARD, 161001, "target must be given; got None"),
    (nll_loss_backward, (None, X, TARGET, WEIGHT, ONE), EACH, 161001, "grad_output must be given; got None"),
    (nll_loss_backward, (TWO, X, TARGET, WEIGHT, None), EACH, 161001, "total_weight must be given; got None"),
    (
        nll_loss_backward,
        (TWO.astype("f2"), X, TARGET, WEIGHT, ONE),
        EACH,
        161002,
        "grad_output must have the dtype of x",
    ),
    (
        nll_loss_backward,
        (TWO, X, TARGET, WEIGHT, ONE.astype("f2")),
        EACH,
        161002,
        "total_weight must have the dtype of x",
    ),
    (
        nll_loss_backward,
        (TWO[:1], X, TARGET, WEIGHT, ONE),
        EACH,
        161002,
        "grad_output must have shape (2,); got float32[1",
    ),
    (nll_loss_backward, (TWO, X, TARGET, WEIGHT, ONE), FORWARD, 161002, "grad_output must have shape () or (1,); got"),
    (
        nll_loss_backward,
        (TWO[:1, None], X, TARGET, WEIGHT, ONE),
        FORWARD,
        161002,
        "grad_output must have shape () or (1,)",
    ),
    (
        nll_loss_backward,
        (TWO, X, TARGET, WEIGHT, TWO),
        EACH,
        161002,
        "total_weight must have one element; got float32[2]",
    ),
    (
        nll_loss_backward,
        (TWO, X, TARGET, WEIGHT, ONE),
        {**EACH, "reduction": 3},
        161002,
        "reduction must be 0, 1 or 2;",
    ),
    (nll_loss_backward, (TWO, X, TARGET[:1], WEIGHT, ONE), EACH, 161002, "target must have shape (2,), as x without"),
    (
        nll_loss2d_backward,
        (TARGET2D[0] + ONE, X2D, TARGET2D, WEIGHT, ONE),
        EACH,
        161002,
        "grad_output must have shape (2,",
    ),
    (nll_loss2d_backward, (TWO, X2D, TARGET2D, WEIGHT, ONE), FORWARD, 161002, "grad_output must have shape () or (1,)"),
    (nll_loss2d_backward, (ONE, X2D, TARGET2D, None, ONE), FORWARD, 161001, "weight must be given; got None"),
]


@pytest.mark.parametrize(
    ("function", "operands", "attributes", "status", "words"),
    [pytest.param(*row, id=f"{row[0].__name__}-{row[-1].split(';')[0]}") for row in REFUSALS],
)
def test_nll_loss_family_refuses_bad_input(function, operands, attributes, status, words):
    def call(*operands):
        return function(*operands, **attributes)

    for ask in (call, jax.jit(call), lambda *operands: lowering.explain(call, *operands)):
        with pytest.raises(BadParamError) as refusal:
            ask(*operands)
        assert str(refusal.value).startswith(f"{function.__name__}: {words}")
        assert refusal.value.status == status


def test_nll_loss_family_refuses_float64():
    x, weight, one = X.astype(np.float64), WEIGHT.astype(np.float64), np.ones(())
    with jax.enable_x64(True):
        with pytest.raises(BadParamError, match=DTYPES):
            nll_loss(x, TARGET, weight, **FORWARD)
        with pytest.raises(BadParamError, match=DTYPES):
            nll_loss_backward(one, x, TARGET, weight, one, **FORWARD)


def backward_operands(rng):
    x, target, weight = make_case(rng, (8, 2, 1), 3, axis=1)
    return rng.normal(size=target.shape).astype(np.float32), np.asarray(x), target, np.asarray(weight)


def images_backward(grad, x, target, weight):
    return nll_loss2d_backward(grad, x, target, weight, jnp.ones(()), **EACH)


CASES = [
    contract.Case(
        "backward",
        images_backward,
        backward_operands,
        (0, 3),
        (0, 0, 0, None),
        "nll_loss2d_backward",
        exact_derivative=False,  # it is exact, but the promise is kept in float64, which this layer refuses
    ),
]


@pytest.mark.parametrize("promise", contract.PROMISES, ids=contract.promise_name)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_nll_loss_family_keeps_promise(case, promise):
    promise(case)
