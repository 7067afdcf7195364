"""Half an hour of a GPU: what is right, how fast it is, and peers beside it, in stages that end when time does.

python benchmarks/gpu.py probe smoke flagship --out build/gpu --deadline 550 --done benchmarks/results/gpu_done.jsonl

Stages, in the order in which to run them: `probe` (versions, clocks, rates), `smoke` (every kernel is verified; mend
what is wrong before anything is timed), `flagship` (linear cross entropy, plain products, and its kernels alone with
each configuration), `lce` (the losses at other shapes), `adam`, `rest` (the other operators), `tune` (all
configurations, for lowering/tuned/), `profile` (Nsight Compute on the cross entropy's kernels). Each case has a process
of its own; a hang costs that case. Results are appended as they come, and what --out or --done holds is not measured
again. At the end they are written once more as `gpu_DEVICE.json`, for benchmarks/results/. `--rehearse` runs the same
on a CPU with small sizes.
"""

import argparse
import dataclasses
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.table import Table

import jaxops
import lowering
from lowering.campaign.process import converse
from lowering.campaign.report import Campaign
from lowering.tables import fitted
from lowering.targets import named
from pallas_kernels.gpu.linear_cross_entropy import exponentials, statistics

STAGES = ("probe", "smoke", "flagship", "lce", "adam", "rest", "tune", "profile")
STRATEGIES = ("full", "grad_in_forward", "recompute", "recompute+pallas")
LOSSES = (
    *(f"jaxops:{strategy}" for strategy in STRATEGIES),
    *("optax", "tokamax:xla", "tokamax:chunked_xla", "torch", "torch.compile", "liger", "cut"),
)
FLAGSHIP, REHEARSED_LOSS = (16384, 4096, 128256), (64, 32, 256)
OTHER_LOSSES = ((16384, 4096, 131072), (8192, 2304, 256000), (4096, 4096, 151936), (4096, 1024, 32768))
PRODUCTS = (1024, 2048, 4096, 8192, 16384)
CHUNK_ROWS = 4096
REHEARSED_TILE = (64, 32, 64)
REHEARSED_SIZES = {
    **{"block_rows": 64, "block_columns": 64, "stages": 2},
    **{"copying": 1, "cluster_blocks": 1, "row_group": 1},
}
OPTIMIZERS = ("optax", "jaxops", "jaxops+pallas", "torch")
OPERATORS = (
    ("softmax of rows", (16384, 4096, "bfloat16"), (8, 130, "float32")),
    ("softmax of rows", (8192, 32000, "float32"), None),
    ("softmax of channels", (32, 21, 512, 512, "float32"), None),
    ("batch norm", (32, 256, 28, 28, "float32"), (2, 5, 9, 16, "float32")),
    ("batch norm, relu", (32, 64, 56, 56, "bfloat16"), None),
    ("local response norm", (32, 64, 56, 56, "float32"), None),
    ("max pool", (32, 112, 112, 128, "bfloat16"), None),
    ("dropout", (16384, 4096, "bfloat16"), None),
    ("embedding gradient", (50257, 768, 8192, "float32"), None),
)
REHEARSED_SUITE = ("softmax of rows", "EMA-Adam")
# Autotuning would eat the time.
FLAGS = "--xla_gpu_enable_triton_gemm=false"
LIMIT_SECONDS = 60.0


@dataclasses.dataclass(frozen=True)
class Case:
    """A function of `gpu_cases.py` with its arguments."""

    stage: str
    name: str
    function: str
    arguments: dict[str, Any]


def cases(stage: str, *, rehearse: bool) -> list[Case]:
    """The cases of a stage, those first that matter most."""
    if stage == "probe":
        sizes = {"copied_mb": 4, "size": 64} if rehearse else {"copied_mb": 1000, "size": 8192}
        return [Case(stage, "rates", "probe", sizes)]
    if stage in ("flagship", "lce"):
        shapes = (REHEARSED_LOSS,) if rehearse else (FLAGSHIP,) if stage == "flagship" else OTHER_LOSSES
        names = LOSSES[2:5] + LOSSES[7:8] if rehearse else LOSSES
        return [
            Case(stage, f"{name} {shape}", "loss", {"candidate": name, **dict(zip(AXES, shape, strict=True))})
            for shape in shapes
            for name in names
            if not (rehearse and name.endswith("+pallas"))
        ] + (product_cases(rehearse) + kernel_cases(rehearse) if stage == "flagship" else [])
    if stage == "adam":
        sets = ((1, "float32"),) if rehearse else ((0, "float32"), (12, "float32"), (12, "bfloat16"))
        return [
            Case(stage, f"{name} {layers} {dtype}", "optimizer", {"candidate": name, "layers": layers, "dtype": dtype})
            for layers, dtype in sets
            for name in (OPTIMIZERS[:1] if rehearse else OPTIMIZERS)
        ]
    if stage == "profile":
        timed = {case.arguments["kernel"]: case for case in reversed(kernel_cases(rehearse))}  # the first of each
        return [dataclasses.replace(case, stage=stage, function="profiled") for case in timed.values()]
    return [
        Case(stage, f"{way} {name} {size}", "operator", {"candidate": way, "case": name, "size": list(size)})
        for name, full, small in OPERATORS
        for size in ([small] if rehearse else [full])
        if size is not None
        for way in ("reference", "pallas", "torch", "torch.compile")
        if not (rehearse and way == "pallas")
    ]


def product_cases(rehearse: bool) -> list[Case]:
    """Plain products of a chunk's rows with a vocabulary: what a kernel's rate is to be compared with."""
    rows, _, classes = REHEARSED_LOSS if rehearse else (CHUNK_ROWS, *FLAGSHIP[1:])
    return [
        Case("flagship", f"product {size}", "product", dict(zip(AXES, size, strict=True)))
        for size in ((rows, hidden, classes) for hidden in ((32,) if rehearse else PRODUCTS))
    ]


def kernel_cases(rehearse: bool) -> list[Case]:
    """Each kernel of the logits alone, with each of its configurations: tiles, row groups, store slots."""
    rows, hidden, classes = REHEARSED_TILE if rehearse else FLAGSHIP
    x, weight = (jax.ShapeDtypeStruct((size, hidden), "bfloat16") for size in (rows, classes))
    configs: dict[str, tuple[int, Any]] = {
        "exponentials": (CHUNK_ROWS, exponentials.configs(named("cuda-h100"), x, weight, CHUNK_ROWS)),
        "statistics": (rows, statistics.configs(named("cuda-h100"), x, weight)),
    }
    if rehearse:
        configs["exponentials"] = (rows, [{**REHEARSED_SIZES, "workers": 1, "store_slots": 2}])
        configs["statistics"] = (rows, [{**REHEARSED_SIZES, "vocab_splits": 1}])
    return [
        Case(
            "flagship",
            f"{name} {', '.join(f'{key} {value}' for key, value in config.items())}",
            "logits_kernel",
            {"kernel": name, "config": config, "rows": rows, "hidden": hidden, "classes": classes},
        )
        for name, (rows, each) in configs.items()
        for config in each
    ]


AXES = ("rows", "hidden", "classes")


class Results:
    """What was measured, as lines of a file; and what an earlier session has measured."""

    def __init__(self, out: Path, done: Path | None) -> None:
        self.path = out / "gpu.jsonl"
        self.records = [
            json.loads(line)
            for path in (done, self.path)
            if path is not None and path.exists()
            for line in path.read_text().splitlines()
        ]

    def has(self, case: Case) -> bool:
        return any((record["stage"], record["name"]) == (case.stage, case.name) for record in self.records)

    def add(self, case: Case, record: dict[str, Any]) -> None:
        labelled = {"stage": case.stage, "name": case.name, **record}
        self.records.append(labelled)
        with self.path.open("a") as stream:
            stream.write(f"{json.dumps(labelled)}\n")

    def save(self, folder: Path) -> None:
        """Writes everything as one JSON object, named after the device that was probed."""
        probed = next((record for record in self.records if "target" in record), None)
        if probed is not None:
            path = folder / f"gpu_{probed['target'].replace(' ', '-')}.json"
            path.write_text(json.dumps({"benchmark": "gpu", "cases": self.records}, indent=2) + "\n")

    def table(self) -> Table:
        table = Table(title=f"{len(self.records)} cases", title_justify="left")
        for name in ("stage", "case", "result"):
            table.add_column(name, overflow="fold")
        for record in self.records:
            facts = (f"{key} {value}" for key, value in record.items() if key not in ("stage", "name", "environment"))
            table.add_row(record["stage"], record["name"], ", ".join(facts))
        return table


def measure(stage: str, results: Results, deadline: float, rehearse: bool) -> None:
    """Runs the cases of a stage that nobody has run."""
    for case in cases(stage, rehearse=rehearse):
        if results.has(case) or time.monotonic() >= deadline:
            continue
        found: list[dict[str, Any]] = []
        request = {"function": case.function, "arguments": case.arguments}
        limits = {"limit_seconds": LIMIT_SECONDS, "deadline": deadline}
        ending = converse(request, {}, found.append, module="gpu_cases", **limits)
        if ending.how == "budget":
            return
        failed = {"error": f"{ending.how}: {ending.last_words or f'no answer in {LIMIT_SECONDS:g} seconds'}"}
        results.add(case, found[0] if found else failed)


def verify_or_tune(stage: str, out: Path, deadline: float, rehearse: bool) -> Campaign:
    """The library's own campaign: it verifies in `smoke`, and in `tune` measures all configurations."""
    campaign = jaxops.tune_device(
        stages=["verify"] if stage == "smoke" else ["time", "tune"],
        only=REHEARSED_SUITE if rehearse else (),
        budget_seconds=max(1.0, deadline - time.monotonic()),
        limit_seconds=LIMIT_SECONDS,
        folder=out / "found",
        rehearse=rehearse,
    )
    if stage == "tune":
        lowering.TuningResult(campaign.entries, campaign.stopped).save(out / f"{campaign.target}.json")
    return campaign


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stages", nargs="+", choices=STAGES, metavar="STAGE", help=", ".join(STAGES))
    parser.add_argument("--out", type=Path, required=True, help="a folder for the results")
    parser.add_argument("--deadline", type=float, default=550.0, help="seconds, after which nothing more begins")
    parser.add_argument("--done", type=Path, help="results of earlier sessions, whose cases are left out")
    parser.add_argument("--rehearse", action="store_true", help="small sizes on a CPU, to see that all stages run")
    return parser.parse_args()


def main() -> None:
    options = parse()
    deadline = time.monotonic() + options.deadline
    options.out.mkdir(parents=True, exist_ok=True)
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    if options.rehearse:
        os.environ["JAX_PLATFORMS"] = "cpu"
    else:
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {FLAGS}".strip()
    results = Results(options.out, options.done)
    console = Console(width=None if sys.stdout.isatty() else 160)
    for stage in options.stages:
        if stage in ("smoke", "tune"):
            campaign = verify_or_tune(stage, options.out, deadline, options.rehearse)
            console.print(fitted(campaign.table(), console))
            wrong = [row for row in campaign.rows if row.outcome in ("wrong", "hangs", "fails", "failed")]
            if stage == "smoke" and wrong:
                sys.exit(f"{len(wrong)} kernels went wrong: mend them, or time what is right without this stage")
        else:
            measure(stage, results, deadline, options.rehearse)
    results.save(options.out)
    console.print(fitted(results.table(), console))


if __name__ == "__main__":
    main()
