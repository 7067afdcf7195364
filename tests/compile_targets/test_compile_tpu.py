"""Kernels compiled by the real XLA:TPU and Mosaic compilers; run with `-m tpu_compile` where libtpu is installed."""

import functools
import re

import jax
import pytest

import lowering
from lowering.targets import named
from pallas_kernels.ema_adam_update import COEFFICIENTS
from pallas_kernels.tpu import ema_adam

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
