"""`max_pool` and `avg_pool`: values and gradients against loops in NumPy float64, and what every operator promises."""

import functools
import inspect

import contract
import flax.linen as nn
import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from pooling_oracle import AXES, GEOMETRIES, expected, make_case

import jaxops
import lowering
from jaxops import avg_pool, max_pool
from jaxops._checks.arguments import BadParamError
from jaxops.pooling import AVG_POOL, AVG_POOL_BACKWARD, MAX_POOL, windows
from lowering.operators import Place


def pooled(kind, geometry, layout=None):
    _, window, stride, padding = geometry
    layout = layout or {2: "NCHW", 3: "NCDHW"}[len(window)]
    attributes = {"stride": stride, "padding": padding, "layout": layout}
    if kind == "max":
        return functools.partial(max_pool, window=window, **attributes)
    return functools.partial(avg_pool, window=window, **attributes, count_include_pad=kind == "mean")


def value_and_gradient(fn, x, cotangent):
    y, pull_back = jax.vjp(jax.jit(fn), x)
    return y, pull_back(cotangent)[0]


@pytest.mark.sampled
@pytest.mark.parametrize("kind", ["max", "mean", pytest.param("mean-inside", marks=pytest.mark.slow)])
@pytest.mark.parametrize("geometry", GEOMETRIES.values(), ids=GEOMETRIES)
def test_pooling_equals_loops_in_float64(geometry, kind, rng):
    x, cotangent = make_case(rng, geometry)
    truth = expected(kind, x, cotangent, geometry)
    layouts = [name for name in AXES if len(name) == x.ndim]
    for layout in layouts if kind == "max" else layouts[1:]:
        move, back = AXES[layout], np.argsort(AXES[layout])
        fn = pooled(kind, geometry, layout)
        y, grad = value_and_gradient(fn, jnp.asarray(x.transpose(move)), jnp.asarray(cotangent.transpose(move)))
        np.testing.assert_allclose(y.transpose(back), truth[0], rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(grad.transpose(back), truth[1], rtol=1e-5, atol=1e-6)


# Extents, window, stride, padding, dilation.
DILATED = [
    ((9, 8), (3, 2), (1, 1), (2, 1), (2, 3)),
    ((11, 7), (3, 3), (2, 3), (2, 1), (4, 2)),
    ((5, 12), (2, 3), (4, 2), (0, 3), (3, 4)),
    ((4, 9, 6), (2, 3, 1), (1, 3, 2), (1, 2, 0), (3, 2, 4)),
]


@pytest.mark.sampled
@pytest.mark.parametrize("geometry", DILATED, ids=str)
def test_dilated_windows_equal_loops_in_float64(geometry, rng):
    """Each window's pixels are looked at one by one; of equal ones the first has the gradient."""
    extents, window, stride, padding, dilation = geometry
    x = rng.integers(-4, 4, (2, *extents)) / 4
    fn = functools.partial(pooled("max", (extents, window, stride, padding)), dilation=dilation)
    y, pull_back = jax.vjp(jax.jit(fn), jnp.asarray(x[:, None], jnp.float32))
    cotangent = rng.normal(size=y.shape).astype(np.float32)
    truth, gradient = np.zeros(y.shape), np.zeros(x.shape)
    for image, _, *at in np.ndindex(y.shape):
        first = np.multiply(at, stride) - padding
        pixels = [(image, *(first + np.multiply(k, dilation))) for k in np.ndindex(window)]
        pixels = [p for p in pixels if all(0 <= a < n for a, n in zip(p[1:], extents, strict=True))]
        winner = max(pixels, key=lambda pixel: x[pixel])
        truth[image, 0, *at] = x[winner]
        gradient[winner] += cotangent[image, 0, *at]
    np.testing.assert_array_equal(y, truth)
    np.testing.assert_allclose(pull_back(jnp.asarray(cotangent))[0][:, 0], gradient, rtol=1e-5, atol=1e-6)


def test_dilations_that_leave_windows_no_pixel_are_refused():
    pool = functools.partial(max_pool, jnp.zeros((1, 1, 5)), 3, layout="NCL")
    with pytest.raises(
        BadParamError, match=r"^max_pool: dilation must keep what windows span, \(7,\), within x and its "
    ):
        pool(dilation=3)
    with pytest.raises(BadParamError, match=r"^max_pool: dilation must leave each window a pixel of x; got "):
        max_pool(jnp.zeros((1, 1, 1)), 2, padding=1, dilation=2, layout="NCL")
    with pytest.raises(BadParamError, match=r"^max_pool: dilation must be at least 1; got \(0,\)"):
        pool(dilation=0)


# Extents, window, stride, padding, and how many windows PyTorch has with `ceil_mode`.
CEILED = [
    ((7, 9), (3, 3), (2, 2), 1, (4, 5)),
    ((6, 8), (3, 2), (2, 3), 0, (3, 3)),
    ((5, 4), (2, 2), (3, 3), 1, (2, 2)),
    ((10, 7), (3, 3), (4, 2), 0, (3, 3)),
    ((3, 6, 5), (2, 3, 3), (2, 2, 3), 1, (2, 4, 2)),
]


@pytest.mark.sampled
@pytest.mark.parametrize("kind", ["max", "mean", "mean-inside"])
@pytest.mark.parametrize(("extents", "window", "stride", "pad", "counts"), CEILED, ids=str)
def test_ceil_mode_adds_the_windows_that_begin_in_x(extents, window, stride, pad, counts, kind, rng):
    """Each window is reduced on its own in float64; the counts are those of torch.nn.functional."""
    x = rng.integers(-4, 4, (2, 3, *extents)) / 4
    fn = pooled(kind, (extents, window, stride, (pad,) * len(window)))
    ceiled = functools.partial(fn, ceil_mode=True)
    cotangent = rng.normal(size=(2, 3, *counts))
    truth, grad = np.zeros(cotangent.shape), np.zeros(x.shape)
    for at in np.ndindex(counts):
        starts = [o * s - pad for o, s in zip(at, stride, strict=True)]
        ends = [min(a + k, n + pad) for a, k, n in zip(starts, window, extents, strict=True)]
        inside = tuple(slice(max(a, 0), min(b, n)) for a, b, n in zip(starts, ends, extents, strict=True))
        size = np.prod([b - a for a, b in zip(starts, ends, strict=True)])
        for image in np.ndindex(2, 3):
            part, dy = x[image][inside], cotangent[image][at]
            if kind == "max":
                first = np.unravel_index(np.argmax(part), part.shape)
                truth[image][at] = part[first]
                grad[image][inside][first] += dy
            else:
                count = size if kind == "mean" else part.size
                truth[image][at] = part.sum() / count
                grad[image][inside] += dy / count
    y, found = value_and_gradient(ceiled, jnp.asarray(x, jnp.float32), jnp.asarray(cotangent, jnp.float32))
    np.testing.assert_allclose(y, truth, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(found, grad, rtol=1e-5, atol=1e-6)


@pytest.mark.sampled
@pytest.mark.parametrize("geometry", [g for g in GEOMETRIES.values() if len(g[1]) == 2 and min(g[1]) > 1], ids=str)
def test_windows_in_one_pass_equal_loops_in_float64(geometry, rng):
    """As on TPUs; also what the forms leave to the reference for speed alone."""
    x, cotangent = make_case(rng, geometry)
    padding = tuple(side if isinstance(side, tuple) else (side, side) for side in geometry[3])
    attributes = windows.volume_attributes(*geometry[1:3], padding)
    means = attributes | {"count_include_pad": False, "extents": (1, *x.shape[2:])}

    def run(operator, operand, **attributes):
        form = operator.forms[0]
        run = functools.partial(form.run, place=Place("tpu"), **attributes)
        return windows.from_volume(jax.jit(run)(windows.to_volume(jnp.asarray(operand), "NCHW"))[0], "NCHW")

    largest, _ = expected("max", x, cotangent, geometry)
    mean, gradient = expected("mean-inside", x, cotangent, geometry)
    np.testing.assert_allclose(run(MAX_POOL, x, propagate_nan=True, **attributes), largest, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(run(AVG_POOL, x, **means), mean, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(run(AVG_POOL_BACKWARD, cotangent, **means), gradient, rtol=1e-5, atol=1e-6)


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("extents", "window"), [((6, 8), (2, 2)), ((7, 11), (2, 5)), ((9, 7), (9, 7)), ((5, 4, 13), (2, 1, 6))], ids=str
)
def test_means_of_windows_side_by_side_equal_loops_in_float64(extents, window, dtype, rng):
    geometry = extents, window, window, (0,) * len(window)
    x, cotangent = (jnp.asarray(each, dtype) for each in make_case(rng, geometry))
    fn = pooled("mean", geometry)
    rows = lowering.explain(jax.grad(lambda x: jnp.sum(fn(x) ** 2)), x, target="cpu").rows
    assert {row.implementation for row in rows} == {"xla_side_by_side"}
    truth = expected("mean", np.asarray(x, np.float32), np.asarray(cotangent, np.float32), geometry)
    rounding = 1e-6 if dtype == "float32" else 0.501 * float(jnp.finfo(dtype).eps)
    for actual, exact in zip(value_and_gradient(fn, x, cotangent), truth, strict=True):
        assert actual.dtype == dtype
        np.testing.assert_allclose(np.asarray(actual, np.float64), exact, rtol=rounding, atol=1e-6)


@pytest.mark.sampled
@pytest.mark.parametrize("kind", ["max", "mean", "mean-inside"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_pooling_rounds_once(dtype, kind, rng):
    geometry = ((6, 7), (3, 3), (1, 1), (1, 1))
    x = jnp.asarray(rng.normal(size=(2, 2, 6, 7)), dtype)
    cotangent = jnp.asarray(rng.normal(size=(2, 2, 6, 7)), dtype)
    truth = expected(kind, x, np.asarray(cotangent), geometry)
    for actual, exact in zip(value_and_gradient(pooled(kind, geometry), x, cotangent), truth, strict=True):
        assert actual.dtype == dtype
        one_rounding = 0.501 * float(jnp.finfo(dtype).eps)
        np.testing.assert_allclose(np.asarray(actual, np.float64), exact, rtol=one_rounding, atol=1e-6)


def xla_pool(kind, x, window, stride, padding):
    """`lax.reduce_window` in float64, of images with their channels last."""
    shape, strides = (1, *window, 1), (1, *stride, 1)
    if kind == "max":
        return lax.reduce_window(x, -jnp.inf, lax.max, shape, strides, padding)
    counted = jnp.ones_like(x) if kind == "mean-inside" else None
    total = lax.reduce_window(x, 0.0, lax.add, shape, strides, padding)
    count = (
        float(np.prod(window)) if counted is None else lax.reduce_window(counted, 0.0, lax.add, shape, strides, padding)
    )
    return total / count


SAME = {
    "odd-rest": ((7, 9), (3, 2), (2, 3)),
    "one-behind": ((8, 8), (3, 3), (2, 2)),
    "gaps": ((7, 5), (2, 1), (4, 3)),
    "longer-than-x": ((2, 1), (5, 4), (1, 1)),
    "volume": ((3, 4, 5), (2, 3, 2), (2, 1, 3)),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["max", "mean", "mean-inside"])
@pytest.mark.parametrize("extents_window_stride", SAME.values(), ids=SAME)
def test_pooling_pads_by_name_as_xla_does(extents_window_stride, kind, rng):
    extents, window, stride = extents_window_stride
    with jax.enable_x64(True):
        x = jnp.asarray(rng.permutation(2 * 3 * int(np.prod(extents))).reshape(2, *extents, 3) / 7)
        fits = all(k <= n for k, n in zip(window, extents, strict=True))
        for padding in ("SAME", "VALID") if fits else ("SAME",):
            ours = pooled(kind, (extents, window, stride, padding), "NHWC" if len(extents) == 2 else "NDHWC")
            y, pull_back = jax.vjp(lambda x: xla_pool(kind, x, window, stride, padding), x)  # noqa: B023
            cotangent = jnp.asarray(rng.normal(size=y.shape))
            actual = value_and_gradient(ours, x, cotangent)
            np.testing.assert_allclose(actual[0], y, rtol=1e-14)
            np.testing.assert_allclose(actual[1], pull_back(cotangent)[0], rtol=1e-12, atol=1e-14)


@pytest.mark.slow
def test_pooling_takes_paddings_as_flax_does(rng):
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        x = jnp.asarray(rng.normal(size=(2, 7, 6, 3)))
        for padding in ("SAME", "VALID", ((1, 0), (0, 2))):
            attributes = {"stride": (2, 1), "padding": padding, "layout": "NHWC"}
            truth = nn.max_pool(x, (3, 3), (2, 1), padding)
            np.testing.assert_array_equal(max_pool(x, 3, **attributes), truth)
            for inside in (True, False):
                truth = nn.avg_pool(x, (3, 3), (2, 1), padding, count_include_pad=inside)
                actual = avg_pool(x, 3, **attributes, count_include_pad=inside)
                np.testing.assert_allclose(actual, truth, rtol=1e-14)


@pytest.mark.sampled
@pytest.mark.parametrize("pool", [max_pool, avg_pool])
@pytest.mark.parametrize("layout", AXES)
def test_pooling_of_one_image_is_that_of_a_batch_of_one(layout, pool, rng):
    shape = {"NCHW": (3, 5, 4), "NHWC": (5, 4, 3), "NCDHW": (3, 2, 5, 4), "NDHWC": (2, 5, 4, 3)}[layout]
    x = jnp.asarray(rng.permutation(int(np.prod(shape))).reshape(shape), jnp.float32)

    def one(x):
        return pool(x, 2, stride=1, padding="SAME", layout=layout)

    def batch(x):
        return pool(x[None], 2, stride=1, padding="SAME", layout=layout)[0]

    weights = jnp.asarray(rng.normal(size=shape), jnp.float32)
    for alone, among in zip(value_and_gradient(one, x, weights), value_and_gradient(batch, x, weights), strict=True):
        assert alone.shape == shape
        np.testing.assert_array_equal(alone, among)


def test_padding_by_name_follows_symbolic_sizes_where_it_can():
    (n,) = jax.export.symbolic_shape("n")

    def output_shape(extent, stride):
        x = jax.ShapeDtypeStruct((1, 1, extent, 8), jnp.float32)
        return jax.eval_shape(lambda x: max_pool(x, 3, stride=stride, padding="SAME", layout="NCHW"), x).shape

    assert output_shape(n, 1) == (1, 1, n, 8)
    assert output_shape(2 * n, 2) == (1, 1, n, 4)
    with pytest.raises(
        BadParamError, match=r"^max_pool: padding must be in numbers where it depends on a symbolic size"
    ):
        output_shape(n, 2)


def test_avg_pool_of_many_bfloat16_ones_is_one():
    x = jnp.ones((1, 1, 64, 64), jnp.bfloat16)
    assert avg_pool(x, 64, layout="NCHW")[0, 0, 0, 0] == 1
    # 64 windows of width 64 hold the last column.
    grad = jax.grad(
        lambda x: jnp.sum(avg_pool(x, (1, 64), stride=1, padding=(0, 63), layout="NCHW").astype(jnp.float32))
    )(x)
    np.testing.assert_array_equal(grad.astype(np.float32), 1)


def test_pooling_keeps_float64(rng):
    geometry = ((5, 5), (3, 3), (1, 1), (1, 1))
    with jax.enable_x64(True):
        x, cotangent = rng.normal(size=(1, 1, 5, 5)), rng.normal(size=(1, 1, 5, 5))
        for kind in ("max", "mean"):
            actual = value_and_gradient(pooled(kind, geometry), x, cotangent)
            for one, exact in zip(actual, expected(kind, x, cotangent, geometry), strict=True):
                assert one.dtype == jnp.float64
                np.testing.assert_allclose(one, exact, rtol=1e-14, atol=1e-15)


def test_max_pool_gradient_goes_to_the_first_of_equals():
    x = np.zeros((1, 1, 3, 3), np.float32)
    x[0, 0, 0, 2] = x[0, 0, 1, 0] = x[0, 0, 2, 1] = 1  # the first row has its maximum last
    for given in (x, np.where(x == 0, -0.0, x - 1).astype(np.float32)):  # -0.0 and 0.0 are equal as well
        grad = jax.grad(lambda x: max_pool(x, 3, layout="NCHW")[0, 0, 0, 0])(given)
        first = (0, 2) if given is x else (0, 0)
        assert [*zip(*np.nonzero(grad[0, 0]), strict=True)] == [first]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_max_pool_passes_nan_on_and_its_gradient_to_the_first(dtype):
    x = np.array([[3, np.inf, 2, 1], [np.nan, -np.nan, 0, 1], [1, 2, 3, 4]], np.float32)[None, None]
    x = jnp.asarray(x, dtype)
    y, grad = value_and_gradient(lambda x: max_pool(x, 2, stride=1, layout="NCHW"), x, jnp.ones((1, 1, 2, 3), dtype))
    np.testing.assert_array_equal(y[0, 0].astype(np.float32), [[np.nan, np.nan, 2], [np.nan, np.nan, 4]])
    # NaN at (1, 0) is the first in two windows, that at (1, 1) in the two to its right.
    expected_grad = [[0, 0, 1, 0], [2, 2, 0, 0], [0, 0, 0, 1]]
    np.testing.assert_array_equal(grad[0, 0].astype(np.float32), expected_grad)


def test_max_pool_never_takes_padding():
    for value in (-1.0, -np.inf, np.finfo(np.float32).min):
        x = np.full((1, 1, 3, 3), value, np.float32)
        y, grad = value_and_gradient(
            lambda x: max_pool(x, 3, stride=2, padding=2, layout="NCHW"), x, jnp.ones((1, 1, 3, 3))
        )
        np.testing.assert_array_equal(y, np.full((1, 1, 3, 3), value, np.float32))
        # Windows start at -2, 0 and 2, so the first elements inside are at 0, 0 and 2.
        np.testing.assert_array_equal(grad[0, 0], [[4, 0, 2], [0, 0, 0], [2, 0, 1]])


def test_max_pool_keeps_nan_and_infinity_of_cotangents_in_their_place(rng):
    x = rng.permutation(36).reshape(1, 1, 6, 6).astype(np.float32)
    cotangent = jnp.ones((1, 1, 3, 3)).at[0, 0, 1, 1].set(jnp.nan).at[0, 0, 0, 0].set(jnp.inf)
    _, grad = value_and_gradient(lambda x: max_pool(x, 2, layout="NCHW"), x, cotangent)
    assert np.isnan(grad).sum() == np.isinf(grad).sum() == 1


@pytest.mark.parametrize("pool", [max_pool, avg_pool])
@pytest.mark.parametrize("shape", [(0, 3, 4, 4), (2, 0, 4, 4)], ids=str)
def test_pooling_of_no_images(shape, pool):
    y, grad = value_and_gradient(lambda x: pool(x, 2, layout="NCHW"), jnp.zeros(shape), jnp.zeros((*shape[:2], 2, 2)))
    assert y.shape == (*shape[:2], 2, 2)
    assert grad.shape == shape


@pytest.mark.parametrize("pool", [max_pool, avg_pool])
def test_pooling_gradients_scatter_nothing_and_repeat_in_every_bit(pool, rng):
    x = jnp.asarray(rng.normal(size=(4, 8, 15, 15)), jnp.float32)
    weights = jnp.asarray(rng.normal(size=(4, 8, 8, 8)), jnp.float32)
    gradient = jax.jit(jax.grad(lambda x: jnp.sum(weights * pool(x, 3, stride=2, padding=1, layout="NCHW"))))
    assert "scatter" not in gradient.lower(x).as_text()
    first = np.asarray(gradient(x))
    assert all(np.array_equal(first, gradient(x)) for _ in range(3))


@pytest.mark.slow
def test_max_pool_takes_no_temporaries_for_each_element_of_a_window():
    x = jax.ShapeDtypeStruct((4, 16, 32, 32), jnp.float32)
    gradient = jax.jit(jax.grad(lambda x: jnp.sum(jnp.sin(max_pool(x, 7, stride=1, padding=3, layout="NCHW")))))
    temporary_bytes = gradient.lower(x).compile().memory_analysis().temp_size_in_bytes
    assert temporary_bytes < 12 * 4 * 4 * 16 * 32 * 32  # twelve times x, where its windows hold 49 times x


@pytest.mark.slow
def test_max_pool_of_long_windows_runs_in_shard_map(rng):
    x = jnp.asarray(rng.normal(size=(8, 1, 40, 3)), jnp.float32)
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    fn = pooled("max", GEOMETRIES["long-window"])
    mapped = jax.shard_map(fn, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    for actual, alone in zip(*(value_and_gradient(f, x, jnp.ones(fn(x).shape)) for f in (mapped, fn)), strict=True):
        np.testing.assert_array_equal(actual, alone)
    tangent = jax.jvp(jax.jit(mapped), (x,), (x,))[1]
    np.testing.assert_array_equal(tangent, fn(x))  # the tangent x gives each window its maximum


def test_avg_pool_keeps_nothing_for_its_gradient(rng):
    x = jnp.asarray(rng.normal(size=(1, 2, 6, 6)), jnp.float32)
    pull_back = jax.vjp(lambda x: avg_pool(x, 2, layout="NCHW"), x)[1]
    assert jax.tree.leaves(pull_back) == []


def test_explain_shows_pooling(rng):
    def loss(x):
        return jnp.sum(avg_pool(max_pool(x, 3, stride=2, padding=1, layout="NCHW"), 2, layout="NCHW"))

    rows = lowering.explain(jax.grad(loss), np.zeros((2, 3, 8, 8), np.float32)).rows
    found = [(row.operator, row.implementation) for row in rows]
    means = [(name, "xla_side_by_side") for name in ("avg_pool", "avg_pool_backward")]
    assert found == [("max_pool", "reference"), *means, ("max_pool_backward", "reference")]


@pytest.mark.parametrize("kind", ["max", "mean", "mean-inside"])
def test_pooling_along_one_axis_equals_loops_in_float64(kind, rng):
    geometry = (9,), (3,), (2,), ((1, 0),)
    x, cotangent = make_case(rng, geometry)
    truth = expected(kind, x, cotangent, geometry)
    for layout, move in (("NCL", (0, 1, 2)), ("NLC", (0, 2, 1))):
        fn = pooled(kind, geometry, layout)
        found = value_and_gradient(fn, jnp.asarray(x.transpose(move)), jnp.asarray(cotangent.transpose(move)))
        for array, each in zip(found, truth, strict=True):
            np.testing.assert_allclose(array, each.transpose(move), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("pool", [max_pool, avg_pool])
def test_pooling_takes_several_batch_axes(pool, rng):
    x = jnp.asarray(rng.normal(size=(2, 3, 7, 6, 4)), jnp.float32)
    each = [pool(images, 3, stride=2, padding="SAME", layout="NHWC") for images in x]
    np.testing.assert_array_equal(pool(x, 3, stride=2, padding="SAME", layout="NHWC"), jnp.stack(each))


X = np.zeros((2, 3, 4, 5), np.float32)
FORMS = 'be "SAME", "VALID", an integer, or 2 of these: an integer or a pair (before, behind)'
LAYOUTS = "NCL, NLC, NCHW, NHWC, NCDHW, NDHWC"
REFUSALS = {
    "none": (None, 2, {}, "x must be given; got None"),
    "rank": (X[0, 0, 0], 2, {}, "x must have at least 2 axes; got float32[5]"),
    "dtype": (X.astype(np.int32), 2, {}, "x must be floating point; got int32[2, 3, 4, 5]"),
    "layout": (X, 2, {"layout": "NCWH"}, f"layout must be one of {LAYOUTS}; got 'NCWH', did you mean NCHW?"),
    "layout-missing": (
        X[0],
        2,
        {"layout": None},
        "layout must be NCL, NLC, NCHW or NHWC, as x has 3 axes and there is no default; got None",
    ),
    "layout-missing-4": (
        X,
        2,
        {"layout": None},
        "layout must be NCHW, NHWC, NCDHW or NDHWC, as x has 4 axes and there is no default; got None",
    ),
    "layout-type": (X, 2, {"layout": 3}, f"layout must be one of {LAYOUTS}; got 3"),
    "layout-rank": (
        X[0],
        2,
        {"layout": "NDHWC"},
        "x must have at least 4 axes, as layout NDHWC says; got float32[3, 4, 5]",
    ),
    "window-float": (X, 2.0, {}, "window must be an integer or 2 of them; got 2.0"),
    "window-array": (X, jnp.int32(2), {}, "window must be an integer or 2 of them, not an array; got int32[]"),
    "window-length": (X, (2, 2, 2), {}, "window must be an integer or 2 of them; got (2, 2, 2)"),
    "window-zero": (X, (2, 0), {}, "window must be at least 1; got (2, 0)"),
    "window-large": (X, (6, 2), {}, "window must be no larger than x with its padding, (4, 5); got (6, 2)"),
    "stride-zero": (X, 2, {"stride": 0}, "stride must be at least 1; got (0, 0)"),
    "stride-bool": (X, 2, {"stride": (True, 1)}, "stride must be an integer or 2 of them; got (True, 1)"),
    "padding-negative": (
        X,
        2,
        {"padding": (-1, 0)},
        "padding must be at least 0 and less than the window (2, 2); got (-1, 0)",
    ),
    "padding-large": (
        X,
        (3, 2),
        {"padding": 2},
        "padding must be at least 0 and less than the window (3, 2); got (2, 2)",
    ),
    "padding-of-one-side": (
        X,
        (3, 2),
        {"padding": ((2, 3), (1, 0))},
        "padding must be at least 0 and less than the window (3, 2); got ((2, 3), (1, 0))",
    ),
    **{
        f"padding-{name}": (X, 2, {"padding": value}, f"padding must {FORMS}; got {value!r}")
        for name, value in {
            "word": "same",
            "float": 1.0,
            "length": (1, 1, 1),
            "triple": ((1, 1, 1), 0),
            "bool": ((True, 1), 0),
            "nested": (((0, 1), 0), 0),
        }.items()
    },
    "window-endless": (X, 2**40, {"padding": 2**40 - 1}, f"window must be at most {2**31 - 1}; got {(2**40, 2**40)}"),
    "stride-endless": (
        X,
        2,
        {"stride": (1, 10**5000)},
        f"stride must be at most {2**31 - 1}; got (1, an integer of 16610 bits)",
    ),
    "padding-endless": (
        X,
        2**31 - 1,
        {"padding": 2**31 - 2},
        f"padding must make x at most {2**31 - 1} positions long; got {(2**31 - 2, 2**31 - 2)}",
    ),
    "extent": (X[:, :, :0], 2, {"padding": 1}, "x must have spatial extents of at least 1; got (0, 5)"),
}


@pytest.mark.parametrize("pool", [max_pool, avg_pool])
@pytest.mark.parametrize(("x", "window", "attributes", "words"), REFUSALS.values(), ids=REFUSALS)
def test_pooling_refuses_bad_input(x, window, attributes, words, pool):
    def call(*operands):
        return pool(*operands, window, **{"layout": "NCHW"} | attributes)

    asks = (call, jax.jit(call), lambda *operands: lowering.explain(call, *operands))
    for ask in asks:
        with pytest.raises(BadParamError) as refusal:
            ask(x)
        assert str(refusal.value) == f"{pool.__name__}: {words}"
        assert refusal.value.status == "MCDNN_STATUS_BAD_PARAM"


@pytest.mark.parametrize(
    "call",
    [
        lambda: max_pool(X, 2),
        lambda: avg_pool(X, window=2),
        lambda: jaxops.local_response_norm(X),
        lambda: jaxops.divisive_norm(X, X),
    ],
)
def test_images_without_a_layout_are_refused_in_our_words(call):
    """And not by Python, which would not name the choices."""
    with pytest.raises(BadParamError, match=r"layout must be NCHW.* as x has 4 axes and there is no default"):
        call()


@pytest.mark.parametrize("name", ["max_pool", "avg_pool", "local_response_norm", "divisive_norm"])
def test_type_checkers_and_help_say_that_a_layout_is_needed(name):
    layout = inspect.signature(getattr(jaxops, name)).parameters["layout"]
    assert layout.default is inspect.Parameter.empty


def test_avg_pool_refuses_other_than_bool():
    with pytest.raises(BadParamError, match="count_include_pad must be a bool; got 'no'"):
        avg_pool(X, 2, count_include_pad="no", layout="NCHW")


def images(*shape):
    """Values far enough apart that finite differences see the same maxima."""
    return lambda rng: (rng.permutation(int(np.prod(shape))).reshape(shape).astype(np.float32) / 16,)


def case(name, pool, shape, *args, **attributes):
    return contract.Case(
        name,
        lambda x: pool(x, *args, **attributes),
        images(*shape),
        differentiable=(0,),
        batched=(0,),
        operator=pool.__name__,
        backward=f"{pool.__name__}_backward",
    )


CASES = [
    case("max-overlapping", max_pool, (8, 1, 5, 4), 3, stride=2, padding=1, layout="NCHW"),
    case("max-volume", max_pool, (8, 2, 3, 3, 1), (2, 2, 3), stride=2, padding=(1, 0, 1), layout="NDHWC"),
    case("mean-inside", avg_pool, (8, 4, 3, 2), 3, stride=2, padding=1, count_include_pad=False, layout="NHWC"),
]


@pytest.mark.parametrize("promise", contract.PROMISES, ids=contract.promise_name)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_pooling_keeps_promise(case, promise):
    promise(case)


@pytest.mark.parametrize("dtype", [jnp.float8_e4m3fn, jnp.float8_e5m2fnuz], ids=lambda dtype: dtype.__name__)
def test_max_pool_takes_dtypes_without_infinity(dtype):
    x = jnp.arange(-8.0, 8.0).reshape(1, 1, 4, 4).astype(dtype)
    values = np.asarray(x, np.float64).reshape(2, 2, 2, 2).max((1, 3))
    np.testing.assert_array_equal(np.asarray(max_pool(x, 2, layout="NCHW"), np.float64)[0, 0], values)
