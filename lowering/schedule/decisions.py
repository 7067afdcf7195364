"""What happens where data decides: what the caller has said, or a refusal that names the place."""

import collections
import dataclasses
import re
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

import numpy as np

from lowering.describe import show

_POSITION = re.compile(r"\bindex: (\d+), kind: input")


class DependsOnDataError(RuntimeError):
    """A branch, a loop or a DMA depends on data; the message names it."""


@dataclasses.dataclass(frozen=True)
class Given:
    """What a caller says of data.

    Attributes:
      trip_counts: how often a loop turns each time, in the mean, or which part of the times what a branch may skip is
        run, by name.
      scalars: for each kernel the words that its operands hold, by the operand's position.
    """

    trip_counts: Mapping[str, float] = dataclasses.field(default_factory=dict)
    scalars: Mapping[str, Mapping[int, Sequence[int]]] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, trip_counts: Any, scalars: Any) -> "Given":
        """The same from what a user gives, in which arrays may be of any kind.

        Raises:
          ValueError: if it is none of that.
        """
        for name, option in {"trip_counts": trip_counts, "scalars": scalars}.items():
            if option is not None and not isinstance(option, Mapping):
                raise ValueError(f"{name} must be a mapping; got {show(option)}")
        for name, count in (trip_counts or {}).items():
            if not (isinstance(name, str) and isinstance(count, Real) and float(count) >= 0):
                raise ValueError(f"trip_counts must give a name a number of at least 0; got {show({name: count})}")
        words: dict[str, dict[int, list[int]]] = {}
        for kernel, operands in (scalars or {}).items():
            if not (isinstance(kernel, str) and isinstance(operands, Mapping)):
                raise ValueError(f"scalars must map a kernel's name to its operands; got {show({kernel: operands})}")
            for position, operand in operands.items():
                array = np.asarray(operand)
                if not (isinstance(position, int) and np.issubdtype(array.dtype, np.integer)):
                    must = "must map an operand's position to integers"
                    raise ValueError(f"scalars {must}; got {show({position: operand})}")
                words.setdefault(kernel, {})[position] = array.ravel().tolist()
        return cls(dict(trip_counts or {}), words)

    def words_of(self, kernel: str, operand: Sequence[str]) -> Sequence[int]:
        """What an operand of a kernel holds, by how the kernel's program declares it; empty where nothing is said."""
        position = _POSITION.search(" ".join(operand))
        operands = next((self.scalars[name] for name in names_of(kernel) if name in self.scalars), {})
        return operands.get(int(position[1]), ()) if position else ()


NOTHING_GIVEN = Given()


def names_of(kernel: str) -> tuple[str, str]:
    """What a caller may call a kernel: as XLA does, or without the number that XLA puts behind the name."""
    return kernel, kernel.rpartition(".")[0]


def _nth(n: int, mean: float) -> int:
    """The n-th of whole numbers, from the first, that have this mean."""
    return int(n * mean) - int((n - 1) * mean)


class Decisions:
    """What the caller says of one program's branches."""

    def __init__(self, program: str, branches: Mapping[int, int], given: Given) -> None:
        """Takes the targets of the branches, by their own bundles."""
        self._program = program
        self._branches = branches
        self._trip_counts = given.trip_counts
        self._turns: collections.Counter[str] = collections.Counter()
        self._loops: collections.Counter[str] = collections.Counter()

    def holds(self, number: int, target: int | None) -> bool:
        """Whether a branch at a bundle is taken to a target this time, or another instruction (None) takes effect.

        Raises:
          DependsOnDataError: if nothing is said about it.
        """
        header = self._header(number, target)
        name = f"{self._program}@{number if header is None else header:#x}"
        what = "a transfer" if target is None else "a branch" if header is None else "the trip count of a loop"
        count = self._count(name, what)
        turns = self._turns[name] = self._turns[name] + 1
        if header is None:  # a part of the times: every other one for 0.5
            is_run = _nth(turns, count) > 0
            return is_run if target is None else not is_run
        goes_back = header == target
        times = _nth(self._loops[name] + 1, count)
        is_over = turns >= times if goes_back else turns > times
        if is_over:
            self._loops[name] += 1
            self._turns[name] = 0
        return is_over != goes_back

    def _header(self, number: int, target: int | None) -> int | None:
        """The first bundle of the loop that a branch goes back to or leaves; None for other branches."""
        if target is None or target <= number:
            return target
        left = [to for at, to in self._branches.items() if to <= number <= at < target]
        return max(left, default=None)

    def _count(self, name: str, what: str) -> float:
        # By its own name, or as everything that data decides in a kernel.
        for known in (name, *names_of(self._program)):
            if known in self._trip_counts:
                return self._trip_counts[known]
        raise DependsOnDataError(f"{what} depends on data: trip_counts must say how often, as in {{{name!r}: 1}}")
