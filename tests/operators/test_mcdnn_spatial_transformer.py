"""The mcDNN calls of the spatial transformer: values, blends, layouts and statuses, against NumPy float64."""

import grid_sample_oracle as oracle
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxops import affine_grid, grid_sample
from jaxops._checks.arguments import BadParamError, NotSupportedError
from jaxops.mcdnn import (
    SamplerType,
    SpatialTransformerDescriptor,
    spatial_tf_grid_generator_backward,
    spatial_tf_grid_generator_forward,
    spatial_tf_sampler_backward,
    spatial_tf_sampler_forward,
)

DESC = SpatialTransformerDescriptor((2, 3, 4, 5))


def make_case(rng, dtype="float32"):
    """theta, x, grid and the gradients of grid and y."""
    arrays = rng.normal(size=(2, 2, 3)), rng.normal(size=(2, 3, 6, 4)), rng.uniform(-1.4, 1.4, (2, 4, 5, 2))
    arrays = *arrays, rng.normal(size=(2, 4, 5, 2)), rng.normal(size=(2, 3, 4, 5))
    return tuple(jnp.asarray(array, dtype) for array in arrays)


def assert_rounded_once(actual, exact, dtype):
    assert actual.dtype == dtype
    one_rounding = 0.501 * float(jnp.finfo(dtype).eps) + 1e-5
    np.testing.assert_allclose(np.asarray(actual).astype(np.float64), exact, rtol=one_rounding, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_grid_generator_equals_loops_in_float64(dtype, rng):
    theta, _, _, dgrid, _ = make_case(rng, dtype)
    grid = spatial_tf_grid_generator_forward(DESC, theta)
    assert_rounded_once(grid, oracle.affine_grid(np.asarray(theta).astype(np.float64), (4, 5)), dtype)
    dtheta = spatial_tf_grid_generator_backward(DESC, dgrid)
    assert_rounded_once(dtheta, oracle.affine_grid_gradient(np.asarray(dgrid).astype(np.float64)), dtype)
    np.testing.assert_array_equal(grid, affine_grid(theta, DESC.dims))


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("layout", [None, "NCHW", "NHWC"])
def test_sampler_blends_before_it_rounds(layout, dtype, rng):
    _, x, grid, dgrid_prior, dy = make_case(rng, dtype)
    y_prior, dx_prior = dy * 2, x * 3
    y, dx, dgrid = oracle.grid_sample(x, grid, dy)
    forward, back = ((0, 2, 3, 1), (0, 3, 1, 2)) if layout == "NHWC" else ((0, 1, 2, 3),) * 2
    images = {
        name: array.transpose(forward) for name, array in (("x", x), ("dy", dy), ("y", y_prior), ("dx", dx_prior))
    }
    blended = spatial_tf_sampler_forward(DESC, images["x"], grid, alpha=0.75, beta=-1.5, y=images["y"], layout=layout)
    assert_rounded_once(blended.transpose(back), 0.75 * y - 1.5 * np.asarray(y_prior).astype(np.float64), dtype)
    of_x, of_grid = spatial_tf_sampler_backward(
        *(DESC, images["x"], images["dy"], grid),
        **{"alpha": 0.5, "beta": 2.0, "dx": images["dx"], "layout": layout},
        **{"alpha_dgrid": -1.0, "beta_dgrid": 0.25, "dgrid": dgrid_prior},
    )
    assert_rounded_once(of_x.transpose(back), 0.5 * dx + 2 * np.asarray(dx_prior).astype(np.float64), dtype)
    assert_rounded_once(of_grid, -dgrid + 0.25 * np.asarray(dgrid_prior).astype(np.float64), dtype)


def test_sampler_reads_no_prior_with_beta_zero(rng):
    _, x, grid, dgrid, dy = make_case(rng)
    nothing = {"y": dy * jnp.nan, "dx": x * jnp.nan, "dgrid": dgrid * jnp.nan}
    y = spatial_tf_sampler_forward(DESC, x, grid, alpha=2.0, y=nothing["y"])
    np.testing.assert_array_equal(y, 2 * grid_sample(x, grid))
    gradients = spatial_tf_sampler_backward(DESC, x, dy, grid, alpha=2.0, dx=nothing["dx"], dgrid=nothing["dgrid"])
    plain = spatial_tf_sampler_backward(DESC, x, dy, grid)
    np.testing.assert_allclose(gradients[0], 2 * plain[0], rtol=1e-6)
    np.testing.assert_array_equal(gradients[1], plain[1])


def test_sampler_keeps_float64(rng):
    with jax.enable_x64(True):
        _, x, grid, _, dy = make_case(rng, "float64")
        y, dx, dgrid = oracle.grid_sample(x, grid, dy)
        np.testing.assert_allclose(
            spatial_tf_sampler_forward(DESC, x, grid, alpha=1 / 3), y / 3, rtol=1e-12, atol=1e-14
        )
        of_x, of_grid = spatial_tf_sampler_backward(DESC, x, dy, grid)
        np.testing.assert_allclose(of_x, dx, rtol=1e-12, atol=1e-13)
        np.testing.assert_allclose(of_grid, dgrid, rtol=1e-11, atol=1e-12)


def test_spatial_transformer_is_differentiable_through_the_documented_calls(rng):
    theta, x, grid, _, dy = make_case(rng)
    _, pull_back = jax.vjp(lambda x, grid: spatial_tf_sampler_forward(DESC, x, grid), x, grid)
    gradients = pull_back(dy)
    for actual, expected in zip(gradients, spatial_tf_sampler_backward(DESC, x, dy, grid), strict=True):
        np.testing.assert_array_equal(actual, expected)
    _, pull_back = jax.vjp(lambda theta: spatial_tf_grid_generator_forward(DESC, theta), theta)
    np.testing.assert_array_equal(pull_back(gradients[1])[0], spatial_tf_grid_generator_backward(DESC, gradients[1]))


def test_spatial_transformer_descriptors_of_names_members_and_numbers_are_equal():
    assert [(one.name, one.value) for one in SamplerType] == [("BILINEAR", 0)]
    by_name = SpatialTransformerDescriptor([2, 3, 4, 5], "BILINEAR")
    assert by_name == SpatialTransformerDescriptor((2, 3, 4, 5), SamplerType.BILINEAR) == DESC
    assert hash(by_name) == hash(SpatialTransformerDescriptor((2, 3, 4, 5), 0))


DESCRIPTORS = {
    "sampler": {"sampler": "NEAREST"},
    "sampler-number": {"sampler": 1},
    "dims-short": {"dims": (2, 3, 4)},
    "dims-none": {"dims": None},
    "dims-float": {"dims": (2, 3, 4, 5.0)},
    "dims-negative": {"dims": (2, 3, 4, -5)},
}


@pytest.mark.parametrize("change", DESCRIPTORS.values(), ids=DESCRIPTORS)
def test_spatial_transformer_descriptor_refuses(change):
    with pytest.raises(BadParamError, match=f"^SpatialTransformerDescriptor: {next(iter(change))} must ") as refusal:
        SpatialTransformerDescriptor(**{"dims": (2, 3, 4, 5), **change})
    assert refusal.value.status == "MCDNN_STATUS_BAD_PARAM"


BAD, UNSUPPORTED = "MCDNN_STATUS_BAD_PARAM", "MCDNN_STATUS_NOT_SUPPORTED"
THETA, GRID = np.zeros((2, 2, 3), np.float32), np.zeros((2, 4, 5, 2), np.float32)
X, Y = np.zeros((2, 3, 6, 4), np.float32), np.zeros((2, 3, 4, 5), np.float32)
VOLUME = SpatialTransformerDescriptor((2, 3, 4, 5, 6))
OF_ALL = {
    "desc": ({"desc": None}, BAD, "desc"),
    "desc-axes": ({"desc": VOLUME}, UNSUPPORTED, "desc.dims"),
}
OF_SAMPLER = {
    **OF_ALL,
    "x": ({"x": None}, BAD, "x"),
    "grid": ({"grid": None}, BAD, "grid"),
    "alpha": ({"alpha": None}, BAD, "alpha"),
    "beta": ({"beta": None}, BAD, "beta"),
    "x-axes": ({"x": X[..., None]}, UNSUPPORTED, "x"),
    "x-few-axes": ({"x": X[0]}, BAD, "x"),
    "x-batch": ({"x": X[:1]}, BAD, "x"),
    "x-channels": ({"x": X[:, :2]}, BAD, "x"),
    "x-empty": ({"x": X[:, :, :0]}, BAD, "x"),
    "x-layout": ({"layout": "NHWC"}, BAD, "x"),
    "layout": ({"layout": "NCWH"}, BAD, "layout"),
    "layout-rank": ({"layout": "NCDHW"}, BAD, "x"),
    "layout-vectorised": ({"layout": "NCHW_VECT_C"}, UNSUPPORTED, "layout"),
    "grid-shape": ({"grid": GRID[:, :3]}, BAD, "grid"),
    "grid-dtype": ({"grid": np.int32(GRID)}, UNSUPPORTED, "grid"),
}
CALLS = {
    "generator-forward": (spatial_tf_grid_generator_forward, {"theta": THETA}),
    "generator-backward": (spatial_tf_grid_generator_backward, {"dgrid": GRID}),
    "sampler-forward": (spatial_tf_sampler_forward, {"x": X, "grid": GRID}),
    "sampler-backward": (spatial_tf_sampler_backward, {"x": X, "dy": Y, "grid": GRID}),
}
REFUSALS = {
    "generator-forward": {
        **OF_ALL,
        "theta": ({"theta": None}, BAD, "theta"),
        "theta-batch": ({"theta": THETA[:1]}, BAD, "theta"),
        "theta-shape": ({"theta": THETA[:, :, :2]}, BAD, "theta"),
        "theta-dtype": ({"theta": np.int32(THETA)}, UNSUPPORTED, "theta"),
    },
    "generator-backward": {
        **OF_ALL,
        "dgrid": ({"dgrid": None}, BAD, "dgrid"),
        "dgrid-shape": ({"dgrid": GRID[:, :, :4]}, BAD, "dgrid"),
        "dgrid-dtype": ({"dgrid": np.int32(GRID)}, UNSUPPORTED, "dgrid"),
    },
    "sampler-forward": {
        **OF_SAMPLER,
        "integers": ({"x": np.int32(X)}, UNSUPPORTED, "x"),
        "no-prior": ({"beta": 0.5}, BAD, "y"),
        "prior-shape": ({"beta": 0.5, "y": Y[:1]}, BAD, "y"),
        "prior-dtype": ({"y": np.float16(Y)}, BAD, "y"),
    },
    "sampler-backward": {
        **OF_SAMPLER,
        "integers": ({"x": np.int32(X), "dy": np.int32(Y)}, UNSUPPORTED, "x"),
        "dy": ({"dy": None}, BAD, "dy"),
        "dy-shape": ({"dy": Y[:, :, :3]}, BAD, "dy"),
        "dy-dtype": ({"dy": np.float16(Y)}, BAD, "dy"),
        "alpha-dgrid": ({"alpha_dgrid": None}, BAD, "alpha_dgrid"),
        "beta-dgrid": ({"beta_dgrid": None}, BAD, "beta_dgrid"),
        "no-dx": ({"beta": 0.5}, BAD, "dx"),
        "dx-shape": ({"dx": X[:, :, :5]}, BAD, "dx"),
        "no-dgrid": ({"beta_dgrid": 0.5}, BAD, "dgrid"),
        "dgrid-prior-dtype": ({"dgrid": np.float16(GRID)}, BAD, "dgrid"),
    },
}


@pytest.mark.parametrize(
    ("name", "change", "status", "argument"),
    [
        pytest.param(name, *row, id=f"{name}-{row_id}")
        for name, rows in REFUSALS.items()
        for row_id, row in rows.items()
    ],
)
def test_spatial_transformer_calls_refuse(name, change, status, argument):
    call, arguments = CALLS[name]
    error = BadParamError if status == BAD else NotSupportedError
    with pytest.raises(error, match=f"^{call.__name__}: {argument} must ") as refusal:
        call(**{"desc": DESC, **arguments, **change})
    assert refusal.value.status == status
