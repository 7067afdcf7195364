"""Files of a run of several processes: its settings, the text, the losses, and sealed checkpoints.

The first process writes all but the checkpoints, to which every process adds its part. Other files appear whole or not
at all, but for the last line of the losses. A checkpoint counts once it is sealed: once the digests of all its files
are written beside it.
"""

import contextlib
import hashlib
import json
import os
import shutil
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxops._demo import corpus
from lowering.describe import first_line

# What a process begins its refusal with, so that it is found among what other libraries print.
SENTENCE = "demo: "


class RunError(Exception):
    """Reason why a run cannot begin or go on, in one sentence."""


class Loss(NamedTuple):
    """The loss of a step, counted from 1."""

    step: int
    value: float


class RunFolder(NamedTuple):
    """The folder of one run; all processes see the same one."""

    path: Path

    @property
    def checkpoints(self) -> Path:
        """The folder in which orbax keeps a folder for each step."""
        return self.path / "checkpoints"

    @property
    def losses_file(self) -> Path:
        """One JSON object a line: a step, and its loss as a hexadecimal number, which has all bits."""
        return self.path / "losses.jsonl"

    def begin(self, asked: dict[str, Any], resume: bool) -> int:
        """Makes the folder ready, and returns the step to go on from: 0, or that of the newest whole checkpoint.

        Raises:
          RunError: if there is a run but none is to be resumed, or it is another, or its checkpoints are damaged.
        """
        record = self.path / "run.json"
        if record.exists():
            if not resume:
                raise RunError(f"--output must be a folder without a run, unless --resume is given; got '{self.path}'")
            with _as_written(record):
                earlier = json.loads(record.read_text())
            differ = ", ".join(f"{name} {earlier.get(name)}" for name in asked if earlier.get(name) != asked[name])
            if differ:
                raise RunError(f"--resume must be given with what the run began with; that is {differ}")
        else:
            _write(record, (json.dumps(asked, indent=2) + "\n").encode())
        step = self._newest_whole()
        self._forget_after(step)
        return step

    def keep_text(self) -> None:
        """Reads the corpus and keeps its tokens, unless they are there already."""
        if not self._text_file.exists():
            read = corpus.standard_library()
            with _replacing(self._text_file).open("wb") as stream:
                np.savez(stream, train=read.train, vocabulary_size=read.vocabulary_size)
            os.replace(_replacing(self._text_file), self._text_file)

    def tokens(self) -> tuple[np.ndarray, int]:
        """Reads the tokens to train on and the size of the vocabulary."""
        with _as_written(self._text_file), np.load(self._text_file) as read:
            return read["train"], int(read["vocabulary_size"])

    def losses(self) -> list[Loss]:
        """Reads the losses written so far, except a line that a stopped process did not finish."""
        try:
            lines = self.losses_file.read_text().splitlines(keepends=True)
        except FileNotFoundError:
            return []
        with _as_written(self.losses_file):
            whole = [json.loads(line) for line in lines if line.endswith("\n")]
            return [Loss(line["step"], float.fromhex(line["loss"])) for line in whole]

    def add_loss(self, step: int, value: float) -> None:
        """Adds a line."""
        with self.losses_file.open("a") as stream:
            stream.write(_line(Loss(step, value)))

    def seal(self, step: int) -> None:
        """Writes the digests of a checkpoint that is complete."""
        self._seals.mkdir(exist_ok=True)
        _write(self._seals / f"{step}.json", json.dumps(_digests(self.checkpoints / str(step))).encode())
        for seal in _children(self._seals):
            if not (self.checkpoints / seal.stem).exists():
                seal.unlink()

    @property
    def _text_file(self) -> Path:
        return self.path / "tokens.npz"

    @property
    def _seals(self) -> Path:
        return self.path / "seals"

    def _newest_whole(self) -> int:
        """Returns the newest step whose checkpoint is as it was when sealed, or 0 if none was ever sealed."""
        sealed = sorted((int(seal.stem) for seal in self._seals.glob("*.json")), reverse=True)
        for step in sealed:
            if json.loads((self._seals / f"{step}.json").read_text()) == _digests(self.checkpoints / str(step)):
                return step
        if sealed:
            steps = ", ".join(map(str, sealed))
            raise RunError(f"the checkpoints in '{self.checkpoints}' must be whole; none is, of steps {steps}")
        return 0

    def _forget_after(self, step: int) -> None:
        """Removes half-written and damaged checkpoints, and losses of steps that are to be taken again."""
        for left in _children(self.checkpoints):
            if not (left.name.isdigit() and int(left.name) <= step):
                shutil.rmtree(left)
        for seal in _children(self._seals):
            if not (seal.stem.isdigit() and int(seal.stem) <= step):
                seal.unlink()
        _write(self.losses_file, "".join(_line(loss) for loss in self.losses() if loss.step <= step).encode())


@contextlib.contextmanager
def _as_written(path: Path) -> Iterator[None]:
    """Refuses a file in which something else is found than what was written."""
    try:
        yield
    except (ValueError, KeyError, TypeError, zipfile.BadZipFile) as error:
        raise RunError(f"'{path}' must be as the run wrote it; got {first_line(error)}") from None


def _line(loss: Loss) -> str:
    return json.dumps({"step": loss.step, "loss": loss.value.hex()}) + "\n"


def _children(folder: Path) -> Iterable[Path]:
    return list(folder.iterdir()) if folder.exists() else []


def _digests(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def _replacing(path: Path) -> Path:
    return path.with_name(f"{path.name}.new")


def _write(path: Path, content: bytes) -> None:
    """Writes a file that is either the old one or the new one, whenever the process dies."""
    _replacing(path).write_bytes(content)
    os.replace(_replacing(path), path)
