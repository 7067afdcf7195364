"""The mcDNN calls of softmax: groups, stored results, blends, layouts, dtypes and statuses, in NumPy float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import softmax_oracle as oracle

from jaxops._checks.arguments import BadParamError, NotSupportedError
from jaxops.mcdnn import SoftmaxAlgorithm, SoftmaxMode, softmax_backward, softmax_forward

SHAPES = {None: (2, 3, 4, 5), "NCHW": (2, 3, 4, 5), "NHWC": (2, 4, 5, 3), "NCDHW": (2, 3, 2, 4, 5)}
SHAPES["NDHWC"] = (2, 2, 4, 5, 3)
COMBINATIONS = [
    pytest.param(algorithm, mode, id=f"{algorithm}-{mode}")
    for algorithm in ("FAST", "ACCURATE", "LOG")
    for mode in ("INSTANCE", "CHANNEL")
]


def axes_of(mode, shape, layout):
    if mode == "INSTANCE":
        return tuple(range(1, len(shape)))
    return (layout or "NC").index("C")


def draw(rng, shape, count, dtype="float32"):
    return [jnp.asarray(rng.normal(size=shape), dtype) for _ in range(count)]


def assert_rounded_once(actual, exact, dtype):
    assert actual.dtype == dtype
    one_rounding = 0.501 * float(jnp.finfo(dtype).eps) + 2e-6
    np.testing.assert_allclose(np.asarray(actual, np.float64), exact, rtol=one_rounding, atol=4e-6)


@pytest.mark.sampled
@pytest.mark.parametrize("layout", SHAPES, ids=str)
@pytest.mark.parametrize(("algorithm", "mode"), COMBINATIONS)
def test_softmax_is_the_documented_one_in_every_layout(algorithm, mode, layout, rng):
    shape = SHAPES[layout]
    x, y, dy = draw(rng, shape, 3)
    axes, log = axes_of(mode, shape, layout), algorithm == "LOG"
    assert_rounded_once(softmax_forward(algorithm, mode, x, layout=layout), oracle.forward(x, axes, log), "float32")
    # y is no softmax: the document says what is made of it as it is stored.
    dx = softmax_backward(algorithm, mode, y, dy, layout=layout)
    assert_rounded_once(dx, oracle.backward(y, dy, axes, log), "float32")


@pytest.mark.parametrize(("algorithm", "mode"), COMBINATIONS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_softmax_blends_before_it_rounds(dtype, algorithm, mode, rng):
    alpha, beta = 0.75, -1.5
    x, y, dy, prior = draw(rng, (2, 3, 4, 5), 4, dtype)
    axes, log = axes_of(mode, x.shape, None), algorithm == "LOG"
    given = beta * np.asarray(prior, np.float64)
    result = softmax_forward(algorithm, mode, x, alpha=alpha, beta=beta, y=prior)
    assert_rounded_once(result, alpha * oracle.forward(x, axes, log) + given, dtype)
    dx = softmax_backward(algorithm, mode, y, dy, alpha=alpha, beta=beta, dx=prior)
    assert_rounded_once(dx, alpha * oracle.backward(y, dy, axes, log) + given, dtype)


def test_softmax_keeps_float64(rng):
    with jax.enable_x64(True):
        x, y, dy, prior = rng.normal(size=(4, 2, 3, 4, 5))
        result = softmax_forward("LOG", "CHANNEL", x, alpha=1 / 3, beta=0.1, y=prior)
        dx = softmax_backward("ACCURATE", "INSTANCE", y, dy, alpha=1 / 3, beta=0.1, dx=prior)
        assert result.dtype == dx.dtype == jnp.float64
        np.testing.assert_allclose(result, oracle.forward(x, 1, True) / 3 + 0.1 * prior, rtol=1e-13, atol=1e-14)
        exact = oracle.backward(y, dy, (1, 2, 3), False) / 3 + 0.1 * prior
        np.testing.assert_allclose(dx, exact, rtol=1e-12, atol=1e-13)


def test_softmax_reads_no_prior_with_beta_zero(rng):
    x, dy = draw(rng, (2, 3, 4, 5), 2)
    nothing = jnp.full(x.shape, jnp.nan)
    y = softmax_forward("ACCURATE", "CHANNEL", x, alpha=2.0, y=nothing)
    np.testing.assert_allclose(y.sum(1), np.full((2, 4, 5), 2), rtol=1e-5)
    assert np.isfinite(softmax_backward("ACCURATE", "CHANNEL", y, dy, alpha=2.0, dx=nothing)).all()


def test_softmax_of_minus_infinity(rng):
    x = jnp.zeros((1, 3, 1, 2)).at[0, 1, 0, 0].set(-jnp.inf).at[0, :, 0, 1].set(-jnp.inf)
    dy = jnp.ones_like(x).at[0, 0, 0, 0].set(3)
    y = softmax_forward("ACCURATE", "CHANNEL", x)
    np.testing.assert_array_equal(y[0, :, 0], [[0.5, np.nan], [0, np.nan], [0.5, np.nan]])
    np.testing.assert_array_equal(softmax_backward("ACCURATE", "CHANNEL", y, dy)[0, :, 0, 0], [0.5, 0, -0.5])
    y = softmax_forward("LOG", "CHANNEL", x)
    assert y[0, 1, 0, 0] == -np.inf
    np.testing.assert_array_equal(np.isnan(y[0, :, 0, 1]), [True] * 3)
    np.testing.assert_allclose(softmax_backward("LOG", "CHANNEL", y, dy)[0, :, 0, 0], [0.5, 1, -1.5], rtol=1e-6)


def test_softmax_takes_more_than_three_spatial_axes(rng):
    (x,) = draw(rng, (2, 3, 1, 2, 1, 2, 1, 2), 1)
    y = softmax_forward("FAST", "CHANNEL", x)
    np.testing.assert_allclose(y, oracle.forward(x, 1, False), rtol=1e-5)


@pytest.mark.parametrize(("algorithm", "mode"), COMBINATIONS)
def test_softmax_is_differentiable_through_the_documented_call(algorithm, mode, rng):
    x, dy = draw(rng, (2, 3, 4, 5), 2)
    y = softmax_forward(algorithm, mode, x)
    pull_back = jax.vjp(lambda x: softmax_forward(algorithm, mode, x, alpha=2.0), x)[1]
    expected = softmax_backward(algorithm, mode, y, dy, alpha=2.0)
    np.testing.assert_allclose(pull_back(dy)[0], expected, rtol=1e-5, atol=1e-6)


X = np.zeros((2, 3, 4, 5), np.float32)
HALF, INTEGERS = X.astype(np.float16), X.astype(np.int32)
BAD, UNSUPPORTED = "MCDNN_STATUS_BAD_PARAM", "MCDNN_STATUS_NOT_SUPPORTED"
OF_BOTH = {
    "algorithm": ({"algorithm": "SLOW"}, BAD, "algorithm"),
    "algorithm-number": ({"algorithm": 3}, BAD, "algorithm"),
    "algorithm-none": ({"algorithm": None}, BAD, "algorithm"),
    "mode": ({"mode": "PIXEL"}, BAD, "mode"),
    "mode-number": ({"mode": 2}, BAD, "mode"),
    "alpha": ({"alpha": None}, BAD, "alpha"),
    "beta": ({"beta": None}, BAD, "beta"),
    "layout": ({"layout": "NCWH"}, BAD, "layout"),
    "layout-vectorised": ({"layout": "NCHW_VECT_C"}, UNSUPPORTED, "layout"),
}
FORWARD = {
    **OF_BOTH,
    "x": ({"x": None}, BAD, "x"),
    "layout-rank": ({"layout": "NDHWC"}, BAD, "x"),
    "rank-3": ({"x": X[0]}, BAD, "x"),
    "rank-9": ({"x": X[(None,) * 5]}, BAD, "x"),
    "dtype": ({"x": INTEGERS}, UNSUPPORTED, "x"),
    "no-prior": ({"beta": 0.5}, BAD, "y"),
    "prior-dims": ({"beta": 0.5, "y": X[:1]}, BAD, "y"),
    "prior-dtype": ({"y": HALF}, BAD, "y"),
}
BACKWARD = {
    **OF_BOTH,
    "y": ({"y": None}, BAD, "y"),
    "dy": ({"dy": None}, BAD, "dy"),
    "layout-rank": ({"layout": "NDHWC"}, BAD, "dy"),
    "rank-3": ({"y": X[0], "dy": X[0]}, BAD, "dy"),
    "y-dims": ({"y": X[:1]}, BAD, "y"),
    "y-transposed": ({"y": X.swapaxes(2, 3)}, BAD, "y"),
    "dy-dims": ({"dy": X[:1]}, BAD, "y"),
    "y-dtype": ({"y": HALF}, BAD, "y"),
    "dy-dtype": ({"dy": HALF}, BAD, "y"),
    "all-integers": ({"y": INTEGERS, "dy": INTEGERS}, UNSUPPORTED, "dy"),
    "no-prior": ({"beta": 0.5}, BAD, "dx"),
    "prior-dims": ({"dx": X[:1]}, BAD, "dx"),
    "prior-dtype": ({"beta": 0.5, "dx": HALF}, BAD, "dx"),
}


def assert_refused(call, arguments, status, argument):
    error = BadParamError if status == BAD else NotSupportedError
    with pytest.raises(error, match=f"^{call.__name__}: {argument} must ") as refusal:
        call(**{"algorithm": "ACCURATE", "mode": "CHANNEL", **arguments})
    assert refusal.value.status == status


@pytest.mark.parametrize(("change", "status", "argument"), FORWARD.values(), ids=FORWARD)
def test_softmax_forward_refuses(change, status, argument):
    assert_refused(softmax_forward, {"x": X, **change}, status, argument)


@pytest.mark.parametrize(("change", "status", "argument"), BACKWARD.values(), ids=BACKWARD)
def test_softmax_backward_refuses(change, status, argument):
    assert_refused(softmax_backward, {"y": X, "dy": X, **change}, status, argument)


def test_softmax_enumerations_have_the_documented_numbers():
    assert [(one.name, one.value) for one in SoftmaxAlgorithm] == [("FAST", 0), ("ACCURATE", 1), ("LOG", 2)]
    assert [(one.name, one.value) for one in SoftmaxMode] == [("INSTANCE", 0), ("CHANNEL", 1)]
    by_member = softmax_forward(SoftmaxAlgorithm.LOG, SoftmaxMode.CHANNEL, X)
    np.testing.assert_array_equal(softmax_forward(2, 1, X), by_member)
