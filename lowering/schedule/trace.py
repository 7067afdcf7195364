"""Observations while a program is replayed."""

import collections
import dataclasses

from lowering.schedule.timeline import Timeline


@dataclasses.dataclass
class Trace:
    """Observations in one run.

    Attributes:
      cycles: from the first bundle to the last, stalls included.
      stalls: cycles, by the bundle that waited.
      unknown: opcodes that are not understood, and what cannot be as it is.
      is_unmatched: whether something was waited for that nothing starts, or the other way round.
      open_words: operands of one word whose value is not known.
      timeline: records when what happens; by default nothing does.
    """

    cycles: float = 0.0
    stalls: dict[int, float] = dataclasses.field(default_factory=lambda: collections.defaultdict(float))
    unknown: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    is_unmatched: bool = False
    open_words: list[str] = dataclasses.field(default_factory=list)
    timeline: Timeline | None = None

    def unmatched(self, what: str) -> None:
        """Notes a wait without what it is for, or the other way round."""
        self.unknown[what] += 1
        self.is_unmatched = True
