"""Transfers between memories: when they read and write, and what a wait completes."""

import collections
from collections.abc import Callable, Collection, Sequence

import numpy as np

from lowering.describe import counted
from lowering.emulation.in_flight import End, InFlight, Start
from lowering.emulation.memory import GRANULES_OF_ROW, Memory, in_bytes
from lowering.tpu_core.faults import MachineFaultError


class Transfers:
    """Transfers in one of four orders.

    Where a transfer to vector memory is shorter than one that has gone to the same place, as for the last block of a
    ragged operand, what the longer one has left behind it counts as not written. So does a block of an output once
    Pallas' pipeline has read it to send it: when a kernel gets this memory again, it is for another block.

    Attributes:
      starts: where each was started.
      part: which part of a whole program runs; "" for a kernel by itself.
      in_flight: those that are not yet waited for; None if nobody asks.
    """

    ORDERS = (
        "at their start",
        "at the wait for them",
        "in two steps, read at their start and written at the wait",
        "in two steps, and of several on one semaphore the first and the last in turn",
    )

    def __init__(
        self, memory: Memory, order: str, only: Collection[int] | None = None, *, is_watched: bool = False
    ) -> None:
        """Starts with nothing under way.

        Args:
          memory: between whose parts they move.
          order: one of `ORDERS`, when data are read and written.
          only: the numbers of transfers in this order, where all others happen at their start; None for all.
          is_watched: whether to find transfers that meet on the same bytes; in the first order alone.
        """
        self._memory = memory
        self._order = self.ORDERS.index(order)
        self._only = only
        self._under_way: list[tuple[int, int, Callable[[], None]]] = []
        self._of_transfers: set[int] = set()
        self._longest: dict[int, dict[int, int]] = collections.defaultdict(dict)
        self._completed: collections.Counter[int] = collections.Counter()
        self.starts: list[Start] = []
        self.part = ""
        self.in_flight = InFlight() if is_watched else None

    def start(
        self,
        spaces: tuple[str, str],
        granules: int,
        source: int,
        destination: int,
        semaphore: int,
        strides: Sequence[tuple[int, int, int]] = (),
        *,
        is_of_window: bool = False,
    ) -> None:
        """Starts a transfer.

        Args:
          spaces: from where to where.
          granules: how many.
          source: where they are.
          destination: where they go.
          semaphore: to which they are added when they have arrived.
          strides: for each level, the outermost first: the strides of source and destination, and how many parts of the
            next level follow one another; on the last level, how many times 512 bytes.
          is_of_window: whether Pallas' pipeline sends a block of an output.
        """
        bundle = self._memory.bundle
        number = len(self.starts)
        self.starts.append(Start(self.part, bundle))
        self._of_transfers.add(semaphore)
        parts = tuple(_parts(granules, source, destination, strides))
        if self.in_flight is not None and parts:
            ends = (
                self._end(spaces[0], [(at, size) for at, _, size in parts]),
                self._end(spaces[1], [(to, size) for _, to, size in parts]),
            )
            self.in_flight.start(number, self.starts[-1], semaphore, granules, ends)

        def read() -> list[tuple[np.ndarray, np.ndarray]]:
            data = [self._memory.read(spaces[0], at, size) for at, _, size in parts]
            if spaces == ("vmem", "hbm") and not all(is_written.all() for _, is_written in data):
                self._memory.sent_unwritten[bundle] += 1
            for at, _, size in parts if is_of_window else ():
                self._memory.forget(at, size)
            return data

        def write(data: list[tuple[np.ndarray, np.ndarray]]) -> None:
            for (_, at, _), (words, is_written) in zip(parts, data, strict=True):
                self._memory.write(spaces[1], at, words, is_written)
            if spaces[1] == "vmem" and parts:
                self._forget_behind({at: size for _, at, size in parts})

        if self._order == 0 or (self._only is not None and number not in self._only):
            write(read())
            self._memory.semaphores[semaphore] += granules
            return
        data = read() if self._order >= 2 else None
        self._under_way.append((semaphore, granules, lambda: write(read() if data is None else data)))

    def _end(self, space: str, pieces: list[tuple[int, int]]) -> End:
        return End.of(space, self._memory.name_at(space, pieces[0][0]), pieces)

    def _forget_behind(self, sizes: dict[int, int]) -> None:
        longest = self._longest[next(iter(sizes))]
        for at, size in longest.items():
            if (written := sizes.get(at, 0)) < size:
                self._memory.forget(at + written, size - written)
        longest.update({at: max(size, longest.get(at, 0)) for at, size in sizes.items()})

    def wait(self, semaphore: int, amount: int, *, for_transfer: bool = False) -> None:
        """Completes what a semaphore is waited for, as little as suffices.

        Of several transfers that share it, a chip may complete any first: in the second order it is the last one, in
        the fourth the first and the last in turn, so that the middle one of three is the last to arrive.

        Args:
          semaphore: its address.
          amount: what it must hold at least.
          for_transfer: whether the instruction waits for transfers alone, not for signals as well.
        """
        while self._memory.semaphores[semaphore] < amount:
            places = [place for place, job in enumerate(self._under_way) if job[0] == semaphore]
            if not places:
                if for_transfer:
                    self._of_transfers.add(semaphore)
                missing = self.in_words(semaphore, amount - self._memory.semaphores[semaphore])
                raise MachineFaultError(f"a wait for {missing} more than a semaphore holds, and nothing adds to it")
            takes_last = self._order == 1 or (self._order == 3 and self._completed[semaphore] % 2)
            _, granules, complete = self._under_way.pop(places[-1 if takes_last else 0])
            self._completed[semaphore] += 1
            complete()
            self._memory.semaphores[semaphore] += granules
        if self.in_flight is not None:
            self.in_flight.wait(semaphore, self._memory.semaphores[semaphore], amount)

    def clear(self, semaphore: int) -> None:
        """Sets a semaphore to 0."""
        self._memory.semaphores[semaphore] = 0
        if self.in_flight is not None:
            self.in_flight.clear(semaphore)

    def in_words(self, semaphore: int, amount: int) -> str:
        """Returns what an amount at a semaphore stands for: bytes of transfers, or signals."""
        return in_bytes(amount) if semaphore in self._of_transfers else counted(amount, "signal")

    def finish(self) -> int:
        """Returns how many transfers nobody has waited for."""
        return len(self._under_way)


def _parts(
    granules: int, source: int, destination: int, strides: Sequence[tuple[int, int, int]]
) -> list[tuple[int, int, int]]:
    """Lists the parts of a transfer that lie in one piece: where each is, where it goes, and its granules."""
    if granules < 0:
        raise MachineFaultError(f"a transfer of {in_bytes(granules)}")
    if not strides:
        return [(source, destination, granules)]
    size, parts = strides[-1][2] * GRANULES_OF_ROW, []
    inner = [(*strides[level + 1][:2], strides[level][2]) for level in range(len(strides) - 1)]
    for number in range(-(-granules // size) if size > 0 else 0):
        rest, at, to = number, source, destination
        for source_stride, destination_stride, count in reversed(inner):
            at, to = at + rest % count * source_stride, to + rest % count * destination_stride
            rest //= count
        parts.append((at + rest * strides[0][0], to + rest * strides[0][1], min(size, granules - number * size)))
    return parts
