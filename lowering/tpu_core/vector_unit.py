"""Arithmetic of the vector unit and of the transcendental unit: what each opcode computes of vectors."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from lowering.tpu_core.packing import PACKING
from lowering.tpu_core.vectors import (
    EXPONENT,
    HIGH,
    LANE,
    LANES,
    LOW,
    SUBLANE,
    SUBLANES,
    rounded_to_bfloat16,
    rows_of_words,
    whole,
    words_of_rows,
)

_ONES = 0xFFFFFFFF


def _on(dtype: Any, function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function of bits that computes with these as numbers of a dtype."""
    return lambda *operands: np.asarray(function(*(x.view(dtype) for x in operands)), dtype).view(np.uint32)


def _in_double(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Returns a function of float32 that is exact but for one rounding; the hardware's own accuracy is not known."""
    return lambda x: np.asarray(function(x.view(np.float32).astype(np.float64)), np.float32).view(np.uint32)


def only_bfloat16(x: Any) -> Any:
    """Returns float32 numbers that bfloat16 has; others are NaN, as nobody knows what a load makes of them."""
    return np.where(x & LOW, np.uint32(0x7FC00000), x)


def on_bfloat16(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function of words of two bfloat16 values, from one of float32. Each result is rounded."""

    def packed(*operands: Any) -> Any:
        low, high = function(*(x << np.uint32(16) for x in operands)), function(*(x & HIGH for x in operands))
        return rounded_to_bfloat16(high) | rounded_to_bfloat16(low) >> np.uint32(16)

    return packed


def _on_halves(dtype: Any, function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function of two integers of 16 bits a word."""

    def packed(a: Any, b: Any) -> Any:
        rows = function(*(rows_of_words(x, 16).astype(dtype) for x in (a, b)))
        return words_of_rows(rows.astype(np.uint16).astype(np.uint32), 16)

    return packed


def _shifted(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda a, b: np.where(b < 32, function(a, b & np.uint32(31)), 0).astype(np.uint32)


def _arithmetic_shift(a: Any, b: Any) -> Any:
    return (a.view(np.int32) >> np.minimum(b, 31).astype(np.int32)).view(np.uint32)


def _to_integer(x: Any) -> Any:
    """Converts float32 to int32, rounded to nearest even and bounded; 0 for NaN. To truncate, programs do so before."""
    x = x.view(np.float32)
    bounded = np.where(np.isnan(x), 0, np.clip(x, -2147483648.0, 2147483520.0))
    return np.rint(bounded).astype(np.int32).view(np.uint32)


def _is_weird(x: Any) -> Any:
    return (x & EXPONENT) == EXPONENT


def _rotated(x: Any, by: Any) -> Any:
    """Takes row s + by for sublane s, in a circle; a vector of offsets gathers within each lane."""
    if np.ndim(by) == 0:
        return np.roll(whole(x), -int(by), 0)
    return np.take_along_axis(whole(x), (SUBLANE + by) % SUBLANES, 0)


def _permuted(x: Any, by: Any) -> Any:
    """Takes one row for all sublanes, by its number; a vector of numbers gathers within each lane.

    With four bytes, which libtpu writes for a v7x, only the first is known to be used.
    """
    if np.ndim(by) == 0:
        return np.repeat(whole(x)[int(by) % SUBLANES][None], SUBLANES, 0)
    return np.take_along_axis(whole(x), by % SUBLANES, 0)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    # Arithmetic, number by number.
    "vadd.f32": _on(np.float32, np.add),
    "vsub.f32": _on(np.float32, np.subtract),
    "vmul.f32": _on(np.float32, np.multiply),
    "vmax.f32": _on(np.float32, np.maximum),
    "vmin.f32": _on(np.float32, np.minimum),
    # To float32 it adds the lower half of each word, as the compiler's first form of the code says.
    "vadd.low.f32.bf16": lambda a, b: _on(np.float32, np.add)(a, b << np.uint32(16)),
    "vadd.bf16": on_bfloat16(_on(np.float32, np.add)),
    "vsub.bf16": on_bfloat16(_on(np.float32, np.subtract)),
    "vmul.bf16": on_bfloat16(_on(np.float32, np.multiply)),
    "vmax.bf16": on_bfloat16(_on(np.float32, np.maximum)),
    "vmin.bf16": on_bfloat16(_on(np.float32, np.minimum)),
    "vadd.s16": _on_halves(np.int16, np.add),
    "vsub.s16": _on_halves(np.int16, np.subtract),
    "vmul.u16": _on_halves(np.uint16, np.multiply),
    "vmax.s16": _on_halves(np.int16, np.maximum),
    "vmin.s16": _on_halves(np.int16, np.minimum),
    "vadd.s32": np.add,
    "vsub.s32": np.subtract,
    "vmul.u32": np.multiply,
    "vmin.u32": np.minimum,
    "vmax.u32": np.maximum,
    "vand.u32": np.bitwise_and,
    "vor.u32": np.bitwise_or,
    "vxor.u32": np.bitwise_xor,
    "vshll.u32": _shifted(np.left_shift),
    "vshrl.u32": _shifted(np.right_shift),
    "vshra.s32": _arithmetic_shift,
    # Conversions.
    "vmov": lambda x: x,
    "vcvt.s32.f32": lambda x: x.view(np.int32).astype(np.float32).view(np.uint32),
    "vcvt.f32.s32": _to_integer,
    "vfloor.f32": _on(np.float32, np.floor),
    "vceil.f32": _on(np.float32, np.ceil),
    "vtrunc.f32": _on(np.float32, np.trunc),
    "vtrunc.bf16": on_bfloat16(_on(np.float32, np.trunc)),
    "vround.rtne.f32": _on(np.float32, np.rint),
    "vround.rtna.f32": _in_double(lambda x: np.trunc(x + np.copysign(0.5, x))),  # of two, the one away from 0
    "vfloor.bf16": on_bfloat16(_on(np.float32, np.floor)),
    # To plus and minus the second operand; from 0 to it.
    "vclamps.f32": _on(np.float32, lambda x, most: np.clip(x, -most, most)),
    "vclamp-gez-f32": _on(np.float32, lambda x, most: np.clip(x, 0, most)),
    # Of the product of 64 bits, a half.
    "vmul.u32.u64.low": np.multiply,
    "vpcnt": lambda x: np.bitwise_count(x).astype(np.uint32),
    "vclz": lambda x: (32 - np.frexp(x.astype(np.float64))[1]).astype(np.uint32),
    **PACKING,
    # Movements along sublanes.
    "vrot.slane": _rotated,
    "vperm.slane": _permuted,
    "vcombine.low": lambda a, b: np.concatenate([whole(a)[:4], whole(b)[:4]]),
    "vcombine.high": lambda a, b: np.concatenate([whole(a)[4:], whole(b)[4:]]),
}

_FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "vpow2": np.exp2,
    "vlog2": np.log2,
    "vrcp": np.reciprocal,
    "vrsqrt": lambda x: 1 / np.sqrt(x),
    "vtanh": np.tanh,
    "verf": np.vectorize(math.erf, otypes=[np.float64]),
    # Of radians; programs reduce these to a quarter of a turn before.
    "vsinq": np.sin,
    "vcosq": np.cos,
}


def upper_half(a: Any, b: Any) -> Any:
    """Returns the upper half of a product of 64 bits."""
    return whole((a.astype(np.uint64) * b.astype(np.uint64) >> np.uint64(32)).astype(np.uint32))


# Their results wait until they are popped.
TRANSCENDENTAL: dict[str, Callable[[Any], Any]] = {
    **{f"{name}.bf16": on_bfloat16(_in_double(function)) for name, function in _FUNCTIONS.items()},
    **{f"{name}.f32": _in_double(function) for name, function in _FUNCTIONS.items()},
}

_RELATIONS: dict[str, Callable[[Any, Any], Any]] = {
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "eq": np.equal,
    "ne": np.not_equal,
}
_TYPES: dict[str, Any] = {"f32": np.float32, "s32": np.int32, "u32": np.uint32}


def _low(x: Any) -> Any:
    """Returns the low halves of words, as the high halves of others."""
    return whole(x) << np.uint32(16)


# Numbers of 16 bits compare as the high halves of wider ones do.
_HALVES: dict[str, Any] = {"bf16": np.float32, "s16": np.int32, "u16": np.uint32}


def comparison(relation: str, dtype: str) -> Callable[[Any, Any], Any] | None:
    """Returns what compares two vectors, such as ("lt", "f32"), with a mask of bits for 16 bits; None if not known."""
    compare = _RELATIONS.get(relation)
    if compare is None or dtype not in _TYPES | _HALVES:
        return None
    if dtype in _TYPES:
        return lambda a, b: whole(compare(a.view(_TYPES[dtype]), b.view(_TYPES[dtype])))
    kind = _HALVES[dtype]

    def halves(a: Any, b: Any) -> Any:
        low = compare(_low(a).view(kind), _low(b).view(kind))
        high = compare((whole(a) & HIGH).view(kind), (whole(b) & HIGH).view(kind))
        return np.where(low, LOW, np.uint32(0)) | np.where(high, HIGH, np.uint32(0))

    return halves


# Masks: booleans for each word, or bits.


def rectangle(bits: int) -> np.ndarray:
    """Returns the mask of a rectangle: the first sublane (3 bits), first lane (7), last sublane (3), last lane (7)."""
    first_sublane, first_lane = bits & 7, bits >> 3 & 127
    last_sublane, last_lane = bits >> 10 & 7, bits >> 13 & 127
    rows = (first_sublane <= SUBLANE) & (last_sublane >= SUBLANE)
    return rows & (first_lane <= LANE) & (last_lane >= LANE)


def bytes_of_sublanes(bits: int) -> np.ndarray:
    """Returns the mask of a range of bytes, four to a sublane: the low 8 bits give the first, the others the last."""
    first, last = bits & 0xFF, bits >> 8
    mask = np.zeros((SUBLANES, LANES), np.uint32)
    for byte in range(first, min(last, 4 * SUBLANES - 1) + 1):
        mask[byte // 4] |= np.uint32(0xFF << 8 * (byte % 4))
    return mask


def _as_bits(mask: np.ndarray) -> np.ndarray:
    return mask if mask.dtype == np.uint32 else np.where(mask, np.uint32(_ONES), np.uint32(0))


def _joined(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def join(a: Any, b: Any) -> Any:
        return function(a, b) if a.dtype == b.dtype else function(_as_bits(a), _as_bits(b))

    return join


def packed_masks(second: np.ndarray, first: np.ndarray) -> np.ndarray:
    """Packs two masks of words into one of halves, compressed."""
    rows = [np.where(mask, LOW, np.uint32(0)) for mask in (first, second)]
    return words_of_rows(np.concatenate(rows), 16)


def selected(mask: np.ndarray, on_true: Any, on_false: Any) -> Any:
    """Selects words, or bits."""
    if mask.dtype == bool:
        return np.where(mask, on_true, on_false)
    return (on_true & mask) | (on_false & ~mask)


def _bytes_that_are_not_zero(x: Any) -> Any:
    parts = [np.uint32(0xFF << 8 * part) for part in range(4)]
    return sum((np.where(whole(x) & part, part, np.uint32(0)) for part in parts), np.uint32(0))


# Of vectors, to masks.
TESTS: dict[str, Callable[..., Any]] = {
    "vweird.f32": lambda x: whole(_is_weird(x)),  # infinities and NaN, as `jnp.isfinite` uses it
    "vc.u32": lambda a, b: whole(a + b < a),  # the carry of a sum
    "vnez.u8": _bytes_that_are_not_zero,
}
# Of masks.
MASKS: dict[str, Callable[..., Any]] = {
    "vmand": _joined(np.bitwise_and),
    "vmor": _joined(np.bitwise_or),
    "vmxor": _joined(np.bitwise_xor),
    "vmneg": np.invert,
    "vmmov": lambda mask: mask,
    "vmpackc.low": packed_masks,
}
