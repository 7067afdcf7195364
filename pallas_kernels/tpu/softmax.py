"""Softmax on TPU: groups that fit into VMEM are read once and written once; longer groups are read twice.

A group that fits is normalized at once. A longer one passes through VMEM twice: first its maximum and sum are found
block by block, where a new maximum rescales the earlier sum, and then it is normalized. Groups lie along lanes, along
sublanes or across tiles, as XLA stores them, so that nothing is transposed.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.kernel import Kernel, Kind, dtype_names
from pallas_kernels.softmax_groups import View, array_shape, refusal
from pallas_kernels.tpu.stored_order import LANES, SUBLANES, round_up, stored_order
from pallas_kernels.tpu.streaming_cost import streaming_cost

_DTYPES = ("float32", "bfloat16")
_MIB = 2**20
_DEFAULT_LIMIT_BYTES = 16 * _MIB  # what XLA grants a kernel that asks for nothing
# With float32, the largest takes 2**20 * (2 * 3 * 4 + 4 * 4) bytes = 40 MiB in the backward kernel, and 50 MiB with the
# quarter that `launch` adds. TPUs have 64 MiB or more.
_BLOCK_ELEMENTS = (2**18, 2**19, 2**20)
_WIDEST = 512  # columns of a block if groups do not lie along lanes: more leave room for fewer elements of a group


class Blocks(NamedTuple):
    """Blocks into which a view is cut.

    Attributes:
      view: of the groups, with five axes.
      block: its shape. Where it reaches beyond the view, its values are undefined.
    """

    view: View
    block: tuple[int, ...]

    @property
    def steps(self) -> int:
        """The number of blocks of a group."""
        return pl.cdiv(self.view.size, self.block[self.view.axis])

    @property
    def grid(self) -> tuple[int, ...]:
        """Blocks along the four other axes, then phases, then blocks of a group, which pass once in each phase."""
        counts = [pl.cdiv(size, block) for size, block in zip(self.view.shape, self.block, strict=True)]
        del counts[self.view.axis]
        return *counts, 1 if self.steps == 1 else 2, self.steps

    @property
    def statistics_shape(self) -> tuple[int, ...]:
        """The shape of one statistic of each of a block's groups."""
        return tuple(1 if axis == self.view.axis else size for axis, size in enumerate(self.block))

    def spec(self, always: bool) -> pl.BlockSpec:
        """Returns the view's blocks; unless `always`, the first phase has only the block where the second begins."""

        def index(*position):
            *others, phase, step = position
            others.insert(self.view.axis, step if always or self.steps == 1 else step * phase)
            return tuple(others)

        return pl.BlockSpec(self.block, index)

    def valid(self, values, step, fill):
        """Returns the values of this step's block, with `fill` beyond the end of their groups."""
        size = self.block[self.view.axis]
        if self.view.size % size == 0:
            return values
        position = jax.lax.broadcasted_iota(jnp.int32, values.shape, self.view.axis)
        return jnp.where(position < self.view.size - step * size, values, fill)

    def sum(self, values):
        """Sums over each group in this step's block."""
        return jnp.sum(values, self.view.axis, keepdims=True)


def view_of(groups, shape):
    """Returns the view of groups (..., c) of this shape, whose last two axes are tiled.

    It is (outer, c, between, rows, columns), (1, 1, outer, c, columns) or (1, 1, outer, rows, c).
    """
    array = array_shape(groups, shape)
    if len(groups.sizes) != 1 or len(array) == 1:
        # If a group has several axes, XLA merges them into one first.
        return View(groups, None, (1, 1, 1, math.prod(shape[:-1]), shape[-1]), 4)
    order = stored_order(array)
    *untiled, rows, columns = (array[axis] for axis in order)
    position = order.index(len(array) + groups.axes[0])
    if position >= len(untiled):
        return View(groups, order, (1, 1, math.prod(untiled), rows, columns), 3 + position - len(untiled))
    outer, between = math.prod(untiled[:position]), math.prod(untiled[position + 1 :])
    return View(groups, order, (outer, untiled[position], between, rows, columns), 1)


def blocks_of(view, dtypes, block_elements):
    """Cuts blocks of at most `block_elements` padded elements, with whole groups if they fit."""
    multiples = (1, 1, 1, 32 // min(jnp.dtype(dtype).itemsize for dtype in dtypes), LANES)
    # The group's own axis grows first, so that a group is read once if possible; then the minor axes.
    block = list(map(min, view.shape, multiples))
    for axis in (view.axis, 4, 3, 2, 1, 0):
        size, multiple = view.shape[axis], multiples[axis]
        most = block_elements // (_padded(block, multiples) // round_up(block[axis], multiple))
        if axis == 4 and view.axis != 4:
            most = min(most, _WIDEST)
        block[axis] = size if size <= most else max(block[axis], most // multiple * multiple)
    return Blocks(view, tuple(block))


def _padded(block, multiples):
    return math.prod(map(round_up, block, multiples))


def _whole_kernel(x_ref, y_ref, *, blocks, log):
    x = x_ref[...].astype(jnp.float32)
    shifted = x - jnp.max(x, blocks.view.axis, keepdims=True)
    exponentials = jnp.exp(shifted)
    total = blocks.sum(exponentials)
    y_ref[...] = (shifted - jnp.log(total) if log else exponentials / total).astype(y_ref.dtype)


def _kernel(x_ref, y_ref, maximum_ref, total_ref, *, blocks, log):
    phase, step = pl.program_id(4), pl.program_id(5)
    x = blocks.valid(x_ref[...].astype(jnp.float32), step, -jnp.inf)

    @pl.when((phase == 0) & (step == 0))
    def _():
        maximum_ref[...] = jnp.full(maximum_ref.shape, -jnp.inf, jnp.float32)
        total_ref[...] = jnp.zeros(total_ref.shape, jnp.float32)

    @pl.when(phase == 0)
    def _():
        old = maximum_ref[...]
        new = jnp.maximum(old, jnp.max(x, blocks.view.axis, keepdims=True))
        shift = _finite(new)
        total_ref[...] = total_ref[...] * jnp.exp(old - shift) + blocks.sum(jnp.exp(x - shift))
        maximum_ref[...] = new

    @pl.when(phase == 1)
    def _():
        shifted, total = x - _finite(maximum_ref[...]), total_ref[...]
        y_ref[...] = (shifted - jnp.log(total) if log else jnp.exp(shifted) / total).astype(y_ref.dtype)


def _finite(maximum):
    """Puts 0 in place of -inf, whose difference with -inf would be NaN, though a finite value may still follow."""
    return jnp.where(maximum == -jnp.inf, 0.0, maximum)


def run(x, *, log, groups, config, interpret=False):
    """Launches the kernel; see `pallas_kernels.kernel.Kernel.run`."""
    blocks = blocks_of(view_of(groups, x.shape), [x.dtype], config["block_elements"])
    body = _whole_kernel if blocks.steps == 1 else _kernel
    return (launch(functools.partial(body, blocks=blocks, log=log), "softmax", blocks, [x], 2, interpret),)


def launch(body, name, blocks, operands, statistics, interpret):
    """Runs a body over the blocks; its refs are the operands, a result like the last one, and scratch statistics."""
    from jax.experimental.pallas import tpu as pltpu  # here, because only lowering for a TPU needs its 0.2 s

    result = jax.ShapeDtypeStruct(blocks.view.shape, operands[-1].dtype)
    arrays = [*operands, result]
    elements = _padded(blocks.block, (1, 1, 1, SUBLANES, LANES))
    # VMEM: a block of each operand and of the result, two buffers each, as the pipeline copies one while the body works
    # on the other; and four float32 values of that size, such as the upcast block, shifted values and exponentials.
    vmem_bytes = elements * (2 * sum(array.dtype.itemsize for array in arrays) + 4 * 4)
    y = pl.pallas_call(
        body,
        name=name,
        grid=blocks.grid,
        in_specs=[blocks.spec(True)] * len(operands),
        out_specs=blocks.spec(False),
        out_shape=result,
        # Statistics outlive a block only if a group has several.
        scratch_shapes=[pltpu.VMEM(blocks.statistics_shape, jnp.float32)] * (statistics if blocks.steps > 1 else 0),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",) * 4 + ("arbitrary",) * 2,
            vmem_limit_bytes=max(_DEFAULT_LIMIT_BYTES, vmem_bytes + vmem_bytes // 4),
        ),
        # Per element: the maximum, a difference, an exponential, the sum and a quotient, and less for the gradient.
        cost_estimate=streaming_cost(
            (*operands * min(blocks.steps, 2), result), result.size, flops=5, transcendentals=1
        ),
        interpret=interpret,
    )(*map(blocks.view.to_view, operands))
    return blocks.view.from_view(y, operands[-1].shape)


def refuses(hardware, *operands, log, groups) -> str | None:
    """Says why the kernel cannot run; see `pallas_kernels.kernel.Kernel.refuses`."""
    for operand in operands:
        dtype = jnp.dtype(operand.dtype).name
        if dtype not in _DTYPES:
            return f"Mosaic TPU computes on {' and '.join(_DTYPES)}; an operand is {dtype}"
    return refusal(operands[-1])


def configs(hardware, *operands, log, groups):
    """Lists block sizes worth trying; see `pallas_kernels.kernel.Kernel.configs`."""
    view, dtypes = view_of(groups, operands[-1].shape), [operand.dtype for operand in operands]
    # First the smallest size that reads each group once, if there is one.
    once = [size for size in _BLOCK_ELEMENTS if blocks_of(view, dtypes, size).steps == 1]
    rest = [size for size in _BLOCK_ELEMENTS if size not in once[:1]]
    return [{"block_elements": size} for size in (*once[:1], *rest)]


def kind(hardware, *operands, log, groups) -> Kind:
    """Returns what makes cases alike; see `pallas_kernels.kernel.Kernel.kind`."""
    view = view_of(groups, operands[-1].shape)
    (config, *_) = configs(hardware, *operands, log=log, groups=groups)
    steps = blocks_of(view, [operand.dtype for operand in operands], config["block_elements"]).steps
    outer, planes, between, rows, columns = view.shape
    place, sizes = {
        4: ("lanes", (outer * planes * between * rows, columns)),
        3: ("sublanes", (outer * planes * between, rows, columns)),
        1: ("planes", (outer, planes, between * rows, columns)),
    }[view.axis]
    given = "last axis" if groups.behind == (0,) else "other axes"
    words = dtype_names(*operands), *["log"] * log, given, f"along {place}", "read once" if steps == 1 else "read twice"
    # By replays, an element of such a group takes the kernel more time than one of a longer group, as blocks are no
    # wider then, and XLA's own program less.
    short = ["short"] * (view.axis == 3 and rows <= LANES)
    return Kind(", ".join((*words, *short)), sizes)


KERNEL = Kernel(name="mosaic_tpu", platform="tpu", run=run, refuses=refuses, configs=configs, kind=kind)
