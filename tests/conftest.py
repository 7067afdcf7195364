"""One environment for every test: CPU, eight virtual devices, strict promotion, one seed."""

import collections
import csv
import gc
import importlib.metadata
import itertools
import os
import pathlib
from collections.abc import Iterator

import platformdirs

# XLA and JAX read these when they start, so they stand above the first import of jax.
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Compiling tiny programs takes most of the time, and 0.6 of that without LLVM's optimizations. XLA's own passes still
# run, so what tests read in compiled programs (fusions, collectives, memory) stays. CI sets 0 in one of its runs.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
if importlib.metadata.version("jaxlib").startswith("0.10."):
    # Programs are too small for LLVM to compile their parts side by side: 0.92 to 0.94 of the time.
    os.environ["XLA_FLAGS"] += " --xla_cpu_parallel_codegen_split_count=1"
    if os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] == "1":
        # The emitters of code for fusions that XLA had before, and has there still, take 0.6 to 0.7 of that.
        os.environ["XLA_FLAGS"] += " --xla_cpu_use_fusion_emitters=false"
# What was compiled once, by any process or any run before, is read from a file: half of the time of a second run.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(platformdirs.user_cache_path("jaxops") / "tests"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")

# Tables are as wide as it says, and xdist sets it for its processes.
os.environ.pop("COLUMNS", None)
# What a developer has tuned on this machine must not decide what tests run.
os.environ["JAXOPS_TUNED"] = os.path.join(os.path.dirname(__file__), "no-results")

import emulated_kernels
import hypothesis
import jax
import numpy as np
import pytest

_OPTIMIZED = pytest.StashKey[set[pytest.Item]]()
_COVERAGE = pytest.StashKey[emulated_kernels.Coverage]()
IS_OPTIMIZED = os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] == "0"
# Their tests compare with other implementations; promises compare a function with itself.
OPTIMIZED_ROOMS = ("operators", "loss")
SEED = 20260
SAMPLE = 16

if jax.__version__.startswith("0.10."):
    import faster_jax

    faster_jax.install()

# A module's garbage is collected at its end. With Python's own 700 objects, looking for it takes 4 to 10 % of the time.
gc.set_threshold(200_000, 50, 100)

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

hypothesis.settings.register_profile("jaxops", derandomize=True, deadline=None)
hypothesis.settings.load_profile("jaxops")

# The promises are asserted there, not in the test modules that call them.
pytest.register_assert_rewrite("contract", "splits")


def pytest_report_header() -> str:
    return f"jax {jax.__version__}, {jax.device_count()} devices ({jax.default_backend()}), seed {SEED}"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--times", type=pathlib.Path, metavar="FILE", help="write how long each test file took, as CSV")
    parser.addoption(
        "--emulate",
        metavar="CHIP",
        help="run the interpreter's tests of TPU kernels as compiled for a chip, or again: at-once, or by two-cores",
    )
    parser.addoption(
        "--coverage", type=pathlib.Path, metavar="FILE", help="with --emulate: how much of it was executed"
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.option.coverage and config.option.numprocesses:
        raise pytest.UsageError("--coverage counts in one process: leave -n out")
    if config.option.emulate:
        emulated_kernels.install(config.option.emulate)


@pytest.fixture(autouse=True)
def emulated(request: pytest.FixtureRequest) -> Iterator[bool]:
    """With `--emulate`, fails tests whose kernels do what no kernel may, and skips those without any.

    Gives whether that is so: a compiled kernel can be run with more data, so that all of its code is executed.
    """
    interprets = request.config.option.emulate in emulated_kernels.INTERPRETERS
    yield bool(request.config.option.emulate) and not interprets
    if request.config.option.emulate:
        kernels, findings = emulated_kernels.take()
        if request.config.option.coverage:
            request.config.stash.setdefault(_COVERAGE, emulated_kernels.Coverage()).add(kernels)
        assert findings == []
        assert kernels or not interprets
        if not kernels:
            pytest.skip("interprets no TPU kernel")


@pytest.fixture(autouse=True)
def optimized(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a run optimizes, does so for what tests of other targets compile, and for the first cases of some rooms."""
    if IS_OPTIMIZED:
        is_first = request.node in request.config.stash.get(_OPTIMIZED, ())
        is_optimized = is_first or request.path.parent.name == "compile_targets"
        jax.config.update("jax_disable_most_optimizations", not is_optimized)
        monkeypatch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", str(int(not is_optimized)))


@pytest.fixture(autouse=True, scope="module")
def collected() -> None:
    """Keeps the collector from looking again through what earlier modules left in JAX's caches: 5 % of the time."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish(session: pytest.Session) -> None:
    path, chip = session.config.option.coverage, session.config.option.emulate
    if path is not None and _COVERAGE in session.config.stash:
        session.config.stash[_COVERAGE].write(path, chip)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Writes the file of `--times`: seconds of work, which several processes share, the slowest file first."""
    target = terminalreporter.config.option.times
    if target is None:
        return
    seconds: collections.Counter[str] = collections.Counter()
    tests: dict[str, set[str]] = collections.defaultdict(set)
    for report in itertools.chain(*terminalreporter.stats.values()):
        if isinstance(report, pytest.TestReport):
            file = report.nodeid.split("::")[0]
            seconds[file] += report.duration
            tests[file].add(report.nodeid)
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.open("w", newline="") as stream:
        rows = csv.writer(stream)
        rows.writerow(["file", "tests", "seconds"])
        rows.writerows([file, len(tests[file]), round(total, 2)] for file, total in seconds.most_common())


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks as slow what `make test` leaves out, puts the rehearsals first, and finds which tests to optimize.

    That is all but one in sixteen cases of each `sampled` test, whose first case always runs, what is `long`, and the
    promises of all cases of an operator but its first.
    """
    if config.option.emulate in emulated_kernels.INTERPRETERS:
        left = [item for item in items if item.name not in emulated_kernels.OF_SEVERAL_BLOCKS]
        if len(items) - len(left) < len(emulated_kernels.OF_SEVERAL_BLOCKS):
            raise pytest.UsageError("tests of several blocks are missing: name all files with emulated kernels")
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if item not in left]
        config.option.markexpr = ""  # whatever `make test` leaves out
        return
    items.sort(key=lambda item: item.get_closest_marker("rehearsal") is None)  # minutes that others run beside
    cases: collections.Counter[tuple[object, str]] = collections.Counter()
    first: dict[str, object] = {}
    optimized = config.stash.setdefault(_OPTIMIZED, set())
    for item in items:
        if not isinstance(item, pytest.Function):
            continue
        test = item.path, item.originalname
        left_out = bool(item.get_closest_marker("sampled")) and cases[test] % SAMPLE > 0
        if "promise" in item.fixturenames and (case := item.callspec.params.get("case")):
            left_out = case.implementation != "auto" or first.setdefault(case.operator, case) is not case
        if not cases[test] and item.path.parent.name in OPTIMIZED_ROOMS and "promise" not in item.fixturenames:
            optimized.add(item)
        if left_out or (item.get_closest_marker("long") and not config.option.emulate):
            item.add_marker(pytest.mark.slow)
        cases[test] += 1
    if config.option.emulate:
        left = [item for item in items if not item.get_closest_marker("emulated") or "gpu" in item.name]
        left += [item for item in items if item.get_closest_marker("interpreted") and item not in left]
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if item not in left]


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(SEED)
