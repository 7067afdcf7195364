"""What operators have to say about a choice that they make while they are traced; `explain` asks for it."""

import contextlib
from collections.abc import Iterator

import jax


class _Listener:
    """Hears what is said; each is equal to itself only."""

    def __init__(self) -> None:
        self.heard: list[str] = []


# A user context is part of the keys of JAX's caches, so that a function is traced again for whoever listens.
_listener = jax.make_user_context(None)


def note(text: str) -> None:
    """Says a sentence, if somebody listens."""
    if _listener.value is not None and text not in _listener.value.heard:
        _listener.value.heard.append(text)


@contextlib.contextmanager
def heard() -> Iterator[list[str]]:
    """The sentences that are said within the context, in order, each once."""
    listener = _Listener()
    with _listener(listener):
        yield listener.heard
