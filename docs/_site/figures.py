"""Tables of figures, as Markdown, from the results that the programs in `benchmarks/` wrote."""

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "benchmarks"))

import plots  # noqa: E402  it stands beside the benchmarks

# What a candidate's record may hold, with the head of its column. Other entries stay in the file.
COLUMNS = {
    "median_ms": "median, ms",
    "quartiles_ms": "quartiles, ms",
    "ms": "time, ms",
    "trace_ms": "tracing, ms",
    "temporary_mb": "temporaries, MB",
    "peak_mb": "peak, MB",
}
REPLAYS = "tpu_schedules"  # which have a table of their own


def measured(operators: Iterable[str]) -> str:
    """Tables of the cases of these operators, one for each results file; empty if there are none."""
    wanted, tables = set(operators), []
    for path in sorted(plots.RESULTS.glob("*.json")):
        if path.stem == REPLAYS:
            continue
        results = json.loads(path.read_text())
        cases = [case for case in results.get("cases", ()) if plots.operator_of(path.stem, case["name"]) in wanted]
        if cases:
            tables.append(
                f"{_environment(results['environment'])}, `benchmarks/results/{path.name}`.\n\n{_table(cases)}"
            )
    return "\n".join(tables)


def replayed(operators: Iterable[str]) -> str:
    """The replays of these operators' kernels on TPUs; empty if there are none."""
    rows = []
    for case in plots.cases(REPLAYS):
        name, _, target = case["name"].rpartition(" on ")
        operator, _, operands = name.partition(" ")
        if operator not in set(operators):
            continue
        found = case["candidates"]
        xla, kernel = found["xla"], found.get("pallas", {})
        times = (xla.get("us"), kernel.get("us"), xla.get("roofline_us"))
        rows.append((operator, operands, target, *(f"{time:,.1f}" if time else "-" for time in times)))
    head = ("operator", "operands", "target", "XLA, us", "kernels, us", "roofline, us")
    return markdown_table(head, rows, numbers=3) if rows else ""


def markdown_table(head: Iterable[str], rows: Iterable[Iterable[str]], numbers: int = 0) -> str:
    """A table whose last columns hold numbers."""
    head = tuple(head)
    rule = ["---"] * (len(head) - numbers) + ["---:"] * numbers
    return "".join(f"| {' | '.join(row)} |\n" for row in (head, rule, *rows))


def _table(cases: list[dict[str, Any]]) -> str:
    found = {key for case in cases for row in case["candidates"].values() for key in row}
    columns = [key for key in COLUMNS if key in found]
    rows = [
        (case["name"] if place == 0 else "", name, *(_cell(row.get(key)) for key in columns))
        for case in cases
        for place, (name, row) in enumerate(case["candidates"].items())
    ]
    head = ("case", "candidate", *(COLUMNS[key] for key in columns))
    return markdown_table(head, rows, numbers=len(columns))


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return " to ".join(f"{each:g}" for each in value) if isinstance(value, list) else f"{value:,g}"


def _environment(environment: dict[str, Any]) -> str:
    versions = environment["versions"]
    torch = f", PyTorch {versions['torch']}" if "torch" in versions else ""
    device = f"{environment['cpu_cores']} cores of an {environment['cpu']}"
    return f"{device}, JAX {versions['jax']}{torch}, {environment['date']}"
