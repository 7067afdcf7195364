"""The gradient of an embedding table on NVIDIA GPUs from Hopper on: one pass over the gradient, and no atomics.

XLA sorts the ids; the gradient's rows stay where they are. A thread block takes a chunk of the sorted positions and
sums the rows of each run of equal ids, in registers and in order. A run within the chunk is a whole row of the result,
which this block alone writes, over zeros. The chunk's part of a run that began before it or goes on after it is a
partial sum. There are at most two in a chunk, and the next launch adds them up as if they were the gradient. However
often an id occurs, there are only a few launches, each over 2 / chunk_rows as many rows as the one before, and no
thread block with all the work.

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
from pallas_kernels.gpu.hopper import MAX_ELEMENTS, VECTOR, WARPGROUP
from pallas_kernels.kernel import Kernel, Kind, dtype_names

_AHEAD = 4  # rows that are loaded at a time, so that their trips to memory overlap
_WIDTHS = (512, 256, 128)
_NO_ROW = 2**31 - 1
# A thread has _AHEAD rows in flight and one sum, (_AHEAD + 1) * width / 128 registers: 20 for the widest accesses.
# Longer chunks leave fewer partial sums; shorter ones make more thread blocks.
_CONFIGS = ({"chunk_rows": 32}, {"chunk_rows": 64}, {"chunk_rows": 16})


def _kernel(ids_gmem, order_gmem, factors_gmem, rows_gmem, out_gmem, *partial_gmem, chunk_rows, columns, pin_layouts):
    from jax.experimental.pallas import mosaic_gpu as plgpu

    chunk, column = hopper.place((ids_gmem.shape[0] // chunk_rows, columns.blocks))
    first = chunk * chunk_rows
    last_position = ids_gmem.shape[0] - 1
    # Before the first chunk and after the last one comes another id, -1.
    before = jnp.where(first > 0, ids_gmem[jnp.maximum(first - 1, 0)], -1)
    layout = plgpu.Layout.WG_STRIDED((columns.width,), vec_size=columns.vector)

    def pinned(values):
        return plgpu.layout_cast(values, layout) if pin_layouts else values

    def add(run, group, sums):
        positions = [first + group * _AHEAD + i for i in range(_AHEAD)]
        ids = [ids_gmem[position] for position in positions]
        after = jnp.where(positions[-1] < last_position, ids_gmem[jnp.minimum(positions[-1] + 1, last_position)], -1)
        rows = [pinned(rows_gmem[order_gmem[position], run]).astype(jnp.float32) for position in positions]
        # A run is written where it ends. It is the chunk's own if it also began here; if it began with the chunk's
        # first position, the position before decides.
        for position, row, row_id, next_id in zip(positions, rows, ids, [*ids[1:], after], strict=True):
            sums = sums + row
            is_row, is_end, is_own = row_id != _NO_ROW, next_id != row_id, row_id != before

            @pl.when(is_row & is_end & is_own)
            def _(position=position, row_id=row_id, sums=sums):
                out_gmem[row_id, run] = (sums * factors_gmem[position]).astype(out_gmem.dtype)

            for partial in partial_gmem:

                @pl.when(is_row & is_end & ~is_own)
                def _(sums=sums, partial=partial):
                    partial[2 * chunk, run] = sums

                @pl.when(is_row & ~is_end & (position == first + chunk_rows - 1))
                def _(sums=sums, partial=partial):
                    partial[2 * chunk + 1, run] = sums

            # Mosaic GPU cannot select by a scalar condition, so it is broadcast.
            sums = jnp.where(jnp.broadcast_to(is_end, sums.shape), jnp.zeros_like(sums), sums)
        return sums

    @pl.when(ids_gmem[first] != _NO_ROW)
    def _():
        for start in columns.starts(column):
            run = pl.ds(start, columns.width)
            nothing = pinned(jnp.zeros((columns.width,), jnp.float32))
            lax.fori_loop(0, chunk_rows // _AHEAD, functools.partial(add, run), nothing)


class Columns(NamedTuple):
    """Accesses of a warpgroup to rows, which cannot be masked.

    Attributes:
      total: the width of a row.
      width: of an access.
      vector: elements of one access of a thread.
    """

    total: int
    width: int
    vector: int

    @classmethod
    def of(cls, total: int) -> "Columns":
        """Finds the widest accesses that divide a row; else narrow ones, where the last one overlaps the one before."""
        width = next((width for width in _WIDTHS if total % width == 0), WARPGROUP)
        vector = min(VECTOR, width // WARPGROUP)
        return cls(total, width, math.gcd(vector, total))

    @property
    def blocks(self) -> int:
        """The thread blocks that share a row: one if accesses overlap, as no two may write the same element."""
        return 1 if self.total % self.width else self.total // self.width

    def starts(self, block: jax.Array) -> list[Any]:
        """Returns where the accesses of a thread block begin."""
        if self.total % self.width == 0:
            return [block * self.width]
        return [*range(0, self.total - self.width, self.width), self.total - self.width]


def _launch(ids, order, factors, rows, out_ref, chunk_rows, interpret):
    """Writes the sums of whole runs; returns partial sums (2 * chunks, D), or nothing if there is one chunk."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    chunks, columns = ids.size // chunk_rows, Columns.of(rows.shape[1])
    partial = jax.ShapeDtypeStruct((2 * chunks, columns.total), jnp.float32)
    return pl.kernel(
        functools.partial(_kernel, chunk_rows=chunk_rows, columns=columns, pin_layouts=not interpret),
        out_type=[partial] * (chunks > 1),
        # Thread blocks write rows of their own, so no order between them matters, and none needs atomics.
        mesh=plgpu.Mesh(**hopper.grid(chunks, columns.blocks)),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        interpret=interpret_gpu_params() if interpret is True else interpret,
        name="embedding_dense_backward",
    )(ids, order, factors, rows, out_ref)


def run(grad, indices, *, num_weights, padding_idx, scale_grad_by_freq, config, interpret=False):
    """Launches the kernel; see `pallas_kernels.kernel.Kernel.run`."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    chunk_rows, width = config["chunk_rows"], grad.shape[-1]
    rows = jnp.pad(grad.reshape(-1, width), ((0, 0), (0, max(0, WARPGROUP - width))))
    ids = indices.reshape(-1)
    ids = ids if ids.dtype.itemsize == 8 else ids.astype(jnp.int32)
    live = (ids >= 0) & (ids < num_weights)
    if padding_idx is not None:
        live &= ids != padding_idx
    ids = jnp.where(live, ids, jnp.full_like(ids, _NO_ROW)).astype(jnp.int32)
    ids, order = _sorted(ids, chunk_rows)
    factors = jnp.ones(ids.size, jnp.float32)
    if scale_grad_by_freq:
        ends = [jnp.searchsorted(ids, ids, side=side) for side in ("left", "right")]
        factors = 1 / (ends[1] - ends[0]).astype(jnp.float32)
    out_ref = jax.new_ref(jnp.zeros((num_weights, rows.shape[1]), grad.dtype), memory_space=plgpu.GMEM)
    while partial := _launch(ids, order, factors, rows, out_ref, chunk_rows, interpret):
        (rows,) = partial
        ids, factors = _of_partial_sums(ids, factors, chunk_rows)
        ids, order = _sorted(ids, chunk_rows)
        factors = factors[order]
    return (jax.freeze(out_ref)[:, :width],)


def _sorted(ids, chunk_rows):
    """Sorts ids, padded to whole chunks, with ids that are not a row last; and returns their positions."""
    ids, order = lax.sort((ids, jnp.arange(ids.size, dtype=jnp.int32)), num_keys=1)
    missing = -ids.size % chunk_rows
    return jnp.pad(ids, (0, missing), constant_values=_NO_ROW), jnp.pad(order, (0, missing))


def _of_partial_sums(ids, factors, chunk_rows):
    """Returns ids and factors of each chunk's partial sums: of a run that began before it, and of one that goes on."""
    ids, factors = (x.reshape(-1, chunk_rows) for x in (ids, factors))
    first, last = ids[:, 0], ids[:, -1]
    edge = jnp.full(1, -1, jnp.int32)
    goes_on = last == jnp.concatenate([first[1:], edge])
    began_before = first == jnp.concatenate([edge, last[:-1]])
    ended = jnp.where(began_before & ~((first == last) & goes_on), first, _NO_ROW)
    open_ids = jnp.where(goes_on, last, _NO_ROW)
    return jnp.stack([ended, open_ids], 1).reshape(-1), factors[:, jnp.array([0, -1])].reshape(-1)


def refuses(hardware, grad, indices, *, num_weights, **_) -> str | None:
    """Says why the kernel cannot run; see `pallas_kernels.kernel.Kernel.refuses`."""
    if reason := hopper.refusal(hardware, grad=grad):
        return reason
    if 0 in (*grad.shape, num_weights):
        return f"there is nothing to sum; grad is {list(grad.shape)}"
    most = max(math.prod(indices.shape), num_weights) * max(WARPGROUP, grad.shape[-1])
    if most > MAX_ELEMENTS:
        return f"the kernel's 32-bit offsets reach {MAX_ELEMENTS} elements; grad or table has {most}"
    return None


def configs(hardware, grad, indices, **_):
    """Lists chunks worth trying; see `pallas_kernels.kernel.Kernel.configs`."""
    return _CONFIGS


def kind(hardware, grad, indices, *, num_weights, padding_idx, scale_grad_by_freq) -> Kind:
    """Returns what makes cases alike; see `pallas_kernels.kernel.Kernel.kind`."""
    options = ["padding"] * (padding_idx is not None) + ["by frequency"] * scale_grad_by_freq
    sizes = math.prod(indices.shape), grad.shape[-1], num_weights
    return Kind(", ".join((dtype_names(grad), *options)), sizes)


KERNEL = Kernel(
    name="mosaic_gpu", platform="cuda", run=run, refuses=refuses, configs=configs, kind=kind, interpreter_is_pure=False
)
