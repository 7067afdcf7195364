"""Replays the top-level program: what it calls and how often, and the copies that run meanwhile."""

import dataclasses
import functools
from collections.abc import Collection, Mapping
from typing import Any

from lowering.schedule.aliasing import place_results
from lowering.schedule.chips import Chip
from lowering.schedule.data_hints import PROGRAM, DependsOnDataError, Given
from lowering.schedule.dma import Dma, Hbm
from lowering.schedule.kernel import HBM_LATENCY_CYCLES, KernelReplay, replay
from lowering.schedule.machine import Machine
from lowering.schedule.sparse_cores import bound
from lowering.schedule.timeline import Recording, Timeline
from lowering.tpu_core.bundles import Instruction
from lowering.tpu_core.dumps import Dumps
from lowering.tpu_core.scalar_memory import ScalarMemory
from lowering.tpu_core.unknown import Unknown

# What the runtime sets before a program starts: one word says that the program is to run; another that what it starts
# with in VMEM was brought there when it ran before, as it is where a program runs again and again.
_RUNTIME_WORD = 1


@dataclasses.dataclass
class Called:
    """Count of the calls under one name, and how long they took in the whole program."""

    replay: KernelReplay
    calls: int = 0
    cycles: float = 0.0


@dataclasses.dataclass
class ProgramReplay:
    """A whole program.

    Attributes:
      called: what it calls, by the name of the instruction, in the order of the first calls.
      cycles: from its first bundle to its last.
      stall_cycles: of the top-level program, which waits for copies that it has started, and for SparseCores.
      copy_bytes: that it, or they, copy from or to HBM, while something else runs.
      copy_count: of its own copies.
      unknown: what was not understood.
      recording: of the top-level program, if that was asked for.
    """

    called: dict[str, Called]
    cycles: float = 0.0
    stall_cycles: float = 0.0
    copy_bytes: int = 0
    copy_count: int = 0
    unknown: set[str] = dataclasses.field(default_factory=set)
    recording: Recording | None = None


class _Program:
    """The state of one replay."""

    def __init__(
        self, dumps: Dumps, chip: Chip, hbm_bytes_per_cycle: float, given: Given, recorded: Collection[str] | None
    ) -> None:
        self._dumps = dumps
        self._chip = chip
        self._hbm_bytes_per_cycle = hbm_bytes_per_cycle
        self._given = given
        self._timeline = None if recorded is None else Timeline()
        self._recorded = {dumps.name_of(name) for name in recorded or ()}
        self._given_of = functools.cache(self._given_of_call)
        self._replays: dict[tuple[Any, ...], KernelReplay] = {}
        self._deciding: set[tuple[Any, ...]] = set()  # those in which operands decide something
        self._dma: Dma
        self.result = ProgramReplay({})

    def run(self) -> ProgramReplay:
        memory = ScalarMemory(unwritten=_RUNTIME_WORD)
        self._dma = Dma(Hbm(self._hbm_bytes_per_cycle, HBM_LATENCY_CYCLES), memory, self._timeline)
        bundles = self._dumps.top_level()
        place_results(memory, bundles, self._dumps.aliases)
        machine = Machine(
            PROGRAM,
            bundles,
            memory,
            self._dma,
            self._chip.delay_slots,
            given=self._given,
            call=self._call,
            timeline=self._timeline,
        )
        trace = machine.run()
        result = self.result
        result.cycles = trace.cycles
        result.stall_cycles = sum(trace.stalls.values())
        result.copy_bytes, result.copy_count = self._dma.hbm_bytes, self._dma.count
        if self._timeline is not None:
            result.recording = Recording(self._timeline, bundles, machine.issues(), trace.stalls)
        result.unknown.update(_gathered(trace.unknown), *(one.unknown for one in self._replays.values()))
        self._bound_by_sparse_cores()
        return result

    def _bound_by_sparse_cores(self) -> None:
        """Lets the program take as long as it does at least with what SparseCores do."""
        result = self.result
        cycles_of = {name: called.cycles for name, called in result.called.items()}
        least, waited, moved_bytes = bound(self._dumps, cycles_of, self._hbm_bytes_per_cycle)
        result.copy_bytes += moved_bytes
        if least > result.cycles:
            result.stall_cycles += min(waited, least - result.cycles)
            result.cycles = least

    def _call(self, number: int, now: float, instruction: Instruction, operands: Mapping[str, Any]) -> float:
        """Returns when what is called is done; parts of the runtime are taken to need no time."""
        name = instruction.callee
        if name.startswith("<"):
            return now
        code = self._dumps.name_of(name)
        if code is None:
            self.result.unknown.add(f"the schedule of {name}, which was not written")
            return now
        one = self._replayed(name, code, operands)
        delayed = self._dma.shared_with(now, one.cycles, one.hbm_cycles)
        called = self.result.called.setdefault(name, Called(one))
        called.calls += 1
        called.cycles += one.cycles + delayed
        if self._timeline is not None:
            self._timeline.call(number, now, one.cycles + delayed, name, one)
        return now + one.cycles + delayed

    def _replayed(self, name: str, code: str, operands: Mapping[str, Any]) -> KernelReplay:
        """Replays one call of this code. Operands matter only where they decide something, such as a loop's turns."""
        given = self._given_of(name, code)
        key = code, *given.key()
        if key not in self._deciding:
            try:
                return self._replayed_once(key, code, given)
            except DependsOnDataError:
                self._deciding.add(key)
        known = tuple((register, value) for register, value in operands.items() if not isinstance(value, Unknown))
        return self._replayed_once((key, known), code, given, operands)

    def _replayed_once(
        self, key: tuple[Any, ...], code: str, given: Given, operands: Mapping[str, Any] | None = None
    ) -> KernelReplay:
        if key not in self._replays:
            bundles, hbm = self._dumps.bundles(code), self._hbm_bytes_per_cycle
            timeline = Timeline() if code in self._recorded else None
            self._replays[key] = replay(
                code, bundles, self._chip, hbm, operands=operands, given=given, timeline=timeline
            )
        return self._replays[key]

    def _given_of_call(self, name: str, code: str) -> Given:
        """Returns the hints for one instruction, by the caller or, for a Pallas kernel, by the program."""
        types = self._dumps.operand_types(name)
        return self._given.of_call(name, code, types, self._dumps.constants(name))


def _gathered(unknown: Collection[str]) -> set[str]:
    """Merges all entries about cores that are not replayed, such as SparseCores, into one."""
    if not any(entry.endswith(".remote") for entry in unknown):
        return set(unknown)
    waits = [entry for entry in unknown if entry.startswith("a wait at ")]
    others = {entry for entry in unknown if not entry.startswith("vsync")} - set(waits)
    return others | {f"what other cores do, as SparseCores, and {len(waits)} waits for them"}


def replay_program(
    dumps: Dumps,
    chip: Chip,
    hbm_bytes_per_cycle: float,
    given: Given,
    recorded: Collection[str] | None = None,
) -> ProgramReplay:
    """Runs the whole program in these dumps from an idle chip.

    Args:
      dumps: what the compiler has written.
      chip: one core.
      hbm_bytes_per_cycle: that HBM gives to it.
      given: what the caller says of data.
      recorded: the kernels of which to record when what happens; None to record nothing, also not of the program.

    Raises:
      DependsOnDataError: where data decides what happens, and the caller does not say what.
    """
    return _Program(dumps, chip, hbm_bytes_per_cycle, given, recorded).run()
