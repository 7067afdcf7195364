"""Registers of a core, and what reads operands from them."""

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from lowering.tpu_core.bundles import Instruction, value_of
from lowering.tpu_core.faults import MachineFaultError, UnknownFormError
from lowering.tpu_core.operands import Register, Symbol, Term, bits_of, labelled, terms_of
from lowering.tpu_core.scalar_memory import MASK
from lowering.tpu_core.vectors import SUBLANES

# Scalars are integers of 32 bits with a sign, predicates are booleans. Vectors are arrays (8, 128) of uint32, masks of
# booleans, or of uint32 where they choose bits. Arrays are never changed: what computes a vector makes a new one.
Get = Callable[[], Any]

_UNNAMED = {"nothing"}

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
        return self._read(*named)

    def _read(self, name: str, register: str) -> Get:
        held, all_names, checks = self.held, self.names, self._checks

        def get() -> Any:
            if checks and name not in (names := all_names.get(register, _UNNAMED)):
                held_instead = " or ".join(sorted(names))
                self.clobbered[f"bundle {self.bundle:#x}: {register} holds {held_instead} where {name} is read"] = None
            try:
                return held[register]
            except KeyError:
                raise MachineFaultError(f"register {register} is read before anything is written to it") from None

        return get

    def whatever_is_in(self, register: str) -> Get:
        """Returns what reads a register by whatever name, as where a program hands values to one of its parts."""
        held = self.held

        def get() -> Any:
            if register not in held:
                raise MachineFaultError(f"register {register} holds no operand of what is called")
            return held[register]

        return get

    def named(self, name: str) -> int | None:
        """Returns the scalar that the compiler calls so; None where no register is known to hold it."""
        return next((self.held[register] for register, names in self.names.items() if name in names), None)

    def scalar(self, text: str, space: str = "") -> Get:
        """Returns what reads a scalar: a register, a number, an address, or a sum or difference."""
        terms = [(sign, self._term(term, text)) for sign, term in terms_of(text, space)]
        if len(terms) == 1:
            return terms[0][1]
        return lambda: sum(sign * term() for sign, term in terms)

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

    def vectors(self, instruction: Instruction, count: int) -> list[Get]:
        """Returns what reads an instruction's operands, which must be so many without labels."""
        return [self.vector(operand) for operand in labelled(instruction, *[""] * count)]

    def mask(self, text: str) -> Get:
        """Returns what reads a vector mask."""
        return self.register(text, "vm")

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

    def _term(self, term: Term, text: str) -> Get:
        if isinstance(term, Register):
            if not term.register.startswith("p" if term.negated else ("s", "p")):
                raise UnknownFormError(f"operand {text!r}, where a scalar is known")
            get = self._read(term.name, term.register)
            return (lambda: not get()) if term.negated else get
        number = self._addresses(*term) if isinstance(term, Symbol) else term
        return lambda: number


def _nibbles(pattern: str | None) -> tuple[int, ...]:
    return () if pattern is None else tuple(int(pattern, 16) >> 4 * at & 15 for at in range(SUBLANES))
