"""Whole compiled programs: the top-level program runs, and calls fusions, copies and kernels, in one memory."""

import dataclasses
import re
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np

from lowering.emulation.in_flight import Meeting
from lowering.emulation.kernels import (
    ARRAY_TYPE,
    OPERAND,
    POISONS,
    Allocations,
    allocations_of,
    generation_of,
    granules_of_pointer,
    left_over,
    placed,
    read_back,
)
from lowering.emulation.literals import literals_of
from lowering.emulation.machine import Machine
from lowering.emulation.memory import Memory
from lowering.emulation.registers import Get
from lowering.emulation.report import EmulatedKernel, Finding
from lowering.emulation.transfers import Transfers
from lowering.tpu_core.bundles import Bundle, Instruction, read_bundles, value_of
from lowering.tpu_core.dumps import KERNEL, TOP_LEVEL, Dumps, place_of
from lowering.tpu_core.faults import MachineFaultError, UnknownFormError
from lowering.tpu_core.layouts import places_of
from lowering.tpu_core.vectors import LANES

PROGRAM = "program"
_OFFSET = re.compile(r"= sld \[smem:\[#(allocation\d+)\]\] /\* (hbm offset) \*/")
_WORD = re.compile(r"#(allocation\d+) \[[^\n]*space=smem, [^\n]*fixed_abs, tag = '[^']* - ([^']*)'")
# What the runtime writes before a program starts. The program runs in this state, seeds no random numbers, and finds
# nothing that was brought to VMEM before; arrays that are a part of it lie where it was linked for. The others are for
# traces alone.
_RESULTS = "output ptr"
_OFFLOADED = "call-start"
_REGISTRY = "program shared registry"  # which the program writes itself
_SEEDS = ("opcode 'set.rngseed'", "opcode 'vsetrngseed'", "opcode 'vrng")  # what each program would do with a seed
_TRACES = ("<late-initialization>", "<late-finalization>")
_RUNTIME_WORDS = {
    "program descriptor state": 1,
    **dict.fromkeys(("rng seed", "spec success addr", "hbm offset"), 0),
    **dict.fromkeys(("chip ID", "core index", "program id location", "run id low location"), 0),
}


@dataclasses.dataclass(frozen=True)
class Part:
    """The code of a fusion, a copy, a kernel or the top-level program.

    Attributes:
      name: of the instruction for which it was written.
      source: where that was traced, such as "model.py:12 (loss)".
      bundles: the code.
      allocations: the memory and the bytes of each of its allocations, by name.
      is_kernel: whether it is a Pallas kernel, which leaves nothing under way.
    """

    name: str
    source: str
    bundles: tuple[Bundle, ...]
    allocations: Mapping[str, tuple[str, int]]
    is_kernel: bool


@dataclasses.dataclass(frozen=True)
class Program:
    """A compiled program.

    Attributes:
      top: the part that calls all others.
      called: the parts by the names of the instructions that call them; equal instructions share one.
      words: what the runtime says in scalar memory, by the name of the allocation.
      literals: the types and values of arrays that are a part of the program, by the name of the allocation.
      parameters: the types of what it takes.
      results: the types of what it returns.
      returns_tuple: whether the runtime hands it a table of places for results, also of one.
      target: the chip.
    """

    top: Part
    called: Mapping[str, Part]
    words: Mapping[str, str]
    literals: Mapping[str, tuple[str, np.ndarray]]
    parameters: tuple[str, ...]
    results: tuple[str, ...]
    returns_tuple: bool
    target: str

    @classmethod
    def of(cls, dumps: Dumps, target: str) -> "Program":
        """Reads a program from what the compiler has written for a target.

        Raises:
          UnknownFormError: if a SparseCore is part of it, if it calls what has no code, or if nobody says what arrays
            in it hold.
        """
        for name, instruction in dumps.instructions.items():
            if instruction.opcode == _OFFLOADED:
                source = f" ({instruction.source})" if instruction.source else ""
                raise UnknownFormError(f"{name}{source}, which XLA lets a SparseCore compute, is not executed")
        top = _part(dumps, PROGRAM, TOP_LEVEL)
        names = dict.fromkeys(instruction.callee for bundle in top.bundles for instruction in bundle.instructions)
        codes = {name: dumps.name_of(name) for name in names if name and not name.startswith("<")}
        for name, code in codes.items():
            if code is None or dumps.operand_types(code) != dumps.operand_types(name):
                raise UnknownFormError(f"the compiler has not written the code of {name}")
        parts = {code: _part(dumps, code, code) for code in codes.values() if code is not None}
        called = {name: parts[code] for name, code in codes.items() if code is not None}
        parameters, results = dumps.border
        allocated = dumps.allocations(TOP_LEVEL)
        words = _WORD.findall(allocated) + _OFFSET.findall(dumps.text(TOP_LEVEL))
        takes, returns = (tuple(ARRAY_TYPE.findall(types)) for types in (parameters, results))
        literals, is_tuple = literals_of(dumps, allocated), results.startswith("(")
        return cls(top, called, dict(words), literals, takes, returns, is_tuple, target)


def _part(dumps: Dumps, name: str, code: str) -> Part:
    instruction, text = dumps.instructions.get(name), dumps.text(code)
    source, opcode = ("", "") if instruction is None else (instruction.source, instruction.opcode)
    allocations, is_kernel = allocations_of(dumps.allocations(code), text), opcode == KERNEL
    return Part(name, source, read_bundles(text, vectors=True, is_kernel=is_kernel), allocations, is_kernel)


@dataclasses.dataclass
class Calls:
    """The calls of one part.

    Attributes:
      part: its code.
      machine: that executes it.
      allocations: its memory, which each call finds as if nothing had been written.
      count: of the calls.
      seconds: how long they took; for the program, with its parts.
      transfers: how many the first call started; for the program, with its parts.
    """

    part: Part
    machine: Machine
    allocations: Allocations
    count: int = 0
    seconds: float = 0.0
    transfers: int = 0

    def issues(self) -> np.ndarray:
        """Counts how often each bundle was issued."""
        return np.array(self.machine.issues())

    def described(self) -> EmulatedKernel:
        """Returns what a report says of it."""
        part = self.part
        return EmulatedKernel.of(
            part.name, part.source, part.bundles, self.issues(), self.count, self.seconds, self.transfers
        )


class Run:
    """One execution of a program: one memory, one set of registers, and a machine for each part.

    Attributes:
      calls: of each part that was called, the program itself first.
    """

    def __init__(
        self,
        program: Program,
        operands: Sequence[np.ndarray],
        *,
        order: str = Transfers.ORDERS[0],
        only: Collection[int] | None = None,
        poison: int = POISONS[0],
        **options: Any,
    ) -> None:
        """Lays operands out as the program's types say; options are those of `Machine`.

        Raises:
          UnknownFormError: if nobody knows how something lies in memory.
        """
        self._program = program
        self._options = options
        unit = granules_of_pointer(program.target)
        self._memory = Memory(poison=poison, granules_of_pointer=unit, forgets=poison != POISONS[0])
        is_watched = bool(options.get("checks"))
        self._transfers = Transfers(self._memory, order, only, is_watched=is_watched)
        pairs = zip(program.parameters, operands, strict=True)
        self._parameters = [self._placed("parameter", poison, *pair) for pair in pairs]
        self._results = [self._placed("result", poison, array_type, None) for array_type in program.results]
        self.calls: dict[str, Calls] = {}
        self._left: dict[Finding, None] = {}
        allocations = self._calls_of(program.top).allocations
        for name, literal in program.literals.items():
            allocations.place(name, "hbm", placed(self._memory, name, "hbm", *literal, poison))
        self._set_words(allocations)

    def run(self, like: Sequence[Any]) -> tuple[np.ndarray, ...]:
        """Runs the program; returns its results, of these shapes and dtypes.

        Raises:
          UnknownFormError: at an instruction whose meaning is not settled.
          MachineFaultError: where the program does what no program may.
        """
        self._count(self._calls_of(self._program.top))
        triples = zip(self._results, self._program.results, like, strict=True)
        return tuple(read_back(self._memory, "hbm", *triple) for triple in triples)

    def unknown(self) -> tuple[str, ...]:
        """Returns the opcodes and operands in bundles that were never issued whose meaning nobody has settled."""
        found: dict[str, None] = {}
        for part in (self._program.top, *self._program.called.values()):
            one = self._calls_of(part)
            found |= dict.fromkeys(one.machine.unsettled(np.flatnonzero(one.issues() == 0).tolist()))
        return tuple(what for what in found if not what.startswith(_SEEDS))

    def findings(self) -> tuple[Finding, ...]:
        """Returns which registers held other values than the compiler meant, and what kernels and the program leave."""
        parts = ((one.part, one.machine.registers.clobbered) for one in self.calls.values())
        clobbered = [Finding(part.name, part.source, what) for part, found in parts for what in found]
        at_the_end = left_over(self._memory, self._transfers, but=tuple(finding.what for finding in self._left))
        return (*clobbered, *self._left, *(Finding(PROGRAM, "", what) for what in at_the_end))

    def meetings(self) -> tuple[Meeting, ...]:
        """Returns which transfers were under way together and share bytes, if these were looked for."""
        return () if self._transfers.in_flight is None else self._transfers.in_flight.meetings

    def found(self, meeting: Meeting, depends: str) -> Finding:
        """Makes a finding of transfers that meet, and what depends on that."""
        first, second = (self.calls[start.part].part for start in (meeting.first, meeting.second))
        at, then = first.bundles[meeting.first.bundle], second.bundles[meeting.second.bundle]
        of_other = "" if first is second else f" of {second.name}"
        said = meeting.said(place_of(at), f"{place_of(then)}{of_other}", depends)
        return Finding(first.name, first.source, said)

    def _placed(self, name: str, poison: int, array_type: str, array: np.ndarray | None) -> int:
        if places_of(array_type)[0] not in (8, 16, 32):
            raise UnknownFormError(f"a {name} of type {array_type}")
        return placed(self._memory, name, "hbm", array_type, array, poison)

    def _set_words(self, allocations: Allocations) -> None:
        """Writes what the runtime hands to the program: where results go, or where a table of all their places is."""
        pointer, *others = self._results or [0]
        if others or self._program.returns_tuple:
            size = 4 * max(len(self._results), LANES)
            pointer = self._memory.allocate("places of results", "hbm", size)
            words, is_written = self._memory.words_of("hbm", pointer)
            words[: len(self._results)], is_written[:] = self._results, True
        known = {**_RUNTIME_WORDS, _RESULTS: pointer}
        for name, word in self._program.words.items():
            if word == _REGISTRY:
                continue
            if word not in known:
                raise UnknownFormError(f"a word that the runtime writes, {word!r}")
            self._memory.store_scalar(allocations.address(name, "smem"), known[word])

    def _calls_of(self, part: Part) -> Calls:
        if part.name not in self.calls:
            caller = self.calls[PROGRAM].machine.registers if self.calls else None
            allocations = Allocations(self._memory, part.allocations)
            machine = Machine(
                part.bundles,
                self._memory,
                self._transfers,
                addresses=allocations.address,
                operands=self._operand,
                generation=generation_of(self._program.target),
                calls=self._call,
                caller=caller,
                **self._options,
            )
            self.calls[part.name] = Calls(part, machine, allocations)
        return self.calls[part.name]

    def _operand(self, declaration: Instruction) -> Get:
        """Returns what gets an argument of the program, or what a part was called with: it has that register."""
        text = ", ".join(declaration.operands)
        if declaration.opcode == "scalar_parameter_address":
            address = self._parameters[int(text)]
            return lambda: address
        if OPERAND.fullmatch(text) is None:
            raise UnknownFormError(f"{declaration.opcode} with {text!r}")
        return self.calls[PROGRAM].machine.registers.whatever_is_in(declaration.register)

    def _call(self, instruction: Instruction) -> Callable[[], None]:
        """Returns what calls a part of the program; parts of the runtime only tell a host what happens."""
        name = instruction.callee
        if name in _TRACES:
            return lambda: None
        if name not in self._program.called or any(value_of(operand) is None for operand in instruction.operands):
            raise UnknownFormError(f"a call of {name or 'nothing'} with {', '.join(instruction.operands)!r}")
        called = self._calls_of(self._program.called[name])
        source = f" ({called.part.source})" if called.part.source else ""

        def call() -> None:
            called.allocations.forget()
            try:
                self._count(called)
            except (UnknownFormError, MachineFaultError) as error:
                raise type(error)(f"{name}{source}, {error}") from None

        return call

    def _count(self, called: Calls) -> None:
        """Runs a part, and counts what it does."""
        start, started = time.perf_counter(), len(self._transfers.starts)
        before, caller = left_over(self._memory, self._transfers), self._transfers.part
        self._transfers.part = called.part.name
        called.machine.run()
        self._transfers.part = caller
        if called.part.is_kernel:
            left = left_over(self._memory, self._transfers, but=before)
            self._left |= dict.fromkeys(Finding(called.part.name, called.part.source, what) for what in left)
        called.count += 1
        called.seconds += time.perf_counter() - start
        if called.count == 1:
            called.transfers = len(self._transfers.starts) - started
