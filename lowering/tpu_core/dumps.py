"""Dumps that libtpu is asked to write, and where in them each part of a program is."""

import dataclasses
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from lowering.operators import operator_in
from lowering.source_lines import users_file_line, users_line
from lowering.tpu_core.bundles import Bundle, read_bundles
from lowering.tpu_core.constants import constant_operands

TOP_LEVEL = "TLP"
KERNEL = "mosaic"
_FILE = re.compile(r"\d+-(.*?)-\d+-packed-bundles-post-ra\.txt")
_ORIGINAL = re.compile(r"\d+-(.*?)-\d+-original\.txt")
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \([^\n]*\{\n(.*?)^\}", re.MULTILINE | re.DOTALL)
_ENTRY = re.compile(r"^ENTRY %?([\w.\-]+) ", re.MULTILINE)
_BROKEN_LINE = re.compile(r'\n(?="|\}\})')  # in what a kernel's author says of it, as splash attention's does
_INSTRUCTION = re.compile(r"^ +(?:ROOT )?%([\w.\-]+) = (.*)$", re.MULTILINE)
_PLAIN = r'(?:"(?:[^"\\]|\\.)*"|[^"{}])'  # text in quotes, or a character other than a bracket
_SAID_ELSEWHERE = re.compile(rf", (?:metadata|sharding|frontend_attributes)=\{{(?:{_PLAIN}|\{{{_PLAIN}*\}})*\}}(?=,|$)")
_ALIAS = re.compile(r"\{(\d*)\}: \((\d+), \{\}")  # "{1}: (2, {}, may-alias)"; "{}: (0, ...)" for the only result
_BORDER = re.compile(r"entry_computation_layout=\{\((.*?)\)->(.*?)\}(?=, \w+=|$)")
_CALLED = re.compile(r"(?:calls|to_apply)=%?([\w.\-]+)")
_BODY = re.compile(r"\bbody=%?([\w.\-]+)")
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_OPERANDS = re.compile(r"[a-z][\w\-]*\(((?:%[\w.\-]+(?:, )?)*)\)")
_OPCODE = re.compile(r"(\(.*?\)(?=\s)|\S+) ([a-z][\w\-]*)\(")


def libtpu_flags(folder: Path) -> str:
    """Returns what `LIBTPU_INIT_ARGS` must hold for schedules, and allocations, to be written to a folder."""
    return (
        f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true --xla_jf_dump_hlo_text=true "
        "--xla_jf_dump_llo_pass_label_regex=.*(packed-bundles-post-ra|original) "
        "--xla_mosaic_enable_llo_source_annotations=true"
    )


@dataclasses.dataclass(frozen=True)
class HloInstruction:
    """One instruction of the optimised program.

    Attributes:
      opcode: "mosaic" for a Pallas kernel.
      text: what it does, without any names.
      source: where it was traced, such as "model.py:12 (loss)"; empty where the compiler does not know.
      operator: that it is a part of, as `operators.operator_in` finds it; empty for none.
      type: of its result, such as "s32[8]{0:T(128)}"; in brackets for several.
      operands: the names of what it takes.
      body: the name of the computation that it repeats, if it is a loop.
    """

    opcode: str
    text: str
    source: str
    operator: str
    type: str = ""
    operands: tuple[str, ...] = ()
    body: str = ""


class Dumps:
    """The schedules in a folder. Instructions that are equal share one, which bears the name of the first.

    Attributes:
      instructions: of the optimised program, by name.
      computations: the names of the instructions of each, in the order in which they are scheduled; "" for the entry.
      aliases: the parameters whose memory results are put into, by the position of the result; None for the only one.
      border: the types of the program's parameters, and of its results: in brackets for several.
    """

    def __init__(self, folder: Path) -> None:
        """Reads the program, and which schedules there are; each schedule when it is asked for."""
        self._files = {
            found[1]: path
            for path in sorted(folder.glob("*-packed-bundles-post-ra.txt"))
            if "schedule-analysis" not in path.name and (found := _FILE.fullmatch(path.name))
        }
        self._originals = {
            found[1]: path
            for path in sorted(folder.glob("*-original.txt"))
            if (found := _ORIGINAL.fullmatch(path.name)) is not None
        }
        self._top_level = self._files.get(TOP_LEVEL)
        self._hlo = next(iter(sorted(folder.glob(f"*-{TOP_LEVEL}-hlo.txt"), reverse=True)), None)
        text = _BROKEN_LINE.sub("", self._hlo.read_text(errors="replace")) if self._hlo is not None else ""
        bodies = dict(_COMPUTATION.findall(text))
        locations = _locations(text)
        self.instructions = {
            name: _hlo_instruction(rest, bodies, locations)
            for body in bodies.values()
            for name, rest in _INSTRUCTION.findall(body)
        }
        self.computations = {name: [found for found, _ in _INSTRUCTION.findall(body)] for name, body in bodies.items()}
        entry = _ENTRY.search(text)
        self.computations[""] = [] if entry is None else self.computations[entry[1]]
        header = text.partition("\n")[0]
        border = _BORDER.search(re.sub(r"/\*.*?\*/", "", header))
        self.border = ("", "") if border is None else (border[1], border[2])
        self.aliases = {int(result) if result else None: int(parameter) for result, parameter in _ALIAS.findall(header)}
        self.bundles = functools.cache(self._bundles)
        self._shared = {
            self.instructions[name].text: name for name in reversed(self._files) if name in self.instructions
        }

    def files(self) -> list[Path]:
        """Lists the files that a replay may read."""
        return [path for path in (self._hlo, *self._files.values()) if path is not None]

    def top_level(self) -> tuple[Bundle, ...]:
        """Reads the program that calls all others; empty where none was written."""
        return () if self._top_level is None else read_bundles(self._top_level.read_text(errors="replace"))

    def name_of(self, instruction: str) -> str | None:
        """Returns the name under which an instruction's code was written; None for none."""
        if instruction in self._files:
            return instruction
        known = self.instructions.get(instruction)
        return self._shared.get(known.text) if known is not None else None

    def operand_types(self, name: str) -> dict[int, str]:
        """Returns the types of what an instruction takes, by position, such as "s32[8]{0:T(128)}"."""
        instruction = self.instructions.get(name)
        known = enumerate(map(self.instructions.get, instruction.operands if instruction is not None else ()))
        return {position: operand.type for position, operand in known if operand is not None}

    def constants(self, name: str) -> dict[int, np.ndarray]:
        """Returns what operands of a Pallas kernel hold, by position, where the program itself says it."""
        instruction = self.instructions.get(name)
        is_kernel = instruction is not None and instruction.opcode == KERNEL
        return constant_operands(self.instructions, name) if is_kernel else {}

    def text(self, name: str) -> str:
        """Reads the dump of the code of that name."""
        return self._files[name].read_text(errors="replace")

    def allocations(self, name: str) -> str:
        """Reads what the code of that name allocates, where that was asked for."""
        return self._originals[name].read_text(errors="replace")

    def _bundles(self, name: str) -> tuple[Bundle, ...]:
        """Reads the code of that name."""
        return read_bundles(self.text(name))


def place_of(bundle: Bundle) -> str:
    """Returns a bundle's number, and its line where that is known."""
    line = users_file_line(bundle.lines)
    return f"{bundle.number:#x} ({line})" if line else f"{bundle.number:#x}"


def _hlo_instruction(rest: str, bodies: dict[str, str], locations: dict[int, str]) -> HloInstruction:
    opcode = _OPCODE.match(rest)
    frame = re.search(r"stack_frame_id=(\d+)", rest)
    kind = opcode[2] if opcode else ""
    if kind == "custom-call" and '"tpu_custom_call"' in rest:
        kind = KERNEL
    source = locations.get(int(frame[1]), "") if frame else ""
    called_with = _OPERANDS.search(re.sub(r"/\*.*?\*/", "", rest))
    operands = tuple(re.findall(r"%([\w.\-]+)", called_with[1])) if called_with else ()
    text, operator = _without_names(rest, bodies), _operator(rest, bodies)
    of_result = opcode[1] if opcode else rest.partition(" ")[0]
    body = _BODY.search(rest)
    return HloInstruction(kind, text, source, operator, of_result, operands, body[1] if body is not None else "")


def _operator(rest: str, bodies: dict[str, str]) -> str:
    """Returns the operator in an instruction's own metadata; if there is none, the only operator in what it calls."""
    own = _OP_NAME.search(rest)
    if own is not None:
        return operator_in(own[1])
    inner = {name for called in _CALLED.findall(rest) for name in _OP_NAME.findall(bodies.get(called, ""))}
    found = {operator_in(name) for name in inner}
    return found.pop() if len(found) == 1 else ""


def _without_names(text: str, bodies: dict[str, str]) -> str:
    """Returns what an instruction does, whatever it, its operands and the computations in it are called."""
    called = _CALLED.findall(text)
    text = re.sub(r"(?:calls|to_apply)=%?[\w.\-]+", "", _SAID_ELSEWHERE.sub("", text))
    inner = [_without_names(line, bodies) for name in called for line in bodies.get(name, "").splitlines()]
    return "\n".join([re.sub(r"%[\w.\-]+", "%", text), *inner])


def _locations(hlo: str) -> dict[int, str]:
    """Returns the user's line in each stack of frames of a program, such as "model.py:12 (loss)"."""

    def entries(table: str, pattern: str) -> dict[int, tuple[str, ...]]:
        part = re.search(rf"^{table}\n((?:\d+ .*\n)*)", hlo, re.MULTILINE)
        lines = re.findall(rf"^(\d+) {pattern}", part[1] if part else "", re.MULTILINE)
        return {int(number): tuple(fields) for number, *fields in lines}

    files = entries("FileNames", r'"(.*)"')
    functions = entries("FunctionNames", r'"(.*)"')
    places = entries("FileLocations", r"\{file_name_id=(\d+) function_name_id=(\d+) line=(\d+)")
    frames = entries("StackFrames", r"\{file_location_id=(\d+) parent_frame_id=(\d+)")

    def frames_from(number: int) -> Iterator[tuple[str, int, str]]:
        while number in frames:
            place, parent = map(int, frames[number])
            file, function, line = map(int, places.get(place, (0, 0, 0)))
            (path,), (name,) = files.get(file, ("",)), functions.get(function, ("",))
            if path:
                yield path, line, name
            number = parent - 1  # 1 stands for none

    return {number: users_line(list(frames_from(number))) for number in frames}
