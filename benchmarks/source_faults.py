"""Plants single faults into copies of this library's sources, and counts how many of them its tests see.

python benchmarks/source_faults.py --output benchmarks/results/source_faults.json

A fault turns a comparison, exchanges a sum and a difference or the branches of a `where`, moves an axis, or leaves
out a conversion or a wait. It is seen if a test fails that `make test` or CI runs, within five minutes, of those whose
names have to do with the file. It takes two hours on two cores; with a file of results, a run goes on
with what that says was missed, and draws new faults for those whose lines are gone.
"""

import ast
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import harness
import pytest

ROOT = Path(__file__).parents[1]
SEED, SECONDS = 20261127, 300
GROUPS = {
    "operators": (40, ("jaxops/*/*.py", "jaxops/*/rewriting/*.py", "jaxops/*.py", "lowering/rewriting/*.py")),
    "kernels": (35, ("pallas_kernels/**/*.py",)),
    "machine": (25, tuple(f"lowering/{part}/*.py" for part in ("tpu_core", "schedule", "emulation"))),
}
LEFT_OUT = re.compile(r"/(_demo|_frameworks|testing)/|nnx|linen|equinox|suite|_cases|tune_device|__main__|_jax_private")
TURNED = {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==", "is": "is not", "is not": "is"}
# Where a file's tests are, by a word of its path, and by the first that fits.
TESTS = {
    r"rewrit": ("rewriting/test_rewrite*", ""),
    r"kernels/.*linear_cross_entropy": ("kernels/test_linear_cross_entropy*", "compile_targets/*linear_cross_entropy*"),
    r"linear_cross_entropy": ("loss/*", ""),
    r"schedule/": ("machine/test_schedule*", "compile_targets/test_*schedule*"),
    r"emulation/": ("machine/test_[ew]*", "compile_targets/test_[ew]*"),
    r"tpu_core/": ("machine/test_[esw]*", "compile_targets/test_[esw]*"),
    r"divisive_norm": ("*/test_*divisive_norm*", "compile_targets/*divisive_norm*"),
    r"local_response_norm|whole_images": ("*/test_*local_response_norm*", "compile_targets/*local_response_norm*"),
    r"batch_norm|mcdnn/norm": ("*/test_*norm*", "compile_targets/test_compile_*u*.py"),
    r"pool": ("*/test_*pool*", "compile_targets/*pool*"),
    r"grid_sample|affine_grid|spatial": ("*/test_*grid*", "compile_targets/*grid*"),
    r"embedding": ("*/test_*embedding*", "compile_targets/*embedding*"),
    r"ema_adam": ("*/test_*ema_adam*", "compile_targets/test_compile_*u*.py"),
    r"dropout": ("*/test_*dropout*", "compile_targets/test_compile_*u*.py"),
    r"softmax": ("*/test_*softmax*", "compile_targets/*softmax*"),
    r"nll_loss": ("*/test_*nll*", ""),
    r"activation": ("*/test_*activation*", ""),
    r"pallas_kernels": ("kernels/*", "compile_targets/test_compile_*u*.py"),
    r"": ("operators/*", ""),
}
# Tests of all operators.
SHARED = [f"operators/test_{name}.py" for name in ("changing_numbers", "half_precision", "bad_values")]
# What the tests are run with, one after the other: each sees those faults that the ones before have missed.
RUNS = {
    "make test": "not slow and not tpu_compile and not cuda_compile",
    "CI": "slow and not rehearsal and not tpu_compile and not cuda_compile",
    "compiled": "not slow",
    "emulated": "not slow",
}


class Fault(NamedTuple):
    """A change of one line."""

    file: str
    line: int
    kind: str
    before: str
    after: str


def faults_of(file: str, source: str) -> Iterator[Fault]:
    """Yields all faults of a file, each within one line."""
    lines = source.splitlines()

    def fault(kind: str, node: Any, start: int, end: int, text: str) -> Fault:
        line = lines[node.lineno - 1].encode()
        after = line[:start] + text.encode() + line[end:]
        return Fault(file, node.lineno, kind, line.decode().strip(), after.decode().strip())

    def text(node: Any) -> str:
        return ast.get_source_segment(source, node) or ""

    for node in ast.walk(ast.parse(source)):
        if not hasattr(node, "lineno") or node.lineno != node.end_lineno:
            continue
        match node:
            case ast.Compare(left=a, comparators=[b]) | ast.BinOp(left=a, op=ast.Add() | ast.Sub(), right=b):
                between = lines[node.lineno - 1].encode()[a.end_col_offset : b.col_offset].decode()
                token = between.strip(" ()")
                swapped = TURNED.get(token) if isinstance(node, ast.Compare) else {"+": "-", "-": "+"}.get(token)
                # A sum of texts or lists has no difference.
                is_number = not any(text(x).lstrip("fr")[:1] in "'\"[(" for x in (a, b))
                if swapped and (isinstance(node, ast.Compare) or is_number):
                    kind = (
                        "a comparison turned" if isinstance(node, ast.Compare) else "a sum and a difference exchanged"
                    )
                    at = between.replace(token, swapped, 1)
                    yield fault(kind, node, a.end_col_offset, b.col_offset, at)
            case ast.Call(func=ast.Attribute(attr="where"), args=[condition, yes, no]):
                swapped = f"{text(condition)}, {text(no)}, {text(yes)}"
                yield fault("a selection the other way", node, condition.col_offset, no.end_col_offset, swapped)
            case ast.Call(func=ast.Attribute(attr="astype", value=value)):
                yield fault("a conversion left out", node, node.col_offset, node.end_col_offset, text(value))
            case ast.Expr(value=ast.Call(func=ast.Attribute(attr=name))) if "wait" in name:
                yield fault("a wait left out", node, node.col_offset, node.end_col_offset, "pass")
            case ast.keyword(
                arg="axis" | "dimension", value=ast.Constant() | ast.UnaryOp(operand=ast.Constant()) as value
            ):
                number = ast.literal_eval(value)
                if isinstance(number, int):
                    moved = str(number + 1 if number >= 0 else number - 1)
                    yield fault("an axis moved by one", node, value.col_offset, value.end_col_offset, moved)


def drawn(counts: dict[str, int]) -> Iterator[tuple[str, Fault]]:
    """Yields faults of each group, of all kinds alike as far as there are any."""
    draw = random.Random(SEED)
    for group, (_, patterns) in GROUPS.items():
        by_kind: dict[str, list[Fault]] = {}
        for path in sorted(path for pattern in patterns for path in ROOT.glob(pattern)):
            file = str(path.relative_to(ROOT))
            for fault in () if LEFT_OUT.search(file) else faults_of(file, path.read_text()):
                by_kind.setdefault(fault.kind, []).append(fault)
        for faults in by_kind.values():
            draw.shuffle(faults)
        left = counts[group]
        while left:
            for kind in [kind for kind, faults in by_kind.items() if faults][:left]:
                left -= 1
                yield group, by_kind[kind].pop()


def found_again(row: dict[str, Any]) -> dict[str, Any] | None:
    """Returns a fault of earlier results at the line where it is now; None if that line is gone."""
    path, at = ROOT / row["file"], row["line"]
    lines = path.read_text().splitlines() if path.is_file() else []
    places = [number for number, line in enumerate(lines, 1) if line.strip() == row["before"]]
    return {**row, "line": min(places, key=lambda number: abs(number - at))} if places else None


def continued(before: list[dict[str, Any]], rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the faults of earlier results, and as many of `rows` as are missing in their groups."""
    kept = [row for row in map(found_again, before) if row is not None]
    known = {(row["file"], row["line"], row["kind"]) for row in kept}
    missing = Counter(row["group"] for row in rows) - Counter(row["group"] for row in kept)
    for row in rows:
        if missing[row["group"]] > 0 and (row["file"], row["line"], row["kind"]) not in known:
            missing[row["group"]] -= 1
            kept.append(row)
    return kept


def planted(folder: Path, fault: Fault) -> None:
    """Writes a fault into the copy of the sources."""
    path = folder / fault.file
    lines = (ROOT / fault.file).read_text().splitlines(keepends=True)
    at = fault.line - 1
    lines[at] = lines[at].replace(fault.before, fault.after)
    path.write_text("".join(lines))


def failing(folder: Path, fault: Fault, run: str) -> str | None:
    """Returns the first test that fails in a run of the tests that have to do with a fault; None if none does."""
    tests, compiled = next(found for word, found in TESTS.items() if re.search(word, fault.file))
    found = sorted((folder / "tests").glob(compiled if run == "compiled" else tests))
    files = [
        str(path.relative_to(folder)) for path in found if ("compile_targets" in path.parts) == (run == "compiled")
    ]
    if fault.file.startswith("jaxops/") and run != "compiled":
        files += [f"tests/{name}" for name in SHARED]
    if run == "emulated":
        is_executed = fault.file.startswith(("lowering/tpu_core/", "lowering/emulation/", "pallas_kernels/tpu/"))
        kernels = (folder / "tests/kernels").glob("test_*.py") if is_executed else ()
        files = ["--emulate=tpu-v5e", *(str(path) for path in kernels if "mark.emulated" in path.read_text())]
    if not files[run == "emulated" :]:
        return None
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-n2", "-p", "no:cacheprovider", "-m", RUNS[run], *files]
    environment, limit = {**os.environ, "PYTHONPATH": str(folder)}, {"cwd": folder, "timeout": SECONDS}
    try:
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, **limit)
    except subprocess.TimeoutExpired:  # of slow tests, those that began have passed
        return f"no end after {SECONDS} s" if run == "make test" else None
    if ended.returncode in (0, pytest.ExitCode.NO_TESTS_COLLECTED):
        return None
    first = re.search(r"^(?:FAILED|ERROR) (\S+)", ended.stdout, re.MULTILINE)
    if first is None:  # no test has failed: pytest itself was ended, or could not begin
        raise SystemExit(f"{' '.join(command)} ended with {ended.returncode}:\n{ended.stdout}{ended.stderr}")
    return first[1]


def main() -> None:
    parser = harness.parser(__doc__.partition("\n")[0])
    options = parser.parse_args()
    counts = {group: 1 if options.quick else count for group, (count, _) in GROUPS.items()}
    folder = Path(tempfile.mkdtemp())
    for file in subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True).split():
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / file, folder / file)
    rows = [{"group": group, **fault._asdict(), "seen by": "", "test": ""} for group, fault in drawn(counts)]
    if options.output is not None and options.output.is_file():
        before = json.loads(options.output.read_text())["faults"]
        rows = continued(before, rows)
    for run in RUNS:
        for row in [row for row in rows if not row["test"]]:
            start, fault = time.monotonic(), Fault(*(row[name] for name in Fault._fields))
            planted(folder, fault)
            if test := failing(folder, fault, run):
                row |= {"seen by": run, "test": test}
            shutil.copy(ROOT / fault.file, folder / fault.file)
            outcome = f"{time.monotonic() - start:4.0f} s {run:9} {'seen' if test else 'missed'}"
            print(outcome, f"{fault.file}:{fault.line} {fault.kind}: {fault.after}", flush=True)
            if options.output is not None:
                seen = sum(bool(row["test"]) for row in rows)
                record = harness.report("source_faults", [], None)
                record |= {"planted": len(rows), "seen": seen, "faults": rows}
                options.output.write_text(json.dumps(record, indent=2) + "\n")
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
