"""Findings of a campaign: a row for each kernel at each set of shapes, as a table and as JSON."""

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from lowering import tables
from lowering.measurements import REFERENCE, Entry
from lowering.tuning_store import Found

_STYLES = {"faster": "green", "wrong": "bold red", "fails": "red", "hangs": "bold red", "failed": "red"}


@dataclasses.dataclass(frozen=True)
class Row:
    """Facts about one kernel.

    Attributes:
      operator: its name.
      kernel: the kernel's name; empty for a case that failed as a whole, whose name stands for the operator.
      outcome: "faster" or "slower" than the reference; without times, "verified", "wrong", "hangs", "fails",
        "unfinished" or "refused"; for a case, "failed".
      operands: what it was timed on; empty without times.
      median_us: of its fastest configuration.
      times_of_reference: its time as a part of the reference's.
      detail: a reason, or in how many cases it was right.
    """

    operator: str
    kernel: str
    outcome: str
    operands: str = ""
    median_us: float | None = None
    times_of_reference: float | None = None
    detail: str = ""


@dataclasses.dataclass(frozen=True)
class Campaign:
    """Facts about a device's kernels.

    Attributes:
      target: the device.
      records: everything that was found with these versions, as it is kept.
      stopped: why something is missing, such as "interrupted"; empty if nothing is.
    """

    target: str
    records: tuple[Mapping[str, Any], ...]
    stopped: str = ""

    @property
    def entries(self) -> tuple[Entry, ...]:
        """The measurements."""
        return Found(tuple(map(dict, self.records))).entries

    @property
    def rows(self) -> tuple[Row, ...]:
        """A row for each kernel at each set of shapes that it was timed on; one for a kernel that was not timed."""
        verdicts: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
        for record in self.records:
            if "kernel" in record:
                verdicts.setdefault((record["operator"], record["kernel"]), []).append(record)
        timed = list(_timed_rows(self.entries))
        for row in timed:
            verdicts.setdefault((row.operator, row.kernel), [])
        failed = [
            Row(record["case"], "", "failed", detail=f"{record['stage']}: {record['reason']}")
            for record in self.records
            if record.get("done") and record.get("outcome")
        ]
        found = []
        for (operator, kernel), records in verdicts.items():
            own = _verdict_row(operator, kernel, records)
            times = [row for row in timed if (row.operator, row.kernel) == (operator, kernel)]
            is_right = own.outcome in ("verified", "refused", "")
            found += [dataclasses.replace(row, detail=own.detail) for row in times] if times and is_right else [own]
        return (*found, *failed)

    def to_json(self) -> str:
        """Writes everything as a JSON object."""
        rows = [dataclasses.asdict(row) for row in self.rows]
        return json.dumps({"target": self.target, "stopped": self.stopped, "rows": rows}, indent=2)

    def table(self) -> Table:
        """Lays out the rows as a `rich` table."""
        counts: dict[str, int] = {}
        for row in self.rows:
            counts[row.outcome] = counts.get(row.outcome, 0) + 1
        summary = ", ".join(f"{count} {outcome}" for outcome, count in counts.items()) or "nothing is known"
        title = f"{self.target}: {summary}" + (f"; {self.stopped}" if self.stopped else "")
        table = Table(title=title, title_justify="left")
        table.add_column("kernel", overflow="fold")
        table.add_column("outcome", no_wrap=True)
        table.add_column("detail", overflow="fold")
        for name in ("median, us", "of the reference"):
            table.add_column(name, justify="right", no_wrap=True)
        for row in self.rows:
            about = Text.assemble((row.operator, "bold"), f" {row.kernel}" if row.kernel else "")
            detail = Text("\n".join(filter(None, (row.operands, row.detail))))
            figures = (
                "-" if row.median_us is None else f"{row.median_us:,.1f}",
                "-" if row.times_of_reference is None else f"{row.times_of_reference:.2f}",
            )
            table.add_row(about, Text(row.outcome, _STYLES.get(row.outcome, "")), detail, *figures)
        return table

    def __str__(self) -> str:
        return tables.text(self.table())


def _verdict_row(operator: str, kernel: str, records: Sequence[Mapping[str, Any]]) -> Row:
    """Returns the worst that was said of a kernel."""
    for outcome in ("wrong", "hangs", "fails", "unfinished"):
        for record in records:
            if record["outcome"] == outcome:
                return Row(operator, kernel, outcome, detail=f"{record['reason']} ({', '.join(record['operands'])})")
    verified = sum(record["outcome"] == "verified" for record in records)
    if verified:
        return Row(operator, kernel, "verified", detail=f"right in {verified} {'run' if verified == 1 else 'runs'}")
    refusals = [record["reason"] for record in records if record["outcome"] == "refused"]
    return Row(operator, kernel, "refused" if refusals else "", detail=refusals[0] if refusals else "")


def _timed_rows(entries: Sequence[Entry]) -> Iterator[Row]:
    for entry in entries:
        for kernel in dict.fromkeys(candidate.implementation for candidate in entry.candidates):
            own, part = entry.best(kernel), entry.times_of_reference(kernel)
            if kernel != REFERENCE and own is not None and part is not None:
                outcome, operands = "faster" if part < 1 else "slower", ", ".join(entry.key.operands)
                yield Row(entry.key.operator, kernel, outcome, operands, own.median_us, round(part, 3))
