"""`grid_sample`, alone and after `affine_grid`: values and gradients against loops in NumPy float64 and PyTorch."""

import functools
import itertools

import contract
import grid_sample_oracle as oracle
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxops
import lowering
from jaxops import affine_grid, grid_sample
from jaxops._checks.arguments import BadParamError

# images, channels, extents of the images, extents of the output
SHAPES = {
    "larger": ((2, 3), (4, 5), (6, 7)),
    "smaller": ((3, 9), (7, 6), (2, 3)),
    "one-channel": ((3, 1), (3, 3), (4, 4)),
    "one-row": ((2, 2), (1, 5), (3, 2)),
    "one-pixel": ((1, 2), (1, 1), (2, 2)),
}
VOLUMES = {
    "volume": ((2, 2), (3, 4, 5), (2, 3, 4)),
    "one-plane": ((1, 5), (1, 3, 2), (3, 2, 2)),
}
OPTIONS = {
    f"{mode}-{padding_mode}-{'centres' if align_corners else 'edges'}": {
        "mode": mode,
        "padding_mode": padding_mode,
        "align_corners": align_corners,
    }
    for mode, padding_mode, align_corners in itertools.product(
        ("bilinear", "nearest"), ("zeros", "border", "reflection"), (True, False)
    )
}


def make_case(rng, shape, dtype="float32"):
    """Points in and around the images, some of them on pixels, far away or not finite."""
    images, extents, outputs = shape
    x, dy = rng.normal(size=(*images, *extents)), rng.normal(size=(*images, *outputs))
    grid = rng.uniform(-1.6, 1.6, size=(images[0], *outputs, len(outputs)))
    return tuple(array.astype(dtype) for array in (x, grid, dy))


def on_pixels(rng, grid, extents):
    """A grid whose points are at pixel centres, exactly so in float32 where an extent is 2**k + 1."""
    pixels = [rng.integers(-1, n + 1, size=grid.shape[:-1]) for n in reversed(extents)]
    return np.stack([-1 + 2 * p / (n - 1) for p, n in zip(pixels, reversed(extents), strict=True)], -1)


def value_and_gradients(x, grid, dy, **options):
    sample = jax.jit(functools.partial(grid_sample, **options))
    y, pull_back = jax.vjp(sample, jnp.asarray(x), jnp.asarray(grid))
    return y, *pull_back(jnp.asarray(dy))


def assert_all_close(actual, expected, rtol=1e-4, atol=2e-5):
    for one, exact in zip(actual, expected, strict=True):
        np.testing.assert_allclose(np.asarray(one).astype(np.float64), exact, rtol=rtol, atol=atol)


@pytest.mark.sampled
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_grid_sample_equals_loops_in_float64(shape, rng):
    case = make_case(rng, shape)
    assert_all_close(value_and_gradients(*case), oracle.grid_sample(*case))


@pytest.mark.sampled
@pytest.mark.parametrize("shape", [SHAPES["smaller"], *VOLUMES.values()], ids=["image", *VOLUMES])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_grid_sample_with_options_equals_loops_in_float64(options, shape, rng):
    x, grid, dy = make_case(rng, shape)
    case = x, 2.5 * grid, dy  # far enough outside to be reflected twice
    assert_all_close(value_and_gradients(*case, **options), oracle.grid_sample(*case, **options))


@pytest.mark.sampled
@pytest.mark.parametrize("implementation", ["reference", "xla_sorted_runs"])
@pytest.mark.parametrize("options", ["bilinear-reflection-edges", "nearest-zeros-centres"])
def test_grid_sample_has_the_same_meaning_in_every_form(options, implementation, rng):
    case = make_case(rng, VOLUMES["volume"])
    with lowering.use(implementation):
        actual = value_and_gradients(*case, **OPTIONS[options])
    assert_all_close(actual, oracle.grid_sample(*case, **OPTIONS[options]))


LINE = jnp.asarray([[[[1.0, 5.0, 2.0]]]])  # pixels at -1, 0 and 1, or at -2/3, 0 and 2/3


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("padding_mode", "align_corners", "worked"),
    [
        # a point: the value there, and the slope
        ("border", True, {-1.5: (1, 0), -1: (1, 0), -0.5: (3, 4), 0: (5, -3), 1: (2, 0), 9: (2, 0)}),
        ("border", False, {-1: (1, 0), -0.875: (1, 0), -0.5: (2, 6), 0.5: (2.75, -4.5), 1: (2, 0)}),
        ("reflection", True, {-1.5: (3, -4), -1: (1, 0), 1: (2, 0), 1.5: (3.5, 3), 2.5: (3, -4), -2.5: (3.5, 3)}),
        ("reflection", False, {-1: (1, 0), -1.125: (1, 0), -1.5: (2, -6), 1.5: (2.75, 4.5), 3.5: (2, 6)}),
    ],
)
def test_grid_sample_pads_as_worked_by_hand(padding_mode, align_corners, worked):
    def sampled(gx):
        grid = jnp.stack([gx, jnp.zeros_like(gx)], axis=-1)[None, None]
        return grid_sample(LINE, grid, padding_mode=padding_mode, align_corners=align_corners)[0, 0, 0]

    points = jnp.asarray([*worked], jnp.float32)
    values, slopes = zip(*worked.values(), strict=True)
    np.testing.assert_allclose(sampled(points), values, atol=1e-6)
    np.testing.assert_allclose(jax.grad(lambda gx: sampled(gx).sum())(points), slopes, atol=1e-5)
    tangents = jax.jvp(sampled, (points,), (jnp.ones_like(points),))[1]
    np.testing.assert_allclose(tangents, slopes, atol=1e-5)


def test_grid_sample_takes_the_even_pixel_halfway_between_two():
    points = jnp.asarray([[[[-1.5, 0], [-0.5, 0], [-0.25, 0], [0.5, 0], [1.5, 0], [1.75, 0]]]])
    dy = jnp.arange(1.0, 7)[None, None, None]
    y, dx, dgrid = value_and_gradients(LINE, points, dy, mode="nearest")
    np.testing.assert_array_equal(y[0, 0, 0], [1, 1, 5, 2, 2, 0])  # at pixels -1/2, 1/2, 3/4, 3/2, 5/2 and 11/4
    np.testing.assert_array_equal(dx[0, 0, 0], [3, 3, 9])
    np.testing.assert_array_equal(dgrid, np.zeros(points.shape))


@pytest.mark.sampled
@pytest.mark.parametrize("padding_mode", ["border", "reflection"])
@pytest.mark.parametrize("mode", ["bilinear", "nearest"])
def test_grid_sample_reads_nothing_at_nan_whatever_the_padding(mode, padding_mode):
    x = np.full((1, 2, 3, 4), np.nan, np.float32)
    grid = np.array([[[[np.nan, 0.5], [0.5, np.nan]]]], np.float32)
    dy = np.full((1, 2, 1, 2), np.nan, np.float32)
    results = value_and_gradients(x, grid, dy, mode=mode, padding_mode=padding_mode)
    for result, shape in zip(results, (dy.shape, x.shape, grid.shape), strict=True):
        np.testing.assert_array_equal(result, np.zeros(shape))


@pytest.mark.long
@pytest.mark.parametrize("align_corners", [True, False])
def test_grid_sample_takes_infinity_for_far_outside_only_with_a_border(align_corners):
    grid = jnp.asarray([[[[np.inf, 0], [-np.inf, 0], [3e38, 0], [0, np.inf]]]])
    dy = jnp.ones((1, 1, 1, 4))
    y, _, dgrid = value_and_gradients(LINE, grid, dy, padding_mode="border", align_corners=align_corners)
    np.testing.assert_allclose(y[0, 0, 0], [2, 1, 2, 5], atol=1e-6)
    assert not np.any(dgrid[0, 0, :3])
    reflected = grid_sample(LINE, grid, padding_mode="reflection", align_corners=align_corners)
    np.testing.assert_array_equal(np.isfinite(reflected), True)
    np.testing.assert_array_equal(reflected[0, 0, 0, :2], 0)


@pytest.mark.slow
def test_grid_sample_takes_the_right_hand_derivative_at_pixel_centres(rng):
    x, grid, dy = make_case(rng, ((2, 3), (5, 9), (8, 8)))
    grid = on_pixels(rng, grid, (5, 9)).astype(np.float32)
    assert_all_close(value_and_gradients(x, grid, dy), oracle.grid_sample(x, grid, dy))
    # Between the first two pixels and right of the last one, worked by hand.
    line = jnp.asarray([[[[1.0, 5.0]]]])
    for at, slope in ((-1.0, (5 - 1) / 2), (1.0, (0 - 5) / 2)):
        grad = jax.grad(lambda p: grid_sample(line, p)[0, 0, 0, 0])(jnp.asarray([[[[at, 0.0]]]]))
        np.testing.assert_array_equal(grad.ravel(), [slope, 0])


@pytest.mark.sampled
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 3e38, -3e38, 50.0], ids=str)
@pytest.mark.parametrize("coordinate", [0, 1])
def test_grid_sample_skips_points_that_no_pixel_is_near(coordinate, bad, rng):
    x, grid, dy = make_case(rng, SHAPES["larger"])
    grid[1, 2, 3, coordinate] = bad
    x[:, :, 0, 0] = np.nan  # nothing is read for such a point
    dy[1, :, 2, 3] = np.nan
    y, dx, dgrid = value_and_gradients(x, grid, dy)
    assert not np.any(np.asarray(y)[1, :, 2, 3])
    assert not np.any(np.asarray(dgrid)[1, 2, 3])
    assert np.isfinite(dx).all()


def test_grid_sample_counts_what_lies_outside_as_zero():
    x = jnp.ones((1, 1, 2, 2))
    points = jnp.asarray([[[[-2.0, -1], [2.0, 1], [-3.0, 0], [-2.9, -1], [0, 0]]]])  # pixels are 2 apart
    np.testing.assert_allclose(grid_sample(x, points)[0, 0, 0], [0.5, 0.5, 0, 0.05, 1], atol=1e-6)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("shape", "options"),
    [(SHAPES["larger"], {}), (VOLUMES["volume"], OPTIONS["bilinear-reflection-edges"])],
    ids=["image", "volume"],
)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_grid_sample_rounds_once(dtype, shape, options, rng):
    case = [jnp.asarray(array, dtype) for array in make_case(rng, shape)]
    results = value_and_gradients(*case, **options), oracle.grid_sample(*case, **options)
    for actual, exact in zip(*results, strict=True):
        assert actual.dtype == dtype
        tolerance = 0.501 * float(jnp.finfo(dtype).eps)
        np.testing.assert_allclose(np.asarray(actual).astype(np.float64), exact, rtol=tolerance, atol=1e-5)


def test_grid_sample_adds_many_gradients_in_float32():
    """4096 points take one pixel; in bfloat16 their sum would stop at 256."""
    x, grid = jnp.ones((1, 1, 1, 1), jnp.bfloat16), jnp.zeros((1, 64, 64, 2), jnp.bfloat16)
    grad = jax.grad(lambda x: jnp.sum(grid_sample(x, grid).astype(jnp.float32)))(x)
    assert grad[0, 0, 0, 0] == 4096


def test_grid_sample_takes_wider_grids_than_images(rng):
    x, grid, dy = make_case(rng, SHAPES["larger"])
    y, dx, dgrid = value_and_gradients(jnp.asarray(x, jnp.bfloat16), grid, jnp.asarray(dy, jnp.bfloat16))
    assert (y.dtype, dx.dtype, dgrid.dtype) == (jnp.bfloat16, jnp.bfloat16, jnp.float32)


@pytest.mark.long
def test_spatial_transformer_keeps_float64(rng):
    with jax.enable_x64(True):
        case = make_case(rng, SHAPES["larger"], "float64")
        assert_all_close(value_and_gradients(*case), oracle.grid_sample(*case), 1e-12, 1e-13)
        theta = rng.normal(size=(2, 2, 3))
        np.testing.assert_allclose(affine_grid(theta, (2, 1, 4, 5)), oracle.affine_grid(theta, (4, 5)), rtol=1e-14)
        volume, options = make_case(rng, VOLUMES["volume"], "float64"), OPTIONS["bilinear-reflection-edges"]
        assert_all_close(value_and_gradients(*volume, **options), oracle.grid_sample(*volume, **options), 1e-12, 1e-13)


@pytest.mark.long
def test_grid_sample_repeats_in_every_bit(rng):
    case = make_case(rng, ((2, 4), (9, 9), (30, 30)))
    first = value_and_gradients(*case)
    for again in (value_and_gradients(*case) for _ in range(3)):
        assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize(("channels", "limit"), [(8, 2.5), (64, 2)])
def test_grid_sample_takes_no_large_temporaries_for_its_gradient(channels, limit):
    shapes = (16, channels, 32, 32), (16, 32, 32, 2)
    x, grid = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)
    gradient = jax.jit(jax.grad(lambda x, grid: jnp.sum(jnp.sin(grid_sample(x, grid))), (0, 1)))
    temporary_bytes = gradient.lower(x, grid).compile().memory_analysis().temp_size_in_bytes
    assert temporary_bytes < limit * 4 * x.size  # its products, and the pixels that are read, are four times x each


def test_grid_sample_exports_with_symbolic_sizes(rng):
    n, c, h, w = jax.export.symbolic_shape("n, c, h, w")
    x, grid, dy = make_case(rng, SHAPES["larger"])

    def both(x, grid, dy):
        y, pull_back = jax.vjp(grid_sample, x, grid)
        return y, *pull_back(dy)

    arrays = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((n, c, h, w), (n, 6, 7, 2), (n, c, 6, 7))]
    exported = jax.export.export(jax.jit(both))(*arrays)
    assert_all_close(exported.call(x, grid, dy), oracle.grid_sample(x, grid, dy))


@pytest.mark.long
@pytest.mark.parametrize("padding_mode", ["zeros", "reflection"])
def test_grid_sample_of_volumes_exports_with_symbolic_sizes(padding_mode, rng):
    d, h, w, points = jax.export.symbolic_shape("d, h, w, points")
    shapes = (2, 2, d, h, w), (2, points, 1, 2, 3), (2, 2, points, 1, 2)
    arrays = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    both = jax.jit(functools.partial(value_and_gradients, padding_mode=padding_mode))
    exported = jax.export.export(both)(*arrays)
    for extents in ((3, 4, 5), (1, 2, 1)):
        case = make_case(rng, ((2, 2), extents, (3, 1, 2)))
        assert_all_close(exported.call(*case), oracle.grid_sample(*case, padding_mode=padding_mode))


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("shape", "options"),
    [
        (((0, 3), (3, 4), (2, 2)), {}),
        (((2, 0), (3, 4), (2, 2)), {}),
        (((2, 3), (3, 4), (0, 2)), {}),
        (((2, 0), (3, 4, 2), (2, 2, 1)), OPTIONS["bilinear-border-edges"]),
        (((2, 3), (3, 4, 2), (2, 0, 1)), OPTIONS["nearest-reflection-centres"]),
    ],
    ids=str,
)
def test_grid_sample_of_nothing(shape, options, rng):
    case = make_case(rng, shape)
    results = value_and_gradients(*case, **options)
    assert [array.shape for array in results] == [case[i].shape for i in (2, 0, 1)]


@pytest.mark.parametrize(
    ("shape", "options"),
    [(VOLUMES["volume"], {}), (SHAPES["larger"], {"mode": "nearest"})],
    ids=["volumes", "nearest"],
)
def test_one_loop_over_the_points_refuses_what_it_is_slow_for(shape, options, rng):
    x, grid, _ = make_case(rng, shape)
    (row,) = lowering.explain(functools.partial(grid_sample, **options), x, grid, target="cpu").rows
    assert row.implementation == "reference"
    reasons = {refusal.kernel: refusal.reason for refusal in row.refusals}
    assert "takes longer for volumes" in reasons["xla_few_channels"]


@pytest.mark.long
def test_grid_sample_sorts_gradients_on_gpus(rng):
    x, grid, dy = (jnp.asarray(array) for array in make_case(rng, SHAPES["larger"]))
    back = jax.jit(lambda x, grid, dy: jax.vjp(grid_sample, x, grid)[1](dy))
    row = next(row for row in lowering.explain(back, x, grid, dy, target="cuda-h100").rows if "back" in row.operator)
    assert row.implementation == "xla_sorted_runs"
    with lowering.use("xla_sorted_runs"), pytest.raises(jaxops.NotSupportedError, match="no points to sort"):
        value_and_gradients(*make_case(rng, ((2, 3), (3, 4), (0, 2))))
    assert back.trace(x, grid, dy).lower(lowering_platforms=("cuda",)).as_text().count("stablehlo.sort") == 1


@pytest.mark.parametrize("shape", ["larger", "smaller", "one-row"])
def test_spatial_transformer_equals_torch(shape, rng):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    images, _, outputs = SHAPES[shape]
    x, _, dy = make_case(rng, SHAPES[shape])
    theta = rng.normal(size=(images[0], 2, 3)).astype(np.float32)

    def ours(x, theta):
        return grid_sample(x, affine_grid(theta, (*images, *outputs)))

    y, pull_back = jax.vjp(ours, x, theta)
    their_x, their_theta = (torch.from_numpy(array).requires_grad_() for array in (x, theta))
    grid = torch.nn.functional.affine_grid(their_theta, (*images, *outputs), align_corners=True)
    their_y = torch.nn.functional.grid_sample(their_x, grid, align_corners=True)
    their_y.backward(torch.from_numpy(dy))
    theirs = their_y.detach(), their_x.grad, their_theta.grad
    assert_all_close((y, *pull_back(jnp.asarray(dy))), [array.numpy() for array in theirs])


@pytest.mark.parametrize("shape", [SHAPES["larger"], VOLUMES["volume"]], ids=["image", "volume"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_grid_sample_with_options_equals_torch(options, shape, rng):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    x, grid, dy = make_case(rng, shape)
    case = x, 2.5 * grid, dy
    their_x, their_grid, their_dy = map(torch.from_numpy, case)
    their_x.requires_grad_(), their_grid.requires_grad_()
    their_y = torch.nn.functional.grid_sample(their_x, their_grid, **options)
    their_y.backward(their_dy)
    theirs = [array.numpy() for array in (their_y.detach(), their_x.grad, their_grid.grad)]
    assert_all_close(value_and_gradients(*case, **options), theirs)


def test_explain_shows_the_spatial_transformer(rng):
    def loss(x, theta):
        return jnp.sum(grid_sample(x, affine_grid(theta, (2, 3, 4, 4))))

    operands = np.zeros((2, 3, 4, 4), np.float32), np.zeros((2, 2, 3), np.float32)
    rows = lowering.explain(jax.grad(loss, (0, 1)), *operands).rows
    names = ["affine_grid", "grid_sample", "grid_sample_backward", "affine_grid_backward"]
    assert [row.operator for row in rows] == names


X, GRID = np.zeros((2, 3, 4, 5), np.float32), np.zeros((2, 6, 7, 2), np.float32)
VOLUME = np.zeros((2, 3, 4, 5, 6), np.float32)


def trace(*shapes):
    return jax.eval_shape(grid_sample, *(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes))


REFUSALS = {
    "x": (lambda: grid_sample(None, GRID), "grid_sample: x must be given; got None"),
    "grid": (lambda: grid_sample(X, None), "grid_sample: grid must be given; got None"),
    "x-rank": (
        lambda: grid_sample(X[0], GRID),
        "grid_sample: x must have shape (N, C, H_in, W_in) or (N, C, D_in, H_in, W_in); got float32[3, 4, 5]",
    ),
    "mode": (
        lambda: grid_sample(X, GRID, mode="bicubic"),
        "grid_sample: mode must be one of bilinear, nearest; got 'bicubic'",
    ),
    "padding-mode": (
        lambda: grid_sample(X, GRID, padding_mode=None),
        "grid_sample: padding_mode must be one of zeros, border, reflection; got None",
    ),
    "align-corners": (
        lambda: grid_sample(X, GRID, align_corners=1),
        "grid_sample: align_corners must be a bool; got 1",
    ),
    "grid-of-volumes": (
        lambda: grid_sample(VOLUME, GRID),
        "grid_sample: grid must have shape (N, D, H, W, 3); got float32[2, 6, 7, 2]",
    ),
    "grid-of-volumes-last": (
        lambda: grid_sample(VOLUME, GRID[:, None]),
        "grid_sample: grid must have shape (2, D, H, W, 3); got float32[2, 1, 6, 7, 2]",
    ),
    "volumes": (
        lambda: grid_sample(VOLUME[:, :, :0], np.zeros((2, 1, 1, 1, 3), np.float32)),
        "grid_sample: x must have shape (..., C, D_in, H_in, W_in) with at least one pixel; got float32[2, 3, 0",
    ),
    "grid-rank": (lambda: grid_sample(X, GRID[0]), "grid_sample: grid must have shape (N, H, W, 2); got float32[6,"),
    "grid-last": (
        lambda: grid_sample(X, GRID[..., :1]),
        "grid_sample: grid must have shape (2, H, W, 2); got float32[2, 6, 7, 1]",
    ),
    "grid-batch": (lambda: grid_sample(X, GRID[:1]), "grid_sample: grid must have shape (2, H, W, 2); got"),
    "pixels": (lambda: grid_sample(X[:, :, :0], GRID), "grid_sample: x must have shape (..., C, H_in, W_in) with at"),
    "large": (
        lambda: trace((1, 2**10, 2**11, 2**10), (1, 2, 2, 2)),
        "grid_sample: x must have images of less than 2**31",
    ),
    "integers": (lambda: grid_sample(np.int32(X), GRID), "grid_sample: x must be floating point; got int32[2, 3,"),
    "integer-grid": (lambda: grid_sample(X, np.int32(GRID)), "grid_sample: grid must be floating point; got int32"),
}


@pytest.mark.parametrize(("call", "words"), REFUSALS.values(), ids=REFUSALS)
def test_grid_sample_refuses_bad_input(call, words):
    with pytest.raises(BadParamError) as refusal:
        call()
    assert str(refusal.value).startswith(words)
    assert refusal.value.status == "MCDNN_STATUS_BAD_PARAM"


def between_pixels(rng, extents=(3, 4), align_corners=True, within=(0.2, 0.8)):
    """Images or volumes, and points that finite differences do not move over a pixel."""
    rank = len(extents)
    x = rng.normal(size=(8, 2, *extents)).astype(np.float32)
    shape, sizes = (8, *[2] * rank, rank), np.array(extents[::-1])
    pixels = rng.integers(-2, 4, size=shape) + rng.uniform(*within, size=shape)
    grid = 2 * pixels / (sizes - 1) - 1 if align_corners else (2 * pixels + 1) / sizes - 1
    return x, grid.astype(np.float32)


def case_of_options(name, extents, within=(0.2, 0.8), **options):
    suffix = "" if len(extents) == 2 else "_3d"
    align_corners = options.get("align_corners", True)
    return contract.Case(
        name,
        functools.partial(grid_sample, **options),
        functools.partial(between_pixels, extents=extents, align_corners=align_corners, within=within),
        differentiable=(0, 1),
        batched=(0, 0),
        operator=f"grid_sample{suffix}",
        backward=f"grid_sample{suffix}_backward",
    )


CASES = [
    case_of_options("grid-sample", (3, 4)),
    case_of_options("grid-sample-reflection", (3, 4), padding_mode="reflection"),
    case_of_options("grid-sample-volumes-border", (2, 3, 2), padding_mode="border", align_corners=False),
    # Values jump halfway between two pixels.
    case_of_options("grid-sample-volumes-nearest", (2, 3, 2), within=(0.1, 0.4), mode="nearest"),
]


# `make test` takes an operator's first: of volumes that with one pixel for each point, not eight.
@pytest.mark.parametrize("promise", contract.PROMISES, ids=contract.promise_name)
@pytest.mark.parametrize("case", [*CASES[:2], *reversed(CASES[2:])], ids=str)
def test_grid_sample_keeps_promise(case, promise):
    promise(case)
