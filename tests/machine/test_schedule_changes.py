"""Saved schedules, and what changed since: in Python, and as `jaxops compile` compares them."""

import dataclasses
import json
import re
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from bundle_text import dma, program, wait, written
from typer.testing import CliRunner

import lowering
from jaxops_command.app import app
from lowering.schedule.changes import changes
from lowering.schedule.kernel import Region
from lowering.schedule.report import schedule_of
from lowering.schedule.rows import KernelSchedule
from lowering.targets import named


def region(source, cycles, bound="MXU"):
    return Region(0, 9, 10, cycles, 0.0, 0, bound, source)


def kernel(name, time_us, *regions, kind="fusion", source="model.py:12 (loss)", operator="", dma_bytes=0):
    facts = {
        "calls": 1,
        "cycles": 100.0,
        "share": 0.5,
        "dma_bytes": dma_bytes,
        "dma_count": 0,
        "stall_cycles": 0.0,
        "spills": 0,
    }
    about = {"kind": kind, "source": source, "operator": operator, "slots": {"MXU": 0.5}, "bound": "MXU"}
    return KernelSchedule(name=name, time_us=time_us, roofline_us=1.0, regions=regions, **facts, **about)


def schedule(*kernels, target="tpu-v5e"):
    return lowering.Schedule(target, kernels, sum(kernel.time_us for kernel in kernels), 1.0, (), ("a remark",))


@pytest.fixture
def replayed(tmp_path):
    (tmp_path / "dumps").mkdir()
    return schedule_of(written(tmp_path / "dumps"), named("tpu-v5e"), border_bytes=0)


@pytest.fixture
def slower(tmp_path):
    (tmp_path / "slower").mkdir()
    folder = written(tmp_path / "slower", fusion=program(dma(1000), *wait(1000), *[""] * 3000))
    return schedule_of(folder, named("tpu-v5e"), border_bytes=0)


def test_a_schedule_is_loaded_as_it_was_saved(replayed, tmp_path):
    path = tmp_path / "base.json"
    replayed.save(path)
    loaded = lowering.Schedule.load(path)
    assert loaded == replayed
    assert loaded.to_json() == replayed.to_json()
    assert "again" not in json.loads(replayed.to_json())
    loaded.save(path)  # over an earlier one
    with pytest.raises(lowering.ScheduleError, match="to_perfetto: schedule must be one that `compile` has returned"):
        loaded.to_perfetto(tmp_path / "trace.json")


@pytest.mark.parametrize(
    "damage",
    [
        lambda record: "not JSON",
        lambda record: "[]",
        lambda record: json.dumps({**record, "total_us": float("nan")}),
        lambda record: json.dumps({**record, "kernels": [{}]}),
        lambda record: json.dumps({name: value for name, value in record.items() if name != "target"}),
        lambda record: json.dumps({**record, "remarks": [3]}),
        lambda record: json.dumps({**record, "kernels": [{**record["kernels"][0], "cycles": "many"}]}),
    ],
)
def test_what_is_no_saved_schedule_is_refused(replayed, tmp_path, damage):
    (tmp_path / "base.json").write_text(damage(replayed.to_record()))
    for refused in (lambda path: lowering.Schedule.load(path), replayed.save):
        with pytest.raises(
            lowering.ScheduleError, match=r"load: '.*base.json' must be a whole file of a saved schedule"
        ):
            refused(tmp_path / "base.json")


def test_files_that_cannot_be_read_or_written_are_refused(replayed, tmp_path):
    with pytest.raises(lowering.ScheduleError, match=r"load: .* must be a file that can be read; got No such"):
        lowering.Schedule.load(tmp_path / "base.json")
    for write in (replayed.save, replayed.to_perfetto):
        with pytest.raises(
            lowering.ScheduleError, match=f"{write.__name__}: .* must be a file that can be written; got"
        ):
            write(tmp_path / "nowhere" / "file.json")


def test_kernels_are_matched_by_name_and_else_by_what_they_do():
    before = schedule(
        kernel("fusion.1", 10.0),
        kernel("fusion.2", 5.0, source="model.py:30 (head)"),
        kernel("softmax.1", 7.0, kind="mosaic", operator="softmax(f32[8,128])"),
        kernel("copy.3", 2.0, kind="copy"),
    )
    after = schedule(
        kernel("fusion.2", 11.0, source="model.py:14 (loss)"),  # numbered anew, and moved by two lines
        kernel("fusion.7", 5.0, source="model.py:32 (head)"),
        kernel("softmax.2", 3.5, kind="mosaic", operator="softmax(f32[8,128])"),
        kernel("transpose.1", 1.0, kind="transpose"),
    )
    found = changes(before, after)
    times = {one.name: (one.before_us, one.after_us) for one in found.kernels}
    expected = {"fusion.2": (10, 11), "fusion.7": (5, 5), "softmax.2": (7, 3.5), "copy.3": (2, None)}
    assert times == {**expected, "transpose.1": (None, 1)}
    assert [one.name for one in found.kernels][:3] == ["softmax.2", "copy.3", "fusion.2"]  # what changed most is first
    assert [one.name for one in found.slower(3)] == ["fusion.2"]
    assert found.slower(10) == []
    assert (found.total.before_us, found.total.after_us) == (24, 20.5)
    assert str(found.slower(3)[0]) == "fusion.2 takes 11.0 us instead of 10.0, +10.0%"


def test_what_xla_made_is_matched_by_the_bytes_that_it_moves():
    before = schedule(kernel("fusion.1", 10.0, dma_bytes=1000), kernel("fusion.2", 1.0, dma_bytes=100))
    after = schedule(kernel("fusion.1", 1.0, dma_bytes=100), kernel("fusion.2", 11.0, dma_bytes=1400))
    assert [one.name for one in changes(before, after).slower(3)] == ["the program", "fusion.2"]
    found = changes(before, schedule(kernel("fusion.1", 30.0, dma_bytes=3000), kernel("fusion.2", 1.0, dma_bytes=100)))
    assert [one.name for one in found.slower(3)] == ["the program"]
    assert [(one.before_us, one.after_us) for one in found.kernels] == [(None, 30), (10, None), (1, 1)]


def test_pallas_kernels_are_matched_by_their_names():
    before = schedule(kernel("matmul.1", 10.0, kind="mosaic", dma_bytes=1000))
    after = schedule(kernel("matmul.3", 30.0, kind="mosaic", dma_bytes=3000, source="other.py:3 (step)"))
    assert [one.name for one in changes(before, after).slower(3)] == ["the program", "matmul.3"]


def test_what_the_program_does_itself_counts_in_the_total_alone():
    before = schedule(kernel("program", 1.0, kind="program"), kernel("fusion.1", 9.0))
    after = schedule(kernel("program", 2.0, kind="program"), kernel("fusion.1", 8.0))
    assert changes(before, after).slower(3) == []
    assert changes(before, after).kernels[0].ratio in (2, 8 / 9)


def test_regions_are_matched_by_their_lines_or_where_these_move_by_their_order():
    before = schedule(kernel("matmul.1", 10.0, region("a.py:5", 60.0), region("", 40.0, "scalar")))
    after = schedule(kernel("matmul.1", 20.0, region("a.py:5", 80.0), region("", 20.0, "scalar")))
    (one,) = changes(before, after).kernels
    assert [(x.name, x.before_us, x.after_us) for x in one.regions] == [("a.py:5", 6.0, 16.0)]
    moved = schedule(kernel("matmul.1", 20.0, region("a.py:7", 80.0), region("", 20.0, "scalar")))
    (one,) = changes(before, moved).kernels
    assert [(x.name, x.before_us, x.after_us) for x in one.regions] == [("a.py:7", 6.0, 16.0)]
    text = str(changes(before, after, ("base.json", "now")))
    assert re.search(r"matmul\.1 +│ +10\.0 │ +20\.0 │ +\+10\.0 │ +2\.000 │", text)
    assert "a.py:5" in text


def test_small_kernels_are_no_reason():
    small = dataclasses.replace(kernel("fusion.1", 0.001), share=0.0001)
    assert changes(schedule(small), schedule(dataclasses.replace(small, time_us=0.002))).kernels == ()


def test_schedules_for_two_targets_are_not_compared():
    with pytest.raises(lowering.ScheduleError, match="schedules must be for one target; got tpu-v5e and tpu-v6e"):
        changes(schedule(), schedule(target="tpu-v6e"))


@pytest.fixture
def command(tmp_path, monkeypatch):
    """`jaxops compile` where the compiler's work is done already: a function from a schedule and options."""
    (tmp_path / "model.py").write_text("def twice(x):\n    return 2 * x\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    report = lowering.compile(jnp.sin, jax.ShapeDtypeStruct((8,), jnp.float32), target="cpu")

    def run(found, *options, target="tpu-v5e"):
        finished = dataclasses.replace(report, target=target, schedule=found)
        monkeypatch.setattr(lowering, "compile", lambda *args, **kwargs: finished)
        words = ["compile", "model.py:twice", "--arg", "f32[8]", "--target", target, "--schedule", *options]
        return CliRunner().invoke(app, words)

    return run


def test_the_command_saves_compares_and_traces(command, replayed, slower):
    assert command(replayed, "--save", "base.json", "--perfetto", "trace.json").exit_code == 0
    assert lowering.Schedule.load("base.json") == replayed
    assert json.loads(Path("trace.json").read_text())["traceEvents"]
    against = "--against", "base.json"
    same = command(replayed, *against, "--slower-than", "0%")
    assert (same.exit_code, same.stderr) == (0, "")
    assert "3 without a change" in same.stdout
    for options in (against, (*against, "--slower-than", "500%")):
        assert command(slower, *options).exit_code == 0
    result = command(slower, *against, "--slower-than", "3%")
    assert result.exit_code == 1
    (sentence,) = result.stderr.splitlines()
    assert sentence.startswith("jaxops: slower than base.json by more than 3%: the program takes ")
    assert "; fusion takes " in sentence
    assert re.search(r"fusion\.1 +│ +[\d.]+ │ +[\d.]+ │ +\+[\d.]+ │ +[\d.]+ │", result.stdout)
    assert "softmax(f32[8,128])" in result.stdout  # by operator, as implementations are compared
    faster = command(replayed, "--against", "base.json", "--slower-than", "3")
    assert faster.exit_code == 0


def test_the_command_compares_in_json(command, replayed, slower):
    command(replayed, "--save", "base.json")
    result = command(slower, "--against", "base.json", "--slower-than", "3.5%", "--json")
    assert result.exit_code == 1
    record = json.loads(result.stdout)
    assert record["schedule"]["total_us"] == slower.total_us
    total = record["changes"]["total"]
    assert (total["before_us"], total["after_us"]) == (replayed.total_us, slower.total_us)
    assert (record["changes"]["from"], record["changes"]["to"]) == ("base.json", "now")
    assert {one["name"] for one in record["changes"]["kernels"]} == {"fusion", "fusion.1", "program"}
    assert record["changes"]["slower"] == ["the program", "fusion", "fusion.1"]
    unlimited = command(slower, "--against", "base.json", "--json")
    assert (unlimited.exit_code, json.loads(unlimited.stdout)["changes"]["slower"]) == (0, [])
    assert all(one["ratio"] > 1 for one in record["changes"]["kernels"] if one["name"] != "program")


def test_the_command_refuses_a_schedule_for_another_target(command, replayed):
    command(replayed, "--save", "base.json")
    result = command(replayed, "--against", "base.json", target="tpu-v6e")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == "jaxops: --against must be a schedule for tpu-v6e; got one for tpu-v5e\n"
    result = command(dataclasses.replace(replayed, border_bytes=4000), "--against", "base.json")
    assert result.exit_code == 2
    sizes = [f"{count:,} bytes of arguments and results" for count in (4000, 0)]
    assert result.stderr == f"jaxops: --against must be a schedule for {sizes[0]}; got one for {sizes[1]}\n"
