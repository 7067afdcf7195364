"""How the batch-norm kernels on TPU pass twice over images in HBM, and keep what they can in VMEM in between.

The kernels copy blocks themselves: the pipeline of a Pallas grid takes some 250 bundles for each step, and what a
phase is to keep it would have copied twice, the second time through registers.
"""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.tpu.batch_norm_blocks import DEPTH, PARTIALS, Blocks


class Stream(NamedTuple):
    """Images in HBM, and a ring of buffers for their blocks in VMEM.

    Attributes:
      blocks: how the images are cut.
      at: the position of the batch, and the block of channels.
      images_hbm: all of them.
      ring_vmem: (slots, planes, rows, columns), with a slot for each block if the images are kept.
      semaphores: one for each copy in flight.
    """

    blocks: Blocks
    at: tuple[Any, Any]
    images_hbm: Any
    ring_vmem: Any
    semaphores: Any

    @property
    def dtype(self) -> Any:
        """Of the images."""
        return self.ring_vmem.dtype

    def block(self, step: Any) -> Any:
        """The buffer of a block."""
        slots = self.ring_vmem.shape[0]
        return self.ring_vmem.at[step if slots == self.blocks.steps_of_a_phase else step & (slots - 1)]

    def load(self, step: Any) -> Any:
        """The copy of a block from HBM, to start or to wait for."""
        return self._copy(self._in_hbm(step), self.block(step), step)

    def store(self, step: Any) -> Any:
        """The copy of a block to HBM, to start or to wait for."""
        return self._copy(self.block(step), self._in_hbm(step), step)

    def begin(self) -> None:
        """Starts to load the first blocks."""
        for step in range(min(DEPTH, self.blocks.steps_of_a_phase)):
            self.load(jnp.int32(step)).start()

    def _copy(self, source: Any, target: Any, step: Any) -> Any:
        from jax.experimental.pallas import tpu as pltpu  # here, because only lowering for a TPU needs its 0.2 s

        return pltpu.make_async_copy(source, target, self.semaphores.at[step & (DEPTH - 1)])

    def _in_hbm(self, step: Any) -> Any:
        batch, channel = self.at
        _, first, rest = self.blocks.steps
        others = (
            (0, step) if first == 1 else (step, 0) if rest == 1 else (jax.lax.div(step, rest), jax.lax.rem(step, rest))
        )
        index = self.blocks.with_channels(channel, others)
        slices = [
            slice(None) if size == extent else pl.ds(pl.multiple_of(position * size, size), size)
            for position, size, extent in zip(index, self.blocks.block[1:], self.blocks.view[1:], strict=True)
        ]
        return self.images_hbm.at[batch, *slices]


def pass_over(loaded: Sequence[Stream], stored: Sequence[Stream], body: Callable[[Any], None]) -> None:
    """Calls `body(step)` for each block in turn, between the loads, which have begun, and the stores of its images."""
    steps = (*loaded, *stored)[0].blocks.steps_of_a_phase

    def turn(step: Any, _: Any) -> None:
        for stream in loaded:
            stream.load(step).wait()

        @pl.when(step >= DEPTH)
        def end_first_stores() -> None:
            for stream in stored:
                stream.store(step - DEPTH).wait()

        body(step)
        for stream in stored:
            stream.store(step).start()

        @pl.when(step + DEPTH < steps)
        def begin_next_loads() -> None:
            for stream in loaded:
                stream.load(step + DEPTH).start()

    jax.lax.fori_loop(0, steps, turn, None)
    for stream, step in itertools.product(stored, range(max(0, steps - DEPTH), steps)):
        stream.store(jnp.int32(step)).wait()


def launch(
    body: Callable[..., None],
    name: str,
    blocks: Blocks,
    images: Sequence[tuple[jax.Array, str]],
    statistics: Sequence[jax.Array],
    written: int,
    interpret: Any,
) -> Sequence[jax.Array]:
    """Runs a body for each block of channels, and returns the images and the two statistics that it writes.

    The body takes the `images` and the `written` results like them as streams; refs of the `statistics`, of two results
    like them, and of scratch for partial statistics. `images` are pairs of an array and "kept" if VMEM keeps it,
    "both" if both phases read it, or "once".
    """
    from jax.experimental.pallas import tpu as pltpu  # here, because only lowering for a TPU needs its 0.2 s

    operands = [blocks.to_view(values) for values, _ in images]
    dtype = operands[0].dtype
    uses = [*(use for _, use in images), *["once"] * written]
    elements = math.prod(blocks.view)
    in_hbm = pl.BlockSpec(memory_space=pltpu.MemorySpace.HBM)

    def kernel(*refs: Any) -> None:
        counts = len(images), len(statistics), written, 2, len(uses), len(uses), PARTIALS
        given, parameters, results, sums, rings, semaphores, partials = _split(refs, counts)
        at = pl.program_id(0), pl.program_id(1)
        streams = tuple(map(functools.partial(Stream, blocks, at), (*given, *results), rings, semaphores))
        body(*_split(streams, (len(images), written)), parameters, sums, partials)

    return pl.pallas_call(
        kernel,
        name=name,
        grid=(blocks.view[0], blocks.steps[0]),
        in_specs=[*[in_hbm] * len(images), *[blocks.statistics_spec()] * len(statistics)],
        out_specs=[*[in_hbm] * written, *[blocks.statistics_spec()] * 2],
        out_shape=[
            *[jax.ShapeDtypeStruct(blocks.view, dtype)] * written,
            *[jax.ShapeDtypeStruct(blocks.statistics_shape, jnp.float32)] * 2,
        ],
        scratch_shapes=[
            *(pltpu.VMEM((blocks.slots(use == "kept"), *blocks.block[1:]), dtype) for use in uses),
            *[pltpu.SemaphoreType.DMA((DEPTH,))] * len(uses),
            *[pltpu.VMEM(blocks.partial_shape, jnp.float32)] * PARTIALS,
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel"),
            vmem_limit_bytes=blocks.vmem_bytes(dtype, len(uses)),
        ),
        cost_estimate=pl.CostEstimate(
            flops=10 * elements,
            transcendentals=0,
            bytes_accessed=(len(uses) + uses.count("both")) * elements * dtype.itemsize,
        ),
        interpret=interpret,
    )(*operands, *(values.reshape(blocks.statistics_shape) for values in statistics))


def _split(values: tuple[Any, ...], counts: Sequence[int]) -> list[tuple[Any, ...]]:
    """The values in groups of these sizes."""
    rest = iter(values)
    return [tuple(itertools.islice(rest, count)) for count in counts]
