"""Forms of an operator in jnp that are better than its reference on some platforms."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from lowering.targets import PLATFORMS

# The platforms of a form that is the default wherever no other is.
EVERYWHERE = frozenset(PLATFORMS)


@dataclasses.dataclass(frozen=True)
class Place:
    """A platform, and over how many of its devices the compiler splits the operands; 1 if it does not."""

    platform: str
    device_count: int = 1

    @property
    def is_split(self) -> bool:
        """Tells whether the compiler splits the operands."""
        return self.device_count > 1


def refusal_of_parts(place: Place, *operands: Any) -> str | None:
    """Says why a form that is for one device and for sizes in numbers cannot take these operands; None if it can."""
    if place.is_split:
        return f"operands are split over {place.device_count} devices, and this form is for one"
    for operand in operands:
        if any(map(jax.export.is_symbolic_dim, operand.shape)):
            return f"this form needs sizes that are numbers; an operand is {list(operand.shape)}"
    return None


def _never(place: Place, *operands: Any, **params: Any) -> str | None:
    return None


@dataclasses.dataclass(frozen=True)
class Form:
    """Another program in jnp for an operator's results, which suits some platforms better than the reference.

    It is lowered and never differentiated, so it may depend on the place where it runs and on the values of operands.
    Like the reference, XLA may split it over devices, unless it runs `per_device`.

    Attributes:
      name: unique among an operator's implementations; begins with "xla_" and says what is special, as in
        "xla_prior_shift".
      platforms: the lowering platforms where it is the default.
      run: `run(*operands, place, **params)` returns the results, as the reference does.
      refuses: `refuses(place, *operands, **params) -> str | None`. Why it cannot take these operands there, in words;
        None if it can.
      per_device: whether each device runs it on its own part, as kernels do, because XLA's own way to split it would
        change results. Where that is impossible, an error says so.
    """

    name: str
    platforms: frozenset[str]
    run: Callable[..., Any]
    refuses: Callable[..., str | None] = _never
    per_device: bool = False
