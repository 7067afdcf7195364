"""The communication in an optimised program: what is sent, between which chips, how often."""

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from lowering.planning.hlo import Array, Instruction, Program

KINDS = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)
# A TPU's compiler writes a reduce-scatter as a fusion of this name, of an all-reduce and a slice of its result.
_SCATTERED = "all-reduce-scatter"


@dataclasses.dataclass(frozen=True)
class Collective:
    """One kind of communication of the same arrays between the same chips.

    Attributes:
      kind: XLA's name, such as "all-gather".
      arrays: what is gathered, reduced or exchanged, as one chip holds it whole, such as "bf16[512,256]".
      axes: of the mesh, over which the chips of a group lie.
      group: the chips of the first group, by their places in the mesh.
      count: how often one step runs it.
      bytes: of these arrays.
      source: where it was traced, as the compiler's metadata says.
    """

    kind: str
    arrays: tuple[str, ...]
    axes: tuple[str, ...]
    group: tuple[int, ...]
    count: int
    bytes: int
    source: str = ""

    @property
    def group_size(self) -> int:
        """The number of chips that take part together."""
        return len(self.group)


def collectives(program: Program, mesh: Mapping[str, int]) -> tuple[Collective, ...]:
    """Returns all communication of a program, what takes most bytes first.

    Args:
      program: as the compiler has optimised it.
      mesh: the sizes of the mesh's axes; chips are numbered along them, the last axis fastest.
    """
    # An asynchronous collective is written into each fusion that runs meanwhile, under the same channel.
    steps: dict[tuple[str, ...], int] = {}
    lines: dict[tuple[str, ...], tuple[str, Instruction]] = {}
    for name, whole, count in program.runs():
        for line in program.computations[name].values():
            if line.opcode.removesuffix("-start") in KINDS:
                channel = line.attribute(r"channel_id=(\d+)") or f"{name} {line.name}"
                is_step = "async_collective" in name or "chain_id" in line.rest
                key: tuple[str, ...] = ("step", whole, channel) if is_step else (name, whole, channel)
                steps[key] = max(count, steps.get(key, 0)) if is_step else steps.get(key, 0) + count
                lines[key] = name, line
    found: dict[Collective, int] = {}
    for key, (name, line) in lines.items():
        one = _collective(name, line, mesh)
        if one.group_size > 1:
            found[one] = found.get(one, 0) + steps[key]
    counted = [dataclasses.replace(one, count=count) for one, count in found.items()]
    return tuple(sorted(counted, key=lambda one: (-one.count * one.bytes, one.kind, one.arrays)))


def _collective(name: str, line: Instruction, mesh: Mapping[str, int]) -> Collective:
    kind = line.opcode.removesuffix("-start")
    group = _first_group(line, math.prod(mesh.values()))
    arrays = _results(line, kind)
    if kind == "reduce-scatter":  # the result is a part of what is reduced
        arrays = [_times(array, len(group)) for array in arrays]
    if name.startswith(_SCATTERED):
        kind = "reduce-scatter"
    return Collective(
        kind=kind,
        arrays=tuple(map(str, arrays)),
        axes=_axes(group, mesh),
        group=group,
        count=0,
        bytes=sum(array.bytes for array in arrays),
        source=line.attribute(r'op_name="([^"]*)"') or "",
    )


def _results(line: Instruction, kind: str) -> list[Array]:
    """Returns the arrays that a collective results in. A "-start" lists its operands first, with some exceptions."""
    arrays = list(line.arrays)
    if not line.opcode.endswith("-start"):
        return arrays
    if kind == "collective-permute":  # and ends with two words of its own
        return arrays[1:2]
    names_both = kind != "all-reduce" or line.type_text.startswith("((")
    return arrays[len(arrays) // 2 :] if names_both else arrays


def _times(array: Array, factor: int) -> Array:
    return Array(array.dtype, (array.shape[0] * factor, *array.shape[1:])) if array.shape else array


def _first_group(line: Instruction, chips: int) -> tuple[int, ...]:
    """Returns the chips that the first group has; of pairs, the first that differ."""
    pairs = line.attribute(r"source_target_pairs=\{\{([^=]*)\}\}")
    if pairs is not None:
        return next((pair for pair in _explicit(pairs) if len(set(pair)) == 2), ())
    written = line.attribute(r"replica_groups=(\{[\d,{}]*\}|\[.*?\]<=\[[\d,]*\](?:T\([\d,]*\))?|mesh\[.*?\] ?\{.*?\})")
    if written is None or written == "{}":
        return tuple(range(chips))
    if written.startswith("{"):
        return next(_explicit(written.strip("{}")))
    return _of_mesh(written) if written.startswith("mesh") else _of_iota(written)


def _explicit(text: str) -> Iterator[tuple[int, ...]]:
    for group in text.split("},{"):
        yield tuple(map(int, group.split(",")))


def _of_iota(text: str) -> tuple[int, ...]:
    """Parses the first group of, say, "[8,2]<=[4,4]T(1,0)": numbers in order, as an array, transposed and reshaped."""
    shape, _, source = text.partition("<=")
    sizes, _, order = source.partition("T")
    ids = np.arange(math.prod(_integers(shape))).reshape(_integers(sizes))
    return tuple((ids.transpose(_integers(order)) if order else ids).reshape(_integers(shape))[0].tolist())


def _of_mesh(text: str) -> tuple[int, ...]:
    """Parses the first group of, say, "mesh['a'=2,'b'=4] {'b'}"; an axis may be named in part: 'b':(1)2."""
    mesh, _, chosen = text.partition("]")
    sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", mesh)}
    ids = np.arange(math.prod(sizes.values())).reshape(list(sizes.values()))
    places: list[Sequence[int]] = [[0]] * len(sizes)
    for name, before, part in re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", chosen):
        stride = sizes[name] // (int(before) * int(part)) if part else 1
        places[list(sizes).index(name)] = range(0, stride * int(part or sizes[name]), stride)
    return tuple(ids[np.ix_(*places)].ravel().tolist())


def _integers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]


def _axes(group: Sequence[int], mesh: Mapping[str, int]) -> tuple[str, ...]:
    """Returns the axes along which the places of a group differ."""
    places = np.unravel_index(np.array(group, int), tuple(mesh.values()) or (1,))
    return tuple(name for name, along in zip(mesh, places, strict=False) if len(set(along.tolist())) > 1)
