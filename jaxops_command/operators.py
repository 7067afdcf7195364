"""Installed operators and versions: `jaxops ops` and `jaxops --version`."""

import itertools
import json
from collections.abc import Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

import jaxops
from jaxops._primitive.operator import Operator
from jaxops_command.options import CommandError
from jaxops_command.output import show
from jaxops_command.user_function import run_user_code
from lowering.describe import counted, one_of
from lowering.evidence import Summary, summaries
from lowering.measurements import versions
from lowering.register import load_packages
from lowering.targets import parse


def show_versions() -> None:
    """Prints the versions of this library and of JAX."""
    print(*(f"{name} {version}" for name, version in reversed(versions())), sep=", ")


def ops(operator: str | None, as_json: bool) -> None:
    """Lists the operators, or one of them."""
    records = [_describe(each) for each in _operators(operator)]
    if as_json:
        print(json.dumps(records, indent=2))
        return
    caption = "derivative: own is a tangent operator, whose transpose runs a documented backward operator"
    table = Table(
        title=counted(len(records), "operator"), caption=caption, title_justify="left", caption_justify="left"
    )
    table.add_column("operator", no_wrap=True)
    for name in ("signature", "kernels", "derivative"):
        table.add_column(name)
    for record in records:
        kernels = ", ".join(kernel["name"] for kernel in record["kernels"])
        table.add_row(record["name"], record["signature"], kernels or "-", record["derivative"])
    show(table)


def evidence_on(target: str, operator: str | None, as_json: bool) -> None:
    """Lists where "auto" takes kernels on a target: for all operators, or kind by kind for one."""
    _operators(operator)
    found = [one for one in summaries(parse(target).hardware.name) if operator in (None, one.operator)]
    if as_json:
        print(json.dumps([summary._asdict() for summary in found], indent=2))
        return
    if not found:
        show(Text(f"{target}: no evidence on {operator or 'its kernels'} ships with the library"))
        return
    more = "" if operator else f"; `jaxops ops {found[0].operator} --target {target}` lists its kinds of operands"
    caption = f"time: of the kernel by that of what runs without it, in replays or as measured{more}"
    title = f"kernels that are taken on {target}, unless other operands were measured on the device itself"
    table = Table(title=title, caption=caption, title_justify="left", caption_justify="left")
    for name in ("operator", "operands" if operator else "kinds", "taken at", "time"):
        table.add_column(name)
    for name, of_operator in itertools.groupby(found, key=lambda one: one.operator):
        kinds = list(of_operator)
        if operator is None:
            usable = sum(one.taken > 0 for one in kinds)
            table.add_row(name, f"{usable} of {len(kinds)}", *_sizes_and_times(kinds))
        else:
            for one in kinds:
                table.add_row(name, one.kind, *_sizes_and_times([one]))
    show(table)


def _operators(name: str | None) -> list[Operator]:
    """Returns the operator of this name, or all; refuses a name that none has."""
    run_user_code("installed packages with operators", "be importable", load_packages)
    every = jaxops.operators()
    if name is not None and all(operator.name != name for operator in every):
        raise CommandError(f"OPERATOR must be {one_of([operator.name for operator in every], name)}")
    return [operator for operator in every if name in (None, operator.name)]


def _sizes_and_times(kinds: Sequence[Summary]) -> tuple[str, str]:
    """Says at how many of the known sizes a kernel is taken, and what its times are."""
    taken, known = (sum(getattr(one, name) for one in kinds) for name in ("taken", "known"))
    sizes = f"{taken} of {known} sizes" if any(one.has_run for one in kinds) else "none: its code was not executed"
    return sizes, f"{min(one.least for one in kinds):.2f} to {max(one.most for one in kinds):.2f}"


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
