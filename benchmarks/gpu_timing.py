"""How `gpu_cases.py` times: one process at a time has the device, and tells its parent when something runs."""

import contextlib
import fcntl
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import jax

from lowering.measuring.device_clock import Reading, by_host, device_clock
from lowering.targets import here

ROUNDS = 3
# Launches in a row take about so long together.
SERIES_MS, MOST_LAUNCHES = 400.0, 50


class Answers:
    """Messages to `gpu.py`, once there is a stream to write them to."""

    stream: IO[str] | None = None

    def tell(self, message: dict[str, Any]) -> None:
        if self.stream is not None:
            print(json.dumps(message), file=self.stream, flush=True)


ANSWERS = Answers()


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Waits until no other process has the device, and says which one has it."""
    with path.open("a+") as stream:
        while not _has_locked(stream):
            ANSWERS.tell({"runs": False})
            time.sleep(0.2)
        stream.truncate(0)
        stream.write(str(os.getpid()))
        stream.flush()
        yield


def _has_locked(stream: IO[str]) -> bool:
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def measured(runs: list[Callable[[], Any]], *, torch: Any = None, rounds: int = ROUNDS) -> dict[str, Any]:
    """The median time of runs, which do the same with operands of their own so that no cache holds them.

    By the host's clock where the device's contradicts it, and then with what was wrong. Beside it, the time of each of
    many launches in a row, as in training: they begin before any profiler does, which slows what comes after it.
    """

    def wait(results: Any) -> None:
        if torch is None:
            jax.block_until_ready(results)
        elif torch.cuda.is_available():
            torch.cuda.synchronize()

    def run_all() -> None:
        wait([run() for run in runs])

    run_all()  # compiles, autotunes, and raises the clocks
    ANSWERS.tell({"runs": True})
    launches = int(min(max(2, SERIES_MS / by_host(run_all).ms), MOST_LAUNCHES))

    def run_in_a_row() -> None:
        for _ in range(launches):
            results = [run() for run in runs]
        wait(results)

    series = statistics.median(by_host(run_in_a_row).ms for _ in range(rounds)) / launches / len(runs)
    clock = device_clock(here().platform)
    readings: list[Reading] = []
    while len(readings) < 1 + rounds:
        ANSWERS.tell({"runs": True})
        readings.append(clock(run_all))
    ANSWERS.tell({"runs": False})
    fault = next((reading.fault for reading in readings if reading.fault), "")
    own, wall = (round(statistics.median(times) / len(runs), 4) for times in zip(*readings[1:], strict=True))
    in_a_row = {"series_ms": round(series, 4)}
    if clock is by_host or fault:
        return {"median_ms": wall, "clock": "host", **in_a_row, **({"fault": fault} if fault else {})}
    return {"median_ms": own, "clock": "device", "wall_ms": wall, **in_a_row}
