"""Words of 32 bits, and the scalar memory that holds them."""

from collections.abc import Sequence
from typing import Any

from lowering.tpu_core.unknown import Unknown

HALF, MASK = 1 << 31, (1 << 32) - 1
GRANULE_BYTES = 32  # the unit of DMA sizes, and of the addresses that DMAs take
ADDRESS_SHIFT = 4  # from the address of a 512-byte row to that of a granule; since v6e, pointers to HBM count granules
_WORD_BYTES = 4
_SYMBOL_WORDS = 1 << 16  # between the addresses that two names get


def wrapped(value: Any) -> Any:
    """Wraps a value to 32 bits with a sign."""
    return ((value + HALF) & MASK) - HALF


class ScalarMemory:
    """Words by address. Each name of an allocation is an address far from all others."""

    def __init__(self, unwritten: int | None = None) -> None:
        """Starts with a number in all words, or with words that come from data."""
        self._unwritten = unwritten
        self._words: dict[Any, Any] = {}
        self._addresses: dict[tuple[str, str], int] = {}
        self._known: dict[int, Sequence[Any]] = {}
        self._has_lost_a_store = False

    def address(self, program: str, symbol: str) -> int:
        """Returns where a program's allocation lies."""
        return self._addresses.setdefault((program, symbol), (len(self._addresses) + 1) * _SYMBOL_WORDS)

    def load(self, address: Any) -> Any:
        """Loads the word at an address; unknown where a store may have gone that cannot be followed."""
        if isinstance(address, Unknown) or self._has_lost_a_store:
            return Unknown()
        if address not in self._words:
            self._words[address] = Unknown() if self._unwritten is None else self._unwritten
        return self._words[address]

    def store(self, address: Any, word: Any) -> None:
        """Writes a word; if the address depends on data, every word may be the one."""
        if isinstance(address, Unknown):
            self._has_lost_a_store = True
        else:
            self._words[address] = word

    def hold(self, address: int, words: Sequence[Any], *, is_scalar: bool) -> None:
        """Says what lies at an address: in scalar memory, or where DMAs bring it from."""
        words = [Unknown() if word is None else word for word in words]
        if is_scalar:
            self._words.update(enumerate(words, address))
        elif words:
            self._known.update(dict.fromkeys((address, wrapped(address << ADDRESS_SHIFT)), words))

    def fill(self, address: Any, size_bytes: int, source: Any) -> None:
        """Writes what a DMA brings."""
        if isinstance(address, Unknown):
            self._has_lost_a_store = True
            return
        count = size_bytes // _WORD_BYTES
        words = self._words_at(source)[:count]
        self._words.update(enumerate(words, address))
        self._words.update((address + at, Unknown()) for at in range(len(words), count))

    def _words_at(self, source: Any) -> Sequence[Any]:
        if isinstance(source, Unknown):
            return ()
        for start, words in self._known.items():
            position = (source - start) * GRANULE_BYTES // _WORD_BYTES
            if 0 <= position < len(words):
                return words[position:]
        return ()
