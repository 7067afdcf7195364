"""Windows of pooling, and images of every layout viewed as volumes with channels last."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxops._checks import layouts
from jaxops._checks.arguments import INT32_MAX, is_integer, static_rule
from jaxops._checks.dtypes import check_floating
from jaxops._checks.mcdnn import require, require_bool, require_choice
from pallas_kernels.tpu.max_pool_views import view_of

Ints = int | Sequence[int]
Padding = str | int | Sequence[int | Sequence[int]]
Pairs = Sequence[tuple[int, int]]

# The operators see (..., D, H, W, C). Channels that come first are batch axes, and the last axis then has length 1; so
# does the depth of a flat image. These are the axes of length 1 that turn each layout into a volume.
_ADDED_AXES = {
    "NCL": (-4, -3, -1),
    "NLC": (-4, -3),
    "NCHW": (-4, -1),
    "NHWC": (-4,),
    "NCDHW": (-1,),
    "NDHWC": (),
}
VOLUME_AXES = (-4, -3, -2)
# Elements of a window that a TPU reduces in one pass over x; by replay, two passes are faster with 25.
_MOST_IN_ONE_PASS = 9


class Span(NamedTuple):
    """The windows along one axis of a volume.

    They are `stride` apart. The first begins `before` positions before the volume, and the last ends at most `behind`
    positions behind it.
    """

    axis: int
    extent: int
    window: int
    stride: int
    before: int
    behind: int

    @property
    def padded(self) -> int:
        """The extent including its padding."""
        return self.extent + self.before + self.behind

    @property
    def outputs(self) -> int:
        """The number of windows."""
        return 1 + (self.padded - self.window) // self.stride

    @property
    def is_trivial(self) -> bool:
        """Tells whether every position is a window of its own."""
        return self[2:] == (1, 1, 0, 0)


def spans(extents: Sequence[int], window: Sequence[int], stride: Sequence[int], padding: Pairs) -> tuple[Span, ...]:
    """Returns the windows along depth, height and width."""
    along_each = zip(VOLUME_AXES, extents, window, stride, padding, strict=True)
    found = [Span(axis, n, k, s, before, behind) for axis, n, k, s, (before, behind) in along_each]
    # A single window may have any stride that reaches beyond the end; this one makes the shortest gradients.
    return tuple(span._replace(stride=span.padded) if span.outputs == 1 else span for span in found)


def squeezed(volume: jax.Array, along: Sequence[Span]) -> tuple[jax.Array, list[Span]]:
    """Turns a volume into an image, without depth or channels of length 1, and returns the nontrivial spans in it.

    XLA finds worse layouts for arrays with axes of length 1.
    """
    spans = [span for span in along if not span.is_trivial]
    axes = _ones(volume, along)
    return jnp.squeeze(volume, axes), [span._replace(axis=span.axis + (-1 in axes)) for span in spans]


def unsqueezed(image: jax.Array, volume: jax.Array, along: Sequence[Span]) -> jax.Array:
    """Inverts `squeezed(volume, along)`, for an image computed from it."""
    return jnp.expand_dims(image, _ones(volume, along))


def _ones(volume: jax.Array, along: Sequence[Span]) -> tuple[int, ...]:
    flat = along[0].extent == 1 and along[0].is_trivial
    return (-4,) * flat + (-1,) * (volume.shape[-1] == 1)


def pooled(x: jax.Array, along: Sequence[Span], initial: float, computation: Callable[..., Any]) -> jax.Array:
    """Reduces windows along some axes in one pass.

    Axis by axis, the arithmetic is the sum of a window's extents, and not their product.
    """
    shape, strides, paddings = [1] * x.ndim, [1] * x.ndim, [(0, 0)] * x.ndim
    for span in along:
        shape[span.axis], strides[span.axis] = span.window, span.stride
        paddings[span.axis] = (span.before, span.behind)
    start = np.asarray(initial, x.dtype)  # a constant also under jit: JAX differentiates sums that it recognizes
    return jax.lax.reduce_window(x, start, computation, shape, strides, paddings)


def refusal_of_one_pass(
    x: Any, extents: Sequence[int], *, window: Sequence[int], stride: Sequence[int], padding: Pairs
) -> str | None:
    """Says why windows over these extents are not reduced along both of their axes at once; None if they are.

    By replay, TPUs read x once as fast as they read rows, if windows are small and columns do not lie in lanes.
    """
    if any(map(jax.export.is_symbolic_dim, x.shape)):
        return f"one pass over x needs sizes that are numbers; x is {list(x.shape)}"
    axes = sum(not span.is_trivial for span in spans(extents, window, stride, padding))
    if axes != 2:
        return f"one pass in place of two is for windows along two axes; these lie along {axes}"
    if (elements := math.prod(window)) > _MOST_IN_ONE_PASS:
        return f"one pass is for windows of at most {_MOST_IN_ONE_PASS} elements; these have {elements}"
    return None if view_of(x.shape).is_stored_so else "XLA keeps the columns of x in lanes, where two passes are faster"


def positions(shape: Sequence[int], axis: int) -> jax.Array:
    """Returns coordinates along one axis, counted from the last; the other axes have length 1."""
    along = [size if i == axis else 1 for i, size in enumerate(shape, -len(shape))]
    return jax.lax.broadcasted_iota(jnp.int32, along, len(shape) + axis)


def to_volume(x: jax.Array, layout: str) -> jax.Array:
    """Returns an image of any layout as the operators see it, without transposing."""
    return jnp.expand_dims(x, _ADDED_AXES[layout])


def from_volume(x: jax.Array, layout: str) -> jax.Array:
    """Inverts `to_volume`."""
    return jnp.squeeze(x, _ADDED_AXES[layout])


def for_volume(numbers: Sequence[int], flat: int) -> tuple[int, ...]:
    """Returns one number per axis of a volume; `flat` stands for the depth of a flat image."""
    return (flat,) * (len(VOLUME_AXES) - len(numbers)) + tuple(numbers)


def volume_attributes(window: Sequence[int], stride: Sequence[int], padding: Pairs) -> dict[str, Any]:
    """Returns the operators' attributes for windows of two or three axes."""
    return {
        "window": for_volume(window, 1),
        "stride": for_volume(stride, 1),
        "padding": ((0, 0),) * (len(VOLUME_AXES) - len(padding)) + tuple(padding),
    }


def along_axes(operator: str, argument: str, value: Any, count: int) -> tuple[int, ...]:
    """Returns one integer per spatial axis, from a single integer or a sequence."""
    numbers = _each(value, count)
    rule = static_rule(f"be an integer or {count} of them", value)
    require(numbers is not None, operator, argument, rule, value)
    assert numbers is not None
    return numbers


def both_sides(numbers: Iterable[int]) -> tuple[tuple[int, int], ...]:
    """Returns the same padding before and behind each axis."""
    return tuple((number, number) for number in numbers)


def requested(
    operator: str,
    x: jax.Array,
    window: Ints,
    stride: Ints | None,
    padding: Padding,
    ceil_mode: bool,
    layout: str,
    dilation: Ints = 1,
) -> tuple[str, tuple[int, ...], dict[str, Any], tuple[int, ...], tuple[int, ...]]:
    """Returns what the operator needs, from a user's checked arguments.

    Returns:
      the layout, the extents of the volume, the operator's attributes, and for each axis of the volume by how much
      `ceil_mode` pads it beyond what the user asks for, and the dilation.
    """
    layout = _layout(operator, x, layout)
    extents = layouts.spatial_extents((1, *x.shape)[-len(layout) :], layout)
    check_floating(operator, x=x)
    window = along_axes(operator, "window", window, len(extents))
    stride = window if stride is None else along_axes(operator, "stride", stride, len(extents))
    dilation = along_axes(operator, "dilation", dilation, len(extents))
    check_numbers(operator, extents, window, stride, dilation)
    spanned = tuple(1 + step * (size - 1) for step, size in zip(dilation, window, strict=True))
    pairs = _padding(operator, padding, extents, spanned, stride)
    if max(dilation) > 1:
        known = not any(map(jax.export.is_symbolic_dim, extents))
        require(known, operator, "dilation", "be 1 where sizes are symbolic", dilation)
        fits = all(span <= n + sum(pair) for span, n, pair in zip(spanned, extents, pairs, strict=True))
        rule = f"keep what windows span, {spanned}, within x and its padding"
        require(fits, operator, "dilation", rule, dilation)
    check_windows(operator, extents, spanned, stride, pairs)
    ceil_mode = require_bool(operator, "ceil_mode", ceil_mode)
    rests = [0] * len(extents)
    if ceil_mode:
        rule = "be False where sizes are symbolic"
        require(not any(map(jax.export.is_symbolic_dim, extents)), operator, "ceil_mode", rule, ceil_mode)
        rests = list(map(_rest, extents, spanned, stride, pairs))
    pairs = tuple((before, behind + rest) for (before, behind), rest in zip(pairs, rests, strict=True))
    if max(dilation) > 1:
        reach = all(map(_reaches_pixels, extents, spanned, stride, pairs, dilation))
        require(reach, operator, "dilation", "leave each window a pixel of x", dilation)
    attributes = volume_attributes(window, stride, pairs)
    return layout, for_volume(extents, 1), attributes, for_volume(rests, 0), for_volume(dilation, 1)


def _reaches_pixels(extent: int, span: int, stride: int, pair: tuple[int, int], step: int) -> bool:
    """Tells whether every dilated window along an axis has a pixel, none of which may lie between its own."""
    starts = range(-pair[0], min(extent + pair[1] - span + 1, 0), stride)  # what begins in x has its first pixel there
    return all(start % step < extent for start in starts)


def _rest(extent: int, window: int, stride: int, pair: tuple[int, int]) -> int:
    """Returns how far one more window reaches beyond the padding; 0 if none is left that begins before it."""
    before, behind = pair
    steps = -(-(extent + before + behind - window) // stride)
    steps -= steps * stride >= extent + before
    return max(0, steps * stride + window - extent - before - behind)


def _layout(operator: str, x: Any, layout: Any) -> str:
    """Checks and returns the layout; x may lack the batch axis N, or have several."""
    rank = len(x.shape)
    require(rank >= 2, operator, "x", "have at least 2 axes", x)
    likely = [one for one in _ADDED_AXES if rank in (len(one), len(one) - 1)]
    layouts.require_given(operator, x, layout, likely or list(_ADDED_AXES))
    layout = require_choice(operator, "layout", layout, tuple(_ADDED_AXES))
    rule = f"have at least {len(layout) - 1} axes, as layout {layout} says"
    require(rank >= len(layout) - 1, operator, "x", rule, x)
    return layout


def _padding(
    operator: str, value: Any, extents: Sequence[int], window: Sequence[int], stride: Sequence[int]
) -> tuple[tuple[int, int], ...]:
    """Returns the padding before and behind each axis, in whichever form it was given."""
    count = len(extents)
    if isinstance(value, str) and value == "VALID":
        return both_sides((0,) * count)
    if isinstance(value, str) and value == "SAME":
        sums = [(-(-n // s) - 1) * s + k - n for n, k, s in zip(extents, window, stride, strict=True)]
        known = not any(map(jax.export.is_symbolic_dim, sums))
        rule = "be in numbers where it depends on a symbolic size"
        require(known, operator, "padding", rule, value)
        return tuple((max(total, 0) // 2, max(total, 0) - max(total, 0) // 2) for total in sums)
    numbers = _each(value, count)
    if numbers is not None:
        return both_sides(numbers)
    pairs = [_each(pair, 2) for pair in value] if isinstance(value, tuple | list) else []
    found = tuple((pair[0], pair[1]) for pair in pairs if pair is not None)
    rule = f'be "SAME", "VALID", an integer, or {count} of these: an integer or a pair (before, behind)'
    require(len(found) == len(pairs) == count, operator, "padding", static_rule(rule, value), value)
    return found


def _each(value: Any, count: int) -> tuple[int, ...] | None:
    """Returns a tuple of `count` integers, from one integer or a sequence; None for anything else."""
    values = value if isinstance(value, tuple | list) else (value,) * count
    return tuple(map(int, values)) if len(values) == count and all(map(is_integer, values)) else None


def check_numbers(
    operator: str, extents: Sequence[int], window: Sequence[int], stride: Sequence[int], dilation: Sequence[int] = (1,)
) -> None:
    """Refuses images without pixels, and windows, strides and dilations that are not positive int32 numbers."""
    for argument, numbers in (("window", window), ("stride", stride), ("dilation", dilation)):
        require(min(numbers) >= 1, operator, argument, "be at least 1", numbers)
        # Positions are counted in int32.
        require(max(numbers) <= INT32_MAX, operator, argument, f"be at most {INT32_MAX}", numbers)
    has_pixels = all(extent >= 1 for extent in extents)
    require(has_pixels, operator, "x", "have spatial extents of at least 1", extents)


def check_windows(
    operator: str, extents: Sequence[int], window: Sequence[int], stride: Sequence[int], padding: Pairs
) -> None:
    """Refuses windows that do not fit in an image of these extents, or could consist of padding alone."""
    check_numbers(operator, extents, window, stride)
    fits = all(0 <= p < w for pair, w in zip(padding, window, strict=True) for p in pair)
    shown = tuple(low if low == high else (low, high) for low, high in padding)
    require(fits, operator, "padding", f"be at least 0 and less than the window {window}", shown)
    padded = tuple(n + low + high for n, (low, high) in zip(extents, padding, strict=True))
    try:
        fits = all(w <= n for w, n in zip(window, padded, strict=True))
    except jax.errors.InconclusiveDimensionOperation:
        hint = f"give symbolic_shape a constraint, such as 'n >= {max(window)}'"
        rule = f"be known to be no larger than x with its padding, {padded}; {hint}"
        require(False, operator, "window", rule, window)
    require(fits, operator, "window", f"be no larger than x with its padding, {padded}", window)
    countable = all(jax.export.is_symbolic_dim(n) or n <= INT32_MAX for n in padded)
    rule = f"make x at most {INT32_MAX} positions long"
    require(countable, operator, "padding", rule, shown)


def check_volume(operator: str, argument: str, x: Any) -> None:
    """Refuses operands that are not floating-point volumes."""
    check_floating(operator, **{argument: x})
    require(len(x.shape) >= 4, operator, argument, "have shape (..., D, H, W, C)", x)


def pooled_shape(shape: Sequence[int], **attributes: Any) -> tuple[int, ...]:
    """Returns the shape of a volume's pooled result."""
    along = spans(shape[-4:-1], attributes["window"], attributes["stride"], attributes["padding"])
    return (*shape[:-4], *(span.outputs for span in along), shape[-1])
