"""Times several ways to compute the same thing fairly, and shows a progress bar."""

import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import jax
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

Taken = TypeVar("Taken")

# What cuts long work short.
OUT_OF_TIME, INTERRUPTED = "stopped at the time budget", "interrupted"

clock = time.perf_counter


def why_stopped(work: Callable[[], bool]) -> str:
    """Does work that tells whether time was enough; returns what cut it short, or ""."""
    try:
        return "" if work() else OUT_OF_TIME
    except KeyboardInterrupt:
        return INTERRUPTED


def elapsed_ms(launch: Callable[[], Any]) -> float:
    """Returns how long a launch takes, until its results are there."""
    start = clock()
    jax.block_until_ready(launch())
    return 1e3 * (clock() - start)


def rounds(
    names: Iterable[str],
    take: Callable[[str], Taken],
    *,
    repeats: int,
    warmups: int,
    until: float = math.inf,
    at_least: int = 3,
    after_round: Callable[[], None] = lambda: None,
) -> dict[str, list[Taken]]:
    """Takes a time of each name `repeats` times, in turn, so that a slow minute of the machine slows all of them.

    Args:
      names: every one is taken once per round.
      take: runs what has a name, and returns its time.
      repeats: the number of rounds.
      warmups: runs of each before the first round, whose times do not count.
      until: when `clock()` has passed this, no further round begins.
      at_least: the rounds to finish even then.
      after_round: called after each round.

    Returns:
      The times of each, equally many for all.
    """
    taken: dict[str, list[Taken]] = {name: [] for name in names}
    for name in taken:
        for _ in range(warmups):
            take(name)
    for turn in range(repeats):
        if turn >= at_least and clock() >= until:
            break
        # Every other round goes backwards, so that nothing always runs after the same neighbour.
        for name in list(taken)[:: 1 if turn % 2 == 0 else -1]:
            taken[name].append(take(name))
        after_round()
    return taken


def times_ms(
    candidates: Mapping[str, Callable[..., Any]],
    *,
    repeats: int,
    warmups: int = 2,
    prepare: Callable[[str], Sequence[Any]] = lambda name: (),
    until: float = math.inf,
    after_round: Callable[[], None] = lambda: None,
) -> dict[str, list[float]]:
    """Times candidates in turn by the host's clock, in milliseconds, with the other arguments of `rounds`.

    The clock waits for the results of a candidate, not for its arguments, which `prepare` makes from its name.
    """

    def take(name: str) -> float:
        arguments = jax.block_until_ready(prepare(name))
        return elapsed_ms(lambda: candidates[name](*arguments))

    return rounds(candidates, take, repeats=repeats, warmups=warmups, until=until, after_round=after_round)


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
