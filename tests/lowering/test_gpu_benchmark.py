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
from test_suite import H100, problems_of

import lowering
from jaxops._suite import BF16, SUITE
from jaxops.linear_cross_entropy import linear_cross_entropy
from lowering.campaign.machine import Machine
from lowering.campaign.problems import Problem
from lowering.campaign.verifying import steps

ROOT = Path(__file__).parents[2]
CALLS, OTHERS = ("first", "second", "third"), ("smoke", "lce", "tune", "profile")
TIMED = {"probe", "headline", "statistics", "races", "softmax", "peers", "others", "lce", "profile"}
# What each takes on an H100, assumed: a program compiled and run three times; a process with its references; a case
# timed in a process of its own, compiled and autotuned.
PROGRAM_SECONDS, PROCESS_SECONDS, CASE_SECONDS = 4, 12, 14


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
    timed = [each for each in records if "skipped" not in each and each["stage"] not in ("probe", "races")]
    assert all("median_ms" in record for record in timed)
    assert {each["different"] for each in records if each["stage"] == "races"} == {0}
    assert lowering.TuningResult.load(tmp_path / "cpu.json").entries
    assert json.loads((tmp_path / "gpu_cpu.json").read_text())["cases"] == records
    verdicts = tmp_path / "found" / "rehearsed" / "cpu.jsonl"
    again = gpu("first", "--out", tmp_path / "again", "--done", tmp_path, "--rehearse")
    assert again.returncode == 0, again.stderr
    assert (tmp_path / "again" / "gpu.jsonl").read_text().splitlines() == lines
    assert (tmp_path / "again" / verdicts.relative_to(tmp_path)).read_text() == verdicts.read_text()


def programs(case):
    """How many programs it takes to verify a case: each kernel in each configuration, loops twice."""
    count = 0
    for size in case.verified_at:
        for operator, operands, params in problems_of(case, size):
            problem = Problem(None, operator, operands, params)
            found = steps(case, problem, Machine(H100, rehearse=False), all_configs=size == case.verified_at[-1])
            run = [config for _, _, config in found if config is not None]
            count += len(run) * (1 + (operator.name in case.loops))
    return count


@pytest.mark.parametrize("call", CALLS)
def test_what_a_call_does_fits_its_time(call, benchmark):
    by_name = {case.name: case for case in SUITE}
    seconds = 0
    for stage in benchmark.CALLS[call]:
        verified = [by_name[name] for name in benchmark.VERIFIED.get(stage, ())]
        spent = sum(PROGRAM_SECONDS * programs(x) + PROCESS_SECONDS * (1 + bool(x.loops)) for x in verified)
        assert spent <= benchmark.VERIFIED_SHARE * (benchmark.CALL_SECONDS - seconds)
        # Peers take what time is left; the next call goes on with them.
        seconds += spent + CASE_SECONDS * len(benchmark.cases(stage, rehearse=False)) * (stage != "peers")
    assert seconds <= benchmark.CALL_SECONDS


def test_the_first_call_times_the_three_products_from_end_to_end(benchmark):
    *_, stage = benchmark.CALLS["first"]
    candidates = [case.arguments.get("candidate") for case in benchmark.cases(stage, rehearse=False)]
    assert candidates[:2] == ["jaxops:grad_in_forward", "jaxops:grad_in_forward+pallas"]
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


def test_a_case_keeps_the_host_s_time_beside_the_device_s_and_says_when_it_runs(gpu_cases, monkeypatch):
    readings = iter([gpu_cases.Reading(8.0, 9.0), *[gpu_cases.Reading(4.0, 6.0)] * 3])
    monkeypatch.setattr(gpu_cases, "device_clock", lambda platform: lambda launch: next(readings))
    assert gpu_cases.measured([lambda: 0] * 2) == {"median_ms": 2.0, "clock": "device", "wall_ms": 3.0}
    messages = [json.loads(line) for line in gpu_cases.ANSWERS.stream.getvalue().splitlines()]
    assert [message["runs"] for message in messages] == [True] * 4 + [False]
    monkeypatch.setattr(gpu_cases, "device_clock", lambda platform: lambda launch: gpu_cases.Reading(5.0, 20.0))
    with pytest.raises(gpu_cases.ClockError, match=r"5\.000 ms of the host's 20\.000"):
        gpu_cases.measured([lambda: 0])


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


def test_an_unknown_stage_is_refused(tmp_path):
    result = gpu("polish", "--out", tmp_path)
    assert result.returncode == 2
    assert "invalid choice: 'polish'" in result.stderr
