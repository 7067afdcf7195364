"""Shows that long work is in progress."""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn


@contextmanager
def shown(description: str) -> Iterator[None]:
    """Shows a description and the elapsed time on a terminal, and nothing elsewhere."""
    console = Console(stderr=True)
    columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        progress.add_task(description, total=None)
        yield


@contextmanager
def said_if_long(description: str, seconds: float = 5.0) -> Iterator[None]:
    """Prints a line on stderr if the work takes longer than this; not on a terminal, where `shown` shows it."""
    timer = threading.Timer(seconds, lambda: print(description, file=sys.stderr, flush=True))
    if not Console(stderr=True).is_terminal:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()
