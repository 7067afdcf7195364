"""The kernels of local response normalization, compiled by the real NVIDIA compilers."""

import functools

import jax
import pytest

import lowering
from lowering.targets import named
from pallas_kernels.gpu import local_response_norm as kernel

pytestmark = pytest.mark.cuda_compile

F32, BF16, F16 = "float32", "bfloat16", "float16"
STRONG = {"alpha": 1.5, "beta": 0.75, "k": 0.5}
# Images, a window, their dtype and how many registers a thread may have: 65536 for as many warps as hide the memory.
CASES = [
    ((16, 64, 1, 56, 56), 5, F32, 96),
    ((128, 96, 1, 27, 27), 5, BF16, 96),
    ((128, 256, 1, 13, 13), 4, F16, 96),
    ((2, 7, 3, 16, 16), 3, F32, 96),
    ((16, 64, 1, 56, 56), 16, F32, 128),
]


@pytest.mark.parametrize(("shape", "n", "dtype", "registers"), CASES, ids=str)
def test_local_response_norm_compiles_in_registers(h100, shape, n, dtype, registers):
    x = jax.ShapeDtypeStruct(shape, dtype)
    for name, run, operands in (
        ("local_response_norm", kernel.run, [x]),
        ("local_response_norm_backward", kernel.run_backward, [x, x]),
    ):
        assert kernel.refuses(named(h100), *operands, n=n, **STRONG) is None
        config = kernel.configs(named(h100), *operands)[0]
        report = lowering.compile(jax.jit(functools.partial(run, config=config, n=n, **STRONG)), *operands, target=h100)
        assert report.kernels == {name: 1}
        assert report.memory.temporaries < 1024
        (resources,) = report.gpu_resources
        assert (resources.spilled_bytes, resources.shared_bytes) == (0, 0)
        assert resources.registers <= registers


@pytest.mark.parametrize("config", kernel._CONFIGS, ids=str)
def test_local_response_norm_compiles_in_every_configuration(h100, config):
    x = jax.ShapeDtypeStruct((2, 12, 1, 20, 20), F32)
    run = functools.partial(kernel.run_backward, config=config, n=6, **STRONG)
    assert lowering.compile(jax.jit(run), x, x, target=h100).kernels == {"local_response_norm_backward": 1}
