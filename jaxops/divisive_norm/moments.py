"""Sums of squared differences over windows that keep their digits next to large common offsets and outliers.

Written out, the sum over a window of `(x - m)**2` is `sum(x**2) - 2 m sum(x) + count m**2`. Where x and m are large
compared with their difference, these terms cancel and few digits remain. Here the mean of a window is kept as its
distance from a nearby origin, and squares are taken about that mean. Two neighbouring windows are joined as in Chan,
Golub and LeVeque (1979): the distance between their means adds to the squares. No term is negative, so nothing cancels.
Windows double along one axis after the other, so the cost grows with the logarithm of their extents.
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
    """Mean `origin + offset` of each window, and the mean squared deviation from it.

    None stands for zeros: single elements are their own origins.
    """

    origin: jax.Array
    offset: jax.Array | None
    variance: jax.Array | None


class Weights(NamedTuple):
    """Sums of weights in each window, and of weights times distances from an origin.

    None stands for zeros.
    """

    origin: jax.Array
    total: jax.Array
    moment: jax.Array | None


def deviations(x: jax.Array, spans: Sequence[Span]) -> Deviations:
    """Computes the deviations in the windows of x along these axes."""
    sums = Deviations(x, None, None)
    for span in spans:
        if sums.offset is not None:
            sums = _about_medians(sums, span.axis)
        sums = _grown_along(sums, _joined_deviations, span)
    return sums


def weights(weight: jax.Array, x: jax.Array, spans: Sequence[Span]) -> Weights:
    """Computes the weights in the windows along these axes, with one weight for each element of x."""
    sums = Weights(x, weight, None)
    for span in spans:
        sums = _grown_along(sums, _joined_weights, span)
    return sums


def counts(x: jax.Array, spans: Sequence[Span]) -> np.ndarray:
    """Counts the elements in each window of x along these axes."""
    along_each = (_held(x, span, 0, span.window, span.extent) for span in spans)
    return math.prod(along_each, start=np.ones((1,) * x.ndim)).astype(x.dtype)


def _joined_deviations(first: Deviations, second: Deviations, sizes: Sequence[np.ndarray]) -> Deviations:
    size: Any = sum(sizes)
    size = size + (size == 0).astype(size.dtype)
    before, after = (part / size for part in sizes)
    shares = (before, after, before * after)
    of_first, of_second, of_both = (share.astype(first.origin.dtype) for share in shares)
    apart = _combined((1, second.origin), (-1, first.origin), (1, second.offset), (-1, first.offset))
    # Beyond the edge the share is 0. It must multiply first, because the square may be infinite.
    variance = _combined((of_first, first.variance), (of_second, second.variance), (of_both * apart, apart))
    return Deviations(first.origin, _combined((1, first.offset), (of_second, apart)), variance)


def _about_medians(sums: Deviations, axis: int) -> Deviations:
    """Moves the sums to the median of three origins in a row, because the first element of a window may be an outlier.

    A rounded mean would not do: XLA computes it again wherever it is fused, and may round it differently there.
    """
    origin, offset, variance = sums
    here, near, far = (_later(origin, steps, axis) for steps in range(3))
    median = jnp.maximum(jnp.minimum(here, near), jnp.minimum(jnp.maximum(here, near), far))
    median = jax.lax.stop_gradient(jnp.where(jnp.isnan(median), origin, median))
    return Deviations(median, _combined((1, offset), (1, origin - median)), variance)


def _later(x: jax.Array, steps: int, axis: int) -> jax.Array:
    """Returns the elements `steps` further along an axis, repeating the last one at the end."""
    if not jax.export.is_symbolic_dim(x.shape[axis]):
        steps = min(steps, x.shape[axis] - 1)
    widths = [(0, steps if one == axis % x.ndim else 0) for one in range(x.ndim)]
    return jnp.pad(jax.lax.slice_in_dim(x, steps, None, axis=axis), widths, mode="edge")


def _joined_weights(first: Weights, second: Weights, _: Sequence[np.ndarray]) -> Weights:
    rebased = second.total * (second.origin - first.origin)
    moment = _combined((1, first.moment), (1, second.moment), (1, rebased))
    return Weights(first.origin, first.total + second.total, moment)


def _combined(*terms: tuple[Any, jax.Array | None]) -> Any:
    """Sums factors times arrays, where None stands for zeros."""
    return functools.reduce(jnp.add, [factor * x for factor, x in terms if x is not None])


def _grown_along(sums: Any, join: Callable[[Any, Any, Sequence[np.ndarray]], Any], span: Span) -> Any:
    """Sums over whole windows along an axis, from sums over single elements."""
    axis, extent, window = span.axis, span.extent, span.window
    # Beyond the edge there are no elements. Windows that begin there take the edge's element as their origin.
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
    """Counts the elements in stretches of `width` that begin `start` after the start of each window."""
    numpy: Any = jnp if jax.export.is_symbolic_dim(number) else np
    first = numpy.arange(number) + start - span.before
    inside = numpy.clip(first + width, 0, span.extent) - numpy.clip(first, 0, span.extent)
    inside = inside if numpy is np else inside.astype(x.dtype)
    return inside.reshape([-1 if axis == span.axis % x.ndim else 1 for axis in range(x.ndim)])


def _cut(sums: Any, axis: int, start: int, size: int) -> Any:
    """Returns the windows that begin in this range."""
    return type(sums)(*(x if x is None else jax.lax.slice_in_dim(x, start, start + size, axis=axis) for x in sums))


def _padded(x: jax.Array | None, span: Span, mode: str) -> jax.Array | None:
    if x is None:
        return None
    widths = [(0, 0)] * x.ndim
    widths[span.axis] = (span.before, span.behind)
    return jnp.pad(x, widths, mode=mode)
