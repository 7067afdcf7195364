"""The kernels of grid sampling under Pallas' interpreter, against loops in NumPy float64."""

import functools

import grid_sample_oracle as oracle
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

import jaxops
import lowering
from pallas_kernels.grid_sample_points import Sampling
from pallas_kernels.tpu import grid_sample as kernel

pytestmark = pytest.mark.emulated

# images and channels, extents of the images, extents of the output, strips of channels, points of a block
CASES = {
    "odd-columns": ((2, 5), (4, 5), (3, 7), 1, 4096),
    "one-column-of-border": ((1, 128), (3, 7), (4, 4), 1, 4096),
    "blocks-of-points": ((1, 9), (3, 16), (3, 6), 1, 8),
    "two-strips": ((1, 130), (5, 6), (3, 4), 2, 4096),
    "two-parts": ((1, 256), (3, 8), (2, 4), 1, 4096),
    "one-pixel": ((1, 2), (1, 1), (2, 2), 1, 4096),
}
PADDING = {"border": 1.6, "reflection": 2.5}  # how far around the images the points lie


def draw(shape, dtype="float32", reach=1.3):
    """Images, points in and around them, and gradients; some points are at the borders, equal, or not finite."""
    rng = np.random.default_rng(0)
    images, extents, outputs = shape
    x, grad = rng.normal(size=(*images, *extents)), rng.normal(size=(*images, *outputs))
    grid = rng.uniform(-reach, reach, size=(images[0], *outputs, 2))
    grid[0, 0, 0], grid[0, -1, -1], grid[-1, 0, 1], grid[-1, 1, 0] = (-1, 1), (1, -1), (1, 1), (-1, -1)
    if outputs[0] == 3:
        grid[0, 1, 1:3], grid[0, 2, 0], grid[0, 2, 1], grid[-1, 2, 2] = 0.3, (np.nan, 0), (0.1, np.inf), (-9, -1e30)
    return jnp.asarray(x, dtype), jnp.asarray(grid, "float32"), jnp.asarray(grad, dtype)


def launched(x, grid, grad, strips=1, block_points=4096, tiles=2, **options):
    """The results of both kernels, in order: y and the gradients of x and the grid."""
    params = {
        "sampling": Sampling(**options),
        "config": {"strips": strips, "block_points": block_points, "tiles": tiles},
    }
    params["interpret"] = pltpu.InterpretParams(detect_races=True)
    (y,) = jax.jit(functools.partial(kernel.run, **params))(x, grid)
    return y, *jax.jit(functools.partial(kernel.run_backward, **params))(x, grid, grad)


def assert_all_close(actual, operands, rtol=1e-5, **options):
    x, grid, grad = (np.asarray(array).astype(np.float64) for array in operands)
    for one, like, exact in zip(
        actual, (operands[2], *operands[:2]), oracle.grid_sample(x, grid, grad, **options), strict=True
    ):
        assert (one.shape, one.dtype) == (like.shape, like.dtype)
        np.testing.assert_allclose(np.asarray(one).astype(np.float64), exact, rtol=rtol, atol=2e-5)


@pytest.mark.sampled
@pytest.mark.parametrize("align_corners", [True, False], ids=["centres", "edges"])
@pytest.mark.parametrize("name", CASES)
def test_grid_sample_kernels_agree_with_float64(name, align_corners, capfd):
    *shape, strips, block_points = CASES[name]
    operands = draw(shape)
    actual = launched(*operands, strips, block_points, align_corners=align_corners)
    assert_all_close(actual, operands, align_corners=align_corners)
    assert "RACE DETECTED" not in capfd.readouterr().out


@pytest.mark.long
@pytest.mark.sampled
@pytest.mark.parametrize("align_corners", [True, False], ids=["centres", "edges"])
@pytest.mark.parametrize("padding_mode", ["border", "reflection"])
def test_grid_sample_kernels_pad_by_pixels(padding_mode, align_corners):
    x, grid, grad = draw(CASES["odd-columns"][:3], reach=PADDING[padding_mode])
    operands = x, jnp.maximum(grid, -9), grad  # where 1e30 is reflected to, rounding decides
    options = {"padding_mode": padding_mode, "align_corners": align_corners}
    assert_all_close(launched(*operands, **options), operands, **options)


@pytest.mark.long
@pytest.mark.sampled
@pytest.mark.parametrize("name", ["odd-columns"])
def test_grid_sample_kernels_round_once(name):
    *shape, strips, block_points = CASES[name]
    operands = draw(shape, "bfloat16")
    actual = launched(*operands, strips, block_points)
    assert_all_close(actual, operands, rtol=0.51 * float(jnp.finfo("bfloat16").eps) + 1e-5)


@pytest.mark.long
def test_grid_sample_kernels_read_no_pixel_for_points_elsewhere():
    """Infinite pixels and gradients show in the points and pixels that they belong to, and in no others."""
    x, grid, grad = draw(CASES["odd-columns"][:3])
    x = x.at[0, :, 0, 0].set(jnp.inf).at[1, :, -1, -1].set(jnp.nan)
    is_finite = jnp.isfinite(grid).all(-1)[:, None]
    grad = jnp.where(is_finite, grad, jnp.inf)
    y, pull_back = jax.vjp(jaxops.grid_sample, x, grid)
    for actual, expected in zip(launched(x, grid, grad), (y, *pull_back(grad)), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=2e-5)


@pytest.mark.long
def test_grid_sample_kernels_add_equal_points_in_their_order():
    """All points read the same pixels: their gradients are added in one order, whatever the configuration."""
    x, _, grad = draw(((1, 3), (2, 3), (3, 6)))
    grid = jnp.full((1, 3, 6, 2), 0.37)
    whole = launched(x, grid, grad)
    assert_all_close(whole, (x, grid, grad))
    for one, other in zip(whole[:2], launched(x, grid, grad, block_points=8)[:2], strict=True):
        np.testing.assert_array_equal(one, other)


def test_grid_sample_launches_its_kernels():
    def step(x, grid, grad):
        y, pull_back = jax.vjp(jaxops.grid_sample, x, grid)
        return y, *pull_back(grad)

    x, grid, grad = draw(((2, 8), (8, 8), (8, 8)))
    with lowering.use("pallas"):
        text = jax.jit(step).trace(x, grid, grad).lower(lowering_platforms=("tpu",)).as_text()
    assert text.count("stablehlo.custom_call @tpu_custom_call") == 2


@pytest.mark.long
def test_grid_sample_runs_the_interpreted_kernel():
    x, grid, _ = draw(((2, 8), (4, 6), (3, 5)))

    def loss(x, grid):
        return jnp.sum(jnp.sin(jaxops.grid_sample(x, grid)))

    with lowering.use("interpret"):
        interpreted = jax.jit(jax.value_and_grad(loss, (0, 1)))(x, grid)
    expected = jax.value_and_grad(loss, (0, 1))(x, grid)
    for actual, other in zip(jax.tree.leaves(interpreted), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(actual, other, rtol=2e-5, atol=2e-6)


X, GRID = ((2, 4, 6, 8), "float32"), ((2, 3, 5, 2), "float32")
REFUSALS = {
    "x": (((2, 4, 6, 8), "float16"), GRID, {}, "Mosaic TPU computes on float32 and bfloat16; x is float16"),
    "grid": (X, ((2, 3, 5, 2), "float16"), {}, "Mosaic TPU computes on float32 and bfloat16; grid is float16"),
    "nearest": (X, GRID, {"mode": "nearest"}, 'the kernels interpolate between four pixels; mode is "nearest"'),
    "no-points": (X, ((2, 0, 5, 2), "float32"), {}, "there are no points"),
    "no-images": (((0, 4, 6, 8), "float32"), ((0, 3, 5, 2), "float32"), {}, "there is nothing to compute"),
    "large": (
        ((2, 4, 512, 512), "float32"),
        GRID,
        {},
        "VMEM does not hold images of 512 by 512 pixels as the kernels need them",
    ),
}


@pytest.mark.parametrize(("x", "grid", "options", "words"), REFUSALS.values(), ids=REFUSALS)
def test_grid_sample_kernels_refuse_in_words(x, grid, options, words):
    operands = (jax.ShapeDtypeStruct(*x), jax.ShapeDtypeStruct(*grid))
    assert kernel.refuses(None, *operands, sampling=Sampling(**options)) == words
