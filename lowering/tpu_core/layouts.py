"""Layout of an operand's elements in memory."""

import math
import re
from collections.abc import Iterable, Sequence

import numpy as np

from lowering.tpu_core.scalar_memory import wrapped

# "s8[3,130]{1,0:T(4,128)(4,1)S(1)}": the bits of an element, the sizes, which dimension varies fastest, and tiles, each
# of the last dimensions that the one before leaves.
_TYPE = re.compile(r"[a-z]+(\d*)\w*\[([\d,]*)\](?:\{([\d,]*)(?::T((?:\([\d,]+\))+))?)?")
_BITS_OF_BOOLEANS, _WORD_BITS = 8, 32
PADDING = -1


def in_memory(values: np.ndarray, operand_type: str) -> list[int | None]:
    """Returns an operand's words in memory's order; None where tiles are padded. One value stands for all elements.

    Raises:
      ValueError: if the operand has another shape. What has one dimension may be given in part.
    """
    bits, shape, places = places_of(operand_type)
    values = np.full(shape, values) if values.ndim == 0 else values
    if values.size != math.prod(shape) and not (len(shape) == 1 and values.size <= shape[0]):
        raise ValueError(f"{operand_type.partition('{')[0]}; got {values.size:,} of {math.prod(shape):,} elements")
    flat = values.ravel()
    if len(shape) < 2 and bits == _WORD_BITS:
        return flat.tolist()
    places = np.where(places < flat.size, places, PADDING)
    elements = (None if place == PADDING else int(flat[place]) for place in places.tolist())
    return list(elements) if bits == _WORD_BITS else _packed(elements, bits)


def places_of(operand_type: str) -> tuple[int, tuple[int, ...], np.ndarray]:
    """Returns the bits of an element, the shape, and which element lies at each place in memory; else PADDING."""
    found = _TYPE.match(operand_type)
    assert found is not None
    shape, minor_to_major = _numbers(found[2]), _numbers(found[3])
    count = math.prod(shape)
    places = np.arange(count, dtype=np.int32 if count < 1 << 31 else np.int64).reshape(shape or 1)
    places = places.transpose(minor_to_major[::-1]) if minor_to_major else places
    for tile in re.findall(r"\(([\d,]+)\)", found[4] or ""):
        places = _tiled(places, _numbers(tile))
    return int(found[1] or _BITS_OF_BOOLEANS), shape, places.ravel()


def element_count(array_type: str) -> int:
    """Returns how many elements an array has, without padding."""
    found = _TYPE.match(array_type)
    assert found is not None
    return math.prod(_numbers(found[2]))


def size_bytes(array_type: str) -> int:
    """Returns how many bytes the elements of an array have, without padding."""
    found = _TYPE.match(array_type)
    assert found is not None
    return element_count(array_type) * int(found[1] or _BITS_OF_BOOLEANS) // 8


def _numbers(text: str | None) -> tuple[int, ...]:
    return tuple(map(int, text.split(","))) if text else ()


def _tiled(places: np.ndarray, tile: Sequence[int]) -> np.ndarray:
    """Returns which element lies at each place, in tiles of the last dimensions."""
    untiled = places.ndim - len(tile)
    if untiled < 0:
        return places
    padding = [(0, 0)] * untiled + [(0, -size % of) for size, of in zip(places.shape[untiled:], tile, strict=True)]
    places = np.pad(places, padding, constant_values=PADDING)
    sizes = [part for size, of in zip(places.shape[untiled:], tile, strict=True) for part in (size // of, of)]
    tiled = places.reshape(*places.shape[:untiled], *sizes)
    outer = [untiled + 2 * index for index in range(len(tile))]
    return tiled.transpose(*range(untiled), *outer, *(axis + 1 for axis in outer))


def _packed(elements: Iterable[int | None], bits: int) -> list[int | None]:
    """Packs several elements into each word; the first element has the lowest bits."""
    elements = list(elements)
    words: list[int | None] = []
    for first in range(0, len(elements), _WORD_BITS // bits):
        parts = elements[first : first + _WORD_BITS // bits]
        word = sum(((part or 0) & (1 << bits) - 1) << bits * index for index, part in enumerate(parts))
        words.append(None if all(part is None for part in parts) else wrapped(word))
    return words
