"""Installed operators and versions: `jaxops ops` and `jaxops --version`."""

import json
from typing import Any

from rich.table import Table
from rich.text import Text

import jaxops
from jaxops._primitive.operator import Operator
from jaxops_command.output import show
from jaxops_command.user_function import run_user_code
from lowering.evidence import summaries
from lowering.measurements import versions
from lowering.register import load_packages
from lowering.targets import parse


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


def evidence_on(target: str, as_json: bool) -> None:
    """Lists what is known of the kernels for a target, and where "auto" takes them."""
    found = summaries(parse(target).hardware.name)
    if as_json:
        print(json.dumps([summary._asdict() for summary in found], indent=2))
        return
    caption = "time: of the kernel by that of what runs without it, replayed; not run on a device"
    title = f"kernels that are taken on {target}, unless other operands were measured on the device itself"
    table = Table(title=title, caption=caption, title_justify="left", caption_justify="left")
    for name in ("operator", "operands", "taken", "time"):
        table.add_column(name)
    for one in found:
        taken = f"at {one.taken} of {one.known} sizes" if one.has_run else "no: its code was not executed"
        table.add_row(one.operator, one.kind, taken, f"{one.least:.2f} to {one.most:.2f}")
    show(table if found else Text(f"{target}: no evidence on its kernels ships with the library"))


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
