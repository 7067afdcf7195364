"""Installed operators and versions: `jaxops ops` and `jaxops --version`."""

import json
from typing import Any

from rich.table import Table

import jaxops
from jaxops._primitive.operator import Operator
from jaxops_command.output import show
from jaxops_command.user_function import run_user_code
from lowering.measurements import versions
from lowering.register import load_packages


def show_versions() -> None:
    """Prints the versions of this library and of JAX."""
    print(*(f"{name} {version}" for name, version in reversed(versions())), sep=", ")


def ops(as_json: bool) -> None:
    """Lists the operators."""
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
