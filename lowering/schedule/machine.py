"""Executes the scalar part of a scheduled program: branches, loops and DMAs, a bundle a cycle, but no vectors."""

import collections
import itertools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from lowering.schedule.data_hints import NOTHING_GIVEN, Decisions, DependsOnDataError, Given
from lowering.schedule.dma import Dma
from lowering.schedule.registers import Step, Values
from lowering.schedule.timeline import Timeline
from lowering.schedule.trace import Trace
from lowering.schedule.transfers import Transfers, takes_time
from lowering.tpu_core.bundles import Bundle, Instruction, Predicate, value_of
from lowering.tpu_core.scalar_memory import ScalarMemory
from lowering.tpu_core.scalar_unit import divided, function_of, has_no_effect
from lowering.tpu_core.sequencer import Sequencer
from lowering.tpu_core.unknown import Answers, Unknown

PARAMETER = "scalar_parameter_address"
_SCALARS = re.compile(r"shape: ([su]\d+\[[\d,]*\]|f32\[1?\]), index: (\d+), kind: input")
_CARRIED = ("sphi", "pphi")
_ONE_WORD = "inlined_call_operand."  # of no memory space: its value, not where it lies

Call = Callable[[int, float, Instruction, Mapping[str, Any]], float]


class Machine(Sequencer):
    """One scheduled program, made ready to run once.

    Attributes:
      trace: what was observed.
    """

    def __init__(
        self,
        name: str,
        bundles: Sequence[Bundle],
        memory: ScalarMemory,
        dma: Dma,
        delay_slots: int,
        *,
        operands: Mapping[str, Any] | None = None,
        given: Given = NOTHING_GIVEN,
        call: Call | None = None,
        timeline: Timeline | None = None,
    ) -> None:
        """Takes what the program runs on.

        Args:
          name: of the program; allocations and what `trip_counts` says are by it.
          bundles: what `read_bundles` gives.
          memory: scalar memory; callers and what they call share it.
          dma: what moves data.
          delay_slots: of the chip.
          operands: what a caller passes, by register.
          given: what the caller of the replay says of data.
          call: what happens where another program is called: from the bundle, time, instruction and operands by
            register to the time when it is done.
          timeline: what records the run, if anything does.
        """
        super().__init__(bundles, delay_slots)
        self._name = name
        self._memory = memory
        self._operands = operands or {}
        self._given = given
        self._call = call
        self._places = Values(name, memory)
        self._values = self._places.held
        self._divisions: dict[str, collections.deque[Any]] = collections.defaultdict(collections.deque)
        instructions = itertools.chain.from_iterable(bundle.instructions for bundle in bundles)
        self._answers = Answers(self._values)
        self._decisions = Decisions(name, self.branches, given, _scalars(filter(self._is_open, instructions)))
        self.trace = Trace(timeline=timeline)
        self._transfers = Transfers(bundles, self._decisions, self._places, dma, self.clock, self.trace)

    def run(self, start: float = 0.0) -> Trace:
        """Runs the program from a time on.

        Raises:
          DependsOnDataError: where data decides what happens, and the caller does not say what.
        """
        self.clock.behind = start
        if not self.sequence():
            loop = f"{self._name} does not end: a loop in it waits for something that is not replayed"
            raise DependsOnDataError(loop)
        self.trace.cycles = self.clock.at(len(self.bundles)) - start
        return self.trace

    def translated(self, first: int, last: int) -> list[Step]:
        """Returns the steps of bundles, without those that do nothing which is followed here."""
        steps = itertools.chain.from_iterable(map(self._steps, self.bundles[first : last + 1]))
        return [*self._recorded(first, last), *steps]

    def issue(self, first: int, block: list[Step]) -> None:
        """Takes the steps of bundles."""
        for step in block:
            step()

    def _recorded(self, first: int, last: int) -> list[Step]:
        """Returns the step that notes when bundles are issued, where a timeline is wanted."""
        timeline, clock = self.trace.timeline, self.clock
        return [] if timeline is None else [lambda: timeline.issue(first, last, clock.at(first))]

    def _steps(self, bundle: Bundle) -> list[Step]:
        """Returns the steps of one bundle. Values that rename others, or that a loop carries, are there at once."""
        order = sorted(bundle.instructions, key=lambda x: (x.opcode not in _CARRIED, x.opcode.startswith("int_to_ptr")))
        return [step for instruction in order for step in self._translated(bundle.number, instruction)]

    def _translated(self, number: int, instruction: Instruction) -> list[Step]:
        opcode = instruction.opcode
        before: list[Step] = []
        if instruction.target is not None:
            return [self._branch(number, instruction.target, instruction.predicate)]
        if opcode in _CARRIED:
            return [
                self._places.copied(self._places.register(instruction.register), self._places.place(instruction.value))
            ]
        if opcode == "inlined_call":
            return [self._calling(number, instruction)]
        if opcode.startswith("inlined_call_operand") or opcode == PARAMETER:
            return [self._argument(instruction)]
        if opcode in ("sld", "sst"):
            return self._scalar_memory(number, instruction)
        if takes_time(opcode):
            return self._transfers.step(number, instruction, self._holds(number, instruction.predicate))
        if opcode == "vpop.sfrf":
            return [self._popped(instruction)]
        if opcode.startswith("shalt") and instruction.predicate is not None:
            return [self._checked(number, instruction.predicate)]
        if has_no_effect(opcode) or opcode.endswith(".trace"):
            return [self._unknown(instruction)] if instruction.register else []
        if opcode.startswith(("sdivrem", "spop")):
            return self._queued(instruction)
        function = function_of(opcode)
        if function is None:
            self.trace.unknown[opcode] += 1
            return [self._unknown(instruction)] if instruction.value else []
        places = [self._places.operand(operand, before) for operand in instruction.operands]
        named = value_of(instruction.operands[0]) if opcode.startswith("int_to_ptr") else None
        if named is not None and named[1] == instruction.register:
            # Another name for a value in its register, which another value keeps if a predicate leaves that one out.
            return [*before, self._places.copied(places[0], self._places.place(instruction.value))]
        return [*before, self._effect(instruction, self._computed(function, places))]

    def _unknown(self, instruction: Instruction) -> Step:
        return self._effect(instruction, Unknown)

    def _argument(self, instruction: Instruction) -> Step:
        """Loads an operand of the caller, or the address of a parameter of the whole program."""
        if instruction.opcode == PARAMETER:
            address = self._memory.address(self._name, f"#{PARAMETER} {instruction.operands[0]}")
        else:
            own = self._memory.address(self._name, f"#{instruction.opcode} {instruction.register}")
            address = self._operands.get(instruction.register, own)
            words = self._given.words_of(self._name, instruction.operands)
            if instruction.opcode == _ONE_WORD:
                value = words[0] if words else self._operands.get(instruction.register)
                if value is None or isinstance(value, Unknown):
                    self.trace.open_words += _scalars([instruction])
                return self._effect(instruction, Unknown if value is None else lambda: value)
            self._memory.hold(address, words, is_scalar=instruction.opcode.endswith(".smem"))
        return self._effect(instruction, lambda: address)

    def _is_open(self, instruction: Instruction) -> bool:
        """Tells whether nothing is said of what an operand holds."""
        return not self._given.words_of(self._name, instruction.operands)

    def _computed(self, function: Callable[..., Any], places: Sequence[int]) -> Callable[[], Any]:
        values = self._values
        if len(places) == 2:
            a, b = places
            return lambda: function(values[a], values[b])
        return lambda: function(*(values[place] for place in places))

    def _effect(self, instruction: Instruction, compute: Callable[[], Any]) -> Step:
        """Sets what an instruction computes, where its predicate holds."""
        values = self._values
        to = self._places.place(instruction.value)
        register = self._places.register(instruction.register) if instruction.register else to

        def step() -> None:
            try:
                values[to] = values[register] = compute()
            except TypeError:  # a decision about an unknown value
                values[to] = values[register] = Unknown()

        if instruction.predicate is None:
            return step
        predicate, negated = self._predicate(instruction.predicate)
        otherwise = self._places.operand(instruction.otherwise, []) if instruction.otherwise else None

        def predicated_step() -> None:
            holds = values[predicate]
            truth = self._answers.known(holds) if isinstance(holds, Unknown) else holds
            if truth is None:
                undecided(holds)
            elif truth != negated:
                step()
            elif otherwise is not None:
                values[to] = values[register] = values[otherwise]

        def undecided(holds: Unknown) -> None:
            left = values[register] if otherwise is None else values[otherwise]
            step()
            either = (left, values[to]) if negated else (values[to], left)
            # Without its effect an instruction has no value, and nothing uses one: its register has another's.
            for place in {register} - {to} if otherwise is None else {register, to}:
                self._answers.wait(holds, place, *either)

        return predicated_step

    def _predicate(self, predicate: Predicate) -> tuple[int, bool]:
        named = value_of(f"%{predicate.value}")
        assert named is not None
        return self._places.place(named[0]), predicate.negated

    def _queued(self, instruction: Instruction) -> list[Step]:
        """Queues results that wait until they are taken: quotients and remainders, and what vectors send."""
        before: list[Step] = []
        values = self._values
        if instruction.opcode.startswith("spop"):
            queue = self._divisions[instruction.operands[0].strip("%") if instruction.operands else ""]
            return [self._effect(instruction, lambda: queue.popleft() if queue else Unknown())]
        dividend, divisor = (self._places.operand(operand, before) for operand in instruction.operands[:2])
        queue = self._divisions[instruction.value]

        def step() -> None:
            queue.clear()
            queue.extend(divided(instruction.opcode, values[dividend], values[divisor], *instruction.operands[2:]))

        return [*before, step]

    def _popped(self, instruction: Instruction) -> Step:
        """Takes what a semaphore held when it was read, or what vectors send, which is new each time."""
        values = self._values
        sent = self._places.place(instruction.operands[0].strip("%")) if instruction.operands else None
        read = None if sent is None else lambda: Unknown() if isinstance(values[sent], Unknown) else values[sent]
        return self._effect(instruction, Unknown if read is None else read)

    def _scalar_memory(self, number: int, instruction: Instruction) -> list[Step]:
        before: list[Step] = []
        values, memory = self._values, self._memory
        address, *words = (self._places.operand(operand, before) for operand in instruction.operands)
        if instruction.opcode == "sld":
            return [*before, self._effect(instruction, lambda: memory.load(values[address]))]
        word = words[0]
        stores = self._holds(number, instruction.predicate)

        def step() -> None:
            if stores():
                memory.store(values[address], values[word])

        def unsure_step() -> None:
            try:
                step()
            except DependsOnDataError:
                memory.store(values[address], Unknown())

        return [*before, step if instruction.predicate is None else unsure_step]

    # What decides what comes next.

    def _calling(self, number: int, instruction: Instruction) -> Step:
        names = [value_of(operand) for operand in instruction.operands]
        places = {register: self._places.place(value) for value, register in filter(None, names)}

        def step() -> None:
            if self._call is not None:
                now = self.clock.at(number)
                operands = {register: self._values[place] for register, place in places.items()}
                self.clock.behind += self._call(number, now, instruction, operands) - now

        return step

    def _branch(self, number: int, target: int, predicate: Predicate | None) -> Step:
        taken = self._holds(number, predicate, target)

        def step() -> None:
            if taken():
                self.jump(target)

        return step

    def _checked(self, number: int, predicate: Predicate) -> Step:
        """Makes the step of a check that the compiler has put in, such as that a transfer stays within its operand."""
        place, negated = self._predicate(predicate)

        def step() -> None:
            fails = self._values[place]
            if not isinstance(fails, Unknown) and fails != negated:
                self.trace.unknown[f"a check at {self._name}@{number:#x} that fails (the chip would halt)"] += 1

        return step

    def _holds(self, number: int, predicate: Predicate | None, target: int | None = None) -> Callable[[], bool]:
        """Returns a function that tells whether an instruction takes effect now; `trip_counts` answer for data."""
        if predicate is None:
            return lambda: True
        values = self._values
        place, negated = self._predicate(predicate)

        def holds() -> bool:
            value = values[place]
            if isinstance(value, Unknown):
                return self._decided(value, number, target, negated=negated)
            return value != negated

        return holds

    def _decided(self, value: Unknown, number: int, target: int | None, *, negated: bool) -> bool:
        """Tells whether an instruction with an unknown predicate takes effect: as its question was answered before."""
        truth = self._answers.known(value)
        if truth is None or self._decisions.is_of_loop(number, target):
            truth = self._decisions.holds(number, target, self.trace.unknown) != negated
            self._answers.give(value, is_true=truth)
        return truth != negated


def _scalars(instructions: Iterable[Instruction]) -> list[str]:
    """Returns the operands that a kernel may take its decisions from."""
    declared = (x for x in instructions if x.opcode.startswith("inlined_call_operand"))
    found = (_SCALARS.search(" ".join(instruction.operands)) for instruction in declared)
    return [f"operand {operand[2]} ({operand[1]})" for operand in found if operand is not None]
