"""Softmax on NVIDIA GPUs from Hopper on: each group is read once if a multiprocessor can hold it, else twice.

If a group's elements are contiguous, a thread block has one group, and its threads lie along it. If other axes come
after the group's in memory, a thread block has a run of neighbouring groups, one or a few for each thread. Either way
accesses are contiguous and nothing is transposed.

Registers hold a group, or its beginning. Of a contiguous group that is too long for one warpgroup, up to four hold a
share each and meet through shared memory for the maximum and the sum; what is left goes to shared memory, if there is
room for all of it. So 32000 elements of float32 stay in registers, and 128256 of bfloat16 in both. Otherwise what is
left is read again: each thread keeps the maximum and the sum of the elements that it saw, and a new maximum rescales
the sum.

Functions import `mosaic_gpu` themselves: it takes a third of a second, which only those who lower for a GPU should pay.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels._jax_private import interpret_gpu_params
from pallas_kernels.gpu import hopper
from pallas_kernels.gpu.hopper import SHARED_BYTES, VECTOR, WARPGROUP
from pallas_kernels.kernel import Kernel, Kind, dtype_names
from pallas_kernels.softmax_groups import View, refusal

# Values of all operands that a thread holds at most, and how many fewer for each operand if others pass through its
# registers in loops, which the compiler unrolls. Four warpgroups leave a thread 128 registers.
_HELD = 64
_PASSING = 16
_AHEAD_ELEMENTS = 2048  # of all operands, that a warpgroup loads before it uses any
_WARPGROUPS = (1, 2, 4)
_ALIGNED = 64  # elements: the shares of warpgroups begin with a cache line, even of 16-bit elements
_REDUCTION_BYTES = 4096  # and the barriers
_WIDTHS = (512, 256, 128)


class Tiling(NamedTuple):
    """Tiling of a view among thread blocks.

    Attributes:
      view: of the groups.
      width: elements of one access of a warpgroup, along the view's last axis.
      dtypes: of the arrays that are read.
      warpgroups: of a thread block.
      held_steps: the accesses, from the first one on, whose values stay in registers.
      kept_steps: the accesses after those whose values stay in shared memory.
    """

    view: View
    width: int
    dtypes: tuple[Any, ...]
    warpgroups: int = 1
    held_steps: int = 0
    kept_steps: int = 0

    @property
    def along_group(self) -> bool:
        """Tells whether a block has one group, and its threads lie along it."""
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
    def share(self) -> int:
        """The elements of a group that each warpgroup has; the last one has what is left, or as many."""
        size, count = self.view.size, self.warpgroups
        return size if count == 1 else _ALIGNED * pl.cdiv(size, _ALIGNED * count)

    @property
    def last_share(self) -> int:
        """The elements of a group that the last warpgroup has."""
        return self.view.size - (self.warpgroups - 1) * self.share

    @property
    def steps(self) -> int:
        """The number of accesses that cover a share."""
        return pl.cdiv(self.share, self.width) if self.along_group else self.view.size

    @property
    def shared_bytes(self) -> int:
        """The bytes of several warpgroups: accesses, partial maxima and sums, and the place of Mosaic's reductions."""
        accesses = self.kept_steps * sum(dtype.itemsize for dtype in self.dtypes) + 2 * 4
        return self.warpgroups * self.width * accesses + _REDUCTION_BYTES

    @property
    def is_read_once(self) -> bool:
        """Tells whether nothing is read from device memory a second time."""
        return self.held_steps + self.kept_steps == self.steps


def tiling_of(view, max_width, dtypes):
    """Returns how thread blocks share a view; None if no access fits its last axis."""
    extent = view.shape[2]
    if extent < WARPGROUP:
        return None
    dtypes = tuple(dtypes)
    alone = Tiling(view, min(max_width, 1 << (extent.bit_length() - 1)), dtypes)
    access = len(dtypes) * alone.width // WARPGROUP  # registers
    splits = [alone._replace(warpgroups=count) for count in (_WARPGROUPS if alone.along_group else _WARPGROUPS[:1])]
    splits = [tiling for tiling in splits if tiling.last_share >= tiling.width or tiling.warpgroups == 1]
    for tiling in splits:
        if tiling.steps * access <= _HELD:
            return tiling._replace(held_steps=tiling.steps)
    held_steps = max(0, _HELD - len(dtypes) * _PASSING) // access
    widest = splits[-1]
    widest = widest._replace(held_steps=held_steps, kept_steps=widest.steps - held_steps)
    return widest if widest.warpgroups > 1 and widest.shared_bytes <= SHARED_BYTES else alone


class Part:
    """Groups at hand inside a kernel: one, or a run of neighbours that begins at `start`.

    Several warpgroups with one group have a part each: `warpgroup` is whose this is, `scratch` where they meet.
    """

    def __init__(self, tiling: Tiling, outer, start, pin_layouts: bool, warpgroup=0, scratch=None) -> None:
        """Pins layouts if asked to; the interpreter of jax 0.10 has none to pin."""
        from jax.experimental.pallas import mosaic_gpu as plgpu

        self.tiling, self._outer, self._start = tiling, outer, start
        self._warpgroup, self._scratch = warpgroup, scratch
        layout = plgpu.Layout.WG_STRIDED((tiling.width,), vec_size=tiling.vector)
        self._layout = layout if pin_layouts else None

    def _pinned(self, values):
        from jax.experimental.pallas import mosaic_gpu as plgpu

        return values if self._layout is None else plgpu.layout_cast(values, self._layout)

    def _offset(self, step):
        # Accesses cannot be masked: if they do not divide the share, the last ones overlap the ones before.
        tiling = self.tiling
        if isinstance(step, int) and (step + 1) * tiling.width <= tiling.last_share:
            return self._warpgroup * tiling.share + step * tiling.width
        # Counted in accesses of a thread, so that the compiler sees that they are aligned.
        share, size, width = (n // tiling.vector for n in (tiling.share, tiling.view.size, tiling.width))
        base = self._warpgroup * share
        length = jnp.minimum(share, size - base) if tiling.last_share < tiling.share else share
        return tiling.vector * (base + jnp.minimum(step * width, length - width))

    def _index(self, step):
        if self.tiling.along_group:
            return 0, self._outer, pl.ds(self._offset(step), self.tiling.width)
        return self._outer, step, pl.ds(self._start, self.tiling.width)

    def full(self, value):
        """Returns one access of this value."""
        return self._pinned(jnp.full((self.tiling.width,), value, jnp.float32))

    def load(self, refs, step):
        """Loads one access to each array, in float32."""
        return [self._pinned(ref[self._index(step)]).astype(jnp.float32) for ref in refs]

    def held(self, refs):
        """Loads the accesses that registers hold."""
        # Unrolled, because only names, not a loop's index, can address registers.
        return [self.load(refs, step) for step in range(self.tiling.held_steps)]

    def _kept(self, step):
        return [ref.at[self._warpgroup, step - self.tiling.held_steps] for ref in self._scratch.kept]

    def load_and_keep(self, refs, step):
        """Loads one access to each array, and puts it into shared memory if it has room."""
        loaded = [self._pinned(ref[self._index(step)]) for ref in refs]
        if self.tiling.kept_steps:
            for ref, values in zip(self._kept(step), loaded, strict=True):
                ref[...] = values
        return [values.astype(jnp.float32) for values in loaded]

    def load_again(self, refs, step):
        """Loads the same access, from shared memory if it is there."""
        if self.tiling.kept_steps:
            return [self._pinned(ref[...]).astype(jnp.float32) for ref in self._kept(step)]
        return self.load(refs, step)

    def store(self, ref, step, values):
        """Stores one access; overlapping ones store the same values."""
        ref[self._index(step)] = values.astype(ref.dtype)

    def new(self, step, values):
        """Returns the values of an access, with 0 for elements that the access before already had."""
        from jax.experimental.pallas import mosaic_gpu as plgpu

        tiling = self.tiling
        is_new = isinstance(step, int) and (step + 1) * tiling.width <= tiling.last_share
        if not tiling.along_group or is_new or {tiling.share % tiling.width, tiling.last_share % tiling.width} == {0}:
            return values
        if self._layout is None:
            offsets = lax.broadcasted_iota(jnp.int32, (tiling.width,), 0)
        else:
            offsets = plgpu.broadcasted_iota(jnp.int32, (tiling.width,), 0, layout=self._layout)
        first = self._warpgroup * tiling.share + step * tiling.width
        return jnp.where(offsets + self._offset(step) >= first, values, 0.0)

    def maximum(self, values):
        """Completes the maximum of accesses: over threads if they share a group, else each thread has its own."""
        return self._everywhere(jnp.max(self._met(values, 0, jnp.maximum))) if self.tiling.along_group else values

    def total(self, values):
        """Completes the sum of accesses: over threads if they share a group, else each thread has its own."""
        return self._everywhere(jnp.sum(self._met(values, 1, jnp.add))) if self.tiling.along_group else values

    def _met(self, values, meeting, combine):
        """Combines an access of each warpgroup, in their order."""
        from jax.experimental.pallas import mosaic_gpu as plgpu

        if self.tiling.warpgroups == 1:
            return values
        # Mosaic reduces all warpgroups through one place in shared memory. They have the same values there by now, and
        # none comes there for the sum before the meeting that follows its maximum.
        self._scratch.partial[meeting, self._warpgroup] = values
        plgpu.barrier_arrive(self._scratch.barriers.at[meeting])
        plgpu.barrier_wait(self._scratch.barriers.at[meeting])
        partial = [self._scratch.partial.at[meeting, other] for other in range(self.tiling.warpgroups)]
        return functools.reduce(combine, [self._pinned(ref[...]) for ref in partial])

    def _everywhere(self, value):
        return self._pinned(jnp.broadcast_to(value, (self.tiling.width,)))

    def accumulated(self, refs, use, *initial):
        """Runs `carried = use(i, accesses, carried)` for all steps but the held ones; a list of the result, or none."""
        if self.tiling.held_steps == self.tiling.steps:
            return []
        return [self._fold(lambda step: self.load_and_keep(refs, step), use, tuple(map(self.full, initial)))]

    def each(self, refs, held, use):
        """Runs `use(i, *accesses)` for all steps: held ones, and those that are loaded again."""
        for step, accesses in enumerate(held):
            use(step, *accesses)
        self._fold(lambda step: self.load_again(refs, step), lambda step, accesses, _: use(step, *accesses), None)

    def _fold(self, load, use, carry):
        tiling = self.tiling
        ahead = max(1, _AHEAD_ELEMENTS // (tiling.width * len(tiling.dtypes)))
        return hopper.fold(tiling.held_steps, tiling.steps, ahead, load, use, carry)


def _normalized(part, x_gmem, y_gmem, log):
    held = part.held([x_gmem])

    # Each element of an access keeps a maximum and a sum of its own; threads meet only once, after the last access.
    def count(step, loaded, known):
        (x,), (old, total) = loaded, known
        new = jnp.maximum(old, x)
        shift = _finite(new)
        return new, total * jnp.exp(old - shift) + part.new(step, jnp.exp(x - shift))

    # Two numbers for each element of an access, 2 * width / 128 registers, however long the group.
    counted = part.accumulated([x_gmem], count, -math.inf, 0.0)
    shift = _finite(part.maximum(functools.reduce(jnp.maximum, [*(x for (x,) in held), *(m for m, _ in counted)])))
    terms = [part.new(step, jnp.exp(x - shift)) for step, (x,) in enumerate(held)]
    total = part.total(sum([*terms, *(total * jnp.exp(maxima - shift) for maxima, total in counted)]))

    def write(step, x):
        shifted = x - shift
        part.store(y_gmem, step, shifted - jnp.log(total) if log else jnp.exp(shifted) / total)

    part.each([x_gmem], held, write)


def _finite(maximum):
    """Puts 0 in place of -inf, whose difference with -inf would be NaN, though a finite value may still follow."""
    return jnp.where(maximum == -math.inf, 0.0, maximum)


class Scratch(NamedTuple):
    """Shared memory of warpgroups with one group.

    Attributes:
      partial: (2, warpgroups, width), the maxima and the sums of each.
      barriers: one for each of the two meetings.
      kept: for each array, (warpgroups, kept steps, width).
    """

    partial: Any
    barriers: Any
    kept: tuple[Any, ...]


def _with_scratch(tiling, body):
    """Runs `body(warpgroup, scratch)`."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    if tiling.warpgroups == 1:
        body(0, None)
        return
    kept = [(tiling.warpgroups, tiling.kept_steps, tiling.width)] if tiling.kept_steps else []
    pl.run_scoped(
        lambda partial, barriers, *kept: body(lax.axis_index("warpgroup"), Scratch(partial, barriers, kept)),
        plgpu.SMEM((2, tiling.warpgroups, tiling.width), jnp.float32),
        plgpu.Barrier(num_arrivals=tiling.warpgroups, num_barriers=2),
        *(plgpu.SMEM(shape, dtype) for shape in kept for dtype in tiling.dtypes),
        collective_axes="warpgroup",
    )


def _kernel(*refs, body, tiling, log, pin_layouts):
    block = lax.axis_index("block")
    if tiling.along_group:
        _with_scratch(tiling, lambda *whose: body(Part(tiling, block, 0, pin_layouts, *whose), *refs, log))
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
    tiling = tiling_of(view, config["width"], [operand.dtype for operand in operands])
    threads = {"num_threads": tiling.warpgroups, "thread_name": "warpgroup"} if tiling.warpgroups > 1 else {}
    (y,) = pl.kernel(
        functools.partial(_kernel, body=body, tiling=tiling, log=log, pin_layouts=not interpret),
        out_type=[jax.ShapeDtypeStruct(view.shape, operands[-1].dtype)],
        # One axis: blocks are numbered along the last axis of the view first, so neighbours read neighbouring memory.
        mesh=plgpu.Mesh(grid=(tiling.blocks,), grid_names=("block",), **threads),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        interpret=interpret_gpu_params() if interpret is True else interpret,
        name=name,
    )(*map(view.to_view, operands))
    return (view.from_view(y, operands[-1].shape),)


def run(x, *, log, groups, config, interpret=False):
    """Launches the kernel; see `pallas_kernels.kernel.Kernel.run`."""
    return launch(_normalized, "softmax", [x], log, groups, config, interpret)


def refuses(hardware, *operands, log, groups) -> str | None:
    """Says why the kernel cannot run; see `pallas_kernels.kernel.Kernel.refuses`."""
    names = ("y", "grad") if len(operands) > 1 else ("x",)
    shape = operands[-1].shape
    if reason := hopper.refusal(hardware, **dict(zip(names, operands, strict=True))) or refusal(operands[-1]):
        return reason
    view = View.in_memory(groups, shape)
    if view.shape[2] < WARPGROUP:
        return f"a warpgroup reads {WARPGROUP} elements at a time; the last axis in memory has {view.shape[2]}"
    return None


def configs(hardware, *operands, log, groups):
    """Lists widths worth trying; see `pallas_kernels.kernel.Kernel.configs`."""
    # A thread with neighbouring groups holds width / 128 values for each element of a group: narrow runs hold longer
    # groups, so they come first.
    widths = _WIDTHS if View.in_memory(groups, operands[-1].shape).axis == 2 else _WIDTHS[::-1]
    return [{"width": width} for width in widths]


def kind(hardware, *operands, log, groups) -> Kind:
    """Returns what makes cases alike; see `pallas_kernels.kernel.Kernel.kind`."""
    view = View.in_memory(groups, operands[-1].shape)
    (config, *_) = configs(hardware, *operands, log=log, groups=groups)
    tiling = tiling_of(view, config["width"], [operand.dtype for operand in operands])
    given = "last axis" if groups.behind == (0,) else "other axes"
    way = "read once" if tiling.is_read_once else "read twice"
    words = dtype_names(*operands), *["log"] * log, given, way
    return Kind(", ".join(words), (math.prod(view.shape) // view.size, view.size))


KERNEL = Kernel(
    name="mosaic_gpu", platform="cuda", run=run, refuses=refuses, configs=configs, kind=kind, interpreter_is_pure=False
)
