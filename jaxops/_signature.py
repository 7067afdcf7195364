"""An operator's signature: which operands and results carry the batch axes, and what the other axes are called."""

import dataclasses

from jax.sharding import PartitionSpec


@dataclasses.dataclass(frozen=True)
class Axes:
    """The axes of one operand or result: the batch axes ("..."), if it carries them, and then the named ones."""

    batched: bool
    names: tuple[str, ...]

    def __str__(self) -> str:
        return " ".join(("...",) * self.batched + self.names)

    def batch_rank(self, rank: int) -> int:
        """How many batch axes an array of this rank has."""
        return rank - len(self.names) if self.batched else 0


@dataclasses.dataclass(frozen=True)
class Signature:
    """A parsed signature such as `"... c, ..., c -> ..., ..."`.

    Operands and results are separated by commas, their axes by blanks. `...` stands for the batch axes, which come
    first and are the same in every operand that carries them: an operator treats each position of the batch axes alike.
    An operand without them is shared by all positions; a result without them sums or otherwise reduces over them. The
    same name in two places means the same axis.
    """

    operands: tuple[Axes, ...]
    results: tuple[Axes, ...]

    @classmethod
    def parse(cls, text: str) -> "Signature":
        operands, results = text.split("->")
        return cls(_parse_side(operands), _parse_side(results))

    def __str__(self) -> str:
        return " -> ".join(", ".join(map(str, side)) for side in (self.operands, self.results))

    def result_specs(
        self, specs: tuple[PartitionSpec, ...], result_ranks: tuple[int, ...]
    ) -> tuple[PartitionSpec, ...]:
        """How results are laid out over a mesh when the operands are laid out by `specs` (one entry an axis)."""
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
    """Drops later uses of a mesh axis: an array can be split over a mesh axis only once."""
    seen: set[object] = set()
    kept = []
    for entry in entries:
        mesh_axes = entry if isinstance(entry, tuple) else (entry,)
        repeated = entry is not None and not seen.isdisjoint(mesh_axes)
        kept.append(None if repeated else entry)
        seen.update(mesh_axes)
    return PartitionSpec(*kept)
