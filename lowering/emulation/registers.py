"""Registers of a core, and operands read from them. Every character of an operand is understood, or refused."""

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from lowering.emulation.faults import MachineFaultError, UnknownFormError
from lowering.schedule.bundles import Instruction, value_of
from lowering.schedule.memory import MASK, wrapped

# Scalars are integers of 32 bits with a sign, predicates are booleans. Vectors are arrays (8, 128) of uint32, masks of
# booleans, or of uint32 where they choose bits. Arrays are never changed: what computes a vector makes a new one.
Get = Callable[[], Any]
SUBLANES, LANES = 8, 128

_LABEL = re.compile(r"(\w+)=(.*)", re.DOTALL)
_INTEGER = re.compile(r"\$?(-?(?:0x[0-9a-f]+|\d+))")
_FLOAT = re.compile(r"-?(?:\d+\.\d*(?:e[-+]?\d+)?|\d+e[-+]?\d+|inf|nan)")
_HALVES = re.compile(r"(\S+)\|(\S+)")
_SIGN = re.compile(r"\s([+-])\s")
_SYMBOL = re.compile(r"#(\w+)")
# "%s9_s12 [#allocation5]": the allocation that a pointer is into is a remark.
_REMARK = re.compile(r"(?<=\S)\s+\[#\w+\]$")
_ADDRESS = re.compile(
    r"\[vmem:\[([^\]]*)\](?:\s*ss:\$(-?\d+))?(?:\s*sps:\$(\d+))?\s*(?:sm:(\$0x[0-9a-f]+|%\w+))?"
    r"(?:\s*pattern:\$(0x[0-9a-f]{1,8}))?\s*\]\s*(.*)",
    re.DOTALL,
)


class Address(NamedTuple):
    """Rows of vector memory that a load or store reaches, one for each sublane.

    Attributes:
      first: gets the row of the first sublane.
      stride: rows from one sublane to the next; from one group of them to the next, with `group`.
      group: how many sublanes follow one another in memory; 0 for none.
      sublanes: gets a mask of the sublanes that take part, a bit for each.
      pattern: the row of each sublane, if that is another than its number.
      rest: what follows the address.
    """

    first: Get
    stride: int
    group: int
    sublanes: Get
    pattern: tuple[int, ...]
    rest: str


class Registers:
    """Values by register, and the names under which the compiler keeps them there.

    Attributes:
      held: the value in each register that something was written to.
      names: of the value in each register; several where an instruction leaves it as it is.
      clobbered: reads of a register that held another value than the compiler meant, as text.
      bundle: the number of the bundle that reads.
    """

    def __init__(
        self, addresses: Callable[[str, str], int], *, checks: bool = False, caller: "Registers | None" = None
    ) -> None:
        """Starts empty, or with what the registers of a caller hold: they are the same ones.

        Args:
          addresses: returns where an allocation lies, by its name and the memory that it is known to be in, if any.
          checks: whether to compare the name of each value that is read with what its register holds.
          caller: whose registers these are as well.
        """
        self._addresses = addresses
        self._checks = checks
        self.held: dict[str, Any] = {} if caller is None else caller.held
        self.names: dict[str, set[str]] = {} if caller is None else caller.names
        self.clobbered: dict[str, None] = {}
        self.bundle = 0

    def register(self, text: str, kind: str = "") -> Get:
        """Returns what reads a register, such as "%s21_s24"; `kind` is how its name must begin."""
        named = value_of(text.strip())
        if named is None or not named[1].startswith(kind):
            raise UnknownFormError(f"operand {text!r}, where {kind or 'a'} register is known")
        held, (name, register) = self.held, named

        def get() -> Any:
            try:
                return held[register]
            except KeyError:
                raise MachineFaultError(f"register {register} is read before anything is written to it") from None

        def checked() -> Any:
            names = self.names.get(register, {"nothing"})
            if name not in names:
                held_instead = " or ".join(sorted(names))
                self.clobbered[f"bundle {self.bundle:#x}: {register} holds {held_instead} where {name} is read"] = None
            return get()

        return checked if self._checks else get

    def whatever_is_in(self, register: str) -> Get:
        """Returns what reads a register by whatever name, as where a program hands values to one of its parts."""
        held = self.held

        def get() -> Any:
            if register not in held:
                raise MachineFaultError(f"register {register} holds no operand of what is called")
            return held[register]

        return get

    def scalar(self, text: str, space: str = "") -> Get:
        """Returns what reads a scalar: a register, a number, an address, or a sum or difference."""
        inner = _REMARK.sub("", text.strip())
        for known in ("smem", "vmem"):
            if inner.startswith(f"[{known}:"):
                inner, space = inner[len(known) + 2 : -1], known
        inner = inner.strip()
        first, *others = _SIGN.split(inner[1:-1] if inner.startswith("[") else inner)
        terms = [(self._term(first, space), 1)]
        for sign, term in zip(others[::2], others[1::2], strict=True):
            terms.append((self._term(term, space), 1 if sign == "+" else -1))
        if len(terms) == 1:
            return terms[0][0]
        return lambda: sum(sign * term() for term, sign in terms)

    def vector(self, text: str) -> Get:
        """Returns what reads a vector, or one number for all its elements: uint32 bits."""
        text = text.strip()
        if text.startswith("%s"):
            scalar = self.register(text, "s")
            return lambda: np.uint32(scalar() & MASK)
        if text.startswith("%"):
            return self.register(text, "v")
        bits = np.uint32(bits_of(text))
        return lambda: bits

    def mask(self, text: str) -> Get:
        """Returns what reads a vector mask."""
        return self.register(text, "vm")

    def predicate(self, text: str) -> Get:
        """Returns what reads a predicate, or its opposite."""
        text = text.strip()
        if text.startswith("!"):
            opposite = self.register(text[1:], "p")
            return lambda: not opposite()
        return self.register(text, "p")

    def address(self, text: str) -> Address:
        """Reads the address of a load or store."""
        found = _ADDRESS.fullmatch(text.strip())
        if found is None:
            raise UnknownFormError(f"address {text!r}")
        inner, stride, group, sublanes, pattern, rest = found.groups()
        mask: Get
        if sublanes is None or sublanes.startswith("$"):
            number = 0xFF if sublanes is None else int(sublanes[1:], 16)
            mask = lambda: number  # noqa: E731
        else:
            mask = self.register(sublanes, "s")
        return Address(
            self.scalar(inner, "vmem"), int(stride or 1), int(group or 0), mask, _nibbles(pattern), rest.strip()
        )

    def _term(self, term: str, space: str) -> Get:
        term = term.strip().strip("[]").strip()
        if term.startswith(("%p", "!%p")):
            return self.predicate(term)
        if term.startswith("%"):
            return self.register(term, "s")
        symbol = _SYMBOL.fullmatch(term)
        number = self._addresses(symbol[1], space) if symbol is not None else wrapped(bits_of(term))
        return lambda: number


def _nibbles(pattern: str | None) -> tuple[int, ...]:
    return () if pattern is None else tuple(int(pattern, 16) >> 4 * at & 15 for at in range(SUBLANES))


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
    found = [_LABEL.fullmatch(operand) for operand in instruction.operands]
    names = tuple("" if one is None else one[1] for one in found)
    if names != labels:
        raise UnknownFormError(f"{instruction.opcode} with operands {', '.join(instruction.operands)!r}")
    pairs = zip(found, instruction.operands, strict=True)
    return [operand if one is None else one[2].strip() for one, operand in pairs]


def fields_of(instruction: Instruction, known: Mapping[str, bool]) -> dict[str, str]:
    """Returns labelled operands by label. `known` lists every label that may occur, and says whether it must."""
    found = {}
    for operand in instruction.operands:
        label = _LABEL.fullmatch(operand)
        if label is None or label[1] not in known:
            raise UnknownFormError(f"{instruction.opcode} with operand {operand!r}")
        found[label[1]] = label[2].strip()
    missing = [name for name, is_required in known.items() if is_required and name not in found]
    if missing:
        raise UnknownFormError(f"{instruction.opcode} without {missing[0]}")
    return found
