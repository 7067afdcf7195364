"""A machine of `hopper_model` on which the library's own code runs: it stands for `plgpu`, `pl`, `lax` and `jnp` there.

Warpgroups take turns by chance, each for a while, and what is on its way arrives in between by chance. A thread stands
for a warpgroup: like CUTLASS and Mosaic, the model lets one warp's wait for a product stand for all four.
"""

import _thread
import inspect
import math
import random
import types
from collections.abc import Callable, Sequence
from typing import Any

from hopper_model import At, Barriers, Block, Buffer, Copy, Event, HazardError, Product, Slot, Slots, Store
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu

_IMPORT = "from jax.experimental.pallas import mosaic_gpu as plgpu"
_TILE_BYTES = 16  # in any unit


class _EndedError(BaseException):
    """Ends a thread of a schedule that is over."""


class Warpgroup:
    """One thread of the model, which runs only while the machine waits for it."""

    def __init__(self, block: Block, number: int, buffers: int, **axes: int) -> None:
        self.block, self.axes = block, {"warpgroup": number, "thread_block": block.rank, **axes}
        self.condition: Callable[[], bool] | None = None
        self.products: list[Product] = []  # in flight, the oldest first
        self.buffers, self.stores = [Buffer() for _ in range(buffers)], []
        self.phases: dict[Any, int] = {}  # that it waits for next, by barrier
        self.is_done = False
        self.baton = _thread.allocate_lock()
        self.baton.acquire()


class Array:
    """An array in device memory: of an operand the parts have names, of a result what was stored."""

    dtype = "bfloat16"

    def __init__(self) -> None:
        self.at = At(lambda index: tuple((part.start, part.size) for part in index))


class Accumulator:
    """The products that were added up; who reads it waits for all of them."""

    def __init__(self, machine: "Machine") -> None:
        self.machine, self.terms = machine, []

    def __getitem__(self, _: Any) -> list[Any]:
        self.machine.wgmma_wait(0)
        return self.terms


class Machine:
    """Runs the thread blocks of a cluster by chance."""

    Barrier, ClusterBarrier = mosaic_gpu.Barrier, mosaic_gpu.ClusterBarrier

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.event_share = self.chance.choice([0.05, 0.2, 0.6])  # memory is slow, or fast
        self.events: list[Event] = []
        self.current: Any = None
        self._blocks: list[Block] = []
        self._failure: BaseException | None = None
        self._is_over = False
        self._back = _thread.allocate_lock()
        self._back.acquire()

    def turn(self, condition: Callable[[], bool] | None = None) -> None:
        """Lets others run, until the condition holds and it is this warpgroup's turn again."""
        own = self.current
        own.condition = condition
        self._back.release()
        own.baton.acquire()
        if self._is_over:
            raise _EndedError
        own.condition = None

    def run(self, warpgroups: Sequence[Warpgroup], kernel: Callable[[], None]) -> None:
        """Runs a kernel in all of them to their end."""
        self._blocks = list(dict.fromkeys(each.block for each in warpgroups))
        weights = {each: self.chance.choice([1, 1, 5, 30]) for each in warpgroups}
        for each in warpgroups:
            _thread.start_new_thread(self._run_one, (each, kernel))
        try:
            while any(not each.is_done for each in warpgroups) or self.events:
                self._step(weights)
        finally:
            self._is_over = True
            for each in warpgroups:
                if not each.is_done:
                    each.baton.release()

    def _step(self, weights: dict[Warpgroup, int]) -> None:
        """One warpgroup's turn, or one event."""
        waiting = [each for each in weights if not each.is_done]
        ready = [each for each in waiting if each.condition is None or each.condition()]
        possible = [event for event in self.events if event.may_happen()]
        if possible and (not ready or self.chance.random() < self.event_share):
            event = self.chance.choice(possible)
            self.events.remove(event)
            event.happen()
            return
        if not ready:
            raise HazardError("all wait for each other")
        (self.current,) = self.chance.choices(ready, [weights[each] for each in ready])
        self.current.baton.release()
        self._back.acquire()
        if self._failure is not None:
            raise self._failure

    def _run_one(self, own: Warpgroup, kernel: Callable[[], None]) -> None:
        own.baton.acquire()
        if self._is_over:
            return
        try:
            kernel()
        except _EndedError:
            return
        except BaseException as error:
            self._failure = error
        own.block.running -= 1
        own.is_done = True
        self._back.release()

    # What follows has the names and arguments that the code uses.

    def axis_index(self, name: str) -> int:
        return self.current.axes[name]

    def when(self, condition: bool) -> Callable[[Callable[[], Any]], Any]:
        return lambda body: body() if condition else None

    def fori_loop(self, first: int, last: int, body: Callable[[int, Any], Any], carry: Any) -> Any:
        for step in range(first, last):
            carry = body(step, carry)
        return carry

    def run_scoped(self, body: Callable[..., Any], *shapes: Any, collective_axes: Any = None) -> Any:
        """With memory that the warpgroups of a block share, or with an accumulator of one's own."""
        if collective_axes is None:
            return body(Accumulator(self))
        for block in self._blocks:
            if not block.memory:  # the first to come makes it for all, as others may signal its barriers
                block.memory = [self._allocated(shape, block, position) for position, shape in enumerate(shapes)]
        return body(*self.current.block.memory)

    def _allocated(self, shape: Any, block: Block, position: int) -> Any:
        if isinstance(shape, self.Barrier | self.ClusterBarrier):
            in_cluster = isinstance(shape, self.ClusterBarrier)
            arrivals = shape.num_arrivals * (len(self._blocks) if in_cluster else 1)
            return Barriers(position, arrivals, math.prod(shape.num_barriers), in_cluster)
        # The rows of x are the block's own, which come first. The weight's tile comes in a part from each block.
        return Slots(position, block, shape.inner_aval.shape[0], len(self._blocks) if position else 1)

    def WGMMAAccumulatorRef(self, *_: Any) -> None:  # noqa: N802, its name there
        pass

    def set_max_registers(self, *_: Any, **__: Any) -> None:
        pass

    def copy_gmem_to_smem(self, value: Any, slot: Slot, barrier: Any, collective_axes: Any = None) -> None:
        barriers, index = barrier
        own = self.current.block
        barriers.each[index].arrive(_TILE_BYTES)
        self.turn()
        sharing, part = (self._blocks, own.rank) if collective_axes else ([own], 0)
        for block in sharing:
            slots, there = block.memory[slot.slots.position], block.memory[barriers.position].each[index]
            self.events.append(Copy(slots, slot.number, part, value, _TILE_BYTES // len(sharing), there))
        self.turn()

    def barrier_wait(self, barrier: Any) -> None:
        barriers, index = barrier
        awaited, phases = barriers.each[index], self.current.phases
        phase = phases.get(awaited, 0)
        phases[awaited] = phase + 1
        # The hardware knows of a phase only whether its number is even.
        self.turn(lambda: awaited.phase % 2 != phase % 2)

    def barrier_arrive(self, barrier: Any) -> None:
        barriers, index = barrier
        for block in self._blocks if barriers.in_cluster else [self.current.block]:
            if not block.running:
                raise HazardError("a barrier is signalled whose thread block has ended")
            block.memory[barriers.position].each[index].arrive()
            self.turn()

    def wgmma(self, accumulator: Accumulator, x: Slot, weight: Slot) -> None:
        self.events.append(Product(self.current.products, accumulator.terms, (x, weight)))
        self.turn()

    def wgmma_wait(self, count: int) -> None:
        own = self.current
        self.turn(lambda: len(own.products) <= count)

    def commit_smem(self) -> None:
        for buffer in self.current.buffers:
            buffer.is_fenced = True
        self.turn()

    def copy_smem_to_gmem(self, buffer: Buffer, result: Any) -> None:
        store = Store(self.current.block, buffer, result.stored, result.place)
        self.current.stores.append(store)
        self.events.append(store)
        self.turn()

    def wait_smem_to_gmem(self, count: int, wait_read_only: bool = False) -> None:
        # The latest may still be on their way, and no others, even if it is the latest that were read.
        older = self.current.stores[: max(0, len(self.current.stores) - count)]
        self.turn(lambda: all(store.is_read for store in older))


def on_machine(original: types.ModuleType, machine: Machine, changes: Sequence[tuple[str, str]] = ()) -> Any:
    """A module's code, with changes to its text, on a machine."""
    text = inspect.getsource(original)
    for old, new in changes:
        if text.count(old) != 1:
            raise AssertionError(f"{original.__name__} must have this text once: {old}")
        text = text.replace(old, new)
    module = types.ModuleType(original.__name__)
    exec(compile(text.replace(_IMPORT, "pass"), str(original.__file__), "exec"), module.__dict__)
    numbers = types.SimpleNamespace(
        **{"int32": int, "float32": None, "minimum": min, "maximum": max},
        clip=lambda x, least, most: max(least, min(x, most)),
        where=lambda condition, x, y: x if condition else y,
    )
    flow = types.SimpleNamespace(
        **{"axis_index": machine.axis_index, "fori_loop": machine.fori_loop},
        rem=lambda x, y: x % y,
        div=lambda x, y: x // y,
    )
    pallas = types.SimpleNamespace(when=machine.when, run_scoped=machine.run_scoped, ds=pl.ds, cdiv=pl.cdiv)
    module.__dict__.update(plgpu=machine, jnp=numbers, lax=flow, pl=pallas)
    return module
