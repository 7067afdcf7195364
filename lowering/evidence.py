"""Evidence on kernels at a grid of sizes, and what "auto" concludes from it for operands between them.

A kernel says of operands which cases are alike, and the sizes in which they differ (`pallas_kernels.kernel.Kind`). The
files in `tuned` hold, for each kind, by what part of the reference's time the kernel takes at some sizes, measured on
the target or by replays of its schedule, and whether its compiled code was executed. Sizes near known ones are decided
by these: at the two nearest the kernel must be clearly better, and at the nearest in each direction not slower than the
reference. Everything else is left to the reference.
"""

import functools
import itertools
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lowering.measurements import versions as measured_versions
from lowering.operators import kind_of
from lowering.targets import TARGETS
from pallas_kernels.hardware import Hardware
from pallas_kernels.kernel import Kernel, Kind

# Ratios of replays are right within 6 % in the mean and 18 % at worst (docs/schedule.md). Measured ones are of an
# operator alone, and XLA may fuse more with its own program than with a kernel.
MOST_TIME = 0.85
MOST_MEASURED = 0.97
# As fast, and less memory: at least a fifth of the temporaries, if they are large enough for anybody to notice.
SAME_TIME, MOST_MEMORY, LEAST_BYTES = 1.03, 0.8, 2**24
# How many cases are the nearest; and factors between sizes, of the nearest one, and of all that decide. Where each case
# of the files for TPUs is left out and decided by the others, six of seven that take below 0.8 are taken, and of all
# that are taken, 5 in 1000 take above 1.02. With a larger factor for the nearest, one more is, on the H100.
_FIRST, _NEAREST, _NEAR = 2, 6, 16
_MANY = 8  # known sizes of a kind, among which a single better one does not count
_FOLDER = Path(__file__).parent / "tuned"
Sizes = tuple[int, ...]


class Case(NamedTuple):
    """A kernel at some sizes: a line of a file, or what was measured on this device.

    Attributes:
      operator: its name.
      kernel: its name.
      kind: the text of the `Kind`.
      sizes: those of the `Kind`.
      time: by the time of what runs without kernels.
      reference_us: that time.
      temporaries: in bytes, of what runs without kernels and of the kernel.
    """

    operator: str
    kernel: str
    kind: str
    sizes: Sizes
    time: float
    reference_us: float
    temporaries: tuple[int, int]

    @property
    def is_better(self) -> bool:
        """Tells whether the kernel is clearly faster, or as fast with clearly less memory."""
        before, after = self.temporaries
        saves = after <= MOST_MEMORY * before and before - after >= LEAST_BYTES
        return self.time <= MOST_TIME or (saves and self.time <= SAME_TIME)


class Verdict(NamedTuple):
    """A decision about a kernel.

    Attributes:
      is_taken: whether "auto" takes it.
      reason: the evidence in a few words.
      kind: the text of its `Kind` if it is taken without having run on the target with these versions; else "".
      unseen: what is missing then, in words.
    """

    is_taken: bool
    reason: str
    kind: str = ""
    unseen: str = "not run on a device"


class Grid(NamedTuple):
    """The cases of a file by operator, kernel and kind, and which of these were executed.

    Attributes:
      header: versions, date, how times were found, and for each operator a digest of its kernels' code.
      cases: all of them.
      executed: the sizes at which each kind was executed, by operator, kernel and kind.
    """

    header: Mapping[str, Any]
    cases: Mapping[tuple[str, str, str], tuple[Case, ...]]
    executed: Mapping[tuple[str, str, str], Sizes]

    @property
    def is_measured(self) -> bool:
        """Tells whether times are of the target itself, and not of schedules."""
        return self.header.get("how") == "measured"

    @property
    def taken(self) -> list[tuple[str, str, str]]:
        """The kinds that "auto" takes at some sizes."""
        return [key for key in self.cases if self.wins(key)]

    def wins(self, key: tuple[str, str, str]) -> int:
        """Counts the known sizes at which "auto" takes a kind.

        Where a kernel ties at all of many sizes but one, that one is as likely the replay's error.
        """
        cases = self.cases.get(key, ())
        found = sum(case.is_better for case in cases) if self.has_run(key) else 0
        return 0 if found == 1 and len(cases) >= _MANY and not self.is_measured else found

    def has_run(self, key: tuple[str, str, str]) -> bool:
        """Tells whether the code of a kind ran: somewhere, or on the target itself, where it was timed."""
        return self.is_measured or key in self.executed


def read(path: Path) -> Grid:
    """Reads a file of evidence."""
    header: dict[str, Any] = {}
    cases: dict[tuple[str, str, str], tuple[Case, ...]] = {}
    executed: dict[tuple[str, str, str], Sizes] = {}
    for record in map(json.loads, path.read_text().splitlines()):
        if isinstance(record, dict) and "executed" in record:
            operator, kernel, kind, sizes = record["executed"]
            executed[operator, kernel, kind] = tuple(sizes)
        elif isinstance(record, dict):
            header = record
        else:
            operator, kernel, kind, sizes, time, reference_us, temporaries = record
            case = Case(operator, kernel, kind, tuple(sizes), time, reference_us, tuple(temporaries))
            cases[case[:3]] = (*cases.get(case[:3], ()), case)
    return Grid(header, cases, executed)


class Summary(NamedTuple):
    """Evidence on one kind of a kernel: at how many of the known sizes it is taken, and its times at all of them.

    Times are parts of the reference's. A kind whose code did not run is not taken at any size.
    """

    operator: str
    kernel: str
    kind: str
    taken: int
    known: int
    least: float
    most: float
    has_run: bool


def summaries(target: str) -> list[Summary]:
    """Returns a summary of each kind in the evidence that ships for a target, sorted by operator."""
    grid, found = shipped(target), []
    if grid is None:
        return []
    for key, cases in sorted(grid.cases.items()):
        times = [case.time for case in cases]
        found.append(Summary(*key, grid.wins(key), len(cases), min(times), max(times), grid.has_run(key)))
    return found


@functools.cache
def shipped(target: str) -> Grid | None:
    """Returns the evidence that ships for a target; None if there is none."""
    path = _FOLDER / f"{target}.evidence.jsonl"
    return read(path) if path.is_file() else None


def favours(operator: str, kernel: str, hardware: Hardware) -> bool:
    """Tells whether what ships takes a kernel at some operands, on a chip or, for an unknown one, on any known chip."""
    names = [hardware.name] if hardware.name != hardware.platform else _replayed_chips(hardware.platform)
    return any(key[:2] == (operator, kernel) for name in names if (grid := shipped(name)) for key in grid.taken)


def _replayed_chips(platform: str) -> list[str]:
    """Returns the chips of a platform whose evidence speaks of others; what was measured on one does not."""
    grids = {name: shipped(name) for name, chip in TARGETS.items() if chip.platform == platform}
    return [name for name, grid in grids.items() if grid is not None and not grid.is_measured]


Measured = Callable[[str, str], Sequence[Case]]


def _not_measured(kernel: str, kind: str) -> Sequence[Case]:
    return ()


def verdict(
    operator: str,
    kernel: Kernel,
    hardware: Hardware,
    operands: Sequence[Any],
    attributes: Mapping[str, Any],
    measured: Measured = _not_measured,
) -> Verdict | None:
    """Returns what the evidence says of a kernel that does not refuse; None if nothing is known of it.

    On an unknown chip of a platform, all known chips must agree.

    Args:
      operator: its name.
      kernel: its record.
      hardware: the chip.
      operands: of the operator, as it takes them.
      attributes: the operator's.
      measured: returns what was measured on this chip of a kernel, given its name and the text of a kind. It comes
        before what was replayed.
    """
    kind = kernel.kind(hardware, *operands, **attributes)
    if kind is None:
        return None
    if near := neighbours(measured(kernel.name, kind.text), kind.sizes):
        is_faster = are_better(near, MOST_MEASURED)
        return Verdict(is_faster, f"measured on this device at {_span(near)} of the reference's time, at like operands")
    if hardware.name != hardware.platform:
        return shipped_verdict(operator, kernel.name, hardware.name, kind)
    found = [
        shipped_verdict(operator, kernel.name, name, kind_of(kernel, TARGETS[name], operands, attributes))
        for name in _replayed_chips(hardware.platform)
    ]
    known = [one for one in found if one is not None]
    if not known:
        return None
    against = next((one for one in known if not one.is_taken), None)
    return against or known[0]._replace(reason=f"on all known chips; {known[0].reason}")


def shipped_verdict(operator: str, kernel: str, target: str, kind: Kind | None) -> Verdict | None:
    """Returns what ships on a kernel for a chip; None if nothing does. Without a kind, the kernel refuses there."""
    if kind is None:
        return Verdict(False, f"{target} cannot take these operands")
    if (evidence := shipped(target)) is None:
        return None
    key = operator, kernel, kind.text
    cases = evidence.cases.get(key, ())
    near = neighbours(cases, kind.sizes)
    if not near:
        return Verdict(False, "no evidence near these sizes" if cases else f"no evidence for {kind.text}")
    how = "measured" if evidence.is_measured else "replayed"
    text = f"{how} on {target} at {_span(near)} of the reference's time"
    if not are_better(near):
        return Verdict(False, f"{text}, too close to call" if max(case.time for case in near) <= SAME_TIME else text)
    if not evidence.has_run(key):
        return Verdict(False, f"{text}, but its compiled code was not executed")
    if not evidence.wins(key):
        return Verdict(False, f"{text}, the only one of {len(cases)} sizes at which it is better")
    saved = " with less memory" if max(case.time for case in near[:_FIRST]) > MOST_TIME else ""
    if not evidence.is_measured:
        return Verdict(True, f"{text}{saved}, executed", kind.text)
    if key not in evidence.executed:
        return Verdict(True, f"{text}{saved}", kind.text, "timed there, and not compared with float64")
    with_others = evidence.header["versions"].items() - dict(measured_versions()).items()
    return Verdict(True, f"{text}{saved}", kind.text if with_others else "", "not run with these versions")


def _span(cases: Sequence[Case]) -> str:
    times = [case.time for case in cases]
    return " to ".join(dict.fromkeys(f"{time:.2f}" for time in (min(times), max(times))))


def neighbours(cases: Iterable[Case], sizes: Sizes) -> tuple[Case, ...]:
    """Returns the cases that decide these sizes: the one that has them, or the nearest ones, and in each direction.

    No cases where too few are near.
    """
    by_sizes = {case.sizes: case for case in cases} if min(sizes) > 0 else {}
    if sizes in by_sizes:
        return (by_sizes[sizes],)
    near = [case for case in by_sizes.values() if max(_factors(case.sizes, sizes)) <= _NEAR]
    near.sort(key=lambda case: math.hypot(*map(math.log, _factors(case.sizes, sizes))))
    if len(near) < _FIRST or max(_factors(near[0].sizes, sizes)) > _NEAREST:
        return ()
    found = near[:_FIRST]
    for signs in itertools.product((-1, 1), repeat=len(sizes)):
        # Of those that are, in each size, no larger or no smaller.
        along = (
            case for case in near if all(s * (a - b) >= 0 for s, a, b in zip(signs, case.sizes, sizes, strict=True))
        )
        found += [case for case in itertools.islice(along, 1) if case not in found]
    return tuple(found)


def are_better(near: Sequence[Case], most: float | None = None) -> bool:
    """Tells whether a kernel is better at the nearest cases, and at none of the others slower than the reference.

    Better is what takes at most a part of the time, if one is given.
    """
    first, others = near[:_FIRST], near[_FIRST:]
    is_better = all(case.is_better if most is None else case.time <= most for case in first)
    return is_better and all(case.time <= SAME_TIME for case in others)


def _factors(one: Sizes, other: Sizes) -> list[float]:
    """Returns the factor between each two sizes, at least 1."""
    return [max(a / b, b / a) for a, b in zip(one, other, strict=True)]
