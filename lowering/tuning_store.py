"""Results that "auto" follows: kept on this machine by `jaxops tune`, a file for each kind of device, or shipped."""

import contextlib
import dataclasses
import functools
import hashlib
import itertools
import json
import os
import re
import tempfile
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import platformdirs

from lowering import _jax_private, measurements
from lowering.describe import file_fault, show
from lowering.errors import TuningError
from lowering.evidence import Case, favours
from lowering.measurements import Entry, Key, versions
from lowering.targets import device_name
from pallas_kernels.hardware import Hardware

VARIABLE = "JAXOPS_TUNED"
_SECONDS_TO_WAIT = 20
_SHIPPED = Path(__file__).parent / "tuned"


@dataclasses.dataclass(frozen=True)
class Evidence:
    """Results for one equation of an operator, looked up only where a choice depends on them.

    Attributes:
      operator: its name.
      hardware: the chip that is lowered for; of an unknown chip nothing is known.
      operands: the arrays of the equation, or anything with shape and dtype.
      params: the equation's parameters.
      overlay: the entries of the surrounding contexts, which come before all others.
      is_whole: whether a kernel sees these operands. What was tuned for them does not hold for a device's part.
    """

    operator: str
    hardware: Hardware
    operands: Sequence[Any]
    params: Mapping[str, Any]
    overlay: Sequence[Entry] = ()
    is_whole: bool = True

    @functools.cached_property
    def measured(self) -> Entry | None:
        """Measurements by these versions with these operands."""
        known = self._known("") if self.is_whole else ()
        return next((entry for entry in known if not entry.replayed and entry.key == self._key), None)

    def may_favour(self, kernel: str) -> bool:
        """Tells whether the operator was measured, or anything that ships takes the kernel at some operands."""
        was_measured = any(entry.key.operator == self.operator for entry in self._known(""))
        return self.is_whole and (was_measured or favours(self.operator, kernel, self.hardware))

    @functools.cached_property
    def entry(self) -> Entry | None:
        """The measurements, else what was replayed, else either with other versions."""
        key = self._key if self.is_whole else None
        if self.measured is not None or key is None:
            return self.measured
        known = sorted(self._known("", ".replayed"), key=lambda entry: entry.replayed)
        exact = next((entry for entry in known if entry.key == key), None)
        alike = (entry for entry in known if dataclasses.replace(entry.key, versions=key.versions) == key)
        return exact or next(alike, None)

    @functools.cached_property
    def faults(self) -> dict[str, str]:
        """Reasons why kernels of the operator must not be taken on this device, by name."""
        return measurements.faults(self._known("", ".replayed"), self._target or "").get(self.operator, {})

    def measured_cases(self, kernel: str, kind: str) -> tuple[Case, ...]:
        """Returns what these versions measured of a kernel of the operator on other operands of this kind."""
        found = []
        for entry in self._known(""):
            is_like = entry.key.operator == self.operator and entry.key.versions == versions() and not entry.replayed
            reference, time = entry.best(measurements.REFERENCE), entry.times_of_reference(kernel)
            sizes = dict(entry.kinds).get(kernel)
            if is_like and reference and reference.median_us and time and sizes and sizes.text == kind:
                found.append(Case(self.operator, kernel, kind, sizes.sizes, time, reference.median_us, (0, 0)))
        return tuple(found)

    def verification(self, kernel: str, kind: str) -> "Verification | None":
        """Returns what came of running a kernel of the operator, on a case of this kind, on this device."""
        return None if self._target is None else verifications(self._target).get((self.operator, kernel, kind))

    @functools.cached_property
    def _target(self) -> str | None:
        return device_name(self.hardware)

    @functools.cached_property
    def _key(self) -> Key | None:
        return Key.of(self.operator, self.hardware, self.operands, self.params)

    def _known(self, *shipped: str) -> Iterable[Entry]:
        """Returns all entries that may speak of the target, those that decide first: of what ships, these kinds."""
        if self._target is None:
            return ()
        files = (_SHIPPED / f"{self._target}{kind}.json" for kind in shipped)
        return itertools.chain(self.overlay, entries_for(self._target), *map(_shipped, files))


@functools.cache
def _shipped(path: Path) -> tuple[Entry, ...]:
    """Reads the entries in a file of this library, once; warns about a damaged file and ignores it."""
    if not path.is_file():
        return ()
    try:
        return measurements.load(path)[0]
    except TuningError as error:
        warnings.warn(f"{error}; nothing in it is used", RuntimeWarning, stacklevel=2)
        return ()


@dataclasses.dataclass(frozen=True)
class Verification:
    """Outcome of a kernel's first run on a device.

    Attributes:
      fault: what went wrong; "" if nothing.
      date: when, as in "2026-11-24".
    """

    fault: str
    date: str


@dataclasses.dataclass(frozen=True)
class Found:
    """The records of one device.

    Attributes:
      records: each a JSON object, in the order in which they were found.
      damaged_lines: the numbers of lines that hold no record.
    """

    records: tuple[dict[str, Any], ...] = ()
    damaged_lines: tuple[int, ...] = ()

    @property
    def entries(self) -> tuple[Entry, ...]:
        """The latest measurements and faults of each kernel at each set of shapes."""
        found: dict[Key, Entry] = {}
        for record in self.records:
            if record.get("entry"):
                entry = Entry.from_record(record["entry"])
                found[entry.key] = _joined(found.get(entry.key), entry)
        return tuple(found.values())

    def verifications(self) -> dict[tuple[str, str, str], Verification]:
        """Returns the outcomes with these versions by operator, kernel and kind; the latest of each."""
        found: dict[tuple[str, str, str], Verification] = {}
        for record in self.records:
            one = record.get("verification")
            if isinstance(one, dict) and one.get("versions") == dict(versions()):
                operator, kernel, kind = (str(one.get(name)) for name in ("operator", "kernel", "kind"))
                found.pop((operator, kernel, kind), None)
                if isinstance(one.get("fault"), str):
                    found[operator, kernel, kind] = Verification(one["fault"], str(one.get("date")))
        return found


def _joined(earlier: Entry | None, later: Entry) -> Entry:
    """Replaces what was found earlier with a measurement; without times, it only speaks of its own kernels."""
    if earlier is None or later.repeats:
        return later
    spoken_of = {candidate.implementation for candidate in later.candidates}
    others = (candidate for candidate in earlier.candidates if candidate.implementation not in spoken_of)
    return dataclasses.replace(later, candidates=(*others, *later.candidates), repeats=earlier.repeats)


def folder() -> Path:
    """Returns the folder where results are kept: what JAXOPS_TUNED names, else a folder among the user's data."""
    named = os.environ.get(VARIABLE)
    return Path(named) if named else platformdirs.user_data_path("jaxops") / "tuned"


def file_of(target: str, within: Path | None = None) -> Path:
    """Returns the file that holds the records of a device, named as `targets.device_name` does."""
    return (within or folder()) / f"{re.sub(r'[^A-Za-z0-9.]+', '-', target)}.jsonl"


@contextlib.contextmanager
def _requirement(path: Path, what: str, advice: str = "") -> Iterator[None]:
    """Refuses a path with which the system does not do what it is for."""
    try:
        yield
    except OSError as error:
        raise TuningError(f"tune: {show(str(path))} must be {what}; got {file_fault(error)}{advice}") from None


def read(path: Path) -> Found:
    """Reads the records in a file, or no records if the file does not exist.

    Raises:
      TuningError: if the file cannot be read.
    """
    with _requirement(path, "a file that can be read"):
        lines = path.read_bytes().splitlines() if path.exists() else []
    records = [_record(line) for line in lines]
    damaged = tuple(number for number, record in enumerate(records, 1) if record is None and lines[number - 1].strip())
    return Found(tuple(record for record in records if record is not None), damaged)


def _record(line: bytes) -> dict[str, Any] | None:
    """Parses the record on a line; None if it holds none, such as a line that a stopped process did not finish."""
    try:
        record = json.loads(line)
        if record.get("entry"):
            Entry.from_record(record["entry"])
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    return record


def append(path: Path, records: Iterable[dict[str, Any]]) -> None:
    """Adds records to a file, one a line, whatever the file ends with.

    Raises:
      TuningError: if the file cannot be written.
    """
    lines = "".join(f"{json.dumps(record)}\n" for record in records)
    with _requirement(path, "a file that can be written"):
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a+b") as stream:
            is_empty = stream.seek(0, os.SEEK_END) == 0
            if not is_empty:
                stream.seek(-1, os.SEEK_END)
                lines = lines if stream.read(1) == b"\n" else f"\n{lines}"
            stream.write(lines.encode())


def require_writable(path: Path) -> None:
    """Refuses a folder that nothing can be kept in, before anything is measured.

    Raises:
      TuningError: if the folder cannot be made, or no file in it.
    """
    with _requirement(path, "a folder that can be written to", f" ({VARIABLE} names another)"):
        path.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path).close()


def forget(path: Path) -> None:
    """Deletes what was found on a device, if anything was.

    Raises:
      TuningError: if the file cannot be deleted.
    """
    with _requirement(path, "a file that can be deleted"):
        path.unlink(missing_ok=True)
    reread()


@functools.cache
def entries_for(target: str) -> tuple[Entry, ...]:
    """Returns the entries that "auto" follows on a device: read when first asked for, then kept by the process.

    So no compiled function of the process is older than it; `reread` clears JAX's caches.

    Raises:
      TuningError: if the processes of `jax.distributed` have found different things.
    """
    path = file_of(target)
    try:
        found = read(path)
        entries = found.entries
    except TuningError as error:
        warnings.warn(f"{error}; nothing in it is used", RuntimeWarning, stacklevel=2)
        found, entries = Found(), ()
    if found.damaged_lines:
        numbers = ", ".join(map(str, found.damaged_lines[:5]))
        words = "that tune has written; got something else, which is not used, in line"
        warnings.warn(f"tune: {show(str(path))} must hold records {words} {numbers}", RuntimeWarning, stacklevel=2)
    _require_agreement(target, entries)
    return entries


@functools.cache
def verifications(target: str) -> dict[tuple[str, str, str], Verification]:
    """Returns the outcomes of kernels' first runs on a device, which `keep_verification` adds to.

    The processes of `jax.distributed` begin without any: what one of them kept, others may not have read.
    """
    try:
        return {} if jax.distributed.is_initialized() else read(file_of(target)).verifications()
    except TuningError:  # `entries_for` has warned of it
        return {}


def keep_verification(target: str, key: tuple[str, str, str], outcome: Verification | None) -> None:
    """Keeps an outcome for this process, and for later ones that are not those of `jax.distributed`; None forgets it.

    Raises:
      TuningError: if the file cannot be written.
    """
    known = verifications(target)
    known.pop(key, None)
    if outcome is not None:
        known[key] = outcome
    if not jax.distributed.is_initialized():
        record: dict[str, Any] = dict(zip(("operator", "kernel", "kind"), key, strict=True))
        record |= {"fault": None} if outcome is None else dataclasses.asdict(outcome)
        append(file_of(target), [{"verification": record | {"versions": dict(versions())}}])


def reread() -> None:
    """Forgets what was read, for a process that has changed it, and lets JAX lower everything again."""
    entries_for.cache_clear()
    verifications.cache_clear()
    jax.clear_caches()


def _require_agreement(target: str, entries: Sequence[Entry]) -> None:
    """Compares a digest with that of the first process: programs that differ would wait for each other forever."""
    if not jax.distributed.is_initialized():
        return
    present = sorted(json.dumps(entry.to_record()) for entry in entries if entry.key.versions == versions())
    digest = hashlib.sha256("\n".join(present).encode()).hexdigest()[:12]
    first = _jax_private.said_by_first_process(f"jaxops/tuned/{target}", digest, _SECONDS_TO_WAIT)
    if first not in (None, digest):
        raise TuningError(
            f"tune: what is kept of {target} must be the same for all processes; process {jax.process_index()} has "
            f"{len(present)} results (digest {digest}) and process 0 others (digest {first}): let {VARIABLE} name one "
            "folder for all, or an empty one"
        )
