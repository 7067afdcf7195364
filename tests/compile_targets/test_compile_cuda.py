"""Kernels compiled by the real NVIDIA compilers; run with `-m cuda_compile` where the CUDA plugin is installed."""

import functools

import jax
import pytest

import lowering
from pallas_kernels.ema_adam_update import COEFFICIENTS
from pallas_kernels.gpu import ema_adam

pytestmark = pytest.mark.cuda_compile

F32, BF16, F16 = "float32", "bfloat16", "float16"
TUPLE_TABLE_BYTES = 32


def compile_ema_adam(target, shape, dtypes, *, config, mode="adamw", output="params"):
    shapes_and_dtypes = [*((shape, dtype) for dtype in dtypes), ((len(COEFFICIENTS),), F32)]
    operands = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes_and_dtypes]
    run = functools.partial(ema_adam.run, mode=mode, output=output, config=config)
    donated = ema_adam.overwrites(*operands, mode=mode, output=output)
    return lowering.compile(jax.jit(run, donate_argnums=donated), *operands, target=target)


@pytest.mark.parametrize("config", ema_adam._CONFIGS, ids=str)
@pytest.mark.parametrize("dtypes", [(F32,) * 5, (BF16,) * 5, (F16, F16, F32, BF16, F32)], ids=["f32", "bf16", "mixed"])
@pytest.mark.parametrize("shape", [(128,), (1000,), (4096, 4096), (50257, 769)], ids=str)
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
