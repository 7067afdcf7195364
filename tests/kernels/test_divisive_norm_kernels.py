"""The kernels of divisive normalization under Pallas' interpreter, against NumPy float64."""

import functools

import jax
import jax.numpy as jnp
import local_response_norm_oracle as oracle
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

import jaxops
import lowering
from jaxops.divisive_norm import Images
from pallas_kernels.tpu import divisive_norm as kernel
from pallas_kernels.tpu.max_pool_views import view_of

pytestmark = pytest.mark.emulated

STRONG = {"alpha": 1.5, "beta": 0.75, "k": 0.5}
PIXELS_OUTSIDE, COLUMNS = 5, 4  # how often the axes of a view are cut
# Images as the operators see them, (..., d, h, w, c), the window, and where XLA stores pixels.
CASES = {
    "even-window": ((1, 128, 1, 5, 4, 24), 4, PIXELS_OUTSIDE),
    "pixels-outside": ((1, 8, 128, 1, 7, 9, 1), 5, PIXELS_OUTSIDE),
    "ragged-channels": ((1, 128, 1, 5, 9, 20), 3, PIXELS_OUTSIDE),
    "columns-in-sublanes": ((5, 1, 9, 16, 128), 5, COLUMNS),
    "odd-columns-of-odd-channels": ((3, 1, 6, 11, 130), 3, COLUMNS),
    "images-in-sublanes": ((8, 1, 5, 8, 130), 4, COLUMNS),
    "transposed": ((2, 1, 5, 6, 3), 3, COLUMNS),
    "larger-than-images": ((2, 1, 3, 4, 128), 16, COLUMNS),
    "window-of-one": ((2, 1, 3, 8, 128), 1, COLUMNS),
    "one-pixel": ((1, 1, 1, 1, 128), 5, COLUMNS),
}


def draw(shape, dtype="float32", count=3):
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.normal(size=shape), dtype) for _ in range(count)]


def in_oracle(array):
    """Images (N, C, H, W) in float64, of (..., 1, h, w, c)."""
    array = np.asarray(array).astype(np.float64)
    return np.moveaxis(array.reshape(-1, *array.shape[-3:]), -1, 1)


@functools.cache
def kernels(n, detect_races):
    """Both kernels of windows of n pixels, compiled once for each shape."""
    params = {"window": (1, n, n), **STRONG, "config": {"row_bytes": 2**14}}
    interpret = pltpu.InterpretParams(detect_races=detect_races)
    backward = functools.partial(kernel.run_backward, means_grad=True, **params, interpret=interpret)
    return jax.jit(functools.partial(kernel.run, **params, interpret=interpret)), jax.jit(backward)


def launched(x, means, grad, n, detect_races=False):
    """The results of both kernels, in order: y and the gradients of x and the means."""
    forward, backward = kernels(n, detect_races)
    return *forward(Images(x, means)), *backward(Images(x, means), grad)


@pytest.mark.sampled
@pytest.mark.parametrize("with_means", [False, True], ids=["zero-means", "means"])
@pytest.mark.parametrize(("shape", "n", "cuts"), CASES.values(), ids=CASES)
def test_divisive_norm_kernels_agree_with_float64(shape, n, cuts, with_means, capfd):
    assert len(view_of(shape).cuts) == cuts
    x, means, grad = draw(shape)
    means = means if with_means else None
    truth = oracle.within_channels(
        in_oracle(x), in_oracle(means if with_means else 0 * x), in_oracle(grad), n=n, **STRONG
    )
    for actual, exact in zip(launched(x, means, grad, n, detect_races=with_means), truth, strict=True):
        assert (actual.shape, actual.dtype) == (x.shape, x.dtype)
        np.testing.assert_allclose(in_oracle(actual), exact, rtol=1e-5, atol=2e-6 * np.abs(exact).max())
    assert "RACE DETECTED" not in capfd.readouterr().out


@pytest.mark.long
@pytest.mark.sampled
@pytest.mark.parametrize("dtypes", [("bfloat16", "bfloat16"), ("bfloat16", "float32")], ids=str)
@pytest.mark.parametrize("name", ["columns-in-sublanes", "ragged-channels"])
def test_divisive_norm_kernels_round_once(name, dtypes):
    shape, n, _ = CASES[name]
    (x, means), (grad,) = draw(shape, dtypes[0], 2), draw(shape, dtypes[1], 1)
    truth = oracle.within_channels(*map(in_oracle, (x, means, grad)), n=n, **STRONG)
    actuals = launched(x, means, grad, n)
    for actual, exact, dtype in zip(actuals, truth, (dtypes[0], dtypes[1], dtypes[1]), strict=True):
        assert actual.dtype == dtype
        rounding = 0.51 * float(jnp.finfo(dtype).eps) + 1e-5
        np.testing.assert_allclose(in_oracle(actual), exact, rtol=rounding, atol=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("name", ["pixels-outside", "columns-in-sublanes", "images-in-sublanes"])
def test_divisive_norm_kernels_keep_the_digits_of_deviations(name):
    """Pixels and means are near 1e4, their deviations near 1; a single pixel is far from all others."""
    shape, n, _ = CASES[name]
    x, means, grad = draw(shape)
    x, means = 1e4 + x, 1e4 + means
    x = x.at[(0,) * (len(shape) - 3) + (3, 4)].set(-2e4)
    truth = oracle.within_channels(*map(in_oracle, (x, means, grad)), n=n, **STRONG)
    y, *gradients = launched(x, means, grad, n)
    np.testing.assert_allclose(in_oracle(y), truth[0], rtol=3e-6)
    for actual, exact in zip(gradients, truth[1:], strict=True):
        np.testing.assert_allclose(in_oracle(actual), exact, atol=1e-5 * np.abs(exact).max(), rtol=0)


@pytest.mark.long
@pytest.mark.sampled
@pytest.mark.parametrize("name", ["pixels-outside", "columns-in-sublanes", "images-in-sublanes"])
@pytest.mark.parametrize("pixel", [np.inf, 1e25, np.nan])
def test_divisive_norm_kernels_keep_what_overflows_to_its_windows(name, pixel):
    shape, n, _ = CASES[name]
    x, means, grad = draw(shape)
    x = x.at[(0,) * (len(shape) - 3) + (1, 2)].set(pixel)
    with np.errstate(over="ignore", invalid="ignore"):
        truth = oracle.within_channels(*map(in_oracle, (x, means, grad)), n=n, **STRONG)[0]
    y, *_ = launched(x, means, grad, n)
    np.testing.assert_allclose(in_oracle(y), truth, rtol=1e-5, atol=1e-11)


def test_divisive_norm_launches_its_kernels():
    def step(x, means, grad):
        y, pull_back = jax.vjp(lambda *xs: jaxops.divisive_norm(*xs, layout="NHWC"), x, means)
        return y, *pull_back(grad)

    x = jnp.ones((4, 6, 8, 128))
    with lowering.use("pallas"):
        text = jax.jit(step).trace(x, x, x).lower(lowering_platforms=("tpu",)).as_text()
    assert text.count("stablehlo.custom_call @tpu_custom_call") == 2


@pytest.mark.long
def test_divisive_norm_runs_the_interpreted_kernel():
    x, means, _ = draw((2, 5, 6, 128))

    def loss(x, means):
        return jnp.sum(jnp.sin(jaxops.divisive_norm(x, means, n=3, **STRONG, layout="NHWC")))

    with lowering.use("interpret"):
        interpreted = jax.jit(jax.value_and_grad(loss, (0, 1)))(x, means)
    expected = jax.value_and_grad(loss, (0, 1))(x, means)
    for actual, other in zip(jax.tree.leaves(interpreted), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(actual, other, rtol=2e-5, atol=2e-6)


REFUSALS = {
    "dtype": ((2, 1, 4, 4, 8), "float16", 3, {}, "Mosaic TPU computes on float32 and bfloat16; x is float16"),
    "volumes": ((2, 3, 4, 4, 8), "float32", 3, {}, "the kernels take images; x has 3 images in each volume"),
    "k": ((2, 1, 4, 4, 8), "float32", 3, {"k": 0.0}, "the kernels take logarithms, of what alpha 1.5 and k 0.0 may"),
    "long-rows": (
        (2, 1, 4, 2**13, 128),
        "float32",
        5,
        {},
        "VMEM does not hold as many rows of 8192 columns as windows of 5 reach over",
    ),
}


@pytest.mark.parametrize(("shape", "dtype", "n", "attributes", "words"), REFUSALS.values(), ids=REFUSALS)
def test_divisive_norm_kernels_refuse_in_words(shape, dtype, n, attributes, words):
    x = jax.ShapeDtypeStruct(shape, dtype)
    params = {"window": (1, n, n), **STRONG, **attributes}
    assert kernel.refuses(None, Images(x, x), x, means_grad=True, **params).startswith(words)
