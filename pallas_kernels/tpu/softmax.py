"""Softmax on TPU: one read and one write of groups that fit VMEM, and one read more of those that do not.

A group that fits is normalized in registers. A longer one passes through VMEM twice: first its maximum and sum are
found block by block, where a new maximum rescales what was summed before, and then it is normalized. Groups lie along
lanes or, where other axes lie behind them in memory, along sublanes: nothing is transposed.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.kernel import Kernel
from pallas_kernels.softmax_groups import View, refusal

_LANES = 128
_DTYPES = ("float32", "bfloat16")
_MIB = 2**20
_DEFAULT_LIMIT_BYTES = 16 * _MIB  # what XLA grants a kernel that asks for nothing
# The largest takes 50 MiB of VMEM in the backward kernel, of 64 or more.
_BLOCK_ELEMENTS = (2**18, 2**19, 2**20)
_WIDEST = 512  # lanes of a block of groups along sublanes: its parts of a row lie apart in memory


class Blocks(NamedTuple):
    """How a view is cut.

    Attributes:
      view: of the groups.
      block: its shape. It may reach beyond the view, where it holds anything.
    """

    view: View
    block: tuple[int, int, int]

    @property
    def steps(self) -> int:
        """How many blocks a group has."""
        return pl.cdiv(self.view.size, self.block[self.view.axis])

    @property
    def grid(self) -> tuple[int, int, int, int]:
        """Blocks of groups, along both other axes, then phases and blocks of a group."""
        outer, across = (pl.cdiv(self.view.shape[axis], self.block[axis]) for axis in (0, 3 - self.view.axis))
        return outer, across, 1 if self.steps == 1 else 2, self.steps

    @property
    def statistics_shape(self) -> tuple[int, ...]:
        """Of what is known of each of a block's groups."""
        return tuple(1 if axis == self.view.axis else size for axis, size in enumerate(self.block))

    def spec(self, always: bool) -> pl.BlockSpec:
        """Blocks of the view; unless `always`, in the first phase none but the one that the second begins with."""

        def index(outer, across, phase, step):
            step = step if always else step * phase
            return (outer, across, step) if self.view.axis == 2 else (outer, step, across)

        return pl.BlockSpec(
            self.block, index if self.steps > 1 else lambda outer, across, *_: index(outer, across, 0, 0)
        )

    def valid(self, values, fill):
        """`values` of the block of this step, with `fill` beyond the end of their groups."""
        size = self.view.size
        if size % self.block[self.view.axis] == 0:
            return values
        position = jax.lax.broadcasted_iota(jnp.int32, values.shape, self.view.axis)
        return jnp.where(position < size - pl.program_id(3) * self.block[self.view.axis], values, fill)

    def sum(self, values):
        """The sum over each group, of this step."""
        return jnp.sum(values, self.view.axis, keepdims=True)


def blocks_of(view, dtypes, block_elements):
    """Blocks of about that many elements at most."""
    rows_multiple = 32 // min(jnp.dtype(dtype).itemsize for dtype in dtypes)
    outer, rows, columns = view.shape
    if view.axis == 2:
        columns = min(columns, max(_LANES, block_elements // rows_multiple // _LANES * _LANES))
        rows = _whole_or_multiple(rows, block_elements // _round_up(columns, _LANES), rows_multiple)
    else:
        columns = columns if columns <= _WIDEST else _WIDEST
        while columns > _LANES and rows * columns > block_elements:
            columns = max(_LANES, columns // 2 // _LANES * _LANES)
        rows = _whole_or_multiple(rows, block_elements // _round_up(columns, _LANES), rows_multiple)
    padded = _round_up(rows, rows_multiple) * _round_up(columns, _LANES)
    whole = (rows, columns)[view.axis - 1] == view.size
    return Blocks(view, (min(outer, max(1, block_elements // padded)) if whole else 1, rows, columns))


def _whole_or_multiple(size, most, multiple):
    return size if size <= most else max(multiple, most // multiple * multiple)


def _round_up(size, multiple):
    return pl.cdiv(size, multiple) * multiple


def _whole_kernel(x_ref, y_ref, *, blocks, log):
    x = x_ref[...].astype(jnp.float32)
    shifted = x - jnp.max(x, blocks.view.axis, keepdims=True)
    exponentials = jnp.exp(shifted)
    total = blocks.sum(exponentials)
    y_ref[...] = (shifted - jnp.log(total) if log else exponentials / total).astype(y_ref.dtype)


def _kernel(x_ref, y_ref, maximum_ref, total_ref, *, blocks, log):
    phase, step = pl.program_id(2), pl.program_id(3)
    x = blocks.valid(x_ref[...].astype(jnp.float32), -jnp.inf)

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
    """0 for -inf, of which a difference would be NaN before it is known that nothing else comes."""
    return jnp.where(maximum == -jnp.inf, 0.0, maximum)


def run(x, *, log, groups, config, interpret=False):
    """Launches the kernel; see `pallas_kernels.kernel.Kernel.run`."""
    blocks = blocks_of(View.of(groups, x.shape), [x.dtype], config["block_elements"])
    body = _whole_kernel if blocks.steps == 1 else _kernel
    return (launch(functools.partial(body, blocks=blocks, log=log), "softmax", blocks, [x], 2, interpret),)


def launch(body, name, blocks, operands, statistics, interpret):
    """Runs a body over the blocks; its refs are operands, a result like the last of them, and statistics of groups."""
    from jax.experimental.pallas import tpu as pltpu  # here, because only lowering for a TPU needs its 0.2 s

    result = jax.ShapeDtypeStruct(blocks.view.shape, operands[-1].dtype)
    arrays = [*operands, result]
    elements = math.prod(blocks.block[:-2]) * _round_up(blocks.block[-2], 8) * _round_up(blocks.block[-1], _LANES)
    # Each array twice, to be moved while another is worked on, and four float32 of what is computed.
    vmem_bytes = elements * (2 * sum(array.dtype.itemsize for array in arrays) + 4 * 4)
    y = pl.pallas_call(
        body,
        name=name,
        grid=blocks.grid,
        in_specs=[blocks.spec(True)] * len(operands),
        out_specs=blocks.spec(False),
        out_shape=result,
        scratch_shapes=[pltpu.VMEM(blocks.statistics_shape, jnp.float32)] * (statistics if blocks.steps > 1 else 0),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary", "arbitrary"),
            vmem_limit_bytes=max(_DEFAULT_LIMIT_BYTES, vmem_bytes + vmem_bytes // 4),
        ),
        interpret=interpret,
    )(*map(blocks.view.to_view, operands))
    return blocks.view.from_view(y, operands[-1])


def refuses(hardware, *operands, log, groups) -> str | None:
    """Why the kernel cannot run; see `pallas_kernels.kernel.Kernel.refuses`."""
    for operand in operands:
        dtype = jnp.dtype(operand.dtype).name
        if dtype not in _DTYPES:
            return f"Mosaic TPU computes on {' and '.join(_DTYPES)}; an operand is {dtype}"
    return refusal(operands[-1])


def configs(hardware, *operands, log, groups):
    """Block sizes worth trying; see `pallas_kernels.kernel.Kernel.configs`."""
    view, dtypes = View.of(groups, operands[-1].shape), [operand.dtype for operand in operands]
    # The smallest that reads each group once, if there is one, comes first.
    once = [size for size in _BLOCK_ELEMENTS if blocks_of(view, dtypes, size).steps == 1]
    rest = [size for size in _BLOCK_ELEMENTS if size not in once[:1]]
    return [{"block_elements": size} for size in (*once[:1], *rest)]


KERNEL = Kernel(name="mosaic_tpu", platform="tpu", run=run, refuses=refuses, configs=configs)
