"""A part of a level that treats all rows alike, from logits to numbers per row and sums over rows, chunk by chunk."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxops._checks.dtypes import accumulation_dtype
from jaxops._primitive.sharding import varying_with
from jaxops._primitive.signature import names_of
from jaxops.linear_cross_entropy.rewriting import row_wise
from jaxops.linear_cross_entropy.rewriting.accumulated import plus_product
from jaxops.linear_cross_entropy.rewriting.forward_gradients import Planning, with_gradients
from jaxops.linear_cross_entropy.rewriting.region import Parts, Region
from jaxops.linear_cross_entropy.rewriting.row_wise import SUM, Part, Role
from lowering.rewriting.graph import Level, Node, Value
from lowering.rewriting.rules import RefusalError
from lowering.rewriting.schedule import Step, Task

_Arrays = dict[Value, Any]


class Cone(Region):
    """The nodes that are computed chunk by chunk.

    Attributes:
      roles: of each value that the chunks compute, where its rows are, or that it adds them up.
      cut: the values from outside that each chunk takes its own rows of, and the axes of those rows.
      nodes: in order.
      exits: the values that are read outside.
      number: the last exit that adds rows up to one number with a derivative; None if there is none.
    """

    def __init__(
        self, level: Level, wanted: set[Task], head: Node, axis: int, classes: int, *, to_number: bool = False
    ) -> None:
        """Follows the logits of a matrix product, whose result is split into chunks along `axis`.

        With `to_number` it goes on beyond numbers per row, to the last number that they are added up to.
        """
        super().__init__()
        self.head = head
        self.classes = classes
        self.axis = axis
        self.rows = head.outputs[0].shape[axis]
        self.cut: dict[Value, Part] = {}
        self._inner: set[Node] = set()
        self._shared: dict[Value, None] = {}
        self.roles[head.outputs[0]] = Part(axis)
        parts = row_wise.parts_of_operands(head, Part(axis))
        assert parts is not None
        operands = {head: parts, **self.follow(node for node in level.nodes if node in wanted)}
        self.number = _last_number(operands, self.roles) if to_number else None
        within = self._within(operands)
        computed = {x for node in operands for x in node.outputs}
        for node in level.nodes:
            if node in within:
                found = operands[node]
                if isinstance(found, RefusalError):
                    raise found
                self._inner.add(node)
                for value, part in zip(self.inputs(node), found, strict=True):
                    if value not in computed:
                        self._bring(value, part)
        self.nodes = [node for node in level.nodes if node in self._inner]
        outside = [node for node in level.nodes if node in wanted and node not in within]
        read = {x for node in outside for x in node.inputs} | set(level.results)
        self.exits = [x for node in self.nodes if node in within for x in node.outputs if x in read]

    def is_wide(self, value: Value) -> bool:
        """Tells whether a value is about as large as the logits."""
        return value.size > self.head.outputs[0].size // 2

    def _is_made_in_chunks(self, value: Value) -> bool:
        """Tells whether a value is of the logits' size, or has a number for each row of such an array."""
        node = value.producer
        if node is None or node.equation.effects or len(node.outputs) > 1:
            return False
        is_row = self.is_row(value) and any(self.is_row(x) or self.is_wide(x) for x in node.inputs)
        return self.is_wide(value) or (value.follows_product and is_row)

    def is_row(self, value: Value) -> bool:
        """Tells whether a value has at most one number for each row of the logits."""
        return value.size * self.classes <= self.head.outputs[0].size

    def _within(self, operands: dict[Node, Parts | RefusalError]) -> set[Node]:
        """Returns the nodes that read something of the logits' size, and those between the logits and them."""

        def reads_wide(node: Node) -> bool:
            return any(isinstance(self.roles.get(x), Part) and self.is_wide(x) for x in node.inputs)

        within: set[Node] = {self.head}
        waiting = [node for node in operands if reads_wide(node)]
        if self.number is not None and self.number.producer is not None:
            waiting.append(self.number.producer)
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
        if value in (self._shared if part is not None else self.cut):
            raise RefusalError("rows are paired with all rows")
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
        if node is not None and self._is_made_in_chunks(value):
            parts = row_wise.parts_of_operands(node, part)
            if parts is not None:
                for operand, at in zip(node.inputs, parts, strict=True):
                    self._bring(operand, at)
                self.roles[value] = part
                self._inner.add(node)
                return
        if self.cut.setdefault(value, part) != part:
            raise RefusalError("rows are paired with other rows")

    def step(self, chunk_rows: int, differentiated: Planning | None = None) -> Step:
        """Returns the chunked computation; about so many rows of the split axis exist at a time.

        With a number, its gradients are computed in the same pass, as `differentiated` plans it.
        """
        # A constant that is being differentiated or mapped is an operand like any other.
        shared = [x for x in self._shared if not x.is_constant or isinstance(x.constant, jax.core.Tracer)]
        cut = list(self.cut)
        inputs, outputs = (*shared, *cut), tuple(self.exits)
        least = max(1, math.ceil(self.rows / chunk_rows))
        # Without a rest, the computation is compiled once instead of twice.
        devices = _devices_along(self.head.outputs[0].aval, self.axis)
        even = (steps for steps in range(least, 2 * least) if self.rows % (steps * devices) == 0)
        size = max(1, self.rows // next(even, least) // devices) * devices
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

        def whole(*arrays: Any) -> Sequence[Any]:
            fixed = dict(zip(shared, arrays[: len(shared)], strict=True))
            zeros = {x: jnp.zeros(x.shape, _sum_dtype(x.dtype)) for x in self.exits if self.roles[x] == SUM}
            sums, stacked = self._chunk(fixed, cut, arrays[len(shared) :], self.rows, zeros)
            return [sums[x].astype(x.dtype) if x in sums else stacked[x] for x in self.exits]

        if differentiated is not None and self.number is not None:
            return Step(inputs, outputs, with_gradients(run, whole, outputs.index(self.number), differentiated))
        return Step(inputs, outputs, run)

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
        """Returns the sums over all chunks, and the rows of each joined."""
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
        """Adds a chunk to the sums; returns them and its rows."""
        known, after = {**fixed, **dict(zip(cut, arrays, strict=True))}, dict(sums)

        def read(value: Value) -> Any:
            return known.get(value, value.constant)

        for node in self.nodes:
            operands = [read(x) for x in self.inputs(node)]
            if node.outputs[0] in sums and node.name == "dot_general":
                after[node.outputs[0]] = plus_product(node, sums[node.outputs[0]], *operands)
                continue
            known.update(zip(node.outputs, self.run(node, size, operands), strict=True))
            after.update({x: sums[x] + known[x].astype(sums[x].dtype) for x in node.outputs if x in sums})
        return after, {x: known[x] for x in self.exits if x not in sums}


def _last_number(operands: dict[Node, Parts | RefusalError], roles: dict[Value, Role]) -> Value | None:
    """Returns the last sum over rows that is a single floating-point number."""
    values = (x for node in operands for x in node.outputs if roles.get(x) == SUM and x.shape == ())
    return next(iter([x for x in values if jnp.issubdtype(x.dtype, jnp.floating)][::-1]), None)


def _devices_along(aval: Any, axis: int) -> int:
    """Counts the devices of an explicit mesh that share an array's axis; each chunk has as many rows on each."""
    mesh, spec = aval.sharding.mesh, aval.sharding.spec
    return math.prod(mesh.shape[name] for name in names_of(spec[axis] if axis < len(spec) else None))


def _sum_dtype(dtype: Any) -> Any:
    """Returns the dtype in which a sum is kept: float32 for floats of 16 bits."""
    return accumulation_dtype(dtype) if jnp.issubdtype(dtype, jnp.floating) else dtype
