"""One operator at one set of shapes: every way to run it is compiled, compared with the reference, and timed."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from lowering.measurements import Entry, Key, Measurement
from lowering.measuring import timing
from lowering.measuring.candidates import Candidate, Launches, candidates, on_device
from lowering.measuring.device_clock import candidate_times_ms
from lowering.registry import Operator
from pallas_kernels.hardware import Hardware

_ROUNDS_AT_LEAST = 3


class OutOfTimeError(Exception):
    """The budget ended before all candidates of an operator were compiled."""


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
    before_each: Callable[[str], None] = lambda name: None,
    after_round: Callable[[], None] = lambda: None,
) -> Entry:
    """The reference, and every configuration of every kernel that `launches` lets run, on these operands.

    Args:
      key: of the entry.
      operator: its record.
      operands: what it is measured on.
      params: its attributes.
      hardware: the device here.
      repeats: how often to time each, if time allows.
      until: when to stop timing, by `timing.clock`, if each was timed three times.
      deadline: when to stop compiling.
      launches: how kernels are run; by default, those for the device here as they are.
      before_each: called with a candidate's name before it is compiled and run for the first time.
      after_round: called when each has been timed once more.

    Raises:
      OutOfTimeError: at the deadline, if something is still not compiled.
    """
    found: list[Candidate | Measurement] = []
    for candidate in candidates(operator, hardware, operands, params, launches or on_device(hardware), before_each):
        found.append(candidate)
        if timing.clock() >= deadline:
            raise OutOfTimeError
    times = candidate_times_ms(
        {str(position): x for position, x in enumerate(found) if isinstance(x, Candidate)},
        operands,
        hardware,
        repeats=repeats,
        until=until,
        at_least=_ROUNDS_AT_LEAST,
        after_round=after_round,
    )
    measurements = [
        Measurement(x.implementation, x.config, round(1e3 * statistics.median(times[str(position)]), 3))
        if isinstance(x, Candidate)
        else x
        for position, x in enumerate(found)
    ]
    return Entry(key, tuple(measurements), repeats=max((len(series) for series in times.values()), default=0))
