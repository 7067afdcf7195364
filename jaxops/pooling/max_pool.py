"""Max pooling, its gradient, which goes to each window's first maximum, and the transpose of that gradient."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxops._checks.dtypes import accumulation_dtype, check_floating
from jaxops._checks.layouts import layout_required
from jaxops._checks.mcdnn import as_array, require
from jaxops._primitive import sharding
from jaxops._primitive.derivative import Active, Arrays, Derivative
from jaxops._primitive.operator import Operator
from jaxops.pooling import windows
from jaxops.pooling.windows import Ints, Padding, Span
from lowering.operators import Form, Place
from pallas_kernels.gpu import max_pool_backward as gpu
from pallas_kernels.tpu import max_pool as tpu_value
from pallas_kernels.tpu import max_pool_backward as tpu

# Loops of more steps are compiled as loops; shorter ones are unrolled.
UNROLLED_STEPS = 16


@layout_required
def max_pool(
    x: jax.Array,
    window: Ints,
    *,
    stride: Ints | None = None,
    padding: Padding = 0,
    dilation: Ints = 1,
    ceil_mode: bool = False,
    layout: str,
) -> jax.Array:
    """Computes the maximum of each window: `y[o] = max over k of x[o * stride - before + dilation * k]`.

    Only pixels of x count, not those of the padding.

    The gradient goes to the first maximum of each window in row-major order, and adds up where windows overlap:

        grad_x[i] = sum of grad_y[o] over {o : i is the first maximum of window o}

    Args:
      x: images of any floating dtype: (N, C, H, W) or (C, H, W), or as `layout` says.
      window: the extents of the windows: one number for all spatial axes, or one each.
      stride: the steps between windows. None means the window.
      padding: how far windows may reach beyond x, always less than they span. One number for all sides, or for each
        spatial axis a number or a pair (before, behind). "VALID" is 0. "SAME" pads so that there are
        `ceil(extent / stride)` windows: half before x and half behind it, with an odd one behind. Padding is never a
        maximum, so a window of negative numbers has a negative maximum.
      dilation: the steps between the pixels of a window, which then spans `1 + dilation * (window - 1)`. One number for
        all spatial axes, or one each. Dilated windows are those of several smaller images: these are pooled apart.
      ceil_mode: whether to round the number of windows up, as PyTorch does: where the last windows leave pixels of x,
        one more window reaches beyond the padding. It begins in x or in the padding before it.
      layout: "NCHW", "NHWC", "NCDHW" or "NDHWC"; "NCL" or "NLC" for one spatial axis. You must give one. x may lack the
        batch axis N, or have several: "NHWC" with three axes is one image (H, W, C), and with five it is images
        (T, N, H, W, C).

    Returns:
      An array with the dtype and layout of x and spatial extents `1 + (extent + before + behind - span) // stride`, or
      one more with `ceil_mode`, where the span is that of a window.

    Raises:
      BadParamError: if x is not floating point, no layout is given or its rank does not match it, a number is out of
        range, the window spans more than x with its padding, or a dilated window has no pixel of x.

    Numerics:
      A window with NaN has the maximum NaN, and its gradient goes to the first NaN. A window of -inf passes its
      gradient to its first element inside x. Gradients are summed in float32 (float64 for float64) without scatters and
      always in the same order, so repeated runs agree in every bit. Derivatives of all modes and orders exist.

      On every platform this runs as XLA operations: window reductions forward, one axis after the other (on TPUs both
      at once for small windows, unless XLA keeps columns in lanes: `xla_one_pass`), slices and comparisons backward.
      There are kernels of the gradient on TPUs where their blocks fit VMEM, fastest where XLA keeps channels or images
      in lanes; and on NVIDIA GPUs with channels last, where windows do not overlap. A kernel of the value is for TPUs.
      By default a kernel runs on TPUs at the sizes where evidence favours it, and on GPUs where you have measured it.

    Example:
      >>> x = jnp.array([1.0, 5.0, 2.0, 3.0]).reshape(1, 1, 1, 4)
      >>> jaxops.max_pool(x, (1, 2), layout="NCHW").ravel()
      Array([5., 3.], dtype=float32)
      >>> jax.grad(lambda x: jaxops.max_pool(x, (1, 2), layout="NCHW").sum())(x).ravel()
      Array([0., 1., 0., 1.], dtype=float32)

    Source: mcDNN `mcdnnPoolingForward` and `mcdnnPoolingBackward`; PyTorch `torch.nn.functional.max_pool2d`.
    """
    x = as_array("max_pool", "x", x)
    asked = windows.requested("max_pool", x, window, stride, padding, ceil_mode, layout, dilation)
    layout, _, attributes, _, steps = asked
    return windows.from_volume(_dilated(windows.to_volume(x, layout), steps, **attributes), layout)


def _dilated(
    x: jax.Array, dilation: Sequence[int], *, window: Sequence[int], stride: Sequence[int], padding: Sequence[Any]
) -> jax.Array:
    """Pools a volume with dilated windows: each lies in one image of every d-th pixel, where it has no holes."""
    axis = next((axis for axis, step in enumerate(dilation) if step > 1), None)
    if axis is None:
        return MAX_POOL(x, window=window, stride=stride, padding=padding, propagate_nan=True)[0]
    at, step, (before, behind) = x.ndim + axis - 4, dilation[axis], padding[axis]
    outputs = 1 + (x.shape[at] + before + behind - step * (window[axis] - 1) - 1) // stride[axis]
    common = math.gcd(stride[axis], step)
    # Windows so far apart lie in the same image.
    apart, parts = step // common, []
    for first in range(min(apart, outputs)):
        skipped, phase = divmod(first * stride[axis] - before, step)
        image = jax.lax.slice_in_dim(x, phase + max(skipped, 0) * step, None, step, at)
        count = -(-(outputs - first) // apart)
        reach = (count - 1) * stride[axis] // common + window[axis]
        ahead = max(-skipped, 0)
        along = 1, stride[axis] // common, (ahead, max(reach - ahead - image.shape[at], 0))
        steps, strides, pairs = (
            (*each[:axis], new, *each[axis + 1 :]) for each, new in zip((dilation, stride, padding), along, strict=True)
        )
        pooled = _dilated(image, steps, window=window, stride=strides, padding=pairs)
        pooled = jax.lax.slice_in_dim(pooled, 0, count, axis=at)
        parts.append(_padded(pooled, at, 0, -(-outputs // apart) - count, 0))
    shape = (*parts[0].shape[:at], -1, *parts[0].shape[at + 1 :])
    return jax.lax.slice_in_dim(jnp.stack(parts, at + 1).reshape(shape), 0, outputs, axis=at)


def _check(x: Any, *, propagate_nan: bool, **attributes: Any) -> None:
    windows.check_volume("max_pool", "x", x)
    windows.check_windows("max_pool", x.shape[-4:-1], **attributes)


def _check_backward(x: Any, grad: Any, *, propagate_nan: bool, **attributes: Any) -> None:
    name = "max_pool_backward"
    windows.check_volume(name, "x", x)
    windows.check_windows(name, x.shape[-4:-1], **attributes)
    check_floating(name, grad=grad)
    shape = windows.pooled_shape(x.shape, **attributes)
    require(grad.shape == shape, name, "grad", f"have the shape of the windows, {shape}", grad)


def _check_at(x: Any, values: Any, *, propagate_nan: bool, **attributes: Any) -> None:
    name = "max_pool_at"
    windows.check_volume(name, "x", x)
    windows.check_windows(name, x.shape[-4:-1], **attributes)
    check_floating(name, values=values)
    require(values.shape == x.shape, name, "values", f"have the shape of x, {x.shape}", values)


def _maxima(x: jax.Array, *, propagate_nan: bool, **attributes: Any) -> Arrays:
    along = windows.spans(x.shape[-4:-1], **attributes)
    y, spans = windows.squeezed(x, along)
    y = _without_nan(y, propagate_nan)
    for span in spans:
        y = windows.pooled(y, [span], _least(x.dtype), jax.lax.max)
    return (windows.unsqueezed(y, x, along),)


def _maxima_in_one_pass(x: jax.Array, *, place: Place, propagate_nan: bool, **attributes: Any) -> Arrays:
    """Computes `_maxima` along both axes of its windows at once."""
    along = windows.spans(x.shape[-4:-1], **attributes)
    image, spans = windows.squeezed(x, along)
    y = windows.pooled(_without_nan(image, propagate_nan), spans, _least(x.dtype), jax.lax.max)
    return (windows.unsqueezed(y, x, along),)


def _refuses_one_pass(place: Place, x: Any, *, propagate_nan: bool, **attributes: Any) -> str | None:
    return windows.refusal_of_one_pass(x, x.shape[-4:-1], **attributes)


def _without_nan(x: jax.Array, propagate_nan: bool) -> jax.Array:
    """Replaces NaN by what is never a maximum, unless it is propagated."""
    return x if propagate_nan else jnp.where(jnp.isnan(x), jnp.asarray(_least(x.dtype), x.dtype), x)


def _least(dtype: Any) -> float:
    """Returns -inf, or the least number of a dtype without infinities, such as float8_e4m3fn."""
    return -np.inf if np.isinf(np.asarray(np.inf, dtype)) else float(jnp.finfo(dtype).min)


def _backward(x: jax.Array, grad: jax.Array, *, propagate_nan: bool, **attributes: Any) -> Arrays:
    along = windows.spans(x.shape[-4:-1], **attributes)
    image, spans = windows.squeezed(x, along)
    total, _ = windows.squeezed(grad.astype(accumulation_dtype(grad.dtype)), along)
    keys = _keys(image, propagate_nan)
    won = []
    # Columns before rows: of equal rows the first wins, and in it the first of its columns.
    for span in reversed(spans):
        keys, winners = _winners(keys, windows.positions(keys.shape, span.axis), span)
        won.append((span, winners))
    for span, winners in reversed(won):
        total = _gradient_along(total, winners, span)
    return (windows.unsqueezed(total.astype(grad.dtype), x, along),)


def _at(x: jax.Array, values: jax.Array, *, propagate_nan: bool, **attributes: Any) -> Arrays:
    """Returns `values` at the first maxima of the windows of x; linear in `values`."""
    along = windows.spans(x.shape[-4:-1], **attributes)
    image, spans = windows.squeezed(x, along)
    picked, _ = windows.squeezed(values, along)
    keys = _keys(image, propagate_nan)
    for span in reversed(spans):
        keys, picked = _winners(keys, picked, span)
    return (windows.unsqueezed(picked, x, along),)


def _keys(x: jax.Array, propagate_nan: bool) -> jax.Array:
    """Integers in the order of x. Equal numbers have equal keys, above the least integer, which is left for padding.

    NaN is above infinity if it is propagated, and below -infinity otherwise.
    """
    x = x.astype(accumulation_dtype(x.dtype))
    bits = jax.lax.bitcast_convert_type(jnp.where(x == 0, 0.0, x), jnp.dtype(f"int{8 * x.dtype.itemsize}"))
    least, greatest = np.iinfo(bits.dtype).min, np.iinfo(bits.dtype).max
    # Negative numbers count down from the sign bit.
    return jnp.where(jnp.isnan(x), greatest if propagate_nan else least + 1, jnp.where(bits < 0, bits ^ greatest, bits))


def _winners(keys: jax.Array, values: jax.Array, span: Span) -> Arrays:
    """Returns the greatest key of each window along one axis, and the value next to the first such key."""
    reach = (span.outputs - 1) * span.stride + span.window
    # The windows end within the padding.
    behind = _at_least_0(reach - span.before - span.extent, limit=span.behind)
    keys = _padded(keys, span.axis, span.before, behind, np.iinfo(keys.dtype).min)
    values = _padded(values, span.axis, span.before, behind, 0)
    # XLA's partitioner takes the wrong position of a split axis for a slice with one element and a longer stride.
    stride = 1 if span.outputs == 1 else span.stride

    def element(x: jax.Array, offset: Any) -> jax.Array:
        length = reach - span.window + 1
        if isinstance(offset, int):
            return jax.lax.slice_in_dim(x, offset, offset + length, stride, span.axis)
        run = jax.lax.dynamic_slice_in_dim(x, offset, length, span.axis)
        return jax.lax.slice_in_dim(run, 0, None, stride, span.axis)

    def challenge(offset: Any, best: Arrays) -> Arrays:
        key, value = element(keys, offset), element(values, offset)
        return jnp.maximum(key, best[0]), jnp.where(key > best[0], value, best[1])

    key = element(keys, 0)
    value = jnp.broadcast_to(element(values, 0), key.shape)
    return _repeat(1, span.window, challenge, tuple(sharding.same_varying_axes([key, value])))


def _gradient_along(grad: jax.Array, winners: jax.Array, span: Span) -> jax.Array:
    """Sums, at each position along one axis, the gradients of the windows that it won."""
    axis, extent, window, stride, before, _ = span
    # Position `stride * group + phase` lies in the windows `group - shift`, for a few shifts.
    shifts = range(-((before + stride - 1) // stride), (window - 1 - before) // stride + 1)
    groups = -(-extent // stride)
    behind = _at_least_0(groups - shifts[0] - span.outputs, limit=2 + window // stride)
    grad = _padded(grad, axis, shifts[-1], behind, 0)
    winners = _padded(winners, axis, shifts[-1], behind, -1)

    def shifted(x: jax.Array, shift: Any) -> jax.Array:
        return jax.lax.dynamic_slice_in_dim(x, shifts[-1] - shift, groups, axis)

    def at_phase(phase: int) -> jax.Array:
        total = jnp.zeros_like(shifted(grad, 0))
        positions = stride * windows.positions(total.shape, axis) + phase
        for shift in shifts:
            if 0 <= stride * shift + phase + before < window:
                total += jnp.where(shifted(winners, shift) == positions, shifted(grad, shift), 0.0)
        return total

    def add_shift(step: Any, total: jax.Array) -> jax.Array:
        winner, each = (jnp.expand_dims(shifted(x, shifts[0] + step), axis) for x in (winners, grad))
        positions = stride * windows.positions(total.shape, axis - 1) + windows.positions(total.shape, axis)
        return total + jnp.where(winner == positions, each, 0.0)

    if max(window, stride) <= UNROLLED_STEPS:
        # XLA turns this into loops that vectorise and do not search for winners again for every phase.
        by_phase = jnp.stack([at_phase(phase) for phase in range(stride)], axis)
    else:
        nothing = jnp.expand_dims(jnp.zeros_like(shifted(grad, 0)), axis)
        by_phase = _repeat(0, len(shifts), add_shift, jnp.repeat(nothing, stride, axis))
    shape = list(grad.shape)
    shape[axis] = groups * stride
    return jax.lax.slice_in_dim(by_phase.reshape(shape), 0, extent, axis=axis)


def _at_least_0(size: int, *, limit: int) -> int:
    """Returns a size of padding, or 0 if negative; a symbolic size is replaced by its upper limit."""
    return limit if jax.export.is_symbolic_dim(size) else max(size, 0)


def _padded(x: jax.Array, axis: int, before: int, behind: int, value: float) -> jax.Array:
    widths = [(0, 0, 0)] * x.ndim
    widths[axis] = (before, behind, 0)
    return jax.lax.pad(x, jnp.asarray(value, x.dtype), widths)


def _repeat(start: int, stop: int, step: Callable[[Any, Any], Any], state: Any) -> Any:
    """Applies `state = step(i, state)` for i from start to stop, unrolled, or as a loop if there are many steps."""
    if stop - start > UNROLLED_STEPS:
        return jax.lax.fori_loop(start, stop, step, state)
    return functools.reduce(lambda state, i: step(i, state), range(start, stop), state)


def _linearize(operands: Sequence[jax.Array], active: Active, **params: Any) -> tuple[Arrays, Arrays]:
    (x,) = operands
    return MAX_POOL(x, **params), (x,)


def _tangent(residuals: Arrays, tangents: Arrays, active: Active, **params: Any) -> Arrays:
    return MAX_POOL_AT(*residuals, *tangents, **params)


def _vjp(residuals: Arrays, cotangents: Arrays, active: Active, **params: Any) -> Arrays:
    return MAX_POOL_BACKWARD(*residuals, *cotangents, **params)


# The other two operators are linear in their second operand and transposes of each other. They read only the order of
# the elements of x, so its own derivative is zero.


def _backward_tangent(residuals: Arrays, tangents: Any, active: Active, **params: Any) -> Arrays:
    x, _, result = residuals
    _, grad_dot = tangents
    return (jnp.zeros_like(result),) if grad_dot is None else MAX_POOL_BACKWARD(x, grad_dot, **params)


def _backward_vjp(residuals: Arrays, cotangents: Arrays, active: Active, **params: Any) -> tuple[Any, ...]:
    x, *_ = residuals
    _, has_grad = active
    return jnp.zeros_like(x), *(MAX_POOL_AT(x, *cotangents, **params) if has_grad else (None,))


def _at_tangent(residuals: Arrays, tangents: Any, active: Active, **params: Any) -> Arrays:
    x, _, result = residuals
    _, image_dot = tangents
    return (jnp.zeros_like(result),) if image_dot is None else MAX_POOL_AT(x, image_dot, **params)


def _at_vjp(residuals: Arrays, cotangents: Arrays, active: Active, **params: Any) -> tuple[Any, ...]:
    x, *_ = residuals
    _, has_image = active
    return jnp.zeros_like(x), *(MAX_POOL_BACKWARD(x, *cotangents, **params) if has_image else (None,))


MAX_POOL = Operator(
    "max_pool",
    "... d h w c -> ... d_out h_out w_out c",
    _check,
    _maxima,
    Derivative(_vjp, _tangent, _linearize, residuals="... d h w c"),
    kernels=(tpu_value.KERNEL,),
    forms=(Form("xla_one_pass", frozenset({"tpu"}), _maxima_in_one_pass, _refuses_one_pass),),
)
MAX_POOL_BACKWARD = Operator(
    "max_pool_backward",
    "... d h w c, ... d_out h_out w_out c -> ... d h w c",
    _check_backward,
    _backward,
    Derivative(_backward_vjp, _backward_tangent),
    kernels=(tpu.KERNEL, gpu.KERNEL),
)
MAX_POOL_AT = Operator(
    "max_pool_at",
    "... d h w c, ... d h w c -> ... d_out h_out w_out c",
    _check_at,
    _at,
    Derivative(_at_vjp, _at_tangent),
)
