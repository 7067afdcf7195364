"""An operator's signature: which operands and results carry the batch axes, and what the other axes are called."""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

from jax.sharding import PartitionSpec

from lowering.describe import show


@dataclasses.dataclass(frozen=True)
class Axes:
    """The axes of one operand or result: the batch axes ("..."), if it carries them, then the named axes."""

    batched: bool
    names: tuple[str, ...]

    def __str__(self) -> str:
        return " ".join(("...",) * self.batched + self.names)

    def batch_rank(self, rank: int) -> int:
        """Returns how many batch axes an array of this rank has."""
        return rank - len(self.names) if self.batched else 0

    def keys(self, rank: int) -> tuple[int | str, ...]:
        """Returns a key for each axis of an array of this rank: a number for a batch axis, else its name."""
        return (*range(self.batch_rank(rank)), *self.names)


@dataclasses.dataclass(frozen=True)
class Signature:
    """A parsed signature such as `"... c, ..., c -> ..., ..."`.

    Commas separate operands and results, spaces separate axes. `...` stands for the batch axes. They come first, they
    are the same in every operand that carries them, and an operator treats all their positions in the same way. An
    operand without batch axes is shared by all positions. A result without them sums or otherwise reduces over them.
    The same name in two places means the same axis. Fields of operands and results that may be absent have entries,
    too.
    """

    operands: tuple[Axes, ...]
    results: tuple[Axes, ...]

    @classmethod
    def parse(cls, text: str) -> "Signature":
        """Reads a signature.

        Raises:
          ValueError: if it is none, with the rule and the text, to be put behind "<operator>: ".
        """
        sides = [_parse_side(side) for side in text.split("->")]
        names = (name for side in sides for axes in side for name in axes.names)
        if len(sides) != 2 or not all(map(str.isidentifier, names)):
            raise ValueError(f'signature must be like "... c, c -> ... c", of names and leading dots; got {show(text)}')
        return cls(*sides)

    def __str__(self) -> str:
        return " -> ".join(", ".join(map(str, side)) for side in (self.operands, self.results))

    def of_present(self, operands: Sequence[bool], results: Sequence[bool]) -> "Signature":
        """Returns the signature of an equation, given which of the operator's fields are present in it."""
        sides = zip((self.operands, self.results), (operands, results), strict=True)
        return Signature(*(tuple(itertools.compress(axes, is_present)) for axes, is_present in sides))

    def conflict(self, operands: Sequence[tuple[Any, ...]], results: Sequence[tuple[Any, ...]]) -> str | None:
        """Says which shape of an equation is not as the signature says; None if all are."""
        sizes: dict[str, tuple[Any, str]] = {}
        for side, shapes, every in (("operand", operands, self.operands), ("result", results, self.results)):
            for i, (shape, axes) in enumerate(zip(shapes, every, strict=True)):
                here, rank = f"{side} {i}", axes.batch_rank(len(shape))
                if rank < 0 or len(shape) != rank + len(axes.names):
                    return f'{here} of shape {list(shape)} for "{axes}"'
                named = list(zip(axes.names, shape[rank:], strict=True))
                for name, size in [("...", list(shape[:rank]))] * axes.batched + named:
                    known, place = sizes.setdefault(name, (size, here))
                    if known != size:
                        return f"{name} of {known} in {place} and of {size} in {here}"
        return None

    def agreed_specs(self, specs: tuple[PartitionSpec, ...]) -> tuple[PartitionSpec, ...]:
        """Specs for the operands that agree, where two operands with batch axes would split the same axis differently.

        The operand with the most axes decides; of several, the first. Two axes of one operand are never split over the
        same mesh axis, not even if different operands decide about them. Operands that the whole batch shares keep
        their specs.
        """
        keys = [axes.keys(len(spec)) for axes, spec in zip(self.operands, specs, strict=True)]
        batched = [i for i, axes in enumerate(self.operands) if axes.batched]
        agreed: dict[int | str, tuple[str, ...]] = {}
        for i in sorted(batched, key=lambda i: -len(specs[i])):
            for key, entry in zip(keys[i], specs[i], strict=True):
                if entry is not None and key not in agreed:
                    beside = {other for one in keys if key in one for other in one}
                    taken = {name for other in beside for name in agreed.get(other, ())}
                    agreed[key] = tuple(name for name in names_of(entry) if name not in taken)
        return tuple(
            PartitionSpec(*(entry and entry_of(agreed[key]) for key, entry in zip(keys[i], spec, strict=True)))
            if i in batched
            else spec
            for i, spec in enumerate(specs)
        )

    def result_specs(
        self, specs: tuple[PartitionSpec, ...], result_ranks: tuple[int, ...]
    ) -> tuple[PartitionSpec, ...]:
        """Specs for the results, given the specs of the operands (one entry per axis)."""
        batch_spec: list[object] = []
        named_spec: dict[str, object] = {}
        for axes, spec in zip(self.operands, specs, strict=True):
            batch_rank = axes.batch_rank(len(spec))
            if axes.batched:
                batch_spec += [None] * (batch_rank - len(batch_spec))
                batch_spec[:batch_rank] = [a or b for a, b in zip(batch_spec, spec[:batch_rank], strict=False)]
            for name, entry in zip(axes.names, spec[batch_rank:], strict=True):
                named_spec[name] = named_spec.get(name) or entry
        return tuple(
            _without_repeats([*batch_spec[: axes.batch_rank(rank)], *(named_spec.get(name) for name in axes.names)])
            for axes, rank in zip(self.results, result_ranks, strict=True)
        )


def _parse_side(text: str) -> tuple[Axes, ...]:
    return tuple(_parse_axes(part.split()) for part in text.split(","))


def _parse_axes(names: list[str]) -> Axes:
    batched = names[:1] == ["..."]
    return Axes(batched, tuple(names[batched:]))


def _without_repeats(entries: list[object]) -> PartitionSpec:
    """Drops later uses of a mesh axis, because an array can be split over a mesh axis only once."""
    seen: set[object] = set()
    kept = []
    for entry in entries:
        kept.append(entry if seen.isdisjoint(names_of(entry)) else None)
        seen.update(names_of(entry))
    return PartitionSpec(*kept)


def names_of(entry: Any) -> tuple[str, ...]:
    """Returns the mesh axes over which an entry of a PartitionSpec splits its array axis."""
    return () if entry is None else entry if isinstance(entry, tuple) else (entry,)


def entry_of(names: Sequence[str]) -> str | tuple[str, ...] | None:
    """Inverts `names_of`."""
    return names[0] if len(names) == 1 else tuple(names) or None
