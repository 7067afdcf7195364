"""`jaxops plan`: where a function could run."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import typer

import lowering
from jaxops_command.output import show, show_text
from jaxops_command.user_function import load_with, run_user_code

_NOTHING_FITS = 1


def plan(
    function: str,
    arg: Sequence[str] | None,
    how: Mapping[str, Any],
    output: Path | None,
    plot: Path | None,
    as_json: bool,
) -> None:
    """Compiles a function for slices of chips that are not here; `how` are the other arguments of `lowering.plan`."""
    fn, args, shardings = load_with(function, arg or (), "shardings")

    def planned() -> lowering.Plan:
        return lowering.plan(fn, *args, shardings=shardings, **how)

    found = run_user_code(function, "be traceable with these arguments", planned)
    if output is not None:
        output.write_text(found.to_json() + "\n")
    if plot is not None:
        found.plot(plot)
    if as_json:
        print(found.to_json())
    else:
        show(found.table())
        for remark in found.remarks:
            show_text(remark)
    if found.stopped:
        print(f"jaxops: {found.stopped}; the same command goes on", file=sys.stderr)
    elif found.best is None:
        raise typer.Exit(_NOTHING_FITS)
