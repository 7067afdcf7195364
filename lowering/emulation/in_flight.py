"""Transfers that were started and not yet waited for, and those of them that meet on the same bytes."""

import collections
import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from lowering.tpu_core.scalar_memory import GRANULE_BYTES


class Start(NamedTuple):
    """Place where a transfer was started.

    Attributes:
      part: of a whole program; "" for a kernel by itself.
      bundle: its number.
    """

    part: str
    bundle: int


class End(NamedTuple):
    """Bytes that a transfer reads or writes.

    Attributes:
      space: the memory.
      name: of the allocation; "" where none is known.
      pieces: from where to where it reaches, in granules; in scalar memory, in words.
      first: the least of them.
      last: the end of the last.
    """

    space: str
    name: str
    pieces: tuple[tuple[int, int], ...]
    first: int
    last: int

    @classmethod
    def of(cls, space: str, name: str, pieces: Sequence[tuple[int, int]]) -> "End":
        """Takes pieces as addresses, each with how many granules are there."""
        scale = GRANULE_BYTES // 4 if space == "smem" else 1
        reaches = tuple((at, at + size * scale) for at, size in pieces if size > 0)
        first, last = min((at for at, _ in reaches), default=0), max((end for _, end in reaches), default=0)
        return cls(space, name, reaches, first, last)

    def shares(self, other: "End") -> int:
        """Counts the bytes that both have."""
        if self.space != other.space or self.last <= other.first or other.last <= self.first:
            return 0
        shared = _covered(self.pieces) + _covered(other.pieces) - _covered(self.pieces + other.pieces)
        return shared * (4 if self.space == "smem" else GRANULE_BYTES)


@dataclasses.dataclass
class Meeting:
    """Transfers of two places in the code that were in flight together and touch the same bytes.

    Attributes:
      first: where the earlier ones were started.
      second: where the later ones were.
      first_writes: whether the earlier ones write what is shared.
      second_writes: whether the later ones do.
      space: in which memory it is.
      name: of the allocation; "" where none is known.
      size_bytes: how much the first pair shares.
      early: the numbers of earlier transfers. None of them is the later one of another.
      late: those of the later ones.
    """

    first: Start
    second: Start
    first_writes: bool
    second_writes: bool
    space: str
    name: str
    size_bytes: int
    early: set[int] = dataclasses.field(default_factory=set)
    late: set[int] = dataclasses.field(default_factory=set)

    def said(self, first: str, second: str, depends: str) -> str:
        """Says in a sentence what depends on which of both comes first, whose places are given in words."""
        does = {True: "writes", False: "reads"}
        who = f"the earlier one {does[self.first_writes]} and the later one {does[self.second_writes]}"
        who = "both write" if self.first_writes and self.second_writes else who
        where = self.name if self.name.startswith(("operand ", "result ")) else self.space
        another = "starts another" if self.first == self.second else f"bundle {second} starts another"
        return (
            f"bundle {first} starts a transfer, and before the wait for it {another}: {who} the same "
            f"{self.size_bytes:,} bytes of {where}, and {depends} on which comes first"
        )


class _Flight(NamedTuple):
    number: int
    start: Start
    granules: int
    ends: tuple[End, End]


class InFlight:
    """Transfers between their start and the wait for them.

    Those that share a semaphore count as complete in the order of their starts, and as a whole, so what meets here does
    so also on a chip that completes them in another order.

    Attributes:
      most_on_one_semaphore: how many of a semaphore have been under way at a time, at most.
    """

    def __init__(self) -> None:
        """Starts with nothing under way."""
        self.most_on_one_semaphore = 0
        self._flights: dict[int, list[_Flight]] = collections.defaultdict(list)
        self._met: dict[tuple[Start, Start, bool, bool, str], Meeting] = {}

    @property
    def meetings(self) -> tuple[Meeting, ...]:
        """Transfers that have met, in the order of the first time."""
        return tuple(self._met.values())

    def start(self, number: int, start: Start, semaphore: int, granules: int, ends: tuple[End, End]) -> None:
        """Starts a transfer from one end to the other."""
        later = _Flight(number, start, granules, ends)
        for flights in self._flights.values():
            for earlier in flights:
                self._meet(earlier, later)
        self._flights[semaphore].append(later)
        self.most_on_one_semaphore = max(self.most_on_one_semaphore, len(self._flights[semaphore]))

    def _meet(self, earlier: _Flight, later: _Flight) -> None:
        for first_writes, second_writes in ((True, True), (True, False), (False, True)):
            first, second = earlier.ends[first_writes], later.ends[second_writes]
            if shared_bytes := first.shares(second):
                key = earlier.start, later.start, first_writes, second_writes, first.space
                met = self._met.setdefault(key, Meeting(*key, first.name, shared_bytes))
                met.late.add(later.number)
                if earlier.number not in met.late:
                    met.early.add(earlier.number)

    def wait(self, semaphore: int, held: int, amount: int) -> None:
        """Completes as few transfers as a wait for an amount needs, where a semaphore holds all that was started."""
        flights = self._flights[semaphore]
        arrived = held - sum(flight.granules for flight in flights)
        while flights and arrived < amount:
            arrived += flights.pop(0).granules

    def clear(self, semaphore: int) -> None:
        """Takes all transfers to a semaphore for complete, as where it is set to 0."""
        self._flights.pop(semaphore, None)


def _covered(pieces: Sequence[tuple[int, int]]) -> int:
    """Counts what lies in at least one piece."""
    starts, ends = np.array(sorted(pieces), np.int64).T
    reached = np.maximum.accumulate(ends)
    before = np.concatenate([starts[:1], reached[:-1]])
    return int(np.maximum(reached - np.maximum(before, starts), 0).sum())
