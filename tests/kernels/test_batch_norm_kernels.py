"""The batch-norm kernels under the interpreters of their Pallas dialects, against NumPy float64."""

import functools
import types

import batch_norm_oracle as oracle
import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

import lowering
from jaxops import batch_norm
from jaxops.batch_norm.backward import BackwardOperands
from jaxops.batch_norm.operator import TrainingOperands
from lowering.targets import named
from pallas_kernels._jax_private import interpret_gpu_params
from pallas_kernels.gpu import batch_norm as gpu_forward
from pallas_kernels.gpu import batch_norm_backward as gpu_backward
from pallas_kernels.hardware import Hardware
from pallas_kernels.tpu import batch_norm as tpu_forward
from pallas_kernels.tpu import batch_norm_backward as tpu_backward
from pallas_kernels.tpu.batch_norm_blocks import blocks_of

pytestmark = pytest.mark.emulated

EPSILON = 1e-3
RELU, IDENTITY = ("relu", 0.0, True), ("identity", 0.0, True)
# Blocks far smaller than the default let small arrays span several of them.
KERNELS = {
    "tpu": (
        tpu_forward,
        tpu_backward,
        {"block_elements": 2048, "kept_bytes": 2**20},
        pltpu.InterpretParams(detect_races=True),
        "tpu_custom_call",
    ),
    "gpu": (gpu_forward, gpu_backward, {"width": 128}, interpret_gpu_params(detect_races=True), "mosaic_gpu"),
}
# As the operators see images: (..., n, a, c, b), with several blocks along each axis, ragged ones, and batch axes.
SHAPES = {
    "tpu": {
        "channels-last": (4, 48, 256, 1),
        "channels-first": (4, 1, 24, 256),
        "ragged": (3, 1, 5, 49),
        "ragged-last": (3, 15, 5, 1),
        "batch-in-sublanes": (8, 9, 128, 1),
        "channels-in-lanes": (2, 1, 128, 16),
        "vectors": (24, 1, 7, 1),
        "planes-of-channels": (128, 1, 3, 64),
        "rows-of-channels": (128, 4, 32, 1),
        "batched": (2, 3, 1, 8, 12),
        "one": (1, 1, 1, 1),
    },
    "gpu": {
        "channels-first": (2, 1, 3, 256),
        "overlapping": (2, 1, 2, 300),
        "one-channel": (2, 200, 1, 1),
        "channels-last": (2, 32, 256, 1),
        "folded": (2, 8, 48, 1),
        "vectors": (128, 1, 3, 1),
    },
}
CASES = [
    pytest.param(name, shape, id=f"{name}-{case}") for name, shapes in SHAPES.items() for case, shape in shapes.items()
]


def draw(shape, dtype="float32", seed=0):
    rng = np.random.default_rng(seed)
    images = [np.asarray(jnp.asarray(rng.normal(3, 2, shape), dtype)) for _ in range(3)]
    parameters = [rng.normal(size=(*shape[:-4], shape[-2])).astype(np.float32) for _ in range(4)]
    return *images, *parameters


def in_oracle(values, shape):
    """Images (n, a, c, b) with their channels on axis 1; one batch position."""
    return np.moveaxis(np.asarray(values).astype(np.float64).reshape(shape[-4:]), 2, 1)


def assert_close(actual, truth, dtype, operations=8):
    assert actual.dtype == jnp.dtype(dtype)
    tolerance = 0.51 * float(jnp.finfo(dtype).eps) + 2e-6 * operations
    size = max(1.0, float(np.abs(truth).max()))
    np.testing.assert_allclose(np.asarray(actual).astype(np.float64), truth, rtol=tolerance, atol=tolerance * size)


def check(name, shape, dtype, activation, adds, capfd, **sizes):
    forward, backward, config, interpret, _ = KERNELS[name]
    config = config | sizes
    x, residual, grad, scale, bias, grad_mean, grad_variance = draw(shape, dtype)
    attributes = {"axis_name": None, "config": config, "interpret": interpret}
    launch = functools.partial(forward.run, epsilon=EPSILON, activation=activation, **attributes)
    y, mean, variance = jax.jit(launch)(TrainingOperands(x, scale, bias, residual if adds else None))
    inv_std = (1 / np.sqrt(np.float64(variance) + EPSILON)).astype(np.float32)
    gate = None if activation == IDENTITY else y
    launch = functools.partial(backward.run, activation=activation, residual_grad=adds, **attributes)
    operands = BackwardOperands(grad, x, scale, mean, inv_std, grad_mean, grad_variance, gate)
    results = jax.jit(launch)(operands)
    for at in np.ndindex(shape[:-4]):
        images = [in_oracle(values[at], shape) for values in (x, residual, grad)]
        parameters = {"epsilon": EPSILON, "activation": activation[:2]}
        extra = images[1] if adds else None
        truth = oracle.training(images[0], scale[at], bias[at], extra, **parameters)
        assert_close(np.moveaxis(y[at], 2, 1), truth[0], dtype)
        assert_close(mean[at], truth[1], "float32")
        assert_close(variance[at], truth[2], "float32")
        dx, dscale, dbias, d = oracle.backward(images[2], images[0], scale[at], bias[at], extra, **parameters)
        elements = images[0].size // scale[at].size
        centred = images[0] - truth[1].reshape(1, -1, 1, 1)
        dx = dx + (grad_mean[at].reshape(1, -1, 1, 1) + 2 * grad_variance[at].reshape(1, -1, 1, 1) * centred) / elements
        assert_close(np.moveaxis(results[0][at], 2, 1), dx, dtype)
        assert_close(results[1][at], dscale, "float32", 16)
        assert_close(results[2][at], dbias, "float32", 16)
        if adds:
            assert_close(np.moveaxis(results[3][at], 2, 1), d, dtype)
    assert "RACE DETECTED" not in capfd.readouterr().out


@pytest.mark.sampled
@pytest.mark.parametrize(("name", "shape"), CASES)
def test_batch_norm_kernels_agree_with_float64(name, shape, capfd):
    check(name, shape, "float32", RELU, True, capfd)


@pytest.mark.long
# Rows of few channels side by side: as many as make 16 bytes a thread, or 8, or 4, and divide the images.
@pytest.mark.parametrize(
    ("shape", "vector"),
    [((2, 32, 48, 1), 4), pytest.param((2, 24, 48, 1), 2, marks=pytest.mark.slow), ((2, 4, 48, 1), 1)],
    ids=str,
)
def test_batch_norm_kernels_on_gpus_fold_rows_for_wide_accesses(shape, vector, capfd):
    assert gpu_forward.tiling_of(shape, 512).vector == vector
    check("gpu", shape, "float32", RELU, True, capfd, width=512)


# Of the backward kernel's two arrays, the VMEM of "one" holds the first.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "kept_bytes"),
    [
        pytest.param((128, 1, 3, 64), 0, id="planes-of-channels-none"),
        pytest.param((128, 4, 32, 1), 0, id="rows-of-channels-none"),
        pytest.param((128, 4, 32, 1), 80_000, id="rows-of-channels-one"),
        pytest.param((16, 4, 1024, 1), 0, id="columns-of-channels-none"),
        pytest.param((16, 4, 1024, 1), 100_000, id="columns-of-channels-one"),
        pytest.param((16, 4, 1024, 1), 2**21, id="columns-of-channels-both"),
    ],
)
def test_batch_norm_kernels_on_tpu_agree_with_float64_whatever_vmem_keeps(shape, kept_bytes, capfd):
    check("tpu", shape, "float32", RELU, True, capfd, block_elements=2**14, kept_bytes=kept_bytes)


# These VMEMs hold half of the channels, of which the others take the place.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("arrays", "shape", "dtype", "kept_bytes", "widens"),
    [
        pytest.param(1, (16, 64, 256, 1), "float32", 2**20, False, id="columns-of-channels-forward"),
        pytest.param(2, (16, 64, 256, 1), "float32", 2**21, False, id="columns-of-channels-backward"),
        pytest.param(1, (128, 16, 64, 1), "bfloat16", 700_000, False, id="rows-of-channels-forward"),
        pytest.param(2, (128, 16, 64, 1), "bfloat16", 2**20, True, id="rows-of-channels-backward-widened"),
    ],
)
def test_batch_norm_kernels_on_tpu_overlap_blocks_of_channels(arrays, shape, dtype, kept_bytes, widens, capfd):
    config = {"block_elements": 2**13, "kept_bytes": kept_bytes, "widens": widens}
    blocks = blocks_of(shape, dtype, arrays, **config)
    assert blocks.alternates
    assert blocks.widens == widens
    check("tpu", shape, dtype, RELU, True, capfd, **config)


@pytest.mark.slow
@pytest.mark.parametrize(("activation", "adds"), [(IDENTITY, False), (IDENTITY, True), (RELU, False)], ids=str)
@pytest.mark.parametrize("name", KERNELS)
def test_batch_norm_kernels_fuse_what_they_are_asked_to(name, activation, adds, capfd):
    check(name, (2, 1, 16, 128), "bfloat16", activation, adds, capfd)


@pytest.mark.sampled
@pytest.mark.parametrize("name", KERNELS)
def test_batch_norm_kernel_keeps_the_digits_of_a_variance_beside_a_large_mean(name):
    forward, _, config, interpret, _ = KERNELS[name]
    x = (1e4 + np.random.default_rng(0).normal(size=(8, 1, 2, 256))).astype(np.float32)
    ones = np.ones(2, np.float32)
    attributes = {"epsilon": 0.0, "axis_name": None, "activation": IDENTITY}
    launch = functools.partial(forward.run, config=config, interpret=interpret, **attributes)
    _, mean, variance = jax.jit(launch)(TrainingOperands(x, ones, ones))
    np.testing.assert_allclose(mean, x.mean((0, 1, 3), np.float64), rtol=1e-6)
    np.testing.assert_allclose(variance, x.astype(np.float64).var((0, 1, 3)), rtol=1e-4)


@pytest.mark.long
def test_batch_norm_kernels_on_tpu_keep_bfloat16_beside_a_large_mean():
    """They multiply bfloat16 before they subtract the mean, which must stay below its rounding."""
    x, _, grad, scale, bias, grad_mean, grad_variance = draw((16, 9, 128, 1), "bfloat16")
    x = (x.astype(np.float32) + 60).astype(x.dtype)
    forward, backward, config, interpret, _ = KERNELS["tpu"]
    attributes = {"axis_name": None, "activation": IDENTITY, "config": config, "interpret": interpret}
    launch = functools.partial(forward.run, epsilon=EPSILON, **attributes)
    y, mean, variance = jax.jit(launch)(TrainingOperands(x, scale, bias))
    inv_std = (1 / np.sqrt(np.float64(variance) + EPSILON)).astype(np.float32)
    operands = BackwardOperands(grad, x, scale, mean, inv_std, 0 * grad_mean, 0 * grad_variance)
    dx, *_ = jax.jit(functools.partial(backward.run, residual_grad=False, **attributes))(operands)
    images = in_oracle(x, x.shape), in_oracle(grad, x.shape)
    truth = oracle.training(images[0], scale, bias, None, epsilon=EPSILON, activation=IDENTITY[:2])
    assert_close(np.moveaxis(y, 2, 1), truth[0], "bfloat16")
    truth = oracle.backward(images[1], images[0], scale, bias, None, epsilon=EPSILON, activation=IDENTITY[:2])
    assert_close(np.moveaxis(dx, 2, 1), truth[0], "bfloat16")


@pytest.mark.parametrize("name", KERNELS)
def test_batch_norm_gradient_launches_its_kernels(name):
    platform, custom_call = KERNELS[name][0].KERNEL.platform, KERNELS[name][4]
    x, p = jnp.ones((8, 16, 16, 8)), jnp.ones(16)

    def step(x, scale, bias, residual):
        y, pull_back = jax.vjp(
            lambda *xs: batch_norm(*xs[:3], residual=xs[3], activation="relu", layout="NCHW").y,
            x,
            scale,
            bias,
            residual,
        )
        return pull_back(y)

    with lowering.use("pallas"):
        text = jax.jit(step).trace(x, p, p, x).lower(lowering_platforms=(platform,)).as_text()
    assert text.count(f"stablehlo.custom_call @{custom_call}") == {"tpu": 2, "gpu": 4}[name]


@pytest.mark.long
def test_batch_norm_runs_the_interpreted_kernel():
    rng = np.random.default_rng(0)
    x, ones = rng.normal(size=(4, 8, 4, 4)).astype(np.float32), np.ones(8, np.float32)

    def loss(x):
        return jnp.sum(jnp.sin(batch_norm(x, ones, ones, activation="relu", layout="NCHW").y))

    with lowering.use("interpret:mosaic_tpu"):
        assert "mosaic_tpu" in str(lowering.explain(jax.grad(loss), x))
        interpreted = jax.jit(jax.grad(loss))(x)
    np.testing.assert_allclose(interpreted, jax.grad(loss)(x), atol=1e-5)


def test_batch_norm_kernels_refuse_what_they_cannot_run():
    def reason(kernel, hardware, shape=(8, 1, 16, 64), dtype="float32", **params):
        x = types.SimpleNamespace(shape=shape, dtype=jnp.dtype(dtype))
        operands = types.SimpleNamespace(x=x, residual=None, gate=None)
        attributes = {"axis_name": None, "epsilon": 0.0, "activation": IDENTITY, "residual_grad": False, **params}
        return kernel.KERNEL.refuses(hardware, operands, **attributes)

    v5e = Hardware(name="tpu-v5e", platform="tpu")
    h100 = Hardware(name="cuda-h100", platform="cuda", compute_capability=(9, 0))
    a100 = Hardware(name="cuda-a100", platform="cuda", compute_capability=(8, 0))
    for kernel in (gpu_forward, gpu_backward):
        assert reason(kernel, h100, (8, 1, 16, 196), "float16") is None
        assert "cuda-a100 has 8.0" in reason(kernel, a100)
        assert "x is float64" in reason(kernel, h100, dtype="float64")
        assert "vmap made 2" in reason(kernel, h100, shape=(2, 8, 1, 16, 256))
        assert "2147483648" in reason(kernel, h100, shape=(2**10, 1, 2**10, 2**11))
        assert "[1, 16, 49]" in reason(kernel, h100, shape=(8, 1, 16, 49))
        assert "[49, 5, 1]" in reason(kernel, h100, shape=(3, 49, 5, 1))
        assert "relu, not elu" in reason(kernel, h100, activation=("elu", 1.0, True))
    for kernel in (tpu_forward, tpu_backward):
        assert reason(kernel, v5e) is None
        assert "x is float16" in reason(kernel, v5e, dtype="float16")
        assert "not swish" in reason(kernel, v5e, activation=("swish", 1.0, True))
        assert "'data'" in reason(kernel, v5e, axis_name="data")
        assert "nothing" in reason(kernel, v5e, shape=(0, 1, 16, 64))
        assert "[1, 16, 1000003]" in reason(kernel, v5e, shape=(8, 1, 16, 1000003))
    # The backward kernel has three arrays of images in VMEM, of which two are kept.
    assert reason(tpu_forward, named("tpu-v5e"), (30, 1, 140, 5476), "bfloat16") is None
    assert "[1, 140, 5476]" in reason(tpu_backward, named("tpu-v5e"), (30, 1, 140, 5476), "bfloat16")
    v7x = Hardware(name="tpu-v7x", platform="tpu", cores=1, memory_bytes_per_s=3.69e12)
    assert all(reason(kernel, v7x, dtype="bfloat16") is None for kernel in (tpu_forward, tpu_backward))


@pytest.mark.parametrize("name", KERNELS)
def test_batch_norm_kernel_configs_are_tried_largest_first(name):
    operands = TrainingOperands(jnp.zeros((8, 1, 64, 256)), jnp.zeros(64), jnp.zeros(64))
    configs = KERNELS[name][0].KERNEL.configs(Hardware(name=name, platform=name), operands)
    assert len(configs) == len({tuple(config.items()) for config in configs}) > 0
