"""Instructions of a TPU's scalar program that take time besides its bundles: transfers, semaphores and delays."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lowering.schedule.bundles import Bundle, Instruction, value_of
from lowering.schedule.decisions import Decisions, DependsOnDataError
from lowering.schedule.memory import Dma
from lowering.schedule.trace import Trace
from lowering.schedule.unknown import Unknown
from lowering.schedule.values import LABEL, Step, Values

_ENDS = ("src=", "dst=")
_WAITS = ("dma.done.wait", "vwait.ge", "vwait.ge.trace")
_OTHERS = ("vsyncadd", "vsyncmov", "vdelay")


class Clock:
    """The time in one run. It is a bundle's number plus `behind`, so that no bundle has to count."""

    def __init__(self) -> None:
        """Starts with the first bundle at 0."""
        self.behind = 0.0

    def at(self, number: int) -> float:
        """Returns when a bundle is issued, if it is issued now."""
        return number + self.behind


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
        self._spaces = _spaces(bundles)

    def step(self, number: int, instruction: Instruction, happens: Callable[[], bool]) -> list[Step]:
        """Returns what an instruction does where its predicate holds; nothing of what is not understood."""
        before: list[Step] = []
        names = [found[1] if (found := LABEL.match(operand)) else "" for operand in instruction.operands]
        places = [self._places.operand(operand, before) for operand in instruction.operands]
        opcode = instruction.opcode
        if opcode == "vsyncadd":
            effect = self._added(number, *places)
        elif opcode == "vsyncmov":
            effect = self._read(number, instruction, *places)
        elif opcode in _WAITS:
            effect = self._waited(number, *places)
        elif opcode == "vdelay":
            effect = self._delayed(number, *places)
        elif {"size_in_granules", "dst_syncflagno"} <= set(names):
            effect = self._started(number, instruction, names, places)
        else:
            self._trace.unknown[opcode] += 1
            return []

        def step() -> None:
            if happens():
                effect()

        return [*before, step]

    def _started(self, number: int, instruction: Instruction, names: list[str], places: list[int]) -> Step:
        values, dma, clock = self._places.held, self._dma, self._clock
        granules, semaphore = (places[names.index(name)] for name in ("size_in_granules", "dst_syncflagno"))
        destination = places[2] if len(places) > 2 else places[0]
        opcode = self._between(instruction)

        def step() -> None:
            size = self._known(number, values[granules])
            dma.start(clock.at(number), opcode, size, values[places[0]], values[destination], values[semaphore])

        return step

    def _between(self, instruction: Instruction) -> str:
        """Returns the opcode of a transfer, by where its ends are: "dma.general" is between any two places."""
        ends = [operand.partition("=")[2] for operand in instruction.operands if operand.startswith(_ENDS)]
        spaces = [self._spaces.get(named[0]) for end in ends if (named := value_of(end)) is not None]
        if instruction.opcode != "dma.general" or len(spaces) < 2 or None in spaces:
            return instruction.opcode
        return f"dma.{spaces[0]}_to_{spaces[1]}"

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


def _spaces(bundles: Sequence[Bundle]) -> Mapping[str, str]:
    """Returns the memory that each pointer is to, by the name of its value."""
    return {
        instruction.value: instruction.opcode.rpartition(".")[2]
        for bundle in bundles
        for instruction in bundle.instructions
        if instruction.opcode.startswith("int_to_ptr.")
    }
