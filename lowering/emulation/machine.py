"""Executes a compiled kernel, bundle by bundle and register by register, with its vectors.

In a bundle, all instructions read registers and memory before any of them writes.
"""

import collections
import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from lowering.emulation.faults import MachineFaultError, UnknownFormError
from lowering.emulation.instructions import NOT_WRITTEN, RENAMED_ONLY, Call, Translator
from lowering.emulation.memory import Memory, Transfers
from lowering.emulation.registers import Get, Registers
from lowering.schedule.bundles import Bundle, Instruction
from lowering.source_lines import users_file_line

_MOST_BLOCKS = 20_000_000


@dataclasses.dataclass
class _Block:
    """Bundles up to the next branch."""

    steps: tuple[Callable[[], None], ...]
    last: int


class Machine:
    """One kernel on one core.

    Attributes:
      runs: how often each range of bundles, both ends included, was issued.
      registers: what each holds.
      translator: makes functions of its instructions.
    """

    def __init__(
        self,
        bundles: Sequence[Bundle],
        memory: Memory,
        transfers: Transfers,
        *,
        addresses: Callable[[str, str], int],
        operands: Callable[[Instruction], Get],
        generation: int,
        checks: bool = False,
        eup_error: float = 0.0,
        calls: Call | None = None,
        caller: Registers | None = None,
    ) -> None:
        """Takes the kernel and what it reaches.

        Args:
          bundles: with their vectors.
          memory: with all allocations.
          transfers: in some order.
          addresses: see `Registers`.
          operands: returns what gets the address of an operand of the kernel, or its value, by its declaration.
          generation: of the chip, such as 5.
          checks: see `Registers`.
          eup_error: the relative error of what the transcendental unit computes.
          calls: returns what happens where another part of the program is called; None for a kernel, which calls none.
          caller: the registers of the part that calls this one, if any does.
        """
        self._bundles = bundles
        self._memory = memory
        self._delay_slots = 6 if generation >= 7 else 4
        self.registers = Registers(addresses, checks=checks, caller=caller)
        self.translator = Translator(
            bundles,
            self.registers,
            memory,
            transfers,
            operands=operands,
            generation=generation,
            eup_error=eup_error,
            calls=calls,
        )
        self._blocks: dict[tuple[int, bool], _Block] = {}
        self._branches = {
            bundle.number for bundle in bundles if any(one.target is not None for one in bundle.instructions)
        }
        self.runs: collections.Counter[tuple[int, int]] = collections.Counter()

    def run(self) -> None:
        """Runs from the first bundle to the last.

        Raises:
          UnknownFormError: at an instruction whose meaning is not settled.
          MachineFaultError: where the kernel does what no program may.
        """
        number, end = 0, len(self._bundles)
        with np.errstate(all="ignore"):
            for _ in range(_MOST_BLOCKS):
                if number >= end:
                    return
                number = self._run_block(number)
        raise MachineFaultError("the kernel does not end")

    def issues(self) -> tuple[int, ...]:
        """Counts how often each bundle was issued."""
        counts: collections.Counter[int] = collections.Counter()
        for (first, last), count in self.runs.items():
            for number in range(first, last + 1):
                counts[number] += count
        return tuple(counts[bundle.number] for bundle in self._bundles)

    def unsettled(self, numbers: Sequence[int]) -> list[str]:
        """Lists the instructions in these bundles whose meaning is not settled."""
        found = []
        for number in numbers:
            for instruction in self._bundles[number].instructions:
                if not instruction.opcode.startswith("inlined_call_operand"):
                    try:
                        self.translator.slot(instruction)
                    except UnknownFormError as error:
                        found.append(str(error))
        return found

    def _run_block(self, first: int) -> int:
        """Runs a block, and the delay slots of a branch that is taken; returns the bundle that comes next."""
        block = self._block(first, stops_at_branch=True)
        self._issue(first, block)
        number = block.last + 1
        if self.translator.target is None:
            return number
        if number < len(self._bundles):
            delayed = self._block(number, stops_at_branch=False)
            self._issue(number, delayed)
        target, self.translator.target = self.translator.target, None
        return target

    def _issue(self, first: int, block: _Block) -> None:
        self.runs[first, block.last] += 1
        for at, step in enumerate(block.steps, first):
            try:
                self._memory.bundle = self.registers.bundle = at
                step()
            except (UnknownFormError, MachineFaultError) as error:
                raise type(error)(f"bundle {at:#x}{self._line(at)}: {error}") from None

    def _line(self, number: int) -> str:
        line = users_file_line(self._bundles[number].lines)
        return f" ({line})" if line else ""

    def _block(self, first: int, *, stops_at_branch: bool) -> _Block:
        key = first, stops_at_branch
        if key not in self._blocks:
            last = min(first + self._delay_slots, len(self._bundles)) - 1
            if stops_at_branch:
                end = len(self._bundles) - 1
                last = next((number for number in range(first, end + 1) if number in self._branches), end)
            self._blocks[key] = _Block(tuple(map(self._step, self._bundles[first : last + 1])), last)
        return self._blocks[key]

    def _step(self, bundle: Bundle) -> Callable[[], None]:
        """Returns what executes one bundle."""
        try:
            slots = [self.translator.slot(instruction) for instruction in bundle.instructions]
        except UnknownFormError as error:
            message = str(error)

            def refuse() -> None:
                raise UnknownFormError(message)

            return refuse
        # What a loop carries has its name at once; a pointer may rename what its own bundle computes.
        carried = [slot for slot in slots if slot.renames == "at once"]
        renamed = [slot for slot in slots if slot.renames == "then"]
        computed = [(slot.register, slot.compute, slot.value) for slot in slots if slot.compute is not None]
        effects = [slot.effect for slot in slots if slot.effect is not None]
        held, names = self.registers.held, self.registers.names

        def step() -> None:
            for slot in carried:
                names[slot.register] = {slot.value}
            results = [(register, compute(), value) for register, compute, value in computed]
            for effect in effects:
                effect()
            for register, result, value in results:
                if result is RENAMED_ONLY:
                    names[register] |= {value}
                elif result is not NOT_WRITTEN:
                    held[register] = result
                    names[register] = {value}
            for slot in renamed:
                # Where a predicate has left the value out that is renamed, its register still has another.
                if not slot.sources.isdisjoint(names.get(slot.register, ())):
                    names[slot.register] |= {slot.value}

        return step
