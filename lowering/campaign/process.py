"""Runs one request in a process of its own, and ends the process when it says nothing for too long."""

import contextlib
import dataclasses
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from typing import Any

from lowering.compiling.compilers import with_this_path
from lowering.describe import shortened
from lowering.measuring import timing

# Compiling a kernel, autotuning what is around it, or computing the truth may take as many times the limit of a run.
PATIENCE = 5


@dataclasses.dataclass(frozen=True)
class Ending:
    """Ending of a process.

    Attributes:
      how: "done"; "again" if it asks for another process; "hangs"; "died"; or "budget".
      case: the one that it was doing.
      begun: what it had last begun and told nothing of.
      ran: whether that was compiled already, and was running.
      last_words: the last line that it wrote on stderr, if it died.
    """

    how: str
    case: str = ""
    begun: Mapping[str, Any] | None = None
    ran: bool = False
    last_words: str = ""


def converse(
    request: Mapping[str, Any],
    environment: Mapping[str, str],
    on_record: Callable[[dict[str, Any]], None],
    *,
    limit_seconds: float,
    deadline: float,
    module: str = "lowering.campaign.child",
) -> Ending:
    """Sends a request to a new process and hears it out.

    Args:
      request: a JSON object.
      environment: variables that differ from this process's.
      on_record: called with each record as it is told.
      limit_seconds: how long the process may say nothing while something runs; five times as long otherwise.
      deadline: when to end it in any case, by `timing.clock`.
      module: what the process runs.
    """
    with tempfile.TemporaryFile("w+", errors="replace") as complaints:
        process = subprocess.Popen(
            [sys.executable, "-m", module],
            env=with_this_path({**os.environ, **environment}),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=complaints,
            text=True,
        )
        try:
            messages = _lines_of(process)
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(f"{json.dumps(request)}\n")
                process.stdin.flush()
            ending = _hear(messages, on_record, limit_seconds, deadline)
        finally:
            process.kill()
            with contextlib.suppress(BrokenPipeError):
                process.communicate()
        if ending.how != "died":
            return ending
        complaints.seek(0)
        lines = complaints.read().strip().splitlines() or [f"exit status {process.returncode}"]
        return dataclasses.replace(ending, last_words=shortened(lines[-1]))


def _lines_of(process: subprocess.Popen[str]) -> "queue.Queue[str]":
    """Returns a queue of the lines that the process writes; an empty text at its end."""
    lines: queue.Queue[str] = queue.Queue()
    stream = process.stdout
    assert stream is not None

    def read() -> None:
        for line in stream:
            lines.put(line)
        lines.put("")

    threading.Thread(target=read, daemon=True).start()
    return lines


def _hear(
    lines: "queue.Queue[str]", on_record: Callable[[dict[str, Any]], None], limit_seconds: float, deadline: float
) -> Ending:
    case = ""
    begun: Mapping[str, Any] | None = None
    runs = False
    while True:
        limit = limit_seconds if runs else PATIENCE * limit_seconds
        wait_seconds = min(limit, deadline - timing.clock())
        try:
            line = lines.get(timeout=max(0.0, wait_seconds))
        except queue.Empty:
            return Ending("budget" if wait_seconds < limit else "hangs", case, begun, runs)
        if not line:
            return Ending("died", case, begun, runs)
        match json.loads(line):
            case {"case": name}:
                case, begun, runs = name, None, False
            case {"begin": step}:
                begun, runs = step, False
            case {"runs": runs}:
                begun = begun if runs else None
            case {"record": record}:
                begun, runs = None, False
                on_record(record)
            case {"ended": how}:
                return Ending(how, case, begun, runs)
