"""Values of one scheduled program, kept by their names, and by register for what loops carry."""

import re
from collections.abc import Callable
from typing import Any

from lowering.schedule.bundles import value_of
from lowering.schedule.memory import ScalarMemory, wrapped
from lowering.schedule.scalar import float_bits
from lowering.schedule.unknown import Unknown

LABEL = re.compile(r"(\w+)=(.*)", re.DOTALL)
_SYMBOL = re.compile(r"#\w+")
_FLOAT = re.compile(r"-?\d+\.\d*(e-?\d+)?|-?inf")

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
        text = (labelled[2] if labelled else text).replace("smem:", "")
        inner = re.sub(r"(?<=\S)\s+\[.*", "", text).strip("[] ")  # "1 [#allocation5]": the allocation is a remark
        terms = [term.strip("[] ") for term in inner.split("+") if term.strip("[] ")]
        places = [self._term(term, before) for term in terms]
        while len(places) > 1:
            *rest, a, b = places
            total = self.place(f"sum of {a} and {b}")
            before.append(self._computed(a, b, total))
            places = [*rest, total]
        return places[0] if places else self.place("nothing")

    def copied(self, source: int, to: int) -> Step:
        """Returns a step that copies a value."""
        held = self.held

        def step() -> None:
            held[to] = held[source]

        return step

    def _term(self, term: str, before: list[Step]) -> int:
        if term.startswith("!"):
            place = self._term(term[1:], before)
            negated = self.place(f"not {place}")
            before.append(self._computed(place, self.place("one", True), negated, lambda a, b: a ^ b))
            return negated
        named = value_of(term)
        if named is not None:
            return self.place(named[0])
        if _SYMBOL.match(term):
            return self.place(term, self._memory.address(self._program, term))
        number = term.removeprefix("$")
        if re.fullmatch(r"-?(0x[0-9a-f]+|\d+)", number):
            return self.place(f"constant {number}", wrapped(int(number, 0)))
        if _FLOAT.fullmatch(number):
            return self.place(f"constant {number}", float_bits(float(number)))
        return self.place(f"constant {term}")  # of a kind that is not known

    def _computed(self, a: int, b: int, to: int, function: Callable[[Any, Any], Any] = lambda a, b: a + b) -> Step:
        held = self.held

        def step() -> None:
            held[to] = function(held[a], held[b])

        return step
