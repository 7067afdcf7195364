"""Rules of rewriting, and their findings."""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

from lowering.rewriting.graph import Level, Node
from lowering.rewriting.schedule import Step


class RefusalError(Exception):
    """Reason why something that looks like a pattern is not rewritten, in words."""


@dataclasses.dataclass(frozen=True)
class Found:
    """A place in a level where a rule applies.

    Attributes:
      node: where it begins; its line is reported.
      detail: what is computed there, in words.
      saved_bytes: about how many bytes of temporaries the replacement saves.
      steps: what replaces the nodes.
    """

    node: Node
    detail: str
    saved_bytes: int
    steps: tuple[Step, ...]


@dataclasses.dataclass(frozen=True)
class Missed:
    """A place that a rule knows, but must leave alone: where it begins, what it is, and why."""

    node: Node
    detail: str
    reason: str


@dataclasses.dataclass(frozen=True)
class Rule:
    """One kind of rewrite.

    Attributes:
      name: by which users switch it on and off.
      find: yields the places in a level, `find(level, steps)`, where `steps` are what other rules have found before.
      least_size: how many elements an array must exceed for this rule; what is smaller is never looked at.
      primitives: names of primitives that interest the rule at any size.
      asked: whether the rule applies only where it is named in `only`.
      remark: what else it changes.
      overlooked: yields the places in a level, of any size, that users would expect the rule to know, and why it does
        not. Only reports ask for them; places that a rule has spoken of already are left out.
    """

    name: str
    find: Callable[[Level, tuple[Step, ...]], Iterable[Found | Missed]]
    least_size: Callable[[], int]
    primitives: frozenset[str] = frozenset()
    asked: bool = False
    remark: str = ""
    overlooked: Callable[[Level], Iterable[Missed]] | None = None


_rules: dict[str, Rule] = {}


def add_rules(rules: Iterable[Rule]) -> None:
    """Adds rules, in order of preference."""
    _rules.update({rule.name: rule for rule in rules})


def rules() -> tuple[Rule, ...]:
    """Returns all rules, in order of preference."""
    return tuple(_rules.values())


def usual() -> tuple[Rule, ...]:
    """Returns the rules that are on by default."""
    return tuple(rule for rule in rules() if not rule.asked)


def described(value: Any) -> str:
    """Returns dtype and shape as text."""
    return f"{value.dtype}[{','.join(map(str, value.shape))}]"
