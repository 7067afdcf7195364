"""Average pooling, and its gradient, which spreads each window's gradient over the window's elements."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxops._checks.dtypes import accumulation_dtype
from jaxops._checks.layouts import layout_required
from jaxops._checks.mcdnn import as_array, require, require_bool
from jaxops._primitive.derivative import Active, Arrays, Derivative
from jaxops._primitive.operator import Operator
from jaxops.pooling import windows
from jaxops.pooling.windows import Ints, Padding, Span
from lowering.operators import Form, Place

# The longest windows whose elements XLA's CPU compiler adds up fastest as slices: of longer ones it sums an axis.
_FEW_SLICES = 4


@layout_required
def avg_pool(
    x: jax.Array,
    window: Ints,
    *,
    stride: Ints | None = None,
    padding: Padding = 0,
    count_include_pad: bool = True,
    ceil_mode: bool = False,
    layout: str,
) -> jax.Array:
    """Computes the mean of each window: `y[o] = sum over k of x[o * stride - before + k] / count[o]`, zeros around x.

    The gradient spreads evenly over each window: `grad_x[i] = sum of grad_y[o] / count[o]` over the windows o that hold
    i.

    Args:
      x: images of any floating dtype: (N, C, H, W) or (C, H, W), or as `layout` says.
      window: the extents of the windows: one number for all spatial axes, or one each.
      stride: the steps between windows. None means the window.
      padding: how far windows may reach beyond x, always less than the window. One number for all sides, or for each
        spatial axis a number or a pair (before, behind). "VALID" is 0. "SAME" pads so that there are
        `ceil(extent / stride)` windows: half before x and half behind it, with an odd one behind.
      count_include_pad: whether count is the size of the window everywhere, or only that of its part inside x.
      ceil_mode: whether to round the number of windows up, as PyTorch does: where the last windows leave pixels of x,
        one more window reaches beyond the padding. It begins in x or in the padding before it.
        Positions beyond the padding never count.
      layout: "NCHW", "NHWC", "NCDHW" or "NDHWC"; "NCL" or "NLC" for one spatial axis. You must give one. x may lack the
        batch axis N, or have several: "NHWC" with three axes is one image (H, W, C), and with five it is images
        (T, N, H, W, C).

    Returns:
      An array with the dtype and layout of x and spatial extents `1 + (extent + before + behind - window) // stride`,
      or one more with `ceil_mode`.

    Raises:
      BadParamError: if x is not floating point, no layout is given or its rank does not match it, a number is out of
        range, or the window is larger than x with its padding.

    Numerics:
      Sums in float32 (float64 for float64), then divides and rounds once, forward and backward. Derivatives of all
      modes and orders exist. The gradient does not read x. This runs as XLA's window reductions: an axis
      at a time, and on TPUs at once for small windows of images with channels last (`xla_one_pass`). On CPUs, windows
      that lie side by side are summed as slices, and their gradient is repeated (`xla_side_by_side`).

    Example:
      >>> x = jnp.arange(8.0).reshape(1, 1, 2, 4)
      >>> # (0 + 1 + 4 + 5) / 4 and (2 + 3 + 6 + 7) / 4
      >>> jaxops.avg_pool(x, 2, layout="NCHW").tolist()
      [[[[2.5, 4.5]]]]

    Source: mcDNN `mcdnnPoolingForward` and `mcdnnPoolingBackward`; PyTorch `torch.nn.functional.avg_pool2d`.
    """
    x = as_array("avg_pool", "x", x)
    asked = windows.requested("avg_pool", x, window, stride, padding, ceil_mode, layout)
    layout, extents, attributes, rests, _ = asked
    count_include_pad, volume = (
        require_bool("avg_pool", "count_include_pad", count_include_pad),
        windows.to_volume(x, layout),
    )
    if count_include_pad and any(rests):
        # The padding becomes part of x, and what lies beyond it does not count.
        pads = [(before, behind - rest) for (before, behind), rest in zip(attributes["padding"], rests, strict=True)]
        volume = jnp.pad(volume, [*[(0, 0)] * (volume.ndim - 4), *pads, (0, 0)])
        attributes["padding"] = tuple((0, rest) for rest in rests)
        count_include_pad, extents = False, volume.shape[-4:-1]
    attributes |= {"count_include_pad": count_include_pad, "extents": extents}
    (y,) = AVG_POOL(volume, **attributes)
    return windows.from_volume(y, layout)


def _check(x: Any, *, extents: tuple[int, ...], count_include_pad: bool, **attributes: Any) -> None:
    windows.check_volume("avg_pool", "x", x)
    require(x.shape[-4:-1] == extents, "avg_pool", "x", f"have the extents {extents}", x)
    windows.check_windows("avg_pool", extents, **attributes)


def _check_backward(grad: Any, *, extents: tuple[int, ...], count_include_pad: bool, **attributes: Any) -> None:
    name = "avg_pool_backward"
    windows.check_volume(name, "grad", grad)
    windows.check_windows(name, extents, **attributes)
    outputs = tuple(span.outputs for span in windows.spans(extents, **attributes))
    require(grad.shape[-4:-1] == outputs, name, "grad", f"have the extents {outputs}", grad)


def _means(
    x: jax.Array, *, extents: tuple[int, ...], count_include_pad: bool, at_once: bool = False, **attributes: Any
) -> Arrays:
    along = windows.spans(extents, **attributes)
    total, spans = windows.squeezed(x.astype(accumulation_dtype(x.dtype)), along)
    for step in [spans] if at_once else [[span] for span in spans]:
        total = windows.pooled(total, step, 0.0, jax.lax.add)
    mean = (total / _counts(spans, count_include_pad, total)).astype(x.dtype)
    return (windows.unsqueezed(mean, x, along),)


def _backward(
    grad: jax.Array, *, extents: tuple[int, ...], count_include_pad: bool, at_once: bool = False, **attributes: Any
) -> Arrays:
    along = windows.spans(extents, **attributes)
    total, spans = windows.squeezed(grad.astype(accumulation_dtype(grad.dtype)), along)
    total = total / _counts(spans, count_include_pad, total)
    for step in [spans] if at_once else [[span] for span in spans]:
        total = _gradient_along(total, step)
    return (windows.unsqueezed(total.astype(grad.dtype), grad, along),)


def _counts(spans: Sequence[Span], include_padding: bool, pooled: jax.Array) -> jax.Array | int:
    """Counts the elements of each window, to broadcast against the pooled array."""
    if include_padding:
        return math.prod(span.window for span in spans)
    counts = jnp.ones((), pooled.dtype)
    for span in spans:
        # Computed from the extents: windows over ones would keep XLA's constant folding busy for minutes.
        starts = span.stride * windows.positions(pooled.shape, span.axis) - span.before
        inside = jnp.minimum(starts + span.window, span.extent) - jnp.maximum(starts, 0)
        counts = counts * inside.astype(pooled.dtype)
    return counts


def _gradient_along(grad: jax.Array, along: Sequence[Span]) -> jax.Array:
    """Sums along some axes, at each position, the gradients of the windows that hold it."""
    # With `stride - 1` holes between the gradients, these windows lie side by side, so their sum is a window sum again.
    shape, paddings, holes = [1] * grad.ndim, [(0, 0)] * grad.ndim, [1] * grad.ndim
    for span in along:
        behind = span.extent + span.before - (span.outputs - 1) * span.stride - 1
        paddings[span.axis] = (span.window - 1 - span.before, behind)
        shape[span.axis], holes[span.axis] = span.window, span.stride
    start = np.zeros((), grad.dtype)
    return jax.lax.reduce_window(grad, start, jax.lax.add, shape, (1,) * grad.ndim, paddings, base_dilation=holes)


def _in_one_pass(reference: Callable[..., Arrays]) -> Form:
    """Makes the form that sums along both axes of the windows at once."""

    def run(x: jax.Array, *, place: Place, **attributes: Any) -> Arrays:
        return reference(x, at_once=True, **attributes)

    def refuses(place: Place, x: Any, *, extents: tuple[int, ...], count_include_pad: bool, **attributes: Any) -> Any:
        if x.shape[-1] == 1:
            return "with channels first, two passes over x are faster"
        return windows.refusal_of_one_pass(x, extents, **attributes)

    return Form("xla_one_pass", frozenset({"tpu"}), run, refuses)


def _means_side_by_side(
    x: jax.Array, *, place: Place, extents: tuple[int, ...], count_include_pad: bool, **attributes: Any
) -> Arrays:
    """Computes the means of windows that do not overlap: sums that XLA's CPU compiler fuses with what is around."""
    along = windows.spans(extents, **attributes)
    total, spans = windows.squeezed(x.astype(accumulation_dtype(x.dtype)), along)
    for span in spans:
        total = _summed_side_by_side(total, span)
    mean = (total / math.prod(span.window for span in spans)).astype(x.dtype)
    return (windows.unsqueezed(mean, x, along),)


def _summed_side_by_side(x: jax.Array, span: Span) -> jax.Array:
    axis, covered = x.ndim + span.axis, span.outputs * span.window
    if span.window <= _FEW_SLICES:
        parts = [jax.lax.slice_in_dim(x, at, covered, span.window, axis) for at in range(span.window)]
        return functools.reduce(jax.lax.add, parts)
    whole = jax.lax.slice_in_dim(x, 0, covered, axis=axis)
    return jnp.sum(whole.reshape(*x.shape[:axis], span.outputs, span.window, *x.shape[axis + 1 :]), axis + 1)


def _spread_side_by_side(
    grad: jax.Array, *, place: Place, extents: tuple[int, ...], count_include_pad: bool, **attributes: Any
) -> Arrays:
    """Repeats the gradient of each window, where windows do not overlap."""
    along = windows.spans(extents, **attributes)
    total, spans = windows.squeezed(grad.astype(accumulation_dtype(grad.dtype)), along)
    spread = (total / math.prod(span.window for span in spans)).astype(grad.dtype)
    for span in spans:
        axis, rest = spread.ndim + span.axis, span.extent - span.outputs * span.window
        spread = jnp.repeat(spread, span.window, axis)
        spread = jax.lax.pad(spread, np.zeros((), grad.dtype), [(0, rest * (i == axis), 0) for i in range(spread.ndim)])
    return (windows.unsqueezed(spread, grad, along),)


def _side_by_side(run: Callable[..., Arrays]) -> Form:
    """Makes the form for windows that do not overlap."""

    def refuses(place: Place, x: Any, *, extents: tuple[int, ...], count_include_pad: bool, **attributes: Any) -> Any:
        if any(map(jax.export.is_symbolic_dim, (*x.shape, *extents))):
            return "windows side by side need sizes that are numbers"
        for span in windows.spans(extents, **attributes):
            if span.before or span.stride != span.window or span.outputs * span.window > span.extent:
                return "windows overlap, leave gaps or reach beyond x"
        return None

    return Form("xla_side_by_side", frozenset({"cpu"}), run, refuses)


# Pooling is linear: tangents are pooled, and nothing of x is kept.


def _linearize(operands: Sequence[jax.Array], active: Active, **params: Any) -> tuple[Arrays, Arrays]:
    return AVG_POOL(*operands, **params), ()


def _tangent(residuals: Arrays, tangents: Arrays, active: Active, **params: Any) -> Arrays:
    return AVG_POOL(*tangents, **params)


def _vjp(residuals: Arrays, cotangents: Arrays, active: Active, **params: Any) -> Arrays:
    return AVG_POOL_BACKWARD(*cotangents, **params)


def _linearize_backward(operands: Sequence[jax.Array], active: Active, **params: Any) -> tuple[Arrays, Arrays]:
    return AVG_POOL_BACKWARD(*operands, **params), ()


_SUMS = "XLA sums the windows as it reads"
AVG_POOL = Operator(
    "avg_pool",
    "... d h w c -> ... d_out h_out w_out c",
    _check,
    _means,
    Derivative(_vjp, _tangent, _linearize),
    forms=(_in_one_pass(_means), _side_by_side(_means_side_by_side)),
    no_kernel=_SUMS,
)
# Each of the two is the other's transpose.
AVG_POOL_BACKWARD = Operator(
    "avg_pool_backward",
    "... d_out h_out w_out c -> ... d h w c",
    _check_backward,
    _backward,
    Derivative(_tangent, _vjp, _linearize_backward),
    forms=(_in_one_pass(_backward), _side_by_side(_spread_side_by_side)),
    no_kernel=_SUMS,
)
