"""Packing of numbers into narrower ones, and unpacking into wider ones: what each opcode computes of vectors."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from lowering.tpu_core.vectors import HIGH, LOW, rounded_to_bfloat16, rows_of_words, whole, words_of_rows

_LOW_BYTES = np.uint32(0xFF00FF)
# Numbers of 8 bits by the names that opcodes give them. On v5e and v6e, "e4m3" has a bias of 11.
FLOATS_OF_8_BITS: dict[str, Any] = {
    "f8e4m3b11": np.dtype(jnp.float8_e4m3b11fnuz),
    "f8e4m3fn": np.dtype(jnp.float8_e4m3fn),
    "f8e4m3": np.dtype(jnp.float8_e4m3fn),
    "f8e5m2": np.dtype(jnp.float8_e5m2),
    "bf8": np.dtype(jnp.float8_e5m2),
}


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


PACKING: dict[str, Callable[..., Any]] = {
    # Packing: "c" is compressed, "i" interleaved; "l" and "h" are the lower and the upper half of rows.
    "vpack.c.bf16": _packed_bfloat16,
    "vpack.i.bf16": lambda high, low: (rounded_to_bfloat16(high) & HIGH) | rounded_to_bfloat16(low) >> np.uint32(16),
    "vpack.i.b16": lambda high, low: high << np.uint32(16) | low & LOW,
    "vpack.i.b8": lambda high, low: (high & _LOW_BYTES) << np.uint32(8) | low & _LOW_BYTES,
    "vpack.c.b16": lambda second, first: words_of_rows(np.concatenate([whole(first), whole(second)]), 16),
    "vpack.c.b8": _packed(8),
    "vunpack.c.l.bf16": _unpacked_bfloat16(0),
    "vunpack.c.h.bf16": _unpacked_bfloat16(1),
    "vunpack.i.l.bf16": lambda x: x << np.uint32(16),
    "vunpack.i.h.bf16": lambda x: x & HIGH,
    "vunpack.vsel.i.bf16": lambda x, half: x >> np.uint32(16) * half << np.uint32(16),  # half is 0 or 1
    # The sign counts: of max pooling's keys, which may be negative, on a v5e.
    "vunpack.c.l.b16": _unpacked_signed(0),
    "vunpack.c.h.b16": _unpacked_signed(1),
    "vunpack.i.l.s16.s32": lambda x: _signed(x & LOW, 16),
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
}
