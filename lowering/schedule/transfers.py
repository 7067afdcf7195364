"""Instructions of a TPU's scalar program that take time besides its bundles: transfers, semaphores and delays."""

from collections.abc import Callable, Sequence
from typing import Any

from lowering.schedule.data_hints import Decisions, DependsOnDataError
from lowering.schedule.dma import Dma
from lowering.schedule.registers import Step, Values
from lowering.schedule.trace import Trace
from lowering.tpu_core.bundles import Bundle, Instruction
from lowering.tpu_core.faults import UnknownFormError
from lowering.tpu_core.sequencer import Clock
from lowering.tpu_core.transfers import pointers_in, transfer_of
from lowering.tpu_core.unknown import Unknown

_WAITS = ("dma.done.wait", "vwait.ge", "vwait.ge.trace")
_OTHERS = ("vsyncadd", "vsyncmov", "vdelay")


class Transfers:
    """The instructions of one program that start transfers, or wait."""

    def __init__(
        self, bundles: Sequence[Bundle], decisions: Decisions, places: Values, dma: Dma, clock: Clock, trace: Trace
    ) -> None:
        """Takes the program, what decides in it, and what it runs on."""
        self._name = decisions.program
        self._deciding = decisions.operands
        self._places = places
        self._dma = dma
        self._clock = clock
        self._trace = trace
        self._pointers = pointers_in(bundles)

    def step(self, number: int, instruction: Instruction, happens: Callable[[], bool]) -> list[Step]:
        """Returns what an instruction does where its predicate holds; nothing of what is not understood."""
        before: list[Step] = []
        opcode, effect = instruction.opcode, None
        if opcode.startswith("dma.") and opcode not in _WAITS:
            effect = self._started(number, instruction, before)
        else:
            places = [self._places.operand(operand, before) for operand in instruction.operands]
            if opcode == "vsyncadd":
                effect = self._added(number, *places)
            elif opcode == "vsyncmov":
                effect = self._read(number, instruction, *places)
            elif opcode == "vdelay":
                effect = self._delayed(number, *places)
            else:
                effect = self._waited(number, *places)
        if effect is None:
            self._trace.unknown[opcode] += 1
            return []

        def step() -> None:
            if happens():
                effect()

        return [*before, step]

    def _started(self, number: int, instruction: Instruction, before: list[Step]) -> Step | None:
        """Returns the step that starts a transfer; None where one is not understood."""
        try:
            transfer = transfer_of(instruction, self._pointers)
        except UnknownFormError:
            return None
        values, dma, clock = self._places.held, self._dma, self._clock
        # "dma.general" is between any two places.
        opcode = instruction.opcode if "" in transfer.spaces else "dma.{}_to_{}".format(*transfer.spaces)
        granules, source, destination, semaphore = (self._places.operand(x, before) for x in transfer[1:5])

        def step() -> None:
            size = self._known(number, values[granules])
            dma.start(clock.at(number), opcode, size, values[source], values[destination], values[semaphore])

        return step

    def _added(self, number: int, semaphore: int, amount: int) -> Step:
        values, dma, clock = self._places.held, self._dma, self._clock
        return lambda: dma.add(clock.at(number), values[semaphore], self._known(number, values[amount]))

    def _read(self, number: int, instruction: Instruction, semaphore: int) -> Step:
        """Reads a semaphore; what takes the value off the queue behind it finds it by the same name."""
        values, to = self._places.held, self._places.place(instruction.value)

        def step() -> None:
            held = self._dma.held_at(values[semaphore], self._clock.at(number))
            values[to] = Unknown() if held is None else held

        return step

    def _waited(self, number: int, semaphore: int, amount: int) -> Step:
        values, clock = self._places.held, self._clock

        def step() -> None:
            at = self._dma.reached_at(values[semaphore], self._known(number, values[amount]))
            if at is None:
                self._trace.unmatched(f"a wait at {self._name}@{number:#x} for what nothing that is replayed starts")
            elif at > clock.at(number):
                self._stall(number, at - clock.at(number))

        return step

    def _delayed(self, number: int, cycles: int) -> Step:
        return lambda: self._stall(number, self._known(number, self._places.held[cycles], "a delay"))

    def _stall(self, number: int, cycles: float) -> None:
        self._trace.stalls[number] += cycles
        if self._trace.timeline is not None:
            self._trace.timeline.wait(number, self._clock.at(number), cycles)
        self._clock.behind += cycles

    def _known(self, number: int, value: Any, what: str = "the size of a transfer") -> int:
        if isinstance(value, Unknown):
            told = f": scalars must say what is in {self._deciding}" if self._deciding else ""
            raise DependsOnDataError(f"{what} at {self._name}@{number:#x} depends on data{told}")
        return int(value)


def takes_time(opcode: str) -> bool:
    """Tells whether an opcode is one of these."""
    return opcode in _WAITS or opcode in _OTHERS or opcode.startswith("dma.")
