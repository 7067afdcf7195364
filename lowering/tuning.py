"""Tuning results: as a context for tracing, as a file and as a table."""

import dataclasses
import json
import os
import threading
from collections.abc import Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from lowering import tables
from lowering.describe import file_fault, show
from lowering.errors import TuningError
from lowering.measurements import FORMAT, Entry, load
from lowering.select import current_selection, using


class _Entered(threading.local):
    """The contexts that this thread has entered. A frozen result cannot hold them, and may be entered twice."""

    def __init__(self) -> None:
        self.contexts: list[AbstractContextManager[None]] = []


_entered = _Entered()


@dataclasses.dataclass(frozen=True)
class TuningResult:
    """Measurements of `tune`. Code traced within `with result:` takes the fastest implementation.

    A result saved in this library's `lowering/tuned/` ships with it and applies everywhere.
    Contexts nest, also with `lowering.use`; where two measured the same operator at the same shapes, the inner one
    decides. They are part of jit's cache key.

    Attributes:
      entries: one for each operator at each set of shapes.
      stopped: why some measurements are missing, such as "interrupted"; empty if none are.
    """

    entries: tuple[Entry, ...] = ()
    stopped: str = ""

    @property
    def complete(self) -> bool:
        """Tells whether nothing is missing."""
        return not self.stopped

    def __enter__(self) -> "TuningResult":
        outer = current_selection()
        context = using(dataclasses.replace(outer, tuned=merged(outer.tuned, self.entries)))
        context.__enter__()
        _entered.contexts.append(context)
        return self

    def __exit__(self, *exception: Any) -> None:
        _entered.contexts.pop().__exit__(*exception)

    def save(self, path: str | Path) -> None:
        """Writes the result to a file, whole or not at all.

        Raises:
          TuningError: if the file cannot be written, or holds anything but an earlier result.
        """
        if not isinstance(path, str | os.PathLike):
            raise TuningError(f"save: {show(path)} must be a path")
        try:
            self._write(Path(path).resolve())
        except (OSError, ValueError) as error:  # of characters that no path may have
            message = f"save: {show(str(path))} must be a file that can be written; got {file_fault(error)}"
            raise TuningError(message) from None

    def _write(self, path: Path) -> None:
        if path.exists():
            self.load(path)
        unfinished = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            unfinished.write_text(self.to_json() + "\n")
            unfinished.replace(path)
        finally:
            unfinished.unlink(missing_ok=True)

    @classmethod
    def load(cls, path: str | Path) -> "TuningResult":
        """Reads a result that `save` wrote.

        Raises:
          TuningError: if the file is missing, damaged, of another kind or of another format.
        """
        return cls(*load(path))

    def to_json(self) -> str:
        """Writes everything as a JSON object."""
        entries = [entry.to_record() for entry in self.entries]
        return json.dumps({"format": FORMAT, "stopped": self.stopped, "entries": entries}, indent=2)

    def table(self) -> Table:
        """Lays out the entries as a `rich` table, the fastest candidate of each in bold."""
        targets = ", ".join(sorted({entry.key.target for entry in self.entries}))
        replayed = bool(self.entries) and all(entry.replayed for entry in self.entries)
        title = f"{len(self.entries)} {'replayed, not measured,' if replayed else 'measured'}" + (
            f" on {targets}" if targets else ""
        )
        title += f", {self.stopped}" if self.stopped else ""
        table = Table(title=title, title_justify="left")
        for name in ("operator and operands", "implementation"):
            table.add_column(name, overflow="fold")
        table.add_column("median, us", justify="right", no_wrap=True)
        for entry in self.entries:
            details = [", ".join(entry.key.operands), *([entry.key.attributes] if entry.key.attributes else [])]
            about = Text.assemble((entry.key.operator, "bold"), *(f"\n  {line}" for line in details))
            for candidate in entry.candidates:
                is_winner = candidate is entry.winner
                reason = f"\n  {candidate.discarded}" if candidate.discarded else ""
                time = "-" if candidate.median_us is None else f"{candidate.median_us:,.1f}"
                style = "bold" if is_winner else "dim" if candidate.discarded else ""
                way = Text(f"{'*' if is_winner else ' '} {candidate.name}{reason}")  # Text: brackets are not markup
                table.add_row(about, way, time, style=style)
                about = Text()
            table.add_section()
        return table

    def __str__(self) -> str:
        return tables.text(self.table())


def merged(*groups: Iterable[Entry]) -> tuple[Entry, ...]:
    """Merges the entries of all groups; of those with one key, the last one measured and the last one replayed."""
    return tuple({(entry.key, entry.replayed): entry for group in groups for entry in group}.values())
