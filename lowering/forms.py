"""Forms of an operator in jnp that are better than its reference on some platforms."""

import dataclasses
from collections.abc import Callable
from typing import Any


@dataclasses.dataclass(frozen=True)
class Place:
    """A platform, and over how many of its devices the compiler splits the operands; 1 if it does not."""

    platform: str
    device_count: int = 1

    @property
    def is_split(self) -> bool:
        """Whether the compiler splits the operands."""
        return self.device_count > 1


def _never(place: Place, *operands: Any, **params: Any) -> str | None:
    return None


@dataclasses.dataclass(frozen=True)
class Form:
    """Another program in jnp for an operator's results, which suits some platforms better than the reference.

    It is lowered and never differentiated, so it may depend on the place where it runs and on the values of operands.
    Like the reference, XLA may split it over devices.

    Attributes:
      name: unique among an operator's implementations; begins with "xla_" and says what is special, as in
        "xla_prior_shift".
      platforms: the lowering platforms where it is the default.
      run: `run(*operands, place, **params)` returns the results, as the reference does.
      refuses: `refuses(place, *operands, **params) -> str | None`. Why it cannot take these operands there, in words;
        None if it can.
    """

    name: str
    platforms: frozenset[str]
    run: Callable[..., Any]
    refuses: Callable[..., str | None] = _never
