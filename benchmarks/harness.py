"""What every benchmark shares: fair timing, the record of where it ran, and the report."""

import argparse
import datetime
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import jax

_PACKAGES = ("jaxops", "jax", "jaxlib", "numpy", "optax", "torch", "tokamax", "liger-kernel", "cut-cross-entropy")


def arguments(description: str) -> argparse.Namespace:
    """The command line of a benchmark: `--output` and `--quick`."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--output", type=Path, help="where to write the results as JSON")
    parser.add_argument("--quick", action="store_true", help="small sizes and few repeats, to see that it runs")
    return parser.parse_args()


def times_ms(candidates: Mapping[str, Callable[[], Any]], *, repeats: int, warmups: int = 2) -> dict[str, list[float]]:
    """Times each candidate `repeats` times, turn by turn, so that a slow minute of the machine slows all of them.

    A candidate returns its results, for which the clock waits, or nothing if it has waited itself.
    """
    for run in candidates.values():
        for _ in range(warmups):
            jax.block_until_ready(run())
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for turn in range(repeats):
        # Every other round goes backwards: no candidate always runs after the same neighbour.
        for name in list(candidates)[:: 1 if turn % 2 == 0 else -1]:
            start = time.perf_counter()
            jax.block_until_ready(candidates[name]())
            times[name].append(1e3 * (time.perf_counter() - start))
    return times


def summary(times: list[float]) -> dict[str, Any]:
    """The median of times and the quartiles around it."""
    first, median, third = statistics.quantiles(times, n=4)
    return {"median_ms": round(median, 3), "quartiles_ms": [round(first, 3), round(third, 3)], "repeats": len(times)}


def ratio(times: list[float], others: list[float]) -> float:
    """The median of how many times as long each run took as the other candidate's in the same turn."""
    return statistics.median(a / b for a, b in zip(times, others, strict=True))


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


def report(name: str, cases: list[dict[str, Any]], output: Path | None) -> None:
    """Prints one line a row, and writes everything to `output`."""
    record = {"benchmark": name, "environment": environment(), "cases": cases}
    for case in cases:
        print(case["name"])
        for candidate, row in case["candidates"].items():
            print(f"  {candidate:32} " + "  ".join(f"{key} {value}" for key, value in row.items()))
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps(record, indent=2) + "\n")


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
