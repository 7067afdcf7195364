"""Rules of rewriting, and their findings."""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

from jax.extend.core import Jaxpr

from lowering.register import load_packages
from lowering.rewriting.graph import Level, Node, equations
from lowering.rewriting.ordering import Step


class RefusalError(Exception):
    """Reason why something that looks like a pattern is not rewritten, in words.

    What is said of a node begins with its primitive and the user's line, which is looked up when somebody reads it.
    """

    def __init__(self, reason: str, node: Node | None = None, *, found_at: Node | None = None) -> None:
        """Takes the reason, and the node that it is about, or the one at which it was found."""
        super().__init__(reason, node, found_at)

    def __str__(self) -> str:
        """Returns the reason."""
        reason, node, found_at = self.args
        reason = str(reason) if node is None else f"{node.name} on {node.source} {reason}"
        return reason if found_at is None else f"{reason}, by {found_at.name} on {found_at.source}"

    def located(self, node: Node) -> "RefusalError":
        """Returns the same reason with the node at which it was found, unless it names one."""
        reason, named, found_at = self.args
        return self if named or found_at else RefusalError(reason, found_at=node)


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
class Suggestion:
    """A place in a level where a user could call an operator.

    Attributes:
      node: where it begins; its line is reported.
      detail: what is computed there, in words.
      saved_bytes: about how many bytes of temporaries the operator saves, which may be symbolic; None if unknown.
      obstacle: why it would save nothing after all, in words; empty if it saves.
      arguments: what a call must say besides its operands, such as 'layout="NHWC"'; may be empty.
      remark: under which condition it saves memory, or what else it changes.
    """

    node: Node
    detail: str
    saved_bytes: Any
    obstacle: str = ""
    arguments: str = ""
    remark: str = ""


@dataclasses.dataclass(frozen=True)
class Rule:
    """One kind of plain JAX that an operator replaces: in `rewrite`, or by its user, whom `explain` tells.

    Attributes:
      name: by which users switch it on and off.
      primitives: names of primitives, of which every place has one.
      find: yields the places in a level, `find(level, steps)`, where `steps` are what other rules have found before;
        None if `rewrite` does not know the rule.
      least_size: how many elements an array must exceed for this rule; what is smaller is never looked at. None if all
        its primitives interest the rule.
      asked: whether the rule applies only where it is named in `only`.
      remark: what else it changes, or what saves more.
      on_tpu: what is different on TPUs.
      makes_loops: whether what replaces a place is a loop of JAX, in which no operator computes.
      overlooked: yields the places in a level, of any size, that users would expect the rule to know, and why it does
        not. Only reports ask for them; places that a rule has spoken of already are left out.
      suggest: yields the places in a level where a user could call the operator, each once. The level is one of
        `lowering.rewriting.graph.levels`. A gradient has the lines of its function, so look for something that only one
        of them has.
      replacement: the public name of that operator, or of one that computes what a rewrite replaces.
      platforms: where the operator saves memory; None for all.
    """

    name: str
    primitives: frozenset[str]
    find: Callable[[Level, tuple[Step, ...]], Iterable[Found | Missed]] | None = None
    least_size: Callable[[], int] | None = None
    asked: bool = False
    remark: str = ""
    on_tpu: str = ""
    makes_loops: bool = False
    overlooked: Callable[[Level], Iterable[Missed]] | None = None
    suggest: Callable[[Level], Iterable[Suggestion]] | None = None
    replacement: str = ""
    platforms: frozenset[str] | None = None


_rules: dict[str, Rule] = {}


def add_rules(rules: Iterable[Rule]) -> None:
    """Adds rules, in order of preference."""
    _rules.update({rule.name: rule for rule in rules})


def rules() -> tuple[Rule, ...]:
    """Returns all rules, in order of preference, with those of installed packages that nothing has imported yet."""
    load_packages()
    return tuple(_rules.values())


def rules_for(jaxpr: Jaxpr) -> tuple[Rule, ...]:
    """Returns the rules that may have a place in a jaxpr."""
    names = {equation.primitive.name for equation in equations(jaxpr)}
    return tuple(rule for rule in rules() if not rule.primitives.isdisjoint(names))
