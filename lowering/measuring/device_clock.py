"""Times programs by the device's own clock, where a profiler reads it, on operands that no cache holds."""

import glob
import itertools
import math
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from lowering import _jax_private
from lowering.measuring import timing
from lowering.measuring.candidates import Candidate
from pallas_kernels.hardware import Hardware

_SETS = (2, 8)  # of operands that take turns, at least and at most


def candidate_times_ms(
    candidates: Mapping[str, Candidate],
    operands: Sequence[jax.Array],
    hardware: Hardware,
    *,
    repeats: int,
    until: float,
    at_least: int,
    after_round: Callable[[], None],
) -> dict[str, list[float]]:
    """The times of each candidate: of the device alone on a GPU or a TPU, elsewhere of the host that waits for it.

    Dispatch takes tens of microseconds, more than many kernels do; so a GPU's kernels are timed by CUPTI, and a TPU's
    programs by JAX's profiler. Copies of the operands take turns, enough of them that the chip's cache holds none.
    """
    sets = rotated(operands, hardware)
    measured_ms = device_clock(hardware.platform)

    def run_all(name: str) -> float:
        assert measured_ms is not None
        arguments = jax.block_until_ready([candidates[name].arguments(each) for each in sets])
        return measured_ms(lambda: jax.block_until_ready([candidates[name].run(*each) for each in arguments]))

    # The first runs, in which clocks rise, also show whether the profiler may read anything here.
    if measured_ms is None or not all(_reads(run_all, name) for name in candidates):
        turns = {name: itertools.cycle(sets) for name in candidates}
        return timing.times_ms(
            {name: candidate.run for name, candidate in candidates.items()},
            repeats=repeats,
            warmups=1,
            prepare=lambda name: candidates[name].arguments(next(turns[name])),
            until=until,
            at_least=at_least,
            after_round=after_round,
        )

    times: dict[str, list[float]] = {name: [] for name in candidates}
    for turn in range(max(1, repeats // len(sets))):
        if turn >= at_least and timing.clock() >= until:
            break
        for name in list(candidates)[:: 1 if turn % 2 == 0 else -1]:
            times[name].append(run_all(name) / len(sets))
        after_round()
    return times


def device_clock(platform: str) -> Callable[[Callable[[], Any]], float] | None:
    """What takes a launch and returns the milliseconds that the device spends on it; None where only hosts have clocks.

    On a GPU it counts the kernels of all libraries in this process.
    """
    return _CLOCKS.get(platform)


def _reads(measured_ms: Callable[[Any], float], launch: Any) -> bool:
    """Whether a profiler reads times: it may be forbidden, or in the hands of another program."""
    try:
        return measured_ms(launch) > 0
    except (RuntimeError, ValueError):
        return False


def rotated(operands: Sequence[jax.Array], hardware: Hardware) -> list[list[jax.Array]]:
    """The operands, and copies of them that together fill the chip's cache twice; none where no cache is known."""
    cache_bytes = hardware.l2_bytes or (hardware.on_chip_bytes if hardware.platform == "tpu" else None)
    if cache_bytes is None:
        return [list(operands)]
    each_bytes = max(1, sum(x.nbytes for x in operands))
    least, most = _SETS
    count = min(most, max(least, math.ceil(2 * cache_bytes / each_bytes)))
    return [list(operands), *([jnp.copy(x) for x in operands] for _ in range(count - 1))]


def _by_cupti_ms(launch: Callable[[], Any]) -> float:
    return sum(time_ms for _, time_ms in _jax_private.kernel_times_ms(launch))


def _by_profiler_ms(launch: Callable[[], Any]) -> float:
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            launch()
        (path,) = glob.glob(os.path.join(folder, "**", "*.xplane.pb"), recursive=True)
        return modules_ms(jax.profiler.ProfileData.from_file(path))


def modules_ms(profile: Any) -> float:
    """The time of all programs in a profile of one TPU."""
    planes = (plane for plane in profile.planes if plane.name.startswith("/device:"))
    lines = (line for plane in planes for line in plane.lines if line.name == "XLA Modules")
    return sum(event.duration_ns for line in lines for event in line.events) / 1e6


_CLOCKS: dict[str, Callable[[Callable[[], Any]], float]] = {"cuda": _by_cupti_ms, "tpu": _by_profiler_ms}
