"""The cases of a campaign, and how a process finds them by name."""

import dataclasses
import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lowering.measurements import config_items

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
      is_timed: whether its kernels are timed; not if other cases time them.
      loops: operators whose kernels run in loops that XLA may record and replay; they are verified with and without
        that.
      overrides: sizes that kernels are verified with in place of their own, so that small shapes take several steps.
    """

    name: str
    fn: Callable[..., Any]
    arguments: Callable[..., tuple[Any, ...]]
    verified_at: tuple[Size, ...]
    timed_at: tuple[Size, ...]
    rehearsed_at: tuple[Size, ...]
    is_timed: bool = True
    loops: tuple[str, ...] = ()
    overrides: Mapping[str, int] = dataclasses.field(default_factory=dict)

    def overridden(self, configs: Sequence[Mapping[str, int]], count: int | None = None) -> list[dict[str, int]]:
        """Returns so many configurations, or all, with the overrides of what they have, each once."""
        changed = ({**each, **{k: v for k, v in self.overrides.items() if k in each}} for each in configs[:count])
        return list({config_items(each): each for each in changed}.values())

    def sizes(self, stage: str, *, rehearse: bool) -> tuple[Size, ...]:
        """Returns the sizes of a stage: "verify", "time" or "tune"."""
        if rehearse:
            return self.rehearsed_at if stage == "verify" else self.rehearsed_at[-1:]
        return self.verified_at if stage == "verify" else self.timed_at if self.is_timed else ()


def load(location: str) -> Sequence[Case]:
    """Loads the suite that "module:NAME" names."""
    module, _, name = location.partition(":")
    cases: Sequence[Case] = getattr(importlib.import_module(module), name)
    return cases
