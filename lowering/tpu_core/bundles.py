"""Reads a scheduled TPU program, as libtpu writes it: one line for each VLIW bundle, which is one cycle.

A line looks like this, comments left out. `%s21_s24` is the value s21 in the register s24:

     0x15d   : > { %s1669_s21 = smov %s1655_s7  ;;  %20 = sbr.rel (!%p1548_p7) target bundleno = 16 (0x10) }
"""

import dataclasses
import re
import sys
from typing import NamedTuple


class Predicate(NamedTuple):
    """An instruction with this takes effect if the value is true, or if it is false where `negated`."""

    value: str
    negated: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Instruction:
    """One slot of a bundle.

    Attributes:
      opcode: such as "sadd.s32".
      value: the name of what it computes, such as "s21"; empty for none.
      register: where that is kept, such as "s24"; empty for none.
      predicate: of its effect, if it has one.
      otherwise: what `value` is where the predicate does not hold.
      operands: their text, in order; labels such as "size_in_granules=" in front.
      callee: what a call calls; "<...>" for a part of the runtime.
      target: the bundle that a branch goes to.
    """

    opcode: str
    value: str = ""
    register: str = ""
    predicate: Predicate | None = None
    otherwise: str = ""
    operands: tuple[str, ...] = ()
    callee: str = ""
    target: int | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Bundle:
    """Instructions that are issued in one cycle.

    Attributes:
      number: counted from the first.
      instructions: one for each slot that is used.
      lines: of the source, such as "/home/me/model.py:12", once for each instruction of which it is known.
    """

    number: int
    instructions: tuple[Instruction, ...]
    lines: tuple[str, ...] = ()


_COMMENT = re.compile(r"/\*.*?\*/", re.DOTALL)
_LABEL = re.compile(r"/\*(\w+)=\*/")
_CALL = re.compile(r"(inlined_call)( [^/;}]*)/\*\s*(?:%([\w.\-]+) =|(<[\w\-]+>))")
_CORE = re.compile(r"= sld \[[^;}/]*?\]\]([^;}/]*)/\*[^*]*\bcore id\b[^*]*\*/")
# What of a quotient and a remainder is to be taken, at the end of a comment that may begin with the place.
_DIVISION = re.compile(r"(/\*[^*]*?)(?:::)? (kDiv|kRem|kDivAndRem) \*/")
# Of what Pallas' pipeline sends from a window, the compiler says where in the array that is.
_SENT = re.compile(r"(= dma\.vmem_to_hbm [^/;}]*?) */\* *\n?base_bounds:")
_PLACE = re.compile(r'/\* loc\("([^"]*)":(\d+)[^*]*\*/')  # of kernels alone, where they were written
_PLACED = re.compile(r"@@(.*?)@@")
_CHECK = re.compile(r"(shalt\.err [^/;}]*)/\*(.*?)\*/", re.DOTALL)
_NO_WORDS = re.compile(r"[^\w .:()'-]+|\s+")
_BUNDLE = re.compile(r"^ *(0x[0-9a-f]+|0) +(?:[A-Z]{2})? *: *(?:> *)*\{(.*?)\} *$", re.MULTILINE | re.DOTALL)
_INSTRUCTION = re.compile(r"(?:%(\w+) = )?([\w.\-]+(?:\[\d+\][\w.]+)?)(?:<(\S+?)>(?=\s|$))?\s*(.*)", re.DOTALL)
_PREDICATE = re.compile(r"\((!?)%(\w+)(?:,\s*([^)]+))?\),?")
_VALUE = re.compile(r"([a-z]*\d+)(?:_([a-z]+\d+))?$")
_TARGET = re.compile(r"target bundleno = (\d+)")
_MOST_WORDS = 200  # characters
_SCALAR = ("vsync", "vwait", "vdelay")  # issued with vectors, but a part of the scalar program
_NO_OPERAND = re.compile(r"\[(?:thread|resolvable):[^\]]*\]\s*")


def read_bundles(text: str, *, vectors: bool = False, is_kernel: bool = False) -> tuple[Bundle, ...]:
    """Parses the bundles of a `packed-bundles-post-ra` dump, in order.

    Most instructions work on vectors. Without `vectors`, only their kind is kept, and whether they spill. Of a Pallas
    kernel, transfers by which its pipeline sends a block of an output are marked: they have an operand `of_window`.
    """
    text = _LABEL.sub(r"\1=", text)
    if vectors:
        text = _CHECK.sub(lambda check: f"{check[1]}reason={_words(check[2])} ", text)
    if is_kernel:
        text = _SENT.sub(r"\1, of_window=1 /*", text)
    text = _CALL.sub(lambda call: f"{call[1]}<{call[3] or call[4]}> {call[2]}/*", text)
    text = _CORE.sub(r"= core_id \1", text)
    text = _DIVISION.sub(r", \2 \1*/", text)
    text = _COMMENT.sub("", _PLACE.sub(r"@@\1:\2@@", text))
    return tuple(_bundle(number, body, vectors) for number, body in _BUNDLE.findall(text))


def _words(comment: str) -> str:
    """Returns the first words of a comment, without what operands are made of."""
    words = " ".join(_NO_WORDS.sub(" ", comment).split())
    return words if len(words) <= _MOST_WORDS else f"{words[:_MOST_WORDS].rpartition(' ')[0]} ..."


def value_of(operand: str) -> tuple[str, str] | None:
    """Parses the value and the register of an operand such as "%s21_s24"; None for constants and addresses."""
    found = _VALUE.match(operand[1:]) if operand.startswith("%") else None
    return None if found is None else (found[1], found[2] or "")


def _bundle(number: str, body: str, vectors: bool) -> Bundle:
    lines = tuple(map(sys.intern, _PLACED.findall(body)))
    parts = (_PLACED.sub("", body) if lines else body).split(";;")
    return Bundle(int(number, 16), tuple(_instruction(part, vectors) for part in parts if part.strip()), lines)


def _instruction(text: str, vectors: bool) -> Instruction:
    found = _INSTRUCTION.match(text.strip())
    assert found is not None
    name, opcode, callee, rest = found.groups()
    is_vector = opcode.startswith("v") and not opcode.startswith(_SCALAR) and not (name or "").startswith(("s", "p"))
    if is_vector and not vectors:
        return Instruction(opcode, operands=(rest,))
    predicate, otherwise = None, ""
    condition = _PREDICATE.search(rest)
    if condition is not None:
        predicate, otherwise = Predicate(condition[2], bool(condition[1])), (condition[3] or "").strip()
        rest = rest[: condition.start()] + rest[condition.end() :]
    target = _TARGET.search(rest)
    return Instruction(
        opcode,
        *(value_of(f"%{name}") or ("", "")),
        predicate=predicate,
        otherwise=otherwise,
        operands=_operands(_NO_OPERAND.sub("", rest)),
        callee=callee or "",
        target=int(target[1]) if target else None,
    )


def _operands(text: str) -> tuple[str, ...]:
    """Splits operands at commas that are not within brackets, and at the bracket that ends an address."""
    parts = re.sub(r"(\]\])\s*(?=[^\s,\]])", r"\1,", text)
    return tuple(part.strip() for part in re.split(r",(?![^\[]*\])", parts) if part.strip())
