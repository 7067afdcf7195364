"""The schedules of kernels are deterministic: none may be slower than benchmarks/results/tpu_schedules.json says."""

import importlib
import json
from pathlib import Path

import jax
import pytest
from compile_targets.conftest import installed

pytestmark = pytest.mark.tpu_compile

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
RESULTS = json.loads((BENCHMARKS / "results" / "tpu_schedules.json").read_text())
MOST = 1.03  # of the time that was recorded


@pytest.mark.skipif(
    RESULTS["environment"]["versions"]["jax"] != jax.__version__, reason="the recorded schedules are of another JAX"
)
@pytest.mark.parametrize(
    "name",
    [
        "softmax float32 16384x4096, with gradient",
        "local_response_norm float32 128x96x55x55",
        "dropout bfloat16 16384x4096, rate 0.1",
        "ema_adam float32 65536x1024, donated",
        "batch_norm bfloat16 256x28x28x256 NHWC, with gradients",
        "max_pool bfloat16 256x112x112x64 NHWC 3x3/2, with gradient",
        "embedding float32 32000x1024, 8192 uniform ids, gradient",
        "linear_cross_entropy bf16 4096x1024x32768",
        "linear_log_probs bf16 4096x1024x32768, temperature 0.7",
    ],
)
def test_no_kernel_is_slower_than_recorded(monkeypatch, name):
    monkeypatch.syspath_prepend(BENCHMARKS)
    tpu_schedules = importlib.import_module("tpu_schedules")
    target = installed("tpu-v5e")
    (recorded,) = [case for case in RESULTS["cases"] if case["name"] == f"{name} on {target}"]
    (case,) = [case for case in tpu_schedules.cases() if case.name == name]
    found = tpu_schedules.replayed(case, target, "pallas")
    assert found["us"] <= MOST * recorded["candidates"]["pallas"]["us"]
