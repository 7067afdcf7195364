"""`jaxops plan`: where a function could run."""

import math
import re
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

import lowering
from jaxops._commands.options import Arguments, Function, Json, require, require_file, require_target, show, show_text
from jaxops._commands.user_function import load_with, run_user_code


def plan(
    function: Function,
    target: Annotated[list[str], typer.Option(help="A slice, such as tpu-v5e:4x4 or cuda-h100:64; once for each.")],
    mesh: Annotated[
        list[str], typer.Option(metavar="AXIS=SIZE,...", help="A mesh; a size of -1 takes what is left. Once for each.")
    ],
    arg: Arguments = None,
    tokens: Annotated[int | None, typer.Option(help="Of one step, for tokens per second.")] = None,
    price: Annotated[
        list[str] | None, typer.Option(metavar="CHIP=PRICE", help="Of a chip and hour, such as tpu-v5e=1.2.")
    ] = None,
    budget: Annotated[
        float, typer.Option(metavar="SECONDS", help="When to stop; the same command goes on where it stopped.")
    ] = math.inf,
    cache: Annotated[Path | None, typer.Option(help="A folder for what was compiled.")] = None,
    output: Annotated[Path | None, typer.Option(help="A file for the results as JSON.")] = None,
    plot: Annotated[Path | None, typer.Option(help="A file for the results as a picture.")] = None,
    as_json: Json = False,
) -> None:
    """Compiles a function for slices of chips that are not here: what fits, what is sent, and how fast it could be.

    Without --arg, the arguments are FILE.py's FUNCTION_args or example_args: a tuple, or a function that returns one.
    How a mesh splits them is what the file's FUNCTION_shardings(mesh), or shardings(mesh), returns: a tuple with a
    PartitionSpec, None, or a pytree of them for each argument.
    """
    for name in target:
        require_target(name)
    meshes = [_mesh(text) for text in mesh]
    prices = dict(_price(text) for text in price or ())
    for path in (output, plot):
        if path is not None:
            require_file(path)
    fn, args, shardings = load_with(function, arg or (), "shardings")

    def planned() -> lowering.Plan:
        return lowering.plan(
            fn,
            *args,
            targets=target,
            meshes=meshes,
            shardings=shardings,
            tokens=tokens,
            price_per_chip_hour=prices,
            budget_seconds=budget,
            cache=cache,
        )

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


def _mesh(text: str) -> dict[str, int]:
    """What "data=4,tensor=-1" says."""
    found = re.fullmatch(r"\w+=-?\d+(,\w+=-?\d+)*", text)
    require(found is not None, "--mesh", "be AXIS=SIZE, with commas between, such as data=4,tensor=-1", repr(text))
    return {name: int(size) for name, size in (axis.split("=") for axis in text.split(","))}


def _price(text: str) -> tuple[str, Any]:
    name, _, number = text.rpartition("=")
    is_number = re.fullmatch(r"\d+(\.\d*)?", number) is not None
    require(bool(name) and is_number, "--price", "be CHIP=PRICE, such as tpu-v5e=1.2", repr(text))
    return name, float(number)
