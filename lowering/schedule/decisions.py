"""What happens where data decides: what the caller has said, or a refusal that names the place."""

import collections
from collections.abc import Mapping


class DependsOnDataError(RuntimeError):
    """A branch, a loop or a DMA depends on data; the message names it."""


class Decisions:
    """What `trip_counts` says of one program's branches."""

    def __init__(self, program: str, branches: Mapping[int, int], trip_counts: Mapping[str, float]) -> None:
        """Takes the targets of the branches, by their own bundles."""
        self._program = program
        self._branches = branches
        self._trip_counts = trip_counts
        self._turns: collections.Counter[str] = collections.Counter()

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
            is_run = int(turns * count) > int((turns - 1) * count)
            return is_run if target is None else not is_run
        goes_back = header == target
        is_over = turns >= count if goes_back else turns > count
        if is_over:
            self._turns[name] = 0
        return is_over != goes_back

    def _header(self, number: int, target: int | None) -> int | None:
        """The first bundle of the loop that a branch goes back to or leaves; None for other branches."""
        if target is None or target <= number:
            return target
        left = [to for at, to in self._branches.items() if to <= number <= at < target]
        return max(left, default=None)

    def _count(self, name: str, what: str) -> float:
        # By its own name, or as everything that data decides in a kernel, whose name XLA gives a number.
        for known in (name, self._program, self._program.rpartition(".")[0]):
            if known in self._trip_counts:
                return self._trip_counts[known]
        raise DependsOnDataError(f"{what} depends on data: trip_counts must say how often, as in {{{name!r}: 1}}")
