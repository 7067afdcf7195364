"""The machine code of Mosaic GPU kernels: which accesses they make, how many are on their way at once, what they spill.

A line of nvdisasm is what the scheduler is told, the address and the instruction, perhaps with a condition:

    -:-:2:Y:04    /*01a0*/    @P0 LDG.E.128 R4, desc[UR6][R8.64+0x10] ;
"""

import dataclasses
import re
from collections import Counter

import pytest

from lowering.compiling import compilers

_LINE = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(@!?U?P\w+ )?([A-Z]\S*)(.*)")
_TARGET = re.compile(r"`\((\S+)\)")
_REGISTER = re.compile(r"\bR(\d+)")
_WIDTH_BYTES = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16}


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One instruction.

    Attributes:
      opcode: with its modifiers, as in "LDG.E.128".
      operands: the rest of the line.
      always: whether it runs without a condition.
    """

    opcode: str
    operands: str
    always: bool

    def is_a(self, name):
        return self.opcode.split(".")[0] == name

    @property
    def access_bytes(self):
        return next((_WIDTH_BYTES[part] for part in self.opcode.split(".") if part in _WIDTH_BYTES), 4)

    @property
    def registers(self):
        """The registers that the operands name; of a run of registers, that is the first."""
        return [int(number) for number in _REGISTER.findall(self.operands)]

    @property
    def loaded(self):
        """The registers that a load fills."""
        return range(self.registers[0], self.registers[0] + -(-self.access_bytes // 4))


@dataclasses.dataclass(frozen=True)
class Code:
    """The code of a kernel or of one of its loops, in the order of addresses; `kernel` is its name."""

    kernel: str
    instructions: tuple[Instruction, ...]
    labels: dict[str, int]

    def opcodes(self, name):
        """How often each opcode of this name occurs, with its modifiers: `opcodes("HGMMA")` tells the shapes."""
        return Counter(each.opcode for each in self.instructions if each.is_a(name))

    def count(self, name):
        """How many instructions have this name."""
        return self.opcodes(name).total()

    def access_bytes(self, name):
        """The bytes of one access of a thread by "LDG", "STG", "LDS" or the like, and how many accesses have them.

        "LD" and "ST" are accesses to device memory as well, through addresses that might be of shared memory.
        """
        return Counter(each.access_bytes for each in self.instructions if each.is_a(name))

    def bytes_in_flight(self):
        """The most that a thread loads from device memory before it uses any of it."""
        most, bytes_, filled = 0, 0, set()
        for each in self.instructions:
            if not filled.isdisjoint(each.registers) or (each.always and each.opcode in ("EXIT", "BRA")):
                bytes_, filled = 0, set()
            if each.is_a("LDG") or each.is_a("LD"):
                bytes_ += each.access_bytes
                filled.update(each.loaded)
                most = max(most, bytes_)
        return most

    def loops(self):
        """The code from each label to a branch back to it."""
        found = []
        for index, each in enumerate(self.instructions):
            target = _TARGET.search(each.operands)
            start = self.labels.get(target.group(1), index) if each.is_a("BRA") and target else index
            if start < index:
                found.append(Code(self.kernel, self.instructions[start : index + 1], {}))
        return found


def _code_of(kernel, sass):
    instructions, labels = [], {}
    for line in sass.splitlines():
        if label := re.fullmatch(r"(\.\S+):", line):
            labels[label.group(1)] = len(instructions)
        elif found := _LINE.search(line):
            condition, opcode, operands = found.groups()
            instructions.append(Instruction(opcode, operands, always=condition is None))
    return Code(kernel, tuple(instructions), labels)


def machine_code(report):
    """The code of each Mosaic GPU kernel in a report of `lowering.compile`, in the order of `report.gpu_resources`.

    Registers and spilled bytes stand in `report.gpu_resources`. A test that asks for code is skipped if the compiler's
    environment is without nvdisasm, as those were that an earlier version of this library made.
    """
    if not all(resources.sass for resources in report.gpu_resources):
        folder, command = compilers.environment("cuda"), compilers.command("cuda")
        pytest.skip(f"the CUDA compiler is without nvdisasm: remove {folder} and run {command}")
    return [_code_of(resources.kernel, resources.sass) for resources in report.gpu_resources]
