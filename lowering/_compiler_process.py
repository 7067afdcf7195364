"""The processes that compile for chips which are not here."""

import atexit
import contextlib
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

# Read by libtpu, the CUDA plugin and JAX when they start, which is why compilers run in processes of their own.
_ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "MOSAIC_GPU_DUMP_PTXAS": "1",
}
# A process compiles a Mosaic GPU kernel once, and then has nothing to report of it: the next function gets a new one.
_KEPT = ("tpu",)
_running: dict[str, "_Process"] = {}
_lock = threading.Lock()


class CompilerEndedError(RuntimeError):
    """The process ended in the middle of its work; the message is the last that it wrote."""


def compile_folder(folder: Path, platform: str) -> None:
    """Has `lowering._compile_in_child` compile what is in this folder, in the process for the platform.

    Raises:
      CompilerEndedError: if the process dies of it.
    """
    with _lock:
        process = _running.pop(platform, None)
        # A process that has had nothing to do ends by itself, and may do so just now.
        if process is None or process.last_words_about(folder) is not None:
            process = _Process()
            last_words = process.last_words_about(folder)
            if last_words is not None:
                raise CompilerEndedError(last_words)
        if platform in _KEPT:
            _running[platform] = process
        else:
            process.end()


class _Process:
    """One compiler process, its pipes, and the file that it complains to."""

    def __init__(self) -> None:
        # A file, and not a pipe: nobody reads it while the compiler writes.
        self._complaints = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 it outlives this function
        self._process = subprocess.Popen(
            [sys.executable, "-m", "lowering._compile_in_child"],
            env={**os.environ, **_ENVIRONMENT, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._complaints,
            text=True,
        )
        atexit.register(self.end)

    def last_words_about(self, folder: Path) -> str | None:
        """Hands over a folder and waits until it is done; what the process has written, if it ends instead."""
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
