"""Arithmetic of the vector unit and of the transcendental unit: what each opcode computes of arrays (8, 128) of uint32.

Vectors are rows of sublanes and lanes. 16-bit values are packed in two ways: "compressed", where the rows of two
vectors follow one another and two neighbouring rows share a word, the first in its low half; and "interleaved", where a
word holds the same place of two vectors.
"""

import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

SUBLANES, LANES = 8, 128
_ONES = 0xFFFFFFFF
_HIGH, _LOW, _LOW_BYTES = np.uint32(0xFFFF0000), np.uint32(0xFFFF), np.uint32(0xFF00FF)
_EXPONENT = np.uint32(0x7F800000)
# Numbers of 8 bits by the names that opcodes give them. Until v6e, "e4m3" has a bias of 11 and no infinities.
FLOATS_OF_8_BITS: dict[str, Any] = {
    "f8e4m3b11": np.dtype(jnp.float8_e4m3b11fnuz),
    "f8e4m3fn": np.dtype(jnp.float8_e4m3fn),
    "f8e4m3": np.dtype(jnp.float8_e4m3fn),
    "f8e5m2": np.dtype(jnp.float8_e5m2),
    "bf8": np.dtype(jnp.float8_e5m2),
}
LANE = np.broadcast_to(np.arange(LANES, dtype=np.uint32), (SUBLANES, LANES))
SUBLANE = np.broadcast_to(np.arange(SUBLANES, dtype=np.uint32)[:, None], (SUBLANES, LANES))


def whole(x: Any) -> np.ndarray:
    """Returns a vector, where one number may stand for all of its elements."""
    return np.broadcast_to(x, (SUBLANES, LANES))


def _on(dtype: Any, function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function of bits that computes with these as numbers of a dtype."""
    return lambda *operands: np.asarray(function(*(x.view(dtype) for x in operands)), dtype).view(np.uint32)


def _in_double(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Returns a function of float32 that is exact but for one rounding; the hardware's own accuracy is not known."""
    return lambda x: np.asarray(function(x.view(np.float32).astype(np.float64)), np.float32).view(np.uint32)


def rounded_to_bfloat16(x: Any) -> Any:
    """Rounds the bits of float32 to nearest even; the low half of the result is 0."""
    # Only NaN can overflow here, and keeps its high half instead.
    rounded = (x + 0x7FFF + (x >> 16 & 1)) & _HIGH
    return np.where((x & 0x7FFFFFFF) > _EXPONENT, x & _HIGH | 0x00400000, rounded)


def only_bfloat16(x: Any) -> Any:
    """Returns float32 numbers that bfloat16 has; others are NaN, as nobody knows what a load makes of them."""
    return np.where(x & _LOW, np.uint32(0x7FC00000), x)


def on_bfloat16(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function of words of two bfloat16 values, from one of float32. Each result is rounded."""

    def packed(*operands: Any) -> Any:
        low, high = function(*(x << np.uint32(16) for x in operands)), function(*(x & _HIGH for x in operands))
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
    return (x & _EXPONENT) == _EXPONENT


# Rows: the numbers of a packed vector, one row after the other.


def rows_of_words(x: Any, bits: int) -> np.ndarray:
    """Unpacks rows of numbers of so many bits, compressed, into the low bits of words."""
    count = 32 // bits
    rows = np.empty((SUBLANES * count, LANES), np.uint32)
    for part in range(count):
        rows[part::count] = whole(x) >> np.uint32(bits * part) & np.uint32((1 << bits) - 1)
    return rows


def words_of_rows(rows: np.ndarray, bits: int) -> np.ndarray:
    """Packs the low bits of rows, which inverts `rows_of_words`."""
    count = 32 // bits
    words = np.zeros((len(rows) // count, LANES), np.uint32)
    for part in range(count):
        words |= (rows[part::count] & np.uint32((1 << bits) - 1)) << np.uint32(bits * part)
    return words


def _signed(rows: np.ndarray, bits: int) -> np.ndarray:
    """Extends the sign of numbers of so many bits to 32."""
    shift = np.int32(32 - bits)
    return (rows.astype(np.int32) << shift >> shift).view(np.uint32)


def _packed(bits: int) -> Callable[[Any, Any], Any]:
    """Packs the numbers of two vectors, each of twice as many bits: first the rows of the second operand."""

    def pack(second: Any, first: Any) -> Any:
        return words_of_rows(np.concatenate([rows_of_words(x, 2 * bits) for x in (first, second)]), bits)

    return pack


def _packed_bfloat16(second: Any, first: Any) -> Any:
    return _packed(16)(*(rounded_to_bfloat16(x) >> np.uint32(16) for x in (second, first)))


def _part(rows: np.ndarray, part: int, parts: int) -> np.ndarray:
    size = len(rows) // parts
    return rows[part * size : (part + 1) * size]


def _unpacked(bits: int, wider: int, part: int) -> Callable[[Any], Any]:
    """Unpacks a part of the rows of signed numbers into rows of `wider` bits."""

    def unpack(x: Any) -> Any:
        rows = _signed(_part(rows_of_words(x, bits), part, wider // bits), bits)
        return words_of_rows(rows, wider)

    return unpack


def _unpacked_bfloat16(part: int) -> Callable[[Any], Any]:
    """Unpacks the lower or upper half of compressed rows to float32."""
    return lambda x: _part(rows_of_words(x, 16), part, 2) << np.uint32(16)


def _unpacked_signed(part: int) -> Callable[[Any], Any]:
    return lambda x: _signed(_part(rows_of_words(x, 16), part, 2), 16)


def _integers_as_bfloat16(bits: int, part: int) -> Callable[[Any], Any]:
    """Unpacks a part of the rows of signed numbers of 8 or 4 bits to rows of bfloat16."""

    def unpack(x: Any) -> Any:
        rows = _signed(_part(rows_of_words(x, bits), part, 16 // bits), bits).view(np.int32)
        return words_of_rows(rows.astype(np.float32).view(np.uint32) >> np.uint32(16), 16)

    return unpack


def from_8_bits(rows: np.ndarray, dtype: Any) -> np.ndarray:
    """Returns numbers whose 8 bits are the low ones of words as float32."""
    return np.asarray(rows.astype(np.uint8).view(dtype).astype(np.float32))


def _to_8_bits(dtype: Any) -> Callable[[np.ndarray], np.ndarray]:
    """Returns what rounds float32 to nearest even, to 8 bits at the lower end of words. Integers are bounded."""

    def convert(x: np.ndarray) -> np.ndarray:
        values = x.view(np.float32)
        if np.issubdtype(dtype, np.integer):
            values = np.rint(np.clip(np.nan_to_num(values), np.iinfo(dtype).min, np.iinfo(dtype).max))
        return values.astype(dtype).view(np.uint8).astype(np.uint32)

    return convert


def _unpacked_float(dtype: Any, wider: int, part: int) -> Callable[[Any], Any]:
    """Unpacks a part of the rows of numbers of 8 bits to float32, or to bfloat16, which has all of them."""

    def unpack(x: Any) -> Any:
        rows = from_8_bits(_part(rows_of_words(x, 8), part, wider // 8), dtype).view(np.uint32)
        return words_of_rows(rows >> np.uint32(32 - wider), wider)

    return unpack


def packed_float32(dtype: Any, first: Any, second: Any) -> np.ndarray:
    """Packs the float32 numbers of two vectors, rounded to 8 bits, into halves of words."""
    return words_of_rows(_to_8_bits(dtype)(np.concatenate([whole(first), whole(second)])), 16)


def _packed_to_8_bits(dtype: Any) -> Callable[[Any, Any], Any]:
    """Packs the bfloat16 numbers of two vectors, rounded to 8 bits: first the rows of the second operand."""

    def pack(second: Any, first: Any) -> np.ndarray:
        rows = np.concatenate([rows_of_words(x, 16) for x in (first, second)])
        return words_of_rows(_to_8_bits(dtype)(rows << np.uint32(16)), 8)

    return pack


# What descriptors of conversions to 8 bits stand for, since v7x.
DESCRIBED: dict[str, Any] = {
    "61788": np.dtype(jnp.float8_e4m3fn),
    "57749": np.dtype(jnp.float8_e5m2),
    "312": np.int8,  # of what has been truncated
    "56": np.uint8,
}


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
    # Packing: "c" is compressed, "i" interleaved; "l" and "h" are the lower and the upper half of rows.
    "vpack.c.bf16": _packed_bfloat16,
    "vpack.i.bf16": lambda high, low: (rounded_to_bfloat16(high) & _HIGH) | rounded_to_bfloat16(low) >> np.uint32(16),
    "vpack.i.b16": lambda high, low: high << np.uint32(16) | low & _LOW,
    "vpack.i.b8": lambda high, low: (high & _LOW_BYTES) << np.uint32(8) | low & _LOW_BYTES,
    "vpack.c.b16": lambda second, first: words_of_rows(np.concatenate([whole(first), whole(second)]), 16),
    "vpack.c.b8": _packed(8),
    "vunpack.c.l.bf16": _unpacked_bfloat16(0),
    "vunpack.c.h.bf16": _unpacked_bfloat16(1),
    "vunpack.i.l.bf16": lambda x: x << np.uint32(16),
    "vunpack.i.h.bf16": lambda x: x & _HIGH,
    "vunpack.vsel.i.bf16": lambda x, half: x >> np.uint32(16) * half << np.uint32(16),  # half is 0 or 1
    # The sign counts: of max pooling's keys, which may be negative, on a v5e.
    "vunpack.c.l.b16": _unpacked_signed(0),
    "vunpack.c.h.b16": _unpacked_signed(1),
    "vunpack.i.l.s16.s32": lambda x: _signed(x & _LOW, 16),
    "vunpack.i.h.s16.s32": lambda x: _signed(x >> np.uint32(16), 16),
    "vunpack.c.l.s16.s32": _unpacked_signed(0),
    "vunpack.c.h.s16.s32": _unpacked_signed(1),
    "vunpack.c.0.s8": _unpacked(8, 32, 0),
    "vunpack.c.1.s8": _unpacked(8, 32, 1),
    "vunpack.c.2.s8": _unpacked(8, 32, 2),
    "vunpack.c.3.s8": _unpacked(8, 32, 3),
    "vunpack.c.l.s4": _unpacked(4, 8, 0),
    "vunpack.c.h.s4": _unpacked(4, 8, 1),
    **{f"vunpack.c.{part}.s8.bf16": _integers_as_bfloat16(8, number) for number, part in enumerate("lh")},
    **{f"vunpack.c.{part}.s4.bf16": _integers_as_bfloat16(4, number) for number, part in enumerate("0123")},
    "vpack.c.e4m3fn": _packed_to_8_bits(np.dtype(jnp.float8_e4m3fn)),
    "vpack.c.e5m2": _packed_to_8_bits(np.dtype(jnp.float8_e5m2)),
    "vpack.c.bf16.s8": _packed_to_8_bits(np.int8),
    "vpack.c.b4": _packed(4),
    **{f"vcvt.f32.{name}": _to_8_bits(FLOATS_OF_8_BITS[name]) for name in ("f8e4m3b11", "f8e5m2")},
    **{
        f"vunpack.c.{part}.{name}": _unpacked_float(FLOATS_OF_8_BITS[name], 32, number)
        for name in ("f8e4m3b11", "f8e4m3fn", "bf8")
        for number, part in enumerate("0123")
    },
    **{
        f"vunpack.c.{part}.{name}": _unpacked_float(FLOATS_OF_8_BITS[name], 16, number)
        for name in ("f8e4m3fn", "bf8")
        for number, part in enumerate("lh")
    },
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
        high = compare((whole(a) & _HIGH).view(kind), (whole(b) & _HIGH).view(kind))
        return np.where(low, _LOW, np.uint32(0)) | np.where(high, _HIGH, np.uint32(0))

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
    rows = [np.where(mask, _LOW, np.uint32(0)) for mask in (first, second)]
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
