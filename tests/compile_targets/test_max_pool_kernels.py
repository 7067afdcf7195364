"""The kernels of max pooling's gradient, compiled by the real TPU and NVIDIA compilers."""

import functools
import math
import re

import jax
import pytest
from compile_targets.sass import machine_code

import lowering
from jaxops import max_pool
from lowering.targets import named
from pallas_kernels.gpu import max_pool_backward as gpu
from pallas_kernels.tpu import max_pool_backward as tpu_kernel

F32, BF16, F16 = "float32", "bfloat16", "float16"


def report_of(target, shape, dtype, window, stride, padding):
    """Of the gradient of images with their channels last."""

    def gradient(x, weights):
        pooled = functools.partial(max_pool, window=window, stride=stride, padding=padding, layout="NHWC")
        return jax.vjp(pooled, x)[1](weights)

    x = jax.ShapeDtypeStruct(shape, dtype)
    outputs = tuple(1 + (n + 2 * padding - window) // stride for n in shape[1:3])
    grad = jax.ShapeDtypeStruct((shape[0], *outputs, shape[3]), dtype)
    with lowering.use(max_pool_backward="pallas"):
        return lowering.compile(jax.jit(gradient), x, grad, target=target)


@pytest.mark.tpu_compile
@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize(
    ("shape", "window", "stride", "padding"),
    [
        ((8, 56, 56, 256), 3, 2, 1),
        ((8, 112, 112, 128), 2, 2, 0),
        ((8, 33, 40, 200), 3, 1, 1),
        ((4, 600, 24, 128), 2, 3, 0),
        ((16, 14, 14, 256), 2, 2, 0),
        ((32, 56, 56, 128), 2, 2, 0),
        ((128, 16, 16, 64), 3, 2, 1),
    ],
    ids=str,
)
def test_max_pool_gradient_compiles_for_tpus(tpu, shape, window, stride, padding, dtype):
    report = report_of(tpu, shape, dtype, window, stride, padding)
    assert report.kernels == {"max_pool_backward": 1}
    # Gradients of windows may be stored in another order; images are not moved.
    moved = re.findall(r"= \w+\[([\d,]+)\]\S* (?:copy|transpose)\(", report.hlo)
    assert all(math.prod(map(int, extents.split(","))) < math.prod(shape) for extents in moved)


@pytest.mark.tpu_compile
@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize(("layout", "window"), [("NCHW", 3), ("NCHW", 2), ("NHWC", 3), ("NHWC", 2)])
def test_max_pool_gradient_compiles_for_images_of_few_channels(tpu, layout, window, dtype):
    """The stem of a ResNet: XLA stores its images with columns in lanes."""

    def gradient(x, weights):
        return jax.vjp(functools.partial(max_pool, window=window, stride=2, padding=window // 3, layout=layout), x)[1](
            weights
        )

    shapes = ((8, 64, size, size) if layout == "NCHW" else (8, size, size, 64) for size in (112, 56))
    with lowering.use(max_pool_backward="pallas"):
        report = lowering.compile(jax.jit(gradient), *(jax.ShapeDtypeStruct(s, dtype) for s in shapes), target=tpu)
    assert report.kernels == {"max_pool_backward": 1}


@pytest.mark.tpu_compile
def test_max_pool_gradient_compiles_in_every_configuration(tpu):
    x, grad = (jax.ShapeDtypeStruct(shape, BF16) for shape in ((4, 1, 56, 56, 256), (4, 1, 28, 28, 256)))
    geometry = {"window": (1, 2, 2), "stride": (1, 2, 2), "padding": ((0, 0),) * 3}
    for config in tpu_kernel.configs(named(tpu), x, grad, **geometry):
        run = functools.partial(tpu_kernel.run, **geometry, propagate_nan=False, config=config)
        assert lowering.compile(jax.jit(run), x, grad, target=tpu).kernels == {"max_pool_backward": 1}


# Bytes of an access of a thread: 128 threads lie along the channels, and an access has 16 bytes at most.
GPU_CASES = [
    *[((32, 56, 56, 256), 2, 2, F32, 8), ((32, 56, 56, 512), 2, 2, F32, 16), ((32, 15, 13, 384), 2, 3, BF16, 2)],
    *[((8, 27, 27, 512), 3, 3, F16, 8), ((16, 14, 14, 1024), 2, 2, BF16, 16)],
]


@pytest.mark.cuda_compile
@pytest.mark.parametrize(("shape", "window", "stride", "dtype", "access_bytes"), GPU_CASES, ids=str)
def test_max_pool_gradient_compiles_with_wide_loads_ahead_of_stores(h100, shape, window, stride, dtype, access_bytes):
    report = report_of(h100, shape, dtype, window, stride, 0)
    assert report.kernels == {"max_pool_backward": 1}
    assert report.memory.temporaries < 1024
    (resources,) = report.gpu_resources
    assert (resources.spilled_bytes, resources.shared_bytes) == (0, 0)
    assert resources.registers <= 128
    (code,) = machine_code(report)
    assert {*code.access_bytes("LDG")} == {*code.access_bytes("STG")} == {access_bytes}
    accesses = [name for each in code.instructions for name in ("LDG", "STG") if each.is_a(name)]
    assert accesses == sorted(accesses)  # every load comes before the first store
    assert not code.loops()


def test_max_pool_gradient_has_thread_blocks_for_all_multiprocessors():
    shape = (32, 56, 56, 256)
    tiling = gpu.tiling_of(shape, (F32, F32), (2, 2), (2, 2), 256)
    assert (tiling.vector, tiling.cells, tiling.grid) == (2, 6, (32, 28, 5))
    assert gpu.tiling_of(shape, (BF16, BF16), (2, 2), (2, 2), 256).vector == 2
    assert gpu.tiling_of((8, 27, 27, 1004), (BF16, BF16), (3, 3), (3, 3), 512).vector == 4


@pytest.mark.cuda_compile
@pytest.mark.parametrize("config", gpu._CONFIGS, ids=str)
def test_max_pool_gradient_compiles_in_every_gpu_configuration(h100, config):
    x, grad = (jax.ShapeDtypeStruct(shape, BF16) for shape in ((2, 1, 9, 8, 1028), (2, 1, 4, 4, 1028)))
    geometry = {"window": (1, 2, 2), "stride": (1, 2, 2), "padding": ((0, 0),) * 3}
    assert config in gpu.configs(named(h100), x, grad, **geometry)
    run = functools.partial(gpu.run, **geometry, propagate_nan=False, config=config)
    assert lowering.compile(jax.jit(run), x, grad, target=h100).kernels == {"max_pool_backward": 1}


def test_max_pool_gradient_repeats_few_channels():
    def widths(channels, dtype):
        x = jax.ShapeDtypeStruct((2, 1, 9, 8, channels), dtype)
        return [config["width"] for config in gpu.configs(named("cuda-h100"), x)]

    assert widths(512, F32) == [512, 256, 128]
    assert widths(1024, BF16) == [1024, 512, 256, 128]
    assert widths(640, F32) == [128, 256, 512]
    assert widths(192, F32) == [128]


@pytest.mark.tpu_compile
@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize(
    ("shape", "window", "padding"),
    [
        ((128, 16, 112, 112), 3, 1),
        ((256, 96, 55, 55), 3, 0),
        ((512, 192, 27, 27), 3, 0),
        ((64, 128, 56, 56), 2, 0),
        ((128, 128, 56, 56), 3, 1),
        ((16, 448, 56, 56), 2, 0),
    ],
    ids=str,
)
def test_max_pool_compiles_for_tpus_without_copies(tpu, shape, window, padding, dtype):
    value = functools.partial(max_pool, window=window, stride=2, padding=padding, layout="NCHW")
    with lowering.use("pallas"):
        report = lowering.compile(jax.jit(value), jax.ShapeDtypeStruct(shape, dtype), target=tpu)
    assert report.kernels == {"max_pool": 1}
    assert not re.findall(r" (?:copy|transpose)\(", report.hlo)
