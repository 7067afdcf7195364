"""Recordings of a replay: bundles in the order in which they are issued, with their waits, transfers and calls."""

import collections
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

_MOST = 1000  # passages that are kept from the beginning, and as many from the end


class Wait(NamedTuple):
    """A bundle that is not followed at once, because it waits for a semaphore or delays."""

    number: int
    at: float
    cycles: float


class Call(NamedTuple):
    """A bundle of the top-level program that calls a kernel.

    Attributes:
      number: of the bundle.
      at: when the kernel starts.
      cycles: until it is done, with what copies that run meanwhile cost.
      name: of the instruction in the optimised program.
      replay: of the kernel alone.
    """

    number: int
    at: float
    cycles: float
    name: str
    replay: Any


@dataclasses.dataclass(slots=True)
class Transfer:
    """A transfer.

    Attributes:
      at: when it is asked for.
      done: when it has arrived.
      opcode: such as "dma.hbm_to_vmem".
      size_bytes: that arrive.
      hbm_bytes: of these, to and from HBM; both, where HBM is at both ends.
    """

    at: float
    done: float
    opcode: str
    size_bytes: int
    hbm_bytes: int


@dataclasses.dataclass(slots=True)
class Passage:
    """Bundles that are issued one after the other, up to a branch, or in its delay slots.

    Attributes:
      first: the number of the first bundle.
      last: of the last.
      at: when the first is issued.
      events: in the order in which they happen.
    """

    first: int
    last: int
    at: float
    events: list[Wait | Call | Transfer] = dataclasses.field(default_factory=list)

    def when(self, number: int) -> float:
        """Returns when one of the bundles is issued, or when the one behind the last would be."""
        held = (event.cycles for event in self.events if isinstance(event, Wait | Call) and event.number < number)
        return self.at + number - self.first + sum(held)

    @property
    def end(self) -> float:
        """The time when the next passage begins."""
        return self.when(self.last + 1)


@dataclasses.dataclass
class Omitted:
    """Sums over passages that were not kept.

    Attributes:
      runs: how often each range of bundles was issued.
      calls: how often each kernel was called.
      called_cycles: in these calls.
      transfers: to and from HBM.
      hbm_bytes: of these.
      wait_cycles: spent waiting.
    """

    runs: collections.Counter[tuple[int, int]] = dataclasses.field(default_factory=collections.Counter)
    calls: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    called_cycles: float = 0.0
    transfers: int = 0
    hbm_bytes: int = 0
    wait_cycles: float = 0.0

    def add(self, passage: Passage) -> None:
        """Adds a passage."""
        self.runs[passage.first, passage.last] += 1
        for event in passage.events:
            match event:
                case Wait():
                    self.wait_cycles += event.cycles
                case Call():
                    self.calls[event.name] += 1
                    self.called_cycles += event.cycles
                case Transfer():
                    self.transfers += event.hbm_bytes > 0
                    self.hbm_bytes += event.hbm_bytes

    def and_also(self, passages: list[Passage]) -> "Omitted":
        """Returns the sums with further passages."""
        both = dataclasses.replace(self, runs=self.runs.copy(), calls=self.calls.copy())
        for passage in passages:
            both.add(passage)
        return both


class Timeline:
    """The passages of one run: from its beginning, from its end, and sums over those between.

    Attributes:
      first: passages from the beginning.
      last: from the end; empty where the first are all.
      omitted: those between.
    """

    def __init__(self, most: int = _MOST) -> None:
        """Takes how many passages to keep of either end."""
        self._most = most
        self.first: list[Passage] = []
        self.last: collections.deque[Passage] = collections.deque()
        self.omitted = Omitted()
        self._events: list[Wait | Call | Transfer] = []
        self._under_way: list[Transfer] = []

    def issue(self, first: int, last: int, at: float) -> None:
        """Notes that bundles are issued from a time on; what happens next happens in them."""
        passage = Passage(first, last, at)
        self._events = passage.events
        if len(self.first) < self._most:
            self.first.append(passage)
            return
        self.last.append(passage)
        if len(self.last) > self._most:
            self.omitted.add(self.last.popleft())

    def wait(self, number: int, at: float, cycles: float) -> None:
        """Notes that a bundle waits."""
        self._events.append(Wait(number, at, cycles))

    def call(self, number: int, at: float, cycles: float, name: str, replay: Any) -> None:
        """Notes that a bundle calls a kernel."""
        self._events.append(Call(number, at, cycles, name, replay))

    def transfer(self, at: float, done: float, opcode: str, size_bytes: int, hbm_bytes: int) -> None:
        """Notes that a transfer is started."""
        one = Transfer(at, done, opcode, size_bytes, hbm_bytes)
        self._events.append(one)
        self._under_way = [other for other in self._under_way if other.done > at] + [one]

    def postpone(self, now: float, later: Callable[[float], float]) -> None:
        """Changes when transfers are done that are under way."""
        for one in self._under_way:
            one.done = max(one.done, later(one.done)) if one.done > now else one.done


@dataclasses.dataclass(frozen=True)
class Recording:
    """A run, with what its passages are to be understood by.

    Attributes:
      timeline: of the run.
      bundles: of its program.
      issues: how often each bundle was issued.
      stalls: cycles, by the bundle that waited.
    """

    timeline: Timeline
    bundles: Any
    issues: list[int]
    stalls: Mapping[int, float]
