"""Plain JAX in a function that an operator of this library could replace, as `explain` shows it."""

import dataclasses
from collections.abc import Iterable, Sequence

from jax.export import is_symbolic_dim
from jax.extend.core import Jaxpr

from lowering.rewriting.graph import levels
from lowering.rewriting.report import megabytes
from lowering.rewriting.rules import Rule


@dataclasses.dataclass(frozen=True)
class Opportunity:
    """Plain JAX on one line of the user's code that an operator computes as well.

    Attributes:
      pattern: the name of the rule.
      replacement: the public name of the operator that can replace it.
      source: the line where it begins, such as "model.py:12 (loss_fn)".
      detail: what it computes there.
      count: how often it runs.
      saved_bytes: about how much the replacement saves in temporaries; None if sizes are symbolic.
      remark: under which condition it saves memory, or what else changes.
      obstacle: why it would save nothing; empty if it saves.
      arguments: what a call must say besides its operands, such as 'layout="NHWC"'; may be empty.
    """

    pattern: str
    replacement: str
    source: str
    detail: str
    count: int
    saved_bytes: int | None
    remark: str
    obstacle: str
    arguments: str = ""

    @property
    def call(self) -> str:
        """The replacement, with what a call of it must say."""
        return f"{self.replacement}(..., {self.arguments})" if self.arguments else self.replacement

    def __str__(self) -> str:
        times = f"{self.count} x " if self.count != 1 else ""
        found = f"{self.source}: {times}{self.detail}: {self.call} would"
        if self.obstacle:
            return f"{found} save nothing, as {self.obstacle}"
        size = "" if self.saved_bytes is None else f" about {megabytes(self.saved_bytes)} of"
        return " ".join(filter(None, (f"{found} replace this and save{size} temporaries", self.remark)))


def opportunities(jaxpr: Jaxpr, rules: Iterable[Rule], platform: str) -> tuple[Opportunity, ...]:
    """Returns what rules suggest: each line of the user's code once, the largest saving first, obstacles last."""
    rules = [rule for rule in rules if rule.platforms is None or platform in rule.platforms]
    suggests = [(rule, rule.suggest) for rule in rules if rule.suggest]
    alike: dict[tuple[str, str, str], list[Opportunity]] = {}
    for level in levels(jaxpr) if suggests else ():
        for rule, suggest in suggests:
            for one in suggest(level):
                if not one.node.site.is_ours and one.saved_bytes != 0:
                    saved = None if is_symbolic_dim(one.saved_bytes) else one.saved_bytes
                    what = rule.name, rule.replacement, one.node.source, one.detail, level.count, saved
                    found = Opportunity(*what, one.remark, one.obstacle, one.arguments)
                    alike.setdefault((rule.name, found.source, found.obstacle), []).append(found)
    return tuple(sorted(map(_merged, alike.values()), key=lambda one: (bool(one.obstacle), -(one.saved_bytes or 0))))


def _merged(alike: Sequence[Opportunity]) -> Opportunity:
    saved = max((one.saved_bytes for one in alike if one.saved_bytes is not None), default=None)
    return dataclasses.replace(alike[0], count=sum(one.count for one in alike), saved_bytes=saved)
