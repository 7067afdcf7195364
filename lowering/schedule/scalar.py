"""What the scalar unit computes, by opcode. Integers have 32 bits; floating-point arithmetic is not followed."""

import operator
from collections.abc import Callable
from typing import Any

from lowering.schedule.memory import FROM_DATA, HALF, MASK, wrapped


def _first(value: Any, *_: Any) -> Any:
    return value


def _unsigned(compare: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda a, b: compare(a & MASK, b & MASK)


_ARITHMETIC: dict[str, Callable[..., Any]] = {
    "sadd": lambda a, b: ((a + b + HALF) & MASK) - HALF,
    "ssub": lambda a, b: ((a - b + HALF) & MASK) - HALF,
    "smul": lambda a, b: ((a * b + HALF) & MASK) - HALF,
    "smulhi": lambda a, b: wrapped((a & MASK) * (b & MASK) >> 32),  # seen for .u32 only
    "sand": operator.and_,
    "sor": operator.or_,
    "sxor": operator.xor,
    "sshll": lambda a, b: wrapped(a << (b & 31)),
    "sshrl": lambda a, b: (a & MASK) >> (b & 31),
    "sshra": lambda a, b: a >> (b & 31),
    "smin": min,
    "smax": max,
    "sc": lambda a, b: (a & MASK) + (b & MASK) > MASK,  # the carry of a sum
    "scalar_lea": lambda base, offset=0: base + offset,
    "scalar_select": lambda condition, on_true, on_false: on_true if condition else on_false,
    "int_to_ptr": _first,
    "smov": _first,
    "pmov": _first,
    "reloc": _first,
    "core_id": lambda: 0,  # the first core's part of a program stands for that of the others
    "por": operator.or_,
    "pand": operator.and_,
    "pxor": operator.xor,
    "pnor": lambda a, b: (a | b) ^ True,
    "pnand": lambda a, b: (a & b) ^ True,
    "pneg": lambda a: a ^ True,
}
_COMPARISONS = {name: getattr(operator, name) for name in ("lt", "le", "gt", "ge", "eq", "ne")}
_ON_FLOATS = ("sadd", "ssub", "smul", "smin", "smax", "scmp", "scvt", "sfloor", "sceil")

# Nothing that is known of these takes effect on what the scalar program does next.
_WITHOUT_EFFECT = (
    *("compiler-scheduling-barrier", "inlined_call_operand", "set", "sfence", "shalt", "strace", "vsyncmov", "vsyncpa"),
    *("sdelay", "snop", "nop"),
)


def function_of(opcode: str) -> Callable[..., Any] | None:
    """What an opcode computes; None if it is not known."""
    name, *types = opcode.split(".")
    if name in _ON_FLOATS and "f32" in types:
        return lambda *_: FROM_DATA
    if name == "scmp":
        compare = _COMPARISONS.get(types[0])
        return _unsigned(compare) if compare is not None and "u32" in types else compare
    if name in ("smin", "smax") and "u32" in types:
        return _unsigned(_ARITHMETIC[name])
    return _ARITHMETIC.get(name)


def has_no_effect(opcode: str) -> bool:
    """Whether an opcode is known to change nothing that a replay follows: vectors, fences and traces."""
    name = opcode.partition(".")[0]
    return name in _WITHOUT_EFFECT or (name.startswith("v") and not name.startswith(("vsync", "vwait")))


def divided(opcode: str, dividend: Any, divisor: Any, wanted: str = "kDivAndRem") -> tuple[Any, ...]:
    """The quotient, rounded towards zero, the remainder, or both in this order; not known where an operand is not."""
    try:
        if opcode.endswith("u32"):
            quotient, remainder = divmod(dividend & MASK, divisor & MASK)
        else:
            quotient = abs(dividend) // abs(divisor) * (1 if (dividend < 0) == (divisor < 0) else -1)
            remainder = dividend - quotient * divisor
    except (TypeError, ZeroDivisionError):
        quotient = remainder = FROM_DATA
    return {"kDiv": (quotient,), "kRem": (remainder,)}.get(wanted, (quotient, remainder))
