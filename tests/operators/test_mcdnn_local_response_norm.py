"""The mcDNN calls of local response and divisive normalization: statuses, blends, layouts and dtypes."""

import functools

import jax
import jax.numpy as jnp
import local_response_norm_oracle as oracle
import numpy as np
import pytest
from pooling_oracle import AXES

from jaxops._checks.arguments import BadParamError, NotSupportedError
from jaxops.mcdnn import (
    DivNormMode,
    LRNDescriptor,
    LRNMode,
    divisive_normalization_backward,
    divisive_normalization_forward,
    lrn_cross_channel_backward,
    lrn_cross_channel_forward,
)

STRONG = {"n": 4, "alpha": 1.5, "beta": 0.75, "k": 0.5}
DESC = LRNDescriptor(**STRONG)


def draw(rng, shape=(2, 5, 3, 4), dtype="float32", count=3):
    return [np.asarray(jnp.asarray(rng.normal(size=shape), dtype)) for _ in range(count)]


def lrn(x, means, dy, *, y=None, dx=None, dmeans=None, **attributes):
    """y and dx of both calls; the backward one gets a y that is none, and must not read it."""
    nonsense = jnp.full_like(x, jnp.nan)
    return (
        lrn_cross_channel_forward(DESC, x, y=y, **attributes),
        lrn_cross_channel_backward(DESC, nonsense, dy, x, dx=dx, **attributes),
    )


def divisive(x, means, dy, *, y=None, dx=None, dmeans=None, **attributes):
    """y, dx and dmeans of both calls."""
    forward = divisive_normalization_forward(DESC, x, means, y=y, **attributes)
    return forward, *divisive_normalization_backward(DESC, x, means, dy, dx=dx, dmeans=dmeans, **attributes)


def expected(calls, x, means, dy):
    if calls is lrn:
        return oracle.across_channels(x, dy, **STRONG)
    return oracle.within_channels(x, means, dy, **STRONG)


LAYOUTS = {
    lrn: ["NCHW", "NHWC", "NCDHW"],
    divisive: ["NCHW", "NHWC", "NCDHW", "NDHWC"],
}
CALLS = [pytest.param(calls, id=calls.__name__) for calls in LAYOUTS]


@pytest.mark.sampled
@pytest.mark.parametrize(("calls", "layout"), [(calls, layout) for calls, names in LAYOUTS.items() for layout in names])
def test_response_norms_equal_loops_in_every_layout(calls, layout, rng):
    arrays = draw(rng, (2, 5, 2, 3, 2)[: len(layout)])
    truth = expected(calls, *arrays)
    moved = [array.transpose(AXES[layout]) for array in arrays]
    for name in (layout, None) if layout.startswith("NC") else (layout,):
        for actual, exact in zip(calls(*moved, layout=name), truth, strict=True):
            np.testing.assert_allclose(actual, exact.transpose(AXES[layout]), rtol=1e-5, atol=1e-5)


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("calls", CALLS)
def test_response_norms_blend_before_they_round(calls, dtype, rng):
    alpha, beta = 0.75, -1.5
    arrays, priors = draw(rng, dtype=dtype), draw(rng, dtype=dtype)
    truth = expected(calls, *arrays)
    named = dict(zip(("y", "dx", "dmeans"), priors, strict=True))
    for actual, exact, prior in zip(
        calls(*arrays, alpha=alpha, beta=beta, **named), truth, priors[: len(truth)], strict=True
    ):
        assert actual.dtype == dtype
        blended = alpha * exact + beta * prior.astype(np.float64)
        one_rounding = 0.501 * float(jnp.finfo(dtype).eps) + 1e-6
        np.testing.assert_allclose(np.asarray(actual, np.float64), blended, rtol=one_rounding, atol=4e-6)


@pytest.mark.sampled
@pytest.mark.parametrize("calls", CALLS)
def test_response_norms_keep_float64(calls, rng):
    with jax.enable_x64(True):
        arrays = draw(rng, dtype="float64")
        for actual, exact in zip(calls(*arrays, alpha=1 / 3), expected(calls, *arrays), strict=True):
            assert actual.dtype == jnp.float64
            np.testing.assert_allclose(actual, exact / 3, rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("calls", CALLS)
def test_response_norms_read_no_prior_with_beta_zero(calls, rng):
    arrays = draw(rng)
    nothing = np.full_like(arrays[0], np.nan)
    results = calls(*arrays, alpha=2.0, y=nothing, dx=nothing, dmeans=nothing)
    for actual, plain in zip(results, calls(*arrays), strict=True):
        np.testing.assert_allclose(actual, 2 * plain, rtol=1e-6)


@pytest.mark.parametrize("calls", CALLS)
def test_response_norms_are_differentiable_through_the_documented_calls(calls, rng):
    x, means, dy = draw(rng)
    forward = functools.partial(lrn_cross_channel_forward, DESC)
    if calls is divisive:
        forward = functools.partial(divisive_normalization_forward, DESC)
        pulled_back = jax.vjp(functools.partial(forward, alpha=2.0), x, means)[1](dy)
    else:
        pulled_back = jax.vjp(functools.partial(forward, alpha=2.0), x)[1](dy)
    for actual, documented in zip(pulled_back, calls(x, means, dy, alpha=2.0)[1:], strict=True):
        np.testing.assert_allclose(actual, documented, rtol=1e-5, atol=1e-6)
    prior = jax.grad(lambda prior: jnp.sum(forward(x, beta=0.25, y=prior)))(dy)
    np.testing.assert_array_equal(prior, np.full(x.shape, 0.25, np.float32))


def test_divisive_normalization_without_means_has_their_gradient_all_the_same(rng):
    x, _, dy = draw(rng)
    for actual, exact in zip(divisive(x, None, dy), oracle.within_channels(x, None, dy, **STRONG), strict=True):
        np.testing.assert_allclose(actual, exact, rtol=1e-5, atol=1e-5)


def test_divisive_normalization_blends_no_gradient_of_means_that_has_no_prior(rng):
    x, means, dy = draw(rng)
    dx, dmeans = divisive_normalization_backward(DESC, x, means, dy, beta=0.5, dx=x)
    np.testing.assert_allclose(dx, divisive(x, means, dy)[1] + 0.5 * x, rtol=1e-5, atol=1e-6)
    assert dmeans is None


def test_divisive_normalization_takes_n_to_the_number_of_spatial_axes(rng):
    x = draw(rng, (1, 1, 3, 4))[0]
    desc = LRNDescriptor(1, 1.0, 1.0, 1.0)
    np.testing.assert_allclose(divisive_normalization_forward(desc, x), x / (1 + x**2), rtol=1e-6)
    desc = LRNDescriptor(3, 27.0, 1.0, 1.0)
    flat = divisive_normalization_forward(LRNDescriptor(3, 9.0, 1.0, 1.0), x)
    np.testing.assert_allclose(divisive_normalization_forward(desc, x[:, :, None])[:, :, 0], flat, rtol=1e-6)


def test_response_norm_enumerations_have_the_documented_numbers():
    assert [(one.name, one.value) for one in LRNMode] == [("CROSS_CHANNEL_DIM1", 0)]
    assert [(one.name, one.value) for one in DivNormMode] == [("PRECOMPUTED_MEANS", 0)]


def test_lrn_descriptors_have_the_documented_defaults_and_limits():
    assert LRNDescriptor() == LRNDescriptor(n=5, alpha=1e-4, beta=0.75, k=2.0)
    for limits in ({"n": 1}, {"n": 16}, {"k": 1e-5}, {"beta": 0.01}, {"alpha": -1e9}, {"alpha": 0}):
        LRNDescriptor(**limits)
    # In float32 the limits are a little less than as they are written.
    for limits in ({"k": np.float32(1e-5)}, {"beta": np.float32(0.01)}):
        LRNDescriptor(**limits)
    assert hash(LRNDescriptor(np.int64(5))) == hash(LRNDescriptor())


DESCRIPTORS = {
    "n-zero": {"n": 0},
    "n-large": {"n": 17},
    "n-float": {"n": 5.0},
    "n-bool": {"n": True},
    "alpha-none": {"alpha": None},
    "beta-small": {"beta": 0.0099},
    "beta-nan": {"beta": float("nan")},
    "beta-text": {"beta": "0.75"},
    "k-small": {"k": 0.99e-5},
}


@pytest.mark.parametrize("change", DESCRIPTORS.values(), ids=DESCRIPTORS)
def test_lrn_descriptor_refuses(change):
    with pytest.raises(BadParamError, match=f"^LRNDescriptor: {next(iter(change))} must ") as refusal:
        LRNDescriptor(**change)
    assert refusal.value.status == "MCDNN_STATUS_BAD_PARAM"


X = np.zeros((2, 3, 4, 5), np.float32)
V = np.zeros((2, 3, 2, 4, 5), np.float32)
HALF, WHOLE = X.astype(np.float16), X.astype(np.int32)
BAD, UNSUPPORTED = "MCDNN_STATUS_BAD_PARAM", "MCDNN_STATUS_NOT_SUPPORTED"
OF_ALL = {
    "desc": ({"desc": None}, BAD, "desc"),
    "mode": ({"mode": "CROSS"}, BAD, "mode"),
    "mode-number": ({"mode": 1}, BAD, "mode"),
    "x": ({"x": None}, BAD, "x"),
    "alpha": ({"alpha": None}, BAD, "alpha"),
    "beta": ({"beta": None}, BAD, "beta"),
    "layout": ({"layout": "NCWH"}, BAD, "layout"),
    "layout-rank": ({"layout": "NCDHW"}, BAD, "x"),
    "layout-vectorised": ({"layout": "NCHW_VECT_C"}, UNSUPPORTED, "layout"),
}
LRN_FORWARD = {
    **OF_ALL,
    "rank-2": ({"x": X[0, 0]}, BAD, "x"),
    "rank-3": ({"x": X[0]}, UNSUPPORTED, "x"),
    "rank-6": ({"x": V[None]}, UNSUPPORTED, "x"),
    "channels-last-volume": ({"x": V, "layout": "NDHWC"}, BAD, "layout"),
    "dtype": ({"x": WHOLE}, UNSUPPORTED, "x"),
    "no-prior": ({"beta": 0.5}, BAD, "y"),
    "prior-shape": ({"beta": 0.5, "y": X[:1]}, UNSUPPORTED, "y"),
    "prior-dtype": ({"beta": 0.5, "y": HALF}, UNSUPPORTED, "y"),
}
LRN_BACKWARD = {
    **OF_ALL,
    "y": ({"y": None}, BAD, "y"),
    "dy": ({"dy": None}, BAD, "dy"),
    "rank-2": ({"x": X[0, 0], "y": X[0, 0], "dy": X[0, 0]}, BAD, "x"),
    "rank-2-of-y": ({"y": X[0, 0]}, BAD, "y"),
    "channels-last-volume": ({"x": V, "y": V, "dy": V, "layout": "NDHWC"}, BAD, "layout"),
    "y-shape": ({"y": X[:1]}, UNSUPPORTED, "y"),
    "dy-shape": ({"dy": X[:, :1]}, UNSUPPORTED, "dy"),
    "y-dtype": ({"y": HALF}, UNSUPPORTED, "y"),
    "dy-dtype": ({"dy": HALF}, UNSUPPORTED, "dy"),
    "all-integers": ({"x": WHOLE, "y": WHOLE, "dy": WHOLE}, UNSUPPORTED, "x"),
    "no-prior": ({"beta": 0.5}, BAD, "dx"),
    "prior-shape": ({"dx": X[:1]}, UNSUPPORTED, "dx"),
    "prior-dtype": ({"dx": HALF}, UNSUPPORTED, "dx"),
}
DIVISIVE_FORWARD = {
    **OF_ALL,
    "rank-3": ({"x": X[0]}, BAD, "x"),
    "rank-6": ({"x": V[None]}, BAD, "x"),
    "dtype": ({"x": WHOLE}, UNSUPPORTED, "x"),
    "means-shape": ({"means": X[:1]}, BAD, "means"),
    "means-dtype": ({"means": HALF}, BAD, "means"),
    "no-prior": ({"beta": 0.5}, BAD, "y"),
    "prior-shape": ({"beta": 0.5, "y": X[:1]}, BAD, "y"),
    "prior-dtype": ({"beta": 0.5, "y": HALF}, BAD, "y"),
}
DIVISIVE_BACKWARD = {
    **OF_ALL,
    "dy": ({"dy": None}, BAD, "dy"),
    "rank-3": ({"x": X[0], "dy": X[0]}, BAD, "x"),
    "means-shape": ({"means": X[:1]}, BAD, "means"),
    "dy-shape": ({"dy": X[:, :1]}, BAD, "dy"),
    "dy-dtype": ({"dy": HALF}, BAD, "dy"),
    "all-integers": ({"x": WHOLE, "dy": WHOLE}, UNSUPPORTED, "x"),
    "no-prior": ({"beta": 0.5, "dmeans": X}, BAD, "dx"),
    "prior-shape": ({"dx": X[:1]}, BAD, "dx"),
    "means-prior-shape": ({"beta": 0.5, "dx": X, "dmeans": X[:1]}, BAD, "dmeans"),
    "means-prior-dtype": ({"dmeans": HALF}, BAD, "dmeans"),
}
REFUSALS = [
    pytest.param(call, operands, *refusal, id=f"{call.__name__}-{name}")
    for call, operands, refusals in (
        (lrn_cross_channel_forward, ("x",), LRN_FORWARD),
        (lrn_cross_channel_backward, ("y", "dy", "x"), LRN_BACKWARD),
        (divisive_normalization_forward, ("x",), DIVISIVE_FORWARD),
        (divisive_normalization_backward, ("x", "dy"), DIVISIVE_BACKWARD),
    )
    for name, refusal in refusals.items()
]


@pytest.mark.parametrize(("call", "operands", "change", "status", "argument"), REFUSALS)
def test_response_norm_refuses(call, operands, change, status, argument):
    arguments = {"desc": DESC, **dict.fromkeys(operands, X)}
    if call is divisive_normalization_backward:
        arguments["means"] = None
    error = BadParamError if status == BAD else NotSupportedError
    with pytest.raises(error, match=f"^{call.__name__}: {argument} must ") as refusal:
        call(**{**arguments, **change})
    assert refusal.value.status == status
