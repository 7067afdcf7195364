"""Operands of instructions. Every character of one is understood, or refused."""

import re
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from lowering.tpu_core.bundles import Instruction, value_of
from lowering.tpu_core.faults import UnknownFormError
from lowering.tpu_core.scalar_memory import MASK, wrapped

LABEL = re.compile(r"(\w+)=(.*)", re.DOTALL)
_INTEGER = re.compile(r"\$?(-?(?:0x[0-9a-f]+|\d+))")
_FLOAT = re.compile(r"-?(?:\d+\.\d*(?:e[-+]?\d+)?|\d+e[-+]?\d+|inf|nan)")
_HALVES = re.compile(r"(\S+)\|(\S+)")
_SIGN = re.compile(r"\s([+-])\s")
_SYMBOL = re.compile(r"#(\w+)")
# "%s9_s12 [#allocation5]": the allocation that a pointer is into is a remark.
_REMARK = re.compile(r"(?<=\S)\s+\[#\w+\]$")


class Register(NamedTuple):
    """A register, the name of the value in it, and whether the opposite of a predicate is meant."""

    name: str
    register: str
    negated: bool = False


class Symbol(NamedTuple):
    """An allocation, and the memory in which it is known to be; "" if that is not said."""

    name: str
    space: str


# A part of a sum; numbers have 32 bits and a sign.
Term = Register | Symbol | int


def terms_of(text: str, space: str = "") -> list[tuple[int, Term]]:
    """Reads a scalar operand: a register, a number, an address, or a sum or difference, each part with its sign.

    Raises:
      UnknownFormError: if it is anything else.
    """
    inner = _REMARK.sub("", text.strip())
    for known in ("smem", "vmem"):
        if inner.startswith(f"[{known}:"):
            inner, space = inner[len(known) + 2 : -1], known
    inner = inner.strip()
    first, *others = _SIGN.split(inner[1:-1] if inner.startswith("[") else inner)
    signs = [1, *(1 if sign == "+" else -1 for sign in others[::2])]
    return [(sign, _term(term, space)) for sign, term in zip(signs, (first, *others[1::2]), strict=True)]


def _term(text: str, space: str) -> Term:
    text = text.strip().strip("[]").strip()
    if text.startswith(("%", "!%")):
        named = value_of(text.lstrip("!"))
        if named is None:
            raise UnknownFormError(f"operand {text!r}, where a register is known")
        return Register(*named, text.startswith("!"))
    symbol = _SYMBOL.fullmatch(text)
    return wrapped(bits_of(text)) if symbol is None else Symbol(symbol[1], space)


def bits_of(text: str) -> int:
    """Returns the 32 bits of a number: an integer, a float32, or two halves that are cut from float32."""
    text = text.strip()
    integer = _INTEGER.fullmatch(text)
    if integer is not None:
        return int(integer[1], 0) & MASK
    if _FLOAT.fullmatch(text):
        return int(np.float32(text).view(np.uint32))
    halves = _HALVES.fullmatch(text)
    if halves is None:
        raise UnknownFormError(f"number {text!r}")
    return bits_of(halves[1]) >> 16 << 16 | bits_of(halves[2]) >> 16


def labelled(instruction: Instruction, *labels: str) -> list[str]:
    """Returns an instruction's operands, which must have these labels in this order; "" stands for none.

    Raises:
      UnknownFormError: if it has others.
    """
    found = [LABEL.fullmatch(operand) for operand in instruction.operands]
    names = tuple("" if one is None else one[1] for one in found)
    if names != labels:
        raise UnknownFormError(f"{instruction.opcode} with operands {', '.join(instruction.operands)!r}")
    pairs = zip(found, instruction.operands, strict=True)
    return [operand if one is None else one[2].strip() for one, operand in pairs]


def fields_of(instruction: Instruction, known: Mapping[str, bool]) -> dict[str, str]:
    """Returns labelled operands by label. `known` lists every label that may occur, and says whether it must."""
    found = {}
    for operand in instruction.operands:
        label = LABEL.fullmatch(operand)
        if label is None or label[1] not in known:
            raise UnknownFormError(f"{instruction.opcode} with operand {operand!r}")
        found[label[1]] = label[2].strip()
    missing = [name for name, is_required in known.items() if is_required and name not in found]
    if missing:
        raise UnknownFormError(f"{instruction.opcode} without {missing[0]}")
    return found
