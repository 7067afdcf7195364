"""Measurements of an operator's implementations: records that can be compared, hashed, and written and read as JSON."""

import contextlib
import dataclasses
import functools
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from lowering.describe import show
from lowering.errors import TuningError
from lowering.operators import present_names, type_text, unpacked
from lowering.targets import device_name
from pallas_kernels.hardware import Hardware
from pallas_kernels.kernel import Kind

FORMAT = 1  # of a file of entries
REFERENCE = "reference"
# What the reason to discard a kernel begins with if its results were not right, or never came.
WRONG, HANGS = "wrong: ", "hangs: "
NOT_COMPILED = "not compiled before the time budget ended"

Config = tuple[tuple[str, int], ...]


@functools.cache
def versions() -> tuple[tuple[str, str], ...]:
    """Returns the versions that measurements depend on: of JAX, its compilers and, if it is installed, this library."""
    found = []
    for name in ("jax", "jaxlib", "jaxops"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found.append((name, metadata.version(name)))
    return tuple(found)


def config_items(config: Mapping[str, int]) -> Config:
    """Returns a kernel's launch configuration as a value that can be compared and hashed."""
    return tuple(sorted(config.items()))


def config_text(config: Config) -> str:
    """Returns a launch configuration as text, such as "rows=8, columns=128"."""
    return ", ".join(f"{name}={value}" for name, value in config)


@dataclasses.dataclass(frozen=True, order=True)
class Key:
    """Key of a measurement: it is valid for exactly this, and nothing that is merely similar.

    Attributes:
      target: as `device_name` returns it.
      operator: its name.
      operands: the `type_text` of each.
      attributes: the operator's, as text, sorted by name, and the names of the operands' fields that are present.
      versions: those of the process that measured, as `versions` returns them.
    """

    target: str
    operator: str
    operands: tuple[str, ...]
    attributes: str
    versions: tuple[tuple[str, str], ...]

    @classmethod
    def of(
        cls, operator_name: str, hardware: Hardware, operands: Sequence[Any], params: Mapping[str, Any]
    ) -> "Key | None":
        """Returns the key of an operator in this process; None if the chip that will run it is unknown."""
        target = device_name(hardware)
        if target is None:
            return None
        types = tuple(type_text(x) for x in operands)
        structured, attributes = unpacked(operands, params)
        if fields := present_names(structured):
            attributes["operands"] = " ".join(fields)
        text = ", ".join(f"{name}={value!r}" for name, value in sorted(attributes.items()))
        return cls(target, operator_name, types, text, versions())


@dataclasses.dataclass(frozen=True)
class Measurement:
    """One way to run an operator: the median of its times, or why it was discarded.

    Attributes:
      implementation: a kernel's name, or "reference".
      config: the kernel's launch configuration.
      median_us: by the device's clock, if it has one.
      discarded: why there is no time.
      wall_us: by the host's clock, beside a device's.
    """

    implementation: str
    config: Config = ()
    median_us: float | None = None
    discarded: str = ""
    wall_us: float | None = None

    @property
    def is_fault(self) -> bool:
        """Tells whether it ran and must never run again, unlike one that refuses or does not compile."""
        return self.discarded.startswith((WRONG, HANGS))

    @property
    def name(self) -> str:
        """The implementation and its configuration."""
        return f"{self.implementation} ({config_text(self.config)})" if self.config else self.implementation


@dataclasses.dataclass(frozen=True)
class Entry:
    """All measurements of one operator at one set of shapes.

    Attributes:
      key: what they are valid for.
      candidates: the reference and each configuration of each kernel, in order of preference.
      repeats: how often each was timed.
      replayed: whether the times are those of schedules, and nothing ran. They choose among the configurations of a
        kernel that is asked for, and no kernel by themselves.
      kinds: the `Kind` of each kernel that has one, by name, with which the times speak of like operands.
    """

    key: Key
    candidates: tuple[Measurement, ...]
    repeats: int
    replayed: bool = False
    kinds: tuple[tuple[str, Kind], ...] = ()

    def __hash__(self) -> int:
        """Hashes the key alone, because entries are part of jit's cache key and are hashed often."""
        return hash(self.key)

    @property
    def is_unfinished(self) -> bool:
        """Tells whether some configurations were not compiled, as time ran out."""
        return any(candidate.discarded == NOT_COMPILED for candidate in self.candidates)

    @property
    def winner(self) -> Measurement | None:
        """The fastest candidate, the first of equals; None if nothing could be compared with the reference."""
        return self.best(*{candidate.implementation for candidate in self.candidates})

    def best(self, *implementations: str) -> Measurement | None:
        """Returns the fastest candidate of these implementations; None if none of them was timed."""
        timed = [c for c in self.candidates if c.implementation in implementations and c.median_us is not None]
        return min(timed, key=lambda candidate: candidate.median_us or 0.0, default=None)

    def against(self, kernel: str) -> str | None:
        """Says why a kernel is not chosen; None if it is the winner."""
        winner = self.winner
        if winner is None or winner.implementation == kernel:
            return None
        name = "the reference" if winner.implementation == REFERENCE else winner.implementation
        own = self.best(kernel)
        if own is not None:
            return f"tuned: {name} was faster here ({winner.median_us:.3g} us against {own.median_us:.3g} us)"
        reasons = [candidate.discarded for candidate in self.candidates if candidate.implementation == kernel]
        return f"tuned: {reasons[0]}" if reasons else f"tuned: not measured when {name} was found the fastest"

    def times_of_reference(self, kernel: str) -> float | None:
        """Returns a kernel's time as a part of the reference's; None if one of them was not timed."""
        own, reference = self.best(kernel), self.best(REFERENCE)
        if own is None or reference is None or not own.median_us or not reference.median_us:
            return None
        return own.median_us / reference.median_us

    def replay_remark(self, kernel: str) -> str | None:
        """Says how a kernel's replay compares with the reference's; None where there is none."""
        part = self.times_of_reference(kernel)
        told = f"replayed on {self.key.target} at {part or 0:.2f} of the reference's time; not run on a device"
        return None if part is None else told

    def to_record(self) -> dict[str, Any]:
        """Returns the entry as a JSON object."""
        winner = self.winner
        return {
            "target": self.key.target,
            "operator": self.key.operator,
            "operands": list(self.key.operands),
            "attributes": self.key.attributes,
            "versions": dict(self.key.versions),
            "winner": winner and {"implementation": winner.implementation, "config": dict(winner.config)},
            "repeats": self.repeats,
            **({"replayed": True} if self.replayed else {}),
            **({"kinds": {name: [kind.text, list(kind.sizes)] for name, kind in self.kinds}} if self.kinds else {}),
            "candidates": [
                {
                    "implementation": candidate.implementation,
                    "config": dict(candidate.config),
                    "median_us": candidate.median_us,
                    "discarded": candidate.discarded,
                    **({} if candidate.wall_us is None else {"wall_us": candidate.wall_us}),
                }
                for candidate in self.candidates
            ],
        }

    @classmethod
    def from_record(cls, record: Any) -> "Entry":
        """Reads an object that `to_record` made.

        Raises:
          ValueError, TypeError or KeyError: for anything else.
        """
        key = Key(
            _text(record["target"]),
            _text(record["operator"]),
            tuple(_text(operand) for operand in record["operands"]),
            _text(record["attributes"]),
            tuple(sorted((_text(name), _text(version)) for name, version in record["versions"].items())),
        )
        candidates = tuple(_measurement(candidate) for candidate in record["candidates"])
        kinds = tuple(
            (_text(name), Kind(_text(text), tuple(map(_integer, sizes))))
            for name, (text, sizes) in record.get("kinds", {}).items()
        )
        entry = cls(key, candidates, _integer(record["repeats"]), record.get("replayed", False), kinds)
        if entry.to_record() != record:
            raise ValueError("the winner does not follow from the candidates")
        return entry


def faults(entries: Iterable[Entry], target: str) -> dict[str, dict[str, str]]:
    """Returns why kernels must not be taken on a target: what went wrong with these versions, by operator and kernel.

    A kernel that was right in another configuration at the same shapes is only kept from the wrong configuration.
    """
    found: dict[str, dict[str, str]] = {}
    for entry in entries:
        if (entry.key.target, entry.key.versions) != (target, versions()):
            continue
        for candidate in entry.candidates:
            if candidate.is_fault and entry.best(candidate.implementation) is None:
                reason = f"{candidate.discarded} ({', '.join(entry.key.operands)})"
                found.setdefault(entry.key.operator, {}).setdefault(candidate.implementation, reason)
    return found


def load(path: str | Path) -> tuple[tuple[Entry, ...], str]:
    """Reads the entries of a file that `TuningResult.save` wrote, and why some are missing.

    Raises:
      TuningError: if the file is missing, damaged, of another kind or of another format.
    """
    try:
        record = json.loads(Path(path).read_text())
    except (OSError, TypeError) as error:
        reason = getattr(error, "strerror", None) or "no path"
        raise TuningError(f"load: {show(str(path))} must be a file that can be read; got {reason}") from None
    except (ValueError, RecursionError):
        record = None
    found = record.get("format") if isinstance(record, dict) and "entries" in record else None
    if isinstance(found, int) and found != FORMAT:
        raise TuningError(f"load: {show(str(path))} must have format {FORMAT}; got {show(found)}")
    try:
        if found != FORMAT or not isinstance(record["stopped"], str):
            raise ValueError("not a result")
        entries = tuple(map(Entry.from_record, record["entries"]))
    except (ValueError, TypeError, KeyError, AttributeError):
        raise TuningError(f"load: {show(str(path))} must be a whole file that tune has written") from None
    return entries, record["stopped"]


def _measurement(record: Any) -> Measurement:
    median_us, wall_us = record["median_us"], record.get("wall_us")
    for time_us in (median_us, wall_us):
        if time_us is not None and not (isinstance(time_us, float) and math.isfinite(time_us) and time_us >= 0):
            raise ValueError(f"not a time: {time_us!r}")
    if (median_us is None) != bool(record["discarded"]):
        raise ValueError("either a time or a reason")
    config = config_items({_text(name): _integer(value) for name, value in record["config"].items()})
    return Measurement(_text(record["implementation"]), config, median_us, _text(record["discarded"]), wall_us)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"not text: {value!r}")
    return value


def _integer(value: Any) -> int:
    if not isinstance(value, int):
        raise TypeError(f"not an integer: {value!r}")
    return value
