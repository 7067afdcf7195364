"""Times programs by the device's own clock, where a profiler reads it, on operands that no cache holds."""

import glob
import math
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from lowering import _jax_private
from lowering.measuring import timing
from lowering.measuring.candidates import Candidate
from lowering.targets import TARGETS
from pallas_kernels.hardware import Hardware

_SETS = (2, 8)  # of operands that take turns, at least and at most
# In runs that take longer by the host's clock, the device's must account for this share, and never for more than all:
# on a GPU the two clocks time two runs.
_LONG_MS, _LEAST_SHARE, _MOST_SHARE = 10.0, 0.5, 1.1
_LARGEST_L2_BYTES = max(chip.l2_bytes or 0 for chip in TARGETS.values())


class Reading(NamedTuple):
    """Time of a run.

    Attributes:
      ms: by the device's clock; where only the host has one, by that.
      wall_ms: by the host's clock, from the launch until the results are there, without a profiler that takes its time.
    """

    ms: float
    wall_ms: float

    @property
    def fault(self) -> str:
        """Says why the device's time cannot be that of the run; empty if it can."""
        if not self.ms > 0:
            return "the device's clock cannot be read"
        if self.ms > _MOST_SHARE * self.wall_ms:
            return f"the device's clock says {self.ms:.3f} ms and the host's only {self.wall_ms:.3f}"
        # Shorter runs are mostly dispatch. In longer ones the device waits, or copies, which its kernels' times miss.
        if self.wall_ms > _LONG_MS and self.ms < _LEAST_SHARE * self.wall_ms:
            return f"the device's clock says {self.ms:.3f} ms of the host's {self.wall_ms:.3f}: it missed something"
        return ""


class ClockError(RuntimeError):
    """The device's clock says what cannot be."""


# Takes a launch that waits for its results.
Clock = Callable[[Callable[[], Any]], Reading]


def candidate_readings(
    candidates: Mapping[str, Candidate],
    operands: Sequence[jax.Array],
    hardware: Hardware,
    *,
    repeats: int,
    until: float,
    at_least: int,
    after_round: Callable[[], None],
    before_run: Callable[[Candidate], None] = lambda candidate: None,
) -> dict[str, list[Reading]]:
    """Returns the times of each candidate: of the device alone on a GPU or a TPU, elsewhere of the waiting host.

    Dispatch takes tens of microseconds, more than many kernels do; so a GPU's kernels are timed by CUPTI, and a TPU's
    programs by JAX's profiler. Where that cannot be read, or says what cannot be, the host's clock times all
    candidates. Each reading is the mean over copies of the operands, enough of them that the chip's cache holds none.

    Args:
      candidates: by any names.
      operands: what they run on.
      hardware: the device here.
      repeats: how often to run each, if time allows.
      until: when to stop, by `timing.clock`, after `at_least` rounds.
      at_least: the rounds to finish even then.
      after_round: called after each round.
      before_run: called with a candidate before it runs.
    """
    sets = rotated(operands, hardware)

    def readings(clock: Clock) -> dict[str, list[Reading]]:
        def take(name: str) -> Reading:
            candidate = candidates[name]
            arguments = jax.block_until_ready([candidate.arguments(each) for each in sets])
            before_run(candidate)
            reading = clock(lambda: jax.block_until_ready([candidate.run(*each) for each in arguments]))
            if clock is not by_host and reading.fault:
                raise ClockError(reading.fault)
            return Reading(reading.ms / len(sets), reading.wall_ms / len(sets))

        return timing.rounds(
            candidates,
            take,
            repeats=max(1, repeats // len(sets)),
            warmups=1,  # in which clocks rise
            until=until,
            at_least=at_least,
            after_round=after_round,
        )

    try:
        return readings(device_clock(hardware.platform))
    except (RuntimeError, ValueError):  # a profiler may be forbidden, or in the hands of another program
        return readings(by_host)


def device_clock(platform: str) -> Clock:
    """Returns what takes a launch and reads how long it takes: by the host where the device has no clock.

    On a GPU it counts the kernels of all libraries in this process.
    """
    return _CLOCKS.get(platform, by_host)


def by_host(launch: Callable[[], Any]) -> Reading:
    """Reads how long a launch takes by the host's clock alone."""
    ms = timing.elapsed_ms(launch)
    return Reading(ms, ms)


def rotated(operands: Sequence[jax.Array], hardware: Hardware) -> list[list[jax.Array]]:
    """Returns the operands, and copies that together fill the chip's cache twice, or the largest of known GPUs."""
    sizes = {"tpu": hardware.on_chip_bytes, "cuda": hardware.l2_bytes or _LARGEST_L2_BYTES}
    cache_bytes = sizes.get(hardware.platform)
    if cache_bytes is None:
        return [list(operands)]
    each_bytes = max(1, sum(x.nbytes for x in operands))
    least, most = _SETS
    count = min(most, max(least, math.ceil(2 * cache_bytes / each_bytes)))
    return [list(operands), *([jnp.copy(x) for x in operands] for _ in range(count - 1))]


def _by_cupti(launch: Callable[[], Any]) -> Reading:
    # A run of its own for the host's clock: to begin with CUPTI takes milliseconds.
    wall_ms = timing.elapsed_ms(launch)
    kernels = _jax_private.kernel_times_ms(launch)
    return Reading(sum(time_ms for _, time_ms in kernels), wall_ms)


def _by_profiler(launch: Callable[[], Any]) -> Reading:
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            wall_ms = timing.elapsed_ms(launch)
        (path,) = glob.glob(os.path.join(folder, "**", "*.xplane.pb"), recursive=True)
        return Reading(modules_ms(jax.profiler.ProfileData.from_file(path)), wall_ms)


def modules_ms(profile: Any) -> float:
    """Returns the time of all programs in a profile of one TPU."""
    planes = (plane for plane in profile.planes if plane.name.startswith("/device:"))
    lines = (line for plane in planes for line in plane.lines if line.name == "XLA Modules")
    return sum(event.duration_ns for line in lines for event in line.events) / 1e6


_CLOCKS: dict[str, Clock] = {"cuda": _by_cupti, "tpu": _by_profiler}
