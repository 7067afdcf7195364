"""Times several ways to compute the same thing fairly, and shows a progress bar."""

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

clock = time.perf_counter


def times_ms(
    candidates: Mapping[str, Callable[..., Any]],
    *,
    repeats: int,
    warmups: int = 2,
    prepare: Callable[[str], Sequence[Any]] = lambda name: (),
    until: float = math.inf,
    at_least: int = 3,
    after_round: Callable[[], None] = lambda: None,
) -> dict[str, list[float]]:
    """Times each candidate `repeats` times, in turn, so that a slow minute of the machine slows all of them.

    Args:
      candidates: each returns results that the clock waits for, or nothing if it has waited itself.
      repeats: the number of rounds. Every candidate runs once per round.
      warmups: untimed runs of each candidate before the first round.
      prepare: makes the arguments of one run of a candidate before the clock starts.
      until: when `clock()` has passed this, no further round begins.
      at_least: the rounds to finish even then.
      after_round: called after each round.

    Returns:
      The times of each candidate in milliseconds, equally many for all.
    """

    def elapsed_ms(name: str) -> float:
        arguments = jax.block_until_ready(prepare(name))
        start = clock()
        jax.block_until_ready(candidates[name](*arguments))
        return 1e3 * (clock() - start)

    for name in candidates:
        for _ in range(warmups):
            elapsed_ms(name)
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for turn in range(repeats):
        if turn >= at_least and clock() >= until:
            break
        # Every other round goes backwards, so that no candidate always runs after the same neighbour.
        for name in list(candidates)[:: 1 if turn % 2 == 0 else -1]:
            times[name].append(elapsed_ms(name))
        after_round()
    return times


def summary(times: list[float]) -> dict[str, Any]:
    """Returns the median of the times, the quartiles and their number."""
    first, median, third = statistics.quantiles(times, n=4, method="inclusive")
    return {"median_ms": round(median, 3), "quartiles_ms": [round(first, 3), round(third, 3)], "repeats": len(times)}


def progress_bar(total: int, is_shown: bool | None = None) -> Progress:
    """Makes a bar on stderr with one task, number 0; None shows it only on a terminal."""
    console = Console(stderr=True, force_terminal=is_shown)
    columns = TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn()
    bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    bar.add_task("starting", total=total)
    return bar
