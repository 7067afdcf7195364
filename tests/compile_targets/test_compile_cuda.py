"""Kernels compiled by the real NVIDIA compilers; run with `-m cuda_compile` where the CUDA plugin is installed."""

import functools
import re

import jax
import pytest

from pallas_kernels.ema_adam_update import COEFFICIENTS
from pallas_kernels.gpu import ema_adam

pytestmark = pytest.mark.cuda_compile

F32, BF16, F16 = "float32", "bfloat16", "float16"
TUPLE_TABLE_BYTES = 32


@pytest.fixture
def ptxas_reports(tmp_path, monkeypatch):
    """Returns what ptxas has said of the kernels compiled so far."""
    monkeypatch.setenv("MOSAIC_GPU_DUMP_TO", str(tmp_path))
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    return lambda: [path.read_text(errors="replace") for path in sorted(tmp_path.glob("*.ptxas"))]


def compile_ema_adam(sharding, shape, dtypes, *, config, mode="adamw", output="params"):
    shapes_and_dtypes = [*((shape, dtype) for dtype in dtypes), ((len(COEFFICIENTS),), F32)]
    operands = [jax.ShapeDtypeStruct(shape, dtype, sharding=sharding) for shape, dtype in shapes_and_dtypes]
    run = functools.partial(ema_adam.run, mode=mode, output=output, config=config)
    donated = (1 if output == "params" else 0, 2, 3, 4)
    return jax.jit(run, donate_argnums=donated).lower(*operands).compile()


@pytest.mark.parametrize("config", ema_adam._CONFIGS, ids=str)
@pytest.mark.parametrize("dtypes", [(F32,) * 5, (BF16,) * 5, (F16, F16, F32, BF16, F32)], ids=["f32", "bf16", "mixed"])
@pytest.mark.parametrize("shape", [(128,), (1000,), (4096, 4096), (50257, 769)], ids=str)
def test_ema_adam_compiles_in_place_and_in_registers(h100_sharding, shape, dtypes, config, ptxas_reports):
    compiled = compile_ema_adam(h100_sharding, shape, dtypes, config=config)
    memory = compiled.memory_analysis()
    assert compiled.as_text().count('custom_call_target="mosaic_gpu_v2"') == 1
    assert memory.alias_size_in_bytes >= memory.output_size_in_bytes - TUPLE_TABLE_BYTES
    assert memory.temp_size_in_bytes <= TUPLE_TABLE_BYTES
    (report,) = ptxas_reports()
    assert "0 bytes spill stores, 0 bytes spill loads" in report
    # With 128 registers, 16 warps fit a multiprocessor, and their loads keep its share of the bandwidth in flight.
    assert int(re.search(r"Used (\d+) registers", report).group(1)) <= 128


@pytest.mark.parametrize(("mode", "output"), [("adamw", "update"), ("l2", "params")])
@pytest.mark.parametrize("shape", [(), (1,), (7,), (129,), (3, 5, 7), (2, 3, 4, 5, 6, 7, 8, 9)], ids=str)
def test_ema_adam_compiles_for_any_shape(h100_sharding, shape, mode, output):
    compiled = compile_ema_adam(
        h100_sharding, shape, (BF16, BF16, F32, F16, F32), config=ema_adam._CONFIGS[0], mode=mode, output=output
    )
    assert compiled.as_text().count('custom_call_target="mosaic_gpu_v2"') == 1
