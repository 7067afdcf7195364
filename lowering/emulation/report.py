"""Findings of an emulation, for people and for programs."""

import dataclasses
import itertools
import json
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from rich.table import Table
from rich.text import Text

from lowering import tables
from lowering.describe import counted
from lowering.tpu_core.bundles import Bundle

NOTHING = "nothing was found"


@dataclasses.dataclass(frozen=True)
class Finding:
    """Something that a kernel does and should not, or a result that depends on what must not decide it.

    Attributes:
      kernel: its name; of a whole program, also that of another part, or "program".
      source: where it is called, such as "model.py:12 (loss)"; empty for "program".
      what: what was found, in words; with the bundle, and its line where that is known.
    """

    kernel: str
    source: str
    what: str


@dataclasses.dataclass(frozen=True)
class Region:
    """Bundles of a kernel that follow one another.

    Attributes:
      first: the number of the first bundle, as in the compiler's dump.
      last: of the last.
      lines: of the source that they come from, such as "model.py:12", where the compiler says so.
    """

    first: int
    last: int
    lines: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class EmulatedKernel:
    """One kernel of the function.

    Attributes:
      name: as its author or the compiler calls it.
      source: where it is called; empty where the compiler does not know, or for a whole program.
      calls: how often it was called.
      seconds: how long all executions took.
      bundles: how many it has.
      issued: how many of these were issued at least once.
      transfers: how many the first call started.
      never_issued: the others.
    """

    name: str
    source: str
    calls: int
    seconds: float
    bundles: int
    issued: int
    transfers: int
    never_issued: tuple[Region, ...]

    @classmethod
    def of(
        cls,
        name: str,
        source: str,
        bundles: Sequence[Bundle],
        issues: np.ndarray,
        calls: int,
        seconds: float,
        transfers: int,
    ) -> "EmulatedKernel":
        """Describes a kernel whose bundles were issued so often."""
        never_issued = tuple(_regions(bundles, issues == 0))
        return cls(name, source, calls, seconds, len(bundles), int(np.count_nonzero(issues)), transfers, never_issued)

    @property
    def coverage(self) -> float:
        """The part of the bundles that were issued, from 0 to 1."""
        return self.issued / max(1, self.bundles)


@dataclasses.dataclass(frozen=True)
class Emulation:
    """Results of a function whose kernels were executed as they are compiled for a chip. `print` shows a table.

    Attributes:
      target: the chip.
      results: what the function returns: its pytree, of arrays on the CPU.
      kernels: those that were executed, in the order of their first calls.
      findings: what they do and should not; empty is what one hopes for.
      unknown: opcodes and operands, in bundles that were never issued, whose meaning nobody has settled.
      is_whole_program: whether `kernels` are all parts of the program: itself, its fusions and copies as well.
      is_checked: whether other orders of transfers were tried, and other bits in unwritten memory.
      passed_over: kernels that were not executed, and why.
    """

    target: str
    results: Any
    kernels: tuple[EmulatedKernel, ...]
    findings: tuple[Finding, ...]
    unknown: tuple[str, ...]
    is_whole_program: bool = False
    is_checked: bool = True
    passed_over: tuple[str, ...] = ()

    @property
    def coverage(self) -> float:
        """The part of all kernels' bundles that were issued, from 0 to 1."""
        total = sum(kernel.bundles for kernel in self.kernels)
        return sum(kernel.issued for kernel in self.kernels) / max(1, total)

    def to_json(self) -> str:
        """Writes everything but the results as a JSON object."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        del fields["results"]
        fields["kernels"] = [dataclasses.asdict(kernel) for kernel in self.kernels]
        fields["findings"] = [dataclasses.asdict(finding) for finding in self.findings]
        return json.dumps(fields, indent=2)

    def tables(self) -> list[Table | Text]:
        """Lays out the kernels, and what was found, as `rich` tables."""
        if not self.kernels:
            return [Text("; ".join([f"{self.target}: no Pallas kernel runs", *self.passed_over]))]
        noun = "part" if self.is_whole_program else "kernel"
        what = f"{'the whole program, ' if self.is_whole_program else ''}{counted(len(self.kernels), noun)}"
        table = Table(title=f"{self.target}: {what}, executed as compiled", title_justify="left")
        table.add_column(noun, overflow="fold")
        for name in ("calls", "s", "bundles", "issued", "DMAs"):
            table.add_column(name, justify="right")
        for kernel in self.kernels:
            table.add_row(
                Text.assemble(kernel.name, (f"\n  {kernel.source}" if kernel.source else "", "dim")),
                f"{kernel.calls:,}",
                f"{kernel.seconds:.2f}",
                f"{kernel.bundles:,}",
                f"{kernel.coverage:.0%}",
                f"{kernel.transfers:,}",
            )
        found: list[Table | Text] = [table]
        found += [Text(f"{one.kernel}{f' ({one.source})' if one.source else ''}: {one.what}") for one in self.findings]
        if not self.findings:
            untried = "" if self.is_checked else ", and no other order of transfers was tried"
            found.append(Text(f"{NOTHING}{untried}"))
        if self.unknown:
            found.append(Text(f"not settled, in bundles that were not issued: {'; '.join(self.unknown)}"))
        return found

    def __str__(self) -> str:
        return "\n".join(map(tables.text, self.tables()))


def _regions(bundles: Sequence[Bundle], is_in: np.ndarray) -> Iterator[Region]:
    """Yields the regions of bundles that are marked and do something."""
    for marked, numbers in itertools.groupby(range(len(bundles)), key=lambda number: bool(is_in[number])):
        if marked:
            first, *others = numbers
            last = others[-1] if others else first
            inside = bundles[first : last + 1]
            if any(bundle.instructions for bundle in inside):
                lines = dict.fromkeys(line for bundle in inside for line in bundle.lines)
                yield Region(first, last, tuple(lines))
