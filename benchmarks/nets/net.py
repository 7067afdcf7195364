"""The record that each net is: its cases, how two results are compared, and the file that holds them."""

import dataclasses
import difflib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

RECORDED = Path(__file__).with_name("recorded")
_LINES = 12  # of a difference between texts
_HEADER = "=== "

Cases = Iterator[tuple[str, Callable[[], Any]]]


class OffError(Exception):
    """A difference that fails the check."""


@dataclasses.dataclass(frozen=True)
class Net:
    """One kind of evidence about the library.

    Attributes:
      cases: yields each case's name, and a function that finds its result.
      compare: takes what was recorded and what was found; raises OffError, or returns a remark, or None.
      file: the name of the file, whose ending decides its format: arrays (npz), numbers (json) or texts (txt).
      must_agree: whether cases that come, go or differ fail the check.
    """

    cases: Callable[[], Cases]
    compare: Callable[[Any, Any], str | None]
    file: str
    must_agree: bool = True

    def write(self, results: dict[str, Any]) -> None:
        path = RECORDED / self.file
        path.parent.mkdir(exist_ok=True)
        if path.suffix == ".npz":
            np.savez_compressed(path, **results)
        elif path.suffix == ".json":
            path.write_text(json.dumps(results, indent=1) + "\n")
        else:
            path.write_text("".join(f"{_HEADER}{name}\n{text}\n" for name, text in results.items()))

    def read(self) -> dict[str, Any]:
        path = RECORDED / self.file
        if path.suffix == ".npz":
            with np.load(path) as arrays:
                return dict(arrays)
        if path.suffix == ".json":
            results: dict[str, Any] = json.loads(path.read_text())
            return results
        sections = f"\n{path.read_text()}".removesuffix("\n").split(f"\n{_HEADER}")[1:]
        return {name: text for name, _, text in (section.partition("\n") for section in sections)}


def equal(recorded: Any, found: Any) -> None:
    """Compares numbers or short strings."""
    if recorded != found:
        raise OffError(f"recorded {recorded}, found {found}")


def equal_texts(recorded: str, found: str) -> None:
    """Compares texts; shows the lines that differ."""
    lines = list(difflib.unified_diff(recorded.splitlines(), found.splitlines(), lineterm="", n=0))[2:]
    if lines:
        more = [f"  ... and {len(lines) - _LINES} lines more"] if len(lines) > _LINES else []
        raise OffError("\n".join(["recorded (-), found (+)", *(f"  {line}" for line in lines[:_LINES]), *more]))


def at_most(share: float) -> Callable[[Any, Any], str | None]:
    """Returns a comparison of numbers where less is better; an increase by up to this share passes."""

    def compare(recorded: float, found: float) -> str | None:
        if not isinstance(found, int | float) or not isinstance(recorded, int | float):
            equal(recorded, found)
            return None
        change = f"recorded {recorded:,}, found {found:,}"
        change += f" ({found / recorded - 1:+.1%})" if recorded else ""
        if found > recorded * (1 + share):
            raise OffError(change)
        return f"less: {change}" if found < recorded * (1 - share) else None

    return compare
