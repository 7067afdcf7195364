"""Sentences in which operators explain a choice that they make while they are traced; `explain` collects them."""

import contextlib
from collections.abc import Iterator

import jax

from lowering.describe import show


class _Listener:
    """Collector of sentences; compared by identity, so each listener is its own cache key."""

    def __init__(self) -> None:
        self.heard: list[str] = []


# A user context is part of the keys of JAX's caches, so a function is traced again for each listener.
_listener = jax.make_user_context(None)


def note(text: str) -> None:
    """Explains a choice that an operator makes while it is traced; `lowering.explain` shows the sentence.

    Outside of `explain` this does nothing. A sentence that is repeated is shown once.

    Args:
      text: one sentence.

    Raises:
      TypeError: if `text` is not a string.

    Example:
      >>> def double(x):
      ...     lowering.note("double: adds x to itself")
      ...     return x + x
      >>> lowering.explain(double, 1.0).notes
      ('double: adds x to itself',)
    """
    if not isinstance(text, str):
        raise TypeError(f"note: text must be a string; got {show(text)}")
    if _listener.value is not None and text not in _listener.value.heard:
        _listener.value.heard.append(text)


@contextlib.contextmanager
def heard() -> Iterator[list[str]]:
    """Collects the sentences that are noted within the context, in order, each once."""
    listener = _Listener()
    with _listener(listener):
        yield listener.heard
