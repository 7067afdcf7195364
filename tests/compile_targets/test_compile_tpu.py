"""Kernels compiled by the real XLA:TPU and Mosaic compilers; run with `-m tpu_compile` where libtpu is installed."""

import functools
import re

import jax
import pytest

import lowering
from jaxops import batch_norm as batch_norm_layer
from jaxops import dropout as dropout_layer
from jaxops.batch_norm.backward import BackwardOperands
from jaxops.batch_norm.operator import TrainingOperands
from lowering.targets import named
from pallas_kernels.ema_adam_update import COEFFICIENTS
from pallas_kernels.tpu import batch_norm, batch_norm_backward, dropout, ema_adam

pytestmark = pytest.mark.tpu_compile

F32, BF16 = "float32", "bfloat16"
TUPLE_TABLE_BYTES = 512  # at most


def compile_ema_adam(target, shape, dtypes, *, mode="adamw", output="params"):
    shapes_and_dtypes = [*((shape, dtype) for dtype in dtypes), ((len(COEFFICIENTS),), F32)]
    operands = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes_and_dtypes]
    assert ema_adam.KERNEL.refuses(named(target), *operands, mode=mode, output=output) is None
    config = ema_adam.KERNEL.configs(named(target), *operands, mode=mode, output=output)[0]
    run = functools.partial(ema_adam.run, mode=mode, output=output, config=config)
    donated = ema_adam.overwrites(*operands, mode=mode, output=output)
    report = lowering.compile(jax.jit(run, donate_argnums=donated), *operands, target=target)
    assert report.kernels == {"ema_adam": 1}
    assert report.memory.aliased >= report.memory.outputs - TUPLE_TABLE_BYTES
    return report


# Each is larger than VMEM, in which XLA could hide a copy, and some are stored with their axes in another order.
LARGE = [(2**26,), (8192, 8192), (50257, 768), (768, 50257), (5000, 12, 640), (5000, 640, 12), (8191, 8193)]


@pytest.mark.parametrize("dtypes", [(F32,) * 5, (BF16,) * 5, (BF16, BF16, F32, F32, F32)], ids=["f32", "bf16", "mixed"])
@pytest.mark.parametrize("shape", LARGE, ids=str)
def test_ema_adam_moves_nothing_outside_its_kernel(tpu, shape, dtypes):
    report = compile_ema_adam(tpu, shape, dtypes)
    operations = set(re.findall(r"^ +(?:ROOT )?%\S+ = .*? ([a-z][\w-]*)\(", report.hlo, re.MULTILINE))
    assert operations == {"parameter", "bitcast", "custom-call", "get-tuple-element", "tuple"}
    assert report.memory.temporaries == 0


SMALL = [(), (1,), (7,), (129,), (1000,), (3, 5, 7), (257, 129), (5, 1), (64, 64, 3, 3), (2, 3, 4, 5, 6, 7, 8, 9)]


@pytest.mark.parametrize(("mode", "output"), [("adamw", "update"), ("l2", "params")])
@pytest.mark.parametrize("shape", SMALL, ids=str)
def test_ema_adam_compiles_for_any_shape(tpu, shape, mode, output):
    compile_ema_adam(tpu, shape, (BF16, BF16, F32, BF16, F32), mode=mode, output=output)


# Images (n, a, c, b) of ResNet-50's stages and stem, channels first and last, and small and odd ones.
IMAGES = [
    *[(32, 1, 64, 112 * 112), (32, 1, 256, 56 * 56), (32, 1, 2048, 49), (3, 1, 5, 49)],
    *[(32, 112 * 112, 64, 1), (32, 56 * 56, 256, 1), (32, 49, 2048, 1), (4096, 1, 1000, 1), (3, 49, 5, 1)],
]


@pytest.mark.in_turns("dtype", "shape")
@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("shape", IMAGES, ids=str)
def test_batch_norm_compiles_forward_and_backward(tpu, shape, dtype):
    image = jax.ShapeDtypeStruct(shape, dtype)
    statistic = jax.ShapeDtypeStruct(shape[2:3], F32)
    relu = {"axis_name": None, "activation": ("relu", 0.0, True)}
    for name, kernel, operands, params in (
        ("batch_norm", batch_norm, TrainingOperands(image, statistic, statistic, image), {"epsilon": 1e-5}),
        (
            "batch_norm_backward",
            batch_norm_backward,
            BackwardOperands(image, image, *[statistic] * 5, image),
            {"residual_grad": True},
        ),
    ):
        assert kernel.KERNEL.refuses(named(tpu), operands, **relu, **params) is None
        for config in kernel.KERNEL.configs(named(tpu), operands, **params)[:1]:
            run = functools.partial(kernel.run, config=config, **relu, **params)
            report = lowering.compile(jax.jit(run), operands, target=tpu)
            assert report.kernels == {name: 1}


@pytest.mark.in_turns("dtype", "shape")
@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize(
    ("layout", "shape"),
    [("NHWC", (32, 56, 56, 256)), ("NCHW", (32, 256, 56, 56)), ("NHWC", (32, 7, 7, 2048)), ("NCHW", (32, 512, 28, 28))],
    ids=str,
)
def test_batch_norm_moves_no_image_outside_its_kernels(tpu, layout, shape, dtype):
    """Forward and gradient with relu and residual; XLA makes nothing but the few numbers of each channel."""
    image, parameter = jax.ShapeDtypeStruct(shape, dtype), jax.ShapeDtypeStruct((shape[layout.index("C")],), F32)

    def step(x, scale, bias, residual, grad):
        def y(x, scale, bias, residual):
            return batch_norm_layer(x, scale, bias, residual=residual, activation="relu", layout=layout).y

        result, pull_back = jax.vjp(y, x, scale, bias, residual)
        return result, pull_back(grad)

    with lowering.use("pallas"):
        report = lowering.compile(jax.jit(step), image, parameter, parameter, image, image, target=tpu)
    assert report.kernels == {"batch_norm": 1, "batch_norm_backward": 1}
    assert not re.findall(r"= \S+ (?:copy|transpose|reshape)\(", report.hlo)
    assert report.memory.temporaries < image.size / 10


# Rows of activations of transformers and convolutions, a single long row, and odd ones. 544 columns lie in sublanes.
ROWS = [(1024, 4096), (8, 1024, 544), (1000, 4160), (4, 3136), (2**20,), (13, 96)]


@pytest.mark.in_turns("dtype", "shape")
@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("shape", ROWS, ids=str)
def test_dropout_compiles_each_way(tpu, shape, dtype):
    x = jax.ShapeDtypeStruct(shape, dtype)
    streams, words = (jax.ShapeDtypeStruct((*shape[:-1], last), "uint32") for last in (3, shape[-1] // 32))
    keep = jax.ShapeDtypeStruct((2,), F32)
    for name, kernel, run, operands in (
        ("dropout", dropout.KERNEL, dropout.run, (streams, x, keep)),
        ("dropout_backward", dropout.BACKWARD_KERNEL, dropout.run_backward, (x, words, keep)),
    ):
        assert kernel.refuses(named(tpu), *operands) is None
        config = kernel.configs(named(tpu), *operands)[0]
        report = lowering.compile(functools.partial(run, config=config), *operands, target=tpu)
        assert report.kernels == {name: 1}


@pytest.mark.parametrize("columns", [4096, 544])
def test_dropout_makes_no_words_outside_its_kernels(tpu, columns):
    """A step that drops activations forward and backward: XLA makes nothing but the numbers that begin each row."""
    x = jax.ShapeDtypeStruct((4096, columns), BF16)

    def step(x, grad):
        y, pull_back = jax.vjp(lambda x: dropout_layer(jax.random.key(0), x, 0.1), x)
        return y, pull_back(grad)

    with lowering.use("pallas"):
        report = lowering.compile(jax.jit(step), x, x, target=tpu)
    assert report.kernels == {"dropout": 1, "dropout_backward": 1}
    assert not re.findall(rf"= bf16\[(?:4096,{columns}|{columns},4096)\]\S* (?:copy|transpose)\(", report.hlo)
    words_bytes, streams_bytes = x.size // 8, 4096 * 128 * 4
    assert report.memory.temporaries < words_bytes + 2 * streams_bytes
