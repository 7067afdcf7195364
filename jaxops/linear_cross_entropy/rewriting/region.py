"""Nodes that treat all rows alike, computed for some rows at a time."""

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax

from jaxops.linear_cross_entropy.rewriting import picks, row_wise
from jaxops.linear_cross_entropy.rewriting.derivatives import among, of_moving, tangents_of
from jaxops.linear_cross_entropy.rewriting.row_wise import SUM, Chunk, Part, Role
from lowering.cost import bodies, inner_jaxprs
from lowering.rewriting.graph import Node, Value, equations, level_of
from lowering.rewriting.ordering import needed
from lowering.rewriting.rules import RefusalError

Parts = list[Part | None]
# Calls of functions with a derivative of the user's own.
_CUSTOM_JVP = "custom_jvp_call"
CUSTOM = frozenset({_CUSTOM_JVP, "custom_vjp_call", "custom_vjp_call_jaxpr"})


class NeedsSumError(RefusalError):
    """A node reads rows, and what only a pass over all rows can know."""

    def __init__(self, node: Node) -> None:
        """Takes the node."""
        super().__init__("needs a sum over all rows first", node)


class Region:
    """Nodes that can be computed for some rows at a time.

    Attributes:
      roles: of each value that is computed, where its rows are, or that all rows are added up.
      cut: the values from outside of which some rows are taken, and where these have them.
      shared: the values from outside that all rows read; a dictionary to keep their order.
      inner: the nodes that are computed.
      calls: of these, the calls of functions with a derivative of the user's own.
    """

    def __init__(self) -> None:
        """Begins without nodes."""
        self.roles: dict[Value, Role] = {}
        self.cut: dict[Value, Part] = {}
        self.shared: dict[Value, None] = {}
        self.inner: set[Node] = set()
        self.calls: dict[Node, Call] = {}
        # Gathers and scatters that number the rows, which each chunk does anew, and where what is read has its rows.
        self._picks: dict[Node, tuple[picks.Pick, Part]] = {}

    def follow(self, nodes: Iterable[Node]) -> dict[Node, Parts | RefusalError]:
        """Finds where operands of nodes that depend on values with a role have their rows, or why that is unknown."""
        found: dict[Node, Parts | RefusalError] = {}
        dependent = set(self.roles)
        for node in nodes:
            if any(x in dependent for x in node.inputs):
                dependent.update(node.outputs)
                try:
                    parts, roles = self._understood(node, dependent)
                except RefusalError as refusal:
                    found[node] = refusal
                    continue
                found[node] = parts
                self.roles.update(zip(node.outputs, roles, strict=True))
        return found

    def take(self, node: Node, followed: dict[Node, Parts | RefusalError]) -> None:
        """Computes one of the nodes that were followed in chunks, and makes known what it reads of others.

        Raises:
          RefusalError: if the node was not understood, or rows do not fit together.
        """
        parts = followed[node]
        if isinstance(parts, RefusalError):
            raise parts
        self.inner.add(node)
        for value, part in zip(self.inputs(node), parts, strict=True):
            if value.producer not in followed:
                self.bring(value, part)

    def bring(self, value: Value, part: Part | None) -> None:
        """Makes a value known in chunks: computed in each if that is wanted and known, else cut from the whole."""
        if value in self.roles:
            if self.roles[value] != part:
                raise RefusalError("rows are paired with other rows")
            return
        if value in (self.shared if part is not None else self.cut):
            raise RefusalError("rows are paired with all rows")
        node: Node | None = value.producer
        parts: Parts | None = None
        if part is None:
            # A product takes its operand in any order; outside of the loop, the other order would be one more array.
            # That is needed where the product's other operand is the same array, cut into rows.
            is_order = node is not None and node.name == "transpose" and node.inputs[0] not in self.cut
            parts = [None] if is_order else None
        elif node is not None and not node.equation.effects and len(node.outputs) == 1 and self.is_pulled(value):
            parts = row_wise.parts_of_operands(node, part) or self._parts_of_scatter(node, part)
        if node is not None and parts is not None:
            for operand, at in zip(self.inputs(node), parts, strict=True):
                self.bring(operand, at)
            self.roles[value] = part
            self.inner.add(node)
        elif part is None:
            self.shared[value] = None
        elif self.cut.setdefault(value, part) != part:
            raise RefusalError("rows are paired with other rows")

    def _parts_of_scatter(self, node: Node, part: Part) -> Parts | None:
        picked = self._pick(node, [part, *(None for _ in node.inputs[1:])]) if node.name in picks.SCATTERS else None
        return None if picked is None else picked[0]

    def is_pulled(self, value: Value) -> bool:
        """Tells whether a value that depends on no rows so far is computed in chunks, if it can be."""
        return True

    def inputs(self, node: Node) -> tuple[Value, ...]:
        """Returns the values that the node reads in a chunk."""
        return (node.inputs[0], self._picks[node][0].labels, *node.inputs[2:]) if node in self._picks else node.inputs

    def operands_of(self, node: Node, chunk: Chunk, known: Callable[[Value], Any]) -> list[Any]:
        """Returns a node's operands in a chunk; where it combines rows, those that an array lacks count for nothing."""
        inputs, arrays = self.inputs(node), [known(x) for x in self.inputs(node)]
        role = self.roles[node.outputs[0]]
        if not isinstance(role, str) or node in self.calls:
            return arrays
        along = zip(arrays, (self.roles.get(x, self.cut.get(x)) for x in inputs), strict=True)
        return [chunk.present(at, x, row_wise.neutral(role, x.dtype)) if isinstance(at, Part) else x for x, at in along]

    def run(self, node: Node, chunk: Chunk, arrays: Sequence[Any]) -> Sequence[Any]:
        """Computes a node's results for a chunk of rows."""
        if node in self.calls:
            return self.calls[node].run(chunk, arrays)
        role = self.roles[node.outputs[0]]
        if node not in self._picks:
            results = row_wise.run(node, role, chunk, arrays)
            before = self.roles.get(node.inputs[0], self.cut.get(node.inputs[0])) if node.name == "pad" else None
            if isinstance(before, Part):
                return [chunk.present(before, results[0], arrays[1])]
            return results
        assert isinstance(role, Part)
        found = picks.run_pick(node, *self._picks[node], chunk, arrays)
        return [found.reshape(chunk.shape(role, node.outputs[0].shape))]

    def all_nodes(self) -> Iterator[Node]:
        """Yields the nodes, and those inside functions with a derivative of their own."""
        yield from self.inner
        for call in self.calls.values():
            yield from call.body.all_nodes()

    def _understood(self, node: Node, dependent: set[Value]) -> tuple[Parts, list[Role]]:
        """Finds where a node's operands and results have their rows."""
        if node.equation.effects:
            raise RefusalError("has an effect", node)
        known = [self.roles.get(x) for x in node.inputs]
        if row_wise.is_linear_in_sum(node, known, [x in dependent for x in node.inputs]):
            return [None for _ in node.inputs], [SUM]
        if any(x in dependent and not isinstance(self.roles.get(x), Part) for x in node.inputs):
            raise NeedsSumError(node)
        parts = [at if isinstance(at, Part) else None for at in known]
        if node.name in CUSTOM:
            call = self.calls[node] = Call(node, parts)
            return call.body.parts, call.body.results
        parts, role = self._pick(node, parts) or self._windowed(node, parts) or row_wise.followed(node, parts)
        return parts, [role for _ in node.outputs]

    def _windowed(self, node: Node, parts: Parts) -> tuple[Parts, Role] | None:
        """Follows a slice or a padding of rows."""
        role = None if parts[0] is None else row_wise.windowed(node, parts[0])
        return role and (parts, role)

    def _pick(self, node: Node, parts: Parts) -> tuple[Parts, Role] | None:
        """Follows a gather or scatter that numbers the rows; then labels become an operand."""
        if node.name not in ("gather", *picks.SCATTERS):
            return None
        found = (self._picked(node, parts, pick) for pick in picks.picks_by_position(node))
        return next((one for one in found if one is not None), None)

    def _picked(self, node: Node, parts: Parts, pick: picks.Pick) -> tuple[Parts, Role] | None:
        shape, updates = row_wise.without_axis(node.inputs[0].shape, pick.axis), node.inputs[2:]
        rows: Part | None
        if parts[0] is not None:
            if parts[0].axis == pick.axis:
                return None
            rows = parts[0]._replace(axis=parts[0].axis - (parts[0].axis > pick.axis))
            read = pick.moved(rows, shape, 1)
        else:
            known = zip(updates, parts[2:], strict=True)
            read = next((row_wise.reshaped(x.shape, part, pick.shape) for x, part in known if part is not None), None)
            rows = read and pick.moved(read, shape, -1)
        if rows is None or read is None or (node.name == "scatter" and pick.shape != shape):
            return None
        array = rows._replace(axis=rows.axis + (rows.axis >= pick.axis))
        others = [row_wise.reshaped(pick.shape, read, x.shape) for x in (pick.labels, *updates)]
        role = array if updates else row_wise.reshaped(pick.shape, read, node.outputs[0].shape)
        # What the logits decide, such as labels, has its rows where they are already known.
        operands = zip((node.inputs[0], pick.labels, *updates), (array, *others), strict=True)
        if role is None or None in others or any(self.roles.get(x, at) != at for x, at in operands):
            return None
        self._picks[node] = pick, read
        return [array, *others], role


class RowFunction(Region):
    """A jaxpr that treats all rows of its arguments alike.

    Attributes:
      parts: where its arguments have their rows; None for what all rows share.
      results: where its results have them; None for what all rows share.
    """

    def __init__(self, closed: Any, parts: Sequence[Part | None], wanted: Part | None = None) -> None:
        """Follows the rows of the arguments.

        Args:
          closed: the jaxpr.
          parts: where the arguments have their rows, where that is known.
          wanted: where results have them that depend on no such argument.

        Raises:
          RefusalError: if it is not known to treat all rows alike.
        """
        super().__init__()
        level = self._level = level_of(closed, lambda _: True, lambda _: False)
        nodes, arguments = needed(level, ()), level.arguments
        self.roles.update({x: part for x, part in zip(arguments, parts, strict=True) if part is not None})
        followed = self.follow(node for node in level.nodes if node in nodes)
        for node in followed:
            self.take(node, followed)
        for value in level.results:
            if value not in self.roles:
                self.bring(value, wanted)
        for value in self.cut:
            if value.is_constant:
                raise RefusalError("an array with a number for each row is written in the code")
            if value.producer is not None:
                name, line = value.producer.name, value.producer.source
                raise RefusalError(f"{name} on {line} is not known to treat all rows alike")
        waiting, before = [*self.shared], set[Node]()
        while waiting:
            producer = waiting.pop().producer
            if producer is not None and producer not in before:
                before.add(producer)
                waiting += producer.inputs
        self._nodes = [node for node in level.nodes if node in self.inner or node in before]
        self.parts: Parts = [
            at if isinstance(at := self.roles.get(x, self.cut.get(x)), Part) else None for x in arguments
        ]
        self.results = [self.roles.get(x, self.cut.get(x)) for x in level.results]

    def evaluate(self, chunk: Chunk, arrays: Sequence[Any]) -> list[Any]:
        """Computes the results for a chunk of rows."""
        known = dict(zip(self._level.arguments, arrays, strict=True))

        def read(value: Value) -> Any:
            return value.constant if value.is_constant else known[value]

        for node in self._nodes:
            if node in self.inner:
                results = self.run(node, chunk, self.operands_of(node, chunk, read))
            else:
                results = node.run(*map(read, node.inputs))
            known.update(zip(node.outputs, results, strict=True))
        return [read(x) for x in self._level.results]


class Call:
    """Call of a function with a derivative of the user's own.

    Attributes:
      node: the call.
      body: what it computes, but for a derivative.
    """

    def __init__(self, node: Node, parts: Parts) -> None:
        """Takes the call and what is known of where its operands have their rows; the rest follows from its body."""
        self.node, self.body = node, RowFunction(bodies(node.equation)[0], parts)
        if any(role is None for role in self.body.results):
            raise RefusalError("returns what all rows share", node)

    def run(self, chunk: Chunk, operands: Sequence[Any]) -> Sequence[Any]:
        """Computes the results for a chunk of rows; tangents are those of a rule for `jax.custom_jvp`."""
        call = jax.custom_jvp(lambda *arrays: tuple(self.body.evaluate(chunk, arrays)))
        call.defjvp(functools.partial(self._with_tangents, chunk))
        return call(*operands) if self.node.name == _CUSTOM_JVP else self.body.evaluate(chunk, operands)

    def _with_tangents(self, chunk: Chunk, operands: Sequence[Any], dots: Sequence[Any]) -> Any:
        found = self._rule.evaluate(chunk, [*operands, *of_moving(operands, dots)])
        results, tangents = found[: len(self.node.outputs)], found[len(self.node.outputs) :]
        return tuple(results), among(results, tangents)

    @functools.cached_property
    def _rule(self) -> "RowFunction":
        avals = [x.aval for x in self.node.inputs]
        jaxpr = jax.make_jaxpr(functools.partial(tangents_of, self.node.run))(avals, of_moving(avals, avals))
        return RowFunction(jaxpr, [*self.body.parts, *of_moving(avals, self.body.parts)])


def equations_within(node: Node) -> Iterator[Any]:
    """Yields the node's equation, and those in the body of a function with a derivative of its own."""
    yield node.equation
    for body in inner_jaxprs(node.equation) if node.name in CUSTOM else ():
        yield from equations(body)
