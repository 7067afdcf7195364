"""Executes a compiled kernel, bundle by bundle and register by register, with its vectors.

In a bundle, all instructions read registers and memory before any of them writes.
"""

from collections.abc import Callable, Sequence

import numpy as np

from lowering.emulation.instructions import NOT_WRITTEN, RENAMED_ONLY, Call, Translator
from lowering.emulation.memory import Memory
from lowering.emulation.registers import Get, Registers
from lowering.emulation.transfers import Transfers
from lowering.tpu_core.bundles import Bundle, Instruction
from lowering.tpu_core.dumps import place_of
from lowering.tpu_core.faults import MachineFaultError, UnknownFormError
from lowering.tpu_core.sequencer import Sequencer


class Machine(Sequencer):
    """One kernel on one core.

    Attributes:
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
        super().__init__(bundles, delay_slots=6 if generation >= 7 else 4)
        self._memory = memory
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
            jump=self.jump,
        )

    def run(self) -> None:
        """Runs from the first bundle to the last.

        Raises:
          UnknownFormError: at an instruction whose meaning is not settled.
          MachineFaultError: where the kernel does what no program may.
        """
        with np.errstate(all="ignore"):
            if not self.sequence():
                raise MachineFaultError("the kernel does not end")

    def unsettled(self, numbers: Sequence[int]) -> list[str]:
        """Lists the instructions in these bundles whose meaning is not settled."""
        found = []
        for number in numbers:
            for instruction in self.bundles[number].instructions:
                if not instruction.opcode.startswith("inlined_call_operand"):
                    try:
                        self.translator.slot(instruction)
                    except UnknownFormError as error:
                        found.append(str(error))
        return found

    def translated(self, first: int, last: int) -> list[Callable[[], None]]:
        """Returns what executes bundles, one after the other."""
        return [*map(self._step, self.bundles[first : last + 1])]

    def issue(self, first: int, block: list[Callable[[], None]]) -> None:
        """Executes bundles from one on."""
        for at, step in enumerate(block, first):
            try:
                self._memory.bundle = self.registers.bundle = at
                step()
            except (UnknownFormError, MachineFaultError) as error:
                raise type(error)(f"bundle {place_of(self.bundles[at])}: {error}") from None

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
