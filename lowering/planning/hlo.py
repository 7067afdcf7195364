"""Reads the text of an optimised program: its instructions, and how often each of its computations runs."""

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Iterator, Mapping

_HEADER = re.compile(r"^(ENTRY )?%(\S+) \(")
_INSTRUCTION = re.compile(r"^ +(?:ROOT )?%(\S+) = (.*?) ([a-z][\w-]*)\((.*)$")
_ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,]*)\]")
_CALLED = re.compile(r"\b(calls|to_apply|body|true_computation|false_computation)=%([^\s,)}]+)")
_BRANCHES = re.compile(r"\bbranch_computations=\{([^}]*)\}")
_CONSTANT = re.compile(r"^\d+(?=\))")


@dataclasses.dataclass(frozen=True)
class Array:
    """The dtype and the sizes of an array."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """The size in memory, without padding."""
        bits = re.search(r"\d+", self.dtype)
        return self.size * (int(bits.group()) if bits else 8) // 8

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a computation.

    Attributes:
      name: without the percent sign.
      type_text: the type of its result as it is written.
      opcode: such as "fusion" or "all-reduce-start".
      rest: the line after the opening bracket: operands and attributes.
    """

    name: str
    type_text: str
    opcode: str
    rest: str

    @functools.cached_property
    def arrays(self) -> tuple[Array, ...]:
        """The arrays of the result, in order."""
        return arrays_of(self.type_text)

    @functools.cached_property
    def operands(self) -> tuple[str, ...]:
        """The names of the operands."""
        return tuple(re.findall(r"%([^\s,)]+)", self.rest.partition(")")[0]))

    def attribute(self, pattern: str) -> str | None:
        """Returns what the first group of a pattern finds in the rest of the line."""
        found = re.search(pattern, self.rest)
        return found[1] if found else None


@dataclasses.dataclass(frozen=True)
class Program:
    """The computations of a module, each with its instructions by name; and the name of the one to start with."""

    computations: Mapping[str, Mapping[str, Instruction]]
    entry: str

    def runs(self) -> Iterator[tuple[str, str, int]]:
        """Yields each computation, what it is a part of, and how often it runs; once for each place that calls it.

        A computation that fusions call is a part of what the outermost fusion stands in; others are their own part.
        """
        yield from self._runs(self.entry, self.entry, 1)

    @functools.cached_property
    def unknown_loops(self) -> tuple[str, ...]:
        """The loops of which the text does not say how often they turn; they count as one turn."""
        return tuple(
            one.name
            for lines in self.computations.values()
            for one in lines.values()
            if one.opcode == "while" and self._trips(one, lines) is None
        )

    def least(self, amount: Callable[[Mapping[str, Instruction]], int]) -> int:
        """Adds up an amount of each computation, as often as it runs at least.

        Of branches, the one with the least of it counts, and a loop whose turns data decides does not.
        """

        @functools.cache
        def total(name: str) -> int:
            lines = self.computations[name]
            found = amount(lines)
            for instruction in lines.values():
                called = [total(one) for one in _called(instruction) if one in self.computations]
                if instruction.opcode == "conditional":
                    found += min(called, default=0)
                else:
                    turns = self._trips(instruction, lines) or 0 if instruction.opcode == "while" else 1
                    found += turns * sum(called)
            return found

        return total(self.entry)

    def _runs(self, name: str, whole: str, count: int) -> Iterator[tuple[str, str, int]]:
        yield name, whole, count
        lines = self.computations[name]
        for instruction in lines.values():
            turns = self._trips(instruction, lines) or 1 if instruction.opcode == "while" else 1
            for called in _called(instruction):
                if called in self.computations:
                    yield from self._runs(called, whole if instruction.opcode == "fusion" else called, count * turns)

    def _trips(self, loop: Instruction, lines: Mapping[str, Instruction]) -> int | None:
        """Returns how often a loop turns: as the compiler notes it, or as its condition compares a counter."""
        noted = loop.attribute(r'"known_trip_count":\{"n":"(\d+)"\}')
        if noted:
            return int(noted)
        condition = self.computations.get(loop.attribute(r"\bcondition=%([^\s,)}]+)") or "", {})
        limits = [limit for one in condition.values() if (limit := _constant(one)) is not None]
        turns = limits[0] - _start(loop, condition, lines) if len(limits) == 1 else 0
        return turns if turns > 0 else None  # a counter may also go down


def _start(loop: Instruction, condition: Mapping[str, Instruction], lines: Mapping[str, Instruction]) -> int:
    """Returns where a loop's counter starts: not at 0, if the compiler has taken a turn out of the loop."""
    scalars = [one for one in condition.values() if one.opcode == "get-tuple-element" and not one.arrays[0].shape]
    carried = lines.get(loop.operands[0])
    if len(scalars) != 1 or carried is None or carried.opcode != "tuple":
        return 0
    counter = lines.get(carried.operands[int(scalars[0].attribute(r"\bindex=(\d+)") or 0)])
    while counter is not None and counter.opcode in ("copy", "bitcast"):
        counter = lines.get(counter.operands[0])
    return (counter and _constant(counter)) or 0


def _constant(one: Instruction) -> int | None:
    """Returns the value of a constant that is a whole number."""
    found = _CONSTANT.match(one.rest) if one.opcode == "constant" and not one.arrays[0].shape else None
    return int(found[0]) if found else None


def parse(text: str) -> Program:
    """Reads the text that `compiled.as_text()` gives."""
    computations: dict[str, dict[str, Instruction]] = {}
    entry, lines = "", dict[str, Instruction]()
    for line in text.splitlines():
        if header := _HEADER.match(line):
            lines = computations.setdefault(header[2], {})
            entry = header[2] if header[1] else entry
        elif found := _INSTRUCTION.match(line):
            lines[found[1]] = Instruction(*found.groups())
    computations.setdefault(entry, {})
    return Program(computations, entry)


def arrays_of(type_text: str) -> tuple[Array, ...]:
    """Returns the arrays in a type, such as "(f32[2,3]{1,0}, s32[])"."""
    found = _ARRAY.findall(type_text)
    return tuple(Array(dtype, tuple(int(size) for size in sizes.split(",") if size)) for dtype, sizes in found)


def _called(instruction: Instruction) -> Iterator[str]:
    for _, name in _CALLED.findall(instruction.rest):
        yield name
    for names in _BRANCHES.findall(instruction.rest):
        yield from re.findall(r"%([^\s,]+)", names)
