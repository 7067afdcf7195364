"""Replays one kernel, fusion or copy by itself: how long it takes, what it moves, and what it is bound by."""

import collections
import dataclasses
import itertools
import os
from collections.abc import Mapping, Sequence
from typing import Any

from lowering.schedule import units
from lowering.schedule.chips import Chip
from lowering.schedule.data_hints import NOTHING_GIVEN, DependsOnDataError, Given
from lowering.schedule.dma import Dma, Hbm
from lowering.schedule.machine import Machine
from lowering.schedule.timeline import Recording, Timeline
from lowering.source_lines import is_library
from lowering.tpu_core.bundles import Bundle
from lowering.tpu_core.scalar_memory import ScalarMemory

# Fitted, as the efficiencies of chips are; benchmarks/tpu_published.py compares replays with published times.
HBM_LATENCY_CYCLES = 610.0

_MOST_WAITING = 1 / 3  # of the time: beyond, a kernel that does not keep HBM busy is bound by the latency of its DMAs
_BUSY = 0.6
_LEAST_SHARE = 0.01  # of a kernel's time, for a region to be listed


@dataclasses.dataclass(frozen=True)
class Region:
    """Bundles of a kernel that follow one another and are issued equally often.

    Attributes:
      first: the number of the first bundle, as in the compiler's dump.
      last: of the last.
      trips: how often they are issued in one call.
      cycles: of one call, with what they wait.
      stall_cycles: of these, waiting.
      spills: vector registers stored or loaded for want of registers, in one call.
      bound: the unit that is busiest in them.
      source: the line that most of their instructions come from, such as "model.py:12"; empty where the compiler does
        not know, as outside of Pallas kernels, or names a library's.
    """

    first: int
    last: int
    trips: int
    cycles: float
    stall_cycles: float
    spills: int
    bound: str
    source: str = ""


@dataclasses.dataclass(frozen=True)
class KernelReplay:
    """One call of a kernel by itself.

    Attributes:
      cycles: with stalls.
      stall_cycles: waiting for DMAs.
      dma_bytes: to and from HBM.
      dma_count: transfers of these.
      hbm_cycles: for which HBM was busy with them.
      work: cycles of work for each kind of unit, of all its units together.
      spills: vector registers stored and loaded for want of registers.
      regions: where the time goes, in the order of the program.
      unknown: opcodes that were not understood.
      recording: of the call, if that was asked for.
    """

    cycles: float
    stall_cycles: float
    dma_bytes: int
    dma_count: int
    hbm_cycles: float
    work: Mapping[str, int]
    spills: int
    regions: tuple[Region, ...]
    unknown: tuple[str, ...]
    recording: Recording | None = None

    def shares(self, chip: Chip) -> dict[str, float]:
        """Returns the part of its slots that each kind of unit uses, stalls included."""
        cycles = max(self.cycles, 1.0)
        return {kind: work / (chip.slots[kind] * cycles) for kind, work in self.work.items()}

    def bound(self, chip: Chip) -> str:
        """Says what the kernel waits for, or what is busiest in it."""
        hbm = self.hbm_cycles / max(self.cycles, 1.0)
        if self.stall_cycles > _MOST_WAITING * self.cycles and hbm < _BUSY:
            return "DMA latency"
        shares = {**self.shares(chip), "HBM": hbm}
        return max(shares, key=lambda kind: shares[kind])


def replay(
    name: str,
    bundles: Sequence[Bundle],
    chip: Chip,
    hbm_bytes_per_cycle: float,
    *,
    operands: Mapping[str, Any] | None = None,
    given: Given = NOTHING_GIVEN,
    timeline: Timeline | None = None,
) -> KernelReplay:
    """Runs a kernel from an idle chip, and records it where there is a timeline.

    Raises:
      DependsOnDataError: where data decides what happens, and the caller does not say what.
    """
    memory = ScalarMemory()
    dma = Dma(Hbm(hbm_bytes_per_cycle, HBM_LATENCY_CYCLES), memory, timeline)
    machine = Machine(name, bundles, memory, dma, chip.delay_slots, operands=operands, given=given, timeline=timeline)
    trace = machine.run()
    if not dma.is_awaited():
        trace.unmatched(f"transfers or signals in {name} for which nothing waits")
    if trace.is_unmatched and trace.open_words and given.trip_counts:
        words = " and ".join(trace.open_words)
        raise DependsOnDataError(f"trip_counts do not fit together in {name}: scalars must say what is in {words}")
    issues = machine.issues()
    return KernelReplay(
        cycles=trace.cycles,
        stall_cycles=sum(trace.stalls.values()),
        dma_bytes=dma.hbm_bytes,
        dma_count=dma.count,
        hbm_cycles=dma.hbm_bytes / hbm_bytes_per_cycle,
        work=units.used(bundles, issues, chip),
        spills=sum(units.spills(bundles, issues).values()),
        regions=regions(bundles, issues, trace.stalls, chip, _LEAST_SHARE * trace.cycles),
        unknown=tuple(trace.unknown),
        recording=None if timeline is None else Recording(timeline, bundles, issues, trace.stalls),
    )


def regions(
    bundles: Sequence[Bundle], issues: Sequence[int], stalls: Mapping[int, float], chip: Chip, least_cycles: float = 0.0
) -> tuple[Region, ...]:
    """Finds the regions of a run that take at least so many cycles."""
    found = []
    for trips, numbers in itertools.groupby(range(len(bundles)), key=issues.__getitem__):
        first, *others = numbers
        last = others[-1] if others else first
        inside = bundles[first : last + 1]
        waited = sum(cycles for number, cycles in stalls.items() if first <= number <= last)
        cycles = (last + 1 - first) * trips + waited
        if cycles < least_cycles:
            continue
        work = units.used(inside, issues, chip)
        shares = {kind: work[kind] / chip.slots[kind] for kind in work} | {"DMA": waited}
        region_spills = sum(units.spills(inside, issues).values())
        bound = max(shares, key=lambda kind: shares[kind])
        found.append(Region(first, last, trips, cycles, waited, region_spills, bound, _source(inside)))
    return tuple(found)


def _source(bundles: Sequence[Bundle]) -> str:
    lines = collections.Counter(line for bundle in bundles for line in bundle.lines)
    users = [line for line, _ in lines.most_common() if not is_library(line.rpartition(":")[0])]
    return os.path.basename(users[0]) if users else ""
