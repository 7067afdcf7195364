"""Softmax on TPU: whole groups come to VMEM, so that each is read once and written once.

A block of short groups is normalized at once. Longer groups pass through the registers twice, piece by piece: first
their maximum and sum are found, where a new maximum rescales the earlier sum, and then they are normalized. Groups lie
along lanes, along sublanes or across tiles, as XLA stores them, so that nothing is transposed.
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
_SMALLEST_VMEM_BYTES, _MOST_VMEM = 64 * _MIB, 0.9
_BLOCK_ELEMENTS = (2**18, 2**19, 2**20)
_ONE_PIECE = 2**20  # elements of the largest block that is normalized at once
_PIECE_ELEMENTS = 2**18  # of the others' pieces
_WIDEST = 512  # columns of a block if groups lie across tiles


class Blocks(NamedTuple):
    """Blocks into which a view is cut.

    Attributes:
      view: of the groups, with five axes.
      block: its shape. Where it reaches beyond the view, its values are undefined.
    """

    view: View
    block: tuple[int, ...]

    @property
    def grid(self) -> tuple[int, ...]:
        """Blocks along the four axes other than the groups'."""
        counts = [pl.cdiv(size, block) for size, block in zip(self.view.shape, self.block, strict=True)]
        del counts[self.view.axis]
        return tuple(counts)

    @property
    def elements(self) -> int:
        """The elements of a block in tiles."""
        return _padded(self.block, (1, 1, 1, SUBLANES, LANES))

    @property
    def piece(self) -> int:
        """The elements of a group that are taken at once."""
        if self.elements <= _ONE_PIECE:
            return self.view.size
        multiple = {4: LANES, 3: 2 * SUBLANES, 1: 1}[self.view.axis]
        return max(1, _PIECE_ELEMENTS * self.view.size // self.elements // multiple) * multiple

    def spec(self) -> pl.BlockSpec:
        """Returns the view's blocks."""

        def index(*others):
            return *others[: self.view.axis], 0, *others[self.view.axis :]

        return pl.BlockSpec(self.block, index)

    def vmem_bytes(self, dtypes) -> int:
        """Counts the VMEM of arrays of these dtypes, two buffers each, and of four float32 values of a piece."""
        # The pipeline copies a block while the body works on another. The four are such as the upcast piece, shifted
        # values and exponentials.
        piece = self.elements * self.piece // self.view.size
        return self.elements * 2 * sum(jnp.dtype(dtype).itemsize for dtype in dtypes) + piece * 4 * 4

    def fold(self, function, carry):
        """Folds a function of a piece's place in a block, and of what came before, over the pieces."""
        pieces, rest = divmod(self.view.size, self.piece)

        def place(start, length):
            return *[slice(None)] * self.view.axis, pl.ds(start, length)

        carry = jax.lax.fori_loop(
            0, pieces, lambda i, so_far: function(place(i * self.piece, self.piece), so_far), carry
        )
        return function(place(pieces * self.piece, rest), carry) if rest else carry

    def sum(self, values):
        """Sums over each group."""
        return jnp.sum(values, self.view.axis, keepdims=True)

    def statistic(self, value):
        """Returns a statistic of this value for each group."""
        shape = tuple(1 if axis == self.view.axis else size for axis, size in enumerate(self.block))
        return jnp.full(shape, value, jnp.float32)


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
    """Cuts blocks of whole groups: as few as tiles allow, or more, of at most `block_elements` padded elements."""
    multiples = (1, 1, 1, 32 // min(jnp.dtype(dtype).itemsize for dtype in dtypes), LANES)
    block = list(map(min, view.shape, multiples))
    block[view.axis] = view.size
    # The minor axes grow first.
    for axis in sorted({0, 1, 2, 3, 4} - {view.axis}, reverse=True):
        size, multiple = view.shape[axis], multiples[axis]
        most = block_elements // (_padded(block, multiples) // round_up(block[axis], multiple))
        if axis == 4 and view.axis == 1:
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


def _kernel(x_ref, y_ref, *, blocks, log):
    def merged(place, so_far):
        old, total = so_far
        x = x_ref[place].astype(jnp.float32)
        new = jnp.maximum(old, jnp.max(x, blocks.view.axis, keepdims=True))
        shift = _finite(new)
        return new, total * jnp.exp(old - shift) + blocks.sum(jnp.exp(x - shift))

    maximum, total = blocks.fold(merged, (blocks.statistic(-jnp.inf), blocks.statistic(0.0)))
    shift, taken_away, factor = _finite(maximum), jnp.log(total), 1 / total

    def normalize(place, carry):
        shifted = x_ref[place].astype(jnp.float32) - shift
        y_ref[place] = (shifted - taken_away if log else jnp.exp(shifted) * factor).astype(y_ref.dtype)
        return carry

    blocks.fold(normalize, 0)


def _finite(maximum):
    """Puts 0 in place of -inf, whose difference with -inf would be NaN, though a finite value may still follow."""
    return jnp.where(maximum == -jnp.inf, 0.0, maximum)


def run(x, *, log, groups, config, interpret=False):
    """Launches the kernel; see `pallas_kernels.kernel.Kernel.run`."""
    blocks = blocks_of(view_of(groups, x.shape), [x.dtype], config["block_elements"])
    body = _whole_kernel if blocks.piece == blocks.view.size else _kernel
    return (launch(functools.partial(body, blocks=blocks, log=log), "softmax", blocks, [x], interpret),)


def launch(body, name, blocks, operands, interpret):
    """Runs a body over the blocks; its refs are the operands and a result like the last one."""
    from jax.experimental.pallas import tpu as pltpu  # here, because only lowering for a TPU needs its 0.2 s

    result = jax.ShapeDtypeStruct(blocks.view.shape, operands[-1].dtype)
    arrays = [*operands, result]
    y = pl.pallas_call(
        body,
        name=name,
        grid=blocks.grid,
        in_specs=[blocks.spec()] * len(operands),
        out_specs=blocks.spec(),
        out_shape=result,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",) * 4,
            vmem_limit_bytes=_vmem_limit(blocks, [array.dtype for array in arrays]),
        ),
        # Per element: the maximum, a difference, an exponential, the sum and a quotient, and less for the gradient.
        cost_estimate=streaming_cost(arrays, result.size, flops=5, transcendentals=1),
        interpret=interpret,
    )(*map(blocks.view.to_view, operands))
    return blocks.view.from_view(y, operands[-1].shape)


def _vmem_limit(blocks, dtypes) -> int:
    vmem_bytes = blocks.vmem_bytes(dtypes)
    return max(_DEFAULT_LIMIT_BYTES, vmem_bytes + min(vmem_bytes // 4, 4 * _MIB))


def refuses(hardware, *operands, log, groups) -> str | None:
    """Says why the kernel cannot run; see `pallas_kernels.kernel.Kernel.refuses`."""
    for operand in operands:
        dtype = jnp.dtype(operand.dtype).name
        if dtype not in _DTYPES:
            return f"Mosaic TPU computes on {' and '.join(_DTYPES)}; an operand is {dtype}"
    reason = refusal(operands[-1])
    if reason is not None:
        return reason
    view, dtypes = view_of(groups, operands[-1].shape), [operand.dtype for operand in operands]
    needed = _vmem_limit(blocks_of(view, dtypes, 0), [*dtypes, dtypes[-1]])
    most = int(_MOST_VMEM * (hardware.on_chip_bytes or _SMALLEST_VMEM_BYTES))
    if needed > most:
        return f"groups of {view.size} elements need {needed} bytes of VMEM, and the kernel may take {most}"
    return None


def configs(hardware, *operands, log, groups):
    """Lists block sizes worth trying; see `pallas_kernels.kernel.Kernel.configs`."""
    view, dtypes = view_of(groups, operands[-1].shape), [operand.dtype for operand in operands]
    # Those that make other blocks than the ones before them.
    sizes = {blocks_of(view, dtypes, size).block: size for size in reversed(_BLOCK_ELEMENTS)}
    return [{"block_elements": size} for size in sorted(sizes.values())]


def kind(hardware, *operands, log, groups) -> Kind:
    """Returns what makes cases alike; see `pallas_kernels.kernel.Kernel.kind`."""
    view, dtypes = view_of(groups, operands[-1].shape), [operand.dtype for operand in operands]
    (config, *_) = configs(hardware, *operands, log=log, groups=groups)
    blocks = blocks_of(view, dtypes, config["block_elements"])
    outer, planes, between, rows, columns = view.shape
    place, sizes = {
        4: ("lanes", (outer * planes * between * rows, columns)),
        3: ("sublanes", (outer * planes * between, rows, columns)),
        1: ("planes", (outer, planes, between * rows, columns)),
    }[view.axis]
    given = "last axis" if groups.behind == (0,) else "other axes"
    how = "at once" if blocks.piece == view.size else "in pieces"
    words = dtype_names(*operands), *["log"] * log, given, f"along {place}", how
    # By replays, an element of such a group takes XLA's own program less time than one of a longer group.
    short = ["short"] * (view.axis == 3 and rows <= LANES)
    return Kind(", ".join((*words, *short)), sizes)


KERNEL = Kernel(name="mosaic_tpu", platform="tpu", run=run, refuses=refuses, configs=configs, kind=kind)
