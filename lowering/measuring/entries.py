"""The entry of a problem: every way to run it is compiled, compared with the reference, and timed."""

import statistics
from collections.abc import Callable, Iterable, Sequence

from lowering.measurements import NOT_COMPILED, Entry, Measurement
from lowering.measuring import timing
from lowering.measuring.candidates import UNWATCHED, Candidate, Chosen, Machine, Watch, checked_candidates
from lowering.measuring.device_clock import Reading, candidate_readings
from lowering.measuring.problems import Problem

_ROUNDS_AT_LEAST = 3


class OutOfTimeError(Exception):
    """The budget ended before a candidate of an operator was compiled that could be compared with its reference."""


def measure_all(
    problems: Sequence[Problem],
    entry_of: Callable[[Problem, float], Entry],
    keep: Callable[[Entry], None],
    deadline: float,
) -> bool:
    """Keeps the entry of each problem as it comes; returns whether time was enough for all of them.

    What is left of the time is shared evenly: a slow operator must not starve those after it.

    Args:
      problems: in their order.
      entry_of: makes an entry from a problem and from when to stop timing, by `timing.clock`.
      keep: takes every entry; the last one may be unfinished.
      deadline: for all of them.
    """
    for position, problem in enumerate(problems):
        now = timing.clock()
        try:
            entry = entry_of(problem, min(deadline, now + (deadline - now) / (len(problems) - position)))
        except OutOfTimeError:
            return False
        keep(entry)
        if entry.is_unfinished:
            return False
    return True


def measured_entry(
    problem: Problem,
    machine: Machine,
    *,
    repeats: int,
    until: float,
    deadline: float,
    chosen: Chosen = tuple,
    watch: Watch = UNWATCHED,
    after_round: Callable[[], None] = lambda: None,
) -> Entry:
    """Measures the reference, and the kernels that this machine runs, in the chosen configurations.

    Args:
      problem: the operator, and arrays.
      machine: what kernels run on.
      repeats: how often to time each, if time allows.
      until: when to stop timing, by `timing.clock`, if each was timed three times.
      deadline: when to stop compiling. What is compiled by then is still timed.
      chosen: which of a kernel's configurations to take; by default all.
      watch: who is told what happens to each candidate.
      after_round: called when each has been timed once more.

    Raises:
      OutOfTimeError: if by the deadline nothing is compiled that could be compared with the reference.
    """
    found = list(checked_candidates(problem, machine, chosen, deadline, watch))
    require_comparison(found, deadline)
    programs = {str(position): x for position, x in enumerate(found) if isinstance(x, Candidate)}

    def before_run(candidate: Candidate) -> None:
        watch.begins(candidate.way)
        watch.runs()

    readings = candidate_readings(
        programs,
        problem.operands,
        machine.hardware,
        repeats=repeats,
        until=until,
        at_least=_ROUNDS_AT_LEAST,
        after_round=after_round,
        before_run=before_run,
    )
    measurements = [
        _measurement(x, readings[str(position)]) if isinstance(x, Candidate) else x for position, x in enumerate(found)
    ]
    most_repeats = max((len(series) for series in readings.values()), default=0)
    kinds = {x.implementation: x.kind for x in programs.values() if x.kind is not None}
    return Entry(problem.key, tuple(measurements), most_repeats, kinds=tuple(kinds.items()))


def require_comparison(found: Iterable[Candidate | Measurement], deadline: float) -> None:
    """Refuses what the deadline has cut so short that nothing can be compared with the reference.

    Raises:
      OutOfTimeError: if that is so.
    """
    discarded = [x.discarded if isinstance(x, Measurement) else "" for x in found]
    if timing.clock() >= deadline and discarded.count("") < 1 + (NOT_COMPILED in discarded):
        raise OutOfTimeError


def _measurement(candidate: Candidate, readings: Sequence[Reading]) -> Measurement:
    """Returns the medians of a candidate's times; the host's only where the device has told others."""
    own, wall = (round(1e3 * statistics.median(times), 3) for times in zip(*readings, strict=True))
    by_device = any(reading.ms != reading.wall_ms for reading in readings)
    return Measurement(candidate.implementation, candidate.config, own, wall_us=wall if by_device else None)
