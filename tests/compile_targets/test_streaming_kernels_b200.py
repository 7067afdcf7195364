"""The kernels that stream through registers, compiled for Blackwell, whose launches and registers are as Hopper's."""

import functools

import jax
import pytest
from compile_targets.conftest import installed
from compile_targets.sass import machine_code

import lowering
from jaxops.batch_norm.backward import BackwardOperands
from jaxops.batch_norm.operator import TrainingOperands
from lowering.targets import named
from pallas_kernels.ema_adam_update import COEFFICIENTS
from pallas_kernels.gpu import (
    batch_norm,
    batch_norm_backward,
    dropout,
    ema_adam,
    local_response_norm,
    max_pool_backward,
    softmax,
    softmax_backward,
)
from pallas_kernels.softmax_groups import Groups

F32, BF16 = "float32", "bfloat16"
ROWS = {"log": False, "groups": Groups((32000,), (0,))}
RELU = {"axis_name": None, "activation": ("relu", 0.0, True)}
WINDOWS = {"window": (1, 2, 2), "stride": (1, 2, 2), "padding": ((0, 0),) * 3, "propagate_nan": True}
PIXELS, STATISTIC = ((32, 56 * 56, 64, 1), BF16), ((64,), F32)
MASK = ((1024, 128), "uint32")
# A kernel's record, its operands and parameters; and the bytes of a thread's accesses to them.
CASES = {
    "softmax": (softmax.KERNEL, [((512, 32000), F32)], ROWS, 16),
    "softmax-backward": (softmax_backward.KERNEL, [((512, 32000), F32)] * 2, ROWS, 16),
    "ema-adam": (
        ema_adam.KERNEL,
        [*[((4096, 4096), F32)] * 5, ((len(COEFFICIENTS),), F32)],
        {"mode": "adamw", "output": "params"},
        16,
    ),
    "batch-norm": (
        batch_norm.KERNEL,
        [TrainingOperands(PIXELS, STATISTIC, STATISTIC, PIXELS)],
        {"epsilon": 0.0, **RELU},
        8,
    ),
    "batch-norm-backward": (
        batch_norm_backward.KERNEL,
        [BackwardOperands(PIXELS, PIXELS, *[STATISTIC] * 5, PIXELS)],
        {"residual_grad": True, **RELU},
        8,
    ),
    "dropout": (dropout.KERNEL, [((1024, 3), "uint32"), ((1024, 4096), BF16), ((2,), F32)], {}, 16),
    "dropout-backward": (dropout.BACKWARD_KERNEL, [((1024, 4096), BF16), MASK, ((2,), F32)], {}, 16),
    "max-pool-backward": (
        max_pool_backward.KERNEL,
        [((32, 1, 56, 56, 512), F32), ((32, 1, 28, 28, 512), F32)],
        WINDOWS,
        16,
    ),
    "local-response-norm": (
        local_response_norm.KERNEL,
        [((16, 64, 1, 56, 56), F32)],
        {"n": 5, "alpha": 1.5, "beta": 0.75, "k": 0.5},
        4,
    ),
}


@pytest.fixture
def b200():
    return installed("cuda-b200")


@pytest.mark.cuda_compile
@pytest.mark.parametrize("case", CASES)
def test_streaming_kernels_compile_in_registers_for_blackwell(b200, case):
    kernel, shapes, params, access_bytes = CASES[case]
    operands = jax.tree.map(lambda x: jax.ShapeDtypeStruct(*x), shapes, is_leaf=lambda x: type(x) is tuple)
    assert kernel.refuses(named(b200), *operands, **params) is None
    config = kernel.configs(named(b200), *operands, **params)[0]
    run = functools.partial(kernel.run, config=config, **params)
    report = lowering.compile(jax.jit(run), *operands, target=b200)
    assert report.kernels
    assert all(resources.spilled_bytes == 0 for resources in report.gpu_resources)
    for code in machine_code(report):
        loaded = code.access_bytes("LDG") + code.access_bytes("LD")
        assert loaded[access_bytes] >= 4
        assert code.bytes_in_flight() >= 4 * access_bytes
