"""`jaxops tune` and `jaxops bench`: measurements on the device at hand."""

import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

import lowering
from jaxops._commands import device
from jaxops._commands.options import (
    IMPLEMENTATIONS,
    Arguments,
    Function,
    Json,
    Scalars,
    TripCounts,
    Tuned,
    require,
    require_file,
    require_implementation,
    require_target,
    scalars_of,
    show,
    trip_counts_of,
    tuned_by,
)
from jaxops._commands.user_function import load, run_user_code
from lowering.campaign.run import STAGES
from lowering.measuring.bench import bench as bench_function
from lowering.measuring.tune import INTERRUPTED


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
    by: Annotated[
        str, typer.Option(help="What gives the times: device, or schedule for a TPU that is not here.")
    ] = "device",
    target: Annotated[str | None, typer.Option(help="The TPU, with --by schedule.")] = None,
    trip_count: TripCounts = None,
    scalars: Scalars = None,
    stages: Annotated[str, typer.Option(help="Without a function: what to do, in this order.")] = ",".join(STAGES),
    only: Annotated[list[str] | None, typer.Option(metavar="CASE", help="Without a function: this case.")] = None,
    limit: Annotated[
        float, typer.Option(metavar="SECONDS", help="Without a function: how long a case may say nothing.")
    ] = 60.0,
    rehearse: Annotated[
        bool, typer.Option("--rehearse", help="Without a function: interpret small kernels on the CPU.")
    ] = False,
    show_kept: Annotated[bool, typer.Option("--show", help="Show what is kept of devices.")] = False,
    forget: Annotated[bool, typer.Option("--forget", help="Delete what is kept of them.")] = False,
    export: Annotated[Path | None, typer.Option(metavar="FILE", help="Write what is kept of them to a file.")] = None,
    as_json: Json = False,
) -> None:
    """Measures each operator of a function on this device: the reference and every configuration of every kernel.

    Without a function, verifies, times and tunes every kernel of the library. What is found is kept where "auto" looks
    for it: among the user's data, or in the folder that JAXOPS_TUNED names.

    With a function but without --arg, the arguments are FILE.py's FUNCTION_args or example_args: a tuple, or a function
    that returns one. `with lowering.TuningResult.load(FILE):` uses the results; other commands do so with --tuned FILE.
    """
    seconds = (1800.0 if function is None else 60.0) if budget is None else budget
    require(0 < seconds < math.inf, "--budget", "be a positive number of seconds", str(seconds))
    require(0 < limit < math.inf, "--limit", "be a positive number of seconds", str(limit))
    about_kept = {"--show": show_kept, "--forget": forget, "--export": export is not None}
    if function is not None:
        data = {"trip_counts": trip_counts_of(trip_count or ()), "scalars": scalars_of(scalars or ())}
        for option, is_given in {**about_kept, "--rehearse": rehearse}.items():
            require(not is_given, option, "be given without a function", repr(function))
        _tune_function(function, arg, output, seconds, again, by, target, data, as_json)
    elif any(about_kept.values()):
        device.about_kept(show_kept, export, forget, as_json)
    else:
        device.campaign(stages.split(","), only or (), seconds, limit, rehearse, again, as_json)


def _tune_function(
    function: str,
    arg: list[str] | None,
    output: Path | None,
    budget: float,
    again: bool,
    by: str,
    target: str | None,
    data: Mapping[str, Any],
    as_json: bool,
) -> None:
    if target is not None:
        require_target(target)
    fn, args = load(function, arg or ())
    result = run_user_code(
        function,
        "be traceable and its operators run here",
        lambda: lowering.tune(
            fn,
            *args,
            target=target,
            by=by,
            **data,
            budget_seconds=budget,
            path=output,
            again=again,
        ),
    )
    if as_json:
        print(result.to_json())
    elif result.entries or result.stopped:
        show(result.table())
    else:
        print(f"{function} has none of this library's operators: there is nothing to tune")
    if result.stopped == INTERRUPTED:
        kept = "" if output is None else f", which {output} keeps"
        print(f"jaxops: interrupted after {len(result.entries)} of the function's operators{kept}", file=sys.stderr)
        raise typer.Exit(device.INTERRUPTED_STATUS)


def bench(
    function: Function,
    arg: Arguments = None,
    implementation: Annotated[str, typer.Option(help="Which to compare, of auto, reference and pallas.")] = ",".join(
        IMPLEMENTATIONS
    ),
    tuned: Tuned = None,
    repeats: Annotated[int, typer.Option(help="How often each is timed.")] = 20,
    output: Annotated[Path | None, typer.Option(help="A file for the results as JSON.")] = None,
    as_json: Json = False,
) -> None:
    """Times a function on this device under each implementation, in turns.

    Without --arg, the arguments are FILE.py's FUNCTION_args or example_args: a tuple, or a function that returns one.
    Where only shapes are given, arrays are random.
    """
    names = implementation.split(",")
    for name in names:
        require_implementation(name)
    require(repeats >= 2, "--repeats", "be at least 2", str(repeats))
    if output is not None:
        require_file(output)
    fn, args = load(function, arg or ())
    with tuned_by(tuned):
        result = run_user_code(
            function,
            "run here with these arguments",
            lambda: bench_function(fn, *args, implementations=names, repeats=repeats),
        )
    if output is not None:
        output.write_text(result.to_json() + "\n")
    if as_json:
        print(result.to_json())
    else:
        show(result.table())
