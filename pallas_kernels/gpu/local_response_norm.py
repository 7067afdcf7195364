"""Local response normalization on NVIDIA GPUs from Hopper on, with channels before space: one read, one write.

A thread block takes a run of pixels of one image and walks through the channels, a few at a time. Earlier channels stay
in registers while a window still needs them, so that every element is loaded once. The loads of one step do not wait
for each other.

Functions import `mosaic_gpu` themselves: it takes a third of a second, which only those who lower for a GPU should pay.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels._jax_private import interpret_gpu_params
from pallas_kernels.gpu import hopper
from pallas_kernels.gpu.hopper import WARPGROUP
from pallas_kernels.kernel import Kernel, Kind, dtype_names
from pallas_kernels.local_response_norm_windows import reach, refusal

_MAX_WINDOW = 16  # channels: a thread keeps up to three numbers for each of a window's channels in registers
_CONFIGS = ({"width": 128, "channels": 8}, {"width": 128, "channels": 4}, {"width": 256, "channels": 4})
_CHANNELS = -4


class Pixels:
    """Run of pixels of one image, inside a kernel."""

    def __init__(self, image: jax.Array, start: jax.Array, width: int, channels: int, pin_layouts: bool) -> None:
        """Pins layouts if asked to; the interpreter of jax 0.10 has none to pin."""
        self.image, self.columns, self.channels = image, pl.ds(start, width), channels
        self._width, self._layout = width, None
        self._offsets = lax.broadcasted_iota(jnp.int32, (width,), 0)
        if pin_layouts:
            from jax.experimental.pallas import mosaic_gpu as plgpu

            # A run may start at any pixel, so vector accesses would not be aligned.
            self._layout = plgpu.Layout.WG_STRIDED((width,), vec_size=1)
            self._offsets = plgpu.broadcasted_iota(jnp.int32, (width,), 0, layout=self._layout)

    def _pinned(self, values):
        from jax.experimental.pallas import mosaic_gpu as plgpu

        return values if self._layout is None else plgpu.layout_cast(values, self._layout)

    def zeros(self):
        """Returns the values of channels outside of the image."""
        return self._pinned(jnp.zeros((self._width,), jnp.float32))

    def load(self, ref, channel):
        """Loads one channel in float32; zeros beyond the last one."""
        values = self._pinned(ref[self.image, jnp.minimum(channel, self.channels - 1), self.columns])
        # Compared element by element, as Mosaic cannot broadcast a scalar condition.
        limit = jnp.where(channel < self.channels, self._width, 0)
        return jnp.where(self._offsets < limit, values.astype(jnp.float32), 0.0)

    def store(self, ref, channel, values):
        """Stores one channel."""
        ref[self.image, channel, self.columns] = values.astype(ref.dtype)


def _sums(values, window):
    """Sums each run of `window` values."""
    return [functools.reduce(jnp.add, values[i : i + window]) for i in range(len(values) - window + 1)]


def _normalize(pixels, x_gmem, y_gmem, *, group, n, alpha, beta, k):
    before, after = reach(n, pixels.channels)

    def step(i, carried):
        # Carried: the squares of channels from `first - before` on, and x of channels from `first` on, up to
        # `first + after - 1` each.
        squares, ahead = carried
        first = i * group
        fresh = [pixels.load(x_gmem, first + after + j) for j in range(group)]
        ahead, squares = [*ahead, *fresh], [*squares, *(x * x for x in fresh)]
        for j, total in enumerate(_sums(squares, before + after + 1)):
            s = k + alpha / n * total
            pixels.store(y_gmem, first + j, ahead[j] * jnp.exp(-beta * jnp.log(s)))
        return tuple(squares[group:]), tuple(ahead[group:])

    ahead = [pixels.load(x_gmem, channel) for channel in range(after)]
    squares = [*[pixels.zeros()] * before, *(x * x for x in ahead)]
    lax.fori_loop(0, pixels.channels // group, step, (tuple(squares), tuple(ahead)))


def _differentiate(pixels, x_gmem, grad_gmem, dx_gmem, *, group, n, alpha, beta, k):
    before, after = reach(n, pixels.channels)
    window = before + after + 1

    def shares(x, total, channel):
        """Returns the part of a channel's gradient that stays there, and the part that its neighbours share."""
        s = k + alpha / n * total
        scaled = pixels.load(grad_gmem, channel) * jnp.exp(-beta * jnp.log(s))
        return scaled, scaled * x / s

    def step(i, carried):
        # Carried: x of the next channels from `first` on; the shared parts of channels from `first - after` to
        # `first + before - 1`; and the own parts of channels from `first` to `first + before - 1`.
        ahead, shared_parts, own_parts = carried
        first = i * group
        fresh = [pixels.load(x_gmem, first + window - 1 + j) for j in range(group)]
        ahead = [*ahead, *fresh]
        totals = _sums([x * x for x in ahead], window)
        pairs = [shares(ahead[before + j], totals[j], first + before + j) for j in range(group)]
        own_parts = [*own_parts, *(pair[0] for pair in pairs)]
        shared_parts = [*shared_parts, *(pair[1] for pair in pairs)]
        # Channel i is in the window of channel j if j is in the mirror image of i's window.
        for j, shared in enumerate(_sums(shared_parts, window)):
            pixels.store(dx_gmem, first + j, own_parts[j] - (2 * alpha * beta / n) * ahead[j] * shared)
        return tuple(ahead[group:]), tuple(shared_parts[group:]), tuple(own_parts[group:])

    ahead = [pixels.load(x_gmem, channel) for channel in range(window - 1)]
    squares = [*[pixels.zeros()] * before, *(x * x for x in ahead)]
    pairs = [shares(ahead[j], total, j) for j, total in enumerate(_sums(squares, window)[:before])]
    shared_parts = [*[pixels.zeros()] * after, *(pair[1] for pair in pairs)]
    carried = tuple(ahead), tuple(shared_parts), tuple(pair[0] for pair in pairs)
    lax.fori_loop(0, pixels.channels // group, step, carried)


def _kernel(*refs, body, width, group, pin_layouts, **params):
    images, channels, pixels = refs[0].shape
    image, run = hopper.place((images, pixels // width))

    def normalize(start):
        body(Pixels(image, start, width, channels, pin_layouts), *refs, group=group, **params)

    normalize(run * width)
    if pixels % width:
        # Accesses cannot be masked: the last block covers the rest with a run that overlaps its first one, where it
        # stores the same values.
        pl.when(run == pixels // width - 1)(lambda: normalize(pixels - width))


def _launch(body, name, *operands, config, interpret, **params):
    """Runs a body over all pixels; the result has the last operand's shape and dtype."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    *batch, channels, depth, height, columns = operands[0].shape
    view = (math.prod(batch), channels, depth * height * columns)
    group = max(size for size in range(1, config["channels"] + 1) if channels % size == 0)
    (result,) = pl.kernel(
        functools.partial(_kernel, body=body, width=config["width"], group=group, pin_layouts=not interpret, **params),
        out_type=[jax.ShapeDtypeStruct(view, operands[-1].dtype)],
        mesh=plgpu.Mesh(**hopper.grid(view[0], view[2] // config["width"])),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        interpret=interpret_gpu_params() if interpret is True else interpret,
        name=name,
    )(*(operand.reshape(view) for operand in operands))
    return (result.reshape(operands[0].shape),)


def run(x, *, config, interpret=False, **params):
    """Launches the kernel; see `pallas_kernels.kernel.Kernel.run`."""
    return _launch(_normalize, "local_response_norm", x, config=config, interpret=interpret, **params)


def run_backward(x, grad, *, config, interpret=False, **params):
    """Launches the kernel; see `pallas_kernels.kernel.Kernel.run`."""
    return _launch(
        _differentiate, "local_response_norm_backward", x, grad, config=config, interpret=interpret, **params
    )


def refuses(hardware, x, *grad, n, alpha, k, **_) -> str | None:
    """Says why the kernels cannot run; see `pallas_kernels.kernel.Kernel.refuses`."""
    operands = dict(zip(("x", "grad"), (x, *grad), strict=False))
    if reason := hopper.refusal(hardware, **operands) or refusal(x, alpha=alpha, k=k):
        return reason
    if n > _MAX_WINDOW:
        return f"the kernels keep windows in registers, of {_MAX_WINDOW} channels at most; n is {n}"
    pixels = math.prod(x.shape[_CHANNELS + 1 :])
    if pixels < WARPGROUP:
        return f"a warpgroup takes {WARPGROUP} pixels that lie side by side; behind the channels of x lie {pixels}"
    return None


def configs(hardware, x, *operands, **_):
    """Lists runs of pixels worth trying; see `pallas_kernels.kernel.Kernel.configs`."""
    return [config for config in _CONFIGS if config["width"] <= math.prod(x.shape[_CHANNELS + 1 :])]


def kind(hardware, x, *grad, n, beta, **_) -> Kind:
    """Returns what makes cases alike; see `pallas_kernels.kernel.Kernel.kind`."""
    channels, pixels = x.shape[_CHANNELS], math.prod(x.shape[_CHANNELS + 1 :])
    sizes = math.prod(x.shape) // (channels * pixels), channels, pixels
    return Kind(f"{dtype_names(x, *grad)}, n={n}, beta={beta:g}", sizes)


KERNEL = Kernel(
    name="mosaic_gpu", platform="cuda", run=run, refuses=refuses, configs=configs, kind=kind, interpreter_is_pure=False
)
BACKWARD_KERNEL = dataclasses.replace(KERNEL, run=run_backward)
