"""Arithmetic of the scalar unit, by opcode. Values have 32 bits: integers with a sign, or the bits of a float32."""

import operator
from collections.abc import Callable
from typing import Any

import numpy as np

from lowering.tpu_core.scalar_memory import HALF, MASK, wrapped
from lowering.tpu_core.unknown import Unknown, selected


def _first(value: Any, *_: Any) -> Any:
    return value


def _unsigned(compare: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda a, b: compare(a & MASK, b & MASK)


def _shifted_in(value: int, places: int) -> Any:
    """Shifts in ones as a v7x does: libtpu has a v5e compute (1 << places) - 1 where a v7x shifts 0 by this."""
    return wrapped((1 << places) - 1) if value == 0 and 0 <= places < 32 else Unknown()


_ARITHMETIC: dict[str, Callable[..., Any]] = {
    "sadd": lambda a, b: ((a + b + HALF) & MASK) - HALF,
    "ssub": lambda a, b: ((a - b + HALF) & MASK) - HALF,
    "smul": lambda a, b: ((a * b + HALF) & MASK) - HALF,
    "smulhi": lambda a, b: wrapped((a & MASK) * (b & MASK) >> 32),  # seen for .u32 only
    "sand": operator.and_,
    "sor": operator.or_,
    "sxor": operator.xor,
    "sshll": lambda a, b: wrapped(a << (b & 31)),
    "sshllo": _shifted_in,
    "sshrl": lambda a, b: wrapped((a & MASK) >> (b & 31)),
    "sshra": lambda a, b: a >> (b & 31),
    "smin": min,
    "smax": max,
    "sclz": lambda a: 32 - int.bit_length(a & MASK),
    "sc": lambda a, b: (a & MASK) + (b & MASK) > MASK,  # the carry of a sum
    "scalar_lea": lambda base, offset=0: base + offset,
    "scalar_select": selected,
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
_LEAST_NORMAL = np.finfo(np.float32).tiny
_COMPARISONS = {name: getattr(operator, name) for name in ("lt", "le", "gt", "ge", "eq", "ne")}
_ON_FLOATS: dict[str, Callable[..., Any]] = {
    "sadd": np.add,
    "ssub": np.subtract,
    "smul": np.multiply,
    "smin": np.minimum,
    "smax": np.maximum,
    "sfloor": np.floor,
    "sceil": np.ceil,
}

# Nothing that is known of these takes effect on what the scalar program does next.
_WITHOUT_EFFECT = (
    *("compiler-scheduling-barrier", "inlined_call_operand", "set", "setrngseed", "sfence", "shalt", "strace"),
    *("vsyncmov", "vsyncpa"),
    *("sdelay", "snop", "nop"),
)


def float_bits(value: float) -> int:
    """Returns the bits of a number as a float32."""
    return int(np.float32(value).view(np.int32))


def _float(bits: Any) -> np.float32:
    if isinstance(bits, Unknown):
        raise TypeError("no number is known")
    return np.int32(bits).view(np.float32)


def _on_floats(function: Callable[..., Any] | None, *, is_comparison: bool) -> Callable[..., Any] | None:
    if function is None:
        return None

    def on_bits(*operands: Any) -> Any:
        numbers = [_float(bits) for bits in operands]
        with np.errstate(all="ignore"):
            result = function(*numbers)
        # What becomes of NaN and of the smallest numbers is not known.
        if any(np.isnan(number) or 0 < abs(number) < _LEAST_NORMAL for number in (*numbers, result)):
            return Unknown()
        return bool(result) if is_comparison else float_bits(result)

    return on_bits


def _to_float(integer: Any) -> Any:
    return float_bits(operator.index(integer))


def _to_integer(bits: Any) -> Any:
    number = float(_float(bits))
    return int(number) if number.is_integer() and abs(number) < HALF else Unknown()


def function_of(opcode: str) -> Callable[..., Any] | None:
    """Returns the function that an opcode computes; None if it is not known."""
    name, *types = opcode.split(".")
    if name == "scvt":
        return {("s32", "f32"): _to_float, ("f32", "s32"): _to_integer}.get((types[0], types[-1]))
    if "f32" in types:
        compare = _COMPARISONS.get(types[0]) if name == "scmp" else None
        return _on_floats(compare or _ON_FLOATS.get(name), is_comparison=compare is not None)
    if name == "scmp":
        compare = _COMPARISONS.get(types[0])
        return _unsigned(compare) if compare is not None and "u32" in types else compare
    if name in ("smin", "smax") and "u32" in types:
        pick = _unsigned(_ARITHMETIC[name])
        return lambda a, b: wrapped(pick(a, b))
    return _ARITHMETIC.get(name)


def has_no_effect(opcode: str) -> bool:
    """Tells whether an opcode is known to change nothing that a replay follows: vectors, fences and traces."""
    name = opcode.partition(".")[0]
    return name in _WITHOUT_EFFECT or (name.startswith("v") and not name.startswith(("vsync", "vwait")))


def divided(opcode: str, dividend: Any, divisor: Any, wanted: str = "kDivAndRem") -> tuple[Any, ...]:
    """Divides; returns the quotient, rounded towards zero, the remainder, or both; unknown where an operand is."""
    try:
        if opcode.endswith("u32"):
            quotient, remainder = map(wrapped, divmod(dividend & MASK, divisor & MASK))
        else:
            quotient = abs(dividend) // abs(divisor) * (1 if (dividend < 0) == (divisor < 0) else -1)
            remainder = dividend - quotient * divisor
    except (TypeError, ZeroDivisionError):
        quotient, remainder = Unknown(), Unknown()
    return {"kDiv": (quotient,), "kRem": (remainder,)}.get(wanted, (quotient, remainder))
