"""`jaxops targets`: the chips, and the compilers for them."""

import json

from rich.table import Table
from rich.text import Text

import lowering
from jaxops_command.options import CommandError
from jaxops_command.output import show
from lowering.compiling.progress import shown


def targets(install: str | None, as_json: bool) -> None:
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
    try:
        with shown(f"installing the compiler for {platform}, about a gigabyte"):
            lowering.compilers.install(platform)
    except lowering.compilers.InstallError as error:
        raise CommandError(str(error)) from None
