"""Decisions that depend on data: what the caller has said, or a refusal that names the place."""

import collections
import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from numbers import Real
from typing import Any

import numpy as np

from lowering.describe import show
from lowering.tpu_core.layouts import element_count, in_memory
from lowering.tpu_core.scalar_memory import wrapped

PROGRAM = "program"  # the name of the top-level program
NOTHING: Mapping[int, Any] = {}
_NUMBERED = re.compile(r"((.+?)\.\d+)(?:\.[A-Za-z_]\w*)?$")
_POSITION = re.compile(r"\bindex: (\d+), kind: input")


class DependsOnDataError(RuntimeError):
    """A branch, a loop or a DMA depends on data; the message names it."""


@dataclasses.dataclass(frozen=True)
class Given:
    """Hints of a caller about data.

    Attributes:
      trip_counts: how often a loop turns each time, in the mean, or which part of the times what a branch may skip is
        run, by name.
      scalars: for each kernel what its operands hold, by the operand's position: arrays, or words in the order of
        memory, of which None is not known.
      gaps: what of these operands is not given, in words.
    """

    trip_counts: Mapping[str, float] = dataclasses.field(default_factory=dict)
    scalars: Mapping[str, Mapping[int, Any]] = dataclasses.field(default_factory=dict)
    gaps: tuple[str, ...] = ()

    @classmethod
    def of(cls, trip_counts: Any, scalars: Any) -> "Given":
        """Makes hints from what a user gives, in which arrays may be of any kind.

        Raises:
          ValueError: if it is none of that.
        """
        for name, option in {"trip_counts": trip_counts, "scalars": scalars}.items():
            if option is not None and not isinstance(option, Mapping):
                raise ValueError(f"{name} must be a mapping; got {show(option)}")
        for name, count in (trip_counts or {}).items():
            if not (isinstance(name, str) and isinstance(count, Real) and float(count) >= 0):
                raise ValueError(f"trip_counts must give a name a number of at least 0; got {show({name: count})}")
        words: dict[str, dict[int, np.ndarray]] = {}
        for kernel, operands in (scalars or {}).items():
            if not (isinstance(kernel, str) and isinstance(operands, Mapping)):
                raise ValueError(f"scalars must map a kernel's name to its operands; got {show({kernel: operands})}")
            for position, operand in operands.items():
                array = np.asarray(operand)
                array = array.view(np.int32) if array.dtype == np.float32 else array
                if not (isinstance(position, int) and np.issubdtype(array.dtype, np.integer)):
                    must = "must map an operand's position to integers or to float32"
                    raise ValueError(f"scalars {must}; got {show({position: operand})}")
                words.setdefault(kernel, {})[position] = wrapped(array.astype(np.int64))
        return cls(dict(trip_counts or {}), words)

    def of_call(
        self, instruction: str, code: str, operand_types: Mapping[int, str], constants: Mapping[int, Any] = NOTHING
    ) -> "Given":
        """Returns the hints for one instruction; identical instructions share a body and its name.

        Operands are in the order of memory. One that the caller says nothing about holds its constant, if it is one.

        Raises:
          DependsOnDataError: if there is no such operand, or it has another shape.
        """
        names = dict.fromkeys((*names_of(instruction), *names_of(code)))
        said: Mapping[int, Any] = next((self.scalars[name] for name in names if name in self.scalars), {})
        words, gaps = {}, []
        for position, operand in {**constants, **said}.items():
            if position not in operand_types:
                takes = f"one of the {len(operand_types)} operands of {instruction}"
                raise DependsOnDataError(f"scalars must name {takes} by its position; got {position}")
            try:
                words[position] = in_memory(operand, operand_types[position])
                if operand.ndim == 1 and operand.size < (size := element_count(operand_types[position])):
                    gaps.append(f"scalars give {operand.size:,} of the {size:,} elements of operand {position}")
            except ValueError as error:
                must = f"scalars must say of operand {position} of {instruction} all that it holds, {error}"
                raise DependsOnDataError(must) from None
        counts = {
            f"{code}{at}{place}": count
            for name in reversed(names)  # what is said by the whole name counts more
            for key, count in self.trip_counts.items()
            for known, at, place in [key.partition("@")]
            if known == name
        }
        return Given(counts, {code: words}, tuple(gaps))

    def key(self) -> tuple[Any, ...]:
        """Returns a key that is the same for the same hints."""
        scalars = ((name, at, tuple(words)) for name, held in self.scalars.items() for at, words in held.items())
        return tuple(self.trip_counts.items()), tuple(scalars)

    def words_of(self, kernel: str, operand: Sequence[str]) -> Sequence[int | None]:
        """Returns the words in a kernel's operand, by how its program declares it; empty where nothing is said."""
        position = _POSITION.search(" ".join(operand))
        return self.scalars.get(kernel, {}).get(int(position[1]), ()) if position else ()

    def unused(self, kernels: Iterable[str]) -> list[str]:
        """Returns the names for which something is said, and which are of none of these kernels."""
        known = {PROGRAM, *(name for kernel in kernels for name in names_of(kernel))}
        return sorted(
            {
                name.partition("@")[0]
                for name in (*self.trip_counts, *self.scalars)
                if name.partition("@")[0] not in known
            }
        )


NOTHING_GIVEN = Given()


def names_of(kernel: str) -> tuple[str, ...]:
    """Returns what a caller may call a kernel: as XLA does, or without what XLA puts behind the name.

    That is a number, and with JAX 0.12 the name of what takes the result, as in "softmax.2.x_ref".
    """
    numbered = _NUMBERED.match(kernel)
    return (kernel,) if numbered is None else tuple(dict.fromkeys((kernel, *numbered.group(1, 2))))


def _nth(n: int, mean: float) -> int:
    """Returns the n-th of whole numbers, from the first, that have this mean."""
    return int(n * mean) - int((n - 1) * mean)


class Decisions:
    """Decisions of the caller about one program's branches.

    Attributes:
      program: its name.
      operands: those that may decide, such as "operand 0 (s32[8]) of kernel.1"; empty for none.
    """

    def __init__(self, program: str, branches: Mapping[int, int], given: Given, operands: Sequence[str] = ()) -> None:
        """Takes the targets of the branches, by their own bundles, and the operands that may decide."""
        self.program = program
        self._branches = branches
        self._trip_counts = given.trip_counts
        self._gaps = "".join(f"; {gap}" for gap in given.gaps)
        self.operands = f"{' and '.join(operands)} of {program}" if operands else ""
        self._turns: collections.Counter[str] = collections.Counter()
        self._loops: collections.Counter[str] = collections.Counter()

    def is_of_loop(self, number: int, target: int | None) -> bool:
        """Tells whether a branch ends a turn of a loop, which is to be decided anew each time."""
        return self._header(number, target) is not None

    def holds(self, number: int, target: int | None, not_understood: Iterable[str] = ()) -> bool:
        """Tells whether a branch at a bundle goes to a target this time, or another instruction (None) takes effect.

        Raises:
          DependsOnDataError: if nothing is said about it; what was not understood may be why.
        """
        header = self._header(number, target)
        name = f"{self.program}@{number if header is None else header:#x}"
        what = "a transfer" if target is None else "a branch" if header is None else "the trip count of a loop"
        count = self._count(name, what, sorted(not_understood))
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
        """Returns the first bundle of the loop that a branch goes back to or leaves; None for other branches."""
        if target is None or target <= number:
            return target
        left = [to for at, to in self._branches.items() if to <= number <= at < target]
        return max(left, default=None)

    def _count(self, name: str, what: str, not_understood: Sequence[str]) -> float:
        # By its own name, or as everything that data decides in a kernel.
        for known in (name, *names_of(self.program)):
            if known in self._trip_counts:
                return self._trip_counts[known]
        because = f", or on {', '.join(not_understood)}, not understood" if not_understood else ""
        scalars = f", or scalars what is in {self.operands}" if self.operands else ""
        must = f"trip_counts must say how often, as in {{{name!r}: 1}}"
        raise DependsOnDataError(f"{what} depends on data{because}: {must}{scalars}{self._gaps}")
