"""Streams of the batch-norm kernels on TPU, which read images in HBM twice and keep what they can in VMEM.

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
      at: the position of the batch, and the first block of channels.
      images_hbm: all of them.
      ring_vmem: (slots, planes, rows, columns), with a slot for each block of a round if the images are kept.
      semaphores: one for each copy in flight.
      wide_vmem: all blocks in float32, for the kernel to keep what it makes of them; None for most streams.
    """

    blocks: Blocks
    at: tuple[Any, Any]
    images_hbm: Any
    ring_vmem: Any
    semaphores: Any
    wide_vmem: Any = None

    @property
    def dtype(self) -> Any:
        """The dtype of the images."""
        return self.ring_vmem.dtype

    def block(self, turn: Any, step: Any) -> Any:
        """Returns the buffer of a block."""
        slots, steps = self.ring_vmem.shape[0], self.blocks.steps_of_a_phase
        if slots == DEPTH:
            return self.ring_vmem.at[(turn * steps + step) & (DEPTH - 1)]
        if self.blocks.rounds == 1:
            return self.ring_vmem.at[step]
        # The remainder is that of a round: the compiler takes it out of the loop of its steps.
        slot = jax.lax.rem(turn * steps, slots) + step
        return self.ring_vmem.at[jnp.where(slot < slots, slot, slot - slots)]

    def load(self, turn: Any, step: Any) -> Any:
        """Returns the copy of a block from HBM, to start or to wait for."""
        return self._copy(self._in_hbm(turn, step), self.block(turn, step), turn, step)

    def store(self, turn: Any, step: Any) -> Any:
        """Returns the copy of a block to HBM, to start or to wait for."""
        return self._copy(self.block(turn, step), self._in_hbm(turn, step), turn, step)

    def _copy(self, source: Any, target: Any, turn: Any, step: Any) -> Any:
        from jax.experimental.pallas import tpu as pltpu  # here, because only lowering for a TPU needs its 0.2 s

        number = turn * self.blocks.steps_of_a_phase + step
        return pltpu.make_async_copy(source, target, self.semaphores.at[number & (DEPTH - 1)])

    def _in_hbm(self, turn: Any, step: Any) -> Any:
        batch, first_channel = self.at
        _, first, rest = self.blocks.steps
        others = (
            (0, step) if first == 1 else (step, 0) if rest == 1 else (jax.lax.div(step, rest), jax.lax.rem(step, rest))
        )
        index = self.blocks.with_channels(first_channel + turn, others)
        slices = [
            slice(None) if size == extent else pl.ds(pl.multiple_of(position * size, size), size)
            for position, size, extent in zip(index, self.blocks.block[1:], self.blocks.view[1:], strict=True)
        ]
        return self.images_hbm.at[batch, *slices]


class Phase(NamedTuple):
    """One of the two passes over the images of a block of channels.

    Attributes:
      loaded: what it reads from HBM.
      stored: what it writes to HBM.
      body: the work on a block, called with the round and the step.
    """

    loaded: Sequence[Stream]
    stored: Sequence[Stream]
    body: Callable[[Any, Any], None]

    def step(self, blocks: Blocks, turn: Any, step: Any, *, goes_on: Any) -> None:
        """Works on a block between the loads, which have begun, and the stores of its images.

        After the last steps of a round, loads are those of the next if it `goes_on`.
        """
        steps, depth = blocks.steps_of_a_phase, blocks.depth
        for stream in self.loaded:
            stream.load(turn, step).wait()
        wraps = step < depth
        stored = jnp.where(wraps, turn - 1, turn), jnp.where(wraps, step + steps, step) - depth

        @pl.when(stored[0] >= 0)
        def end_first_stores() -> None:
            for stream in self.stored:
                stream.store(*stored).wait()

        self.body(turn, step)
        for stream in self.stored:
            stream.store(turn, step).start()
        ends = step + depth >= steps
        later = jnp.where(ends, turn + 1, turn), jnp.where(ends, step - steps, step) + depth

        @pl.when(jnp.logical_not(ends) | goes_on)
        def begin_next_loads() -> None:
            for stream in self.loaded:
                stream.load(*later).start()

    def begin(self, blocks: Blocks, turn: Any) -> None:
        """Starts to load the first blocks of a round."""
        for stream in self.loaded:
            for step in range(blocks.depth):
                stream.load(turn, jnp.int32(step)).start()

    def end(self, blocks: Blocks) -> None:
        """Waits for the last stores."""
        steps = blocks.steps_of_a_phase
        for stream in self.stored:
            for step in range(steps - blocks.depth, steps):
                stream.store(jnp.int32(blocks.rounds - 1), jnp.int32(step)).wait()


def pass_twice(blocks: Blocks, first: Phase, finish: Callable[[Any], None], second: Phase) -> None:
    """Takes each block of channels through both phases, with `finish(round)` in between.

    Where VMEM keeps all that both phases need, the second goes through one block of channels while the first goes
    through the next: one of them has the vector unit wait, and the other one HBM.
    """
    steps, rounds = blocks.steps_of_a_phase, blocks.rounds

    def each_step(body: Callable[[Any], None]) -> None:
        jax.lax.fori_loop(0, steps, lambda step, _: body(step), None)

    def alternate(turn: Any, _: Any) -> None:
        @pl.when(turn > 0)
        def finish_last_round() -> None:
            finish(turn - 1)

        def both(step: Any) -> None:
            # What the second phase has read makes room for what the first one loads.
            @pl.when(turn > 0)
            def continue_last_round() -> None:
                second.step(blocks, turn - 1, step, goes_on=turn < rounds)

            @pl.when(turn < rounds)
            def begin_this_round() -> None:
                first.step(blocks, turn, step, goes_on=turn < rounds - 1)

        each_step(both)

    def one_by_one(turn: Any, _: Any) -> None:
        first.begin(blocks, turn)
        each_step(lambda step: first.step(blocks, turn, step, goes_on=False))
        second.begin(blocks, turn)
        finish(turn)
        each_step(lambda step: second.step(blocks, turn, step, goes_on=False))

    if blocks.alternates:
        first.begin(blocks, jnp.int32(0))
        second.begin(blocks, jnp.int32(0))
        jax.lax.fori_loop(0, rounds + 1, alternate, None)
    else:
        jax.lax.fori_loop(0, rounds, one_by_one, None)
    second.end(blocks)


def launch(
    body: Callable[..., None],
    name: str,
    blocks: Blocks,
    images: Sequence[tuple[jax.Array, str]],
    statistics: Sequence[jax.Array],
    written: int,
    interpret: Any,
) -> Sequence[jax.Array]:
    """Runs a body for each program's blocks of channels, and returns the images and the two statistics that it writes.

    The body takes the `images` and the `written` results like them as streams; refs of the `statistics`, of two results
    like them, and of scratch for partial statistics. `images` are pairs of an array and "kept" if VMEM keeps it,
    "wide" if it has room for it in float32, "both" if both phases read it, or "once".
    """
    from jax.experimental.pallas import tpu as pltpu  # here, because only lowering for a TPU needs its 0.2 s

    operands = [blocks.to_view(values) for values, _ in images]
    dtype = operands[0].dtype
    uses = [*(use for _, use in images), *["once"] * written]
    elements = math.prod(blocks.view)
    in_hbm = pl.BlockSpec(memory_space=pltpu.MemorySpace.HBM)

    def kernel(*refs: Any) -> None:
        counts = len(images), len(statistics), written, 2, len(uses), len(uses), PARTIALS, uses.count("wide")
        given, parameters, results, sums, rings, semaphores, partials, wide = _split(refs, counts)
        at = pl.program_id(0), pl.program_id(1) * blocks.rounds
        wide_of = [wide[uses[:position].count("wide")] if use == "wide" else None for position, use in enumerate(uses)]
        streams = tuple(map(functools.partial(Stream, blocks, at), (*given, *results), rings, semaphores, wide_of))
        body(*_split(streams, (len(images), written)), parameters, sums, partials)

    return pl.pallas_call(
        kernel,
        name=name,
        grid=(blocks.view[0], blocks.steps[0] // blocks.rounds),
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
            *[pltpu.VMEM((blocks.steps_of_a_phase, *blocks.block[1:]), jnp.float32)] * uses.count("wide"),
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
    """Splits the values into groups of these sizes."""
    rest = iter(values)
    return [tuple(itertools.islice(rest, count)) for count in counts]
