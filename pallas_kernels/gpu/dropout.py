"""Dropout on NVIDIA GPUs from Hopper on: the mask is drawn by the thread block that needs it, in one pass over memory.

A thread block has 4096 neighbouring elements of a row. Each of its 128 threads draws one word of the mask, for 32
elements, and stores it in shared memory (128 * 4 bytes). Then it has 16 bytes of a row of 32 elements in each access.

Functions import `mosaic_gpu` themselves: it takes a third of a second, which only those who lower for a GPU should pay.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels._jax_private import interpret_gpu_params, load_gpu
from pallas_kernels.dropout_mask import (
    RESOLUTION_BITS,
    WORD_BITS,
    compared,
    decisive_digits,
    digit_pair,
    repeated,
    threshold,
)
from pallas_kernels.gpu import hopper
from pallas_kernels.gpu.hopper import WARPGROUP
from pallas_kernels.kernel import Kernel, Kind, dtype_names

_BLOCK = WARPGROUP * WORD_BITS  # one word of the mask for each thread
_ACCESS_BYTES = 16  # of a thread
_AHEAD = 4  # accesses that are loaded before one is used


class _Run:
    """Run of 4096 elements of a row and the 128 words of their mask, inside a kernel."""

    def __init__(self, row, first_word, words_smem, dtype, pin_layouts):
        """Pins layouts if asked to; the interpreter of jax 0.10 has none to pin."""
        self.row, self.first_word = row, first_word
        self.words_smem = words_smem
        self._vector = _ACCESS_BYTES // jnp.dtype(dtype).itemsize
        self._pin_layouts = pin_layouts

    def pinned(self, values):
        """Pins one number a thread."""
        from jax.experimental.pallas import mosaic_gpu as plgpu

        return plgpu.layout_cast(values, self._threads_layout()) if self._pin_layouts else values

    def _threads_layout(self):
        from jax.experimental.pallas import mosaic_gpu as plgpu

        return plgpu.Layout.WG_STRIDED((WARPGROUP,), vec_size=1)

    def threads(self):
        from jax.experimental.pallas import mosaic_gpu as plgpu

        if not self._pin_layouts:
            return lax.broadcasted_iota(jnp.int32, (WARPGROUP,), 0)
        return plgpu.broadcasted_iota(jnp.int32, (WARPGROUP,), 0, layout=self._threads_layout())

    def words(self):
        return self.row, pl.ds(self.first_word, WARPGROUP)

    def drawn(self, streams_gmem, keep_gmem):
        """Draws a word for each thread."""
        # Multiplied by ones, scalars become vectors in the threads' layout.
        ones = jnp.full((WARPGROUP,), 1, jnp.uint32)
        key0, key1, first = (ones * streams_gmem[self.row, i] for i in range(3))
        indices = first + self.first_word.astype(jnp.uint32) + self.threads().astype(jnp.uint32)
        above = threshold(keep_gmem[0])
        pairs = lax.div(decisive_digits(above) + 1, 2)

        def compare(step, less):
            pair = pairs - 1 - step
            return compared(less, (key0, key1), indices, pair, digit_pair(above, pair))

        # At the probability 1 no digit decides, and all are less.
        is_one = above >> jnp.uint32(RESOLUTION_BITS)
        return lax.fori_loop(0, pairs, compare, indices * jnp.uint32(0) + repeated(is_one))

    def _layout(self):
        """Returns the layout of an access, with a row for each word: neighbouring threads have neighbouring runs."""
        from jax.experimental.pallas import mosaic_gpu as plgpu

        vector = self._vector
        # Tiles of 4 * vector rows, one for each warp's vector rows, in which a lane has vector elements of one row.
        tiling = plgpu.Tiling(((WARPGROUP // WORD_BITS * vector, WORD_BITS), (vector, vector)))
        return plgpu.Layout.TILED(tiling, warp_dims=(-4,), lane_dims=(-2, -3), vector_dim=-1)

    def _load(self, ref, index, axes=()):
        from jax.experimental.pallas import mosaic_gpu as plgpu

        if not self._pin_layouts:
            return ref[index]
        layout = self._layout().reduce(axes) if axes else self._layout()
        return plgpu.layout_cast(load_gpu(ref, index), layout)

    def select(self, words, x_gmem, y_gmem, keep_gmem):
        """Keeps and drops elements; `words` has one for each thread."""
        from jax.experimental.pallas import mosaic_gpu as plgpu

        # A barrier, so that all threads have read the words of an earlier run before they are overwritten; and one
        # more, so that all words are there before any is read.
        plgpu.commit_smem()
        self.words_smem[...] = words
        plgpu.commit_smem()
        factor = keep_gmem[1]
        rows = WARPGROUP // WORD_BITS * self._vector
        shape = rows, WORD_BITS
        if self._pin_layouts:
            bits = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=self._layout())
        else:
            bits = lax.broadcasted_iota(jnp.int32, shape, 1)
        bit = jnp.uint32(1) << bits.astype(jnp.uint32)

        def where(step):
            return self.row, pl.ds(self.first_word + step * rows, rows)

        def load(step):
            words = self._load(self.words_smem, (pl.ds(step * rows, rows),), (1,))
            return self._load(x_gmem, where(step)), lax.broadcast_in_dim(words, shape, (0,))

        def use(step, loaded, _):
            x, words = loaded
            y = jnp.where((words & bit) != 0, x.astype(jnp.float32) * factor, 0.0)
            y_gmem[where(step)] = y.astype(y_gmem.dtype)

        hopper.fold(0, WARPGROUP // rows, _AHEAD, load, use, None)


def _for_each_run(shape, words_smem, dtype, pin_layouts, process):
    """Gives each thread block a run of a row; the last block takes the rest in a run that overlaps its own."""
    rows, words = shape
    blocks = words // WARPGROUP
    row, block = hopper.place((rows, blocks))
    process(_Run(row, block * WARPGROUP, words_smem, dtype, pin_layouts))
    # Accesses cannot be masked. What two runs both compute is the same, and one block computes both.
    if words % WARPGROUP:

        @pl.when(block == blocks - 1)
        def _():
            process(_Run(row, block * WARPGROUP + words % WARPGROUP, words_smem, dtype, pin_layouts))


def _kernel(streams_gmem, x_gmem, keep_gmem, y_gmem, words_gmem, words_smem, *, pin_layouts):
    def process(run):
        words = run.drawn(streams_gmem, keep_gmem)
        words_gmem[run.words()] = words
        run.select(words, x_gmem, y_gmem, keep_gmem)

    _for_each_run(words_gmem.shape, words_smem, x_gmem.dtype, pin_layouts, process)


def _backward_kernel(grad_gmem, words_gmem, keep_gmem, out_gmem, words_smem, *, pin_layouts):
    def process(run):
        run.select(run.pinned(words_gmem[run.words()]), grad_gmem, out_gmem, keep_gmem)

    _for_each_run(words_gmem.shape, words_smem, grad_gmem.dtype, pin_layouts, process)


def _launch(kernel, name, rows, columns, results, interpret, operands):
    from jax.experimental.pallas import mosaic_gpu as plgpu

    return plgpu.kernel(
        functools.partial(kernel, pin_layouts=not interpret),
        out_type=results,
        # Thread blocks do not depend on each other; those of one row read the same stream.
        **hopper.grid(rows, columns // _BLOCK),
        scratch_types=[plgpu.SMEM((WARPGROUP,), jnp.uint32)],
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        interpret=interpret_gpu_params() if interpret is True else interpret or None,
        kernel_name=name,
    )(*operands)


def run(streams, x, keep, *, config, interpret=False):
    """Launches the kernel; see `pallas_kernels.kernel.Kernel.run`."""
    rows, columns = math.prod(x.shape[:-1]), x.shape[-1]
    words = columns // WORD_BITS
    in_words = rows, words, WORD_BITS
    results = [jax.ShapeDtypeStruct(in_words, x.dtype), jax.ShapeDtypeStruct((rows, words), jnp.uint32)]
    operands = streams.reshape(rows, 3), x.reshape(in_words), keep
    y, mask = _launch(_kernel, "dropout", rows, columns, results, interpret, operands)
    return y.reshape(x.shape), mask.reshape(*x.shape[:-1], words)


def run_backward(grad, words, keep, *, config, interpret=False):
    """Launches the kernel of the gradient; see `pallas_kernels.kernel.Kernel.run`."""
    rows, columns = math.prod(grad.shape[:-1]), grad.shape[-1]
    in_words = rows, columns // WORD_BITS, WORD_BITS
    results = [jax.ShapeDtypeStruct(in_words, grad.dtype)]
    operands = grad.reshape(in_words), words.reshape(rows, columns // WORD_BITS), keep
    (out,) = _launch(_backward_kernel, "dropout_backward", rows, columns, results, interpret, operands)
    return (out.reshape(grad.shape),)


def _refusal(hardware, x) -> str | None:
    if reason := hopper.refusal(hardware, x=x):
        return reason
    if math.prod(x.shape) == 0:
        return "there is nothing to drop"
    if x.shape[-1] < _BLOCK or x.shape[-1] % WORD_BITS:
        return f"a thread block takes {_BLOCK} elements of a row made of whole words; a row has {x.shape[-1]}"
    return None


def refuses(hardware, streams, x, keep) -> str | None:
    """Says why the kernel cannot run; see `pallas_kernels.kernel.Kernel.refuses`."""
    return _refusal(hardware, x)


def refuses_backward(hardware, grad, words, keep) -> str | None:
    """Says why the kernel of the gradient cannot run; see `pallas_kernels.kernel.Kernel.refuses`."""
    return _refusal(hardware, grad)


def kind(hardware, streams, x, keep) -> Kind:
    """Returns what makes cases alike; see `pallas_kernels.kernel.Kernel.kind`."""
    return _kind_of(x)


def kind_backward(hardware, grad, words, keep) -> Kind:
    """Returns what makes cases of the gradient alike; see `pallas_kernels.kernel.Kernel.kind`."""
    return _kind_of(grad)


def _kind_of(x) -> Kind:
    return Kind(dtype_names(x), (math.prod(x.shape[:-1]), x.shape[-1]))


KERNEL = Kernel(name="mosaic_gpu", platform="cuda", run=run, refuses=refuses, kind=kind, interpreter_is_pure=False)
BACKWARD_KERNEL = Kernel(
    name="mosaic_gpu",
    platform="cuda",
    run=run_backward,
    refuses=refuses_backward,
    kind=kind_backward,
    interpreter_is_pure=False,
)
