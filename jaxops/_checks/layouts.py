"""Layouts of images: the order of the batch, channel and spatial axes."""

from collections.abc import Sequence
from typing import Any

import jax

from jaxops._checks.attributes import INT32_MAX, is_integer
from jaxops._checks.mcdnn import require, require_choice

IMAGES = ("NCHW", "NHWC", "NCDHW", "NDHWC")
_SPATIAL_AXES = {"NCHW": slice(2, 4), "NHWC": slice(1, 3), "NCDHW": slice(2, 5), "NDHWC": slice(1, 4)}
_DEFAULTS = {2: "NC", 3: "NCL", 4: "NCHW", 5: "NCDHW"}


def resolved(operator: str, x: Any, layout: str | None, known: Sequence[str] = IMAGES) -> str:
    """The layout asked for, or the default layout for x's rank; checked against x."""
    ranks = sorted({len(one) for one in known})
    rule = f"have rank {' or '.join(map(str, ranks))}" if len(ranks) < 3 else f"have rank {ranks[0]} to {ranks[-1]}"
    require(len(x.shape) in ranks, operator, "x", rule, x)
    if layout is None:
        return _DEFAULTS[len(x.shape)]
    layout = require_choice(operator, "layout", layout, known)
    rule = f"have {len(layout)} axes, as layout {layout} says"
    require(len(x.shape) == len(layout), operator, "x", rule, x)
    return layout


def sizes(value: Any) -> tuple[int, ...] | None:
    """A user's shape, which may have symbolic sizes; None if it is not a shape, or a size exceeds int32."""
    if not isinstance(value, tuple | list):
        return None
    are_integers = (is_integer(n) and 0 <= int(n) <= INT32_MAX for n in value)
    are_symbolic = map(jax.export.is_symbolic_dim, value)
    if not all(a or b for a, b in zip(are_integers, are_symbolic, strict=True)):
        return None
    shape: list[Any] = [n if jax.export.is_symbolic_dim(n) else int(n) for n in value]
    return tuple(shape)


def spatial_extents(shape: Sequence[int], layout: str) -> tuple[int, ...]:
    """The two or three spatial extents of an image."""
    return tuple(shape[_SPATIAL_AXES[layout]])


def with_spatial_extents(shape: Sequence[int], layout: str, extents: Sequence[int]) -> tuple[int, ...]:
    """The shape of an image with other spatial extents."""
    changed = list(shape)
    changed[_SPATIAL_AXES[layout]] = extents
    return tuple(changed)
