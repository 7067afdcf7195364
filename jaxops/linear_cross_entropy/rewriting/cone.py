"""A part of a level that treats all rows alike, from logits to numbers per row and sums over rows, chunk by chunk."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxops._checks.dtypes import accumulation_dtype
from jaxops._primitive.sharding import explicit_mesh, varying_with
from jaxops._primitive.signature import names_of
from jaxops.linear_cross_entropy import chunk_sizes
from jaxops.linear_cross_entropy.gradient_products import added_in_blocks
from jaxops.linear_cross_entropy.rewriting import picks, row_wise
from jaxops.linear_cross_entropy.rewriting.derivatives import (
    Run,
    cotangents_of,
    is_linear,
    tangents_of,
    with_gradients,
    with_users_rules,
)
from jaxops.linear_cross_entropy.rewriting.region import NeedsSumError, Parts, Region
from jaxops.linear_cross_entropy.rewriting.row_wise import MAX, MIN, SUM, Chunk, Part, Role, parts_of_operands
from lowering.rewriting.graph import Level, Node, Value, backward, forward, level_of, size_of
from lowering.rewriting.ordering import Step, Task, evaluate, needed, ordered
from lowering.rewriting.rules import RefusalError

# A value that has at most a sixteenth of the rows is computed by itself where all of it is read.
_FEW_ROWS = 16
# Each pass computes the product again. The gradient of a loss whose logits are divided by their deviation takes five.
_MOST_PASSES = 5
_Arrays = dict[Value, Any]
# What combines the shares that chunks have in a result.
_COMBINED: dict[Any, Callable[[Any, Any], Any]] = {SUM: jnp.add, MAX: jnp.maximum, MIN: jnp.minimum}


class Cone(Region):
    """The nodes that are computed chunk by chunk.

    Attributes:
      nodes: in order.
      exits: the values that are read outside.
      samples: those of them that are a few rows as a whole, such as the last logits of each sequence.
      number: the last exit that adds rows up to one number with a derivative; None if there is none.
    """

    def __init__(
        self, level: Level, wanted: frozenset[Task], head: Node, axis: int, classes: int, *, to_number: bool = False
    ) -> None:
        """Follows the logits of a matrix product, whose result is split into chunks along `axis`.

        With `to_number` it goes on beyond numbers per row, to the last number that they are added up to. What needs a
        sum over all rows first, such as a variance, is left to another pass.
        """
        super().__init__()
        self.head, self.axis, self.classes = head, axis, classes
        self.rows = head.outputs[0].shape[axis]
        self.roles[head.outputs[0]] = Part(axis)
        parts = parts_of_operands(head, Part(axis))
        assert parts is not None
        key = "between", head, wanted
        if key not in level.memo:
            level.memo[key] = self._between(wanted)
        followed = {head: parts, **self.follow(node for node in level.nodes if node in level.memo[key])}
        self._later = {node for node, found in followed.items() if isinstance(found, NeedsSumError)}
        self.number = _last_number(followed, self.roles) if to_number else None
        within = self._within(followed)
        for node in level.nodes:
            if node in within:
                self.take(node, followed)
        self.nodes = [node for node in level.nodes if node in self.inner]
        results = set(level.results)
        outside = (x for node in self.nodes if node in within for x in node.outputs)
        left = {x: [y for y in x.users if y in wanted and y not in within] for x in outside}
        # The next pass computes these again.
        again = {x for x, users in left.items() if users and self.is_wide(x) and self._later.issuperset(users)}
        self.exits = [x for x, users in left.items() if x in results or (users and x not in again)]
        self.samples = [x for x in self.exits if self._is_sample(self.roles[x])]

    @property
    def has_labels(self) -> bool:
        """Tells whether rows read integers of their own."""
        return any(x.dtype.kind in "iu" and not picks.is_known(x) for x in self.cut if hasattr(x.dtype, "kind"))

    def is_wide(self, value: Value) -> bool:
        """Tells whether a value is about as large as the logits, or has a number for each class of many rows."""
        part = self.roles.get(value)
        share = _FEW_ROWS if isinstance(part, Part) and part.lacks else 2
        return value.size > self.head.outputs[0].size // share

    @property
    def kept(self) -> list[Value]:
        """Arrays of the logits' size that exist as a whole because they are not computed by rows."""
        return [x for x in self.cut if x.producer is not None and self.is_wide(x)]

    def _is_sample(self, role: Role) -> bool:
        return isinstance(role, Part) and _FEW_ROWS * (self.rows - role.lacks) <= self.rows

    def is_row(self, value: Value) -> bool:
        """Tells whether a value has at most one number for each row of the logits."""
        return value.size * self.classes <= self.head.outputs[0].size

    def is_pulled(self, value: Value) -> bool:
        """Tells whether a value is of the logits' size, or has a number for each row of such an array."""
        operands = () if value.producer is None else value.producer.inputs
        is_row = self.is_row(value) and any(self.is_row(x) or self.is_wide(x) for x in operands)
        return self.is_wide(value) or (is_row and (value.follows_product or self._is_of_wide(value)))

    def _is_of_wide(self, value: Value) -> bool:
        """Tells whether numbers of rows are computed from something of the logits' size."""
        return any(map(self.is_wide, backward(value, lambda _, x: self.is_row(x) or self.is_wide(x))))

    def _between(self, wanted: frozenset[Task]) -> set[Node]:
        """Returns the nodes that lead from the logits to what reads something of their size, or to numbers.

        No other node is computed in chunks, and there may be thousands, as a backward pass depends on logits as well.
        """
        dependent = forward(self.head.outputs, lambda node, _: node in wanted)
        nodes = {node for x in dependent for node in x.users if node in wanted}
        waiting = [node for node in nodes if any(x in dependent and self.is_wide(x) for x in node.inputs)]
        waiting += [node for node in nodes if any(x.shape == () for x in node.outputs)]
        found = set[Node]()
        while waiting:
            node = waiting.pop()
            if node in nodes and node not in found:
                found.add(node)
                waiting += [x.producer for x in node.inputs if x.producer is not None]
        return found

    def _within(self, followed: dict[Node, Parts | RefusalError]) -> set[Node]:
        """Returns the nodes that read something of the logits' size, and those between the logits and them."""

        def reads_wide(node: Node) -> bool:
            return any(isinstance(self.roles.get(x), Part) and self.is_wide(x) for x in node.inputs)

        within: set[Node] = {self.head}
        waiting = [node for node in followed if node not in self._later and reads_wide(node)]
        if self.number is not None and self.number.producer is not None:
            waiting.append(self.number.producer)
        while waiting:
            node = waiting.pop()
            if node not in within:
                within.add(node)
                waiting += [x.producer for x in node.inputs if x.producer in followed and x.producer is not None]
        return within

    @property
    def operands(self) -> tuple[Value, ...]:
        """The values from outside."""
        # A constant that is being differentiated or mapped is an operand like any other.
        shared = (x for x in self.shared if not x.is_constant or isinstance(x.constant, jax.core.Tracer))
        return (*shared, *self.cut)

    def step(self, chunk_rows: int) -> Step:
        """Returns the chunked computation; about so many rows of the split axis exist at a time.

        The gradients of the `number`, if there is one, are computed in the same pass if rows have labels. Other losses,
        such as divergences, compare several arrays of logits, all of which would exist beside the gradients.
        """
        run = self._run_in_chunks(chunk_rows)
        chunked = functools.partial(self._of_derivative, chunk_rows=chunk_rows)
        if not self._is_jvp:
            run = with_users_rules(run, self._run_whole, chunked)
        if self.number is not None and self.has_labels:
            run = with_gradients(run, self._run_whole, self.exits.index(self.number), chunked)
        return Step(self.operands, tuple(self.exits), run)

    def check_users_rules(self, chunk_rows: int) -> None:
        """Looks whether derivatives by the user's rules are computed in chunks as well.

        Raises:
          RefusalError: if they are not.
        """
        if not self.calls:
            return
        fn, others = (tangents_of, self.operands) if self._is_jvp else (cotangents_of, self.exits)
        avals = [x.aval for x in self.operands]
        dots = [x.aval for x in others if jnp.issubdtype(x.dtype, jnp.inexact)]
        is_outside = not jax.sharding.get_abstract_mesh().manual_axes
        try:
            if is_outside and any(x.manual_axis_type.varying for x in (*avals, *dots)):
                raise NameError
            jaxpr = jax.make_jaxpr(functools.partial(fn, self._run_whole))(avals, dots)
        except NameError:
            # Outside of a shard_map, the axes of its body have no names.
            call = next(iter(self.calls))
            what = f"{call.name} on {call.source}"
            raise RefusalError(f"{what} is inside of a shard_map: rewrite the function that is mapped") from None
        if self.number is not None and not self._is_jvp and not is_linear(jaxpr, len(dots)):
            raise RefusalError("the user's derivative is not linear in the cotangents")
        self._of_derivative(jaxpr, chunk_rows)

    @property
    def _is_jvp(self) -> bool:
        """Tells whether no call has a rule for cotangents alone; chunks take tangents by the rules of the others."""
        return all(node.name == "custom_jvp_call" for node in self.calls)

    def _run_in_chunks(self, chunk_rows: int) -> Run:
        least = max(1, math.ceil(self.rows / chunk_rows))
        # Without a rest, the computation is compiled once instead of twice.
        devices = _devices_along(self.head.outputs[0].aval, self.axis)
        even = (steps for steps in range(least, 2 * least) if self.rows % (steps * devices) == 0)
        size = max(1, self.rows // next(even, least) // devices) * devices
        steps, rest = divmod(self.rows, size)

        def run(*arrays: Any) -> Sequence[Any]:
            known = dict(zip(self.operands, arrays, strict=True))
            fixed, done = {x: known[x] for x in known if x not in self.cut}, size * steps
            rows = {x: part.filled(known[x]) for x, part in self.cut.items()}
            positions = jnp.arange(self.rows)
            first = {x: self.cut[x].cut(array, 0, done, self.rows) if rest else array for x, array in rows.items()}
            sums, stacked = self._loop(fixed, first, size, steps, positions)
            if rest:
                last = {x: self.cut[x].cut(array, done, self.rows, self.rows) for x, array in rows.items()}
                sums, behind = self._chunk(fixed | last, Chunk(rest, self.rows, positions[done:]), sums)
                stacked = {value: self._appended(value, x, behind[value]) for value, x in stacked.items()}
            found = {x: self._part(x).trimmed(array, self.rows) for x, array in stacked.items()}
            for value in self.samples:
                part = self._part(value)
                ends = part.lacks_first, self.rows - part.lacks_last
                few = {x: self.cut[x].cut(array, *ends, self.rows) for x, array in rows.items()}
                chunk = Chunk(ends[1] - ends[0], self.rows, positions[slice(*ends)])
                found[value] = self._chunk(fixed | few, chunk, sums)[1][value]
            return self._results(sums, found)

        return run

    def _run_whole(self, *arrays: Any) -> Sequence[Any]:
        starts = {x: self._start(x) for x in self.exits if self.roles[x] in _COMBINED}
        chunk = Chunk(self.rows, self.rows)
        return self._results(*self._chunk(dict(zip(self.operands, arrays, strict=True)), chunk, starts))

    def _part(self, value: Value) -> Part:
        part = self.roles[value]
        assert isinstance(part, Part)
        return part

    def _start(self, value: Value) -> Any:
        """Returns what a chunk's share of a value is combined with first."""
        role = self.roles[value]
        assert isinstance(role, str)
        dtype = _sum_dtype(value.dtype) if role == SUM else value.dtype
        return jnp.full(value.shape, row_wise.neutral(role, dtype), dtype)

    def _results(self, sums: _Arrays, rows: _Arrays) -> list[Any]:
        return [sums[x].astype(x.dtype) if x in sums else rows[x] for x in self.exits]

    def _of_derivative(self, jaxpr: Any, chunk_rows: int) -> Run:
        """Returns how to compute a derivative of the cone in chunks of rows.

        Raises:
          RefusalError: if that is not known.
        """
        level = level_of(jaxpr, lambda _: True, lambda aval: size_of(aval) > chunk_sizes.SIZES.logits)
        wanted, logits = needed(level, ()), self.head.outputs[0]
        dims = self.head.params["dimension_numbers"]
        products = (node for node in level.named("dot_general") if node in wanted)
        alike = (x for x in products if (x.outputs[0].shape, x.params["dimension_numbers"]) == (logits.shape, dims))
        head = next(alike, None)
        if head is None:
            raise RefusalError("its derivative is not known to treat all rows alike")

        def one_pass(wanted: frozenset[Task]) -> Step:
            return Cone(level, wanted, head, self.axis, self.classes).step(chunk_rows)

        return functools.partial(_evaluated, level, ordered(level, passes(level, (), head, one_pass)))

    def _appended(self, value: Value, first: Any, last: Any) -> Any:
        part = self._part(value)
        before = [
            x.reshape(*x.shape[: part.axis], part.outer, -1, part.inner, *x.shape[part.axis + 1 :])
            for x in (first, last)
        ]
        return lax.concatenate(before, part.axis + 1).reshape(part.shape(value.shape, self.rows))

    def _loop(self, fixed: _Arrays, cut: _Arrays, size: int, steps: int, positions: Any) -> tuple[_Arrays, _Arrays]:
        """Returns the sums over all chunks, and the rows of each joined."""
        chunks = tuple(self.cut[x].chunks(array, size, steps) for x, array in cut.items())
        counted = Part(0).chunks(positions[: size * steps], size, steps)
        added = [x for x in self.exits if self.roles[x] in _COMBINED]
        joined = [x for x in self.exits if self.roles[x] not in _COMBINED and x not in self.samples]

        def one(sums: Any, given: Any) -> Any:
            known = fixed | dict(zip(cut, given[1], strict=True))
            after, rows = self._chunk(known, Chunk(size, self.rows, given[0]), dict(zip(added, sums, strict=True)))
            return tuple(after[x] for x in added), tuple(rows[x] for x in joined)

        start = tuple(varying_with([self._start(x) for x in added], (*cut.values(), *fixed.values())))
        # Differentiated, every step would keep its logits, together just what the chunks are there to avoid.
        totals, parts = lax.scan(jax.checkpoint(one, prevent_cse=False), start, (counted, chunks))
        rows = {}
        for value, stacked in zip(joined, parts, strict=True):
            rows[value] = self._part(value).joined(stacked, size, steps)
        return dict(zip(added, totals, strict=True)), rows

    def _chunk(self, known: _Arrays, chunk: Chunk, sums: _Arrays) -> tuple[_Arrays, _Arrays]:
        """Adds a chunk to the sums; returns them and its rows."""
        known, after = dict(known), dict(sums)

        def read(value: Value) -> Any:
            return known.get(value, value.constant)

        for node in self.nodes:
            operands = self.operands_of(node, chunk, read)
            if node.outputs[0] in sums and node.name == "dot_general":
                after[node.outputs[0]] = _plus_product(node, chunk, sums[node.outputs[0]], *operands)
                continue
            # All rows are taken to be differentiated, by the user's rule.
            is_whole_call = node in self.calls and chunk.is_whole
            found = node.run(*operands) if is_whole_call else self.run(node, chunk, operands)
            known.update(zip(node.outputs, found, strict=True))
            shares = {x: known[x].astype(sums[x].dtype) for x in node.outputs if x in sums}
            after.update({x: _COMBINED[self.roles[x]](sums[x], share) for x, share in shares.items()})
        return after, {x: known[x] for x in self.exits if x not in sums}


def passes(level: Level, taken: Sequence[Step], head: Node, one_pass: Callable[[frozenset[Task]], Step]) -> list[Step]:
    """Returns steps that compute what depends on logits, by a function that makes one for what is wanted.

    Raises:
      RefusalError: if several are not enough.
    """
    steps: list[Step] = []
    while head in (wanted := needed(level, [*taken, *steps])):
        if len(steps) == _MOST_PASSES:
            raise RefusalError("the logits are used elsewhere")
        steps.append(one_pass(wanted))
    return steps


def _last_number(operands: dict[Node, Parts | RefusalError], roles: dict[Value, Role]) -> Value | None:
    """Returns the last sum over rows that is a single floating-point number."""
    values = (x for node in operands for x in node.outputs if roles.get(x) == SUM and x.shape == ())
    return next(iter([x for x in values if jnp.issubdtype(x.dtype, jnp.floating)][::-1]), None)


def _plus_product(node: Node, chunk: Chunk, total: Any, *operands: Any) -> Any:
    """Adds the product of a node for these operands to a total, in the total's dtype."""
    contracted, batch = node.params["dimension_numbers"]
    # In the dtype of the sum: 16 bits would round the share of each chunk.
    params = {**node.params, "preferred_element_type": total.dtype}

    def whole(total: Any, *operands: Any) -> Any:
        with node.equation.ctx.manager:
            return total + node.equation.primitive.bind(*operands, **params)

    def by_blocks(total: Any, *operands: Any) -> Any:
        first = (jnp.moveaxis(x, axes, range(len(axes))) for x, axes in zip(operands, contracted, strict=True))
        lhs, rhs = (x.reshape(*x.shape[: len(contracted[0])], -1) for x in first)
        return added_in_blocks(total.reshape(lhs.shape[-1], -1), lhs, rhs).reshape(total.shape)

    # What is never run, but only differentiated, has no branches by platform.
    if batch[0] or explicit_mesh(operands) is not None or chunk.is_whole:
        return whole(total, *operands)
    return lax.platform_dependent(total, *operands, cpu=by_blocks, default=whole)


def _devices_along(aval: Any, axis: int) -> int:
    """Counts the devices of an explicit mesh that share an array's axis; each chunk has as many rows on each."""
    mesh, spec = aval.sharding.mesh, aval.sharding.spec
    return math.prod(mesh.shape[name] for name in names_of(spec[axis] if axis < len(spec) else None))


def _sum_dtype(dtype: Any) -> Any:
    """Returns the dtype in which a sum is kept: float32 for floats of 16 bits."""
    return accumulation_dtype(dtype) if jnp.issubdtype(dtype, jnp.floating) else dtype


def _evaluated(level: Level, order: Sequence[Task], *arrays: Any) -> list[Any]:
    return evaluate(level, order, *arrays)
