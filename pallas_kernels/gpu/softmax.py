"""Softmax on NVIDIA GPUs from Hopper on: each group is read once if registers hold it, else twice.

If a group's elements are contiguous, a thread block has one group, and its threads lie along it. If other axes come
after the group's in memory, a thread block has a run of neighbouring groups, one or a few for each thread. Either way
accesses are contiguous and nothing is transposed. For a group that is too long for registers, each thread keeps the
maximum and the sum of the elements that it saw, and a new maximum rescales the sum. The second read mostly finds the
cache.

Functions import `mosaic_gpu` themselves: it takes a third of a second, which only those who lower for a GPU should pay.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels._jax_private import interpret_gpu_params
from pallas_kernels.gpu import hopper
from pallas_kernels.gpu.hopper import VECTOR, WARPGROUP
from pallas_kernels.kernel import Kernel
from pallas_kernels.softmax_groups import View, refusal

_HELD = 64  # values of all operands that a thread holds at most: each takes one of its 255 registers
_WIDTHS = (512, 256, 128)


class Tiling(NamedTuple):
    """How thread blocks share a view.

    Attributes:
      view: of the groups.
      width: elements of one access of a thread block, along the view's last axis.
      operands: the number of arrays that are read.
    """

    view: View
    width: int
    operands: int

    @property
    def along_group(self) -> bool:
        """Whether a block has one group, and its threads lie along it."""
        return self.view.axis == 2

    @property
    def vector(self) -> int:
        """Elements of one access of a thread."""
        return min(VECTOR, self.width // WARPGROUP) if self.view.shape[2] % VECTOR == 0 else 1

    @property
    def runs(self) -> int:
        """The thread blocks along the view's last axis; the last one may have two runs of groups."""
        return 1 if self.along_group else self.view.shape[2] // self.width

    @property
    def blocks(self) -> int:
        """The number of thread blocks."""
        return self.view.shape[1] if self.along_group else self.view.shape[0] * self.runs

    @property
    def steps(self) -> int:
        """The number of accesses that cover a group."""
        return pl.cdiv(self.view.size, self.width) if self.along_group else self.view.size

    @property
    def is_held(self) -> bool:
        """Whether registers hold a thread block's groups."""
        return self.operands * self.steps * self.width <= _HELD * WARPGROUP


def tiling_of(view, max_width, operands=1):
    """How thread blocks share a view; None if no access fits its last axis."""
    extent = view.shape[2]
    if extent < WARPGROUP:
        return None
    return Tiling(view, min(max_width, 1 << (extent.bit_length() - 1)), operands)


class Part:
    """Inside a kernel, the groups at hand: one, or a run of neighbours that begins at `start`."""

    def __init__(self, tiling: Tiling, outer, start, pin_layouts: bool) -> None:
        """The interpreter of jax 0.10 has no layouts to pin."""
        from jax.experimental.pallas import mosaic_gpu as plgpu

        self.tiling, self._outer, self._start = tiling, outer, start
        layout = plgpu.Layout.WG_STRIDED((tiling.width,), vec_size=tiling.vector)
        self._layout = layout if pin_layouts else None

    def _pinned(self, values):
        from jax.experimental.pallas import mosaic_gpu as plgpu

        return values if self._layout is None else plgpu.layout_cast(values, self._layout)

    def _first(self, step):
        # Accesses cannot be masked: if they do not divide the group, the last one overlaps the one before.
        return jnp.minimum(step * self.tiling.width, self.tiling.view.size - self.tiling.width)

    def _index(self, step):
        if self.tiling.along_group:
            return 0, self._outer, pl.ds(self._first(step), self.tiling.width)
        return self._outer, step, pl.ds(self._start, self.tiling.width)

    def full(self, value):
        """One access of this value."""
        return self._pinned(jnp.full((self.tiling.width,), value, jnp.float32))

    def load(self, ref, step):
        """One access, in float32."""
        return self._pinned(ref[self._index(step)]).astype(jnp.float32)

    def store(self, ref, step, values):
        """Stores one access; overlapping ones store the same values."""
        ref[self._index(step)] = values.astype(ref.dtype)

    def new(self, step, values):
        """The values of an access, with 0 for elements that the access before already had."""
        from jax.experimental.pallas import mosaic_gpu as plgpu

        width = self.tiling.width
        if not self.tiling.along_group or self.tiling.view.size % width == 0:
            return values
        if self._layout is None:
            offsets = lax.broadcasted_iota(jnp.int32, (width,), 0)
        else:
            offsets = plgpu.broadcasted_iota(jnp.int32, (width,), 0, layout=self._layout)
        return jnp.where(offsets + self._first(step) >= step * width, values, 0.0)

    def maximum(self, values):
        """Completes the maximum of accesses: over threads if they share a group, else each thread has its own."""
        return self._everywhere(jnp.max(values)) if self.tiling.along_group else values

    def total(self, values):
        """Completes the sum of accesses: over threads if they share a group, else each thread has its own."""
        return self._everywhere(jnp.sum(values)) if self.tiling.along_group else values

    def _everywhere(self, value):
        return self._pinned(jnp.broadcast_to(value, (self.tiling.width,)))

    def accumulated(self, step, *initial):
        """Runs `carried = step(i, carried)` for all accesses."""
        return lax.fori_loop(0, self.tiling.steps, step, tuple(map(self.full, initial)))

    def each(self, step):
        """Runs `step(i)` for all accesses."""
        lax.fori_loop(0, self.tiling.steps, lambda i, _: step(i), None)


def _normalized(part, x_gmem, y_gmem, log):
    def stored(step, shifted, exponentials, total):
        part.store(y_gmem, step, shifted - jnp.log(total) if log else exponentials / total)

    # Unrolled, because only names, not a loop's index, can address registers.
    if part.tiling.is_held:
        steps = range(part.tiling.steps)
        x = [part.load(x_gmem, step) for step in steps]
        maximum = part.maximum(functools.reduce(jnp.maximum, x))
        shifted = [values - maximum for values in x]
        exponentials = list(map(jnp.exp, shifted))
        total = part.total(sum(map(part.new, steps, exponentials)))
        for step in steps:
            stored(step, shifted[step], exponentials[step], total)
        return

    # Each element of an access keeps a maximum and a sum of its own; threads meet only once, after the last access.
    def count(step, known):
        x, (old, total) = part.load(x_gmem, step), known
        new = jnp.maximum(old, x)
        shift = _finite(new)
        return new, total * jnp.exp(old - shift) + part.new(step, jnp.exp(x - shift))

    # Two numbers for each element of an access, 2 * width / 128 registers, however long the group.
    maxima, totals = part.accumulated(count, -math.inf, 0.0)
    shift = _finite(part.maximum(maxima))
    total = part.total(totals * jnp.exp(maxima - shift))

    def write(step):
        shifted = part.load(x_gmem, step) - shift
        stored(step, shifted, jnp.exp(shifted), total)

    part.each(write)


def _finite(maximum):
    """0 in place of -inf, whose difference with -inf would be NaN, though a finite value may still follow."""
    return jnp.where(maximum == -math.inf, 0.0, maximum)


def _kernel(*refs, body, tiling, log, pin_layouts):
    block = lax.axis_index("block")
    if tiling.along_group:
        body(Part(tiling, block, 0, pin_layouts), *refs, log)
        return
    outer, run = lax.div(block, tiling.runs), lax.rem(block, tiling.runs)
    body(Part(tiling, outer, run * tiling.width, pin_layouts), *refs, log)
    inner = tiling.view.shape[2]
    if inner % tiling.width:
        # The rest is shorter than an access, so the last block takes a second run that repeats some of its groups.
        pl.when(run == tiling.runs - 1)(
            lambda: body(Part(tiling, outer, inner - tiling.width, pin_layouts), *refs, log)
        )


def launch(body, name, operands, log, groups, config, interpret):
    """Runs `body(part, *refs, log)` on all parts; its refs are the operands and a result like the last of them."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    view = View.in_memory(groups, operands[-1].shape)
    tiling = tiling_of(view, config["width"], len(operands))
    (y,) = pl.kernel(
        functools.partial(_kernel, body=body, tiling=tiling, log=log, pin_layouts=not interpret),
        out_type=[jax.ShapeDtypeStruct(view.shape, operands[-1].dtype)],
        # One axis: blocks are numbered along the last axis of the view first, so neighbours read neighbouring memory.
        mesh=plgpu.Mesh(grid=(tiling.blocks,), grid_names=("block",)),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        interpret=interpret_gpu_params() if interpret is True else interpret,
        name=name,
    )(*map(view.to_view, operands))
    return (view.from_view(y, operands[-1].shape),)


def run(x, *, log, groups, config, interpret=False):
    """Launches the kernel; see `pallas_kernels.kernel.Kernel.run`."""
    return launch(_normalized, "softmax", [x], log, groups, config, interpret)


def refuses(hardware, *operands, log, groups) -> str | None:
    """Why the kernel cannot run; see `pallas_kernels.kernel.Kernel.refuses`."""
    names = ("y", "grad") if len(operands) > 1 else ("x",)
    shape = operands[-1].shape
    if reason := hopper.refusal(hardware, **dict(zip(names, operands, strict=True))) or refusal(operands[-1]):
        return reason
    view = View.in_memory(groups, shape)
    if tiling_of(view, WARPGROUP) is None:
        return f"a warpgroup reads {WARPGROUP} elements at a time; the last axis in memory has {view.shape[2]}"
    return None


def configs(hardware, *operands, log, groups):
    """Widths worth trying; see `pallas_kernels.kernel.Kernel.configs`."""
    # A thread with neighbouring groups holds width / 128 values for each element of a group: narrow runs hold longer
    # groups, so they come first.
    widths = _WIDTHS if View.in_memory(groups, operands[-1].shape).axis == 2 else _WIDTHS[::-1]
    return [{"width": width} for width in widths]


KERNEL = Kernel(
    name="mosaic_gpu", platform="cuda", run=run, refuses=refuses, configs=configs, interpreter_is_pure=False
)
