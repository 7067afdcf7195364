"""What is seen while a program is replayed."""

import collections
import dataclasses
import itertools


@dataclasses.dataclass
class Trace:
    """What was seen in one run.

    Attributes:
      cycles: from the first bundle to the last, stalls included.
      runs: how often each range of bundles, both ends included, was issued.
      stalls: cycles, by the bundle that waited.
      unknown: opcodes that are not understood.
    """

    cycles: float = 0.0
    runs: collections.Counter[tuple[int, int]] = dataclasses.field(default_factory=collections.Counter)
    stalls: dict[int, float] = dataclasses.field(default_factory=lambda: collections.defaultdict(float))
    unknown: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)

    def issues(self, bundles: int) -> list[int]:
        """How often each bundle was issued."""
        changes = [0] * (bundles + 1)
        for (first, last), count in self.runs.items():
            changes[first] += count
            changes[last + 1] -= count
        return list(itertools.accumulate(changes))[:bundles]
