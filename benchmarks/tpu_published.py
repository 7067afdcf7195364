r"""How far replayed schedules are from times that others have measured on TPUs and published.

python benchmarks/tpu_published.py --tokamax CHECKOUT --output benchmarks/results/tpu_published.json \
    --page docs/schedule.md

Each second case of a source is for fitting the two numbers that `lowering.schedule.chips` has of each chip; the others
tell how accurate replays then are. `--fit` prints which numbers suit the first half best. Nothing runs on a chip. It
needs `jaxops targets --install tpu`, a checkout of Tokamax with its history and what that imports, and pip: what XLA
makes of Tokamax's cases is compiled by the libtpu of the day on which their times were committed.
"""

import concurrent.futures
import functools
import itertools
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import venv
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import harness
import jax
import jax.numpy as jnp
import numpy as np
import tpu_published_tokamax as tokamax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

import lowering
from lowering.compiling import compilers
from lowering.compiling.process import more_libtpu_flags
from lowering.schedule.chips import CHIPS

Product = tuple[int, tuple[int, int, int] | None]  # the size of square matrices, and blocks (m, k, n); None for XLA's

# Milliseconds of bfloat16 products, less what the host needs to start one, which each source shows with an empty or a
# tiny program.
_IN_JAX_DOCS_MS: dict[Product, float] = {  # jax: docs/pallas/tpu/matmul.ipynb; 0.105 ms
    (4096, None): 0.722,
    (8192, None): 5.942,
    (4096, (512, 1024, 1024)): 0.784,
    (8192, (512, 1024, 1024)): 5.994,
    (4096, (128, 128, 128)): 11.667,
}
_IN_PALLAS_FORGE_MS: dict[Product, float] = {  # linhkid/pallas-forge, notebook 05; 0.222 ms
    (2048, (64, 128, 128)): 2.665 - 0.222,
    (2048, (64, 256, 256)): 1.092 - 0.222,
    (2048, (128, 128, 128)): 1.603 - 0.222,
    (2048, (128, 256, 256)): 0.693 - 0.222,
    (2048, (128, 512, 512)): 0.457 - 0.222,
    (2048, (256, 128, 128)): 0.974 - 0.222,
    (2048, (256, 256, 512)): 0.416 - 0.222,
    (2048, (256, 512, 512)): 0.380 - 0.222,
}
MEASURED_MS = _IN_JAX_DOCS_MS | _IN_PALLAS_FORGE_MS

# AI-Hypercomputer/tpu-recipes, c8cfe2f: microbenchmarks/README.md, ironwood/README.md and ironwood/hbm/hbm.md. Of what
# ends within tens of microseconds, the start is a part.
_IN_RECIPES_TFLOPS = {
    ("tpu-v7x", 4096): 892.945,
    ("tpu-v7x", 16384): 950.129,
}
_IN_RECIPES_GB_PER_S = {
    ("tpu-v6e", 33554432): 1359.596,
    ("tpu-v7x", 134217728): 3176.503,
    ("tpu-v7x", 268435456): 3167.144,
    ("tpu-v7x", 536870912): 3199.021,
    ("tpu-v7x", 1073741824): 3198.414,
}

# The days on which PyPI got releases of libtpu that were the newest when times of Tokamax's were committed. Earlier
# ones than the first stop when they are to write schedules.
LIBTPU = {
    "2026-02-21": "0.0.36",
    "2026-03-05": "0.0.37",
    "2026-04-14": "0.0.40",
    "2026-07-15": "0.0.44",
    "2026-08-14": "0.0.46",
}

SAME_MEMORY = 0.03  # programs that differ by less are taken for the same

# Bandwidths of HBM for a cycle of the core at which each program is replayed, as parts of the nominal one, to fit both.
RATIOS = (1.2, 1.0, 0.8)


def matmul_kernel(x_ref: Any, y_ref: Any, z_ref: Any, acc_ref: Any, *, steps: int) -> None:
    @pl.when(pl.program_id(2) == 0)
    def _() -> None:
        acc_ref[...] = jnp.zeros_like(acc_ref)

    acc_ref[...] += jnp.dot(x_ref[...], y_ref[...], preferred_element_type=jnp.float32)

    @pl.when(pl.program_id(2) == steps - 1)
    def _() -> None:
        z_ref[...] = acc_ref[...].astype(z_ref.dtype)


def matmul(x: jax.Array, y: jax.Array, *, blocks: tuple[int, int, int] | None) -> jax.Array:
    """The kernel that both sources have measured, or XLA's product."""
    if blocks is None:
        return x @ y
    size, (bm, bk, bn) = x.shape[0], blocks
    return pl.pallas_call(
        functools.partial(matmul_kernel, steps=size // bk),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=0,
            in_specs=[pl.BlockSpec((bm, bk), lambda i, j, k: (i, k)), pl.BlockSpec((bk, bn), lambda i, j, k: (k, j))],
            out_specs=pl.BlockSpec((bm, bn), lambda i, j, k: (i, j)),
            scratch_shapes=[pltpu.VMEM((bm, bn), jnp.float32)],
            grid=(size // bm, size // bn, size // bk),
        ),
        out_shape=jax.ShapeDtypeStruct((size, size), x.dtype),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
        name="matmul",
    )(x, y)


def product_name(size: int, blocks: tuple[int, int, int] | None) -> str:
    return f"{size}^3, {'XLA' if blocks is None else ', '.join(map(str, blocks))}"


def case(name: str, target: str, source: str, measured_ms: float, fn: Callable[..., Any], *args: Any) -> dict[str, Any]:
    """A program whose time somebody has published."""
    return {"name": name, "target": target, "source": source, "measured_us": 1e3 * measured_ms, "fn": fn, "args": args}


def products_on_v5e() -> Iterator[dict[str, Any]]:
    """The products for which this page has a table of its own."""
    for (size, blocks), measured_ms in MEASURED_MS.items():
        source = "JAX's documentation" if (size, blocks) in _IN_JAX_DOCS_MS else "pallas-forge"
        x, fn = jax.ShapeDtypeStruct((size, size), jnp.bfloat16), functools.partial(matmul, blocks=blocks)
        yield case(product_name(size, blocks), "tpu-v5e", source, measured_ms, fn, x, x)


def in_recipes() -> Iterator[dict[str, Any]]:
    """Products and copies in AI-Hypercomputer/tpu-recipes, `microbenchmarks`."""
    for (target, size), tflops in _IN_RECIPES_TFLOPS.items():
        x, fn = jax.ShapeDtypeStruct((size, size), jnp.bfloat16), functools.partial(matmul, blocks=None)
        yield case(product_name(size, None), target, "tpu-recipes", 2e-9 * size**3 / tflops, fn, x, x)
    for (target, size_bytes), gb_per_s in _IN_RECIPES_GB_PER_S.items():
        x = jax.ShapeDtypeStruct((size_bytes // 2,), jnp.bfloat16)
        yield case(f"copy of {size_bytes >> 20} MiB", target, "tpu-recipes", 2e-6 * size_bytes / gb_per_s, jnp.copy, x)


def compiled(published: Mapping[str, Any]) -> Any:
    """The report on a program: of what different flags make of it, on that whose memory is what was published."""
    reports, refusals = [], []
    for flags in published.get("flags", ("",)):
        with more_libtpu_flags(flags):
            try:
                reports.append(compiled_as_set(published))
            except lowering.CompileError as error:
                refusals.append(error)
    if not reports:
        raise refusals[0]
    if len(reports) == 1:
        return reports[0]
    return min(reports, key=lambda report: tokamax.memory_difference(published["peak_mb"], report.memory))


def compiled_as_set(published: Mapping[str, Any]) -> Any:
    """The report on a program. What kernels of grouped products read from scalar memory is found out by asking."""
    scalars: dict[str, Any] = {}
    options = {"target": published["target"], "schedule": True}
    while True:
        try:
            return lowering.compile(published["fn"], *published["args"], **options, scalars=scalars)
        except lowering.CompileError as error:
            lengths = {
                int(position): int(size) for position, size in re.findall(r"operand (\d+) \(s32\[(\d+)", str(error))
            }
            kernel = re.search(r" of ([\w.-]+?)(?:;|$)", str(error))
            is_unlike = len(lengths) != 1 and 2 not in lengths  # another part of the program that reads the groups
            if published.get("groups") is None or kernel is None or kernel[1] in scalars or is_unlike:
                raise
            scalars[kernel[1]] = tokamax.group_scalars(published, kernel[1], lengths)


def replayed(published: Mapping[str, Any]) -> dict[str, Any]:
    """What is recorded of a program; the error is a part of the measured time."""
    shown = {name: published[name] for name in ("name", "target", "source")}
    print(*shown.values(), flush=True)
    try:
        report = compiled(published)
    except lowering.CompileError as error:
        return {**shown, "candidates": {"replay": {"refused": str(error)[:200]}}}
    schedule = report.schedule
    found = {
        "measured_us": round(published["measured_us"], 1),
        "replayed_us": round(schedule.total_us, 1),
        "error": round(schedule.total_us / published["measured_us"] - 1, 4),
        "us_by_bandwidth": [round(schedule.us_at(1.0, ratio), 2) for ratio in RATIOS],
    }
    if published.get("peak_mb") and tokamax.memory_difference(published["peak_mb"], report.memory) > SAME_MEMORY:
        found["another_program"] = f"{report.memory.peak / 1e6:.1f} MB, not {published['peak_mb']:.1f} MB"
    return {**shown, "candidates": {"replay": found | ({"unknown": len(schedule.unknown)} if schedule.unknown else {})}}


def errors(cases: Iterable[Mapping[str, Any]]) -> list[float]:
    """The errors of cases, with their signs."""
    return [each["candidates"]["replay"]["error"] for each in cases]


def halves(cases: list[dict[str, Any]], target: str) -> tuple[list[dict[str, Any]], ...]:
    """The cases of one chip: for the fit, to check it, and those that are not understood entirely."""
    replays = [each for each in cases if each["target"] == target and "error" in each["candidates"]["replay"]]
    same = [each for each in replays if "another_program" not in each["candidates"]["replay"]]
    understood = [each for each in same if "unknown" not in each["candidates"]["replay"]]
    return understood[::2], understood[1::2], [each for each in same if each not in understood]


def fitted(cases: list[dict[str, Any]]) -> list[tuple[float, float, float]]:
    """The best numbers for a chip: the mean error, and the parts of the clock and of HBM's bandwidth."""
    found = []
    for clock, hbm in itertools.product(np.arange(0.80, 1.005, 0.01), np.arange(0.80, 1.005, 0.01)):
        times = [
            np.interp(clock / hbm, [1 / ratio for ratio in RATIOS], each["candidates"]["replay"]["us_by_bandwidth"])
            / clock
            for each in cases
        ]
        measured = [each["candidates"]["replay"]["measured_us"] for each in cases]
        wrong = [abs(us / true - 1) for us, true in zip(times, measured, strict=True)]
        found.append((statistics.mean(wrong), round(float(clock), 2), round(float(hbm), 2)))
    return sorted(found)[:5]


def table_of_chips(cases: list[dict[str, Any]]) -> str:
    """The errors on all chips as a table of documentation."""
    lines = ["| target | clock | HBM | fitted | mean | others | mean | median | worst | not understood | median |"]
    lines.append(f"| --- |{' ---: |' * 10}")
    for target, chip in CHIPS.items():
        first, second, others = ([*map(abs, errors(half))] for half in halves(cases, target))
        cells = [target, f"{chip.clock_efficiency:.2f}", f"{chip.hbm_efficiency:.2f}"]
        cells += [f"{len(first)}", _percent(statistics.mean, first)]
        cells += [f"{len(second)}", *(_percent(of, second) for of in (statistics.mean, statistics.median, max))]
        cells += [f"{len(others)}", _percent(statistics.median, others)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _percent(of: Callable[[list[float]], float], found: list[float]) -> str:
    return f"{100 * of(found):.1f} %" if found else "-"


def table_of_products(runs: list[dict[str, Any]]) -> str:
    """The products on a v5e, with all versions, as a table of documentation."""
    versions = [run["environment"]["versions"] for run in runs]
    titles = [cell for each in versions for cell in (f"JAX {each['jax']}, libtpu {each['libtpu']}", "")]
    rows = [["product, blocks (m, k, n)", "measured, us", *titles], ["---", *["---:"] * (1 + len(titles))]]
    for cases in zip(*(run["cases"][: len(MEASURED_MS)] for run in runs), strict=True):
        found = [each["candidates"]["replay"] for each in cases]
        cells = [cell for one in found for cell in (f"{one['replayed_us']:,.0f}", f"{100 * one['error']:+.1f} %")]
        rows.append([cases[0]["name"], f"{found[0]['measured_us']:,.0f}", *cells])
    return "".join(f"|{'|'.join(f' {cell} ' if cell else ' ' for cell in cells)}|\n" for cells in rows)


def with_tables(page: str, runs: list[dict[str, Any]]) -> str:
    """A page of documentation with the tables of these runs in the place of earlier ones."""
    for first, table in (
        ("product, blocks", table_of_products(runs)),
        ("target \\| clock", table_of_chips(runs[-1]["cases"])),
    ):
        page = re.sub(rf"^\| {first} .*\n(?:\|.*\n)*", lambda _, table=table: table, page, flags=re.MULTILINE)
    return page


def compiler_of(published: Mapping[str, Any]) -> str:
    """The libtpu that was the newest when a time was committed, or the first that can be asked.

    "" stands for JAX's own: of the Pallas kernels that this JAX makes, earlier ones read nothing.
    """
    if published["name"].startswith("Pallas"):
        return ""
    return [version for first, version in LIBTPU.items() if first <= max(published["day"], min(LIBTPU))][-1]


def replayed_with(version: str, checkout: Path, draws: int) -> list[dict[str, Any]]:
    """What is recorded of Tokamax's cases of one libtpu, by a process that compiles with it."""
    with tempfile.TemporaryDirectory() as folder:
        cache, output = Path(folder) / "cache", Path(folder) / "cases.json"
        variables = {**os.environ, "XDG_CACHE_HOME": str(cache)}
        where = [sys.executable, "-c", "from lowering.compiling import compilers; print(compilers.environment('tpu'))"]
        environment = Path(
            subprocess.run(where, env=variables, capture_output=True, text=True, check=True).stdout.strip()
        )
        venv.create(environment)
        (packages,) = environment.glob("lib/*/site-packages")
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(packages)]
        subprocess.run([*pip, f"libtpu=={version}"], check=True)
        again = [sys.executable, __file__, "--tokamax", str(checkout), "--draws", str(draws), "--output", str(output)]
        subprocess.run([*again, "--libtpu", version], env=variables, check=True)
        return json.loads(output.read_text())


def of_tokamax(checkout: Path, draws: int) -> list[dict[str, Any]]:
    """What is recorded of Tokamax's cases, each compiled by its own libtpu, in the order of the draws."""
    drawn = list(tokamax.drawn(checkout, draws))
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        found = pool.map(lambda version: replayed_with(version, checkout, draws), LIBTPU.values())
        cases = [*(replayed(each) for each in drawn if not compiler_of(each)), *itertools.chain.from_iterable(found)]
    by_name = {(each["name"], each["target"]): each for each in cases}
    return [by_name[each["name"], each["target"]] for each in drawn]


def libtpu_version() -> str:
    """The compiler's, which may be in an environment of its own."""
    program = "import importlib.metadata; print(importlib.metadata.version('libtpu'))"
    found = [compilers.interpreter("tpu") or "", "-c", program]
    return subprocess.run(found, capture_output=True, text=True, check=True).stdout.strip()


def main() -> None:
    parser = harness.parser(__doc__.partition("\n")[0])
    parser.add_argument("--page", type=Path, help="a page of documentation whose tables of these errors are replaced")
    parser.add_argument("--tokamax", type=Path, help="a checkout of Tokamax, whose published times are compared too")
    parser.add_argument("--draws", type=int, default=8, help="how many of these, of each operator and chip")
    parser.add_argument("--libtpu", help="replay those of Tokamax's cases alone that this version compiles")
    parser.add_argument("--fit", action="store_true", help="print what suits the first half in the results best")
    options = parser.parse_args()
    # What this process computes on does not matter, and a chip that is here is left alone.
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    if options.libtpu:
        drawn = tokamax.drawn(options.tokamax, options.draws)
        cases = [replayed(each) for each in drawn if compiler_of(each) == options.libtpu]
        options.output.write_text(json.dumps([each | {"libtpu": options.libtpu} for each in cases]))
        return
    held = json.loads(options.output.read_text())["runs"] if options.output and options.output.is_file() else []
    if options.fit:
        for target in CHIPS:
            print(target, *fitted(halves(held[-1]["cases"], target)[0]), sep="\n  ")
        return
    published = itertools.chain(products_on_v5e(), in_recipes())
    cases = [replayed(each) for each in itertools.islice(published, 1 if options.quick else None)]
    if options.tokamax:
        cases += of_tokamax(options.tokamax, options.draws)
    run = {"environment": harness.environment(), "cases": cases}
    run["environment"]["versions"]["libtpu"] = libtpu_version()
    if options.tokamax:
        run["environment"]["versions"]["tokamax"] = tokamax.commit(options.tokamax)
    others = [other for other in held if other["environment"]["versions"]["jax"] != jax.__version__]
    runs = sorted([*others, run], key=lambda run: run["environment"]["versions"]["jax"])
    if options.output is not None:
        options.output.write_text(json.dumps({"benchmark": "tpu_published", "runs": runs}, indent=1) + "\n")
    if options.page is not None:
        options.page.write_text(with_tables(options.page.read_text(), runs))


if __name__ == "__main__":
    main()
