"""Files of schedules for `jaxops compile`: what is saved, compared with and traced."""

import math
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import typer

from jaxops_command.options import CommandError, ScheduleFiles, require
from jaxops_command.output import show, show_text
from lowering import Schedule, ScheduleError
from lowering.schedule.changes import Change, Changes, changes

_SLOWER = 1
_MOST_NAMED = 3
_T = TypeVar("_T")


def saved(files: ScheduleFiles, target: str) -> Schedule | None:
    """Reads the schedule to compare with, and refuses to overwrite other files, before anything is compiled."""
    if (old := files.save) is not None and old.is_file():
        _in_our_words("--save", lambda: Schedule.load(old))
    if (path := files.against) is None:
        return None
    schedule = _in_our_words("--against", lambda: Schedule.load(path))
    require(schedule.target == target, "--against", f"be a schedule for {target}", f"one for {schedule.target}")
    return schedule


def write(schedule: Schedule, files: ScheduleFiles) -> None:
    """Writes the schedule to the files that are asked for."""
    if (path := files.save) is not None:
        _in_our_words("--save", lambda: schedule.save(path))
    if (trace := files.perfetto) is not None:
        _in_our_words("--perfetto", lambda: schedule.to_perfetto(trace))


def changes_since(before: Schedule, after: Schedule, files: ScheduleFiles) -> Changes:
    """Compares a schedule with the saved one, which must be of operands of the same size."""
    sizes = [f"{schedule.border_bytes:,} bytes of arguments and results" for schedule in (after, before)]
    require(sizes[0] == sizes[1], "--against", f"be a schedule for {sizes[0]}", f"one for {sizes[1]}")
    return changes(before, after, (files.against.name if files.against else "before", "now"))


def show_schedule(schedule: Schedule, since: Changes | None) -> None:
    """Prints a schedule, and what changed since another."""
    show(schedule.table())
    for remark in schedule.remarks:
        show_text(remark)
    if since is None:
        return
    show(since.table())
    if any(row.operator != "other" for row in since.comparison.operators):
        show(since.comparison.table_by_operator())


def record(since: Changes, files: ScheduleFiles) -> dict[str, Any]:
    """Returns what changed, and the names of what is slower than allowed, for JSON."""
    return {**since.to_record(), "slower": [change.name for change in _slower(since, files)]}


def require_speed(since: Changes, files: ScheduleFiles) -> None:
    """Exits with 1 and a sentence if something takes longer than before by more than --slower-than allows."""
    if slower := _slower(since, files):
        more = len(slower) - _MOST_NAMED
        named = [*map(str, slower[:_MOST_NAMED]), *([f"and so do {more} more kernels"] if more > 0 else [])]
        limit = f"slower than {files.against} by more than {files.slower_than:g}%"
        print(f"jaxops: {limit}: {'; '.join(named)}", file=sys.stderr)
        raise typer.Exit(_SLOWER)


def _slower(since: Changes, files: ScheduleFiles) -> list[Change]:
    return since.slower(math.inf if files.slower_than is None else files.slower_than)


def _in_our_words(option: str, run: Callable[[], _T]) -> _T:
    try:
        return run()
    except ScheduleError as error:
        raise CommandError(f"{option}: {str(error).partition(': ')[2]}") from None
