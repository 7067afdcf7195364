"""Where an operator's reference will run, for references that take another form there."""

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator


@dataclasses.dataclass(frozen=True)
class Placement:
    """A platform, and over how many of its devices the compiler splits the operands; 1 if it does not."""

    platform: str
    device_count: int = 1

    @property
    def is_split(self) -> bool:
        """Whether the compiler splits the operands."""
        return self.device_count > 1


_placement: contextvars.ContextVar[Placement | None] = contextvars.ContextVar("placement", default=None)


def placement() -> Placement | None:
    """Returns where the reference that is being traced will run, or None if that is unknown.

    It is unknown while a reference is traced for its result types or its derivative: that form has to be
    differentiable, and the compiler must be able to split it over devices. It is known while lowering. That form is
    used once, for this place, and never differentiated.

    Returns:
      A record of the `platform`, and over how many of its devices the compiler splits the operands: `device_count`, and
      `is_split`, whether that is more than one.

    Example:
      >>> print(lowering.placement())  # outside of lowering
      None
    """
    return _placement.get()


def is_on_one_cpu() -> bool:
    """Whether `placement` is a single CPU, so that a reference may take a form that only suits XLA's CPU compiler.

    Example:
      >>> lowering.is_on_one_cpu()  # outside of lowering
      False
    """
    return _placement.get() == Placement("cpu")


@contextlib.contextmanager
def placed(platform: str, device_count: int = 1) -> Iterator[None]:
    """Sets the placement of what is traced within the context."""
    token = _placement.set(Placement(platform, device_count))
    try:
        yield
    finally:
        _placement.reset(token)
