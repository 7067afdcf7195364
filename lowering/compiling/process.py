"""Starts, keeps and ends the processes that compile for absent chips."""

import atexit
import contextlib
import contextvars
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from lowering.compiling import compilers

# libtpu, the CUDA plugin and JAX read these when they start, which is why compilers run in processes of their own.
_ENVIRONMENT = {
    **compilers.QUIET,
    # libtpu would leave two files in a shared folder each time.
    "TPU_LOG_DIR": "disabled",
    "JAX_PLATFORMS": "cpu",
    # A program from a cache was not compiled: it would dump nothing, and the time would not be the compiler's.
    "JAX_ENABLE_COMPILATION_CACHE": "false",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_SKIP_MDS_QUERY": "1",
    "MOSAIC_GPU_DUMP_PTXAS": "1",
}
SCHEDULES = "schedules"  # the folder, in one that was compiled, with what libtpu has written of it
_running: dict[str, "_Process"] = {}
_dumping: dict[tuple[str, str], "_Process"] = {}
_lock = threading.Lock()
_FLAGS = "LIBTPU_INIT_ARGS"
_more_libtpu_flags = contextvars.ContextVar("more flags for libtpu", default="")


class CompilerEndedError(RuntimeError):
    """The process ended in the middle of its work; the message is the last thing it wrote."""


def compile_folder(
    folder: Path,
    platform: str,
    gpu_kernels: tuple[str, frozenset[str]] = ("", frozenset()),
    libtpu_flags: Callable[[Path], str] | None = None,
) -> None:
    """Compiles the contents of a folder with `lowering.compiling.child`, in the platform's process.

    Args:
      folder: what to compile; the results are written there.
      platform: each has one process.
      gpu_kernels: the chip, and the Mosaic GPU kernels to compile for it. A process reports on a kernel only the first
        time that it compiles it, and sticks to the architecture of its first kernel. If it has compiled one of these
        kernels before, or any for another chip, a new process replaces it.
      libtpu_flags: returns the flags with which libtpu writes schedules to a folder. It reads flags only when it is
        loaded, so such folders have a process of their own, whose schedules are moved to `SCHEDULES` in the folder.

    Raises:
      CompilerEndedError: if the process dies.
    """
    if libtpu_flags is not None:
        _compile_dumping(folder, platform, libtpu_flags)
        return
    with _lock:
        process = _running.pop(platform, None)
        if process is not None and not process.can_report(*gpu_kernels):
            process.end()
            process = None
        # An idle process ends by itself, and may be doing so right now.
        if process is None or process.last_words_about(folder) is not None:
            process = _Process(platform)
            last_words = process.last_words_about(folder)
            if last_words is not None:
                raise CompilerEndedError(last_words)
        process.add_reported(*gpu_kernels)
        _running[platform] = process


def _compile_dumping(folder: Path, platform: str, libtpu_flags: Callable[[Path], str]) -> None:
    """Compiles a folder in a process that writes schedules; one at a time has each set of flags."""
    key = platform, _flags(libtpu_flags(Path(SCHEDULES)))
    with _lock:
        process = _dumping.pop(key, None)
    if process is None or process.last_words_about(folder) is not None:
        schedules = tempfile.TemporaryDirectory()
        process = _Process(platform, _flags(libtpu_flags(Path(schedules.name))), schedules)
        last_words = process.last_words_about(folder)
        if last_words is not None:
            raise CompilerEndedError(last_words)
    (folder / SCHEDULES).mkdir()
    assert process.schedules is not None
    for path in Path(process.schedules.name).iterdir():
        shutil.move(path, folder / SCHEDULES / path.name)
    with _lock:
        other = _dumping.pop(key, None)
        _dumping[key] = process
    if other is not None:
        other.end()


@contextlib.contextmanager
def more_libtpu_flags(flags: str) -> Iterator[None]:
    """Adds flags for libtpu to those of folders that come with some, inside a `with` block."""
    token = _more_libtpu_flags.set(flags)
    try:
        yield
    finally:
        _more_libtpu_flags.reset(token)


def _flags(libtpu_flags: str) -> str:
    """Returns the user's own flags for libtpu, and these."""
    return f"{os.environ.get(_FLAGS, '')} {_more_libtpu_flags.get()} {libtpu_flags}"


class _Process:
    """One compiler process, its pipes, the file with its errors, and the kernels that it has reported on."""

    def __init__(
        self, platform: str, libtpu_flags: str = "", schedules: tempfile.TemporaryDirectory[str] | None = None
    ) -> None:
        self.schedules = schedules
        self._chip = ""
        self._reported: frozenset[str] = frozenset()
        # A file rather than a pipe, which would fill up: nobody reads it while the compiler writes.
        self._complaints = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 it outlives this function
        self._process = subprocess.Popen(
            [compilers.interpreter(platform) or sys.executable, "-m", "lowering.compiling.child", str(os.getpid())],
            env=compilers.with_this_path(
                {**os.environ, **_ENVIRONMENT, **({_FLAGS: libtpu_flags} if libtpu_flags else {})}
            ),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._complaints,
            text=True,
        )
        atexit.register(self.end)

    def can_report(self, chip: str, kernels: frozenset[str]) -> bool:
        """Tells whether these Mosaic GPU kernels are new to this process, and it has compiled none for another chip."""
        return not kernels or (self._chip in ("", chip) and self._reported.isdisjoint(kernels))

    def add_reported(self, chip: str, kernels: frozenset[str]) -> None:
        """Records what this process has compiled."""
        if kernels:
            self._chip = chip
            self._reported |= kernels

    def last_words_about(self, folder: Path) -> str | None:
        """Hands over a folder and waits until it is done. If the process ends instead, returns what it wrote."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(f"{folder}\n")
            self._process.stdin.flush()
            if self._process.stdout.readline():
                return None
        self._complaints.seek(0)
        last_words = self._complaints.read()
        self.end()
        return last_words

    def end(self) -> None:
        """Ends the process."""
        atexit.unregister(self.end)
        self._process.kill()
        with contextlib.suppress(BrokenPipeError):
            self._process.communicate()
        self._complaints.close()
        if self.schedules is not None:
            self.schedules.cleanup()
