"""Sums of differences over windows, that lose no digits to what the numbers have in common, and hardly any to outliers.

Written out, the sum over a window of `(x - m)**2` is `sum(x**2) - 2 m sum(x) + count m**2`, of which little is left
where x and m are large beside their difference. Here the mean of a window is kept as its distance from an origin nearby
and squares are taken about that mean. Two windows side by side become one as Chan, Golub and LeVeque (1979) join them:
the distance between their means adds to the squares. No term is negative, so nothing cancels. Windows double along one
axis and then along the next, and the cost grows with the logarithm of their extents.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxops.pooling.windows import Span


class Deviations(NamedTuple):
    """Of the elements of each window: their mean, `origin + offset`, and their mean squared deviation from it.

    None stands for zeros: of single elements, which are their own origins.
    """

    origin: jax.Array
    offset: jax.Array | None
    variance: jax.Array | None


class Weights(NamedTuple):
    """In each window, the sum of weights, and that of each weight times the distance of its element from an origin.

    None stands for zeros.
    """

    origin: jax.Array
    total: jax.Array
    moment: jax.Array | None


def deviations(x: jax.Array, spans: Sequence[Span]) -> Deviations:
    """Those of the windows of x along these axes."""
    sums = Deviations(x, None, None)
    for span in spans:
        if sums.offset is not None:
            sums = _about_medians(sums, span.axis)
        sums = _grown_along(sums, _joined_deviations, span)
    return sums


def weights(weight: jax.Array, x: jax.Array, spans: Sequence[Span]) -> Weights:
    """Those of the windows along these axes, of a weight for each element of x."""
    sums = Weights(x, weight, None)
    for span in spans:
        sums = _grown_along(sums, _joined_weights, span)
    return sums


def counts(x: jax.Array, spans: Sequence[Span]) -> np.ndarray:
    """How many elements the windows of x along these axes hold."""
    along_each = (_held(x, span, 0, span.window, span.extent) for span in spans)
    return math.prod(along_each, start=np.ones((1,) * x.ndim)).astype(x.dtype)


def _joined_deviations(first: Deviations, second: Deviations, sizes: Sequence[np.ndarray]) -> Deviations:
    size: Any = sum(sizes)
    size = size + (size == 0).astype(size.dtype)
    before, after = (part / size for part in sizes)
    shares = (before, after, before * after)
    of_first, of_second, of_both = (share.astype(first.origin.dtype) for share in shares)
    apart = _combined((1, second.origin), (-1, first.origin), (1, second.offset), (-1, first.offset))
    # The share of nothing, beyond the edge, is 0, and comes first: the square may be infinite.
    variance = _combined((of_first, first.variance), (of_second, second.variance), (of_both * apart, apart))
    return Deviations(first.origin, _combined((1, first.offset), (of_second, apart)), variance)


def _about_medians(sums: Deviations, axis: int) -> Deviations:
    """The sums about the median of three origins in a row: what a window begins with may be far from all else in it.

    A rounded mean would not do: XLA computes it again wherever it is fused, and may round it otherwise there.
    """
    origin, offset, variance = sums
    here, near, far = (_behind(origin, steps, axis) for steps in range(3))
    median = jnp.maximum(jnp.minimum(here, near), jnp.minimum(jnp.maximum(here, near), far))
    median = jax.lax.stop_gradient(jnp.where(jnp.isnan(median), origin, median))
    return Deviations(median, _combined((1, offset), (1, origin - median)), variance)


def _behind(x: jax.Array, steps: int, axis: int) -> jax.Array:
    """The elements so many steps further along an axis, and the last one for those beyond it."""
    if not jax.export.is_symbolic_dim(x.shape[axis]):
        steps = min(steps, x.shape[axis] - 1)
    widths = [(0, steps if one == axis % x.ndim else 0) for one in range(x.ndim)]
    return jnp.pad(jax.lax.slice_in_dim(x, steps, None, axis=axis), widths, mode="edge")


def _joined_weights(first: Weights, second: Weights, _: Sequence[np.ndarray]) -> Weights:
    moved = second.total * (second.origin - first.origin)
    moment = _combined((1, first.moment), (1, second.moment), (1, moved))
    return Weights(first.origin, first.total + second.total, moment)


def _combined(*terms: tuple[Any, jax.Array | None]) -> Any:
    """The sum of factors times arrays, where None stands for zeros."""
    return functools.reduce(jnp.add, [factor * x for factor, x in terms if x is not None])


def _grown_along(sums: Any, join: Callable[[Any, Any, Sequence[np.ndarray]], Any], span: Span) -> Any:
    """Sums over whole windows along an axis, from those over single elements."""
    axis, extent, window = span.axis, span.extent, span.window
    # Beyond the edge stands nothing, and the edge's own element as the origin of windows that begin there.
    origin, *rest = sums
    part = type(sums)(_padded(origin, span, "edge"), *(_padded(x, span, "constant") for x in rest))
    whole, covered, width, length = None, 0, 1, extent + window - 1
    while True:
        if window & width:
            piece = _cut(part, axis, covered, extent)
            sizes = _held(origin, span, 0, covered, extent), _held(origin, span, covered, width, extent)
            whole = piece if whole is None else join(whole, piece, sizes)
            covered += width
        if 2 * width > window:
            return whole
        length -= width
        sizes = _held(origin, span, 0, width, length), _held(origin, span, width, width, length)
        part = join(_cut(part, axis, 0, length), _cut(part, axis, width, length), sizes)
        width *= 2


def _held(x: jax.Array, span: Span, start: int, width: int, number: int) -> np.ndarray:
    """How many elements lie in stretches of this width, that begin so far behind the start of each window."""
    numpy: Any = jnp if jax.export.is_symbolic_dim(number) else np
    first = numpy.arange(number) + start - span.before
    inside = numpy.clip(first + width, 0, span.extent) - numpy.clip(first, 0, span.extent)
    inside = inside if numpy is np else inside.astype(x.dtype)
    return inside.reshape([-1 if axis == span.axis % x.ndim else 1 for axis in range(x.ndim)])


def _cut(sums: Any, axis: int, start: int, size: int) -> Any:
    """The windows that begin in this range."""
    return type(sums)(*(x if x is None else jax.lax.slice_in_dim(x, start, start + size, axis=axis) for x in sums))


def _padded(x: jax.Array | None, span: Span, mode: str) -> jax.Array | None:
    if x is None:
        return None
    widths = [(0, 0)] * x.ndim
    widths[span.axis] = (span.before, span.behind)
    return jnp.pad(x, widths, mode=mode)
