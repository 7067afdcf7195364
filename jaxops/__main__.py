"""The `jaxops` command."""

import importlib.util
import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text
from typer.core import TyperGroup

import jaxops
import lowering
from jaxops._commands import doctor, measure
from jaxops._commands import plan as plan_command
from jaxops._commands.options import (
    Arguments,
    Function,
    Implementation,
    Json,
    Rewrite,
    Scalars,
    TripCounts,
    Tuned,
    console,
    require,
    require_folder,
    require_implementation,
    require_target,
    scalars_of,
    show,
    show_text,
    trip_counts_of,
    tuned_by,
)
from jaxops._commands.user_function import CommandError, load, run_user_code
from jaxops._demo import report
from jaxops._demo.processes import COUNTS
from jaxops._demo.run_folder import RunError
from jaxops._demo.train import Settings
from jaxops._primitive.operator import Operator
from lowering.compiling.progress import said_if_long, shown
from lowering.describe import shortened
from lowering.measurements import versions
from lowering.register import load_packages


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


app = typer.Typer(cls=_OneSentence, add_completion=False, no_args_is_help=True)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(*(f"{name} {version}" for name, version in reversed(versions())), sep=", ")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Shows the versions, and exits.")
    ] = False,
) -> None:
    """Vendor-documented operators as JAX primitives."""


@app.command()
def demo(
    steps: Annotated[int, typer.Option(help="How many training steps to take.")] = Settings().steps,
    seed: Annotated[int, typer.Option(help="Seeds the parameters and the order of the text.")] = Settings().seed,
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
    """Trains a small language model on the source of Python's standard library, and shows what ran."""
    require(steps > 0, "--steps", "be positive", str(steps))
    require(0 <= seed < 2**32, "--seed", "be in [0, 2**32)", str(seed))
    counts = ", ".join(map(str, COUNTS))
    require(processes is None or processes in COUNTS, "--processes", f"be one of {counts}", str(processes))
    require(not resume or processes is not None, "--resume", "be given with --processes", "none")
    needed = {"tokenizers": "tokenizers", "matplotlib": "matplotlib"}
    if processes is not None:
        needed["orbax"] = "orbax-checkpoint"
    for module, package in needed.items():
        if importlib.util.find_spec(module) is None:
            helps = "pip install 'jaxops[demo]', or '.[demo]' in a clone"
            raise CommandError(f"{package} must be installed; it is not: {helps}")
    require_folder(output)
    settings = Settings(steps=steps, seed=seed)
    try:
        if processes is None:
            report.run(settings, output, console())
        else:
            report.run_together(processes, settings, resume, output, console())
    except (OSError, RunError) as error:
        raise CommandError(str(error)) from None


@app.command()
def ops(as_json: Json = False) -> None:
    """Lists the operators, also of other installed packages: signature, kernels and derivative of each."""
    run_user_code("installed packages with operators", "be importable", load_packages)
    records = [_describe(operator) for operator in jaxops.operators()]
    if as_json:
        print(json.dumps(records, indent=2))
        return
    caption = "derivative: own is a tangent operator, whose transpose runs a documented backward operator"
    table = Table(title=f"{len(records)} operators", caption=caption, title_justify="left", caption_justify="left")
    table.add_column("operator", no_wrap=True)
    for name in ("signature", "kernels", "derivative"):
        table.add_column(name)
    for record in records:
        kernels = ", ".join(kernel["name"] for kernel in record["kernels"])
        table.add_row(record["name"], record["signature"], kernels or "-", record["derivative"])
    show(table)


@app.command()
def explain(
    function: Function,
    target: Annotated[
        str | None,
        typer.Option(help="What to lower for, such as cpu, tpu-v5e or cuda-h100. By default, the devices here."),
    ] = None,
    arg: Arguments = None,
    rewrite: Rewrite = False,
    tuned: Tuned = None,
    as_json: Json = False,
) -> None:
    """Shows which implementation each operator in a function uses on a target, and why.

    Without --arg, the arguments are FILE.py's FUNCTION_args or example_args: a tuple, or a function that returns one.
    Nothing is compiled or run.
    """
    if target is not None:
        require_target(target)
    fn, args = load(function, arg or ())
    rule = "be traceable with these arguments"
    rewrites = run_user_code(function, rule, lambda: lowering.rewrite(fn).report(*args)) if rewrite else None
    fn = lowering.rewrite(fn) if rewrite else fn
    with tuned_by(tuned):
        explanation = run_user_code(function, rule, lambda: lowering.explain(fn, *args, target=target))
    if as_json:
        both = {} if rewrites is None else {"rewrite": json.loads(rewrites.to_json())}
        print(json.dumps({**json.loads(explanation.to_json()), **both}, indent=2) if both else explanation.to_json())
    else:
        for table in () if rewrites is None else rewrites.tables():
            show(table)
        show(explanation.table())
        for remark in explanation.remarks:
            show_text(remark)


@app.command()
def compile(
    function: Function,
    target: Annotated[str, typer.Option(help="What to compile for, such as cpu, tpu-v5e or tpu-v5p:8x8x8.")],
    arg: Arguments = None,
    implementation: Implementation = "auto",
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
    as_json: Json = False,
) -> None:
    """Compiles a function with a chip's real compiler, without the chip: kernels, memory and cost.

    Without --arg, the arguments are FILE.py's FUNCTION_args or example_args: a tuple, or a function that returns one.
    """
    require_target(target)
    require_implementation(implementation)
    if output is not None:
        require_folder(output)
    data: dict[str, Any] = {"trip_counts": trip_counts_of(trip_count or ()), "scalars": scalars_of(scalars or ())}
    fn, args = load(function, arg or ())
    fn = lowering.rewrite(fn) if rewrite else fn

    def compiled() -> lowering.CompiledReport:
        with lowering.use(implementation):
            return lowering.compile(fn, *args, target=target, schedule=schedule, auto_layouts=auto_layouts, **data)

    with tuned_by(tuned), said_if_long(f"compiling for {target}"):
        report = run_user_code(function, "be traceable with these arguments", compiled)
    if output is not None:
        (output / "stablehlo.mlir").write_text(report.stablehlo)
        (output / "optimized.hlo").write_text(report.hlo)
    if as_json:
        print(report.to_json())
    else:
        show(report.table())
        if report.schedule is not None:
            show(report.schedule.table())
            for remark in report.schedule.remarks:
                show_text(remark)


@app.command()
def export(
    function: Function,
    output: Annotated[Path, typer.Option(help="The file to write.")],
    platforms: Annotated[str, typer.Option(help="Which to write for, of cpu, cuda and tpu.")] = "cpu,cuda,tpu",
    arg: Arguments = None,
    implementation: Implementation = "auto",
    rewrite: Rewrite = False,
    tuned: Tuned = None,
    as_json: Json = False,
) -> None:
    """Writes a function to one file that runs on several platforms: `lowering.load(FILE).call(...)`.

    Without --arg, the arguments are FILE.py's FUNCTION_args or example_args: a tuple, or a function that returns one.
    """
    require_implementation(implementation)
    fn, args = load(function, arg or ())
    fn = lowering.rewrite(fn) if rewrite else fn

    def exported() -> lowering.Artifact:
        with lowering.use(implementation):
            return lowering.export(fn, *args, platforms=[name.strip() for name in platforms.split(",")])

    with tuned_by(tuned):
        artifact = run_user_code(function, "be traceable with these arguments", exported)
    try:
        artifact.save(output)
    except lowering.ArtifactError as error:
        raise CommandError(str(error).replace("save: path", "--output", 1)) from None
    if as_json:
        record = {"versions": artifact.versions, "implementations": artifact.implementations}
        print(json.dumps({"output": str(output), "platforms": artifact.platforms, **record}, indent=2))
        return
    written = f"{output}, {output.stat().st_size:,} bytes"
    if not artifact.implementations[artifact.platforms[0]]:
        print(f"{written}: {function} has none of this library's operators")
        return
    table = Table(title=written, title_justify="left")
    table.add_column("operator")
    for platform in artifact.platforms:
        table.add_column(platform)
    for operator in artifact.implementations[artifact.platforms[0]]:
        taken = (", ".join(artifact.implementations[platform][operator]) for platform in artifact.platforms)
        table.add_row(operator, *taken)
    show(table)


app.command()(measure.tune)
app.command()(measure.bench)
app.command()(doctor.doctor)
app.command()(plan_command.plan)


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
    """Lists the chips that functions can be explained and compiled for, and installs the compilers for them."""
    if install is not None:
        _install_compiler(install)
    records = [
        {
            "name": chip.name,
            "status": lowering.availability(chip),
            "memory_bytes": chip.memory_bytes,
            "memory_bytes_per_s": chip.memory_bytes_per_s,
            "matmul_flops_per_s": dict(chip.matmul_flops_per_s),
            "source": chip.source,
        }
        for chip in lowering.targets()
    ]
    if as_json:
        print(json.dumps(records, indent=2))
        return
    table = Table(title=f"{len(records)} targets", title_justify="left")
    table.add_column("target", no_wrap=True)
    table.add_column("status")
    table.add_column("memory, GB", justify="right")
    table.add_column("GB/s", justify="right")
    table.add_column("bf16 Tflop/s", justify="right")
    for chip in lowering.targets():
        memory = (chip.memory_bytes, chip.memory_bytes_per_s)
        figures = ("-" if size is None else f"{size / 1e9:,.0f}" for size in memory)
        rate = dict(chip.matmul_flops_per_s).get("bfloat16")
        table.add_row(
            chip.name, Text(lowering.availability(chip)), *figures, "-" if rate is None else f"{rate / 1e12:,.0f}"
        )
    show(table)


def _install_compiler(platform: str) -> None:
    platforms = lowering.compilers.PLATFORMS
    require(platform in platforms, "--install", f"be one of {', '.join(platforms)}", platform)
    try:
        with shown(f"installing the compiler for {platform}, about a gigabyte"):
            lowering.compilers.install(platform)
    except lowering.compilers.InstallError as error:
        raise CommandError(str(error)) from None


def _describe(operator: Operator) -> dict[str, Any]:
    return {
        "name": operator.name,
        "signature": operator.signature,
        "kernels": [
            {"name": kernel.name, "platform": kernel.platform, "default_on": sorted(kernel.measured_on)}
            for kernel in operator.kernels
        ],
        "derivative": "of the reference" if operator.derivative is None else "own",
    }


if __name__ == "__main__":
    app()
