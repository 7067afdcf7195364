"""Memory of a core: vector and scalar memory, HBM and semaphores, in allocations that lie far from one another.

What nobody has written holds poison, a NaN whose bits the caller chooses. If results differ between two poisons, they
depend on what was never written.
"""

import collections
from typing import Any

import numpy as np

from lowering.emulation.registers import Address
from lowering.tpu_core.faults import MachineFaultError
from lowering.tpu_core.scalar_memory import GRANULE_BYTES, wrapped
from lowering.tpu_core.vector_unit import selected
from lowering.tpu_core.vectors import LANES, SUBLANES, whole

ROW_BYTES = 4 * LANES
_WORDS_OF_GRANULE = GRANULE_BYTES // 4
GRANULES_OF_ROW = ROW_BYTES // GRANULE_BYTES
_UNIT_BYTES = {"vmem": ROW_BYTES, "hbm": GRANULE_BYTES, "smem": 4}
# Allocations begin at multiples of so many rows of vector memory, granules of HBM, or words.
_APART = {"vmem": 1 << 18, "hbm": 1 << 18, "smem": 1 << 18, "sflag": 1 << 16}


class Allocation:
    """A part of vector memory or HBM; or of scalar memory, whose words are kept by their addresses.

    Attributes:
      first: the address of its first row or granule.
      words: (rows or granules, words of each) of uint32.
      is_written: for each word, whether something has written to it.
    """

    def __init__(self, name: str, first: int, size_bytes: int, space: str, poison: int) -> None:
        """Starts full of poison."""
        self.first = first
        unit_bytes = _UNIT_BYTES[space]
        self.name = name
        self.units = -(-size_bytes // unit_bytes)
        kept = 0 if space == "smem" else self.units
        self.words = np.full((kept, unit_bytes // 4), poison, np.uint32)
        self.is_written = np.zeros(self.words.shape, bool)


class Memory:
    """All memory that one kernel reaches.

    Attributes:
      unwritten: how many scalars, or vectors with a word in them, were loaded that nobody had written, by bundle.
      sent_unwritten: how many transfers from vector memory to HBM have sent such a word, by the bundle of their start.
    """

    def __init__(self, *, poison: int, granules_of_pointer: int, forgets: bool = False) -> None:
        """Starts without allocations.

        Args:
          poison: what is read where nobody has written.
          granules_of_pointer: the unit of pointers to HBM, in granules: 16 on v5e, 1 on v6e and v7x.
          forgets: whether what is not written any more is overwritten with poison.
        """
        self._poison = poison
        self._forgets = forgets
        self._granules_of_pointer = granules_of_pointer
        self._allocations: dict[str, dict[int, Allocation]] = collections.defaultdict(dict)
        self._counts: collections.Counter[str] = collections.Counter()
        self._words: dict[int, int] = {}
        self.semaphores: collections.Counter[int] = collections.Counter()
        self.unwritten: collections.Counter[int] = collections.Counter()
        self.sent_unwritten: collections.Counter[int] = collections.Counter()
        self.bundle = 0

    def allocate(self, name: str, space: str, size_bytes: int) -> int:
        """Makes an allocation; returns its address, in the unit in which programs hold it."""
        self._counts[space] += 1
        number = self._counts[space]
        address = number * _APART[space]
        if space in _UNIT_BYTES:
            allocation = Allocation(name, address, size_bytes, space, self._poison)
            last = number + allocation.units // _APART[space]
            self._allocations[space].update(dict.fromkeys(range(number, last + 1), allocation))
            self._counts[space] = last
        return address // self._granules_of_pointer if space == "hbm" else address

    def words_of(self, space: str, address: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns all words of an allocation at its address, and which of them are written, in order."""
        if space == "hbm":
            address *= self._granules_of_pointer
        allocation = self._allocations[space][address // _APART[space]]
        return allocation.words.reshape(-1), allocation.is_written.reshape(-1)

    # Vector memory.

    def load(self, place: Address) -> np.ndarray:
        """Loads a vector; sublanes that the mask leaves out are 0. Beyond an allocation there is poison."""
        first, sublanes = place.first(), place.sublanes()
        if place.stride == 1 and not (place.group or place.pattern) and sublanes == 0xFF:
            allocation, at = self._found("vmem", first)
            if 0 <= at <= allocation.units - SUBLANES:
                self._note(allocation.is_written[at : at + SUBLANES])
                return allocation.words[at : at + SUBLANES].copy()
        on, rows = self._rows(first, place, sublanes)
        vector = np.zeros((SUBLANES, LANES), np.uint32)
        if not rows:
            return vector
        allocation, least = self._found("vmem", min(rows))
        places = np.array(rows) - (min(rows) - least)
        is_within = (places >= 0) & (places < allocation.units)
        vector[on] = self._poison
        vector[np.array(on)[is_within]] = allocation.words[places[is_within]]
        self._note(is_within)
        self._note(allocation.is_written[places[is_within]])
        return vector

    def store(self, place: Address, mask: np.ndarray | None, vector: Any) -> None:
        """Stores the sublanes of a vector that the address names, where the mask holds."""
        on, absolute = self._rows(place.first(), place, place.sublanes())
        if not absolute:
            return
        # Sublanes that the address leaves out may lie before the allocation.
        allocation, least = self._found("vmem", min(absolute))
        rows = np.array(absolute) - (min(absolute) - least)
        outside = rows[(rows < 0) | (rows >= allocation.units)]
        if outside.size:
            size = f"{allocation.units} rows of 512 bytes"
            raise MachineFaultError(f"a store to row {max(outside, key=abs)} of {allocation.name}, which has {size}")
        vector = whole(vector)[on]
        if mask is None:
            allocation.words[rows], allocation.is_written[rows] = vector, True
        else:
            mask = mask[on]
            allocation.words[rows] = selected(mask, vector, allocation.words[rows])
            allocation.is_written[rows] |= mask != 0

    def _rows(self, first: int, place: Address, sublanes: int) -> tuple[list[int], list[int]]:
        """Returns the sublanes that take part, and their rows."""
        on = [sublane for sublane in range(SUBLANES) if sublanes >> sublane & 1]
        if place.pattern:
            return on, [first + place.pattern[at] * place.stride for at in on]
        if place.group:
            return on, [first + at // place.group * place.stride + at % place.group for at in on]
        return on, [first + at * place.stride for at in on]

    def _note(self, is_written: np.ndarray) -> None:
        if not is_written.all():
            self.unwritten[self.bundle] += 1

    # Scalar memory.

    def load_scalar(self, address: int) -> int:
        """Loads a word."""
        if address not in self._words:
            self.unwritten[self.bundle] += 1
        return self._words.get(address, wrapped(self._poison))

    def store_scalar(self, address: int, word: int) -> None:
        """Stores a word."""
        if address not in self._words:
            allocation, at = self._found("smem", address)
            if not 0 <= at < allocation.units:
                size = f"{allocation.units} words"
                raise MachineFaultError(f"a store to word {at} of {allocation.name} in smem, which has {size}")
        self._words[address] = word

    def written_words(self, address: int, most: int) -> list[int]:
        """Returns the words from an address on that something has written to, at most so many."""
        words: list[int] = []
        while len(words) < most and address + len(words) in self._words:
            words.append(self._words[address + len(words)])
        return words

    # What transfers move: granules, by addresses that count them; words in scalar memory.

    def read(self, space: str, address: int, granules: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the words of granules, and which are written."""
        if space == "smem":
            count = granules * _WORDS_OF_GRANULE
            held = [self.load_scalar(address + at) for at in range(count)]
            return np.array(held, np.int32).view(np.uint32), np.ones(count, bool)
        words, is_written = self._granules(space, address, granules)
        return words.copy(), is_written.copy()

    def write(self, space: str, address: int, words: np.ndarray, is_written: np.ndarray) -> None:
        """Writes the words of granules."""
        if space == "smem":
            for at, (word, has_word) in enumerate(zip(words.view(np.int32).tolist(), is_written.tolist(), strict=True)):
                self._words.pop(address + at, None)
                if has_word:
                    self._words[address + at] = word
            return
        to, flags = self._granules(space, address, len(words) // _WORDS_OF_GRANULE)
        to[:], flags[:] = words, is_written

    def forget(self, address: int, granules: int) -> None:
        """Takes granules of vector memory for not written."""
        words, is_written = self._granules("vmem", address, granules)
        is_written[:] = False
        if self._forgets:
            words[:] = self._poison

    def forget_all(self, space: str, address: int) -> None:
        """Fills an allocation with poison, as before anything was written to it."""
        words, is_written = self.words_of(space, address)
        words[:], is_written[:] = self._poison, False

    def name_at(self, space: str, address: int) -> str:
        """Returns the name of the allocation that has a granule; "" where none is known."""
        if space not in ("vmem", "hbm"):
            return ""
        return self._found(space, address // (GRANULES_OF_ROW if space == "vmem" else 1))[0].name

    def around(self, space: str, address: int) -> str:
        """Says which allocation a unit lies before or beyond, such as "before operand 1"; "" where none is known."""
        try:
            allocation, at = self._found(space, address)
        except MachineFaultError:
            return ""
        side = "before" if at < 0 else "beyond" if at >= allocation.units else ""
        return side and f"{side} {allocation.name}"

    def _granules(self, space: str, address: int, granules: int) -> tuple[np.ndarray, np.ndarray]:
        unit = GRANULES_OF_ROW if space == "vmem" else 1
        allocation, first = self._found(space, address // unit)
        start = (first * unit + address % unit) * _WORDS_OF_GRANULE
        end = start + granules * _WORDS_OF_GRANULE
        size = allocation.units * unit * _WORDS_OF_GRANULE
        if granules < 0 or start < 0 or end > size:
            leaves = "begins before" if start < 0 else "reaches beyond"
            raise MachineFaultError(f"a transfer of {in_bytes(granules)} that {leaves} {allocation.name}")
        return allocation.words.reshape(-1)[start:end], allocation.is_written.reshape(-1)[start:end]

    def _found(self, space: str, address: int) -> tuple[Allocation, int]:
        """Returns the allocation that an address is in or nearest to, and its place there, which is negative before."""
        allocations, number = self._allocations[space], address // _APART[space]
        allocation = allocations.get(number)
        if allocation is None or address >= allocation.first + allocation.units:
            # Between two allocations, whose places are far apart: shortly before the next one, or behind this one.
            ahead = allocations.get(number + 1)
            behind = _APART[space] if allocation is None else address - allocation.first - allocation.units
            if ahead is not None and ahead.first - address < behind:
                allocation = ahead
        if allocation is None:
            raise MachineFaultError(f"address {address:#x} of {space}, where nothing is allocated")
        return allocation, address - allocation.first


def in_bytes(granules: int) -> str:
    """Says how many bytes granules are."""
    return f"{granules * GRANULE_BYTES:,} bytes"
