"""Findings of `rewrite` in a function."""

import dataclasses
import json

from rich.table import Table
from rich.text import Text

from lowering import tables


@dataclasses.dataclass(frozen=True)
class Applied:
    """A place that is rewritten.

    Attributes:
      pattern: the name of the rule.
      source: the line where it begins, such as "model.py:12 (loss_fn)".
      detail: what is computed there, and how it is computed instead.
      saved_bytes: about how many bytes of temporaries this saves on a CPU, where the function is differentiated with
        respect to all that it reads there. Only what every loss keeps is counted, the logits and their cotangent; some
        keep more.
      count: how often it runs.
      remark: what else it changes, or what saves more.
      on_tpu: what is different on TPUs.
      replacement: the public name of an operator that a user could call there.
    """

    pattern: str
    source: str
    detail: str
    saved_bytes: int
    count: int = 1
    remark: str = ""
    on_tpu: str = ""
    replacement: str = ""


@dataclasses.dataclass(frozen=True)
class Refused:
    """A place that looks like a pattern and is left alone.

    Attributes:
      pattern: the name of the rule.
      source: the line where it begins.
      detail: what is computed there.
      reason: why it is left alone.
    """

    pattern: str
    source: str
    detail: str
    reason: str


@dataclasses.dataclass(frozen=True)
class Rewrites:
    """Rewrites of a function for arguments of some shapes. `print` shows a table.

    Attributes:
      applied: what is rewritten, the largest saving first.
      refused: what looks like a pattern and is left alone.
    """

    applied: tuple[Applied, ...]
    refused: tuple[Refused, ...]

    def to_json(self) -> str:
        """Writes everything as a JSON object."""
        return json.dumps(dataclasses.asdict(self), indent=2)

    def tables(self) -> list[Table | Text]:
        """Lays out what is rewritten, and what is left alone, as `rich` tables."""
        found: list[Table | Text] = []
        if self.applied:
            table = _table(f"{len(self.applied)} rewritten", "pattern", "line", "what")
            table.add_column("runs", justify="right")
            table.add_column("saves on a CPU", justify="right", no_wrap=True)
            for one in self.applied:
                what = Text("; ".join(filter(None, (one.detail, one.remark, one.on_tpu))))
                saved = megabytes(one.saved_bytes) if one.saved_bytes else "only time"
                table.add_row(one.pattern, one.source, what, str(one.count), saved)
            found.append(table)
        if self.refused:
            table = _table(f"{len(self.refused)} left alone", "pattern", "line", "what", "because")
            for other in self.refused:
                table.add_row(other.pattern, other.source, Text(other.detail), Text(other.reason))
            found.append(table)
        return found or [Text("nothing to rewrite")]

    def __str__(self) -> str:
        return "\n".join(map(tables.text, self.tables()))


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    for name in columns:
        table.add_column(name, overflow="fold")
    return table


def megabytes(size: int) -> str:
    """Writes a number of bytes with three digits."""
    return f"{size / 1e6:.3g} MB" if size < 1e9 else f"{size / 1e9:.3g} GB"
