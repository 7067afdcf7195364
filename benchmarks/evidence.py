r"""Evidence on TPU kernels at a grid of sizes, by replays of their schedules, and by executing their compiled code.

python benchmarks/evidence.py --target tpu-v5e --fill 400 --seed 1
python benchmarks/evidence.py --target tpu-v5e --draw 100 --seed 2 --output benchmarks/results/evidence_draws_v5e.json

The first writes lowering/tuned/tpu-v5e.evidence.jsonl, a line for each case of a grid, and of two around each of those
sizes among 400 drawn ones that the cases before do not decide. What stands there already is kept, unless the kernel's
code has changed, so it can be interrupted. The second draws sizes that no file lists, replays them, and says what
"auto" takes there.

Nothing runs on a chip; it needs `jaxops targets --install tpu`.
"""

import ast
import functools
import hashlib
import itertools
import json
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import evidence_page
import harness
import jax
import numpy as np
from evidence_cases import FAMILIES, OPERATORS, Family, Sizes, drawn_ids, side_of, uses
from evidence_execution import arguments, executed, shrunk
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from tpu_schedules import chunks_of_gradients

import jaxops
from lowering import evidence
from lowering.compiling.compile import CompileError
from lowering.compiling.report import CompiledReport
from lowering.explain import OperatorUse
from lowering.measuring.problems import problems
from lowering.measuring.replaying import replay
from lowering.operators import kind_of, on_arrays, type_text, unpacked
from lowering.register import kernels_of, without_kernels
from lowering.targets import named
from pallas_kernels.hardware import Hardware
from pallas_kernels.kernel import Kernel, Kind

ROOT = Path(jaxops.__file__).parents[1]
# What data decides in kernels. After 12 binary digits a turn of dropout's draws more, with probability 0.24; XLA draws
# 24 digits in six steps. In the cross entropy's, all blocks of rows are live.
COUNTS = {"dropout": 0.24, "linear_cross_entropy": 1}
# How often sizes of a kind are drawn, before there are none.
ATTEMPTS = 40


class Answers:
    """What data decide in XLA's own programs, where it is asked for: all rows count, and ids are drawn evenly."""

    def __init__(self, operator: str, sizes: Sizes) -> None:
        self.operator, self.sizes = operator, sizes
        self.trip_counts: dict[str, float] = {"program": 6} if operator == "dropout" else {}
        self.scalars: dict[str, Mapping[int, Any]] = {}
        self.images: dict[int, Sizes] = {}
        if operator.startswith(("batch_norm", "local_response_norm")):
            n, side = sizes[0], side_of(sizes[1])
            self.images = {side * side: (side, side), n * side * side: (n, side, side)}
        self.left: list[float] = []
        if operator == "linear_cross_entropy":  # how many chunks of rows there are
            self.left = [-(-sizes[0] // max(512, sizes[0] // 8))]
        if operator == "linear_cross_entropy_sum_with_gradients":
            self.left = list(chunks_of_gradients(*sizes))

    def has_learnt(self, error: str) -> bool:
        """Takes up what a replay misses; False if that is unknown."""
        if self.operator == "embedding_dense_backward":
            ids = drawn_ids(self.sizes)
            order = np.argsort(ids, kind="stable").astype(np.int32)
            asked = re.search(r"scalars (?:must say )?what is in (.*) of ([\w.]+)", error)
            if asked is None or asked[2] in self.scalars:
                return False
            vectors = iter([ids[order], order])
            operands = re.findall(r"operand (\d+) \(([^)]*)\)", asked[1])
            self.scalars[asked[2]] = {
                int(at): next(vectors, ids) if kind == f"s32[{len(ids)}]" else np.zeros((), np.float32)
                for at, kind in operands
            }
            return True
        asked = re.search(r"\{'([^']+)': 1\}", error)
        if asked is None or not self.left:
            return False
        self.trip_counts[asked[1]] = self.left.pop(0)
        return True


def in_a_model(shape: Sizes, images: Mapping[int, Sizes]) -> Sizes:
    """Returns a shape without axes of size 1, with those axes of images apart that an operator merges."""
    return tuple(itertools.chain.from_iterable(images.get(size, (size,)) for size in shape if size > 1))


def replayed(
    run: Callable[..., Any], use: OperatorUse, hardware: Hardware, answers: Answers, **options: Any
) -> CompiledReport | str:
    """Returns the report of a program, or why there is none.

    Operands and results have the axes that they have in a model, by which XLA stores them: images have rows and
    columns, and no axis has size 1.
    """
    shapes = [x.shape for x in use.operands]
    types = [jax.ShapeDtypeStruct(in_a_model(x.shape, answers.images), x.dtype) for x in use.operands]

    def reshaped(*arrays: jax.Array) -> list[jax.Array]:
        results = run(*(x.reshape(shape) for x, shape in zip(arrays, shapes, strict=True)))
        return [x.reshape(in_a_model(x.shape, answers.images)) for x in results]

    while True:
        data = {"trip_counts": answers.trip_counts, "scalars": answers.scalars}
        try:
            return replay(reshaped, types, hardware, data, **options)
        except CompileError as error:
            if not answers.has_learnt(str(error)):
                return str(error).partition("\n")[0]


def without_kernel(use: OperatorUse, hardware: Hardware, sizes: Sizes) -> CompiledReport | str:
    """Returns the report of what runs without kernels, with XLA's own layouts or JAX's, or why there is none."""
    run = without_kernels(use.operator, hardware, use.operands, dict(use.params))
    found = [
        replayed(run, use, hardware, Answers(use.operator.name, sizes), auto_layouts=auto_layouts)
        for auto_layouts in (True, False)
    ]
    reports = [report for report in found if not isinstance(report, str)]
    return min(reports, key=time_of) if reports else found[0]


def time_of(report: CompiledReport) -> float:
    """Returns the time of a replay in microseconds."""
    assert report.schedule is not None
    return report.schedule.total_us


def case_of(use: OperatorUse, kernel: Kernel, family: Family, option: Any, sizes: Sizes, hardware: Hardware) -> Any:
    """Returns what is found of a kernel where a function uses its operator: a case, or why there is none."""
    structured, attributes = unpacked(use.operands, use.params)
    kind = kind_of(kernel, hardware, structured, attributes)
    if kind is None:
        return "the kernel refuses these operands"
    (config, *_) = kernel.configs(hardware, *structured, **attributes)
    run = on_arrays(functools.partial(kernel.run, config=config, interpret=False), use.params)
    reference = without_kernel(use, hardware, sizes)
    answers = Answers(use.operator.name, sizes)
    answers.trip_counts = {name: value for name, value in COUNTS.items() if name == use.operator.name}
    answers.scalars = dict(family.scalars(option, sizes) or {})
    # With JAX's own layouts, so that a kernel that stores arrays otherwise pays for the copies.
    in_place = tuple(kernel.overwrites(*structured, **attributes))
    own = replayed(run, use, hardware, answers, in_place=in_place, auto_layouts=False)
    if isinstance(own, str):
        return own
    if isinstance(reference, str):
        return f"without a reference: {reference}"
    if own.schedule is None or own.schedule.unknown:
        return f"not understood: {own.schedule and own.schedule.unknown}"
    return evidence.Case(
        use.operator.name,
        kernel.name,
        kind.text,
        kind.sizes,
        round(time_of(own) / time_of(reference), 3),
        round(time_of(reference), 1),
        (reference.memory.temporaries, own.memory.temporaries),
    )


def syntax(node: Any) -> Any:
    """Returns a tree of syntax as tuples, without empty fields, in which releases of Python differ."""
    if isinstance(node, list):
        return tuple(map(syntax, node))
    if not isinstance(node, ast.AST):
        return repr(node)
    fields = ((name, syntax(value)) for name, value in ast.iter_fields(node) if value not in (None, []))
    return (type(node).__name__, *fields)


def digest(kernel: Kernel) -> str:
    """Returns a digest of the code of a kernel and of the modules that it is made of.

    Without docstrings and imports, and without what only tells kinds of operands apart.
    """
    waiting, found = [kernel.run.__module__], {}
    elsewhere = "pallas_kernels.tpu" if kernel.platform == "cuda" else "pallas_kernels.gpu"
    left_out = "pallas_kernels.kernel", "pallas_kernels.hardware"
    while waiting:
        module = waiting.pop()
        file = ROOT / f"{module.replace('.', '/')}.py"
        if module in (*found, *left_out) or module.startswith(elsewhere) or not file.is_file():
            continue
        tree = ast.parse(file.read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("pallas_kernels"):
                waiting += [str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)]
            if isinstance(node, ast.Module | ast.FunctionDef | ast.ClassDef) and ast.get_docstring(node) is not None:
                node.body = node.body[1:]
            if isinstance(node, ast.Module | ast.FunctionDef):
                node.body = [each for each in node.body if not tells_kinds(each)]
            if isinstance(node, ast.Call):
                node.keywords = [each for each in node.keywords if each.arg != "kind"]
        if tree.body:
            found[module] = syntax(tree)
    return hashlib.sha256(repr(sorted(found.items())).encode()).hexdigest()[:12]


def tells_kinds(node: ast.stmt) -> bool:
    """Tells whether a statement only tells kinds of operands apart, or brings names from elsewhere."""
    return isinstance(node, ast.ImportFrom | ast.Import) or getattr(node, "name", "").startswith("kind")


def header(target: str) -> dict[str, Any]:
    """Returns the first line of a file: what its evidence depends on."""
    environment = harness.environment()
    versions = {name: environment["versions"][name] for name in ("jax", "jaxlib")}
    code = {
        f"{operator.name}/{kernel.name}": digest(kernel)
        for operator in jaxops.operators()
        for kernel in kernels_of(operator)
        if kernel.platform == named(target).platform and operator.name in OPERATORS
    }
    how = {"format": 1, "target": target, "how": "replayed", "versions": versions, "date": environment["date"]}
    return how | {"code": code}


def begin(target: str, path: Path) -> None:
    """Writes the file anew, with a header of today and those records that still hold: of these versions and kernels."""
    now, kept = header(target), []
    before, *records = map(json.loads, path.read_text().splitlines()) if path.is_file() else [now]
    if before["versions"] != now["versions"]:
        raise SystemExit(
            f"{path} is of {before['versions']}, and these are {now['versions']}: remove it to begin again"
        )
    for record in records:
        operator, kernel, *_ = record["executed"] if isinstance(record, dict) else record
        name = f"{operator}/{kernel}"
        if before["code"].get(name) == now["code"].get(name):
            kept.append(record)
    path.write_text("".join(f"{json.dumps(record)}\n" for record in (now, *kept)))


def append(path: Path, record: Any) -> None:
    """Adds a record to a file of evidence."""
    with path.open("a") as stream:
        stream.write(f"{json.dumps(record)}\n")


def work_of(only: list[str], fill: int, seed: int) -> Iterator[tuple[str, Family, Any, Sizes, bool]]:
    """Yields cases, with the name of the family, and whether they lie on its grid: first the grid, then drawn sizes."""
    families = {name: family for name, family in FAMILIES.items() if any(part in name for part in only)}
    for name, family in families.items():
        for option, sizes in family.cases():
            yield name, family, option, sizes, True
    draws = np.random.default_rng(seed)
    for name, family in itertools.islice(itertools.cycle(families.items()), fill):
        yield name, family, *family.drawn(draws, beyond=1.5), False


def around(family: Family, option: Any, sizes: Sizes, key: tuple[str, ...], hardware: Hardware) -> Iterator[Sizes]:
    """Yields sizes of the same kind as others of a case, about half as large and twice as large in every axis.

    All sizes between the two are then decided, if both say the same.
    """

    def sizes_of(sizes: Sizes) -> Sizes | None:
        found = kinds(family, option, sizes, hardware)
        return next((kind.sizes for x, y, kind in found if (x.operator.name, y.name, kind.text) == key), None)

    draws, middle = np.random.default_rng(0), sizes_of(sizes)
    for factor in (0.55, 1.8):
        for _ in range(ATTEMPTS):
            scaled = tuple(max(1, int(size * factor * draws.uniform(0.9, 1.1))) for size in sizes)
            found = sizes_of(scaled) if family.is_inside(option, scaled) else None
            if found and middle and all((a > b) == (factor > 1) for a, b in zip(found, middle, strict=True)):
                yield scaled
                break


def kinds(family: Family, option: Any, sizes: Sizes, hardware: Hardware) -> Iterator[tuple[OperatorUse, Kernel, Kind]]:
    """Yields where a case uses the family's operators, the kernels that take it, and what they say of it."""
    for use, kernel in uses(family, option, sizes, hardware):
        kind = kind_of(kernel, hardware, *unpacked(use.operands, use.params))
        if kind is not None:
            yield use, kernel, kind


def make_grid(target: str, path: Path, only: list[str], fill: int, seed: int) -> None:
    """Adds to a file of evidence what is missing on the grid, and around drawn sizes that it does not decide."""
    hardware, work = named(target), list(work_of(only, fill, seed))
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    known = dict(evidence.read(path).cases)
    with Progress(*columns) as bar:
        task = bar.add_task(target, total=len(work))

        def add(family: Family, option: Any, sizes: Sizes, key: tuple[str, str, str]) -> None:
            for use, kernel, kind in kinds(family, option, sizes, hardware):
                is_known = any(case.sizes == kind.sizes for case in known.get(key, ()))
                if (use.operator.name, kernel.name, kind.text) != key or is_known:
                    continue
                begin = time.perf_counter()
                found = case_of(use, kernel, family, option, sizes, hardware)
                if isinstance(found, str):
                    bar.console.print(f"{use.operator.name} {kind}: {found}")
                    continue
                append(path, found)
                known[key] = (*known.get(key, ()), found)
                seconds = time.perf_counter() - begin
                bar.console.print(f"{found.operator} {found.kind} {list(found.sizes)}: {found.time} ({seconds:.1f} s)")

        for name, family, option, sizes, is_of_grid in work:
            bar.update(task, description=f"{target} {name} {'x'.join(map(str, sizes))}")
            for use, kernel, kind in kinds(family, option, sizes, hardware):
                key = use.operator.name, kernel.name, kind.text
                near = () if is_of_grid else evidence.neighbours(known.get(key, ()), kind.sizes)
                wanted = [sizes] if is_of_grid or near else around(family, option, sizes, key, hardware)
                if len({case.is_better for case in near}) != 1:
                    for one in wanted:
                        add(family, option, one, key)
            bar.advance(task)


def execute(target: str, path: Path, only: list[str], fill: int, seed: int) -> None:
    """Executes a small case of each kind in a file of evidence, as it is compiled, and compares it with float64."""
    hardware, grid, tried = named(target), evidence.read(path), set()
    for _, family, option, sizes, _ in work_of(only, fill, seed):
        for use, kernel, kind in kinds(family, option, sizes, hardware):
            key = use.operator.name, kernel.name, kind.text
            if key not in grid.cases or key in grid.executed or key in tried:
                continue
            tried.add(key)
            if (found := shrunk(family, option, sizes, key, hardware)) is None:
                print(f"{', '.join(key)}: too large to be executed", flush=True)
                continue
            small, config = found
            fn, _ = family.call(option, small)
            for problem in problems(fn, arguments(family, option, small), hardware):
                if problem.operator.name == use.operator.name:
                    error = executed(problem, kernel, config, hardware)
                    print(f"{', '.join(key)} at {list(small)}: {error or 'right'}", flush=True)
                    if not error:
                        append(path, {"executed": [*key, list(small)]})
                    break


def draw(target: str, only: list[str], count: int, seed: int) -> list[dict[str, Any]]:
    """Replays kernels at sizes that are drawn, and says of each whether "auto" takes it."""
    hardware, draws, found = named(target), np.random.default_rng(seed), []
    names = [name for name in FAMILIES if any(part in name for part in only)]
    for number in range(count):
        family = FAMILIES[names[number % len(names)]]
        option, sizes = family.drawn(draws)
        for use, kernel in uses(family, option, sizes, hardware):
            case = case_of(use, kernel, family, option, sizes, hardware)
            name = f"{use.operator.name} {', '.join(map(type_text, use.operands))} on {target}"
            if isinstance(case, str):
                row: dict[str, Any] = {"refused": case}
            else:
                structured, attributes = unpacked(use.operands, use.params)
                decided = evidence.verdict(use.operator.name, kernel, hardware, structured, attributes)
                assert decided is not None  # as it has a kind
                said = {"taken": decided.is_taken, "reason": decided.reason}
                of_case = {"time": case.time, "reference_us": case.reference_us, "kind": case.kind, "sizes": case.sizes}
                row = of_case | said
            print(name, row, flush=True)
            found.append({"name": name, "seed": seed, "candidates": {kernel.name: row}})
    return found


def main() -> None:
    parser = harness.parser(__doc__.partition("\n")[0])
    parser.add_argument("--target", default="tpu-v5e")
    parser.add_argument("--only", nargs="*", default=[""], help="the families whose names hold one of these")
    parser.add_argument("--folder", type=Path, default=Path("lowering/tuned"))
    parser.add_argument("--fill", type=int, default=0, help="beside the grid, so many cases of sizes that are drawn")
    parser.add_argument("--draw", type=int, default=0, help="replay so many cases of sizes that are drawn")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--page", type=Path, help="where to write what ships as a page of documentation, and no more")
    options = parser.parse_args()
    if options.page is not None:
        options.page.write_text(evidence_page.page())
        return
    # What this process computes on does not matter, and a chip that is here is left alone.
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    if options.draw:
        cases = draw(options.target, options.only, options.draw, options.seed)
        harness.report("evidence_draws", cases, options.output)
        return
    path = options.folder / f"{options.target}.evidence.jsonl"
    begin(options.target, path)
    make_grid(options.target, path, options.only, options.fill, options.seed)
    execute(options.target, path, options.only, options.fill, options.seed)


if __name__ == "__main__":
    main()
