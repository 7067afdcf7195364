"""The mcDNN calls of activations: stored results, blends, layouts, dtypes, NaN and statuses, in NumPy float64."""

import activation_oracle as oracle
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from activation_oracle import COEFFICIENTS

from jaxops._checks.arguments import BadParamError, NotSupportedError
from jaxops.mcdnn import ActivationDescriptor, ActivationMode, activation_backward, activation_forward

MODES = [mode.name for mode in ActivationMode]
SHAPES = {None: (2, 3, 4, 5), "NCHW": (2, 3, 4, 5), "NHWC": (2, 4, 5, 3), "NCDHW": (2, 3, 2, 4, 5)}
SHAPES["NDHWC"] = (2, 2, 4, 5, 3)


def coef_of(mode):
    return COEFFICIENTS.get(mode.lower(), 0.0)


def descriptor(mode, **attributes):
    coefs = {"swish_beta": coef_of(mode)} if mode == "SWISH" else {"coef": coef_of(mode)}
    return ActivationDescriptor(mode, **coefs, **attributes)


def reads_result(mode):
    return mode in ("SIGMOID", "RELU", "TANH", "ELU")


def truth_of_slope(mode, y, x):
    """What the document says of y and x as they are given, whether one is the activation of the other or not."""
    y, x = (np.asarray(array, np.float64) for array in (y, x))
    if reads_result(mode):
        return oracle.slope_of_result(mode.lower(), y, coef_of(mode))
    return oracle.slope(mode.lower(), x, coef_of(mode))


def draw(rng, shape, count, dtype="float32"):
    return [jnp.asarray(rng.normal(size=shape), dtype) for _ in range(count)]


def assert_rounded_once(actual, exact, dtype):
    assert actual.dtype == dtype
    one_rounding = 0.501 * float(jnp.finfo(dtype).eps) + 1e-6
    np.testing.assert_allclose(np.asarray(actual, np.float64), exact, rtol=one_rounding, atol=2e-6)


@pytest.mark.sampled
@pytest.mark.parametrize("layout", SHAPES, ids=str)
@pytest.mark.parametrize("mode", MODES)
def test_activation_is_the_documented_one_in_every_layout(mode, layout, rng):
    x, y, dy = draw(rng, SHAPES[layout], 3)
    desc = descriptor(mode)
    result = activation_forward(desc, x, layout=layout)
    assert_rounded_once(result, oracle.value(mode.lower(), np.asarray(x, np.float64), coef_of(mode)), "float32")
    # y is no activation of x here: the document says of each mode which of the two is read.
    dx = activation_backward(desc, y, dy, x, layout=layout)
    assert_rounded_once(dx, np.asarray(dy, np.float64) * truth_of_slope(mode, y, x), "float32")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_activation_blends_before_it_rounds(dtype, mode, rng):
    alpha, beta = 0.75, -1.5
    x, y, dy, prior = draw(rng, (2, 3, 4, 5), 4, dtype)
    wide = [np.asarray(array, np.float64) for array in (x, y, dy, prior)]
    desc = descriptor(mode)
    result = activation_forward(desc, x, alpha=alpha, beta=beta, y=prior)
    exact = alpha * oracle.value(mode.lower(), wide[0], coef_of(mode)) + beta * wide[3]
    assert_rounded_once(result, exact, dtype)
    dx = activation_backward(desc, y, dy, x, alpha=alpha, beta=beta, dx=prior)
    assert_rounded_once(dx, alpha * wide[2] * truth_of_slope(mode, y, x) + beta * wide[3], dtype)


def test_activation_backward_takes_the_result_as_it_was_stored():
    x, ones = jnp.zeros((1, 1, 1, 1)), jnp.ones((1, 1, 1, 1))
    desc = ActivationDescriptor("SIGMOID")
    y = activation_forward(desc, x, alpha=1.5)  # 0.75, from which the slope of a sigmoid is taken to be 0.75 * 0.25
    np.testing.assert_array_equal(activation_backward(desc, y, ones, x), np.full((1, 1, 1, 1), 0.1875))


def test_activation_keeps_float64(rng):
    with jax.enable_x64(True):
        x, dy, prior = (rng.normal(size=(2, 3, 4, 5)) for _ in range(3))
        desc = descriptor("SWISH")
        y = activation_forward(desc, x, alpha=1 / 3)
        dx = activation_backward(desc, y, dy, x, beta=0.1, dx=prior)
        assert y.dtype == dx.dtype == jnp.float64
        np.testing.assert_allclose(y, oracle.value("swish", x, 1.25) / 3, rtol=1e-14, atol=1e-15)
        np.testing.assert_allclose(dx, dy * oracle.slope("swish", x, 1.25) + 0.1 * prior, rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize("mode", MODES)
def test_activation_reads_no_prior_with_beta_zero(mode, rng):
    x, dy = draw(rng, (2, 3, 4, 5), 2)
    nothing = jnp.full(x.shape, jnp.nan)
    desc = descriptor(mode)
    y = activation_forward(desc, x, alpha=2.0, y=nothing)
    assert np.isfinite(y).all()
    assert np.isfinite(activation_backward(desc, y, dy, x, alpha=2.0, dx=nothing)).all()


@pytest.mark.sampled
@pytest.mark.parametrize("mode", MODES)
def test_activation_switches_what_nan_does(mode):
    nan, one = jnp.full((1, 1, 1, 1), jnp.nan), jnp.ones((1, 1, 1, 1))
    for propagation in ("PROPAGATE_NAN", "NOT_PROPAGATE_NAN"):
        desc = descriptor(mode, nan_propagation=propagation)
        y = activation_forward(desc, nan)
        stops = mode in ("RELU", "CLIPPED_RELU") and propagation == "NOT_PROPAGATE_NAN"
        np.testing.assert_array_equal(y, np.full((1, 1, 1, 1), 0 if stops else np.nan))
        dx = activation_backward(desc, y, one, nan)
        expected = {"RELU": 0, "CLIPPED_RELU": 0, "IDENTITY": 1}.get(mode, np.nan)
        np.testing.assert_array_equal(dx, np.full((1, 1, 1, 1), expected))


def test_activation_takes_more_than_three_spatial_axes(rng):
    x, y, dy = draw(rng, (2, 3, 1, 2, 1, 2, 1, 2), 3)
    assert activation_forward(descriptor("TANH"), x).shape == x.shape
    dx = activation_backward(descriptor("TANH"), y, dy, x)
    np.testing.assert_allclose(dx, dy * (1 - y**2), rtol=1e-6)


def test_activation_is_differentiable_through_the_documented_call(rng):
    x, dy = draw(rng, (2, 3, 4, 5), 2)
    for mode in MODES:
        desc = descriptor(mode)
        y = activation_forward(desc, x)
        pull_back = jax.vjp(lambda x, desc=desc: activation_forward(desc, x, alpha=2.0), x)[1]
        expected = activation_backward(desc, y, dy, x, alpha=2.0)
        np.testing.assert_allclose(pull_back(dy)[0], expected, rtol=1e-6, atol=1e-7)


X = np.zeros((2, 3, 4, 5), np.float32)
RELU = ActivationDescriptor("RELU")
BAD, UNSUPPORTED = "MCDNN_STATUS_BAD_PARAM", "MCDNN_STATUS_NOT_SUPPORTED"
HALF = X.astype(np.float16)
INTEGERS = X.astype(np.int32)
OF_BOTH = {
    "desc": ({"desc": None}, BAD, "desc"),
    "desc-mode": ({"desc": "RELU"}, BAD, "desc"),
    "x": ({"x": None}, BAD, "x"),
    "alpha": ({"alpha": None}, BAD, "alpha"),
    "beta": ({"beta": None}, BAD, "beta"),
    "layout": ({"layout": "NCWH"}, BAD, "layout"),
    "layout-vectorised": ({"layout": "NCHW_VECT_C"}, UNSUPPORTED, "layout"),
    "identity": ({"desc": ActivationDescriptor("IDENTITY"), "strict": True}, UNSUPPORTED, "desc.mode"),
}
FORWARD = {
    **OF_BOTH,
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
    "rank-3": ({"x": X[0], "y": X[0], "dy": X[0]}, BAD, "dy"),
    "x-dims": ({"x": X[:1]}, UNSUPPORTED, "x"),
    "y-dims": ({"y": X[:1]}, UNSUPPORTED, "y"),
    "x-transposed": ({"x": X.swapaxes(2, 3)}, UNSUPPORTED, "x"),
    "dy-dims": ({"dy": X[:1]}, UNSUPPORTED, "y"),
    "x-dtype": ({"x": HALF}, UNSUPPORTED, "x"),
    "y-dtype": ({"y": HALF}, UNSUPPORTED, "y"),
    "dy-dtype": ({"dy": HALF}, UNSUPPORTED, "y"),
    "all-integers": ({"x": INTEGERS, "y": INTEGERS, "dy": INTEGERS}, UNSUPPORTED, "dy"),
    "no-prior": ({"beta": 0.5}, BAD, "dx"),
    "prior-dims": ({"dx": X[:1]}, UNSUPPORTED, "dx"),
    "prior-dtype": ({"beta": 0.5, "dx": HALF}, UNSUPPORTED, "dx"),
}


def assert_refused(call, arguments, status, argument):
    error = BadParamError if status == BAD else NotSupportedError
    with pytest.raises(error, match=f"^{call.__name__}: {argument} must ") as refusal:
        call(**arguments)
    assert refusal.value.status == status


@pytest.mark.parametrize(("change", "status", "argument"), FORWARD.values(), ids=FORWARD)
def test_activation_forward_refuses(change, status, argument):
    assert_refused(activation_forward, {"desc": RELU, "x": X, **change}, status, argument)


@pytest.mark.parametrize(("change", "status", "argument"), BACKWARD.values(), ids=BACKWARD)
def test_activation_backward_refuses(change, status, argument):
    assert_refused(activation_backward, {"desc": RELU, "y": X, "dy": X, "x": X, **change}, status, argument)


@pytest.mark.parametrize(
    "change",
    [{"mode": "GELU"}, {"mode": 7}, {"nan_propagation": "MAYBE"}, {"coef": None}, {"swish_beta": "1"}],
    ids=str,
)
def test_activation_descriptor_refuses(change):
    with pytest.raises(BadParamError, match=f"^ActivationDescriptor: {next(iter(change))} must ") as refusal:
        ActivationDescriptor(**{"mode": "RELU", **change})
    assert refusal.value.status == BAD


def test_activation_modes_have_the_documented_numbers():
    names = ["SIGMOID", "RELU", "TANH", "CLIPPED_RELU", "ELU", "IDENTITY", "SWISH"]
    assert [(one.name, one.value) for one in ActivationMode] == list(zip(names, range(7), strict=True))
