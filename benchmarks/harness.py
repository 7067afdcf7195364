"""What every benchmark shares: its command line, the record of where it ran, and the report."""

import argparse
import datetime
import json
import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

import jax

_PACKAGES = ("jaxops", "jax", "jaxlib", "numpy", "optax", "flax", "torch", "tokamax")


def arguments(description: str) -> argparse.Namespace:
    """The command line of a benchmark: `--output` and `--quick`."""
    return parser(description).parse_args()


def parser(description: str) -> argparse.ArgumentParser:
    """The same, for benchmarks that have more arguments."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--output", type=Path, help="where to write the results as JSON")
    parser.add_argument("--quick", action="store_true", help="small sizes and few repeats, to see that it runs")
    return parser


def environment() -> dict[str, Any]:
    """Device, versions and date."""
    device = jax.devices()[0]
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "device": device.device_kind,
        "platform": device.platform,
        "cpu": _cpu_model(),
        "cpu_cores": len(_usable_cores()),
        "python": platform.python_version(),
        "versions": {name: version for name in _PACKAGES if (version := _version(name))},
    }


def report(name: str, cases: list[dict[str, Any]], output: Path | None) -> dict[str, Any]:
    """Prints one line a row, and writes everything to `output`."""
    record = {"benchmark": name, "environment": environment(), "cases": cases}
    for case in cases:
        print(case["name"])
        for candidate, row in case["candidates"].items():
            print(f"  {candidate:32} " + "  ".join(f"{key} {value}" for key, value in row.items()))
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps(record, indent=2) + "\n")
    return record


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    return next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.processor()
    )


def _usable_cores() -> set[int]:
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
