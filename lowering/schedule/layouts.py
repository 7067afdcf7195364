"""In which order an operand's elements lie in memory."""

import math
import re
from collections.abc import Sequence

import numpy as np

# "s32[3,130]{1,0:T(4,128)S(1)}": what the sizes are, which dimension varies fastest, and tiles of the last two.
_TYPE = re.compile(r"\w+\[([\d,]*)\](?:\{([\d,]*)(?::T\(([\d,]+)\))?)?")
_PADDING = -1


def in_memory(values: np.ndarray, operand_type: str) -> list[int | None]:
    """The values of an operand of that type in the order of memory; None where tiles are padded. One is that of all.

    Raises:
      ValueError: if the operand has another shape. What has one dimension may be given in part.
    """
    found = _TYPE.match(operand_type)
    assert found is not None
    shape, minor_to_major, tile = (tuple(map(int, (part or "").split(",") if part else ())) for part in found.groups())
    values = np.full(shape, values) if values.ndim == 0 else values
    if values.size != math.prod(shape) and not (len(shape) == 1 and values.size <= shape[0]):
        raise ValueError(f"{operand_type.partition('{')[0]}; got {values.size:,} of {math.prod(shape):,} elements")
    if len(shape) < 2:
        return values.ravel().tolist()
    flat = values.ravel()
    places = _places(np.arange(flat.size).reshape(shape), minor_to_major, tile)
    return [None if place == _PADDING else int(flat[place]) for place in places.ravel().tolist()]


def _places(places: np.ndarray, minor_to_major: Sequence[int], tile: Sequence[int]) -> np.ndarray:
    """Which element lies at each place."""
    places = places.transpose(minor_to_major[::-1]) if minor_to_major else places
    untiled = places.ndim - len(tile)
    if not tile or untiled < 0:
        return places
    padding = [(0, 0)] * untiled + [(0, -size % of) for size, of in zip(places.shape[untiled:], tile, strict=True)]
    places = np.pad(places, padding, constant_values=_PADDING)
    sizes = [part for size, of in zip(places.shape[untiled:], tile, strict=True) for part in (size // of, of)]
    tiled = places.reshape(*places.shape[:untiled], *sizes)
    outer = [untiled + 2 * index for index in range(len(tile))]
    return tiled.transpose(*range(untiled), *outer, *(axis + 1 for axis in outer))
