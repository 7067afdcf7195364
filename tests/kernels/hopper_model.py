"""What a Hopper GPU does asynchronously, as far as a kernel with copies, products and stores can go wrong with it.

JAX's interpreter computes products and copies at once, so it sees no race with them. Here a product reads shared memory
until it is complete, a copy writes when it arrives, and a store reads when its turn comes. Values are names of what was
multiplied, so that places are checked too. What the hardware would compute wrongly raises `HazardError`.
"""

from collections.abc import Sequence
from typing import Any


class HazardError(Exception):
    """What the hardware would do wrong, or wait for in vain."""


class Barrier:
    """An mbarrier: a phase ends when all have arrived, and as many bytes as they expect.

    Bytes may come before those who expect them.
    """

    def __init__(self, arrivals: int) -> None:
        self.arrivals = self.missing = arrivals
        self.missing_bytes = self.phase = 0

    def arrive(self, expected_bytes: int = 0) -> None:
        if self.missing == 0:
            raise HazardError("more arrive at a barrier than it counts")
        self.missing -= 1
        self.missing_bytes += expected_bytes
        self._end_phase()

    def deliver(self, size: int) -> None:
        self.missing_bytes -= size
        self._end_phase()

    def _end_phase(self) -> None:
        if self.missing == self.missing_bytes == 0:
            self.missing, self.phase = self.arrivals, self.phase + 1


class At:
    """What makes `ref.at[index]` of a function of the index."""

    def __init__(self, get: Any) -> None:
        self._get = get

    def __getitem__(self, index: Any) -> Any:
        return self._get(index)


class Block:
    """A thread block: its shared memory, and how many of its warpgroups have not ended."""

    def __init__(self, rank: int, warpgroups: int) -> None:
        self.rank, self.running = rank, warpgroups
        self.memory: list[Any] = []


class Barriers:
    """Barriers of one thread block. In a cluster, who arrives does so in all of its blocks."""

    def __init__(self, position: int, arrivals: int, count: int, in_cluster: bool) -> None:
        self.position, self.in_cluster = position, in_cluster
        self.each = [Barrier(arrivals) for _ in range(count)]
        self.at = At(lambda index: (self, index))


class Slots:
    """Operands' tiles in the shared memory of one thread block; each has parts that come from different blocks."""

    def __init__(self, position: int, block: Block, count: int, parts: int) -> None:
        self.position, self.block, self.readers = position, block, [0] * count
        self.parts: list[list[Any]] = [[None] * parts for _ in range(count)]
        self.at = At(lambda index: Slot(self, *(index if isinstance(index, tuple) else (index, None))))


class Slot:
    """One tile, or some rows of it."""

    def __init__(self, slots: Slots, number: int, rows: Any) -> None:
        self.slots, self.number, self.rows = slots, number, rows

    def transpose(self, _: Any) -> "Slot":
        return self

    def content(self) -> Any:
        first, *others = self.slots.parts[self.number]
        if first is None or any(part != first for part in others):
            raise HazardError(f"a product starts while its slot holds {[first, *others]}")
        return first


class Buffer:
    """Shared memory to store from. The engine that copies sees only what was fenced."""

    def __init__(self) -> None:
        self.value: Any = None
        self.is_fenced, self.readers = False, 0

    def __setitem__(self, _: Any, value: Any) -> None:
        if self.readers:
            raise HazardError("a buffer is written again before it was read")
        self.value, self.is_fenced = value, False


class Event:
    """Something on its way, which happens at a time of its own."""

    def may_happen(self) -> bool:
        return True

    def happen(self) -> None:
        raise NotImplementedError


class Product(Event):
    """A product, which reads its operands until it is complete. A warpgroup's are completed in their order."""

    def __init__(self, in_flight: list["Product"], terms: list[Any], operands: Sequence[Slot]) -> None:
        x, weight = (slot.content() for slot in operands)
        self._in_flight, self._terms, self._operands = in_flight, terms, operands
        self._value = (operands[0].rows.start, x, weight)
        in_flight.append(self)
        for slot in operands:
            slot.slots.readers[slot.number] += 1

    def may_happen(self) -> bool:
        return self._in_flight[0] is self

    def happen(self) -> None:
        self._in_flight.pop(0)
        self._terms.append(self._value)
        for slot in self._operands:
            slot.slots.readers[slot.number] -= 1


class Copy(Event):
    """A tile, or a part of it, on its way to a slot of one thread block."""

    def __init__(self, slots: Slots, number: int, part: int, value: Any, size: int, barrier: Barrier) -> None:
        self._slots, self._number, self._part = slots, number, part
        self._value, self._size, self._barrier = value, size, barrier

    def happen(self) -> None:
        if not self._slots.block.running:
            raise HazardError("a copy arrives after its thread block has ended")
        if self._slots.readers[self._number]:
            raise HazardError("a copy overwrites a slot that a product reads")
        self._slots.parts[self._number][self._part] = self._value
        self._barrier.deliver(self._size)


class Store(Event):
    """A store from a buffer of a thread block."""

    def __init__(self, block: Block, buffer: Buffer, result: list[Any], place: Any) -> None:
        if not buffer.is_fenced:
            raise HazardError("a buffer is stored from before it was fenced")
        self._block, self._buffer, self._result, self._place = block, buffer, result, place
        self.is_read = False
        buffer.readers += 1

    def happen(self) -> None:
        if not self._block.running:
            raise HazardError("a store reads after its thread block has ended")
        self._buffer.readers -= 1
        self.is_read = True
        self._result.append((self._place, self._buffer.value))
