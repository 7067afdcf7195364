"""Findings of a replay, for people and for programs."""

import dataclasses
import gzip
import json
import os
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from lowering import tables
from lowering.describe import file_fault, show
from lowering.errors import ScheduleError
from lowering.schedule import saved
from lowering.schedule.chips import CHIPS, Chip, bytes_per_cycle
from lowering.schedule.data_hints import NOTHING_GIVEN, DependsOnDataError, Given
from lowering.schedule.kernel import KernelReplay
from lowering.schedule.perfetto import MOST_KERNELS, trace
from lowering.schedule.program import Called, ProgramReplay, replay_program
from lowering.schedule.rows import KernelSchedule
from lowering.schedule.stored_dumps import StoredDumps
from lowering.tpu_core.dumps import KERNEL, Dumps
from pallas_kernels.hardware import Hardware

_CAVEAT = (
    "Replayed from the compiler's schedule, not measured: host dispatch, throttling, strided DMAs and other chips are "
    "not in it, of SparseCores only what they move; what a program keeps in VMEM from one run to the next is taken to "
    "be there."
)
_OTHERS = "the rest"
_LEAST_SHARE = 0.001  # of the program's time, for a row of the table


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Time of a compiled program on a TPU by its own schedule. `print` it for a table.

    Attributes:
      target: the chip.
      kernels: what takes longest first.
      total_us: of one run, without the host.
      roofline_us: what the chip needs at least, for all matrix products, or to read arguments and write results.
      unknown: opcodes, and whatever else in the program was not understood; figures leave out what it does.
      remarks: what is to be known about these figures.
      border_bytes: of the program's arguments and results.
      stored: the compressed dumps, to replay the program once more; None for a schedule from a file.
    """

    target: str
    kernels: tuple[KernelSchedule, ...]
    total_us: float
    roofline_us: float
    unknown: tuple[str, ...]
    remarks: tuple[str, ...]
    border_bytes: int = 0
    stored: StoredDumps | None = dataclasses.field(default=None, repr=False, compare=False)

    def us_at(self, clock: float, bandwidth: float) -> float:
        """Replays the program once more, at other parts of the chip's nominal clock and of HBM's nominal bandwidth.

        `us_at(1.0, 1.0)` is the time that the data sheet allows, which no chip reaches.

        Raises:
          ScheduleError: if the schedule was loaded from a file.
        """
        stored = self._replayable("us_at")
        chip = dataclasses.replace(stored.chip, clock_efficiency=clock, hbm_efficiency=bandwidth)
        return _us(stored.replay(chip=chip).cycles, chip)

    def _replayable(self, caller: str) -> StoredDumps:
        if self.stored is None:
            raise ScheduleError(f"{caller}: schedule must be one that `compile` has returned; got one from a file")
        return self.stored

    def to_record(self) -> dict[str, Any]:
        """Returns everything, for JSON."""
        record = dataclasses.asdict(dataclasses.replace(self, stored=None))
        return {name: value for name, value in record.items() if name != "stored"}

    def to_json(self) -> str:
        """Returns everything as a JSON object."""
        return json.dumps(self.to_record(), indent=2)

    def table(self) -> Table:
        """Lays out the kernels as a `rich` table."""
        at_best = f", {self.total_us / self.roofline_us:.2f} of the roofline" if self.roofline_us else ""
        table = Table(title=f"{self.target}: {self.total_us:,.1f} us by its schedule{at_best}", title_justify="left")
        table.add_column("kernel", overflow="fold")
        table.add_column("bound by")
        for name in ("calls", "us", "share", "at best", "stalls", "HBM, MB", "DMAs", "spills"):
            table.add_column(name, justify="right", no_wrap=True)
        shown = [kernel for kernel in self.kernels if kernel.share >= _LEAST_SHARE] or list(self.kernels)
        for kernel in shown:
            busiest = sorted(kernel.slots.items(), key=lambda item: -item[1])[:2]
            units = ", ".join(f"{kind} {used:.0%}" for kind, used in busiest if used >= 0.01)
            about = [f"\n  {line}" for line in (kernel.kind, kernel.source) if line]
            table.add_row(
                Text.assemble((kernel.name, "bold"), *((line, "dim") for line in about)),
                Text.assemble(kernel.bound, *([(f"\n  {units}", "dim")] if units else [])),
                f"{kernel.calls:,}",
                f"{kernel.time_us:,.1f}",
                f"{kernel.share:.1%}",
                f"{kernel.roofline_us:,.1f}",
                f"{kernel.stall_cycles / max(kernel.cycles, 1):.0%}",
                f"{kernel.calls * kernel.dma_bytes / 1e6:,.1f}",
                f"{kernel.calls * kernel.dma_count:,}",
                f"{kernel.calls * kernel.spills:,}",
            )
        others = self.kernels[len(shown) :]
        if others:
            time_us, share = sum(kernel.time_us for kernel in others), sum(kernel.share for kernel in others)
            table.add_row(f"{len(others)} more", "", "", f"{time_us:,.1f}", f"{share:.1%}", style="dim")
        return table

    def __str__(self) -> str:
        return tables.text(self.table(), self.remarks)

    def plot(self, path: str | Path | None = None, most: int = 12) -> Any:
        """Draws the kernels that take longest as bars, beside what they need at best.

        Args:
          path: where to save the picture; by default nowhere.
          most: how many kernels have a bar of their own.

        Returns:
          The matplotlib figure.
        """
        from matplotlib.figure import Figure

        shown, rest = self.kernels[:most], self.kernels[most:]
        names = [f"{kernel.name} ({kernel.bound})" for kernel in shown] + ([_OTHERS] if rest else [])
        times = [kernel.time_us for kernel in shown] + ([sum(kernel.time_us for kernel in rest)] if rest else [])
        at_best = [kernel.roofline_us for kernel in shown] + ([0.0] if rest else [])
        figure = Figure(figsize=(8, 1 + 0.4 * len(names)), layout="constrained")
        axes = figure.subplots()
        axes.barh(names, times, label="by its schedule")
        axes.barh(names, at_best, height=0.3, label="at best")
        axes.invert_yaxis()
        axes.set_xlabel("us")
        axes.set_title(f"{self.target}: {self.total_us:,.1f} us, replayed")
        axes.legend()
        if path is not None:
            figure.savefig(path)
        return figure

    def to_perfetto(self, path: str | Path) -> None:
        """Writes a trace of the program over time, which https://ui.perfetto.dev and chrome://tracing open.

        It has the kernels one after the other, within them their steps, regions of bundles and waits for semaphores,
        beside them transfers, and how much of each kind of unit is used. Of a kernel with many steps, the first and
        the last are in detail. The program is replayed once more for it.

        Args:
          path: where to write it; it is compressed if that ends in ".gz".

        Raises:
          ScheduleError: if the file cannot be written, or the schedule was itself loaded from a file.
        """
        stored = self._replayable("to_perfetto")
        program = stored.replay({kernel.name for kernel in self.kernels[:MOST_KERNELS]})
        found = trace(self.kernels, program, stored.chip, self.target, self.remarks)
        text = json.dumps(found, separators=(",", ":")).encode()
        _write("to_perfetto", path, gzip.compress(text, mtime=0) if str(path).endswith(".gz") else text)

    def save(self, path: str | Path) -> None:
        """Writes everything to a file, for `load`.

        Raises:
          ScheduleError: if the file cannot be written, or holds anything but an earlier schedule.
        """
        if isinstance(path, str | os.PathLike) and os.path.isfile(path):
            self.load(path)
        _write("save", path, f"{self.to_json()}\n".encode())

    @classmethod
    def load(cls, path: str | Path) -> "Schedule":
        """Reads what `save` wrote.

        Raises:
          ScheduleError: if the file is missing, damaged or of another kind.
        """
        return cls(**saved.read(path))


def _write(caller: str, path: str | Path, content: bytes) -> None:
    try:
        Path(path).write_bytes(content)
    except (OSError, TypeError, ValueError) as error:  # of characters that no path may have
        message = f"{caller}: {show(str(path))} must be a file that can be written; got {file_fault(error)}"
        raise ScheduleError(message) from None


def schedule_of(folder: Path, hardware: Hardware, *, border_bytes: int, given: Given = NOTHING_GIVEN) -> Schedule:
    """Replays what the compiler has written to a folder.

    Args:
      folder: where libtpu wrote, with the flags that `dumps.libtpu_flags` gives.
      hardware: the chip.
      border_bytes: of the program's arguments and results.
      given: what the caller says of data.

    Raises:
      DependsOnDataError: where data decides what happens, and the caller does not say what.
    """
    chip = CHIPS[hardware.name]
    dumps = Dumps(folder)
    hbm = bytes_per_cycle(chip, hardware)
    unused = given.unused(dumps.instructions)
    kernels = [name for name, instruction in dumps.instructions.items() if instruction.opcode == KERNEL]
    of_nothing = f"the program has no {' and no '.join(unused)}: its kernels are {', '.join(kernels) or 'none'}"
    try:
        program = replay_program(dumps, chip, hbm, given)
    except DependsOnDataError as error:
        raise DependsOnDataError(f"{error}; {of_nothing}") if unused else error from None
    rows = [_row(name, called, dumps, chip, program.cycles) for name, called in program.called.items()]
    rows.append(_rest(program, chip, hbm))
    in_products = sum(called.calls * _matmul_cycles(called.replay, chip) for called in program.called.values())
    remarks = [_CAVEAT, f"{hardware.name}: {chip.accuracy}."]
    if program.unknown:
        remarks.append(f"Not understood, and left out: {', '.join(sorted(program.unknown))}.")
        if any(entry.startswith(("a wait at ", "a check at ")) for entry in program.unknown):
            remarks.append("`jaxops emulate` shows whether the chip would wait there forever, or halt.")
    remarks += [f"{of_nothing[0].upper()}{of_nothing[1:]}."] if unused else []
    if given.trip_counts:
        counts = ", ".join(f"{name} {count:g}" for name, count in given.trip_counts.items())
        remarks.append(f"Data decides how often, and the caller said: {counts}.")
    if given.scalars:
        remarks.append(f"The caller said what operands hold: of {', '.join(given.scalars)}.")
    return Schedule(
        target=hardware.name,
        kernels=tuple(sorted(rows, key=lambda row: -row.time_us)),
        total_us=_us(program.cycles, chip),
        roofline_us=_us(max(in_products, border_bytes / (hbm * (hardware.cores or 1))), chip),
        unknown=tuple(sorted(program.unknown)),
        remarks=tuple(remarks),
        border_bytes=border_bytes,
        stored=StoredDumps(dumps, hardware, given),
    )


def _us(cycles: float, chip: Chip) -> float:
    return cycles / chip.hz * 1e6


def _matmul_cycles(replay: KernelReplay, chip: Chip) -> float:
    return replay.work["MXU"] / chip.slots["MXU"]


def _row(name: str, called: Called, dumps: Dumps, chip: Chip, total_cycles: float) -> KernelSchedule:
    replay = called.replay
    at_best = max(replay.hbm_cycles, _matmul_cycles(replay, chip))
    instruction = dumps.instructions.get(name)
    return KernelSchedule(
        name=name,
        kind=instruction.opcode if instruction is not None else "",
        source=instruction.source if instruction is not None else "",
        operator=instruction.operator if instruction is not None else "",
        calls=called.calls,
        cycles=replay.cycles,
        time_us=_us(called.cycles, chip),
        share=called.cycles / total_cycles,
        dma_bytes=replay.dma_bytes,
        dma_count=replay.dma_count,
        stall_cycles=replay.stall_cycles,
        spills=replay.spills,
        slots=replay.shares(chip),
        bound=replay.bound(chip),
        roofline_us=_us(called.calls * at_best, chip),
        regions=replay.regions,
    )


def _rest(program: ProgramReplay, chip: Chip, hbm: float) -> KernelSchedule:
    """Returns the part that the top-level program does itself."""
    cycles = program.cycles - sum(called.cycles for called in program.called.values())
    return KernelSchedule(
        name="program",
        kind="program",
        source="",
        operator="",
        calls=1,
        cycles=cycles,
        time_us=_us(cycles, chip),
        share=cycles / program.cycles if program.cycles else 1.0,
        dma_bytes=program.copy_bytes,
        dma_count=program.copy_count,
        stall_cycles=program.stall_cycles,
        spills=0,
        slots={},
        bound="HBM" if program.stall_cycles > cycles / 2 else "scalar",
        roofline_us=_us(min(program.copy_bytes / hbm, cycles), chip),
    )
