"""Parts of a recorded run that are shown one by one: the first steps and the last, and sums over those between."""

import bisect
import dataclasses
import itertools
from collections.abc import Iterator, Sequence

from lowering.schedule import units
from lowering.schedule.chips import Chip
from lowering.schedule.kernel import Region, regions
from lowering.schedule.timeline import Omitted, Passage, Recording, Transfer, Wait

_EVENTS_OF_A_PASSAGE = 3
_LEAST_SHARE = 0.5  # of a kernel's time, for a loop to be what its steps are


@dataclasses.dataclass(frozen=True)
class Loop:
    """Bundles that a branch goes back to, and all up to it.

    Attributes:
      first: the number of the first bundle.
      last: of the branch.
      turns: how often the first is issued.
      cycles: that are spent in it.
    """

    first: int
    last: int
    turns: int
    cycles: float


@dataclasses.dataclass
class Piece:
    """A part of one region that is issued without a break.

    Attributes:
      region: that it belongs to.
      first: the number of its first bundle.
      last: of its last.
      start: when the first is issued, in cycles of the run.
      end: when what follows the last is issued.
      waits: in it.
      step: of the loop, counted from 1, that it belongs to; 0 for none.
      begins: whether that step begins with it.
    """

    region: Region
    first: int
    last: int
    start: float
    end: float
    waits: list[Wait]
    step: int = 0
    begins: bool = False


@dataclasses.dataclass(frozen=True)
class Detail:
    """A run as it is shown.

    Attributes:
      loop: whose turns are steps; None where nothing turns.
      first: passages from its beginning.
      omitted: sums over what follows them.
      last: passages up to its end.
    """

    loop: Loop | None
    first: Sequence[Passage]
    omitted: Omitted | None
    last: Sequence[Passage]


def detail(recording: Recording, most_events: int) -> Detail:
    """Chooses what of a run to show, at most so many events, half of them from its end.

    The first part ends, and the last begins, with a step of the loop that takes longest, or of one within it if its
    steps are too long.
    """
    timeline = recording.timeline
    passages = [*timeline.first, *timeline.last]
    loops = _loops(recording)
    is_whole = not timeline.omitted.runs
    if is_whole and sum(map(_events, passages)) <= most_events:
        return Detail(next(iter(loops), None), passages, None, [])
    kept = len(timeline.first)
    head = _fitting(passages if is_whole else passages[:kept], most_events / 2)
    tail = len(passages) - _fitting(passages[:head:-1] if is_whole else passages[: kept - 1 : -1], most_events / 2)
    for loop in loops:
        starts = [at for at, passage in enumerate(passages) if passage.first == loop.first]
        before, after = [at for at in starts if at <= head], [at for at in starts if at >= tail]
        if len(before) > 1 and after:
            head, tail = before[-1], after[0]
            break
    else:
        loop = None
    return Detail(loop, passages[:head], timeline.omitted.and_also(passages[head:tail]), passages[tail:])


def _events(passage: Passage) -> int:
    return _EVENTS_OF_A_PASSAGE + 2 * len(passage.events)


def _fitting(passages: Sequence[Passage], most_events: float) -> int:
    """Counts the passages from the beginning that have no more events than so many, and at least one."""
    totals = itertools.accumulate(map(_events, passages))
    return max(1, sum(1 for _ in itertools.takewhile(lambda total: total <= most_events, totals)))


def _loops(recording: Recording) -> list[Loop]:
    """Finds the loops that take most of a run and turn more than once; the outermost first."""
    issues, stalls = recording.issues, recording.stalls
    cycles = list(itertools.accumulate((count + stalls.get(at, 0.0) for at, count in enumerate(issues)), initial=0.0))
    found = []
    for bundle in recording.bundles:
        for target in (instruction.target for instruction in bundle.instructions):
            if target is not None and target <= bundle.number and issues[target] > 1:
                taken = cycles[bundle.number + 1] - cycles[target]
                found.append(Loop(target, bundle.number, issues[target], taken))
    large = [loop for loop in found if loop.cycles >= _LEAST_SHARE * cycles[-1]]
    return sorted(large, key=lambda loop: (-loop.cycles, loop.first - loop.last))


class Pieces:
    """The regions of a run, and what of them each passage issues."""

    def __init__(self, recording: Recording, loop: Loop | None, chip: Chip) -> None:
        """Finds the regions, and the work of each unit up to each bundle."""
        self._loop = loop
        self._chip = chip
        self._recording = recording
        self._regions = regions(recording.bundles, recording.issues, recording.stalls, chip)
        self._starts = [region.first for region in self._regions]
        once = [1] * len(recording.bundles)
        of_each = [units.used([bundle], once, chip) for bundle in recording.bundles]
        self._work = {kind: list(itertools.accumulate((of[kind] for of in of_each), initial=0)) for kind in chip.slots}

    def used(self, first: int, last: int, cycles: float) -> dict[str, float]:
        """Returns the part of each kind of unit that these bundles use, if they take so many cycles."""
        work = {kind: sums[last + 1] - sums[first] for kind, sums in self._work.items()}
        return {kind: done / (self._chip.slots[kind] * max(cycles, 1.0)) for kind, done in work.items()}

    def used_by(self, omitted: Omitted, cycles: float) -> dict[str, float]:
        """Returns the part of each kind of unit that omitted passages use."""
        used = dict.fromkeys(self._chip.slots, 0.0)
        for (first, last), count in omitted.runs.items():
            for kind, part in self.used(first, last, cycles).items():
                used[kind] += count * part
        return used

    def of(self, passages: Sequence[Passage], step: int = 0) -> Iterator[Piece]:
        """Yields the pieces of passages that follow one another, where so many steps have begun before."""
        piece: Piece | None = None
        is_inside = step > 0 and bool(passages) and self._is_in_loop(passages[0])
        for passage, following in itertools.zip_longest(passages, passages[1:]):
            if is_inside and not self._is_in_loop(passage):
                # The delay slots behind the branch belong to the loop if it turns again.
                is_inside = following is not None and following.first == getattr(self._loop, "first", None)
            for one in self._parts(passage):
                if self._loop is not None and one.first == self._loop.first:
                    step, is_inside, one.begins = step + 1, True, True
                one.step = step if is_inside else 0
                if piece is not None and not one.begins and _follows(piece, one):
                    piece.last, piece.end = one.last, one.end
                    piece.waits += one.waits
                    continue
                if piece is not None:
                    yield piece
                piece = one
        if piece is not None:
            yield piece

    def _is_in_loop(self, passage: Passage) -> bool:
        return self._loop is not None and self._loop.first <= passage.first <= self._loop.last

    def _parts(self, passage: Passage) -> Iterator[Piece]:
        """Yields what a passage issues of each region."""
        cuts = {passage.first, *self._starts[bisect.bisect(self._starts, passage.first) :]}
        cuts |= {self._loop.first} if self._loop is not None else set()
        firsts = sorted(cut for cut in cuts if passage.first <= cut <= passage.last)
        waits = [event for event in passage.events if isinstance(event, Wait)]
        for first, beyond in itertools.zip_longest(firsts, firsts[1:], fillvalue=passage.last + 1):
            region = self._regions[bisect.bisect(self._starts, first) - 1]
            own = [wait for wait in waits if first <= wait.number < beyond]
            yield Piece(region, first, beyond - 1, passage.when(first), passage.when(beyond), own)


def _follows(piece: Piece, other: Piece) -> bool:
    return piece.region is other.region and other.first == piece.last + 1 and piece.step == other.step


def transfers_of(passages: Sequence[Passage]) -> list[Transfer]:
    """Returns all transfers that passages start."""
    return [event for passage in passages for event in passage.events if isinstance(event, Transfer)]
