"""Replays as traces over time, of programs written by hand as libtpu writes them."""

import collections
import gc
import gzip
import itertools
import json

import pytest
from bundle_text import TOP_LEVEL, dma, program, wait, written

from lowering.schedule.report import schedule_of
from lowering.schedule.timeline import Passage, Timeline
from lowering.targets import named
from lowering.tpu_core.bundles import Bundle
from lowering.tpu_core.dumps import Dumps

TURNS = 5000


def loop(turns, *lines):
    """A loop around bundles, of which each turn takes as many cycles as they have, three and four delay slots."""
    return (
        "%s21_s24 = smov 0",
        "%s22_s24 = sphi %s21_s24, %s23_s24  ;;  %s23_s24 = sadd.s32 1, %s22_s24",
        *lines,
        f"%p1_p0 = scmp.lt.s32.totalorder %s23_s24, {turns}",
        "%9 = sbr.rel (%p1_p0) target bundleno = 1 (0x1)",
        *[""] * 5,
    )


LONG = program(
    *loop(TURNS, dma(10), dma(1, kind="vmem_to_hbm", flag="[#allocation5]"), *wait(10), *wait(1, "[#allocation5]"))
)


def traced(folder, path, compressed=False):
    schedule = schedule_of(folder, named("tpu-v5e"), border_bytes=0)
    schedule.to_perfetto(path)
    text = gzip.decompress(path.read_bytes()) if compressed else path.read_bytes()
    return schedule, json.loads(text)


def slices(trace):
    """The slices of the core's track, with how many are around each; fails where they do not nest."""
    found, open_slices, now = [], [], 0.0
    for event in trace["traceEvents"]:
        if event["ph"] not in "BE":
            continue
        assert event["ts"] >= now
        now = event["ts"]
        if event["ph"] == "B":
            open_slices.append({**event, "depth": len(open_slices), "args": event.get("args", {})})
        else:
            one = open_slices.pop()
            found.append({**one, "end": now, "us": now - one["ts"]})
    assert open_slices == []
    return sorted(found, key=lambda one: (one["ts"], one["depth"]))


def transfers(trace):
    """The asynchronous slices, by whose ends they are complete."""
    begun = {event["id"]: event for event in trace["traceEvents"] if event["ph"] == "b"}
    ended = {event["id"]: event["ts"] for event in trace["traceEvents"] if event["ph"] == "e"}
    assert begun.keys() == ended.keys()
    return [{**event, "end": ended[name]} for name, event in begun.items()]


def test_kernels_follow_one_another_and_take_all_of_the_time(tmp_path):
    schedule, trace = traced(written(tmp_path), tmp_path / "trace.json")
    assert trace["displayTimeUnit"] == "ns"
    kernels = [one for one in slices(trace) if one["depth"] == 0]
    assert [one["name"] for one in kernels if one["name"] != "program"] == ["fusion"] * 3 + ["fusion.1"]
    for before, after in itertools.pairwise(kernels):
        assert after["ts"] == pytest.approx(before["end"])
    assert kernels[0]["ts"] == 0
    assert kernels[-1]["end"] == pytest.approx(schedule.total_us)
    times = collections.Counter()
    for one in kernels:
        times[one["name"]] += one["us"]
    assert dict(times) == pytest.approx({kernel.name: kernel.time_us for kernel in schedule.kernels}, abs=1e-5)
    assert [one["args"]["call"] for one in kernels if one["name"] == "fusion"] == ["1 of 3", "2 of 3", "3 of 3"]


def test_the_first_call_has_its_transfers_and_waits(tmp_path):
    schedule, trace = traced(written(tmp_path), tmp_path / "trace.json")
    (moved,) = transfers(trace)
    assert (moved["name"], moved["args"]) == ("DMA, HBM to VMEM", {"bytes": 32000, "HBM bytes": 32000})
    assert moved["args"]["HBM bytes"] == schedule.kernels[0].dma_bytes
    (waited,) = (one for one in slices(trace) if one["name"] == "waits for a semaphore")
    assert waited["depth"] == 2  # in a region, in a kernel
    assert waited["end"] == pytest.approx(moved["end"])
    assert waited["us"] == pytest.approx(schedule.kernels[0].stall_cycles / 1500, abs=1e-5)


def test_units_are_counted_to_what_the_kernel_uses(tmp_path):
    both = ["%1 = vadd.f32 %v1, %v2  ;;  %2 = vmul.f32 %v1, %v2"] * 15
    busy = program(*both, *[""] * 10, *both)
    schedule, trace = traced(written(tmp_path, fusion=busy), tmp_path / "trace.json")
    first = next(one for one in slices(trace) if one["name"] == "fusion")
    (used, *_) = (e["args"] for e in trace["traceEvents"] if e["ph"] == "C" and e["ts"] == first["ts"])
    assert used["vector"] == pytest.approx(100 * schedule.kernels[0].slots["vector"], abs=0.1)
    assert used["vector"] == pytest.approx(100 * 60 / (4 * 40), abs=0.1)


def test_of_a_long_kernel_the_first_and_last_steps_are_in_detail(tmp_path):
    schedule, trace = traced(written(tmp_path, fusion=LONG), tmp_path / "trace.json")
    assert (tmp_path / "trace.json").stat().st_size < 2e6
    assert "its first and its last steps, and one slice for those between" in trace["otherData"]["detail"]
    found = slices(trace)
    (between,) = (one for one in found if "not in detail" in one["name"])
    steps = [one for one in found if one["name"].startswith("step ")]
    numbers = [int(one["name"].split()[1].replace(",", "")) for one in steps]
    left = between["args"]["steps"]
    before = sum(one["ts"] < between["ts"] for one in steps)
    assert between["name"] == f"steps {before + 1:,} to {before + left:,} of {TURNS:,}, not in detail"
    assert numbers == [*range(1, before + 1), *range(before + left + 1, TURNS + 1)]
    assert min(before, TURNS - before - left) > 50
    kernel = schedule.kernels[0]
    moved = transfers(trace)
    assert between["args"]["HBM bytes"] + sum(one["args"]["HBM bytes"] for one in moved) == kernel.dma_bytes
    assert between["args"]["DMAs"] + len(moved) == kernel.dma_count == 2 * TURNS
    waits = sum(one["us"] for one in found if one["name"] == "waits for a semaphore")
    assert between["args"]["us of waits"] + waits == pytest.approx(kernel.stall_cycles / 1500, abs=1e-2)
    assert {one["name"] for one in moved} == {"DMA, HBM to VMEM", "DMA, VMEM to HBM"}


def test_as_many_passages_are_kept_of_the_end_as_of_the_beginning():
    timeline = Timeline(most=2)
    for number in range(6):
        timeline.issue(number, number, float(number))
    assert [passage.first for passage in timeline.first] == [0, 1]
    assert [passage.first for passage in timeline.last] == [4, 5]
    assert timeline.omitted.runs == {(2, 2): 1, (3, 3): 1}


def test_a_long_program_names_the_calls_that_are_not_in_detail(tmp_path):
    many = TOP_LEVEL.replace("%s3_s4, 3", "%s3_s4, 4000")
    schedule, trace = traced(written(tmp_path, many), tmp_path / "trace.json")
    found = [one for one in slices(trace) if one["depth"] == 0]
    (between,) = (one for one in found if "not in detail" in one["name"])
    left = between["args"]["calls"]["fusion"]
    assert between["name"] == f"{left:,} calls of kernels, not in detail"
    shown = [one["args"]["call"] for one in found if one["name"] == "fusion"]
    assert len(shown) + left == 4000
    assert shown[-1] == "4,000 of 4,000"
    assert found[-1]["end"] == pytest.approx(schedule.total_us)


def test_copies_beside_kernels_end_when_the_program_stops_waiting_for_them(tmp_path):
    busy = program(dma(20_000), *wait(20_000))
    lines = TOP_LEVEL.replace("%s1_s4 = smov 0", f"%s1_s4 = smov 0  ;;  {dma(200_000)}", 1)
    end = lines.rindex("{")
    lines = f"{lines[:end]}{{ {'  ;;  '.join(wait(200_000))} }}"
    schedule, trace = traced(written(tmp_path, lines, fusion=busy), tmp_path / "trace.json")
    (copied,) = (one for one in transfers(trace) if one["name"] == "DMA, copy beside kernels, HBM to VMEM")
    assert copied["args"]["HBM bytes"] == 6_400_000
    (waited,) = (one for one in slices(trace) if one["name"] == "waits for a copy")
    assert waited["end"] == pytest.approx(copied["end"])
    assert waited["depth"] == 1
    (own,) = (kernel for kernel in schedule.kernels if kernel.kind == "program")
    assert (own.dma_bytes, own.stall_cycles / 1500) == (6_400_000, pytest.approx(waited["us"], abs=1e-5))
    assert [one for one in slices(trace) if one["name"] == "slowed by copies that run meanwhile"]


def test_a_trace_is_compressed_by_its_name(tmp_path):
    folder = written(tmp_path)
    plain = traced(folder, tmp_path / "trace.json")[1]
    assert traced(folder, tmp_path / "trace.json.gz", compressed=True)[1] == plain


def test_the_program_is_replayed_again_without_its_dumps(tmp_path):
    folder = written(tmp_path)
    schedule = schedule_of(folder, named("tpu-v5e"), border_bytes=0)
    for path in folder.iterdir():
        path.unlink()
    schedule.to_perfetto(tmp_path / "trace.json")
    assert slices(json.loads((tmp_path / "trace.json").read_text()))


def test_a_replay_keeps_the_schedules_compressed_and_nothing_that_it_parsed(tmp_path):
    def parsed():
        gc.collect()
        return sum(isinstance(one, Bundle | Dumps | Passage) for one in gc.get_objects())

    before = parsed()
    schedule = schedule_of(written(tmp_path), named("tpu-v5e"), border_bytes=0)
    schedule.to_perfetto(tmp_path / "trace.json")
    assert parsed() <= before
    assert schedule.stored is not None
