"""Finds the line of the user's code that made an equation, and tells which files belong to libraries."""

import dataclasses
import functools
import itertools
import os
import re
import sys
import sysconfig
from collections.abc import Sequence
from typing import Any

import jax

_HERE = os.path.dirname(__file__)
_JAX = os.path.dirname(jax.__file__)
_STANDARD_LIBRARY = sysconfig.get_path("stdlib")
_INSTALLED = re.compile(r"[\\/](?:site|dist)-packages[\\/](\w+)")
UNKNOWN_LINE = "an unknown line"
_MADE_UP = re.compile(r"^<frozen |^<@beartype")

_operator_folders: set[str] = set()


def add_operators(package: str) -> None:
    """Registers a package that defines operators, so that its files count as library code."""
    folders = getattr(sys.modules[package], "__path__", ())
    _operator_folders.update(map(os.path.abspath, folders))
    is_library.cache_clear()


@dataclasses.dataclass(frozen=True)
class Site:
    """Place where an equation was made.

    A function that a library jits, such as `log_softmax`, is traced once, and its equations remember only the first
    caller. `caller` is the right one, unless the library's function called a user's function in between.

    Attributes:
      traceback: JAX's.
      caller: if the equation is in the jaxpr of a library's function, where that function was called.
      library: the file of that function.
    """

    traceback: Any
    caller: "Site | None" = None
    library: str | None = None

    @property
    def users(self) -> "Site":
        """The site that has the user's line: this one or, in a library's function, the one where that was called."""
        if self.caller is not None:
            own = self.frames()
            inner = list(itertools.takewhile(lambda frame: is_library(frame.file_name), own))
            if len(inner) == len(own) or any(frame.file_name == self.library for frame in inner):
                return self.caller.users
        return self

    def frames(self) -> list[Any]:
        """Returns the frames of the traced function, innermost first, without the call that traced it."""
        frames = getattr(self.traceback, "frames", ())
        return list(itertools.takewhile(lambda frame: not _within(frame.file_name, _HERE), frames))

    @property
    def line(self) -> str:
        """The user's line, such as "model.py:12 (loss_fn)"; if all code is installed, the traced package's line."""
        frames = self.users.frames()
        users = [frame for frame in frames if not is_library(frame.file_name)]
        packages = {frame: _package(frame.file_name) for frame in frames}
        installed = [frame for frame in frames if packages[frame]]
        outermost = [frame for frame in installed if packages[frame] == packages[installed[-1]]]
        for frame in (*users, *outermost):
            return _place(frame.file_name, frame.line_num, frame.function_name)
        return UNKNOWN_LINE

    @property
    def is_ours(self) -> bool:
        """Tells whether one of the registered operators made this."""
        made_by_libraries = itertools.takewhile(lambda frame: is_library(frame.file_name), self.users.frames())
        return any(_is_operators(frame.file_name) for frame in made_by_libraries)


def users_line(frames: Sequence[tuple[str, int, str]]) -> str:
    """Returns the user's line in frames (file, line, function), innermost first; else the innermost; "" for none."""
    own = list(itertools.takewhile(lambda frame: not _within(frame[0], _HERE), frames))
    return next((_place(*frame) for frame in own if not is_library(frame[0])), _place(*own[0]) if own else "")


def users_file_line(lines: Sequence[str]) -> str:
    """Returns the user's line among these, such as "/home/me/model.py:12", or else another library's; "" for none."""
    files = {line: line.rpartition(":")[0] for line in lines}
    others = [line for line, file in files.items() if not (_is_operators(file) or _within(file, _HERE))]
    users = (line for line in others if not is_library(files[line]))
    return os.path.basename(next(users, others[0] if others else ""))


def _place(file: str, line: int, function: str) -> str:
    return f"{os.path.basename(file)}:{line} ({function.rpartition('<locals>.')[2]})"


@functools.cache
def is_library(path: str) -> bool:
    """Tells whether a file belongs to a library: an installed package, JAX, a registered operator or Python."""
    if _INSTALLED.search(path) or _MADE_UP.search(path):
        return True
    return _within(path, _JAX) or _is_operators(path) or _within(path, _STANDARD_LIBRARY)


@functools.cache
def _package(path: str) -> str:
    """Returns the installed package that a file belongs to; "" for JAX, operators and files that are not installed."""
    found = _INSTALLED.search(path)
    return "" if found is None or found[1] in ("jax", "jaxlib") or _is_operators(path) else found[1]


def _is_operators(path: str) -> bool:
    return any(_within(path, folder) for folder in _operator_folders)


def _within(path: str, folder: str) -> bool:
    return path.startswith(folder + os.sep)
