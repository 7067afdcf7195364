"""Draws the plots of the documentation from the results in `benchmarks/results/`: the same numbers give the same files.

python benchmarks/plots.py
"""

import json
import re
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
OURS, PEER = "#3949ab", "#9e9e9e"
# A dropout mask and a lookup are not a loss: each operator is compared with PyTorch on the cases that have a gradient.
FORWARD_ALONE = re.compile(r"^forward,|gradient alone|value alone")


def cases(name: str) -> list[dict[str, Any]]:
    return json.loads((RESULTS / f"{name}.json").read_text())["cases"]


def plain_against_ours() -> Figure:
    """Memory against the vocabulary as the compiler reports it, and measured times, of a loss with both gradients."""
    figure = Figure(figsize=(8.6, 3.2), layout="constrained")
    memory, time = figure.subplots(1, 2)
    plain, ours = ("plain: logits, optax loss", PEER), ("jaxops.linear_cross_entropy", OURS)
    by_classes, timed = cases("vocabulary_memory_cpu"), cases("linear_cross_entropy_cpu")
    for (label, color), name in ((plain, "logits, optax loss"), (ours, "jaxops.linear_cross_entropy")):
        gigabytes = [case["candidates"][name]["temporary_mb"] / 1e3 for case in by_classes]
        memory.plot([case["vocabulary"] for case in by_classes], gigabytes, marker="o", color=color, label=label)
    memory.set(title="memory, 2048 rows of 512", xlabel="classes", ylabel="temporaries, GB", ylim=0)
    memory.xaxis.set_major_formatter("{x:,.0f}")
    memory.legend()
    for left, (_, color), name in ((-0.4, plain, "logits, optax loss"), (0, ours, "jaxops grad_in_forward")):
        medians = [case["candidates"][name]["median_ms"] for case in timed]
        bars = time.bar([left + place for place in range(len(timed))], medians, 0.36, color=color, align="edge")
        time.bar_label(bars, fmt="%.0f")
    sizes = (re.findall(r"\d+", case["name"].replace("float32", "")) for case in timed)
    time.set_xticks(
        range(len(timed)), [f"{rows} rows of {hidden},\n{classes} classes" for rows, hidden, classes, _ in sizes]
    )
    time.set(title="time", ylabel="loss and gradients, ms")
    time.margins(y=0.1)
    for axes in (memory, time):
        axes.grid(axis="y", alpha=0.3)
        axes.set_axisbelow(True)
    return figure


def memory_against_vocabulary() -> Figure:
    """What the compiler reports for a loss and its gradients."""
    results = cases("vocabulary_memory_cpu")
    figure = Figure(figsize=(6.4, 3.6), layout="constrained")
    axes = figure.subplots()
    for name in results[0]["candidates"]:
        megabytes = [case["candidates"][name]["temporary_mb"] for case in results]
        axes.plot([case["vocabulary"] for case in results], megabytes, marker="o", label=name)
    axes.set(xlabel="vocabulary", ylabel="temporaries, MB")
    _logarithmic(axes, [10, 30, 100, 300, 1000, 3000])
    figure.legend(loc="outside upper left")
    return figure


def time_against_rows() -> Figure:
    """Loss and both gradients on a CPU."""
    results = cases("linear_cross_entropy_rows_cpu")
    figure = Figure(figsize=(6.4, 3.6), layout="constrained")
    axes = figure.subplots()
    rows = [case["rows"] for case in results]
    for name in results[0]["candidates"]:
        of_name = [case["candidates"][name] for case in results]
        (line,) = axes.plot(rows, [one["median_ms"] for one in of_name], marker="o", label=name)
        axes.fill_between(
            rows, *zip(*(one["quartiles_ms"] for one in of_name), strict=True), color=line.get_color(), alpha=0.2
        )
    axes.set(xlabel="rows", ylabel="loss and gradients, ms")
    _logarithmic(axes, [20, 50, 100, 200, 500])
    figure.legend(loc="outside upper left", ncols=2)
    return figure


def ours_by_pytorch() -> Figure:
    """The time of each operator on a CPU as a part of PyTorch's, a dot for each case."""
    ratios: dict[str, list[float]] = {}
    for path in sorted(RESULTS.glob("*_cpu.json")):
        for case in json.loads(path.read_text()).get("cases", ()):
            times = {name: row.get("median_ms") for name, row in case["candidates"].items()}
            ours = [
                time
                for name, time in times.items()
                if re.fullmatch(r"jaxops( fused_apply|, from x| grad_in_forward)?", name)
            ]
            theirs = [time for name, time in times.items() if name.startswith("torch")]
            if ours and theirs and not FORWARD_ALONE.search(case["name"]):
                ratios.setdefault(operator_of(path.stem, case["name"]), []).append(ours[0] / min(theirs))
    ordered = sorted(ratios, key=lambda name: -statistics.median(ratios[name]))
    figure = Figure(figsize=(6.4, 4.2), layout="constrained")
    axes = figure.subplots()
    for height, name in enumerate(ordered):
        axes.plot(ratios[name], [height] * len(ratios[name]), "o", color=PEER, markersize=4)
        axes.plot(statistics.median(ratios[name]), height, "D", color=OURS, markersize=6)
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_yticks(range(len(ordered)), ordered)
    _powers_of_two(axes, "time by PyTorch's, with gradients: each case, and the median")
    return figure


def kernels_by_roofline() -> Figure:
    """Replayed kernels and XLA's own code on TPUs, in multiples of the least time that memory and products allow."""
    results = [case for case in cases("tpu_schedules") if case["name"].endswith("tpu-v5e")]
    rows = []
    for case in results:
        kernel, xla = (case["candidates"].get(name, {}) for name in ("pallas", "xla"))
        if kernel.get("us") and xla.get("us"):
            roofline = kernel["roofline_us"]
            rows.append((case["name"].rpartition(" on ")[0], kernel["us"] / roofline, xla["us"] / roofline))
    figure = Figure(figsize=(7.2, 0.24 * len(rows) + 0.9), layout="constrained")
    axes = figure.subplots()
    for height, (_, kernel, xla) in enumerate(reversed(rows)):
        axes.plot([kernel, xla], [height, height], color="0.85", linewidth=2, zorder=1)
        axes.plot(xla, height, "o", color=PEER, label="XLA" if height == 0 else None)
        axes.plot(kernel, height, "D", color=OURS, markersize=5, label="kernels" if height == 0 else None)
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_yticks(range(len(rows)), [name for name, *_ in reversed(rows)], fontsize=7)
    figure.legend(loc="outside upper right", ncols=2)
    _powers_of_two(axes, "time by roofline, replayed for a TPU v5e")
    return figure


def operator_of(results_name: str, case_name: str) -> str:
    """The operator that a case is of; some files hold several."""
    named = {"max ": "max_pool", "mean ": "avg_pool", "divisive ": "divisive_norm"}
    for start, operator in named.items():
        if case_name.startswith(start):
            return operator
    if results_name == "softmax_cpu" and "softmax" not in case_name:
        return "activation"
    if results_name.startswith(("linear_cross_entropy", "vocabulary_memory")):
        return "linear_cross_entropy"
    return results_name.removesuffix("_cpu")


def _logarithmic(axes: Axes, ticks: list[int]) -> None:
    """Has both axes logarithmic, with plain numbers at powers of two and at the ticks."""
    axes.set_yscale("log")
    axes.set_yticks(ticks)
    axes.yaxis.set_minor_formatter("")
    axes.set_xscale("log", base=2)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:,.0f}")
    axes.grid(alpha=0.3)


def _powers_of_two(axes: Axes, label: str) -> None:
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.grid(axis="x", alpha=0.3)
    axes.set_xlabel(label)


PLOTS: dict[str, Callable[[], Figure]] = {
    "docs/figures/plain_against_ours.svg": plain_against_ours,
    "docs/vocabulary_memory.svg": memory_against_vocabulary,
    "docs/figures/time_against_rows.svg": time_against_rows,
    "docs/figures/ours_by_pytorch.svg": ours_by_pytorch,
    "docs/figures/kernels_by_roofline.svg": kernels_by_roofline,
}


def main() -> None:
    matplotlib.rcParams["svg.hashsalt"] = "jaxops"  # the same file for the same numbers
    for path, plot in PLOTS.items():
        (ROOT / path).parent.mkdir(exist_ok=True)
        plot().savefig(ROOT / path, metadata={"Date": None})
        print(path)


if __name__ == "__main__":
    main()
