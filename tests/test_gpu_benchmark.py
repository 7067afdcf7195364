"""`benchmarks/gpu.py` runs every stage to its end without a GPU, so that no slip costs time where there is one."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import lowering

ROOT = Path(__file__).parents[1]
STAGES = ("probe", "smoke", "flagship", "lce", "adam", "rest", "tune")


def gpu(*arguments):
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=900)


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


def test_an_unknown_stage_is_refused(tmp_path):
    result = gpu("polish", "--out", tmp_path)
    assert result.returncode == 2
    assert "invalid choice: 'polish'" in result.stderr
