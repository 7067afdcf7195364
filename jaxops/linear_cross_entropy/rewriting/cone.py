"""A part of a level that treats all rows alike, from logits to numbers per row and sums over rows, chunk by chunk."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxops._checks.dtypes import accumulation_dtype
from jaxops._primitive.sharding import varying_with
from jaxops.linear_cross_entropy.rewriting import row_wise
from jaxops.linear_cross_entropy.rewriting.accumulated import is_large_product, plus_product
from jaxops.linear_cross_entropy.rewriting.changes import without_axis
from jaxops.linear_cross_entropy.rewriting.row_wise import SUM, Part, Role
from jaxops.linear_cross_entropy.rewriting.sinks import labels_by_position
from lowering.rewriting.graph import Level, Node, Value
from lowering.rewriting.rules import RefusalError
from lowering.rewriting.schedule import Step, Task

_Parts = list[Part | None]
_Arrays = dict[Value, Any]


class Cone:
    """The nodes that are computed chunk by chunk.

    Attributes:
      roles: of each value that the chunks compute, where its rows are, or that it adds them up.
      cut: the values from outside that each chunk takes its own rows of, and the axes of those rows.
      nodes: in order.
    """

    def __init__(self, level: Level, wanted: set[Task], head: Node, axis: int) -> None:
        """Follows the logits of a matrix product; `axis` is that of its result which is split into chunks."""
        self.head = head
        self.rows = head.outputs[0].shape[axis]
        self.roles: dict[Value, Role] = {}
        self.cut: dict[Value, Part] = {}
        self._inner: set[Node] = set()
        self._shared: dict[Value, None] = {}
        # Gathers that number the rows, which each chunk does anew: along which axis they pick, and the labels.
        self._picks: dict[Node, tuple[int, Value]] = {}
        operands = self._follow(level, wanted, axis)
        within = self._within(operands)
        computed = {x for node in operands for x in node.outputs}
        for node in level.nodes:
            if node in within:
                found = operands[node]
                if isinstance(found, RefusalError):
                    raise found
                self._inner.add(node)
                for value, part in zip(self._inputs(node), found, strict=True):
                    if value not in computed:
                        self._bring(value, part)
        self.nodes = [node for node in level.nodes if node in self._inner]
        outside = [node for node in level.nodes if node in wanted and node not in within]
        read = {x for node in outside for x in node.inputs} | set(level.results)
        self.exits = [x for node in self.nodes if node in within for x in node.outputs if x in read]

    def is_wide(self, value: Value) -> bool:
        """Whether a value is about as large as the logits."""
        return value.size > self.head.outputs[0].size // 2

    def _follow(self, level: Level, wanted: set[Task], axis: int) -> dict[Node, _Parts | RefusalError]:
        """Where the operands of each node that depends on the logits have their rows, or why that is not known."""
        found: dict[Node, _Parts | RefusalError] = {}
        dependent = set(self.head.outputs)
        for node in level.nodes:
            if node is self.head or (node in wanted and any(x in dependent for x in node.inputs)):
                dependent.update(node.outputs)
                try:
                    parts = _parts_of_head(node, axis) if node is self.head else self._operands(node, dependent)
                    role = self._pick(node, parts) or row_wise.role_of_results(node, parts)
                except RefusalError as refusal:
                    found[node] = refusal
                    continue
                found[node] = parts
                self.roles.update(dict.fromkeys(node.outputs, role))
        return found

    def _pick(self, node: Node, parts: _Parts) -> Part | None:
        """Where a gather's result has its rows, if it picks one number in each; then labels become an operand."""
        if node.name != "gather" or parts[0] is None:
            return None
        found = labels_by_position(node)
        if found is None or found[0] == parts[0].axis:
            return None
        axis, labels = found
        shape = without_axis(node.inputs[0].shape, axis)
        rows = parts[0]._replace(axis=parts[0].axis - (parts[0].axis > axis))
        part = row_wise.reshaped(shape, rows, labels.shape)
        role = row_wise.reshaped(shape, rows, node.outputs[0].shape)
        if part is None or role is None:
            return None
        self._picks[node] = found
        parts[1] = part
        return role

    def _inputs(self, node: Node) -> tuple[Value, ...]:
        return (node.inputs[0], self._picks[node][1]) if node in self._picks else node.inputs

    def _run(self, node: Node, size: int, arrays: Sequence[Any]) -> Sequence[Any]:
        role = self.roles[node.outputs[0]]
        if node not in self._picks:
            return row_wise.run(node, role, size, arrays)
        assert isinstance(role, Part)
        (array, labels), (axis, _) = arrays, self._picks[node]
        labels = jnp.expand_dims(labels.reshape(without_axis(array.shape, axis)), axis)
        mode, fill = node.params["mode"], node.params["fill_value"]
        found = jnp.take_along_axis(array, labels, axis, mode=mode, fill_value=fill)
        return [found.reshape(role.shape(node.outputs[0].shape, size))]

    def _operands(self, node: Node, dependent: set[Value]) -> _Parts:
        """Where the operands have their rows; those from outside like the others, if they have as many."""
        if node.equation.effects:
            raise RefusalError(f"{node.name} on {node.source} has an effect")
        if any(x in dependent and not isinstance(self.roles.get(x), Part) for x in node.inputs):
            raise RefusalError(f"{node.name} on {node.source} needs a sum over all rows first")
        roles = [self.roles.get(x) or _matching(node, x, self.roles) for x in node.inputs]
        return [role if isinstance(role, Part) else None for role in roles]

    def _within(self, operands: dict[Node, _Parts | RefusalError]) -> set[Node]:
        """The nodes that read something of the logits' size, and those between the logits and them."""

        def reads_wide(node: Node) -> bool:
            return any(isinstance(self.roles.get(x), Part) and self.is_wide(x) for x in node.inputs)

        within: set[Node] = {self.head}
        waiting = [node for node in operands if reads_wide(node)]
        while waiting:
            node = waiting.pop()
            if node not in within:
                within.add(node)
                waiting += [x.producer for x in node.inputs if x.producer in operands and x.producer is not None]
        return within

    def _bring(self, value: Value, part: Part | None) -> None:
        """Makes a value known in chunks: computed in each if it is large and cheap, else cut from the whole."""
        if value in self.roles:
            if self.roles[value] != part:
                raise RefusalError("rows are paired with other rows")
            return
        node = value.producer
        if part is None and node is not None and node.name == "transpose":
            # A product takes its operand in any order; outside of the loop, the other order would be one more array.
            self._bring(node.inputs[0], None)
            self.roles[value] = None
            self._inner.add(node)
            return
        if part is None:
            self._shared[value] = None
            return
        if node is not None and self.is_wide(value) and not node.equation.effects and len(node.outputs) == 1:
            parts = row_wise.parts_of_operands(node, part)
            if parts is not None:
                for operand, at in zip(node.inputs, parts, strict=True):
                    self._bring(operand, at)
                self.roles[value] = part
                self._inner.add(node)
                return
        if self.cut.setdefault(value, part) != part:
            raise RefusalError("rows are paired with other rows")

    def step(self, chunk_rows: int) -> Step:
        """The chunked computation; about so many rows of the split axis exist at a time."""
        shared = [x for x in self._shared if not x.is_constant]
        cut = list(self.cut)
        least = max(1, math.ceil(self.rows / chunk_rows))
        # Without a rest, the computation is compiled once instead of twice.
        even = (steps for steps in range(least, 2 * least) if self.rows % steps == 0)
        size = self.rows // next(even, least)
        steps, rest = divmod(self.rows, size)

        def run(*arrays: Any) -> Sequence[Any]:
            fixed = dict(zip(shared, arrays[: len(shared)], strict=True))
            whole = arrays[len(shared) :]
            done = size * steps
            first = [p.cut(x, 0, done, self.rows) if rest else x for x, p in zip(whole, self.cut.values(), strict=True)]
            sums, stacked = self._loop(fixed, cut, first, size, steps)
            if rest:
                last = [p.cut(x, done, self.rows, self.rows) for x, p in zip(whole, self.cut.values(), strict=True)]
                sums, behind = self._chunk(fixed, cut, last, rest, sums)
                stacked = {value: self._appended(value, x, behind[value]) for value, x in stacked.items()}
            return [sums[x].astype(x.dtype) if x in sums else stacked[x] for x in self.exits]

        return Step((*shared, *cut), tuple(self.exits), run)

    def _appended(self, value: Value, first: Any, last: Any) -> Any:
        part = self.roles[value]
        assert isinstance(part, Part)
        before = [
            x.reshape(*x.shape[: part.axis], part.outer, -1, part.inner, *x.shape[part.axis + 1 :])
            for x in (first, last)
        ]
        return lax.concatenate(before, part.axis + 1).reshape(value.shape)

    def _loop(
        self, fixed: dict[Value, Any], cut: list[Value], arrays: Sequence[Any], size: int, steps: int
    ) -> tuple[_Arrays, _Arrays]:
        """The sums over all chunks, and the rows of each joined."""
        chunks = tuple(self.cut[x].chunks(array, size, steps) for x, array in zip(cut, arrays, strict=True))
        added = [x for x in self.exits if self.roles[x] == SUM]
        joined = [x for x in self.exits if self.roles[x] != SUM]

        def one(sums: Any, chunk: Any) -> Any:
            after, rows = self._chunk(fixed, cut, chunk, size, dict(zip(added, sums, strict=True)))
            return tuple(after[x] for x in added), tuple(rows[x] for x in joined)

        zeros = [jnp.zeros(x.shape, _sum_dtype(x.dtype)) for x in added]
        start = tuple(varying_with(zeros, (*arrays, *fixed.values())))
        # Differentiated, every step would keep its logits, together just what the chunks are there to avoid.
        totals, parts = lax.scan(jax.checkpoint(one, prevent_cse=False), start, chunks)
        rows = {}
        for value, stacked in zip(joined, parts, strict=True):
            part = self.roles[value]
            assert isinstance(part, Part)
            rows[value] = part.joined(stacked, size, steps)
        return dict(zip(added, totals, strict=True)), rows

    def _chunk(
        self, fixed: dict[Value, Any], cut: list[Value], arrays: Sequence[Any], size: int, sums: _Arrays
    ) -> tuple[_Arrays, _Arrays]:
        """The sums with those of a chunk added to them, and its rows."""
        known, after = {**fixed, **dict(zip(cut, arrays, strict=True))}, dict(sums)

        def read(value: Value) -> Any:
            return known.get(value, value.constant)

        for node in self.nodes:
            operands = [read(x) for x in self._inputs(node)]
            if node.outputs[0] in sums and is_large_product(node):
                after[node.outputs[0]] = plus_product(node, sums[node.outputs[0]], *operands)
                continue
            known.update(zip(node.outputs, self._run(node, size, operands), strict=True))
            after.update({x: sums[x] + known[x].astype(sums[x].dtype) for x in node.outputs if x in sums})
        return after, {x: known[x] for x in self.exits if x not in sums}


def _parts_of_head(head: Node, axis: int) -> list[Part | None]:
    """Where the operands of the head have the rows that its result has at this axis."""
    contracted, _ = head.params["dimension_numbers"]
    free = [(side, a) for side in (0, 1) for a in range(len(head.inputs[side].shape)) if a not in contracted[side]]
    side, at = free[axis]
    return [Part(at) if i == side else None for i in (0, 1)]


def _matching(node: Node, value: Value, roles: dict[Value, Role]) -> Part | None:
    """Where an operand from outside has the rows that other operands have."""
    others = [(x, roles[x]) for x in node.inputs if isinstance(roles.get(x), Part)]
    other, part = others[0]
    assert isinstance(part, Part)
    if node.name in row_wise.POINTWISE | {"concatenate", "sort"}:
        is_same = len(value.shape) == len(other.shape) and value.shape[part.axis] == other.shape[part.axis]
        return part if is_same else None
    if node.name == "dot_general":
        contracted, batch = node.params["dimension_numbers"]
        side = 0 if node.inputs[0] is value else 1
        for axes in (contracted, batch):
            if part.axis in axes[1 - side]:
                return part._replace(axis=axes[side][list(axes[1 - side]).index(part.axis)])
        return None
    if node.name in ("gather", "scatter-add"):
        return _matching_index(node, value, roles)
    return None


def _matching_index(node: Node, value: Value, roles: dict[Value, Role]) -> Part | None:
    """The same for the operand, the indices or the updates of a gather or a scatter with batch axes."""
    axes, position = row_wise.batch_axes(node), node.inputs.index(value)
    for source, one in enumerate(node.inputs):
        part = roles.get(one)
        if isinstance(part, Part) and part.axis in axes[source]:
            return part._replace(axis=axes[position][axes[source].index(part.axis)])
    return None


def _sum_dtype(dtype: Any) -> Any:
    """Sums of 16 bits are kept in float32."""
    return accumulation_dtype(dtype) if jnp.issubdtype(dtype, jnp.floating) else dtype
