"""`benchmarks/gpu.py` runs every stage to its end without a GPU, so that no slip costs time where there is one."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import lowering

ROOT = Path(__file__).parents[1]
STAGES = ("probe", "smoke", "flagship", "lce", "adam", "rest", "tune", "profile")


def gpu(*arguments):
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=900)


@pytest.mark.rehearsal
@pytest.mark.slow
def test_every_stage_runs_to_its_end_and_nothing_is_measured_twice(tmp_path):
    options = ("--out", tmp_path, "--deadline", 800, "--rehearse")
    result = gpu(*STAGES, *options)
    assert result.returncode == 0, result.stderr
    lines = (tmp_path / "gpu.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    assert {record["stage"] for record in records} == {*STAGES} - {"smoke", "tune"}
    assert [record for record in records if "error" in record] == []
    assert all("median_ms" in record for record in records if "skipped" not in record and record["stage"] != "probe")
    assert lowering.TuningResult.load(tmp_path / "cpu.json").entries
    assert json.loads((tmp_path / "gpu_cpu.json").read_text())["cases"] == records
    again = gpu("probe", "rest", "--out", tmp_path / "again", "--done", tmp_path / "gpu.jsonl", "--rehearse")
    assert again.returncode == 0, again.stderr
    assert not (tmp_path / "again" / "gpu.jsonl").exists()


def test_what_nsight_compute_says_is_kept_by_metric(tmp_path, monkeypatch):
    table = '"ID","Kernel Name","Metric Name","Metric Unit","Metric Value"\n"0","k","Duration","us","12.5"\n'
    tool = tmp_path / "ncu"
    tool.write_text(f"#!/bin/sh\necho '==PROF== Connected'\ncat <<'END'\n{table}END\necho \"$@\" > {tmp_path}/asked\n")
    tool.chmod(0o755)
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    gpu_cases = importlib.import_module("gpu_cases")
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
