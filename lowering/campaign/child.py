"""The process of a case, or of several: it reads one request, does one stage of it, and tells what it finds by lines.

A kernel that hangs or crashes takes its process with it. The campaign that has started the process goes on without.
"""

import json
import os
import sys
import traceback
from typing import Any

from lowering.campaign.channel import Channel
from lowering.campaign.stages import measure, verify
from lowering.campaign.suite import load
from lowering.describe import first_line
from lowering.measurements import versions
from lowering.measuring import timing
from lowering.measuring.candidates import Machine
from lowering.targets import device_name, here


def main() -> None:
    """Serves the request on standard input."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # where compilers and kernels may print
    request = json.loads(sys.stdin.readline())
    channel = Channel(answers, request["decided"], [(operator, kernel) for operator, kernel in request["spoilt"]])
    hardware = here()
    if request["stage"] == "probe":
        channel.tell({"target": device_name(hardware) or hardware.name, "versions": dict(versions())})
    else:
        _serve(request, Machine(hardware, request["rehearse"], request["faults"]), channel)
    channel.finish()


def _serve(request: dict[str, Any], machine: Machine, channel: Channel) -> None:
    """Runs one stage of each case."""
    for case in load(request["suite"]):
        if case.name not in request["cases"]:
            continue
        channel.begin_case(case.name)
        start = timing.clock()
        outcome = {}
        try:
            if request["stage"] == "verify":
                is_whole = verify(case, machine, channel, case.loops if request["only_loops"] else ())
            else:
                is_whole = measure(case, machine, channel, request["stage"], request["seconds"])
        except Exception as error:  # whatever a case raises: the next one may be better
            traceback.print_exc()
            is_whole, outcome = True, {"outcome": "failed", "reason": first_line(error)}
        if not is_whole:
            return
        channel.end_case(timing.clock() - start, outcome)


if __name__ == "__main__":
    main()
