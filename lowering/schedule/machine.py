"""Executes the scalar part of a scheduled program: branches, loops and DMAs, a bundle a cycle, but no vectors."""

import collections
import dataclasses
import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lowering.schedule.bundles import Bundle, Instruction, Predicate, value_of
from lowering.schedule.decisions import NOTHING_GIVEN, Decisions, DependsOnDataError, Given
from lowering.schedule.memory import FROM_DATA, Dma, ScalarMemory, Unknown, wrapped
from lowering.schedule.scalar import divided, function_of, has_no_effect
from lowering.schedule.trace import Trace

_MOST_BLOCKS = 20_000_000  # a few minutes of replay
PARAMETER = "scalar_parameter_address"
_CARRIED = ("sphi", "pphi")
_ONE_WORD = "inlined_call_operand."  # of no memory space: its value, not where it lies
_LABEL = re.compile(r"(\w+)=(.*)", re.DOTALL)
_SYMBOL = re.compile(r"#\w+")


Step = Callable[[], None]
Call = Callable[[float, Instruction, Mapping[str, Any]], float]


@dataclasses.dataclass(frozen=True)
class _Block:
    """Bundles up to the next branch, without those that do nothing which is followed here."""

    steps: tuple[Step, ...]
    last: int


class Machine:
    """One scheduled program, made ready to run once."""

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
          call: what happens where another program is called: from the time, the instruction and the operands by
            register to the time when it is done.
        """
        self._name = name
        self._bundles = bundles
        self._memory = memory
        self._dma = dma
        self._delay_slots = delay_slots
        self._operands = operands or {}
        self._given = given
        self._call = call
        self._values: list[Any] = []
        self._places: dict[str, int] = {}
        self._divisions: dict[str, collections.deque[Any]] = collections.defaultdict(collections.deque)
        self._branches = {
            bundle.number: instruction.target
            for bundle in bundles
            for instruction in bundle.instructions
            if instruction.target is not None
        }
        self._decisions = Decisions(name, self._branches, given)
        self._blocks: dict[tuple[int, bool], _Block] = {}
        self._target: int | None = None
        # The time at a bundle is its number plus this: no bundle has to count.
        self._behind = 0.0
        self.trace = Trace()

    def run(self, start: float = 0.0) -> Trace:
        """Runs the program from a time on.

        Raises:
          DependsOnDataError: where data decides what happens, and the caller does not say what.
        """
        end = len(self._bundles)
        number, runs = 0, self.trace.runs
        self._behind = start
        for _ in range(_MOST_BLOCKS):
            if number >= end:
                self.trace.cycles = number + self._behind - start
                return self.trace
            block = self._block(number, stops_at_branch=True)
            for step in block.steps:
                step()
            runs[number, block.last] += 1
            number = block.last + 1
            if self._target is not None and self._delay_slots and number < end:
                delayed = self._block(number, stops_at_branch=False)
                for step in delayed.steps:
                    step()
                runs[number, delayed.last] += 1
                number = delayed.last + 1
            if self._target is not None:
                self._behind += number - self._target
                number, self._target = self._target, None
        raise DependsOnDataError(f"{self._name} does not end: a loop in it waits for something that is not replayed")

    def _block(self, first: int, *, stops_at_branch: bool) -> _Block:
        """The bundles from one on to the next branch; or those that follow one in its delay slots."""
        key = first, stops_at_branch
        if key not in self._blocks:
            last = min(first + self._delay_slots, len(self._bundles)) - 1
            if stops_at_branch:
                last = next((number for number in range(first, len(self._bundles)) if number in self._branches), last)
                last = last if last in self._branches else len(self._bundles) - 1
            steps = itertools.chain.from_iterable(map(self._steps, self._bundles[first : last + 1]))
            self._blocks[key] = _Block(tuple(steps), last)
        return self._blocks[key]

    def _steps(self, bundle: Bundle) -> list[Step]:
        """What one bundle does. Values that are new names of others, or of what a loop carries, are there at once."""
        order = sorted(bundle.instructions, key=lambda x: (x.opcode not in _CARRIED, x.opcode.startswith("int_to_ptr")))
        return [step for instruction in order for step in self._translated(bundle.number, instruction)]

    def _translated(self, number: int, instruction: Instruction) -> list[Step]:
        opcode = instruction.opcode
        before: list[Step] = []
        if instruction.target is not None:
            return [self._branch(number, instruction.target, instruction.predicate)]
        if opcode in _CARRIED:
            return [self._copy(self._register(instruction.register), self._place(instruction.value))]
        if opcode == "inlined_call":
            return [self._calling(number, instruction)]
        if opcode.startswith("inlined_call_operand") or opcode == PARAMETER:
            return [self._argument(instruction)]
        if opcode in ("sld", "sst"):
            return self._scalar_memory(number, instruction)
        if opcode in ("dma.done.wait", "vsyncadd", "vwait.ge") or opcode.startswith("dma."):
            return self._transfer(number, instruction)
        if has_no_effect(opcode) or opcode.endswith(".trace"):
            return [self._unknown(instruction)] if instruction.register else []
        if opcode.startswith(("sdivrem", "spop")):
            return self._queued(instruction)
        function = function_of(opcode)
        if function is None:
            self.trace.unknown[opcode] += 1
            return [self._unknown(instruction)] if instruction.value else []
        places = [self._operand(operand, before) for operand in instruction.operands]
        named = value_of(instruction.operands[0]) if opcode.startswith("int_to_ptr") else None
        if named is not None and named[1] == instruction.register:
            # Another name for a value in its register, which another value keeps if a predicate leaves that one out.
            return [*before, self._copy(places[0], self._place(instruction.value))]
        return [*before, self._effect(instruction, self._computed(function, places))]

    # Values are kept by their names, and by register for what loops carry and callers pass.

    def _place(self, name: str, value: Any = FROM_DATA) -> int:
        """Where a value is kept; it is unknown until something computes it."""
        if name not in self._places:
            self._places[name] = len(self._values)
            self._values.append(value)
        return self._places[name]

    def _register(self, name: str) -> int:
        """Where the value that a register holds is kept; some values have the names of registers."""
        return self._place(f"register {name}")

    def _operand(self, text: str, before: list[Step]) -> int:
        """Where the value of an operand is; what has to be added up for it is put before the instruction."""
        labelled = _LABEL.match(text)
        text = (labelled[2] if labelled else text).replace("smem:", "")
        inner = re.sub(r"(?<=\S)\s+\[.*", "", text).strip("[] ")  # "1 [#allocation5]": the allocation is a remark
        terms = [term.strip("[] ") for term in inner.split("+") if term.strip("[] ")]
        places = [self._term(term, before) for term in terms]
        while len(places) > 1:
            *rest, a, b = places
            total = self._place(f"sum of {a} and {b}")
            before.append(self._sum(a, b, total))
            places = [*rest, total]
        return places[0] if places else self._place("nothing")

    def _term(self, term: str, before: list[Step]) -> int:
        if term.startswith("!"):
            place = self._term(term[1:], before)
            negated = self._place(f"not {place}")
            before.append(self._sum(place, self._place("one", True), negated, lambda a, b: a ^ b))
            return negated
        named = value_of(term)
        if named is not None:
            return self._place(named[0])
        if _SYMBOL.match(term):
            return self._place(term, self._memory.address(self._name, term))
        number = term.removeprefix("$")
        if re.fullmatch(r"-?(0x[0-9a-f]+|\d+)", number):
            return self._place(f"constant {number}", wrapped(int(number, 0)))
        return self._place(f"constant {term}")  # of floating point, or of a kind that is not known

    def _sum(self, a: int, b: int, to: int, function: Callable[[Any, Any], Any] = lambda a, b: a + b) -> Step:
        values = self._values

        def step() -> None:
            values[to] = function(values[a], values[b])

        return step

    def _copy(self, source: int, to: int) -> Step:
        values = self._values

        def step() -> None:
            values[to] = values[source]

        return step

    def _unknown(self, instruction: Instruction) -> Step:
        return self._effect(instruction, lambda: FROM_DATA)

    def _argument(self, instruction: Instruction) -> Step:
        """An operand of the caller, or where a parameter of the whole program lies."""
        if instruction.opcode == PARAMETER:
            address = self._memory.address(self._name, f"#{PARAMETER} {instruction.operands[0]}")
        else:
            own = self._memory.address(self._name, f"#{instruction.opcode} {instruction.register}")
            address = self._operands.get(instruction.register, own)
            words = self._given.words_of(self._name, instruction.operands)
            if instruction.opcode == _ONE_WORD:
                return self._effect(instruction, lambda: words[0] if words else FROM_DATA)
            self._memory.hold(address, words, is_scalar=instruction.opcode.endswith(".smem"))
        return self._effect(instruction, lambda: address)

    def _computed(self, function: Callable[..., Any], places: Sequence[int]) -> Callable[[], Any]:
        values = self._values
        if len(places) == 2:
            a, b = places
            return lambda: function(values[a], values[b])
        return lambda: function(*(values[place] for place in places))

    def _effect(self, instruction: Instruction, compute: Callable[[], Any]) -> Step:
        """Sets what an instruction computes, where its predicate holds."""
        values = self._values
        to = self._place(instruction.value)
        register = self._register(instruction.register) if instruction.register else to

        def step() -> None:
            try:
                values[to] = values[register] = compute()
            except TypeError:  # a decision about an unknown value
                values[to] = values[register] = FROM_DATA

        if instruction.predicate is None:
            return step
        predicate, negated = self._predicate(instruction.predicate)
        otherwise = self._operand(instruction.otherwise, []) if instruction.otherwise else None

        def predicated_step() -> None:
            holds = values[predicate]
            if isinstance(holds, Unknown):
                values[to] = values[register] = FROM_DATA
            elif holds != negated:
                step()
            elif otherwise is not None:
                values[to] = values[register] = values[otherwise]

        return predicated_step

    def _predicate(self, predicate: Predicate) -> tuple[int, bool]:
        named = value_of(f"%{predicate.value}")
        assert named is not None
        return self._place(named[0]), predicate.negated

    def _queued(self, instruction: Instruction) -> list[Step]:
        """Results that wait until they are taken: quotients and remainders, and what vectors send."""
        before: list[Step] = []
        values = self._values
        if instruction.opcode.startswith("spop"):
            queue = self._divisions[instruction.operands[0].strip("%") if instruction.operands else ""]
            return [self._effect(instruction, lambda: queue.popleft() if queue else FROM_DATA)]
        dividend, divisor = (self._operand(operand, before) for operand in instruction.operands[:2])
        queue = self._divisions[instruction.value]

        def step() -> None:
            queue.clear()
            queue.extend(divided(instruction.opcode, values[dividend], values[divisor], *instruction.operands[2:]))

        return [*before, step]

    def _scalar_memory(self, number: int, instruction: Instruction) -> list[Step]:
        before: list[Step] = []
        values, memory = self._values, self._memory
        address, *words = (self._operand(operand, before) for operand in instruction.operands)
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
                memory.store(values[address], FROM_DATA)

        return [*before, step if instruction.predicate is None else unsure_step]

    # What takes time, or decides what comes next.

    def _transfer(self, number: int, instruction: Instruction) -> list[Step]:
        """Starting a DMA, waiting for a semaphore, adding to one."""
        before: list[Step] = []
        values, dma, opcode = self._values, self._dma, instruction.opcode
        names = [found[1] if (found := _LABEL.match(operand)) else "" for operand in instruction.operands]
        places = [self._operand(operand, before) for operand in instruction.operands]
        happens = self._holds(number, instruction.predicate)
        if opcode == "vsyncadd":

            def step() -> None:
                if happens():
                    dma.add(number + self._behind, values[places[0]], self._known(number, values[places[1]]))

        elif opcode in ("dma.done.wait", "vwait.ge"):

            def step() -> None:
                if happens():
                    self._wait(number, values[places[0]], self._known(number, values[places[1]]))

        elif {"size_in_granules", "dst_syncflagno"} <= set(names):
            granules, semaphore = (places[names.index(name)] for name in ("size_in_granules", "dst_syncflagno"))
            destination = places[2] if len(places) > 2 else places[0]

            def step() -> None:
                if happens():
                    size = self._known(number, values[granules])
                    ends = values[places[0]], values[destination]
                    dma.start(number + self._behind, opcode, size, *ends, values[semaphore])

        else:
            self.trace.unknown[opcode] += 1
            return []
        return [*before, step]

    def _wait(self, number: int, semaphore: Any, amount: int) -> None:
        now = number + self._behind
        at = self._dma.reached_at(semaphore, amount)
        if at is None:
            self.trace.unknown[f"a wait at {self._name}@{number:#x} for what nothing that is replayed starts"] += 1
        elif at > now:
            self.trace.stalls[number] += at - now
            self._behind += at - now

    def _calling(self, number: int, instruction: Instruction) -> Step:
        names = [value_of(operand) for operand in instruction.operands]
        places = {register: self._place(value) for value, register in filter(None, names)}

        def step() -> None:
            if self._call is not None:
                now = number + self._behind
                operands = {register: self._values[place] for register, place in places.items()}
                self._behind += self._call(now, instruction, operands) - now

        return step

    def _branch(self, number: int, target: int, predicate: Predicate | None) -> Step:
        taken = self._holds(number, predicate, target)

        def step() -> None:
            if taken():
                self._target = target

        return step

    def _holds(self, number: int, predicate: Predicate | None, target: int | None = None) -> Callable[[], bool]:
        """Whether an instruction takes effect, now; what data decides is answered by `trip_counts`."""
        if predicate is None:
            return lambda: True
        values = self._values
        place, negated = self._predicate(predicate)

        def holds() -> bool:
            value = values[place]
            if isinstance(value, Unknown):
                return self._decisions.holds(number, target)
            return value != negated

        return holds

    def _known(self, number: int, value: Any) -> int:
        if isinstance(value, Unknown):
            raise DependsOnDataError(f"the size of a transfer at {self._name}@{number:#x} depends on data")
        return int(value)
