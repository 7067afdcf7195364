"""Speed of kernels on this device, beside the reference: in their first configuration, or in all of them."""

import functools

from lowering.campaign.channel import WHOLE, Channel
from lowering.campaign.machine import Machine
from lowering.campaign.problems import problems
from lowering.campaign.suite import Case
from lowering.measuring import timing
from lowering.measuring.candidates import Watch, launched
from lowering.measuring.entries import OutOfTimeError, measured_entry

_REPEATS = 30
_REHEARSED_REPEATS = 3


def measure(case: Case, machine: Machine, channel: Channel, stage: str, seconds: float) -> bool:
    """Tells an entry for each operator of a case, at each size: of the first configurations, or of all to "tune".

    Returns:
      Whether time was enough.
    """
    deadline = timing.clock() + seconds
    for size in case.sizes(stage, rehearse=machine.rehearse):
        for problem in problems(case.fn, case.arguments(*size), machine.hardware):
            launches = functools.partial(machine.timed_launch, problem.operator.name, first_only=stage == "time")
            if not launched(problem.operator, launches) or channel.is_decided(problem.key, WHOLE):
                continue
            try:
                entry = measured_entry(
                    problem.key,
                    problem.operator,
                    problem.operands,
                    problem.params,
                    machine.hardware,
                    repeats=_REHEARSED_REPEATS if machine.rehearse else _REPEATS,
                    until=deadline,
                    deadline=deadline,
                    launches=launches,
                    watch=Watch(functools.partial(channel.begin_kernel, problem.key), channel.runs),
                )
            except OutOfTimeError:
                return False
            channel.tell_entry(entry)
            if entry.is_unfinished:
                return False
    return True
