"""The cases of a campaign, and how a process finds them by name."""

import dataclasses
import importlib
from collections.abc import Callable, Sequence
from typing import Any

Size = tuple[int | str, ...]


@dataclasses.dataclass(frozen=True)
class Case:
    """A function whose operators have kernels, at the shapes that matter.

    Attributes:
      name: unique in its suite.
      fn: a function of arrays.
      arguments: makes its arguments from the parts of a size.
      verified_at: sizes at which kernels are compared with float64, the smallest first.
      timed_at: sizes as models have them.
      rehearsed_at: small sizes, for both, where kernels are interpreted; none if other cases rehearse the same kernels.
      has_loops: whether kernels run in loops that XLA may record and replay; they are verified with and without that.
    """

    name: str
    fn: Callable[..., Any]
    arguments: Callable[..., tuple[Any, ...]]
    verified_at: tuple[Size, ...]
    timed_at: tuple[Size, ...]
    rehearsed_at: tuple[Size, ...]
    has_loops: bool = False

    def sizes(self, stage: str, *, rehearse: bool) -> tuple[Size, ...]:
        """Those of a stage: "verify", "time" or "tune"."""
        if rehearse:
            return self.rehearsed_at if stage == "verify" else self.rehearsed_at[-1:]
        return self.verified_at if stage == "verify" else self.timed_at


def load(location: str) -> Sequence[Case]:
    """The suite that "module:NAME" names."""
    module, _, name = location.partition(":")
    cases: Sequence[Case] = getattr(importlib.import_module(module), name)
    return cases
