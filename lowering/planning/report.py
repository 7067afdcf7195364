"""Findings of a plan: a row for each slice and mesh, as a table, as JSON and as a picture."""

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.table import Table

from lowering import tables
from lowering.planning.collectives import Collective

_REMARKS = (
    "bound: the compiler's program with everything overlapped; in turn: with nothing overlapped. Neither has "
    "stragglers, latencies, input from the host, or matrix units that are not full.",
)


_TIMES = {
    "matmul": "matmul_seconds",
    "memory": "memory_seconds",
    "links": "link_seconds",
    "host": "host_seconds",
}


@dataclasses.dataclass(frozen=True)
class TimedCollective(Collective):
    """A collective, and the least time that all its runs in one step need on the published links.

    Attributes:
      seconds: of all runs.
    """

    seconds: float = 0.0


@dataclasses.dataclass(frozen=True)
class Row:
    """A function on one mesh of one slice. All figures are for one step on one chip, if not said otherwise.

    Attributes:
      target: the slice, such as "tpu-v5e:16x16".
      mesh: the sizes of its axes.
      devices: of the whole slice.
      variant: the name of the function, where several are planned.
      fits: whether the memory suffices; None if the compiler refuses the function for another reason.
      memory_bytes: what the program needs at its peak, or what the compiler says it would need.
      memory_limit_bytes: what the chip has, or what the compiler says it has.
      collectives: all communication, what takes longest first.
      matmul_flops: of matrix products.
      matmul_seconds: these at the published rate.
      memory_seconds: to read arguments, to write results, and to write and read temporaries, once each.
      link_seconds: of all collectives, one after the other.
      host_bytes: that are stored in host memory and read back.
      host_seconds: of these, one after the other, at the published rate; None where none is published.
      replayed_seconds: by the compiler's own schedule, for a single TPU if all of its schedule can be replayed.
      tokens_per_second: of the whole slice at `bound_seconds`; None without `tokens`.
      cost_per_step: of the whole slice at `bound_seconds`; None without a price.
      compile_seconds: what it took to lower and compile.
      refusal: why there is no program; empty if there is one.
      remarks: what is to be known about these figures.
    """

    target: str
    mesh: Mapping[str, int]
    devices: int
    fits: bool | None
    memory_bytes: int | None
    memory_limit_bytes: int | None
    collectives: tuple[TimedCollective, ...] = ()
    matmul_flops: int = 0
    matmul_seconds: float | None = None
    memory_seconds: float | None = None
    link_seconds: float | None = None
    host_bytes: int = 0
    host_seconds: float | None = None
    replayed_seconds: float | None = None
    tokens_per_second: float | None = None
    cost_per_step: float | None = None
    compile_seconds: float = 0.0
    refusal: str = ""
    remarks: tuple[str, ...] = ()
    variant: str = ""

    @property
    def name(self) -> str:
        """The slice, the mesh and the variant on one line."""
        return " ".join(filter(None, (self.target, mesh_text(self.mesh), self.variant)))

    @property
    def spare_bytes(self) -> int | None:
        """The bytes by which it fits, or, below zero, does not fit."""
        if self.memory_bytes is None or self.memory_limit_bytes is None:
            return None
        return self.memory_limit_bytes - self.memory_bytes

    @property
    def times(self) -> dict[str, float]:
        """The known times by what takes them: "matmul", "memory", "links" and "host"."""
        times = {name: getattr(self, field) for name, field in _TIMES.items()}
        return {name: seconds for name, seconds in times.items() if seconds is not None}

    @property
    def bound(self) -> str:
        """The part that takes longest; empty if nothing is known."""
        return max(self.times, key=lambda name: self.times[name], default="")

    @property
    def bound_seconds(self) -> float | None:
        """The least time of a step: everything at once, and the slowest decides."""
        return max(self.times.values(), default=None)

    @property
    def serial_seconds(self) -> float | None:
        """The time if nothing overlaps: one after the other."""
        return sum(self.times.values()) if self.times else None

    def to_record(self) -> dict[str, Any]:
        """Returns everything, for JSON; a group of chips by its size."""
        derived = ("spare_bytes", "bound", "bound_seconds", "serial_seconds")
        found = [{**dataclasses.asdict(one), "group": one.group_size} for one in self.collectives]
        return {
            **dataclasses.asdict(self),
            "collectives": found,
            **{name: getattr(self, name) for name in derived},
        }


@dataclasses.dataclass(frozen=True)
class Plan:
    """Slices and meshes on which a function could run. `print` it for a table.

    Attributes:
      rows: what fits, that with the least time first; then what does not, by how much; then what is refused.
      stopped: why something is missing, such as "stopped at the time budget: 3 of 12 left"; empty if nothing is.
    """

    rows: tuple[Row, ...]
    stopped: str = ""

    @property
    def best(self) -> Row | None:
        """The first row, if it fits."""
        return self.rows[0] if self.rows and self.rows[0].fits else None

    def to_json(self) -> str:
        """Writes everything as a JSON object."""
        record = {"rows": [row.to_record() for row in self.rows], "stopped": self.stopped, "remarks": _REMARKS}
        return json.dumps(record, indent=2)

    def table(self) -> Table:
        """Lays out the rows as a `rich` table."""
        count = sum(row.fits is True for row in self.rows)
        title = f"{count} of {len(self.rows)} fit" + (f"; {self.stopped}" if self.stopped else "")
        table = Table(title=title, title_justify="left")
        table.add_column("target and mesh", no_wrap=True)
        table.add_column("fits", no_wrap=True)
        offloads = any(row.host_bytes for row in self.rows)
        columns = ["GB", "spare GB", "matmul", "HBM", "links", *["host"] * offloads, "bound", "in turn"]
        for name in (*columns, "tokens/s", "cost"):
            table.add_column(name, justify="right", no_wrap=True)
        for row in self.rows:
            memory = [_gigabytes(size) for size in (row.memory_bytes, row.spare_bytes)]
            times = [row.matmul_seconds, row.memory_seconds, row.link_seconds, *[row.host_seconds] * offloads]
            times += [row.bound_seconds, row.serial_seconds]
            table.add_row(
                "\n  ".join(filter(None, (row.target, mesh_text(row.mesh), row.variant))),
                "refused" if row.fits is None else "yes" if row.fits else "no",
                *memory,
                *map(_time, times),
                "" if row.tokens_per_second is None else f"{row.tokens_per_second:,.0f}",
                "" if row.cost_per_step is None else f"{row.cost_per_step:.4g}",
            )
        return table

    @property
    def remarks(self) -> list[str]:
        """The lines below the table."""
        refused = [f"{row.name}: {row.refusal}" for row in self.rows if row.refusal]
        known = _REMARKS if len(refused) < len(self.rows) else ()
        return [*refused, *known, *dict.fromkeys(remark for row in self.rows for remark in row.remarks)]

    def __str__(self) -> str:
        return tables.text(self.table(), self.remarks)

    def plot(self, path: str | Path | None = None) -> Any:
        """Draws memory and times as bars, a row for each slice, mesh and variant with a program.

        Args:
          path: where to save the picture; by default nowhere.

        Returns:
          The matplotlib figure.
        """
        from matplotlib.figure import Figure

        rows = [row for row in self.rows if row.memory_bytes is not None]
        names = [row.name for row in rows]
        figure = Figure(figsize=(11, 1.2 + 0.35 * len(rows)), layout="constrained")
        memory, times = figure.subplots(1, 2, sharey=True)
        memory.barh(
            names, [(row.memory_bytes or 0) / 1e9 for row in rows], color=["C0" if row.fits else "C3" for row in rows]
        )
        limits = [(row.memory_limit_bytes or math.nan) / 1e9 for row in rows]
        memory.plot(limits, names, "k|", markersize=14, label="what a chip has")
        memory.set_xlabel("memory of a chip, GB")
        memory.set_xscale("log")
        memory.legend()
        left = [0.0] * len(rows)
        for name in [name for name in _TIMES if any(row.times.get(name) for row in rows)]:
            seconds = [row.times.get(name, 0.0) for row in rows]
            times.barh(names, seconds, left=left, label=name)
            left = [before + more for before, more in zip(left, seconds, strict=True)]
        times.plot([row.bound_seconds or math.nan for row in rows], names, "k|", markersize=14, label="bound")
        times.set_xlabel("seconds of a step, in turn")
        times.legend()
        memory.invert_yaxis()
        if path is not None:
            figure.savefig(path)
        return figure


def ordered(rows: list[Row]) -> tuple[Row, ...]:
    """Sorts what fits by the time in turn, which tells apart meshes with like bounds; the others by what they lack."""

    def key(row: Row) -> tuple[float, ...]:
        if row.fits:
            return 0, row.serial_seconds or 0.0
        return (1, -(row.spare_bytes or 0)) if row.fits is False else (2, 0)

    return tuple(sorted(rows, key=key))


def mesh_text(mesh: Mapping[str, int]) -> str:
    """Writes a mesh on one line, such as "data=4, tensor=4"."""
    return ", ".join(f"{name}={size}" for name, size in mesh.items())


def _gigabytes(size: int | None) -> str:
    return "" if size is None else f"{size / 1e9:,.{1 if abs(size) >= 1e8 else 3}f}"


def _time(seconds: float | None) -> str:
    if seconds is None:
        return ""
    unit, name = next(((unit, name) for unit, name in ((1, "s"), (1e-3, "ms")) if seconds >= unit), (1e-6, "us"))
    return f"{seconds / unit:.3g} {name}"
