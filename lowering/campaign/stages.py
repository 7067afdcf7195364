"""The stages of a case: its kernels are verified, timed beside the reference in one configuration, or tuned in all."""

import functools
from collections.abc import Collection

from lowering.campaign.channel import WHOLE, Channel
from lowering.campaign.suite import Case
from lowering.measurements import Entry, Measurement
from lowering.measuring import timing
from lowering.measuring.candidates import Machine
from lowering.measuring.checking import Checker
from lowering.measuring.entries import measure_all, measured_entry
from lowering.measuring.problems import Problem, problems

_REPEATS = 30
_REHEARSED_REPEATS = 3


def verify(case: Case, machine: Machine, channel: Channel, operators: Collection[str] = ()) -> bool:
    """Tells a verdict on every kernel at every size.

    The first configuration is run at every size, and the others at the last. A kernel that was wrong is not run again.

    Args:
      case: what uses the kernels.
      machine: what to run them on.
      channel: where to tell.
      operators: by name, those whose kernels to verify; all if empty.

    Returns:
      Whether all was done; False after a failure that may have spoilt the device for this process.
    """
    sizes = case.sizes("verify", rehearse=machine.rehearse)
    spoilt = set(channel.spoilt)
    for size in sizes:
        chosen = functools.partial(case.overridden, count=None if size == sizes[-1] else 1)
        for problem in problems(case.fn, case.arguments(*size), machine.hardware):
            if operators and problem.operator.name not in operators:
                continue
            checker = Checker(problem, channel.watch(problem.key))
            for candidate in machine.candidates(problem, chosen):
                way = candidate if isinstance(candidate, Measurement) else candidate.way
                kernel = problem.operator.name, way.implementation
                if kernel in spoilt or channel.is_decided(problem.key, way):
                    continue
                if isinstance(candidate, Measurement):
                    channel.tell_verdict(problem.key, way, "refused", way.discarded)
                    continue
                channel.begin(problem.key, way)
                outcome, reason = checker.verdict(candidate)
                channel.tell_verdict(problem.key, way, outcome, reason)
                if outcome != "verified":
                    spoilt.add(kernel)
                if outcome == "fails" and machine.hardware.platform != "cpu":
                    channel.ask_for_new_process()
                    return False
    return True


def measure(case: Case, machine: Machine, channel: Channel, stage: str, seconds: float) -> bool:
    """Tells an entry for each operator of a case, at each size: of the first configurations, or of all to "tune".

    Returns:
      Whether time was enough.
    """
    deadline = timing.clock() + seconds

    def entry_of(problem: Problem, until: float) -> Entry:
        return measured_entry(
            problem,
            machine,
            repeats=_REHEARSED_REPEATS if machine.rehearse else _REPEATS,
            until=until,
            deadline=deadline,
            chosen=tuple if stage == "tune" else lambda configs: configs[:1],
            watch=channel.watch(problem.key),
        )

    for size in case.sizes(stage, rehearse=machine.rehearse):
        waiting = [
            problem
            for problem in problems(case.fn, case.arguments(*size), machine.hardware)
            if machine.kernels(problem.operator, timed=True) and not channel.is_decided(problem.key, WHOLE)
        ]
        if not measure_all(waiting, entry_of, channel.tell_entry, deadline):
            return False
    return True
