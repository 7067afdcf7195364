"""The subcommands' options and help, and the refusal of what is wrong with them; nothing here needs JAX.

Each subcommand imports what it does when it runs, after it has checked its words: JAX takes most of a second.
"""

import importlib.util
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from jaxops_command.functions import bench, compile, emulate, explain, export, plan, tune
from jaxops_command.options import (
    COMPILERS,
    PROCESS_COUNTS,
    SEED,
    STEPS,
    Arguments,
    CommandError,
    Json,
    require,
    require_folder,
    require_location,
    require_one_of,
    require_target,
    shortened,
)


class _OneSentence(TyperGroup):
    """A command group that says in one sentence on stderr why it refuses, with exit code 2."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the command that the arguments name."""
        try:
            sys.exit(super().main(*args, **{**kwargs, "standalone_mode": False}))
        except typer.TyperException as error:
            message = error.format_message()
        except CommandError as error:
            message = str(error)
        except OSError as error:  # a full disk behind stdout, for one
            message = f"output must be written somewhere; got {error.strerror}"
        if message:  # Without arguments there is help instead.
            # Words of the command line may be of any length.
            print("jaxops:", " ".join(map(shortened, message.split())), file=sys.stderr)
        sys.exit(2)


# Plain help: boxes by `rich` would take as long as all the rest of the process.
app = typer.Typer(cls=_OneSentence, add_completion=False, no_args_is_help=True, rich_markup_mode=None)


def _show_version(wanted: bool) -> None:
    if wanted:
        from jaxops_command import operators

        operators.show_versions()
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Shows the versions, and exits.")
    ] = False,
) -> None:
    """Operators for JAX, and the compiler that explains, compiles, exports and tunes them for each backend."""


@app.command()
def demo(
    steps: Annotated[int, typer.Option(help="How many training steps to take.")] = STEPS,
    seed: Annotated[int, typer.Option(help="Seeds the parameters and the order of the text.")] = SEED,
    output: Annotated[
        Path, typer.Option(help="A folder for the numbers, the curve and, with --processes, the checkpoints.")
    ] = Path("demo_output"),
    processes: Annotated[
        int | None, typer.Option(help="Train with so many local processes, 1, 2 or 4, and with checkpoints.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="With --processes: go on from the newest whole checkpoint.")
    ] = False,
) -> None:
    """Trains a model in plain JAX and with this library.

    The text is the source of Python's standard library.
    """
    require(steps > 0, "--steps", "be positive", str(steps))
    require(0 <= seed < 2**32, "--seed", "be in [0, 2**32)", str(seed))
    if processes is not None:
        require_one_of(PROCESS_COUNTS, "--processes", processes)
    require(not resume or processes is not None, "--resume", "be given with --processes", "none")
    needed = {"tokenizers": "tokenizers", "matplotlib": "matplotlib"}
    if processes is not None:
        needed["orbax"] = "orbax-checkpoint"
    for module, package in needed.items():
        if importlib.util.find_spec(module) is None:
            helps = "pip install '.[demo]' in a clone of the repository"
            raise CommandError(f"{package} must be installed; it is not: {helps}")
    require_folder(output)
    from jaxops_command import training

    training.demo(steps, seed, output, processes, resume)


@app.command()
def ops(
    operator: Annotated[
        str | None, typer.Argument(metavar="OPERATOR", help="The only one; with --target, its kinds of operands.")
    ] = None,
    target: Annotated[
        str | None, typer.Option(help="A chip: at how many of the known sizes each of its kernels is taken.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Lists the operators: signature, kernels and derivative.

    Those of other installed packages are among them.
    """
    require_target(target)
    from jaxops_command import operators

    if target is None:
        operators.ops(operator, as_json)
    else:
        operators.evidence_on(target, operator, as_json)


for command in (explain, compile, emulate, export, tune, bench, plan):
    app.command()(command)


@app.command()
def doctor(
    function: Annotated[
        str | None, typer.Argument(metavar="[FILE.py:FUNCTION]", help="A function to look for known faults in.")
    ] = None,
    arg: Arguments = None,
    target: Annotated[
        str | None, typer.Option(help="Look for faults on this chip, such as cuda-h100. By default, the devices here.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Checks what is installed against known faults.

    It exits with 1 if one touches your function or this library. Without a function, it looks at this library's own
    operators. Without --arg, the arguments are FILE.py's FUNCTION_args or example_args: a tuple, or a function that
    returns one. Nothing is compiled or run.
    """
    require_target(target)
    if function is not None:
        require_location(function, arg)
    from jaxops_command import examination

    examination.doctor(function, arg or [], target, as_json)


@app.command()
def targets(
    install: Annotated[
        str | None,
        typer.Option(
            help="First make an environment in the user's cache folder for this platform's compiler: tpu, cuda."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Lists the chips, and installs the compilers for them."""
    if install is not None:
        require_one_of(COMPILERS, "--install", install)
    from jaxops_command import chips

    chips.targets(install, as_json)
