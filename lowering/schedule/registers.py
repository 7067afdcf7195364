"""Values of one scheduled program, kept by their names, and by register for what loops carry."""

import operator
from collections.abc import Callable
from typing import Any

from lowering.tpu_core.faults import UnknownFormError
from lowering.tpu_core.operands import LABEL, Register, Symbol, Term, terms_of
from lowering.tpu_core.scalar_memory import ScalarMemory
from lowering.tpu_core.unknown import Unknown

Step = Callable[[], None]


class Values:
    """The values of one program.

    Attributes:
      held: all of them, by the place that `place`, `register` and `operand` give.
    """

    def __init__(self, program: str, memory: ScalarMemory) -> None:
        """Starts with none; allocations are found in memory by the program's name."""
        self._program = program
        self._memory = memory
        self._places: dict[str, int] = {}
        self.held: list[Any] = []

    def place(self, name: str, value: Any = None) -> int:
        """Returns where a value is kept; it is unknown until something computes it."""
        if name not in self._places:
            self._places[name] = len(self.held)
            self.held.append(Unknown() if value is None else value)
        return self._places[name]

    def register(self, name: str) -> int:
        """Returns where the value that a register holds is kept; some values have the names of registers."""
        return self.place(f"register {name}")

    def operand(self, text: str, before: list[Step]) -> int:
        """Returns where the value of an operand is; what has to be added up for it is put before the instruction."""
        labelled = LABEL.match(text)
        text = labelled[2] if labelled else text
        try:
            terms = terms_of(text)
        except UnknownFormError:
            return self.place(f"constant {text}")  # of a kind that is not known
        (_, first), *others = terms
        total = self._term(first, before)
        for sign, term in others:
            a, b = total, self._term(term, before)
            total = self.place(f"{a} {'+' if sign > 0 else '-'} {b}")
            before.append(self._computed(a, b, total, operator.add if sign > 0 else operator.sub))
        return total

    def copied(self, source: int, to: int) -> Step:
        """Returns a step that copies a value."""
        held = self.held

        def step() -> None:
            held[to] = held[source]

        return step

    def _term(self, term: Term, before: list[Step]) -> int:
        if isinstance(term, Symbol):
            return self.place(f"#{term.name}", self._memory.address(self._program, f"#{term.name}"))
        if not isinstance(term, Register):
            return self.place(f"constant {term}", term)
        place = self.place(term.name)
        if not term.negated:
            return place
        negated = self.place(f"not {place}")
        before.append(self._computed(place, self.place("one", True), negated, operator.xor))
        return negated

    def _computed(self, a: int, b: int, to: int, function: Callable[[Any, Any], Any]) -> Step:
        held = self.held

        def step() -> None:
            held[to] = function(held[a], held[b])

        return step
