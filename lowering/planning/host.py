"""The copies between a chip's memory and its host's, in an optimised program."""

import re
from typing import NamedTuple

from lowering.planning.hlo import Instruction, Program, arrays_of

# An array with its layout; memory space 5 is the host's.
_PLACED = re.compile(r"\b[a-z]\w*\[[\d,]*\](?:\{[^}]*\})?")
_HOST = "S(5)"


class HostCopies(NamedTuple):
    """Bytes that one chip and its host send each other in a step.

    Attributes:
      stored: in host memory.
      read: from host memory.
    """

    stored: int
    read: int


def host_copies(program: Program) -> HostCopies:
    """Adds up what a program stores in host memory and reads from there, with the turns of loops."""
    stored = read = 0
    for name, _, count in program.runs():
        for line in program.computations[name].values():
            # Asynchronous copies of arrays, or of slices, which name operands and results in their type.
            if not line.opcode.endswith("-start") or _HOST not in line.type_text:
                continue
            size = count * _moved(line)
            if _is_stored(line):
                stored += size
            else:
                read += size
    return HostCopies(stored, read)


def _moved(line: Instruction) -> int:
    """Returns the bytes of what moves: the largest array on the chip's side."""
    placed = _PLACED.findall(line.type_text)
    return max((arrays_of(text)[0].bytes for text in placed if _HOST not in text), default=0)


def _is_stored(line: Instruction) -> bool:
    """Tells whether the result lies with the host: first in a copy's type, after the operands in others."""
    results = line.type_text.partition("), ")[2] if line.type_text.startswith("((") else line.type_text
    first = _PLACED.search(results)
    return first is not None and _HOST in first[0]
