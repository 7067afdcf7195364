"""Findings of `check_operator`."""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from rich.table import Table
from rich.text import Text

from lowering import tables
from lowering.describe import counted


class Broken(NamedTuple):
    """A promise that a function breaks.

    Attributes:
      promise: its name, one of `PROMISES`.
      found: what was compared and how far apart the two are, or what was raised.
    """

    promise: str
    found: str


class Skipped(NamedTuple):
    """A promise that could not be checked.

    Attributes:
      promise: its name, one of `PROMISES`.
      reason: why, and what to give so that it can be checked.
    """

    promise: str
    reason: str


@dataclasses.dataclass(frozen=True)
class Report:
    """Report on the promises that a function keeps or breaks. `print` shows a table.

    Attributes:
      function: its name.
      kept: the names of the promises that hold.
      broken: those that do not, each with what was found.
      skipped: those that could not be checked, each with the reason.
    """

    function: str
    kept: tuple[str, ...]
    broken: tuple[Broken, ...]
    skipped: tuple[Skipped, ...]

    def raise_if_broken(self) -> None:
        """Raises AssertionError with a sentence for each broken promise, if there is any."""
        if self.broken:
            sentences = "".join(
                f"\n  {', '.join(promises)}: {found}" for found, promises in _by_finding(self.broken).items()
            )
            raise AssertionError(f"{self.function} breaks {counted(len(self.broken), 'promise')}:{sentences}")

    def table(self) -> Table:
        """Lays out the promises as a table: broken ones first, then skipped ones, then those that are kept."""
        broken, kept, skipped = (len(each) for each in (self.broken, self.kept, self.skipped))
        title = f"{self.function}: {broken} broken, {kept} kept, {skipped} skipped"
        table = Table(title=Text(title), title_justify="left")
        table.add_column("promise", no_wrap=True)
        table.add_column("", no_wrap=True)
        table.add_column("what was found")
        for pairs, what, colour in ((self.broken, "broken", "red"), (self.skipped, "skipped", "yellow")):
            for found, promises in _by_finding(pairs).items():
                table.add_row("\n".join(promises), Text(what, colour), Text(found))
        for promise in self.kept:
            table.add_row(promise, Text("kept", "green"), "")
        return table

    def __str__(self) -> str:
        return tables.text(self.table())


def _by_finding(pairs: Sequence[tuple[str, str]]) -> dict[str, list[str]]:
    """Groups promises by what was found, in order."""
    found: dict[str, list[str]] = {}
    for promise, what in pairs:
        found.setdefault(what, []).append(promise)
    return found
