"""The subcommands that take a user's function: options, help, and the refusal of what is wrong with them."""

import math
import re
from pathlib import Path
from typing import Annotated, Any

import typer

from jaxops_command.options import (
    CHIPS,
    EMULATED,
    PLATFORMS,
    STAGES,
    Arguments,
    Function,
    Implementation,
    Json,
    Rewrite,
    Scalars,
    TripCounts,
    Tuned,
    implementations_of,
    meant,
    one_implementation_of,
    require,
    require_file,
    require_folder,
    require_location,
    require_one_of,
    require_target,
    scalar_words,
    schedule_files,
    trip_counts_of,
)

_By = Annotated[str, typer.Option(help="What gives the times: device, or schedule for a TPU that is not here.")]
_Limit = Annotated[
    float,
    typer.Option(
        metavar="SECONDS", help="Without a function: how long a kernel may run; compiling may take five times as long."
    ),
]
_Saved = Annotated[
    Path | None,
    typer.Option(
        exists=True,
        dir_okay=False,
        readable=True,
        help="A schedule that --save has written, to compare with.",
    ),
]
_Rehearse = Annotated[bool, typer.Option("--rehearse", help="Without a function: interpret small kernels on the CPU.")]


def explain(
    function: Function,
    target: Annotated[
        str | None,
        typer.Option(help="What to lower for, such as cpu, tpu-v5e or cuda-h100. By default, the devices here."),
    ] = None,
    arg: Arguments = None,
    implementation: Implementation = None,
    rewrite: Rewrite = False,
    tuned: Tuned = None,
    require: Annotated[
        str | None, typer.Option(help="kernel: fail if an operator with kernels for the target takes none.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Shows which implementation each operator takes, and why.

    Without --arg, the arguments are FILE.py's FUNCTION_args or example_args: a tuple, or a function that returns one.
    Nothing is compiled or run.
    """
    require_target(target)
    chosen = one_implementation_of(implementation)
    require_location(function, arg)
    from jaxops_command import tracing

    tracing.explain(function, target, arg, chosen, rewrite, tuned, require, as_json)


def compile(
    function: Function,
    target: Annotated[str, typer.Option(help="What to compile for, such as cpu, tpu-v5e or tpu-v5p:8x8x8.")],
    arg: Arguments = None,
    implementation: Implementation = None,
    rewrite: Rewrite = False,
    tuned: Tuned = None,
    output: Annotated[Path | None, typer.Option(help="A folder for the program before and after optimisation.")] = None,
    schedule: Annotated[
        bool, typer.Option(help="For a TPU: the time of each kernel by the compiler's schedule.")
    ] = False,
    trip_count: TripCounts = None,
    scalars: Scalars = None,
    auto_layouts: Annotated[
        bool, typer.Option("--auto-layouts", help="For schedules: the compiler chooses how arguments lie in memory.")
    ] = False,
    save: Annotated[Path | None, typer.Option(help="A file that keeps the schedule, for --against.")] = None,
    against: _Saved = None,
    slower_than: Annotated[
        str | None,
        typer.Option(
            metavar="PERCENT", help="With --against: exit with 1 if the program or a kernel is slower by more."
        ),
    ] = None,
    perfetto: Annotated[
        Path | None, typer.Option(help="A file for the schedule over time, which ui.perfetto.dev opens.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Compiles a function for a chip that need not be here.

    The chip's real compiler tells kernels, memory and cost. Without --arg, the arguments are FILE.py's FUNCTION_args or
    example_args: a tuple, or a function that returns one.
    """
    require_target(target)
    chosen = one_implementation_of(implementation)
    if output is not None:
        require_folder(output)
    files = schedule_files(schedule, save, against, slower_than, perfetto)
    data = _schedule_data(trip_count, scalars)
    require_location(function, arg)
    from jaxops_command import tracing

    options = {"target": target, "schedule": schedule, "auto_layouts": auto_layouts, **data}
    tracing.compile(function, arg, chosen, rewrite, tuned, output, options, files, as_json)


def emulate(
    function: Function,
    target: Annotated[str, typer.Option(help="The TPU to compile for, such as tpu-v5e.")],
    arg: Arguments = None,
    implementation: Implementation = None,
    operands: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.npz",
            help="The arguments' arrays, in order. By default, random ones for types: floats from 0.1 to 1, and "
            "integers from 0 and below the smallest size of the other arguments, often 0 and 1 alone, which do not "
            "serve as lengths or tables.",
        ),
    ] = None,
    at_most: Annotated[
        float | None,
        typer.Option(
            metavar="PART",
            help="Exit with 1 if a result differs from the interpreter's by more of its largest element; 0.1 by "
            "default, more than rounding explains. Indices, and results that cancel to nearly 0, may need more.",
        ),
    ] = None,
    once: Annotated[
        bool, typer.Option("--once", help="Execute each kernel once, not also with transfers in other orders.")
    ] = False,
    eup_error: Annotated[
        float, typer.Option(help="A relative error of the transcendental unit, such as 2.4e-4; 0 by default.")
    ] = 0.0,
    whole_program: Annotated[
        bool, typer.Option("--whole-program", help="Execute all that the compiler makes, also XLA's fusions.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Executes compiled TPU kernels, or a whole program, on the CPU.

    It shows what they do and should not, how much of their code was executed, and how their results differ from those
    of Pallas' interpreter. It exits with 1 if anything was found, if one of the two gives NaN where the other does not,
    or if results are further from each other than --at-most says. Without --arg, the arguments are FILE.py's
    FUNCTION_args or example_args: a tuple, or a function that returns one.
    """
    known = ", which can be compiled for but not emulated" if target in CHIPS else meant(target, EMULATED)
    require(target in EMULATED, "target", f"be one of {', '.join(EMULATED)}", repr(target), known)
    chosen = one_implementation_of(implementation)
    require(at_most is None or 0 <= at_most < math.inf, "--at-most", "be 0 or a positive number", str(at_most))
    require(0 <= eup_error < 1, "--eup-error", "be from 0 to 1", str(eup_error))
    require_location(function, arg)
    from jaxops_command import emulation

    options = {"target": target, "checks": not once, "eup_error": eup_error, "whole_program": whole_program}
    emulation.emulate(function, arg, chosen, operands, at_most, options, as_json)


def export(
    function: Function,
    output: Annotated[Path, typer.Option(help="The file to write.")],
    platforms: Annotated[str, typer.Option(help="Which to write for, of cpu, cuda and tpu.")] = ",".join(PLATFORMS),
    arg: Arguments = None,
    implementation: Implementation = None,
    rewrite: Rewrite = False,
    tuned: Tuned = None,
    as_json: Json = False,
) -> None:
    """Writes a function to a file that runs on several platforms.

    `lowering.load(FILE).call(...)` runs it. Without --arg, the arguments are FILE.py's FUNCTION_args or example_args: a
    tuple, or a function that returns one.
    """
    chosen = one_implementation_of(implementation)
    names = [name.strip() for name in platforms.split(",")]
    unknown = [name for name in names if name not in PLATFORMS]
    require(not unknown, "--platforms", f"be of {', '.join(PLATFORMS)}", ", ".join(unknown))
    require_location(function, arg)
    from jaxops_command import tracing

    tracing.export(function, arg, output, names, chosen, rewrite, tuned, as_json)


def tune(
    function: Annotated[
        str | None, typer.Argument(metavar="[FILE.py:FUNCTION]", help="The function whose operators to measure.")
    ] = None,
    arg: Arguments = None,
    output: Annotated[
        Path | None, typer.Option(help="A file that keeps the results; what it holds is not measured again.")
    ] = None,
    budget: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", help="When to stop: by default after 60, without a function after 1800."),
    ] = None,
    again: Annotated[bool, typer.Option("--again", help="Measure again what is known already.")] = False,
    by: _By = "device",
    target: Annotated[str | None, typer.Option(help="The TPU, with --by schedule.")] = None,
    trip_count: TripCounts = None,
    scalars: Scalars = None,
    stages: Annotated[str, typer.Option(help="Without a function: what to do, in this order.")] = ",".join(STAGES),
    only: Annotated[list[str] | None, typer.Option(metavar="CASE", help="Without a function: this case.")] = None,
    limit: _Limit = 60.0,
    rehearse: _Rehearse = False,
    show_kept: Annotated[bool, typer.Option("--show", help="Show what is kept of devices.")] = False,
    forget: Annotated[bool, typer.Option("--forget", help="Delete what is kept of them.")] = False,
    export: Annotated[Path | None, typer.Option(metavar="FILE", help="Write what is kept of them to a file.")] = None,
    as_json: Json = False,
) -> None:
    """Measures the operators of a function on this device.

    Of each, the reference and every configuration of every kernel are timed. Without a function, verifies, times and
    tunes every kernel of the library. What is found is kept where "auto" looks for it: among the user's data, or in the
    folder that JAXOPS_TUNED names.

    With a function but without --arg, the arguments are FILE.py's FUNCTION_args or example_args: a tuple, or a function
    that returns one. `with lowering.TuningResult.load(FILE):` uses the results; other commands do so with --tuned FILE.
    """
    seconds = (1800.0 if function is None else 60.0) if budget is None else budget
    require(0 < seconds < math.inf, "--budget", "be a positive number of seconds", str(seconds))
    require(0 < limit < math.inf, "--limit", "be a positive number of seconds", str(limit))
    require_one_of(("device", "schedule"), "--by", by)
    for stage in stages.split(","):
        require_one_of(STAGES, "--stages", stage)
    require_target(target)
    about_kept = {"--show": show_kept, "--forget": forget, "--export": export is not None}
    if function is not None:
        for option, is_given in {**about_kept, "--rehearse": rehearse}.items():
            require(not is_given, option, "be given without a function", repr(function))
        data = _schedule_data(trip_count, scalars)
        require_location(function, arg)
        from jaxops_command import measure

        how = {"by": by, "target": target, "budget_seconds": seconds, "path": output, "again": again, **data}
        measure.tune(function, arg, how, as_json)
        return
    from jaxops_command import device

    if any(about_kept.values()):
        device.about_kept(show_kept, export, forget, as_json)
    else:
        device.campaign(stages.split(","), only or (), seconds, limit, rehearse, again, as_json)


def bench(
    functions: Annotated[
        list[str],
        typer.Argument(metavar="FILE.py:FUNCTION [OTHER.py:FUNCTION]", help="The function to time; one to compare."),
    ],
    arg: Arguments = None,
    implementation: Implementation = None,
    rewrite: Annotated[
        bool, typer.Option("--rewrite", help="Compare the function with what `lowering.rewrite` makes of it.")
    ] = False,
    gradients: Annotated[
        bool, typer.Option("--gradients", help="Time value and gradients of the floating-point arguments.")
    ] = False,
    tuned: Tuned = None,
    repeats: Annotated[int, typer.Option(help="How often each is timed within a minute.")] = 20,
    output: Annotated[Path | None, typer.Option(help="A file for the results as JSON.")] = None,
    as_json: Json = False,
) -> None:
    """Times two functions, or one under each implementation.

    They run on this device in turns. Without --arg, their arguments are the first FILE.py's FUNCTION_args or
    example_args: a tuple, or a function that returns one. A second function with FUNCTION_args of other types takes
    those. Where only shapes are given, arrays are random.
    """
    names, by_operator = implementations_of(implementation)
    require(repeats >= 2, "--repeats", "be at least 2", str(repeats))
    require(len(functions) <= 2, "FILE.py:FUNCTION", "be given once or twice", " ".join(functions))
    require(not rewrite or len(functions) == 1, "--rewrite", "be given with one function", " ".join(functions))
    require_file(output)
    for function in functions:
        require_location(function, arg)
    from jaxops_command import measure

    measure.bench(functions, arg, names, by_operator, rewrite, gradients, tuned, repeats, output, as_json)


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
    """Compiles a function for slices of chips that are not here.

    It tells what fits, what is sent, and how fast it could be. FUNCTION may also be a dict of functions, such as a step
    for each policy of jax.checkpoint. Without --arg, the arguments are FILE.py's FUNCTION_args or example_args: a
    tuple, or a function that returns one. How a mesh splits them is what the file's FUNCTION_shardings(mesh), or
    shardings(mesh), returns: a tuple with a PartitionSpec, None, or a pytree of them for each argument.
    """
    for name in target:
        require_target(name)
    how = {
        "targets": target,
        "meshes": [_mesh(text) for text in mesh],
        "tokens": tokens,
        "price_per_chip_hour": dict(_price(text) for text in price or ()),
        "budget_seconds": budget,
        "cache": cache,
    }
    for path in (output, plot):
        require_file(path)
    require_location(function, arg)
    from jaxops_command import planning

    planning.plan(function, arg, how, output, plot, as_json)


def _schedule_data(trip_count: list[str] | None, scalars: list[str] | None) -> dict[str, Any]:
    trip_counts = trip_counts_of(trip_count or ())
    for text in scalars or ():
        scalar_words(text)
    from jaxops_command.schedule_data import scalars_of  # NumPy takes a tenth of a second

    return {"trip_counts": trip_counts, "scalars": scalars_of(scalars or ())}


def _mesh(text: str) -> dict[str, int]:
    """Parses "data=4,tensor=-1"."""
    found = re.fullmatch(r"\w+=-?\d+(,\w+=-?\d+)*", text)
    require(found is not None, "--mesh", "be AXIS=SIZE, with commas between, such as data=4,tensor=-1", repr(text))
    return {name: int(size) for name, size in (axis.split("=") for axis in text.split(","))}


def _price(text: str) -> tuple[str, Any]:
    name, _, number = text.rpartition("=")
    is_number = re.fullmatch(r"\d+(\.\d*)?", number) is not None
    require(bool(name) and is_number, "--price", "be CHIP=PRICE, such as tpu-v5e=1.2", repr(text))
    return name, float(number)
