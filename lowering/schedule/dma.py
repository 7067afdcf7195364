"""Time that data take: HBM, semaphores and the DMA engines."""

import collections
import dataclasses
import math
from typing import Any

from lowering.schedule.timeline import Timeline
from lowering.tpu_core.scalar_memory import GRANULE_BYTES, ScalarMemory
from lowering.tpu_core.unknown import Unknown

# On-chip copies do not compete for HBM; their speed matters little, and was not fitted to anything.
_ON_CHIP_BYTES_PER_CYCLE = 512.0
_ON_CHIP_LATENCY_CYCLES = 100.0


class Hbm:
    """One channel of nominal bandwidth, in which transfers queue, and a fixed latency behind it."""

    def __init__(self, bytes_per_cycle: float, latency_cycles: float) -> None:
        """Starts idle."""
        self.bytes_per_cycle = bytes_per_cycle
        self.latency_cycles = latency_cycles
        self.free_at = 0.0

    def done_at(self, now: float, size_bytes: float) -> float:
        """Returns when a transfer that is asked for now has arrived."""
        self.free_at = max(now, self.free_at) + size_bytes / self.bytes_per_cycle
        return self.free_at + self.latency_cycles


@dataclasses.dataclass
class Semaphore:
    """A semaphore.

    Attributes:
      arrivals: what has been added and not yet taken away, as amounts with their times.
      missing: what has been taken away beyond that, by a program that then waits for more.
      is_lost: whether something has waited for what was never added, so that nobody knows what it holds.
    """

    arrivals: collections.deque[tuple[float, int]] = dataclasses.field(default_factory=collections.deque)
    missing: int = 0
    is_lost: bool = False

    def reached_at(self, amount: int) -> float | None:
        """Returns when it holds an amount; None if nothing that was started makes it so."""
        held, at = -self.missing, 0.0
        for time, added in self.arrivals if held < amount else ():
            held, at = held + added, max(at, time)
            if held >= amount:
                break
        self.is_lost |= held < amount
        return at if held >= amount else None

    def held_at(self, now: float) -> int | None:
        """Returns what it holds at a time, if that is known."""
        return None if self.is_lost else sum(added for time, added in self.arrivals if time <= now) - self.missing

    def add(self, now: float, amount: int) -> None:
        """Adds, or takes away what came first."""
        if amount > 0:
            self.arrivals.append((now, amount))
        while amount < 0 and self.arrivals:
            time, held = self.arrivals.popleft()
            amount += held
            if amount > 0:
                self.arrivals.appendleft((time, amount))
        if amount < 0 and not self.is_lost:
            self.missing -= amount


class Dma:
    """The transfers of one program. When a transfer is done, it adds its granules to a semaphore."""

    def __init__(self, hbm: Hbm, memory: ScalarMemory, timeline: Timeline | None = None) -> None:
        """Starts with nothing under way, and records transfers where there is a timeline."""
        self._hbm = hbm
        self._memory = memory
        self._timeline = timeline
        self._semaphores: dict[Any, Semaphore] = collections.defaultdict(Semaphore)
        self.hbm_bytes = 0
        self.count = 0

    def start(self, now: float, opcode: str, granules: int, source: Any, destination: Any, semaphore: Any) -> None:
        """Starts a transfer."""
        size_bytes = granules * GRANULE_BYTES
        moved_bytes = 0
        # What goes between any two places ("general") is taken to be on its way to or from HBM.
        if "hbm" in opcode or "general" in opcode:
            moved_bytes = size_bytes * (2 if opcode == "dma.hbm_to_hbm" else 1)
            done = self._hbm.done_at(now, moved_bytes)
            self.hbm_bytes += moved_bytes
            self.count += 1
        else:
            done = now + _ON_CHIP_LATENCY_CYCLES + size_bytes / _ON_CHIP_BYTES_PER_CYCLE
        if opcode.endswith("_to_smem"):
            self._memory.fill(destination, size_bytes, source)
        self._semaphore(semaphore).add(done, granules)
        if self._timeline is not None:
            self._timeline.transfer(now, done, opcode, size_bytes, moved_bytes)

    def shared_with(self, now: float, cycles: float, hbm_cycles: float) -> float:
        """Lets something else run that takes so long alone, and keeps HBM busy for a part of it.

        What is under way gets what that leaves of HBM, and at least half.

        Returns:
          By how many cycles the other is slowed.
        """
        if not hbm_cycles:
            return 0.0
        share = min(hbm_cycles / cycles, 0.5)

        def later(time: float) -> float:
            return time + min(max(time - now, 0.0) * share / (1 - share), hbm_cycles)

        for semaphore in self._semaphores.values():
            for index, (time, amount) in enumerate(semaphore.arrivals):
                semaphore.arrivals[index] = later(time), amount
        if self._timeline is not None:
            self._timeline.postpone(now, later)
        backlog = max(self._hbm.free_at - now, 0.0)
        self._hbm.free_at += min(backlog * share / (1 - share), hbm_cycles) if backlog else 0.0
        slowed = min(2 * backlog * (1 - 0.5 * cycles / hbm_cycles), 2 * hbm_cycles - cycles)
        return max(slowed, 0.0)

    def add(self, now: float, semaphore: Any, amount: int) -> None:
        """Adds to a semaphore at once."""
        self._semaphore(semaphore).add(now, amount)

    def reached_at(self, semaphore: Any, amount: int) -> float | None:
        """Returns when a semaphore holds an amount."""
        return self._semaphore(semaphore).reached_at(amount)

    def held_at(self, semaphore: Any, now: float) -> int | None:
        """Returns what a semaphore holds at a time; None where that, or which one it is, is not known."""
        return None if isinstance(semaphore, Unknown) else self._semaphore(semaphore).held_at(now)

    def is_awaited(self) -> bool:
        """Tells whether everything that was added to a semaphore has been taken away, as a kernel has to leave them."""
        return all(held.is_lost or not held.held_at(math.inf) for held in self._semaphores.values())

    def _semaphore(self, address: Any) -> Semaphore:
        """Returns the semaphore at an address; where data decide which one it is, one stands for all of them."""
        return self._semaphores[None if isinstance(address, Unknown) else address]
