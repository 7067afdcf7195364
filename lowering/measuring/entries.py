"""One operator at one set of shapes: every way to run it is compiled, compared with the reference, and timed."""

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax

from lowering.measurements import NOT_COMPILED, Entry, Key, Measurement
from lowering.measuring import timing
from lowering.measuring.candidates import UNWATCHED, Candidate, Launches, Watch, candidates, launched, on_device
from lowering.measuring.device_clock import Reading, candidate_readings
from lowering.operators import Operator, unpacked
from pallas_kernels.hardware import Hardware
from pallas_kernels.kernel import Kind

_ROUNDS_AT_LEAST = 3


class OutOfTimeError(Exception):
    """The budget ended before a candidate of an operator was compiled that could be compared with its reference."""


def measured_entry(
    key: Key,
    operator: Operator,
    operands: Sequence[jax.Array],
    params: Mapping[str, Any],
    hardware: Hardware,
    *,
    repeats: int,
    until: float,
    deadline: float,
    launches: Launches | None = None,
    watch: Watch = UNWATCHED,
    after_round: Callable[[], None] = lambda: None,
) -> Entry:
    """Measures the reference, and every configuration of every kernel that `launches` lets run, on these operands.

    Args:
      key: of the entry.
      operator: its record.
      operands: what it is measured on.
      params: its attributes.
      hardware: the device here.
      repeats: how often to time each, if time allows.
      until: when to stop timing, by `timing.clock`, if each was timed three times.
      deadline: when to stop compiling. What is compiled by then is still timed.
      launches: how kernels are run; by default, those for the device here as they are.
      watch: who is told what happens to each candidate.
      after_round: called when each has been timed once more.

    Raises:
      OutOfTimeError: if by the deadline nothing is compiled that could be compared with the reference.
    """

    def is_time_left() -> bool:
        return timing.clock() < deadline

    allowed = launches or on_device(hardware)
    found = list(candidates(operator, hardware, operands, params, allowed, watch, is_time_left))
    is_cut_short = any(isinstance(x, Measurement) and x.discarded == NOT_COMPILED for x in found)
    if not is_time_left() and sum(isinstance(x, Candidate) for x in found) < 1 + is_cut_short:
        raise OutOfTimeError
    readings = candidate_readings(
        {str(position): x for position, x in enumerate(found) if isinstance(x, Candidate)},
        operands,
        hardware,
        repeats=repeats,
        until=until,
        at_least=_ROUNDS_AT_LEAST,
        after_round=after_round,
        before_run=watch.before_run,
    )
    measurements = [
        _measurement(x, readings[str(position)]) if isinstance(x, Candidate) else x for position, x in enumerate(found)
    ]
    most_repeats = max((len(series) for series in readings.values()), default=0)
    return Entry(key, tuple(measurements), most_repeats, kinds=tuple(_kinds(operator, allowed, operands, params)))


def _kinds(
    operator: Operator, launches: Launches, operands: Sequence[Any], params: Mapping[str, Any]
) -> Iterator[tuple[str, Kind]]:
    """Yields the kind of each kernel that takes these operands and has one."""
    structured, attributes = unpacked(operands, params)
    for kernel, launch in launched(operator, launches):
        if launch.refusal(kernel, operands, params) is None:
            kind = kernel.kind(launch.chip, *structured, **attributes)
            if kind is not None:
                yield kernel.name, kind


def _measurement(candidate: Candidate, readings: Sequence[Reading]) -> Measurement:
    """Returns the medians of a candidate's times; the host's only where the device has told others."""
    own, wall = (round(1e3 * statistics.median(times), 3) for times in zip(*readings, strict=True))
    by_device = any(reading.ms != reading.wall_ms for reading in readings)
    return Measurement(candidate.implementation, candidate.config, own, wall_us=wall if by_device else None)
