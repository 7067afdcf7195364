"""`benchmarks/gpu.py` runs every stage to its end without a GPU, so that no slip costs time where there is one."""

import functools
import importlib
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import jaxops
import lowering
from jaxops._cases import BF16
from jaxops.linear_cross_entropy import linear_cross_entropy
from lowering.register import kernels_of
from lowering.targets import named

ROOT = Path(__file__).parents[2]
H100 = named("cuda-h100")
CALLS, OTHERS = ("first", "second"), ("tune", "profile")
TIMED = {
    *("probe", "headline", "agreement", "chunks", "peers", "forms", "lce", "steps", "scoring", "races", "optimizers"),
    "profile",
}
# On an H100 with 16 processors: a case in a process of its own, and the grid.
CASE_SECONDS, GRID_SECONDS = 9, 120


@pytest.fixture
def benchmark(monkeypatch):
    """`gpu.py` as a module."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("gpu")


def gpu(*arguments):
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=900)


@pytest.mark.rehearsal
@pytest.mark.slow
def test_every_stage_runs_to_its_end_and_nothing_is_measured_twice(tmp_path):
    options = ("--out", tmp_path, "--deadline", 800, "--rehearse")
    result = gpu(*CALLS, *OTHERS, *options)
    assert result.returncode == 0, result.stderr
    lines = (tmp_path / "gpu.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    assert {record["stage"] for record in records} == TIMED
    assert [record for record in records if "error" in record] == []
    timed = [each for each in records if "skipped" not in each and each["stage"] not in ("probe", "races", "agreement")]
    assert all("median_ms" in record for record in timed)
    assert {each["different"] for each in records if each["stage"] == "races"} == {0}
    assert lowering.TuningResult.load(tmp_path / "cpu.json").entries
    assert json.loads((tmp_path / "gpu_cpu.json").read_text())["cases"] == records
    verdicts = tmp_path / "found" / "rehearsed" / "cpu.jsonl"
    again = gpu("first", "--out", tmp_path / "again", "--done", tmp_path, "--rehearse")
    assert again.returncode == 0, again.stderr
    assert (tmp_path / "again" / "gpu.jsonl").read_text().splitlines() == lines
    assert (tmp_path / "again" / verdicts.relative_to(tmp_path)).read_text() == verdicts.read_text()


def test_the_first_call_fits_its_time(benchmark):
    """Verifying ends at its share, and what the grid times then is what was compiled meanwhile."""
    timed = [benchmark.cases(stage, rehearse=False) for stage in benchmark.CALLS["first"]]
    share = benchmark.VERIFIED_SHARE * benchmark.CALL_SECONDS
    assert CASE_SECONDS * sum(map(len, timed)) + share + GRID_SECONDS <= benchmark.CALL_SECONDS


@pytest.mark.slow
def test_the_grid_has_every_kernel_but_those_of_the_vocabulary_s_parts(benchmark):
    grid = importlib.import_module("gpu_grid")
    found = {"linear_cross_entropy", "linear_cross_entropy_sum_with_gradients", "linear_cross_entropy_backward"}
    for name, option, sizes, _ in grid.cases(rehearse=False):
        found |= {use.operator.name for use, _ in grid.uses(grid.FAMILIES[name], option, sizes, H100)}
    kernels = {x.name for x in jaxops.operators() if any(kernel.platform == "cuda" for kernel in kernels_of(x))}
    assert kernels - found == {"fused_linear_online_max_sum", "fused_linear_cross_entropy_loss_grad"}


def test_the_grid_s_processes_time_what_they_compiled_once_they_may(benchmark, tmp_path, monkeypatch):
    grid = importlib.import_module("gpu_grid")
    uses_of, compiled = functools.partial(grid.evidence_cases.uses, hardware=H100), grid.compiled
    monkeypatch.setattr(grid, "uses", lambda family, option, sizes, _: uses_of(family, option, sizes))
    monkeypatch.setattr(grid, "compiled", lambda use, kernel, count: compiled(use, kernel, 0))
    grid.worker(0, 1, tmp_path, True)
    (tmp_path / "grid.jsonl").write_text("".join((tmp_path / "grid.jsonl").read_text().splitlines(True)[:-1]))
    grid.worker(0, 1, tmp_path, True)  # takes up what is missing
    records = [json.loads(line) for line in (tmp_path / "grid.jsonl").read_text().splitlines()]
    operators = [record["operator"] for record in records]
    assert sorted(operators) == ["apply_fused_ema_adam", "softmax", "softmax_backward"]
    assert all(row["median_us"] > 0 for record in records for row in record["rows"])


def test_the_first_call_times_the_three_products_from_end_to_end(benchmark):
    candidates = [case.arguments.get("candidate") for case in benchmark.cases("headline", rehearse=False)]
    assert candidates[:2] == ["jaxops:grad_in_forward+xla_by_rows", "jaxops:grad_in_forward+pallas"]
    x, weight, labels = (
        jax.ShapeDtypeStruct(*each) for each in (((64, 64), BF16), ((256, 64), BF16), ((64,), "int32"))
    )
    step = jax.value_and_grad(functools.partial(linear_cross_entropy, strategy="grad_in_forward"), (0, 1))
    with lowering.use("pallas"):
        text = jax.jit(step).trace(x, weight, labels).lower(lowering_platforms=("cuda",)).as_text()
    assert "linear_cross_entropy_exponentials" in text
    assert text.count("stablehlo.custom_call @mosaic_gpu") == 1


def test_what_went_wrong_in_an_earlier_call_is_done_again(benchmark, tmp_path):
    done, out, found = tmp_path / "done", tmp_path / "out", Path("found") / "cuda-h100.jsonl"
    verdicts = [
        {"stage": "verify", "flags": "", "case": "a", "step": "1", "outcome": "verified"},
        {"stage": "verify", "flags": "", "case": "a", "step": "2", "outcome": "wrong"},
        {"stage": "verify", "flags": "", "case": "a", "done": True},
        {"stage": "verify", "flags": "", "case": "b", "done": True},
    ]
    results = [{"stage": "probe", "name": "rates"}, {"stage": "races", "name": "one", "error": "no memory"}]
    for path, records in ((found, verdicts), (Path("gpu.jsonl"), results)):
        (done / path).parent.mkdir(parents=True, exist_ok=True)
        (done / path).write_text("".join(f"{json.dumps(record)}\n" for record in records))
    benchmark.carry(done, out)
    assert [json.loads(line) for line in (out / found).read_text().splitlines()] == [verdicts[0], verdicts[3]]
    assert [json.loads(line) for line in (out / "gpu.jsonl").read_text().splitlines()] == results[:1]


@pytest.fixture
def gpu_cases(monkeypatch):
    """`gpu_cases.py` as a module, and what it tells."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    module = importlib.import_module("gpu_cases")
    monkeypatch.setattr(module.ANSWERS, "stream", io.StringIO())
    return module


@pytest.fixture
def gpu_timing(gpu_cases):
    """`gpu_timing.py` as a module."""
    return importlib.import_module("gpu_timing")


def test_a_case_keeps_the_host_s_time_beside_the_device_s_and_says_when_it_runs(gpu_timing, monkeypatch):
    readings = iter([gpu_timing.Reading(8.0, 9.0), *[gpu_timing.Reading(4.0, 6.0)] * 3])
    monkeypatch.setattr(gpu_timing, "device_clock", lambda platform: lambda launch: next(readings))
    monkeypatch.setattr(gpu_timing, "by_host", lambda launch: launch() or gpu_timing.Reading(300.0, 300.0))
    runs = []
    found = gpu_timing.measured([lambda: runs.append(0)] * 2)
    # One launch was timed at 300 ms, so that two are in a row then; each is of two runs.
    assert found == {"median_ms": 2.0, "clock": "device", "wall_ms": 3.0, "series_ms": 75.0}
    assert len(runs) == 2 * (1 + 1 + 3 * 2)
    messages = [json.loads(line) for line in gpu_timing.ANSWERS.stream.getvalue().splitlines()]
    assert [message["runs"] for message in messages] == [True] * 5 + [False]
    monkeypatch.setattr(gpu_timing, "device_clock", lambda platform: lambda launch: gpu_timing.Reading(5.0, 20.0))
    found = gpu_timing.measured([lambda: 0])
    assert (found["median_ms"], found["clock"]) == (20.0, "host")
    assert "5.000 ms of the host's 20.000" in found["fault"]


def test_races_are_counted_bit_by_bit(gpu_cases, monkeypatch):
    nan, zero = jnp.asarray([jnp.nan, 0.0]), jnp.asarray([jnp.nan, -0.0])
    results = iter([nan, nan, zero, nan])
    monkeypatch.setattr(gpu_cases, "launcher", lambda **_: lambda: (next(results),))
    assert gpu_cases.repeated(3) == {"repeats": 3, "different": 1}


def test_what_nsight_compute_says_is_kept_by_metric(tmp_path, gpu_cases, monkeypatch):
    table = '"ID","Kernel Name","Metric Name","Metric Unit","Metric Value"\n"0","k","Duration","us","12.5"\n'
    tool = tmp_path / "ncu"
    tool.write_text(f"#!/bin/sh\necho '==PROF== Connected'\ncat <<'END'\n{table}END\necho \"$@\" > {tmp_path}/asked\n")
    tool.chmod(0o755)
    kernel = {"kernel": "exponentials", "config": {}, "rows": 1, "hidden": 1, "classes": 1}
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert gpu_cases.profiled(**kernel) == {"Duration (us)": "12.5"}
    assert "--clock-control none --set basic --launch-count 1" in (tmp_path / "asked").read_text()
    monkeypatch.setenv("PATH", "")
    with pytest.raises(gpu_cases.NotHereError, match="ncu is not installed"):
        gpu_cases.profiled(**kernel)


@pytest.mark.long
def test_an_unknown_stage_is_refused(tmp_path):
    result = gpu("polish", "--out", tmp_path)
    assert result.returncode == 2
    assert "invalid choice: 'polish'" in result.stderr
