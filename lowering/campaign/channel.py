"""Channel from a case's process to the campaign, about its steps and findings: JSON, one message a line."""

import json
from collections.abc import Collection, Mapping
from typing import IO, Any

from lowering.measurements import HANGS, WRONG, Entry, Key, Measurement
from lowering.measuring.candidates import Watch

# Stands for all implementations of an operator, which are timed together.
WHOLE = Measurement("every implementation")


class Channel:
    """Messages to the campaign, and what the campaign knows from an earlier process of the same case.

    Attributes:
      spoilt: operators and kernels that must not run again in this case.
    """

    def __init__(self, stream: IO[str], decided: Collection[str], spoilt: Collection[tuple[str, str]]) -> None:
        """Takes the stream to write to, the steps that need not be done again, and the kernels that must not."""
        self._case = ""
        self._stream = stream
        self._decided = frozenset(decided)
        self.spoilt = spoilt

    def is_decided(self, key: Key, way: Measurement) -> bool:
        """Tells whether an earlier process has told the outcome of this step."""
        return f"{self._case}: {step_name(key, way)}" in self._decided

    def begin_case(self, name: str) -> None:
        """Says which case all that follows is of."""
        self._case = name
        self._send({"case": name})

    def end_case(self, seconds: float, outcome: Mapping[str, str]) -> None:
        """Tells that a case needs nothing more, and what was wrong with it as a whole, if anything."""
        self.tell({"done": True, "seconds": round(seconds, 1), **outcome})

    def begin(self, key: Key, way: Measurement) -> None:
        """Says what is compiled next, so that a process that says nothing more has said what it was doing."""
        self._send({"begin": verdict_record(key, way, "hangs", "")})

    def watch(self, key: Key) -> Watch:
        """Returns the listener to what happens to an operator's candidates."""
        return _Steps(self, key)

    def runs(self, is_running: bool) -> None:
        """Says that what was begun is compiled and runs now, from where it may hang; or that it has run to its end."""
        self._send({"runs": is_running})

    def tell_verdict(self, key: Key, way: Measurement, outcome: str, reason: str) -> None:
        """Tells what came of a step."""
        self.tell(verdict_record(key, way, outcome, reason))

    def tell(self, record: dict[str, Any]) -> None:
        """Tells something that is to be kept."""
        self._send({"record": {"case": self._case, **record}})

    def tell_entry(self, entry: Entry) -> None:
        """Tells what was measured of an operator; if that is not everything, it is measured again next time."""
        step = {} if entry.is_unfinished else {"step": step_name(entry.key, WHOLE)}
        self.tell({**step, "entry": entry.to_record()})

    def ask_for_new_process(self) -> None:
        """Ends with what remains to be done in another process, where nothing has failed yet."""
        self._end("again")

    def finish(self) -> None:
        """Ends with everything done."""
        self._end("done")

    def _end(self, how: str) -> None:
        self._send({"ended": how})

    def _send(self, message: dict[str, Any]) -> None:
        print(json.dumps(message), file=self._stream, flush=True)


class _Steps(Watch):
    """Listener that tells the campaign what begins: if a kernel hangs, none of its configurations is taken."""

    def __init__(self, channel: Channel, key: Key) -> None:
        self._channel, self._key = channel, key

    def begins(self, way: Measurement) -> None:
        self._channel.begin(self._key, Measurement(way.implementation))

    def runs(self) -> None:
        self._channel.runs(True)

    def ran(self) -> None:
        self._channel.runs(False)


def step_name(key: Key, way: Measurement) -> str:
    """Returns one configuration of one kernel at one set of shapes, as text."""
    return json.dumps([key.operator, list(key.operands), key.attributes, way.name])


def verdict_record(key: Key, way: Measurement, outcome: str, reason: str) -> dict[str, Any]:
    """Records the outcome of a step; with an entry if the kernel must never be taken for it."""
    record: dict[str, Any] = {
        "step": step_name(key, way),
        "operator": key.operator,
        "kernel": way.implementation,
        "config": dict(way.config),
        "operands": list(key.operands),
        "attributes": key.attributes,
        "outcome": outcome,
        "reason": reason,
    }
    if reason.startswith((WRONG, HANGS)):
        fault = Measurement(way.implementation, way.config, discarded=reason)
        record["entry"] = Entry(key, (fault,), repeats=0).to_record()
    return record
