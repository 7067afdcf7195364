"""Local response normalization on TPU, forward and backward: each image passes through VMEM once.

A block holds all channels of some pixels. XLA keeps the channels in lanes, in sublanes, or before both, wherever the
array pads least. The kernel takes the array as it is, and shifts a block along that axis to add neighbours.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.kernel import Kernel
from pallas_kernels.local_response_norm_windows import reach, refusal
from pallas_kernels.tpu.stored_order import LANES, round_up, stored_order
from pallas_kernels.tpu.streaming_cost import streaming_cost

_ROWS = 16  # of a register of 16-bit values; a register of 32-bit values has eight
_DTYPES = ("float32", "bfloat16")
# VMEM, in float32: three blocks in the backward kernel (x, the gradient, dx), two buffers each, so
# 3 * 2 * 4 * block_elements bytes: 6 MiB for the largest. That leaves 10 MiB of the 16 MiB that XLA grants for the
# values computed from them, 1 MiB each.
_CONFIGS = ({"block_elements": 65536}, {"block_elements": 131072}, {"block_elements": 262144})
_CHANNELS = -4
# Bytes a second of HBM for each TensorCore, beyond which the forward kernel is bound by its vector unit on bfloat16: it
# takes 1.4 of HBM's time on v6e (1.64e12), and 2.1 on v7x (3.7e12), where XLA's own program takes 2.0.
_MOST_RATE = 2e12


class View(NamedTuple):
    """Images as they are stored.

    Attributes:
      order: the axes of the images that are longer than 1, in the order in which they are stored.
      shape: five axes: what comes before the channels, the channels or 1, what lies between, rows and columns.
      channel_axis: 1, 3 or 4.
    """

    order: tuple[int, ...]
    shape: tuple[int, ...]
    channel_axis: int

    def of(self, x: jax.Array) -> jax.Array:
        """Images in this view."""
        rest = (axis for axis in range(x.ndim) if axis not in self.order)
        return jnp.transpose(x, (*rest, *self.order)).reshape(self.shape)

    def back(self, x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """The inverse of `of`, for images of this shape."""
        rest = [axis for axis in range(len(shape)) if axis not in self.order]
        order = [*rest, *self.order]
        return jnp.transpose(x.reshape([shape[axis] for axis in order]), [order.index(i) for i in range(len(shape))])


def view_of(shape):
    """The order in which XLA stores images (..., c, d, h, w)."""
    channels = len(shape) + _CHANNELS
    # Axes of size 1 take no space. Two axes are needed all the same, for sublanes and lanes.
    axes = [axis for axis, size in enumerate(shape) if size > 1 or axis == channels]
    axes = axes if len(axes) > 1 else [next(axis for axis in range(len(shape)) if axis != channels), *axes]
    order = tuple(axes[i] for i in stored_order(tuple(shape[axis] for axis in axes)))
    sizes = [shape[axis] for axis in order]
    place = order.index(channels)
    if place < len(order) - 2:
        untiled = (math.prod(sizes[:place]), sizes[place], math.prod(sizes[place + 1 : -2]))
        return View(order, (*untiled, *sizes[-2:]), 1)
    return View(order, (math.prod(sizes[:-2]), 1, 1, *sizes[-2:]), place - len(order) + 5)


def block_of(view, block_elements):
    """A block of at most `block_elements` padded elements with all channels; None if it cannot be that small."""
    block = [min(size, least) for size, least in zip(view.shape, (1, 1, 1, _ROWS, LANES), strict=True)]
    block[view.channel_axis] = view.shape[view.channel_axis]
    # Grown from the minor axis outwards, as longer runs in HBM are copied faster.
    for axis, unit in ((4, LANES), (3, _ROWS), (2, 1), (0, 1)):
        if axis != view.channel_axis:
            others = _padded_elements([1 if i == axis else size for i, size in enumerate(block)]) // (
                {4: LANES, 3: _ROWS}.get(axis, 1)
            )
            block[axis] = max(block[axis], min(view.shape[axis], block_elements // others // unit * unit))
    return tuple(block) if _padded_elements(block) <= block_elements else None


def _padded_elements(block):
    *untiled, rows, columns = block
    return math.prod(untiled) * round_up(rows, _ROWS) * round_up(columns, LANES)


def _shifted(x, steps, axis):
    """`x[i + steps]`, with zeros beyond the edge."""
    if steps == 0:
        return x
    size, zeros = x.shape[axis], list(x.shape)
    zeros[axis] = abs(steps)
    edge = jnp.zeros(zeros, x.dtype)
    if steps > 0:
        return jnp.concatenate([lax.slice_in_dim(x, steps, size, axis=axis), edge], axis)
    return jnp.concatenate([edge, lax.slice_in_dim(x, 0, size + steps, axis=axis)], axis)


def _run_of(x, count, direction, axis):
    """The sum of `x[i + direction * step]` for steps below count, by doubling: about log2(count) shifts each way."""
    total, covered, width = None, 0, 1
    while covered < count:
        if count & width:
            piece = _shifted(x, direction * covered, axis)
            total = piece if total is None else total + piece
            covered += width
        if covered < count:
            x = x + _shifted(x, direction * width, axis)
            width *= 2
    return total


def _neighbours(x, before, after, axis):
    total = _run_of(x, after + 1, 1, axis)
    return total + _shifted(_run_of(x, before, -1, axis), -1, axis) if before else total


def _normalizer(x, channel_axis, n, alpha, k):
    before, after = reach(n, x.shape[channel_axis])
    return k + alpha / n * _neighbours(x * x, before, after, channel_axis)


def _kernel(x_ref, y_ref, *, channel_axis, n, alpha, beta, k):
    x = x_ref[...].astype(jnp.float32)
    s = _normalizer(x, channel_axis, n, alpha, k)
    # s^-beta: s is positive, as `refusal` requires alpha >= 0 and k > 0.
    y_ref[...] = (x * jnp.exp(-beta * jnp.log(s))).astype(y_ref.dtype)


def _backward_kernel(x_ref, grad_ref, dx_ref, *, channel_axis, n, alpha, beta, k):
    x = x_ref[...].astype(jnp.float32)
    before, after = reach(n, x.shape[channel_axis])
    s = _normalizer(x, channel_axis, n, alpha, k)
    scaled = grad_ref[...].astype(jnp.float32) * jnp.exp(-beta * jnp.log(s))
    # Channel i is in the window of channel j if j is in the mirror image of i's window: before and after swap.
    shared = _neighbours(scaled * x / s, after, before, channel_axis)
    dx_ref[...] = (scaled - (2 * alpha * beta / n) * x * shared).astype(dx_ref.dtype)


def _launch(body, name, *operands, config, interpret, **params):
    """Runs a body over blocks; the result has the last operand's shape and dtype."""
    from jax.experimental.pallas import tpu as pltpu  # here, because only lowering for a TPU needs its 0.2 s

    view = view_of(operands[0].shape)
    block = block_of(view, config["block_elements"])
    # Beyond the edges of the other axes a block holds anything, but no pixel reads another.
    spec = pl.BlockSpec(block, lambda *indices: indices)
    result = jax.ShapeDtypeStruct(view.shape, operands[-1].dtype)
    y = pl.pallas_call(
        functools.partial(body, channel_axis=view.channel_axis, **params),
        name=name,
        grid=tuple(map(pl.cdiv, view.shape, block)),
        in_specs=[spec] * len(operands),
        out_specs=spec,
        out_shape=result,
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",) * 5),
        # Sums over a window by doubling take some ten shifts and additions; a power is a logarithm and an exponential.
        cost_estimate=streaming_cost((*operands, result), result.size, flops=20 * len(operands), transcendentals=2),
        interpret=interpret,
    )(*map(view.of, operands))
    return (view.back(y, operands[0].shape),)


def run(x, *, config, interpret=False, **params):
    """Launches the kernel; see `pallas_kernels.kernel.Kernel.run`."""
    return _launch(_kernel, "local_response_norm", x, config=config, interpret=interpret, **params)


def run_backward(x, grad, *, config, interpret=False, **params):
    """Launches the kernel; see `pallas_kernels.kernel.Kernel.run`."""
    return _launch(
        _backward_kernel, "local_response_norm_backward", x, grad, config=config, interpret=interpret, **params
    )


def refuses(hardware, x, *grad, alpha, k, **_) -> str | None:
    """Why the kernels cannot run; see `pallas_kernels.kernel.Kernel.refuses`."""
    for name, operand in zip(("x", "grad"), (x, *grad), strict=False):
        if jnp.dtype(operand.dtype).name not in _DTYPES:
            return f"Mosaic TPU computes on {' and '.join(_DTYPES)}; {name} is {jnp.dtype(operand.dtype).name}"
    if reason := refusal(x, alpha=alpha, k=k):
        return reason
    is_fast = (hardware.memory_bytes_per_s or 0) / (hardware.cores or 1) > _MOST_RATE
    if is_fast and not grad and jnp.dtype(x.dtype).itemsize == 2:
        return f"{hardware.name} reads HBM faster than its vector unit computes on bfloat16 in float32; XLA's is faster"
    if not configs(hardware, x):
        return f"VMEM holds no block with all {x.shape[_CHANNELS]} channels of some pixels"
    return None


def configs(hardware, x, *operands, **_):
    """Block sizes worth trying; see `pallas_kernels.kernel.Kernel.configs`."""
    view = view_of(x.shape)
    return [config for config in _CONFIGS if block_of(view, config["block_elements"]) is not None]


KERNEL = Kernel(name="mosaic_tpu", platform="tpu", run=run, refuses=refuses, configs=configs)
BACKWARD_KERNEL = Kernel(name="mosaic_tpu", platform="tpu", run=run_backward, refuses=refuses, configs=configs)
