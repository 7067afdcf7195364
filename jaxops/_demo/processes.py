"""Starts the demo's processes on this machine and watches them: when one ends too early, the others end with it."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from jaxops._demo.run_folder import SENTENCE, Loss, RunError, RunFolder

# The mesh is the same however many processes share it, and so are the sums over it.
DEVICES = 4
WORKER = ("-m", "jaxops._demo.worker")
COUNTS = (1, 2, 4)
SECONDS_BETWEEN_LOOKS = 0.2
SECONDS_TO_NOTICE = 1
SECONDS_WITHOUT_A_STEP = 900
# Of several processes that end, those that were ended by something else come first, and those that miss others last.
_ORDER = {2: 1, 3: 2, -signal.SIGABRT: 3}


class Member(NamedTuple):
    """A running process and the file that it writes to."""

    number: int
    process: subprocess.Popen
    log: Path


def run(count: int, arguments: Sequence[str], folder: RunFolder, on_step: Callable[[Loss], None]) -> list[Loss]:
    """Trains with so many processes, and returns the losses of all steps.

    Args:
      count: 1, 2 or 4.
      arguments: options of `jaxops._demo.worker`, without --output and those that name the process.
      folder: what to write to; it exists.
      on_step: called with the newest loss whenever there is one.

    Raises:
      RunError: if a process refuses, is killed, or no step is taken for a quarter of an hour. None runs on.
    """
    members: list[Member] = []
    try:
        address = f"localhost:{_free_port()}"
        for number in range(count):
            members.append(_start(number, count, address, arguments, folder))
        _watch(members, folder, on_step)
    finally:
        for member in members:
            member.process.kill()
        for member in members:
            member.process.communicate()
    return folder.losses()


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return free.getsockname()[1]


def _start(number: int, count: int, address: str, arguments: Sequence[str], folder: RunFolder) -> Member:
    names = ("--coordinator", address, "--processes", str(count), "--process", str(number), "--attached")
    command = (sys.executable, *WORKER, "--output", str(folder.path), *arguments, *names)
    log = folder.path / f"process-{number}.log"
    with log.open("wb") as stream:
        process = subprocess.Popen(
            command, env=_environment(count), stdin=subprocess.PIPE, stdout=stream, stderr=subprocess.STDOUT
        )
    return Member(number, process, log)


def _environment(count: int) -> dict[str, str]:
    flags = re.sub(r"--xla_force_host_platform_device_count=\S+", "", os.environ.get("XLA_FLAGS", "")).strip()
    devices = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(DEVICES // count)}
    return {**os.environ, **devices, "XLA_FLAGS": flags}


def _watch(members: Sequence[Member], folder: RunFolder, on_step: Callable[[Loss], None]) -> None:
    """Returns when all processes have ended well."""
    seen, since = 0, time.monotonic()
    while True:
        codes = [member.process.poll() for member in members]
        if any(codes):
            raise RunError(_why(_first_to_end(members), folder))
        losses = folder.losses()
        if losses and losses[-1].step != seen:
            seen, since = losses[-1].step, time.monotonic()
            on_step(losses[-1])
        if None not in codes:
            return
        if time.monotonic() - since > SECONDS_WITHOUT_A_STEP:
            raise RunError(f"the processes must take a step in {SECONDS_WITHOUT_A_STEP} seconds; got none since {seen}")
        time.sleep(SECONDS_BETWEEN_LOOKS)


def _first_to_end(members: Sequence[Member]) -> Member:
    """Returns the process that the others miss: they may notice sooner than this one does."""
    time.sleep(SECONDS_TO_NOTICE)
    failed = [member for member in members if member.process.poll()]
    return min(failed, key=lambda member: _ORDER.get(member.process.returncode, 0))


def _why(member: Member, folder: RunFolder) -> str:
    """Returns the last sentence that the process said, or else how it ended."""
    said = [line for line in member.log.read_text(errors="replace").splitlines() if line.startswith(SENTENCE)]
    if said:
        return said[-1].removeprefix(SENTENCE)
    code = member.process.returncode
    ended = f"exit code {code}" if code > 0 else signal.Signals(-code).name
    steps = len(folder.losses())
    return (
        f"process {member.number} must run to the end; got {ended} after step {steps}, so all were stopped: "
        f"--resume goes on, and '{member.log}' says more"
    )
