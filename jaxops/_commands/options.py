"""What the subcommands of `jaxops` share: options, the console, and refusals."""

import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.console import Console, RenderableType

from jaxops._commands.user_function import CommandError
from lowering import TuningError, TuningResult
from lowering.describe import shortened
from lowering.tables import fitted
from lowering.targets import parse

IMPLEMENTATIONS = ("auto", "reference", "pallas")

Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Function = Annotated[str, typer.Argument(metavar="FILE.py:FUNCTION", help="The function to trace.")]
Implementation = Annotated[str, typer.Option(help="How operators are implemented: auto, reference or pallas.")]
Arguments = Annotated[
    list[str] | None,
    typer.Option(
        metavar="DTYPE[SHAPE]", help="An argument of the function, such as float32[128,64] or i32[]; once for each."
    ),
]
TripCounts = Annotated[
    list[str] | None, typer.Option(help="For schedules: NAME=NUMBER, how often what data decides is run.")
]
Scalars = Annotated[
    list[str] | None,
    typer.Option(
        help="For schedules: KERNEL:POSITION=1,2,3 or =FILE.npy, what an operand holds, one number all of it."
    ),
]
Rewrite = Annotated[
    bool, typer.Option("--rewrite", help="First replace plain JAX by operators, as `lowering.rewrite` does.")
]
Tuned = Annotated[
    Path | None, typer.Option(help="A file that `jaxops tune` has written, by which to choose implementations.")
]


def console() -> Console:
    """A console as wide as the terminal or COLUMNS says; without either, wide enough for the tables."""
    asked = os.environ.get("COLUMNS", "").isdigit()
    return Console(width=None if sys.stdout.isatty() or asked else 120)


def show_text(text: str) -> None:
    """Prints a sentence: wrapped on a terminal, on one line for other programs."""
    where = console()
    where.print(text, markup=False, emoji=False, highlight=False, soft_wrap=not where.is_terminal)


def show(table: RenderableType) -> None:
    """Prints a table that fits the console's width."""
    where = console()
    where.print(fitted(table, where))


def tuned_by(path: Path | None) -> TuningResult:
    """The file's tuning result as a context; without a file, one that changes nothing."""
    try:
        return TuningResult() if path is None else TuningResult.load(path)
    except TuningError as error:
        raise CommandError(str(error).removeprefix("load: ")) from None


def trip_counts_of(given: Sequence[str]) -> dict[str, float]:
    """What NAME=NUMBER options say, as a dictionary."""
    counts = {}
    for text in given:
        name, _, number = text.rpartition("=")
        is_number = re.fullmatch(r"\d+(\.\d*)?", number) is not None
        require(bool(name) and is_number, "--trip-count", "be NAME=NUMBER", repr(text))
        counts[name] = float(number)
    return counts


def scalars_of(given: Sequence[str]) -> dict[str, dict[int, np.ndarray]]:
    """What KERNEL:POSITION=1,2,3 and KERNEL:POSITION=FILE.npy options say, as nested dictionaries."""
    operands: dict[str, dict[int, np.ndarray]] = {}
    for text in given:
        found = re.fullmatch(r"(.+):(\d+)=(.+)", text)
        require(found is not None, "--scalars", "be KERNEL:POSITION=1,2,3 or KERNEL:POSITION=FILE.npy", repr(text))
        assert found is not None
        operands.setdefault(found[1], {})[int(found[2])] = _integers(found[3])
    return operands


def _integers(text: str) -> np.ndarray:
    if re.fullmatch(r"-?\d+(,-?\d+)*", text):
        numbers = [int(number) for number in text.split(",")]
        return np.array(numbers if len(numbers) > 1 else numbers[0])
    try:
        return np.load(text)
    except (OSError, ValueError, EOFError):
        raise CommandError(f"--scalars must name integers or a file of NumPy's; got {shortened(repr(text))}") from None


def require_target(target: str) -> None:
    """Refuses names that are neither a chip nor a slice of chips with its topology."""
    try:
        parse(target)
    except ValueError as error:
        raise CommandError(str(error).removeprefix("lowering: ")) from None


def require_implementation(name: str) -> None:
    """Refuses a name that is not an implementation."""
    require(name in IMPLEMENTATIONS, "--implementation", f"be one of {', '.join(IMPLEMENTATIONS)}", repr(name))


def require_folder(path: Path) -> None:
    """Creates the folder now, because a run that cannot save its results is useless."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        writable = os.access(path, os.W_OK)
    except OSError:
        writable = False
    require(writable, "--output", "be a folder that can be written to", repr(str(path)))


def require_file(path: Path) -> None:
    """Refuses a file that cannot be written, before any work is done."""
    writable = path.parent.is_dir() and os.access(path.parent, os.W_OK) and not path.is_dir()
    require(writable, "--output", "be a file that can be written", repr(str(path)))


def require(condition: bool, subject: str, rule: str, got: str) -> None:
    """Refuses an option with `"<subject> must <rule>; got <got>"` unless the condition holds."""
    if not condition:
        raise CommandError(f"{subject} must {rule}; got {shortened(got)}")
