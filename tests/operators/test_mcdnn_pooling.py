"""The mcDNN calls of pooling: statuses, blends, layouts, dtypes and NaN, against plain loops in NumPy float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pooling_oracle import AXES, GEOMETRIES, expected, make_case

from jaxops import mcdnn
from jaxops._checks.arguments import BadParamError, NotSupportedError
from jaxops.mcdnn import NanPropagation, PoolingDescriptor, PoolingMode, pooling_backward, pooling_forward

KINDS = {
    "MAX": "max",
    "MAX_DETERMINISTIC": "max",
    "AVERAGE_COUNT_INCLUDE_PADDING": "mean",
    "AVERAGE_COUNT_EXCLUDE_PADDING": "mean-inside",
}
PADDED = GEOMETRIES["3-by-2-padded"]


def descriptor(mode, geometry, **attributes):
    _, window, stride, padding = geometry
    return PoolingDescriptor(mode, window, padding, stride, **attributes)


def assert_rounded_once(actual, exact, dtype):
    assert actual.dtype == dtype
    one_rounding = 0.501 * float(jnp.finfo(dtype).eps) + 1e-6
    np.testing.assert_allclose(np.asarray(actual, np.float64), exact, rtol=one_rounding, atol=2e-6)


@pytest.mark.sampled
@pytest.mark.parametrize("mode", KINDS)
@pytest.mark.parametrize("geometry", ["3-by-2-padded", "volume"])
def test_pooling_equals_loops_in_every_layout(geometry, mode, rng):
    geometry = GEOMETRIES[geometry]
    x, dy = make_case(rng, geometry)
    y_truth, dx_truth = expected(KINDS[mode], x, dy, geometry)
    desc = descriptor(mode, geometry)
    for layout in [None, *(name for name in AXES if len(name) == x.ndim)]:
        move = AXES[layout] if layout else tuple(range(x.ndim))
        images, grads = x.transpose(move), dy.transpose(move)
        y = pooling_forward(desc, images, layout=layout)
        dx = pooling_backward(desc, y, grads, images, layout=layout)
        np.testing.assert_allclose(y, y_truth.transpose(move), rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(dx, dx_truth.transpose(move), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("mode", KINDS)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_pooling_blends_before_it_rounds(dtype, mode, rng):
    alpha, beta = 0.75, -1.5
    x, dy = (jnp.asarray(array, dtype) for array in make_case(rng, PADDED))
    y_prior, dx_prior = (jnp.asarray(rng.normal(size=array.shape), dtype) for array in (dy, x))
    y_truth, dx_truth = expected(KINDS[mode], x, np.asarray(dy), PADDED)
    desc = descriptor(mode, PADDED)
    y = pooling_forward(desc, x, alpha=alpha, beta=beta, y=y_prior)
    dx = pooling_backward(desc, y, dy, x, alpha=alpha, beta=beta, dx=dx_prior)  # of a y that is no maximum any more
    assert_rounded_once(y, alpha * y_truth + beta * np.asarray(y_prior, np.float64), dtype)
    assert_rounded_once(dx, alpha * dx_truth + beta * np.asarray(dx_prior, np.float64), dtype)


def test_pooling_keeps_float64(rng):
    with jax.enable_x64(True):
        x, dy = make_case(rng, PADDED, dtype="float64")
        y_truth, dx_truth = expected("mean", x, dy, PADDED)
        desc = descriptor("AVERAGE_COUNT_INCLUDE_PADDING", PADDED)
        y = pooling_forward(desc, x, alpha=1 / 3)
        dx = pooling_backward(desc, y, dy, x, beta=0.1, dx=x)
        assert y.dtype == dx.dtype == jnp.float64
        np.testing.assert_allclose(y, y_truth / 3, rtol=1e-14, atol=1e-15)
        np.testing.assert_allclose(dx, dx_truth + 0.1 * x, rtol=1e-14, atol=1e-15)


def test_pooling_reads_no_prior_with_beta_zero(rng):
    x, dy = make_case(rng, PADDED)
    desc = descriptor("MAX", PADDED)
    y = pooling_forward(desc, x, alpha=2.0, y=np.full(dy.shape, np.nan, np.float32))
    np.testing.assert_array_equal(y, 2 * pooling_forward(desc, x))
    dx = pooling_backward(desc, y, dy, x, alpha=2.0, dx=np.full(x.shape, np.nan, np.float32))
    assert np.isfinite(dx).all()


def test_pooling_backward_gives_unread_positions_the_prior(rng):
    geometry = GEOMETRIES["rest-unread"]
    x, dy = make_case(rng, geometry)
    prior = rng.normal(size=x.shape).astype(np.float32)
    for mode in KINDS:
        dx = pooling_backward(descriptor(mode, geometry), dy, dy, x, beta=0.5, dx=prior)
        np.testing.assert_array_equal(dx[:, :, 6:], 0.5 * prior[:, :, 6:])


@pytest.mark.parametrize("mode", ["AVERAGE_COUNT_INCLUDE_PADDING", "AVERAGE_COUNT_EXCLUDE_PADDING"])
@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
def test_pooling_backward_of_averages_needs_shapes_only(layout, mode, rng):
    x, dy = (array.transpose(AXES[layout]) for array in make_case(rng, PADDED))
    desc = descriptor(mode, PADDED)
    given = pooling_backward(desc, dy, dy, np.full_like(x, np.nan), layout=layout)
    np.testing.assert_array_equal(pooling_backward(desc, None, dy, None, x_shape=x.shape, layout=layout), given)
    assert np.isfinite(given).all()


NAN_IMAGE = np.array([[np.nan, 1, 2, np.nan], [0, 3, np.nan, np.nan]], np.float32)[None, None]
NAN = {
    # (0, 0) is the first NaN; the second window is NaN but for its first element.
    "PROPAGATE_NAN": ([np.nan, np.nan], [(0, 0), (0, 3)]),
    "NOT_PROPAGATE_NAN": ([3, 2], [(1, 1), (0, 2)]),
}


@pytest.mark.parametrize("propagation", NAN)
def test_pooling_switches_what_nan_does(propagation):
    values, positions = NAN[propagation]
    desc = PoolingDescriptor("MAX", 2, 0, 2, propagation)
    y = pooling_forward(desc, NAN_IMAGE)
    np.testing.assert_array_equal(y.ravel(), values)
    dx = pooling_backward(desc, y, np.ones_like(y), NAN_IMAGE)
    assert [*zip(*np.nonzero(dx[0, 0]), strict=True)] == sorted(positions)


def test_pooling_that_passes_over_nan_finds_minus_infinity_where_nothing_else_is():
    x = np.full((1, 1, 2, 2), np.nan, np.float32)
    x[0, 0, 1, 1] = -np.inf
    desc = PoolingDescriptor("MAX", 2, 1, 2)
    y = pooling_forward(desc, x)
    np.testing.assert_array_equal(y, np.full((1, 1, 2, 2), -np.inf))
    np.testing.assert_array_equal(pooling_backward(desc, y, np.ones_like(y), x), np.ones((1, 1, 2, 2)))


@pytest.mark.parametrize(
    ("window", "first"),
    [
        ([np.nan, -np.inf, -np.inf, np.nan], 1),
        ([np.nan, np.nan, np.nan, -np.inf], 3),
        ([-np.inf, np.nan, -np.inf, np.nan], 0),
        ([np.nan] * 4, 0),
    ],
    ids=str,
)
def test_pooling_that_passes_over_nan_prefers_even_minus_infinity(window, first):
    x, one = np.float32(window).reshape(1, 1, 2, 2), np.ones((1, 1, 1, 1), np.float32)
    dx = pooling_backward(PoolingDescriptor("MAX", 2, 0, 2), one, one, x)
    np.testing.assert_array_equal(dx.ravel(), np.eye(4)[first])


def test_pooling_averages_always_propagate_nan():
    for propagation in NAN:
        desc = PoolingDescriptor("AVERAGE_COUNT_INCLUDE_PADDING", 2, 0, 2, propagation)
        assert np.isnan(pooling_forward(desc, NAN_IMAGE)).all()


def test_pooling_is_differentiable_through_the_documented_calls(rng):
    x, dy = make_case(rng, PADDED)
    desc = descriptor("MAX", PADDED)
    y, pull_back = jax.vjp(lambda x: pooling_forward(desc, x, alpha=2.0), x)
    np.testing.assert_array_equal(pull_back(jnp.asarray(dy))[0], pooling_backward(desc, y, dy, x, alpha=2.0))
    prior = jax.grad(lambda prior: jnp.sum(pooling_forward(desc, x, beta=0.25, y=prior)))(y)
    np.testing.assert_array_equal(prior, np.full(y.shape, 0.25, np.float32))


def test_pooling_enumerations_have_the_documented_numbers():
    assert [(one.name, one.value) for one in PoolingMode] == [
        ("MAX", 0),
        ("AVERAGE_COUNT_INCLUDE_PADDING", 1),
        ("AVERAGE_COUNT_EXCLUDE_PADDING", 2),
        ("MAX_DETERMINISTIC", 3),
    ]
    assert [(one.name, one.value) for one in NanPropagation] == [("NOT_PROPAGATE_NAN", 0), ("PROPAGATE_NAN", 1)]


def test_pooling_descriptors_of_names_members_and_numbers_are_equal():
    by_name = PoolingDescriptor("MAX_DETERMINISTIC", (2, 2), [0, 0], 2, "PROPAGATE_NAN")
    by_member = PoolingDescriptor(PoolingMode.MAX_DETERMINISTIC, (2, 2), (0, 0), 2, NanPropagation.PROPAGATE_NAN)
    assert by_name == by_member == PoolingDescriptor(3, (2, 2), (0, 0), 2, 1)
    assert hash(by_name) == hash(by_member)


DESCRIPTORS = {
    "mode": {"mode": "MEAN"},
    "mode-number": {"mode": 4},
    "mode-bool": {"mode": True},
    "mode-other": {"mode": NanPropagation.PROPAGATE_NAN},
    "nan": {"nan_propagation": "PROPAGATE"},
    "window-zero": {"window": (2, 0)},
    "window-float": {"window": 2.0},
    "window-length": {"window": (2, 2, 2, 2)},
    "stride-zero": {"stride": 0},
    "padding-none": {"padding": None},
}


@pytest.mark.parametrize("change", DESCRIPTORS.values(), ids=DESCRIPTORS)
def test_pooling_descriptor_refuses(change):
    with pytest.raises(BadParamError, match=f"^PoolingDescriptor: {next(iter(change))} must ") as refusal:
        PoolingDescriptor(**{"mode": "MAX", "window": (2, 2), "padding": 0, "stride": 2, **change})
    assert refusal.value.status == "MCDNN_STATUS_BAD_PARAM"


X = np.zeros((2, 3, 4, 6), np.float32)
Y = np.zeros((2, 3, 2, 3), np.float32)
MAX = PoolingDescriptor("MAX", 2, 0, 2)
MEAN = PoolingDescriptor("AVERAGE_COUNT_INCLUDE_PADDING", 2, 0, 2)
BAD, UNSUPPORTED = "MCDNN_STATUS_BAD_PARAM", "MCDNN_STATUS_NOT_SUPPORTED"
OF_BOTH = {
    "desc": ({"desc": None}, BAD, "desc"),
    "alpha": ({"alpha": None}, BAD, "alpha"),
    "beta": ({"beta": None}, BAD, "beta"),
    "layout": ({"layout": "NCWH"}, BAD, "layout"),
    "layout-rank": ({"layout": "NDHWC"}, BAD, "x"),
    "layout-vectorised": ({"layout": "NCHW_VECT_C"}, UNSUPPORTED, "layout"),
    "descriptor-rank": ({"desc": PoolingDescriptor("MAX", (2, 2, 2), 0, 2)}, BAD, "desc.window"),
    "window-large": ({"desc": PoolingDescriptor("MAX", 5, 0, 2)}, BAD, "window"),
    "padding-large": ({"desc": PoolingDescriptor("MAX", 2, 2, 2)}, UNSUPPORTED, "desc.padding"),
    "padding-negative": ({"desc": PoolingDescriptor("MAX", 2, -1, 2)}, UNSUPPORTED, "desc.padding"),
    "x": ({"x": None}, BAD, "x"),
}
FORWARD = {
    **OF_BOTH,
    "rank": ({"x": X[0]}, UNSUPPORTED, "x"),
    "dtype": ({"x": X.astype(np.int32)}, UNSUPPORTED, "x"),
    "no-prior": ({"beta": 0.5}, BAD, "y"),
    "prior-shape": ({"beta": 0.5, "y": Y[:, :, :1]}, BAD, "y"),
    "prior-dtype": ({"beta": 0.5, "y": Y.astype(np.float16)}, BAD, "y"),
}
BACKWARD = {
    **OF_BOTH,
    "y": ({"y": None}, BAD, "y"),
    "dy": ({"dy": None}, BAD, "dy"),
    "rank": ({"x": X[0], "y": Y[0], "dy": Y[0]}, UNSUPPORTED, "x"),
    "y-shape": ({"y": Y[:, :, :1]}, BAD, "y"),
    "dy-shape": ({"y": Y[:1], "dy": Y[:1]}, BAD, "dy"),
    "y-dtype": ({"y": Y.astype(np.float16)}, BAD, "y"),
    "dy-dtype": ({"dy": Y.astype(np.float16), "y": Y.astype(np.float16)}, BAD, "x"),
    "all-integers": ({"x": np.int32(X), "y": np.int32(Y), "dy": np.int32(Y)}, UNSUPPORTED, "dy"),
    "no-prior": ({"beta": 0.5}, BAD, "dx"),
    "prior-shape": ({"dx": X[:, :, :1]}, BAD, "dx"),
    "prior-dtype": ({"dx": X.astype(np.float16)}, BAD, "dx"),
    "x-shape": ({"x_shape": (2, 3, 4, 5)}, BAD, "x_shape"),
    "x-shape-missing": ({"desc": MEAN, "x": None}, BAD, "x_shape"),
    "x-shape-float": ({"desc": MEAN, "x": None, "x_shape": (2.0, 3, 4, 6)}, BAD, "x_shape"),
    "x-shape-other": ({"desc": MEAN, "x": None, "x_shape": (2, 3, 4, 9)}, BAD, "dy"),
}


def assert_refused(call, arguments, status, argument):
    error = BadParamError if status == BAD else NotSupportedError
    with pytest.raises(error, match=f"^{call.__name__}: {argument} must ") as refusal:
        call(**arguments)
    assert refusal.value.status == status


@pytest.mark.parametrize(("change", "status", "argument"), FORWARD.values(), ids=FORWARD)
def test_pooling_forward_refuses(change, status, argument):
    assert_refused(pooling_forward, {"desc": MAX, "x": X, **change}, status, argument)


@pytest.mark.parametrize(("change", "status", "argument"), BACKWARD.values(), ids=BACKWARD)
def test_pooling_backward_refuses(change, status, argument):
    assert_refused(pooling_backward, {"desc": MAX, "y": Y, "dy": Y, "x": X, **change}, status, argument)


def test_mcdnn_lists_what_it_offers():
    assert all(hasattr(mcdnn, name) for name in mcdnn.__all__)
