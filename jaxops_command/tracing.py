"""Lowered, compiled and exported functions: `jaxops explain`, `compile` and `export`."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

import lowering
from jaxops_command import schedules
from jaxops_command.options import CommandError, ScheduleFiles
from jaxops_command.output import show, show_text, tuned_by
from jaxops_command.user_function import chosen_by, load, run_user_code
from lowering.compiling.progress import said_if_long

_Chosen = tuple[str, Mapping[str, str]]


def explain(
    function: str,
    target: str | None,
    arg: Sequence[str] | None,
    chosen: _Chosen,
    rewrite: bool,
    tuned: Path | None,
    require: str | None,
    as_json: bool,
) -> None:
    """Shows which implementation each operator takes."""
    if require not in (None, "kernel"):
        raise CommandError(f"--require must be kernel; got {require!r}")
    fn, args = load(function, arg or ())
    rule = "be traceable with these arguments"
    rewrites = run_user_code(function, rule, lambda: lowering.rewrite(fn).report(*args)) if rewrite else None
    fn = lowering.rewrite(fn) if rewrite else fn

    def explained() -> lowering.Explanation:
        with chosen_by(chosen):
            return lowering.explain(fn, *args, target=target, require=require)

    with tuned_by(tuned):
        explanation = run_user_code(function, rule, explained)
    if as_json:
        both = {} if rewrites is None else {"rewrite": json.loads(rewrites.to_json())}
        print(json.dumps({**json.loads(explanation.to_json()), **both}, indent=2) if both else explanation.to_json())
    else:
        for table in () if rewrites is None else rewrites.tables():
            show(table)
        show(explanation.table())
        for remark in explanation.remarks:
            show_text(remark)


def compile(
    function: str,
    arg: Sequence[str] | None,
    chosen: _Chosen,
    rewrite: bool,
    tuned: Path | None,
    output: Path | None,
    options: Mapping[str, Any],
    files: ScheduleFiles,
    as_json: bool,
) -> None:
    """Compiles a function, and shows or keeps what the compiler made of it; `options` are those of `lowering`."""
    saved = schedules.saved(files, options["target"])
    fn, args = load(function, arg or ())
    fn = lowering.rewrite(fn) if rewrite else fn

    def compiled() -> lowering.CompiledReport:
        with chosen_by(chosen):
            return lowering.compile(fn, *args, **options)

    with tuned_by(tuned), said_if_long(f"compiling for {options['target']}"):
        report = run_user_code(function, "be traceable with these arguments", compiled)
    if output is not None:
        (output / "stablehlo.mlir").write_text(report.stablehlo)
        (output / "optimized.hlo").write_text(report.hlo)
    changes = None
    if report.schedule is not None:
        schedules.write(report.schedule, files)
        changes = None if saved is None else schedules.changes_since(saved, report.schedule, files)
    if as_json:
        record = json.loads(report.to_json())
        print(
            json.dumps(record if changes is None else {**record, "changes": schedules.record(changes, files)}, indent=2)
        )
    else:
        show(report.table())
        if report.schedule is not None:
            schedules.show_schedule(report.schedule, changes)
    if changes is not None:
        schedules.require_speed(changes, files)


def export(
    function: str,
    arg: Sequence[str] | None,
    output: Path,
    platforms: Sequence[str],
    chosen: _Chosen,
    rewrite: bool,
    tuned: Path | None,
    as_json: bool,
) -> None:
    """Writes a function to one file that runs on several platforms."""
    fn, args = load(function, arg or ())
    fn = lowering.rewrite(fn) if rewrite else fn

    def exported() -> lowering.Artifact:
        with chosen_by(chosen):
            try:
                return lowering.export(fn, *args, platforms=platforms)
            except ValueError as error:
                if "Only interpret mode is supported" not in str(error):
                    raise
                rule = "be some on which the function's Pallas kernels run, such as tpu"
                raise CommandError(f"--platforms must {rule}; got {','.join(platforms)}") from None

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
