"""Sums of differences over windows, that lose no digits to what the numbers have in common.

Written out, the sum over a window of `(x - m)**2` is `sum(x**2) - 2 m sum(x) + count m**2`, of which little is left
where x and m are large beside their difference. Here the sums of a window are taken about an element of its own, its
origin, so that only neighbours are ever subtracted. Two windows side by side become one when the sums of the second are
moved to the origin of the first: windows double along one axis and then along the next, and the cost grows with the
logarithm of their extents.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxops.pooling.windows import Span


class Deviations(NamedTuple):
    """Of the elements of each window: their number, and sums of deviations from an origin and of their squares.

    None stands for zeros: of single elements, which are their own origins.
    """

    origin: jax.Array
    size: jax.Array
    total: jax.Array | None
    squares: jax.Array | None


class Weights(NamedTuple):
    """In each window, the sum of weights, and that of each weight times the distance of its element from an origin."""

    origin: jax.Array
    total: jax.Array
    moment: jax.Array | None


def deviations(x: jax.Array, spans: Sequence[Span]) -> Deviations:
    """Those of the windows of x along these axes."""
    axes = {span.axis % x.ndim for span in spans}
    ones = jnp.ones([size if axis in axes else 1 for axis, size in enumerate(x.shape)], x.dtype)
    return _grown(Deviations(x, ones, None, None), _joined_deviations, spans)


def weights(weight: jax.Array, x: jax.Array, spans: Sequence[Span]) -> Weights:
    """Those of the windows along these axes, of a weight for each element of x."""
    return _grown(Weights(x, weight, None), _joined_weights, spans)


def plus(*terms: jax.Array | None) -> Any:
    """The sum, where None stands for zeros."""
    present = [term for term in terms if term is not None]
    return functools.reduce(jnp.add, present) if present else None


def _joined_deviations(first: Deviations, second: Deviations) -> Deviations:
    shift = second.origin - first.origin
    moved = second.size * shift
    return Deviations(
        first.origin,
        first.size + second.size,
        plus(first.total, second.total, moved),
        plus(first.squares, second.squares, shift * plus(second.total, second.total, moved)),
    )


def _joined_weights(first: Weights, second: Weights) -> Weights:
    moved = second.total * (second.origin - first.origin)
    return Weights(first.origin, first.total + second.total, plus(first.moment, second.moment, moved))


def _grown(sums: Any, join: Callable[[Any, Any], Any], spans: Sequence[Span]) -> Any:
    """Sums over whole windows, from those over single elements."""
    for span in spans:
        sums = _grown_along(sums, join, span)
    return sums


def _grown_along(sums: Any, join: Callable[[Any, Any], Any], span: Span) -> Any:
    axis, extent, window = span.axis, span.extent, span.window
    # Beyond the edge stands nothing, and the edge's own element as the origin of windows that begin there.
    origin, *rest = sums
    part = type(sums)(_padded(origin, span, "edge"), *(_padded(x, span, "constant") for x in rest))
    whole, covered, width, length = None, 0, 1, extent + window - 1
    while True:
        if window & width:
            piece = _cut(part, axis, covered, extent)
            whole = piece if whole is None else join(whole, piece)
            covered += width
        if 2 * width > window:
            return whole
        length -= width
        part = join(_cut(part, axis, 0, length), _cut(part, axis, width, length))
        width *= 2


def _cut(sums: Any, axis: int, start: int, size: int) -> Any:
    """The windows that begin in this range."""
    return type(sums)(*(x if x is None else jax.lax.slice_in_dim(x, start, start + size, axis=axis) for x in sums))


def _padded(x: jax.Array | None, span: Span, mode: str) -> jax.Array | None:
    if x is None:
        return None
    widths = [(0, 0)] * x.ndim
    widths[span.axis] = (span.padding, span.window - 1 - span.padding)
    return jnp.pad(x, widths, mode=mode)
