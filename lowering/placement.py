"""Where the reference of an operator will run, for those that are written differently for different places."""

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator


@dataclasses.dataclass(frozen=True)
class Placement:
    """A platform, and whether the compiler splits the operands over several devices of it."""

    platform: str
    is_split: bool


_placement: contextvars.ContextVar[Placement | None] = contextvars.ContextVar("placement", default=None)


def placement() -> Placement | None:
    """Where the reference that is being traced will run: known once it is lowered.

    None while it is traced for its types or its derivative: then it has to be a differentiable function that can be
    split. What is traced while lowering is used once, for this place, and never differentiated.
    """
    return _placement.get()


def is_on_one_cpu() -> bool:
    """Whether `placement` is a single CPU, for forms that suit its compiler alone."""
    return _placement.get() == Placement("cpu", is_split=False)


@contextlib.contextmanager
def placed(platform: str, is_split: bool) -> Iterator[None]:
    """Makes this the placement of what is traced within the context."""
    token = _placement.set(Placement(platform, is_split))
    try:
        yield
    finally:
        _placement.reset(token)
