"""Prints what the subcommands have found."""

import os
import sys
from pathlib import Path

from rich.console import Console, RenderableType

from jaxops_command.options import CommandError
from lowering import TuningError, TuningResult
from lowering.tables import fitted


def console() -> Console:
    """Makes a console as wide as the terminal or COLUMNS says; without either, wide enough for the tables."""
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
    """Returns the file's tuning result as a context; without a file, one that changes nothing."""
    try:
        return TuningResult() if path is None else TuningResult.load(path)
    except TuningError as error:
        raise CommandError(str(error).removeprefix("load: ")) from None
