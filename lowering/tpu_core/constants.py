"""Operands that are constants of the program, such as what splash attention knows of its mask."""

import math
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

_CONSTANT = re.compile(r"(?:[su]\d+|pred)\[([\d,]*)\]\S* constant\((.*?)\)(?:,|$)", re.DOTALL)
_NUMBER = re.compile(r"-?\d+|true|false")
_TRUTH = {"true": 1, "false": 0}
_MOST_ELEMENTS = 1 << 20  # scalar memory holds no more
_COPIES = ("copy", "copy-start", "copy-done")


def constant_operands(instructions: Mapping[str, Any], name: str) -> dict[int, np.ndarray]:
    """Returns the integers in what an instruction takes, by position, where the program itself says what they are."""
    instruction = instructions.get(name)
    taken = enumerate(instruction.operands if instruction is not None else ())
    return {position: known for position, operand in taken if (known := _constant(instructions, operand)) is not None}


def _constant(instructions: Mapping[str, Any], name: str) -> np.ndarray | None:
    instruction = instructions.get(name)
    if instruction is None:
        return None
    if instruction.opcode in _COPIES:
        return _constant(instructions, instruction.operands[0])
    if instruction.opcode == "broadcast":
        value = _constant(instructions, instruction.operands[0])
        return value if value is not None and value.ndim == 0 else None
    found = _CONSTANT.match(re.sub(r"/\*.*?\*/", "", instruction.text))
    if found is None or "..." in found[2]:  # left out, as it is large
        return None
    shape = [int(size) for size in found[1].split(",") if size]
    if math.prod(shape) > _MOST_ELEMENTS:
        return None
    numbers = [int(_TRUTH.get(number, number)) for number in _NUMBER.findall(found[2])]
    return np.asarray(numbers).reshape(shape)
