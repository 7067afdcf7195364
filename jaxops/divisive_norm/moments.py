"""Sums of differences over windows, that lose no digits to what the numbers have in common.

Written out, the sum over a window of `(x - m)**2` is `sum(x**2) - 2 m sum(x) + count m**2`, of which little is left
where x and m are large beside their difference. Here the sums of a window are taken about an element of its own, its
origin, so that only neighbours are ever subtracted. Two windows side by side become one when the sums of the second are
moved to the origin of the first: windows double along one axis and then along the next, and the cost grows with the
logarithm of their extents.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxops.pooling.windows import Span


class Deviations(NamedTuple):
    """Of the elements of each window: their number, and sums of deviations from an origin and of their squares."""

    origin: jax.Array
    size: jax.Array
    total: jax.Array
    squares: jax.Array


class Weights(NamedTuple):
    """In each window, the sum of weights, and that of each weight times the distance of its element from an origin."""

    origin: jax.Array
    total: jax.Array
    moment: jax.Array


def deviations(x: jax.Array, spans: Sequence[Span]) -> Deviations:
    """Those of the windows of x along these axes."""
    axes = {span.axis % x.ndim for span in spans}
    ones = jnp.ones([size if axis in axes else 1 for axis, size in enumerate(x.shape)], x.dtype)
    return _grown(Deviations(x, ones, jnp.zeros_like(x), jnp.zeros_like(x)), _joined_deviations, spans)


def weights(weight: jax.Array, x: jax.Array, spans: Sequence[Span]) -> Weights:
    """Those of the windows along these axes, of a weight for each element of x."""
    return _grown(Weights(x, weight, jnp.zeros_like(weight)), _joined_weights, spans)


def _joined_deviations(first: Deviations, second: Deviations) -> Deviations:
    shift = second.origin - first.origin
    moved = second.size * shift
    return Deviations(
        first.origin,
        first.size + second.size,
        first.total + second.total + moved,
        first.squares + second.squares + shift * (2 * second.total + moved),
    )


def _joined_weights(first: Weights, second: Weights) -> Weights:
    moved = second.total * (second.origin - first.origin)
    return Weights(first.origin, first.total + second.total, first.moment + second.moment + moved)


def _grown(sums: Any, join: Callable[[Any, Any], Any], spans: Sequence[Span]) -> Any:
    """Sums over whole windows, from those over single elements."""
    for span in spans:
        sums = _grown_along(sums, join, span)
    return sums


def _grown_along(sums: Any, join: Callable[[Any, Any], Any], span: Span) -> Any:
    axis, extent, window = span.axis, span.extent, span.window
    # Beyond the edge stands nothing, and the edge's own element as the origin of windows that begin there.
    origin, *rest = sums
    padded = [_padded(origin, span, "edge"), *(_padded(x, span, "constant") for x in rest)]
    part, length = type(sums)(*padded), extent + window - 1

    def cut(start: int, size: int) -> Any:
        return type(sums)(*(jax.lax.slice_in_dim(x, start, start + size, axis=axis) for x in part))

    whole, covered, width = None, 0, 1
    while True:
        if window & width:
            piece = cut(covered, extent)
            whole = piece if whole is None else join(whole, piece)
            covered += width
        if 2 * width > window:
            return whole
        length -= width
        part = join(cut(0, length), cut(width, length))
        width *= 2


def _padded(x: jax.Array, span: Span, mode: str) -> jax.Array:
    widths = [(0, 0)] * x.ndim
    widths[span.axis] = (span.padding, span.window - 1 - span.padding)
    return jnp.pad(x, widths, mode=mode)
