"""Layouts of images: the order of the batch, channel and spatial axes."""

import functools
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ParamSpec, TypeVar

import jax

from jaxops._checks.arguments import INT32_MAX, is_integer
from jaxops._checks.mcdnn import require, require_choice

P = ParamSpec("P")
T = TypeVar("T")

IMAGES = ("NCHW", "NHWC", "NCDHW", "NDHWC")
_SPATIAL_AXES = {
    "NCL": slice(2, 3),
    "NLC": slice(1, 2),
    "NCHW": slice(2, 4),
    "NHWC": slice(1, 3),
    "NCDHW": slice(2, 5),
    "NDHWC": slice(1, 4),
}
CHANNELS_FIRST = MappingProxyType({4: "NCHW", 5: "NCDHW"})  # mcDNN's defaults, by rank
NO_DEFAULTS: Mapping[int, str] = MappingProxyType({})


def layout_required(fn: Callable[P, T]) -> Callable[P, T]:
    """Lets a function without a default for `layout` refuse a call without one in its own words, not Python's."""

    @functools.wraps(fn)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        kwargs.setdefault("layout", None)
        return fn(*args, **kwargs)

    return call


def resolved(
    operator: str,
    x: Any,
    layout: str | None,
    known: Sequence[str] = IMAGES,
    *,
    defaults: Mapping[int, str] = NO_DEFAULTS,
) -> str:
    """Returns the layout asked for, or else the default one for x's rank; checked against x."""
    ranks = sorted({len(one) for one in known})
    rule = f"have rank {' or '.join(map(str, ranks))}" if len(ranks) < 3 else f"have rank {ranks[0]} to {ranks[-1]}"
    require(len(x.shape) in ranks, operator, "x", rule, x)
    if layout is None and len(x.shape) in defaults:
        return defaults[len(x.shape)]
    require_given(operator, x, layout, [one for one in known if len(one) == len(x.shape)])
    layout = require_choice(operator, "layout", layout, known)
    rule = f"have {len(layout)} axes, as layout {layout} says"
    require(len(x.shape) == len(layout), operator, "x", rule, x)
    return layout


def require_given(operator: str, x: Any, layout: Any, choices: Sequence[str]) -> None:
    """Refuses to guess the layout of images, which JAX's models have with channels last and vendors with them first."""
    rule = f"be {', '.join(choices[:-1])} or {choices[-1]}, as x has {len(x.shape)} axes and there is no default"
    require(layout is not None, operator, "layout", rule, layout)


def sizes(value: Any) -> tuple[int, ...] | None:
    """Returns a user's shape, which may have symbolic sizes; None if it is not a shape, or a size exceeds int32."""
    if not isinstance(value, tuple | list):
        return None
    are_integers = (is_integer(n) and 0 <= int(n) <= INT32_MAX for n in value)
    are_symbolic = map(jax.export.is_symbolic_dim, value)
    if not all(a or b for a, b in zip(are_integers, are_symbolic, strict=True)):
        return None
    shape: list[Any] = [n if jax.export.is_symbolic_dim(n) else int(n) for n in value]
    return tuple(shape)


def spatial_extents(shape: Sequence[int], layout: str) -> tuple[int, ...]:
    """Returns the spatial extents of an image, one to three."""
    return tuple(shape[_SPATIAL_AXES[layout]])


def with_spatial_extents(shape: Sequence[int], layout: str, extents: Sequence[int]) -> tuple[int, ...]:
    """Returns the shape of an image with other spatial extents."""
    changed = list(shape)
    changed[_SPATIAL_AXES[layout]] = extents
    return tuple(changed)
