"""Times come from the device's own clock where it can be read, on operands that take turns."""

import itertools
import math
import types

import jax
import jax.numpy as jnp
import pytest

from lowering import _jax_private
from lowering.measuring import device_clock, timing
from lowering.measuring.candidates import Candidate
from lowering.targets import named
from pallas_kernels.hardware import Hardware

H200, CPU, V5E = named("cuda-h200"), named("cpu"), named("tpu-v5e")


def times(hardware, seen, operands, repeats=8):
    def run(x):
        seen.append(x)
        return (x + 1,)

    candidates = {"one": Candidate("one", (), run), "two": Candidate("two", (), lambda x: (x,), in_place=(0,))}
    options = {"repeats": repeats, "until": math.inf, "at_least": 1, "after_round": lambda: None}
    return device_clock.candidate_readings(candidates, operands, hardware, **options)


@pytest.fixture
def wall(monkeypatch):
    """A host's clock by which every run takes as long as the list's last number says, in milliseconds."""
    wall_ms, now = [24.0], itertools.count()
    monkeypatch.setattr(timing, "clock", lambda: next(now) * 1e-3 * wall_ms[-1])
    return wall_ms


def test_kernels_of_a_gpu_are_timed_by_its_clock_on_operands_that_take_turns(monkeypatch, wall):
    def kernel_times_ms(launch):
        launch()
        return [("first", 0.5), ("second", 1.5)] * 8

    monkeypatch.setattr(_jax_private, "kernel_times_ms", kernel_times_ms)
    seen = []
    found = times(H200, seen, [jnp.ones(4)], repeats=16)
    assert {name: [reading.ms for reading in series] for name, series in found.items()} == {
        "one": [2.0, 2.0],
        "two": [2.0, 2.0],
    }
    assert [reading.wall_ms for reading in found["one"]] == pytest.approx([3.0, 3.0])  # beside it
    assert len({id(x) for x in seen}) == 8


@pytest.mark.parametrize(
    ("device_ms", "wall_ms", "words"),
    [
        (8.0, 9.0, ""),
        (1.0, 9.0, ""),
        (9.0, 17.0, ""),
        (9.1, 9.0, ""),
        (10.0, 9.0, "host's only 9.000"),
        (8.0, 17.0, "missed something"),
    ],
)
def test_a_device_s_clock_is_refused_that_says_what_cannot_be(device_ms, wall_ms, words, monkeypatch, wall):
    """Kernels take a tenth longer than the host waits, at most; where it waits long, no less than half of that."""

    def kernel_times_ms(launch):
        launch()
        return [("kernel", device_ms)]

    reading = device_clock.Reading(device_ms, wall_ms)
    assert words in reading.fault if words else reading.fault == ""
    monkeypatch.setattr(_jax_private, "kernel_times_ms", kernel_times_ms)
    wall.append(wall_ms)
    found = times(H200, [], [jnp.ones(4)], repeats=2)
    by_host = {reading.ms == reading.wall_ms for series in found.values() for reading in series}
    assert by_host == {bool(words)}  # the host's clock takes over, for all candidates alike


def no_cupti(launch):
    launch()
    raise RuntimeError("CUPTI_ERROR_INSUFFICIENT_PRIVILEGES")


@pytest.mark.parametrize("clock", [lambda launch: launch() or [], no_cupti], ids=["silent", "forbidden"])
def test_the_host_takes_the_time_where_the_device_tells_none(monkeypatch, clock):
    monkeypatch.setattr(_jax_private, "kernel_times_ms", clock)
    found = times(H200, [], [jnp.ones(4)], repeats=24)
    assert [len(series) for series in found.values()] == [3, 3]
    assert min(reading.ms for reading in found["one"]) > 0


def test_operands_fill_the_cache_twice():
    x = jax.ShapeDtypeStruct((2**22,), jnp.float32)
    assert len(device_clock.rotated([jnp.zeros(x.shape, x.dtype)], H200)) == math.ceil(2 * 50 / 16)
    unknown = Hardware("cuda", "cuda", "NVIDIA GB300")
    assert len(device_clock.rotated([jnp.zeros((2**24,))], unknown)) == math.ceil(2 * 126 / 64)
    assert len(device_clock.rotated([jnp.zeros(1)], V5E)) == 8
    assert len(device_clock.rotated([jnp.zeros(1)], CPU)) == 1


def test_a_tpu_is_timed_by_its_programs():
    def line(name, *durations):
        return types.SimpleNamespace(name=name, events=[types.SimpleNamespace(duration_ns=ns) for ns in durations])

    device = types.SimpleNamespace(name="/device:TPU:0", lines=[line("XLA Ops", 5e6), line("XLA Modules", 1e6, 2e6)])
    host = types.SimpleNamespace(name="/host:CPU", lines=[line("XLA Modules", 7e6)])
    assert device_clock.modules_ms(types.SimpleNamespace(planes=[device, host])) == 3.0
