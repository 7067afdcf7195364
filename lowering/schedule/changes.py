"""Changes from one schedule of a program to another: which kernels take longer or less, and where in them."""

import collections
import dataclasses
import re
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any

from rich.table import Table
from rich.text import Text

from lowering import tables
from lowering.errors import ScheduleError
from lowering.schedule.compare import Compared, Comparison
from lowering.schedule.data_hints import PROGRAM
from lowering.schedule.report import Schedule
from lowering.schedule.rows import KernelSchedule
from lowering.tpu_core.dumps import KERNEL

LEAST_SHARE = 0.001  # of a program's time, for a kernel to be compared by itself
_LEAST_CHANGE = 0.001  # of a time, for a change to be listed
_LEAST_OF_KERNEL = 0.01  # of a kernel's time, for the change of a region to be listed
_MOST_REGIONS = 6
_MOST_BYTES = 2  # times as many as before move in what XLA made, to be taken for the same


@dataclasses.dataclass(frozen=True)
class Change:
    """Times before and after.

    Attributes:
      name: of a kernel, or the line or the bundles of a region.
      before_us: of all calls; None where there was none.
      after_us: likewise; None where there is none any more.
      regions: of a kernel, those that changed.
      is_kernel: whether it is a kernel, and not what the top-level program does itself, or a region.
    """

    name: str
    before_us: float | None
    after_us: float | None
    regions: tuple["Change", ...] = ()
    is_kernel: bool = False

    @property
    def difference_us(self) -> float:
        """The time that is gained if it is negative, or lost."""
        return (self.after_us or 0.0) - (self.before_us or 0.0)

    @property
    def ratio(self) -> float | None:
        """The time after by the time before; None where one of them is missing."""
        return self.after_us / self.before_us if self.before_us and self.after_us is not None else None

    @property
    def is_listed(self) -> bool:
        """Tells whether the times differ by more than a thousandth."""
        return abs(self.difference_us) > _LEAST_CHANGE * max(self.before_us or 0.0, self.after_us or 0.0)

    def is_slower(self, percent: float) -> bool:
        """Tells whether it takes longer than before by more than a percentage."""
        return self.ratio is not None and self.ratio > 1 + percent / 100

    def to_record(self) -> dict[str, Any]:
        """Returns the times, their ratio and those of regions, for JSON."""
        times = {"name": self.name, "before_us": self.before_us, "after_us": self.after_us, "ratio": self.ratio}
        regions = [region.to_record() for region in self.regions]
        return {**times, "regions": regions} if regions else times

    def __str__(self) -> str:
        slower = f", {self.ratio - 1:+.1%}" if self.ratio is not None else ""
        return f"{self.name} takes {self.after_us or 0.0:,.1f} us instead of {self.before_us or 0.0:,.1f}{slower}"


@dataclasses.dataclass(frozen=True)
class Changes:
    """Changes of a program. `print` them for tables.

    Attributes:
      comparison: of the two schedules, as `lowering.compare` makes it of two implementations.
      total: of the whole program.
      kernels: that have at least a thousandth of its time, before or after; what changed most comes first.
    """

    comparison: Comparison
    total: Change
    kernels: tuple[Change, ...]

    def slower(self, percent: float) -> list[Change]:
        """Returns the total and the kernels that take longer than before by more than a percentage."""
        kernels = (kernel for kernel in self.kernels if kernel.is_kernel)
        return [change for change in (self.total, *kernels) if change.is_slower(percent)]

    def to_record(self) -> dict[str, Any]:
        """Returns all changes, for JSON."""
        names = [row.implementation for row in self.comparison.rows]
        kernels = [kernel.to_record() for kernel in self.kernels]
        return {"from": names[0], "to": names[1], "total": self.total.to_record(), "kernels": kernels}

    def table(self) -> Table:
        """Lays out the kernels that changed as a `rich` table, with the regions that changed in them."""
        before, after = (row.implementation for row in self.comparison.rows)
        listed = [kernel for kernel in self.kernels if kernel.is_listed]
        table = Table(title=f"{self.comparison.target}, us by the compiler's schedules", title_justify="left")
        table.add_column("kernel", overflow="fold")
        for name in (before, after, "difference", "ratio"):
            table.add_column(name, justify="right", no_wrap=True)
        for kernel in listed:
            table.add_row(Text(kernel.name, "bold"), *_cells(kernel))
            for region in kernel.regions[:_MOST_REGIONS]:
                table.add_row(Text(f"  {region.name}"), *_cells(region), style="dim")
        same = len(self.kernels) - len(listed)
        if same:
            table.add_row(Text(f"{same} without a change"), "", "", "", "", style="dim")
        table.add_section()
        table.add_row(Text(self.total.name), *_cells(self.total))
        return table

    def __str__(self) -> str:
        return "\n".join([tables.text(self.table()), tables.text(self.comparison.table_by_operator())])


def changes(before: Schedule, after: Schedule, names: tuple[str, str] = ("before", "after")) -> Changes:
    """Compares two schedules of a program.

    Kernels are matched by their names, or where the compiler has numbered them anew by the operator and function that
    they come from and the bytes that they move; regions by their lines.

    Args:
      before: such as `Schedule.load` returns.
      after: for the same target.
      names: of the two, for tables.

    Raises:
      ScheduleError: if they are for different targets.
    """
    if before.target != after.target:
        raise ScheduleError(f"changes: schedules must be for one target; got {before.target} and {after.target}")
    pairs = [pair for pair in _matched(before, after) if max(one.share for one in pair if one) >= LEAST_SHARE]
    kernels = sorted((_change(*pair) for pair in pairs), key=lambda change: -abs(change.difference_us))
    rows = tuple(Compared(name, schedule=one) for name, one in zip(names, (before, after), strict=True))
    total = Change("the program", before.total_us, after.total_us)
    return Changes(Comparison(after.target, rows), total, tuple(kernels))


def _cells(change: Change) -> list[str]:
    times = ["-" if time is None else f"{time:,.1f}" for time in (change.before_us, change.after_us)]
    return [*times, f"{change.difference_us:+,.1f}", "-" if change.ratio is None else f"{change.ratio:.3f}"]


def _matched(before: Schedule, after: Schedule) -> Iterator[tuple[KernelSchedule | None, KernelSchedule | None]]:
    """Yields the kernels before with those after, None where there is no match; the closest matches come first."""
    old, new = list(before.kernels), list(after.kernels)
    for key in _KEYS:
        waiting: dict[Hashable, list[KernelSchedule]] = collections.defaultdict(list)
        for kernel in old:
            waiting[key(kernel)].append(kernel)
        for kernel in tuple(new):
            same = next((one for one in waiting[key(kernel)] if _are_alike(one, kernel)), None)
            if same is not None:
                waiting[key(kernel)].remove(same)
                old.remove(same)
                new.remove(kernel)
                yield same, kernel
    yield from ((kernel, None) for kernel in old)
    yield from ((None, kernel) for kernel in new)


def _are_alike(before: KernelSchedule, after: KernelSchedule) -> bool:
    """Tells whether two that come from the same place may be the same: XLA's own names and numbers say little."""
    if {before.kind, after.kind} & {KERNEL, PROGRAM}:
        return before.kind == after.kind
    fewer, more = sorted(one.calls * one.dma_bytes for one in (before, after))
    return more <= _MOST_BYTES * fewer


def _unnumbered(name: str) -> str:
    return re.sub(r"(\.\d+)+$", "", name)


def _function(kernel: KernelSchedule) -> tuple[str, ...]:
    """Returns what a kernel belongs to, without a line, which any change above it moves."""
    return kernel.kind, kernel.operator, re.sub(r":\d+", "", kernel.source)


_KEYS: tuple[Callable[[KernelSchedule], Hashable], ...] = (
    lambda kernel: (*_function(kernel), kernel.name, kernel.calls, kernel.dma_bytes),
    lambda kernel: (*_function(kernel), _unnumbered(kernel.name), kernel.calls, kernel.dma_bytes),
    lambda kernel: (*_function(kernel), kernel.name),
    lambda kernel: (*_function(kernel), _unnumbered(kernel.name)),
    # Names of Pallas kernels are their authors'.
    lambda kernel: _unnumbered(kernel.name) if kernel.kind == KERNEL else id(kernel),
)


def _change(before: KernelSchedule | None, after: KernelSchedule | None) -> Change:
    if after is None:
        assert before is not None
        return Change(before.name, before.time_us, None)
    if before is None:
        return Change(after.name, None, after.time_us)
    regions = _region_changes(_by_line(before), _by_line(after))
    return Change(after.name, before.time_us, after.time_us, regions, is_kernel=after.kind != PROGRAM)


def _by_line(kernel: KernelSchedule) -> dict[str, float]:
    """Returns the times of a kernel's regions by their line, or their busiest unit where the line is not known."""
    times: dict[str, float] = {}
    for region in kernel.regions:
        name = region.source or f"without a line, {region.bound}"
        times[name] = times.get(name, 0.0) + kernel.time_us * region.cycles / max(kernel.cycles, 1.0)
    return times


def _region_changes(before: Mapping[str, float], after: Mapping[str, float]) -> tuple[Change, ...]:
    if len(before) == len(after) and before.keys() != after.keys():  # the same lines, moved by a change above them
        found = [Change(name, old, new) for old, (name, new) in zip(before.values(), after.items(), strict=True)]
    else:
        found = [Change(name, before.get(name), after.get(name)) for name in dict.fromkeys((*before, *after))]
    least_us = _LEAST_OF_KERNEL * max(sum(before.values()), sum(after.values()))
    listed = [one for one in found if one.is_listed and abs(one.difference_us) > least_us]
    return tuple(sorted(listed, key=lambda one: -abs(one.difference_us)))
