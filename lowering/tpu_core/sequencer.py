"""Sequence of bundles: a core issues one a cycle, and those in the delay slots of a branch before it jumps."""

import abc
import collections
import itertools
from collections.abc import Sequence
from typing import Any

from lowering.tpu_core.bundles import Bundle

_MOST_BLOCKS = 20_000_000  # a few minutes


class Clock:
    """The time in one run. It is a bundle's number plus `behind`, so that no bundle has to count."""

    def __init__(self) -> None:
        """Starts with the first bundle at 0."""
        self.behind = 0.0

    def at(self, number: int) -> float:
        """Returns when a bundle is issued, if it is issued now."""
        return number + self.behind


class Sequencer(abc.ABC):
    """A program that runs block by block; a block ends with a branch, or with the last delay slot behind one.

    Attributes:
      bundles: the program.
      branches: the bundles with a branch, and where these lead.
      clock: counts a cycle for each bundle.
      runs: how often each range of bundles, both ends included, was issued.
    """

    def __init__(self, bundles: Sequence[Bundle], delay_slots: int) -> None:
        """Takes a program and how many bundles behind a branch are issued in any case."""
        self.bundles = bundles
        self.branches = {
            bundle.number: instruction.target
            for bundle in bundles
            for instruction in bundle.instructions
            if instruction.target is not None
        }
        self.clock = Clock()
        self._target: int | None = None
        self.runs: collections.Counter[tuple[int, int]] = collections.Counter()
        self._delay_slots = delay_slots
        self._blocks: dict[tuple[int, bool], tuple[Any, int]] = {}

    @abc.abstractmethod
    def translated(self, first: int, last: int) -> Any:
        """Makes bundles ready to be issued one after the other."""

    @abc.abstractmethod
    def issue(self, first: int, block: Any) -> None:
        """Issues what `translated` has made of the bundles from one on."""

    def jump(self, target: int) -> None:
        """Goes on at a bundle when the delay slots have been issued."""
        self._target = target

    def sequence(self) -> bool:
        """Runs from the first bundle on; tells whether the program ends."""
        number, end = 0, len(self.bundles)
        for _ in range(_MOST_BLOCKS):
            if number >= end:
                return True
            number = self._issued(number, stops_at_branch=True)
            if self._target is not None:
                if self._delay_slots and number < end:
                    number = self._issued(number, stops_at_branch=False)
                self.clock.behind += number - self._target
                number, self._target = self._target, None
        return False

    def issues(self) -> list[int]:
        """Counts how often each bundle was issued."""
        changes = [0] * (len(self.bundles) + 1)
        for (first, last), count in self.runs.items():
            changes[first] += count
            changes[last + 1] -= count
        return list(itertools.accumulate(changes))[:-1]

    def _issued(self, first: int, *, stops_at_branch: bool) -> int:
        """Issues a block, or the delay slots of a branch; returns the bundle that comes next."""
        key = first, stops_at_branch
        if key not in self._blocks:
            end = len(self.bundles) - 1
            last = min(first + self._delay_slots - 1, end)
            if stops_at_branch:
                last = next((number for number in range(first, end) if number in self.branches), end)
            self._blocks[key] = self.translated(first, last), last
        block, last = self._blocks[key]
        self.issue(first, block)
        self.runs[first, last] += 1
        return last + 1
