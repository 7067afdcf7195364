"""Kernels compiled by the real NVIDIA compilers; run with `-m cuda_compile` where the CUDA plugin is installed."""

import functools

import jax
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

import lowering
from jaxops.batch_norm.backward import BackwardOperands
from jaxops.batch_norm.operator import TrainingOperands
from lowering.targets import named
from pallas_kernels.ema_adam_update import COEFFICIENTS
from pallas_kernels.gpu import batch_norm, batch_norm_backward, dropout, ema_adam

pytestmark = pytest.mark.cuda_compile

F32, BF16, F16 = "float32", "bfloat16", "float16"
TUPLE_TABLE_BYTES = 32


def compile_ema_adam(target, shape, dtypes, *, config, mode="adamw", output="params"):
    shapes_and_dtypes = [*((shape, dtype) for dtype in dtypes), ((len(COEFFICIENTS),), F32)]
    operands = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes_and_dtypes]
    run = functools.partial(ema_adam.run, mode=mode, output=output, config=config)
    donated = ema_adam.overwrites(*operands, mode=mode, output=output)
    return lowering.compile(jax.jit(run, donate_argnums=donated), *operands, target=target)


ARRAYS = [(128,), (1000,), (4096, 4096), (50257, 769)]
# CI compiles the first configuration for all arrays, and for the last the others, too.
CASES = [
    pytest.param(shape, config, marks=pytest.mark.slow if shape != ARRAYS[-1] and number else ())
    for number, config in enumerate(ema_adam._CONFIGS)
    for shape in ARRAYS
]


@pytest.mark.in_turns("dtypes", "shape", "config")
@pytest.mark.parametrize("dtypes", [(F32,) * 5, (BF16,) * 5, (F16, F16, F32, BF16, F32)], ids=["f32", "bf16", "mixed"])
@pytest.mark.parametrize(("shape", "config"), CASES, ids=str)
def test_ema_adam_compiles_in_place_and_in_registers(h100, shape, dtypes, config):
    report = compile_ema_adam(h100, shape, dtypes, config=config)
    assert report.kernels == {"ema_adam": 1}
    assert report.memory.aliased >= report.memory.outputs - TUPLE_TABLE_BYTES
    assert report.memory.temporaries <= TUPLE_TABLE_BYTES
    (resources,) = report.gpu_resources
    assert (resources.kernel, resources.shared_bytes) == ("ema_adam", 0)
    assert resources.spilled_bytes == 0
    # With 128 registers, 16 warps fit a multiprocessor, and their loads keep its share of the bandwidth in flight.
    assert resources.registers <= 128


@pytest.mark.parametrize(("mode", "output"), [("adamw", "update"), ("l2", "params")])
@pytest.mark.parametrize("shape", [(), (1,), (7,), (129,), (3, 5, 7), (2, 3, 4, 5, 6, 7, 8, 9)], ids=str)
def test_ema_adam_compiles_for_any_shape(h100, shape, mode, output):
    dtypes = (BF16, BF16, F32, F16, F32)
    report = compile_ema_adam(h100, shape, dtypes, config=ema_adam._CONFIGS[0], mode=mode, output=output)
    assert report.kernels == {"ema_adam": 1}


# Images (n, a, c, b) of ResNet-50's stages and stem, channels first and last, and odd ones.
IMAGES = [
    *[(32, 1, 64, 112 * 112), (32, 1, 256, 56 * 56), (32, 1, 1024, 196), (3, 1, 5, 201)],
    *[(32, 112 * 112, 64, 1), (32, 56 * 56, 256, 1), (32, 49, 2048, 1), (4096, 1, 1000, 1), (64, 1, 130, 1)],
]


@pytest.mark.in_turns("dtype", "shape")
@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("shape", IMAGES, ids=str)
def test_batch_norm_compiles_in_registers(h100, shape, dtype):
    image, statistic = jax.ShapeDtypeStruct(shape, dtype), jax.ShapeDtypeStruct(shape[2:3], F32)
    relu = {"axis_name": None, "activation": ("relu", 0.0, True)}
    for kernels, kernel, operands, params in (
        (
            {"batch_norm_statistics": 1, "batch_norm": 1},
            batch_norm,
            TrainingOperands(image, statistic, statistic, image),
            {"epsilon": 0.0},
        ),
        (
            {"batch_norm_sums": 1, "batch_norm_backward": 1},
            batch_norm_backward,
            BackwardOperands(image, image, *[statistic] * 5, image),
            {"residual_grad": True},
        ),
    ):
        assert kernel.KERNEL.refuses(named(h100), operands, **relu, **params) is None
        run = functools.partial(kernel.run, config=batch_norm._CONFIGS[0], **relu, **params)
        report = lowering.compile(jax.jit(run), operands, target=h100)
        assert report.kernels == kernels
        # The parts' statistics, and nothing like an image.
        assert report.memory.temporaries < image.size * image.dtype.itemsize / 4 + 2**20
        for resources in report.gpu_resources:
            assert resources.spilled_bytes == 0


def test_batch_norm_holds_several_accesses_at_once(h100):
    """30 registers suffice for one of x and one of the residual; with more loads on their way there are more."""
    image, statistic = jax.ShapeDtypeStruct((16, 1, 64, 3136), F32), jax.ShapeDtypeStruct((64,), F32)
    params = {"epsilon": 0.0, "axis_name": None, "activation": ("relu", 0.0, True)}
    run = functools.partial(batch_norm.run, config=batch_norm._CONFIGS[0], **params)
    report = lowering.compile(jax.jit(run), TrainingOperands(image, statistic, statistic, image), target=h100)
    (resources,) = (each for each in report.gpu_resources if each.kernel == "batch_norm")
    assert 40 <= resources.registers <= 64
    assert resources.spilled_bytes == 0


@pytest.mark.parametrize(("shape", "dtype"), [((1024, 4096), F32), ((10, 100, 4160), BF16)], ids=str)
def test_dropout_compiles_in_registers(h100, shape, dtype):
    x = jax.ShapeDtypeStruct(shape, dtype)
    streams, words = (jax.ShapeDtypeStruct((*shape[:-1], last), "uint32") for last in (3, shape[-1] // 32))
    keep = jax.ShapeDtypeStruct((2,), F32)
    for name, kernel, run, operands in (
        ("dropout", dropout.KERNEL, dropout.run, (streams, x, keep)),
        ("dropout_backward", dropout.BACKWARD_KERNEL, dropout.run_backward, (x, words, keep)),
    ):
        assert kernel.refuses(named(h100), *operands) is None
        report = lowering.compile(functools.partial(run, config={}), *operands, target=h100)
        assert report.kernels == {name: 1}
        assert report.memory.temporaries <= TUPLE_TABLE_BYTES
        (resources,) = report.gpu_resources
        assert resources.spilled_bytes == 0
        assert resources.registers <= 64  # a multiprocessor then holds as many threads as it can


def test_a_users_triton_kernel_compiles(h100):
    def doubled(x_ref, y_ref):
        y_ref[...] = x_ref[...] * 2

    x = jax.ShapeDtypeStruct((128,), F32)
    params = triton.CompilerParams(num_warps=4)
    report = lowering.compile(pl.pallas_call(doubled, x, compiler_params=params, name="doubled"), x, target=h100)
    assert report.kernels == {"doubled": 1}
    assert report.memory.peak == 2 * 4 * 128
