"""Describes values in messages: on one line, shortened, and without tracers or addresses."""

import difflib
import re
from collections.abc import Iterable
from typing import Any

import numpy as np

_MOST_OF_MESSAGE = 800  # characters of another program's message, which says what matters anywhere in its first line
_MAX_SHOWN = 160  # characters of a value in a message; a longer value is cut in the middle
_LAST_SHOWN = 40
_MAX_SHOWN_BITS = 256
_MAX_DEPTH = 8  # of containers within containers, which may contain themselves
_LEAST_LIKENESS = 0.7
_NUMBERED = re.compile(r"[a-z]*\d+[a-z]*")
_TRACER = re.compile(r"Tracer\b|Traced<")


def show(value: Any) -> str:
    """Shows the shape and dtype of anything like an array, even a tracer; the one-line repr of anything else."""
    return shortened(_described(value, 0))


def shortened(text: str) -> str:
    """Returns a text on one line, without addresses in memory, which help nobody; cut in its middle if it is long."""
    text = _on_one_line(text)
    is_long = len(text) > _MAX_SHOWN
    return f"{text[: _MAX_SHOWN - _LAST_SHOWN]}...{text[-_LAST_SHOWN:]}" if is_long else text


def _on_one_line(text: str) -> str:
    return " ".join(re.sub(r" at 0x[0-9a-f]+", "", text).split())


def opening(message: str, rest: str) -> str:
    """Returns the first line of another program's message, whole, and where the other lines are, if there are any.

    Args:
      message: what it says.
      rest: what shows all of it, such as "`lowering.compile`".
    """
    first, *others = message.strip().splitlines() or ["no message"]
    while first.rstrip().endswith(":") and others:  # as of "Cannot lower jaxpr with verifier errors:"
        first = f"{first} {others.pop(0)}"
    line = _on_one_line(first)
    cut = f"{line[: _MOST_OF_MESSAGE - 3]}..." if len(line) > _MOST_OF_MESSAGE else line
    more = counted(len(others), "more line") if others else ""
    return f"{cut} ({rest} shows {more or 'the rest'})" if others or cut != line else line


def first_line(error: BaseException) -> str:
    """Returns an exception's type and the first line of its message, shortened."""
    lines = str(error).strip().splitlines()
    return shortened(": ".join([type(error).__name__, *lines[:1]]))


def one_of(known: Iterable[str], name: Any) -> str:
    """Says which names are known, and which one was given; of many, only how many, if one of them was perhaps meant."""
    known = tuple(known)
    every, asked = ", ".join(known), meant(name, known)
    names = f"{len(known)} names" if asked and len(every) > _MAX_SHOWN else every
    return f"one of {names}; got {show(name)}{asked}"


def meant(name: Any, known: Iterable[str]) -> str:
    """Asks, after a comma, whether the known names nearest to an unknown one were meant; empty if none is near."""
    word = name.lower() if isinstance(name, str) and len(name) <= _MAX_SHOWN else ""
    likeness = {one: _likeness(word, one.lower()) for one in known}
    best = max(likeness.values(), default=0.0)
    near = [one for one, value in likeness.items() if value == best]
    return f", did you mean {' or '.join(near)}?" if best >= _LEAST_LIKENESS else ""


def _likeness(word: str, name: str) -> float:
    """Returns how alike two names are, up to 1. Another number makes another name, as of chips."""
    if word and name.endswith(f"-{word}"):
        return 1.0
    numbers = [_NUMBERED.findall(each) for each in (word, name)]
    is_same = len(numbers[0]) == len(numbers[1]) and all(a in b or b in a for a, b in zip(*numbers, strict=True))
    return difflib.SequenceMatcher(None, name, word).ratio() if is_same else 0.0


def counted(number: int, noun: str) -> str:
    """Returns a number of things, such as "1 step" and "2 steps"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def file_fault(error: Exception) -> str:
    """Says why a file cannot be read or written, without its path."""
    return getattr(error, "strerror", None) or first_line(error)


def is_like_array(value: Any) -> bool:
    """Tells whether a value has a shape and a dtype. Modules and mocks have other things under these names."""
    try:
        return isinstance(value.shape, tuple) and hasattr(value, "dtype") and not isinstance(value, np.generic | type)
    except Exception:  # a user's attribute may raise anything
        return False


def _described(value: Any, depth: int) -> str:
    if is_like_array(value):
        return f"{value.dtype}{list(value.shape)}"
    if isinstance(value, int) and value.bit_length() > _MAX_SHOWN_BITS:
        return f"an integer of {value.bit_length()} bits"
    return _elements(value, depth) or _written(value)


def _written(value: Any) -> str:
    """Returns the repr; the type where the repr fails, as for objects that are only half built, or shows tracers."""
    try:
        is_scalar_type = isinstance(value, type) and isinstance(getattr(value, "dtype", None), np.dtype)
        text = str(value.dtype) if is_scalar_type else repr(value)  # such as `jnp.bfloat16`
    except Exception:
        text = ""
    return text if text and not _TRACER.search(text) else f"a value of type {type(value).__qualname__}"


def _elements(value: Any, depth: int) -> str | None:
    """Shows a container element by element, because an element may be a tracer; None for anything else."""
    if not isinstance(value, tuple | list | dict):
        return None
    if depth == _MAX_DEPTH:
        return "..."
    if isinstance(value, dict):
        pairs = (f"{_described(key, depth + 1)}: {_described(each, depth + 1)}" for key, each in value.items())
        return f"{{{_joined(pairs)}}}"
    elements = (_described(each, depth + 1) for each in value)
    if isinstance(value, list):
        return f"[{_joined(elements)}]"
    if hasattr(value, "_fields"):
        fields = zip(value._fields, elements, strict=True)
        return f"{type(value).__name__}({_joined(f'{name}={each}' for name, each in fields)})"
    return f"({_joined(elements)}{',' * (len(value) == 1)})"


def _joined(parts: Iterable[str]) -> str:
    """Joins the parts with commas, only as many as a message shows."""
    shown: list[str] = []
    for part in parts:
        shown.append(part)
        if sum(map(len, shown)) + 2 * len(shown) > _MAX_SHOWN + 2:
            break
    return ", ".join(shown)
