"""The kernels of local response normalization under the interpreters of their dialects, against NumPy float64."""

import functools
import types

import jax
import jax.numpy as jnp
import local_response_norm_oracle as oracle
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

import lowering
from jaxops import local_response_norm
from pallas_kernels._jax_private import interpret_gpu_params
from pallas_kernels.gpu import local_response_norm as gpu
from pallas_kernels.hardware import Hardware
from pallas_kernels.tpu import local_response_norm as tpu

pytestmark = pytest.mark.emulated

STRONG = {"alpha": 1.5, "beta": 0.75, "k": 0.5}
# Blocks far smaller than the default let small arrays span several of them.
KERNELS = {
    "tpu": (tpu, {"block_elements": 16384}, pltpu.InterpretParams(detect_races=True), "tpu_custom_call"),
    "gpu": (gpu, {"width": 128, "channels": 4}, interpret_gpu_params(detect_races=True), "mosaic_gpu"),
}
# As the operators see images, (..., c, d, h, w), and a window; on TPUs, also the axis in which channels are stored.
CASES = [
    pytest.param(name, shape, n, axis, id=f"{name}-{case}")
    for name, case, shape, n, axis in (
        ("tpu", "channels-untiled", (2, 3, 2, 24, 128), 4, 1),
        ("tpu", "channels-in-sublanes", (3, 16, 1, 1, 700), 5, 3),
        ("tpu", "channels-in-lanes-of-odd-images", (1, 5, 40, 128, 1, 1, 1), 6, 4),
        ("tpu", "channels-in-lanes-too-many-to-transpose", (1, 2, 24, 256, 1, 1, 1), 6, 4),
        ("tpu", "channels-in-lanes-of-128-images", (384, 128, 1, 1, 1), 5, 4),
        ("tpu", "window-added-in-registers", (2, 32, 1, 1, 256), 28, 3),
        ("tpu", "ragged", (3, 2, 7, 1, 5, 5), 3, 4),
        ("tpu", "one", (1, 1, 1, 1, 1), 5, 4),
        ("tpu", "window-of-one", (2, 6, 1, 4, 4), 1, 4),
        ("tpu", "window-larger-than-channels", (2, 6, 1, 4, 4), 16, 4),
        ("gpu", "even", (2, 8, 1, 8, 32), 4, None),
        ("gpu", "overlapping", (1, 6, 1, 13, 13), 5, None),
        ("gpu", "odd-channels-of-volumes", (1, 2, 7, 2, 8, 8), 3, None),
        ("gpu", "window-of-one", (1, 4, 1, 8, 16), 1, None),
        ("gpu", "window-larger-than-channels", (1, 5, 1, 8, 16), 16, None),
    )
]


def draw(shape, dtype="float32", count=2):
    rng = np.random.default_rng(0)
    return [np.asarray(jnp.asarray(rng.normal(size=shape), dtype)) for _ in range(count)]


def in_oracle(values, shape):
    """Images with all batch axes merged."""
    return np.asarray(values).astype(np.float64).reshape(-1, *shape[-4:])


def check(name, shape, n, dtypes=("float32", "float32")):
    kernel, config, interpret, _ = KERNELS[name]
    x, grad = (draw(shape, dtype)[i] for i, dtype in enumerate(dtypes))
    launched = [
        jax.jit(functools.partial(run, n=n, **STRONG, config=config, interpret=interpret))(*operands)
        for run, operands in ((kernel.run, (x,)), (kernel.run_backward, (x, grad)))
    ]
    truth = oracle.across_channels(in_oracle(x, shape), in_oracle(grad, shape), n=n, **STRONG)
    for (actual,), exact, dtype in zip(launched, truth, dtypes, strict=True):
        assert (actual.shape, actual.dtype) == (shape, dtype)
        rounding = 0.51 * float(jnp.finfo(dtype).eps) + 4e-6
        np.testing.assert_allclose(in_oracle(actual, shape), exact, rtol=rounding, atol=4e-6)


@pytest.mark.sampled
@pytest.mark.parametrize(("name", "shape", "n", "axis"), CASES)
def test_local_response_norm_kernels_agree_with_float64(name, shape, n, axis, capfd):
    if axis is not None:
        assert tpu.view_of(shape).channel_axis == axis
    check(name, shape, n)
    assert "RACE DETECTED" not in capfd.readouterr().out


@pytest.mark.parametrize(
    ("images", "rows", "tile"),
    [(16, 16, (8, 16)), (5, 16, (1, 16)), (8, 32, (4, 32)), (4, 40, (1, 8)), (4, 256, (1, 128)), (4, 7, (1, 7))],
)
def test_local_response_norm_tiles_with_channels_in_lanes_divide_blocks(images, rows, tile):
    """A tile has up to 128 rows, of several images only where these are whole and divide the block's."""
    norm = tpu._Norm(4, n=5, alpha=1.0, beta=0.75, k=1.0)
    assert norm.tile((images, 1, 1, rows, 96)) == (*tile, 96)


@pytest.mark.slow
@pytest.mark.parametrize("dtypes", [("bfloat16", "bfloat16"), ("bfloat16", "float32")], ids=str)
@pytest.mark.parametrize("name", KERNELS)
def test_local_response_norm_kernels_round_once(name, dtypes):
    check(name, (1, 6, 1, 10, 13), 5, dtypes)


@pytest.mark.parametrize("name", KERNELS)
def test_local_response_norm_kernels_keep_nan_and_infinity_in_their_windows(name):
    kernel, _, interpret, _ = KERNELS[name]
    x = draw((1, 9, 1, 8, 16))[0].copy()
    config = kernel.configs(None, x)[0]
    x[0, 8, 0, 0, 0], x[0, 0, 0, 0, 1] = np.nan, np.inf
    (y,) = jax.jit(functools.partial(kernel.run, n=3, **STRONG, config=config, interpret=interpret))(x)
    assert [*zip(*np.nonzero(np.isnan(y[0, :, 0])), strict=True)] == [(0, 0, 1), (7, 0, 0), (8, 0, 0)]
    assert y[0, 1, 0, 0, 1] == 0


@pytest.mark.parametrize("name", KERNELS)
def test_local_response_norm_gradient_launches_its_kernels(name):
    platform, custom_call = KERNELS[name][0].KERNEL.platform, KERNELS[name][3]

    def step(x):
        y, pull_back = jax.vjp(lambda x: local_response_norm(x, layout="NCHW"), x)
        return pull_back(y)

    with lowering.use("pallas"):
        text = jax.jit(step).trace(jnp.ones((2, 16, 16, 16))).lower(lowering_platforms=(platform,)).as_text()
    assert text.count(f"stablehlo.custom_call @{custom_call}") == 2


@pytest.mark.long
def test_local_response_norm_runs_the_interpreted_kernel():
    (x,) = draw((4, 8, 4, 4), count=1)

    def loss(x):
        return jnp.sum(jnp.sin(local_response_norm(x, **STRONG, layout="NCHW")))

    with lowering.use("interpret:mosaic_tpu"):
        assert "mosaic_tpu" in str(lowering.explain(jax.grad(loss), x))
        interpreted = jax.jit(jax.grad(loss))(x)
    np.testing.assert_allclose(interpreted, jax.grad(loss)(x), atol=1e-5)


def test_local_response_norm_kernels_refuse_what_they_cannot_run():
    def reason(kernel, hardware, shape=(8, 16, 1, 16, 16), dtype="float32", **params):
        x = types.SimpleNamespace(shape=shape, dtype=jnp.dtype(dtype))
        grad = types.SimpleNamespace(shape=shape, dtype=jnp.dtype(params.pop("grad", dtype)))
        return kernel.BACKWARD_KERNEL.refuses(hardware, x, grad, **{"n": 5, **STRONG, **params})

    v5e = Hardware(name="tpu-v5e", platform="tpu")
    h100 = Hardware(name="cuda-h100", platform="cuda", compute_capability=(9, 0))
    a100 = Hardware(name="cuda-a100", platform="cuda", compute_capability=(8, 0))
    for kernel, hardware in ((tpu, v5e), (gpu, h100)):
        assert reason(kernel, hardware) is None
        assert "x is float64" in reason(kernel, hardware, dtype="float64")
        assert "grad is float64" in reason(kernel, hardware, grad="float64")
        assert "nothing" in reason(kernel, hardware, shape=(0, 16, 1, 16, 16))
        assert "alpha -1.0" in reason(kernel, hardware, alpha=-1.0)
        assert "k 0.0" in reason(kernel, hardware, k=0.0)
    assert "x is float16" in reason(tpu, v5e, dtype="float16")
    assert "all 4096 channels" in reason(tpu, v5e, shape=(2, 4096, 1, 64, 128))
    assert reason(gpu, h100, dtype="float16") is None
    assert "cuda-a100 has 8.0" in reason(gpu, a100)
    assert "n is 17" in reason(gpu, h100, n=17)
    assert "2147483648" in reason(gpu, h100, shape=(2**11, 2**10, 1, 2**5, 2**5))
    assert "behind the channels of x lie 1" in reason(gpu, h100, shape=(8, 16, 16, 64, 1, 1, 1))


@pytest.mark.parametrize("name", KERNELS)
def test_local_response_norm_kernel_configs_differ(name):
    configs = KERNELS[name][0].KERNEL.configs(Hardware(name=name, platform=name), jnp.zeros((8, 64, 1, 16, 16)))
    assert len(configs) == len({tuple(config.items()) for config in configs}) > 1
