"""The grid of `gpu.py`: each operator beside its kernel at many sizes, compiled by several processes, timed by turns.

Compiling takes no GPU. Processes compile their share of the cases at once, and then wait for a lock before they run
anything, so that nothing disturbs what is timed.
"""

import fcntl
import functools
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import evidence_cases
import gpu_cases
import jax
import jax.numpy as jnp
from evidence_cases import BF16, F32, Family, Sizes, drawn_ids, images, uses
from gpu_timing import locked
from tpu_schedules import shape, with_gradient

import jaxops
import lowering
from lowering.compiling.compilers import with_this_path
from lowering.explain import OperatorUse
from lowering.measurements import REFERENCE, Measurement, config_items
from lowering.measuring import timing
from lowering.measuring.agreement import failure
from lowering.measuring.candidates import Candidate, Machine
from lowering.measuring.device_clock import candidate_readings
from lowering.measuring.inputs import made_up
from lowering.measuring.problems import Problem
from lowering.targets import here
from pallas_kernels.kernel import Kernel

REPEATS, CONFIGS = 12, 8
ROW_GROUPS = (16, 8, 4, 2)
SILENCE_SECONDS = 40.0  # after which the process that has the lock is ended


def softmax_of_channels(option: Any, sizes: Sizes) -> Any:
    dtype, algorithm = option
    x = images("NCHW", *sizes, dtype)
    return with_gradient(functools.partial(jaxops.softmax, axis=1, algorithm=algorithm)), (x, x)


def dropout(option: Any, sizes: Sizes) -> Any:
    dtype, rate = option
    x = shape(*sizes, dtype=dtype)

    def run(x: jax.Array, grad: jax.Array, key: jax.Array) -> Any:
        y, vjp = jax.vjp(lambda x: jaxops.dropout(key, x, rate), x)
        return y, vjp(grad)

    return run, (x, x, shape(2, dtype=jnp.uint32))


# Kernels that compute logits in registers, with rows, hidden size and classes; exponentials are of a chunk's rows.
LOGITS = {"exponentials": (4096, 4096, 128256), "statistics": (16384, 4096, 128256)}
NOTHING: Any = ((), (0, 2**40), ())  # of a family: no grid, any size, and nothing that is listed
FAMILIES = {
    **evidence_cases.FAMILIES,
    "softmax of channels": Family(("softmax", "softmax_backward"), (), softmax_of_channels, *NOTHING),
    "dropout": Family(("dropout", "dropout_backward"), (), dropout, *NOTHING),
}
# All configurations of a kernel are timed at the first sizes of each option, and the first configuration at all.
_ROWS = ((16384, 4096), (4096, 32000), (65536, 1024), (2048, 128256), (4096, 50257), (131072, 256))
_MORE_ROWS = ((65536, 512), (32768, 2048), (8192, 8192), (8192, 12288), (4096, 16384), (2048, 65536))
_LAYERS = ((64, 56 * 56, 64), (64, 28 * 28, 256), (64, 14 * 14, 1024), (256, 28 * 28, 128), (64, 56 * 56, 256))
_HEADS = ((8192, 4096, 131072), (4096, 1024, 32768), (8192, 2304, 256000), (1024, 768, 50257))
_MORE_HEADS = ((1024, 512, 8192), (8192, 2048, 50304), (32768, 1024, 32000), (1024, 4096, 128256), (16384, 8192, 32000))
GRID: tuple[tuple[str, tuple[Any, ...], tuple[Sizes, ...]], ...] = (
    ("softmax", ((F32, "accurate"), (BF16, "accurate")), (*_ROWS, *_MORE_ROWS)),
    ("softmax", ((BF16, "log"), (F32, "log")), ((16384, 4096), (4096, 50257), (65536, 1024), (8192, 8192))),
    (
        "softmax of channels",
        ((F32, "log"), (BF16, "log"), (F32, "accurate")),
        ((16, 512 * 512, 21), (32, 56 * 56, 64), (64, 28 * 28, 256), (8, 512 * 512, 19), (8, 256 * 256, 150)),
    ),
    ("cross_entropy", ((BF16, "plain"),), (*_HEADS, *_MORE_HEADS)),
    ("cross_entropy", tuple((BF16, each) for each in ("entropy", "temperature", "softcap")), _HEADS),
    (
        "max_pool",
        tuple((dtype, "NHWC", 2) for dtype in (BF16, F32)),
        ((32, 112 * 112, 128), (64, 56 * 56, 256), (32, 28 * 28, 256), (128, 56 * 56, 128)),
    ),
    (
        "dropout",
        ((BF16, 0.1), (F32, 0.1), (BF16, 0.5)),
        ((16384, 4096), (8192, 14336), (2048, 4096), (1024, 1024), (65536, 1024), (65536, 4096)),
    ),
    (
        "embedding",
        (F32, BF16),
        (
            *((8192, 1024, 32000), (16384, 4096, 32000), (8192, 768, 50257), (2048, 512, 8192)),
            *((32768, 1024, 32000), (8192, 4096, 128256), (65536, 768, 50257), (2048, 2048, 32000)),
        ),
    ),
    ("ema_adam", (F32, BF16), ((65536, 1024), (4096, 14336), (1024, 1024))),
    ("batch_norm", ((BF16, "NHWC"), (F32, "NHWC"), (F32, "NCHW"), (BF16, "NCHW")), _LAYERS),
    (
        "local_response_norm",
        ((F32, "NCHW"), (BF16, "NCHW")),
        ((64, 55 * 55, 96), (128, 27 * 27, 256), (32, 112 * 112, 64), (256, 14 * 14, 192)),
    ),
)
REHEARSED = (("softmax", ((F32, "accurate"),), ((16, 130),)), ("ema_adam", (F32,), ((8, 130),)))


def cases(rehearse: bool) -> Iterator[tuple[str, Any, Sizes, int]]:
    """Yields families, options and sizes, and how many configurations are timed there: first what matters most."""
    for name, options, grid in REHEARSED if rehearse else GRID:
        for option in options:
            for position, sizes in enumerate(grid):
                yield name, option, sizes, 1 if position else CONFIGS


def compiled(use: OperatorUse, kernel: Kernel, config_count: int) -> Any:
    """Compiles an operator's reference and its kernel's configurations, or says why there is nothing to time."""
    machine, types = Machine(here()), [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in use.operands]
    problem = Problem.of(use.operator, here(), types, use.params)
    offered = list(machine.candidates_of(kernel, problem, lambda configs: configs[:config_count]))
    if offered and isinstance(offered[0], Measurement):
        return f"refused: {offered[0].discarded}"

    def program(candidate: Any) -> Any:
        try:
            return candidate.compiled(types)
        except Exception as error:  # whatever a compiler raises
            return failure(error)

    return [program(candidate) for candidate in (machine.reference(problem), *offered)]


def logits_kernel(kernel: str, shape: Sizes, block_rows: int) -> tuple[list[Any], Any]:
    """Compiles a kernel of the logits with tiles of so many rows, and says how to draw its operands."""
    leaves, structure = jax.tree.flatten(jax.eval_shape(lambda: gpu_cases.kernel_operands(kernel, *shape)))
    found: list[Any] = []
    offered = [x for x in gpu_cases.kernel_configs(kernel, *shape) if x["block_rows"] == block_rows]
    ways = {config_items(x): x for x in offered}
    for first, row_group in itertools.product(offered, ROW_GROUPS):
        config = {**first, "row_group": row_group}
        if first["stages"] == 4 and config.get("store_slots") in (None, 2):
            ways.setdefault(config_items(config), config)
    for config in ways.values():
        run = gpu_cases.kernel_function(kernel, config)

        def results(*arrays: jax.Array, run: Any = run) -> tuple[Any, ...]:
            return tuple(jax.tree.leaves(run(*jax.tree.unflatten(structure, arrays))))

        try:
            found.append(Candidate(kernel, config_items(config), jax.jit(results).lower(*leaves).compile()))
        except Exception as error:  # whatever a compiler raises
            found.append(failure(error))
    return found, lambda: jax.tree.leaves(gpu_cases.kernel_operands(kernel, *shape))


def whole(family: Family, option: Any, sizes: Sizes) -> tuple[list[Any], Any]:
    """Compiles a function by XLA and by kernels, where arrays lie for kernels as in a model only within a model."""
    fn, types = family.call(option, sizes)
    found: list[Any] = []
    for name in (REFERENCE, "pallas"):
        with lowering.use(name):
            try:
                found.append(Candidate(name, (), jax.jit(fn).lower(*types).compile()))
            except Exception as error:  # whatever a compiler raises
                found.append(failure(error))
    return found, jax.jit(lambda: made_up(types, [])).lower().compile()


def operands(use: OperatorUse, sizes: Sizes) -> Any:
    """Compiles a program that draws an operator's operands."""
    types, numbers = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in use.operands], list(use.params.values())
    draw = jax.jit(lambda: made_up(types, numbers)).lower().compile()
    if use.operator.name != "embedding_dense_backward":
        return draw
    ids = drawn_ids(sizes)
    return lambda: [jnp.asarray(ids) if x.shape == ids.shape and x.dtype == ids.dtype else x for x in draw()]


def timed(found: Sequence[Any], draw: Any) -> list[dict[str, Any]]:
    """Times programs in turn, and gives the reasons of those that did not compile."""
    programs = {str(position): x for position, x in enumerate(found) if isinstance(x, Candidate)}
    options: Any = {"until": timing.clock() + 20, "at_least": 3, "after_round": lambda: None}
    readings = candidate_readings(programs, draw(), here(), repeats=REPEATS, **options)
    rows: list[dict[str, Any]] = []
    for position, x in enumerate(found):
        if not isinstance(x, Candidate):
            rows.append({"failed": x})
            continue
        own, wall = (sorted(times) for times in zip(*readings[str(position)], strict=True))
        memory = x.run.memory_analysis()  # type: ignore[attr-defined]
        rows.append(
            {
                "implementation": x.implementation,
                "config": dict(x.config),
                "median_us": round(1e3 * own[len(own) // 2], 2),
                "least_us": round(1e3 * own[0], 2),
                "wall_us": round(1e3 * wall[len(wall) // 2], 2),
                "temporaries": 0 if memory is None else memory.temp_size_in_bytes,
            }
        )
    return rows


def worker(index: int, count: int, out: Path, rehearse: bool) -> None:
    """Compiles every `count`-th case, and times them when the device is free."""
    path, ready = out / "grid.jsonl", []
    known = {label_of(json.loads(line)) for line in path.read_text().splitlines()} if path.exists() else set()

    def add(named: dict[str, Any], prepared: Callable[[], Any]) -> None:
        if label_of(named) not in known:
            ready.append((named, *prepared()))

    logits = [] if rehearse else itertools.product(LOGITS.items(), (128, 64))
    for (kernel_name, rows_and_sizes), block_rows in list(logits)[index::count]:
        named = {"family": "logits", "sizes": list(rows_and_sizes), "kernel": kernel_name, "block_rows": block_rows}
        add(named, functools.partial(logits_kernel, kernel_name, rows_and_sizes, block_rows))
    for name, option, sizes, config_count in list(cases(rehearse))[index::count]:
        family = FAMILIES[name]
        label = {"family": name, "option": [getattr(x, "__name__", x) for x in _items(option)], "sizes": list(sizes)}
        if family.call is softmax_of_channels:
            add(label, functools.partial(whole, family, option, sizes))
            continue
        for use, kernel in uses(family, option, sizes, here()):
            named = {**label, "operator": use.operator.name, "kernel": kernel.name}
            add(named, functools.partial(prepared_use, use, kernel, config_count, sizes))
    ready_file(out, index).touch()
    for named, found, draw in ready:
        if draw is None:
            record = {"refused": found}
        else:
            with locked(out / "grid.lock"):
                try:
                    record = {"rows": timed(found, draw)}
                except Exception as error:  # a case that fails costs no other
                    record = {"error": failure(error)}
        with path.open("a") as stream:
            stream.write(f"{json.dumps({**named, **record})}\n")


def ready_file(out: Path, index: int) -> Path:
    """Returns what is there once a process has compiled its share."""
    return out / f"grid-{index}.ready"


def label_of(record: Mapping[str, Any]) -> str:
    """Names what a record is of."""
    return json.dumps([record.get(name) for name in ("family", "option", "sizes", "operator", "kernel", "block_rows")])


def prepared_use(use: OperatorUse, kernel: Kernel, config_count: int, sizes: Sizes) -> tuple[Any, Any]:
    """Compiles what is timed of a use of an operator, and what draws its operands, if there is anything."""
    found = compiled(use, kernel, config_count)
    return found, None if isinstance(found, str) else operands(use, sizes)


def _items(option: Any) -> tuple[Any, ...]:
    return option if isinstance(option, tuple) else (option,)


class Grid:
    """Processes that compile now, and time once they are told to."""

    def __init__(self, count: int, out: Path, rehearse: bool) -> None:
        self._out = out
        for index in range(count):
            ready_file(out, index).unlink(missing_ok=True)
        self._lock = (out / "grid.lock").open("a+")
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        log = (out / "grid.log").open("w")
        command, paths = [sys.executable, "-m", "gpu_grid"], with_this_path(os.environ)
        self._workers = [
            subprocess.Popen(
                [*command, *map(str, (index, count, out, int(rehearse)))], env=paths, stderr=log, stdout=log
            )
            for index in range(count)
        ]

    def finish(self, deadline: float) -> int:
        """Lets the processes time what they have compiled, until the deadline; returns how many records there are.

        They begin when all have compiled their share, or half of the time is over.
        """
        latest = (timing.clock() + deadline) / 2
        while timing.clock() < latest and not all(map(self._is_ready, range(len(self._workers)))):
            time.sleep(0.2)
        fcntl.flock(self._lock, fcntl.LOCK_UN)
        path, lock = self._out / "grid.jsonl", self._out / "grid.lock"
        path.touch()
        while any(worker.poll() is None for worker in self._workers) and timing.clock() < deadline:
            time.sleep(0.2)
            holder = lock.read_text()
            if holder and time.time() - max(path.stat().st_mtime, lock.stat().st_mtime) > SILENCE_SECONDS:
                for hanging in self._workers:
                    if hanging.poll() is None and str(hanging.pid) == holder:
                        hanging.kill()
                os.utime(lock)
        self.kill()
        return len(path.read_text().splitlines())

    def _is_ready(self, index: int) -> bool:
        return ready_file(self._out, index).exists() or self._workers[index].poll() is not None

    def kill(self) -> None:
        """Ends all processes."""
        for worker in self._workers:
            worker.kill()
            worker.wait()


if __name__ == "__main__":
    worker(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), bool(int(sys.argv[4])))
