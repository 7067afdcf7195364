"""A replay as a trace of events over time, in the format that ui.perfetto.dev and chrome://tracing open.

Slices are pairs of events of kinds "B" and "E", so that they nest however a viewer rounds times. Transfers overlap, so
they are asynchronous events, "b" and "e". The units' use is counters, "C".
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lowering.schedule.chips import Chip
from lowering.schedule.detail import Detail, Piece, Pieces, detail, transfers_of
from lowering.schedule.kernel import KernelReplay
from lowering.schedule.program import ProgramReplay
from lowering.schedule.rows import KernelSchedule
from lowering.schedule.timeline import Call, Passage, Recording, Transfer, Wait

MOST_KERNELS = 64
_MOST_EVENTS = 3000  # of one kernel
_MOST_EVENTS_OF_PROGRAM = 20_000
_PROCESS, _CORE = 1, 1
_UNITS = "use of the units, %"
_PICOSECONDS = 6  # digits of a microsecond
_ABOUT = (
    f"The first call of each of the {MOST_KERNELS} kernels that take longest is shown in detail, up to about "
    f"{_MOST_EVENTS:,} events: where it has more, its first and its last steps, and one slice for those between. "
    "Kernels are replayed alone; what copies that run meanwhile cost them is at their end."
)


def trace(
    rows: Sequence[KernelSchedule], program: ProgramReplay, chip: Chip, target: str, remarks: Sequence[str]
) -> dict[str, Any]:
    """Returns the trace of a program that was recorded, for JSON."""
    writer = _Writer({row.name: row for row in rows}, chip)
    assert program.recording is not None
    writer.program(program.recording, program.cycles)
    named = {"process_name": f"{target}, replayed by the compiler's schedule", "thread_name": "core: kernels and waits"}
    names = [
        {"ph": "M", "pid": _PROCESS, "tid": _CORE, "name": kind, "args": {"name": name}} for kind, name in named.items()
    ]
    about = {"target": target, "detail": _ABOUT, "remarks": list(remarks)}
    return {"displayTimeUnit": "ns", "otherData": about, "traceEvents": [*names, *writer.events]}


class _Writer:
    """The events of one trace, in the order in which slices begin and end."""

    def __init__(self, rows: Mapping[str, KernelSchedule], chip: Chip) -> None:
        self._rows = rows
        self._chip = chip
        self._ids = itertools.count(1)
        self._calls: dict[str, itertools.count[int]] = {}
        self._in_detail: set[int] = set()
        self._used: Mapping[str, float] = {}
        self.events: list[dict[str, Any]] = []

    def program(self, recording: Recording, cycles: float) -> None:
        """Writes kernels, and between them what the top-level program does itself, which adds up to all its time."""
        shown = detail(recording, _MOST_EVENTS_OF_PROGRAM)
        now = self._passages_of_program(shown.first, 0.0)
        if shown.omitted is not None:
            omitted, end = shown.omitted, shown.last[0].at if shown.last else cycles
            calls = sum(omitted.calls.values())
            args = {"calls": dict(omitted.calls), "us in kernels": self._us(omitted.called_cycles)}
            moved = {"HBM bytes of copies": omitted.hbm_bytes}
            self._slice(f"{calls:,} calls of kernels, not in detail", now, end, {**args, **moved})
            for name, count in omitted.calls.items():
                self._calls[name] = itertools.count(next(self._calls_of(name)) + count)
            now = self._passages_of_program(shown.last, end)
        self._own(now, cycles, [])

    def _passages_of_program(self, passages: Iterable[Passage], now: float) -> float:
        """Writes what happens from a time on; returns when the last kernel in it is done."""
        waits: list[Wait] = []
        for event in (event for passage in passages for event in passage.events):
            match event:
                case Wait():
                    waits.append(event)
                case Transfer():
                    self._transfer(event, 0.0, "copy beside kernels, ")
                case Call():
                    self._own(now, event.at, waits)
                    self._call(event)
                    now, waits = event.at + event.cycles, []
        if waits:
            end = waits[-1].at + waits[-1].cycles
            self._own(now, end, waits)
            now = end
        return now

    def _own(self, start: float, end: float, waits: Iterable[Wait]) -> None:
        """Writes what the top-level program does itself, which is to wait for copies that it has started."""
        if end > start:
            self._begin("program", start, {})
            self._counters(start, dict.fromkeys(self._chip.slots, 0.0))
            for wait in waits:
                self._slice("waits for a copy", wait.at, wait.at + wait.cycles)
            self._end(end)

    def _call(self, call: Call) -> None:
        row, replay = self._rows[call.name], call.replay
        number = next(self._calls_of(call.name))
        args = {
            "call": f"{number:,} of {row.calls:,}",
            "kind": row.kind,
            "source": row.source,
            "operator": row.operator,
            "bound by": row.bound,
            "cycles": replay.cycles,
            "HBM bytes": replay.dma_bytes,
            "DMAs": replay.dma_count,
        }
        self._begin(call.name, call.at, {name: value for name, value in args.items() if value != ""})
        if replay.recording is not None and id(replay) not in self._in_detail:
            self._in_detail.add(id(replay))
            self._kernel(replay, call.at)
        else:
            self._counters(call.at, replay.shares(self._chip))
        alone = call.at + replay.cycles
        if call.cycles > replay.cycles:
            self._slice("slowed by copies that run meanwhile", alone, call.at + call.cycles)
        self._end(call.at + call.cycles)

    def _calls_of(self, name: str) -> "itertools.count[int]":
        return self._calls.setdefault(name, itertools.count(1))

    def _kernel(self, replay: KernelReplay, offset: float) -> None:
        """Writes one call of a kernel that starts at a time."""
        assert replay.recording is not None
        shown = detail(replay.recording, _MOST_EVENTS)
        pieces = Pieces(replay.recording, shown.loop, self._chip)
        turns = shown.loop.turns if shown.loop is not None else 0
        step = self._pieces(pieces, shown.first, 0, turns, offset)
        for transfer in transfers_of([*shown.first, *shown.last]):
            self._transfer(transfer, offset, "")
        if shown.omitted is None:
            return
        start = shown.first[-1].end if shown.first else 0.0
        end = shown.last[0].at if shown.last else replay.cycles
        before = turns - _starts(shown, shown.last)
        omitted = shown.omitted
        args = {"HBM bytes": omitted.hbm_bytes, "DMAs": omitted.transfers, "us of waits": self._us(omitted.wait_cycles)}
        name = "what is between"
        if shown.loop is not None:
            name, args["steps"] = f"steps {step + 1:,} to {before:,} of {turns:,}", before - step
        self._counters(offset + start, pieces.used_by(omitted, end - start))
        self._slice(f"{name}, not in detail", offset + start, offset + end, args)
        self._pieces(pieces, shown.last, before, turns, offset)

    def _pieces(self, pieces: Pieces, passages: Sequence[Passage], step: int, turns: int, offset: float) -> int:
        """Writes the regions and steps in passages, before which so many steps have begun; returns how many have."""
        open_until: float | None = None  # of the step that is open
        for piece in pieces.of(passages, step):
            start, end = offset + piece.start, offset + piece.end
            if open_until is not None and (piece.begins or not piece.step):
                self._end(open_until)
                open_until = None
            if piece.begins:
                step = piece.step
                self._begin(f"step {step:,} of {turns:,}", start, {})
            open_until = end if piece.step else None
            self._counters(start, pieces.used(piece.first, piece.last, end - start))
            self._begin(_name(piece), start, {"bundles": _bundles(piece), "busiest": piece.region.bound})
            for wait in piece.waits:
                waited = offset + wait.at
                self._slice("waits for a semaphore", waited, waited + wait.cycles, {"bundle": f"{wait.number:#x}"})
            self._end(end)
        if open_until is not None:
            self._end(open_until)
        return step

    def _transfer(self, transfer: Transfer, offset: float, about: str) -> None:
        args: dict[str, Any] = {"bytes": transfer.size_bytes, "HBM bytes": transfer.hbm_bytes}
        common = {"cat": "DMA", "id": str(next(self._ids)), "name": f"DMA, {about}{_route(transfer.opcode)}"}
        for kind, at, more in (("b", transfer.at, {"args": args}), ("e", transfer.done, {})):
            self.events.append({"ph": kind, "ts": self._us(offset + at), "pid": _PROCESS, **common, **more})

    def _slice(self, name: str, start: float, end: float, args: Mapping[str, Any] | None = None) -> None:
        self._begin(name, start, args or {})
        self._end(end)

    def _begin(self, name: str, at: float, args: Mapping[str, Any]) -> None:
        about = {"args": dict(args)} if args else {}
        self.events.append({"ph": "B", "ts": self._us(at), "pid": _PROCESS, "tid": _CORE, "name": name, **about})

    def _end(self, at: float) -> None:
        self.events.append({"ph": "E", "ts": self._us(at), "pid": _PROCESS, "tid": _CORE})

    def _counters(self, at: float, used: Mapping[str, float]) -> None:
        percent = {kind: round(100 * part, 1) for kind, part in used.items()}
        if percent != self._used:
            self._used = percent
            self.events.append({"ph": "C", "ts": self._us(at), "pid": _PROCESS, "name": _UNITS, "args": percent})

    def _us(self, cycles: float) -> float:
        return round(cycles / self._chip.hz * 1e6, _PICOSECONDS)


def _starts(shown: Detail, passages: Iterable[Passage]) -> int:
    """Counts the steps that begin in passages."""
    loop = shown.loop
    return 0 if loop is None else sum(passage.first <= loop.first <= passage.last for passage in passages)


def _name(piece: Piece) -> str:
    return piece.region.source or f"bundles {piece.region.first:#x}-{piece.region.last:#x} ({piece.region.bound})"


def _bundles(piece: Piece) -> str:
    return f"{piece.first:#x}-{piece.last:#x}"


def _route(opcode: str) -> str:
    """Says where a transfer goes, such as "HBM to VMEM"."""
    route = opcode.removeprefix("dma.")
    source, _, destination = route.partition("_to_")
    return f"{source.upper()} to {destination.upper()}" if destination else f"between any two places ({route})"
