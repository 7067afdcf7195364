"""A quarter of an hour of a GPU in two calls: what is right, how fast it is, and peers beside it.

python benchmarks/gpu.py first  --out build/gpu-1
python benchmarks/gpu.py second --out build/gpu-2 --done build/gpu-1

Calls are lists of stages, which can be named instead. Of the first: `probe` (versions, clocks, rates), `verify` (every
kernel of the library's suite; linear cross entropy in chunks also without CUDA's command buffers), `headline` (its step
in three products and in four, and the kernels of the logits alone), `grid` (these kernels in all configurations, the
others at many sizes). Of the second: `agreement` (of the loss with kernels and XLA's), `chunks` (of rows), `peers`,
`forms` (the loss in XLA otherwise), `lce` (losses at many shapes), `steps` (of training, rewritten), `scoring`, `races`
(clusters, often, bit by bit), `optimizers`. Besides: `tune` (all configurations of a suite's case, for lowering/tuned/;
name the winners with --only), `profile` (Nsight Compute on the cross entropy's kernels).

Where processors are many, compiling takes few seconds: several processes verify, and others compile for the grid
meanwhile. What is timed has the device alone. A hang costs one case. Results are appended as they come. What was right
in an earlier call, whose folder --done names, is copied to --out and not done again. At the end all is written once
more as `gpu_DEVICE.json`, for benchmarks/results/. `--rehearse` runs the same on a CPU with small sizes.
"""

import argparse
import collections
import concurrent.futures
import dataclasses
import json
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from evidence import digest
from gpu_cases import kernel_configs
from gpu_grid import LOGITS, Grid
from rich.console import Console
from rich.table import Table

import jaxops
import lowering
from jaxops._cases import F32
from jaxops._suite import SUITE
from lowering.campaign.process import converse
from lowering.campaign.report import Campaign
from lowering.measurements import HANGS, WRONG
from lowering.measuring import timing
from lowering.register import kernels_of
from lowering.tables import fitted

CALLS = {
    "first": ("probe", "verify", "headline", "grid"),
    "second": ("agreement", "chunks", "peers", "forms", "lce", "steps", "scoring", "races", "optimizers"),
}
STAGES = (*sum(CALLS.values(), ()), "tune", "profile")
# In three products by XLA and with the exponentials' kernel, and in four with kernels.
HEADLINE = ("jaxops:grad_in_forward+xla_by_rows", "jaxops:grad_in_forward+pallas", "jaxops:recompute+pallas")
CHUNK_ROWS = ("@2048", "@8192", "@16384")
OTHER_FORMS = ("jaxops:grad_in_forward+xla_prior_shift", "jaxops:recompute+xla_by_columns")
BESIDE = ("torch.compile", "liger")
PEERS = ("liger", "tokamax:chunked_xla", "optax", "cut", "tokamax:xla", "torch.compile", "torch")
FLAGSHIP, REHEARSED_LOSS = LOGITS["statistics"], (64, 32, 256)
LOSSES = (
    *(FLAGSHIP, (8192, 4096, 128256), (8192, 2048, 50304), (4096, 1024, 32768), (8192, 768, 50257)),
    *((16384, 4096, 32000), (8192, 2304, 256000), (32768, 8192, 128256), (4096, 4096, 151936), (2048, 512, 8192)),
)
PRODUCTS = (1024, 2048, 4096, 8192, 16384)
REHEARSED_TILE = (64, 32, 64)
_TILES = {"block_rows": 64, "block_columns": 64, "stages": 2, "copying": 1, "cluster_blocks": 1, "row_group": 1}
REHEARSED_SIZES = {
    "exponentials": {**_TILES, "workers": 1, "store_slots": 2},
    "statistics": {**_TILES, "vocab_splits": 1},
}
OPTIMIZERS = ("optax", "jaxops", "jaxops+pallas", "torch")
# Of the library's suite, each beside PyTorch: a case, and its size.
OPERATORS: tuple[tuple[str, tuple[Any, ...]], ...] = (
    ("softmax of rows", (8192, 32000, "float32")),
    ("softmax of rows", (16384, 4096, "bfloat16")),
    ("softmax of channels", (32, 21, 512, 512, "float32")),
    ("max pool", (32, 112, 112, 128, "bfloat16")),
    ("dropout", (16384, 4096, "bfloat16")),
    ("local response norm", (32, 64, 56, 56, "float32")),
    ("batch norm", (32, 256, 28, 28, "float32")),
)
REHEARSED_OPERATORS = (("softmax of rows", (8, 130, "float32")), ("batch norm", (2, 5, 9, 16, "float32")))
RACES = 50
REHEARSED_SUITE = ("softmax of rows", "EMA-Adam")
RESULTS, GRID, VERDICTS = "gpu.jsonl", "grid.jsonl", "found"
# Autotuning would eat the time.
FLAGS = "--xla_gpu_enable_triton_gemm=false"
LIMIT_SECONDS = 25.0
CALL_SECONDS = 520.0  # of ten minutes; the rest is for starting, and for the machine
VERIFIED_SHARE = 0.3  # of the time of a call, so that something is timed in each
BAD = ("wrong", "hangs", "fails", "failed", "unfinished")


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
    if stage == "headline":
        kernels = [case for name in LOGITS for case in kernel_cases(stage, name, rehearse)[:1]]
        return [*loss_cases(stage, HEADLINE, (FLAGSHIP,), rehearse), *kernels]
    if stage == "forms":
        return loss_cases(stage, OTHER_FORMS, (FLAGSHIP,), rehearse)
    if stage == "chunks":
        sizes = ("@32",) if rehearse else CHUNK_ROWS
        return loss_cases(stage, [f"{HEADLINE[not rehearse]}{each}" for each in sizes], (FLAGSHIP,), rehearse)
    if stage == "agreement":
        shapes = (REHEARSED_LOSS,) if rehearse else (FLAGSHIP, (5000, 2304, 50257))
        way = "xla_by_rows" if rehearse else "pallas"
        return [Case(stage, f"{way} {x}", "agreement", {"candidate": way, **sizes_of(x)}) for x in shapes]
    if stage == "lce":
        return loss_cases(stage, (*HEADLINE, *BESIDE), LOSSES, rehearse)
    if stage == "steps":
        return step_cases(rehearse)
    if stage == "scoring":
        shape = REHEARSED_LOSS if rehearse else FLAGSHIP
        ways = ("xla_by_columns",) if rehearse else ("xla_by_columns", "pallas")
        return [Case(stage, f"{way} scoring", "scoring", {"candidate": way, **sizes_of(shape)}) for way in ways]
    if stage == "races":
        found = [case for name in LOGITS for case in kernel_cases(stage, name, rehearse)]
        repeats = {"repeats": 2 if rehearse else RACES}
        return [
            dataclasses.replace(case, function="repeated", arguments={**case.arguments, **repeats})
            for case in found
            if rehearse or case.arguments["config"]["cluster_blocks"] > 1
        ]
    if stage == "optimizers":
        return optimizer_cases(rehearse)
    if stage == "peers":
        peers = loss_cases(stage, PEERS, (FLAGSHIP,), rehearse)
        return peers + product_cases(rehearse) + operator_cases(rehearse)
    if stage == "profile":
        found = [kernel_cases(stage, name, rehearse)[0] for name in LOGITS]
        return [dataclasses.replace(case, function="profiled") for case in found]
    return []


def sizes_of(shape: tuple[int, ...]) -> dict[str, int]:
    """A shape of the loss as arguments."""
    return dict(zip(AXES, shape, strict=True))


def loss_cases(stage: str, names: Iterable[str], shapes: Iterable[tuple[int, ...]], rehearse: bool) -> list[Case]:
    """The loss with its gradients, by each of these ways."""
    return [
        Case(stage, f"{name} {shape}", "loss", {"candidate": name, **sizes_of(shape)})
        for shape in ((REHEARSED_LOSS,) if rehearse else shapes)
        for name in names
        if not (rehearse and "+pallas" in name)
    ]


def operator_cases(rehearse: bool) -> list[Case]:
    """Cases of the library's own suite as a whole, by XLA, by kernels and by PyTorch."""
    ways = ("reference", "torch") if rehearse else ("reference", "pallas", "torch", "torch.compile")
    return [
        Case("peers", f"{way} {name} {size}", "operator", {"candidate": way, "case": name, "size": list(size)})
        for name, size in (REHEARSED_OPERATORS if rehearse else OPERATORS)
        for way in ways
    ]


def step_cases(rehearse: bool) -> list[Case]:
    """A training step of a GPT as it is, and rewritten."""
    sizes = {"layers": 1, "width": 32, "length": 16} if rehearse else {"layers": 12, "width": 1024, "length": 1024}
    return [
        Case("steps", f"{way} {classes}", "step", {"candidate": way, "classes": classes, **sizes})
        for classes in ((256,) if rehearse else (50257, 128256))
        for way in ("plain", "rewritten loss", "rewritten step")
    ]


def optimizer_cases(rehearse: bool) -> list[Case]:
    """An optimizer's step on one array, and on those of a model."""
    return [
        Case("optimizers", f"{name} {layers} float32", "optimizer", {"candidate": name, "layers": layers, "dtype": F32})
        for layers in ((1,) if rehearse else (0, 12))
        for name in (OPTIMIZERS[:1] if rehearse else OPTIMIZERS)
    ]


def product_cases(rehearse: bool) -> list[Case]:
    """Plain products of a chunk's rows with a vocabulary: what a kernel's rate is to be compared with."""
    rows, _, classes = REHEARSED_LOSS if rehearse else LOGITS["exponentials"]
    shapes = [(rows, hidden, classes) for hidden in ((32,) if rehearse else PRODUCTS)]
    return [Case("peers", f"product {shape}", "product", sizes_of(shape)) for shape in shapes]


def kernel_cases(stage: str, kernel: str, rehearse: bool) -> list[Case]:
    """A kernel of the logits alone, with each of its configurations: tiles, row groups, store slots."""
    shape = REHEARSED_TILE if rehearse else LOGITS[kernel]
    configs = [REHEARSED_SIZES[kernel]] if rehearse else kernel_configs(kernel, *shape)
    return [
        Case(
            stage,
            f"{kernel} {', '.join(f'{key} {value}' for key, value in config.items())}",
            "logits_kernel",
            {"kernel": kernel, "config": config, **sizes_of(shape)},
        )
        for config in configs
    ]


AXES = ("rows", "hidden", "classes")


def carry(done: Path, out: Path) -> None:
    """Copies to a folder what an earlier call has left in another, but for errors, which were mended since."""
    for path in [done / RESULTS, done / GRID, *(done / VERDICTS).rglob("*.jsonl")]:
        target = out / path.relative_to(done)
        if path.exists() and not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            records = without_errors([json.loads(line) for line in path.read_text().splitlines()])
            target.write_text("".join(f"{json.dumps(record)}\n" for record in records))


def without_errors(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Results and verdicts, but for what was wrong, and the word that such a case needs nothing more."""

    def case_of(record: dict[str, Any]) -> Any:
        return [record.get(name) for name in ("stage", "flags", "case")]

    def is_wrong(record: dict[str, Any]) -> bool:
        candidates = (record.get("entry") or {}).get("candidates", ())
        has_fault = any(candidate["discarded"].startswith((WRONG, HANGS)) for candidate in candidates)
        return "error" in record or record.get("outcome") in BAD or has_fault

    wrong = [case_of(record) for record in records if is_wrong(record)]
    return [x for x in records if not is_wrong(x) and not (x.get("done") and case_of(x) in wrong)]


class Results:
    """What was measured, as lines of a file."""

    def __init__(self, out: Path) -> None:
        self.path = out / RESULTS
        lines = self.path.read_text().splitlines() if self.path.exists() else []
        self.records = [json.loads(line) for line in lines]

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
            path.write_text(json.dumps(self.whole(), indent=1) + "\n")

    def whole(self) -> dict[str, Any]:
        """Everything that was found: times, the grid, and of each kernel how many steps were right, and its code."""
        folder = self.path.parent
        grid, *verdicts = (
            [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
            for path in (folder / GRID, *(folder / VERDICTS).rglob("*.jsonl"))
        )
        found = [record for records in verdicts for record in records if "outcome" in record and "operator" in record]
        counts = collections.Counter(f"{x['operator']}/{x['kernel']}: {x['outcome']}" for x in found)
        kernels = ((x, kernel) for x in jaxops.operators() for kernel in kernels_of(x) if kernel.platform == "cuda")
        return {
            "benchmark": "gpu",
            "cases": self.records,
            "grid": grid,
            "verified": dict(sorted(counts.items())),
            "code": {f"{operator.name}/{kernel.name}": digest(kernel) for operator, kernel in kernels},
        }

    def table(self) -> Table:
        table = Table(title=f"{len(self.records)} cases", title_justify="left")
        for name in ("stage", "case", "result"):
            table.add_column(name, overflow="fold")
        for record in self.records:
            facts = (f"{key} {value}" for key, value in record.items() if key not in ("stage", "name", "environment"))
            table.add_row(record["stage"], record["name"], ", ".join(facts))
        return table


def measure(stage: str, results: Results, deadline: float, rehearse: bool) -> None:
    """Runs the cases of a stage that nobody has run, in turn; while one has the device, the next process starts."""
    lock = str(results.path.with_name("cases.lock"))

    def run(case: Case) -> None:
        if results.has(case) or timing.clock() >= deadline:
            return
        found: list[dict[str, Any]] = []
        request = {"function": case.function, "arguments": case.arguments, "lock": lock}
        limits = {"limit_seconds": LIMIT_SECONDS, "deadline": deadline}
        ending = converse(request, {}, found.append, module="gpu_cases", **limits)
        if ending.how == "budget":
            return
        failed = {"error": f"{ending.how}: {ending.last_words or f'no answer in {LIMIT_SECONDS:g} seconds'}"}
        results.add(case, found[0] if found else failed)

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        list(pool.map(run, cases(stage, rehearse=rehearse)))


def campaign(
    stages: list[str], only: Iterable[str], share: float, out: Path, deadline: float, rehearse: bool
) -> Campaign:
    """The library's own campaign, which verifies, times or tunes cases of its suite in a share of the time left."""
    return jaxops.tune_device(
        stages=stages,
        only=tuple(only),
        budget_seconds=max(1.0, share * (deadline - timing.clock())),
        limit_seconds=LIMIT_SECONDS,
        folder=out / VERDICTS,
        rehearse=rehearse,
        progress=False,
    )


def verify(only: Iterable[str], out: Path, deadline: float, rehearse: bool) -> list[Campaign]:
    """Verifies cases of the suite, as many at once as there are processors."""
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        rest = (VERIFIED_SHARE, out, deadline, rehearse)
        return list(pool.map(lambda name: campaign(["verify"], [name], *rest), only))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = (*CALLS, *STAGES)
    parser.add_argument("stages", nargs="+", choices=names, metavar="CALL or STAGE", help=", ".join(names))
    parser.add_argument("--out", type=Path, required=True, help="a folder for the results")
    parser.add_argument("--deadline", type=float, default=CALL_SECONDS, help="seconds, after which nothing more begins")
    parser.add_argument("--done", type=Path, help="the folder of an earlier call, whose results are taken over")
    parser.add_argument("--only", action="append", default=[], metavar="CASE", help="of the suite, for verify and tune")
    parser.add_argument("--grid-workers", type=int, default=8, metavar="COUNT", help="processes that compile its cases")
    parser.add_argument("--rehearse", action="store_true", help="small sizes on a CPU, to see that all stages run")
    return parser.parse_args()


def main() -> None:
    options = parse()
    deadline = timing.clock() + options.deadline
    options.out.mkdir(parents=True, exist_ok=True)
    if options.done is not None:
        carry(options.done, options.out)
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    if options.rehearse:
        os.environ["JAX_PLATFORMS"] = "cpu"
    else:
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {FLAGS}".strip()
    results = Results(options.out)
    console = Console(width=None if sys.stdout.isatty() else 160)
    stages = [stage for name in options.stages for stage in CALLS.get(name, (name,))]
    rest = (options.out, deadline, options.rehearse)
    names = options.only or (REHEARSED_SUITE if options.rehearse else [case.name for case in SUITE])
    grid = Grid(options.grid_workers, options.out, options.rehearse) if "grid" in stages else None
    try:
        for stage in stages:
            begin = timing.clock()
            if stage == "verify":
                for verified in verify(names, *rest):
                    console.print(fitted(verified.table(), console))
            elif stage == "grid" and grid is not None:
                console.print(f"{grid.finish(deadline)} records of the grid")
            elif stage == "tune":
                tuned = campaign(["time", "tune"], names, 1.0, *rest)
                console.print(fitted(tuned.table(), console))
                lowering.TuningResult(tuned.entries, tuned.stopped).save(options.out / f"{tuned.target}.json")
            measure(stage, results, deadline, options.rehearse)
            console.print(f"{stage}: {timing.clock() - begin:.0f} s")
    finally:
        if grid is not None:
            grid.kill()
    results.save(options.out)
    console.print(fitted(results.table(), console))


if __name__ == "__main__":
    main()
