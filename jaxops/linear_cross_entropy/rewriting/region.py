"""Nodes that treat all rows alike, one by one or in functions with a derivative of their own, a chunk at a time."""

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxops.linear_cross_entropy.rewriting import picks, row_wise
from jaxops.linear_cross_entropy.rewriting.picks import without_axis
from jaxops.linear_cross_entropy.rewriting.row_wise import SUM, Part, Role, only_number
from lowering.cost import bodies, inner_jaxprs
from lowering.rewriting.graph import Node, Value, equations, level_of
from lowering.rewriting.rules import RefusalError
from lowering.rewriting.schedule import needed

Parts = list[Part | None]
_CUSTOM_JVP = "custom_jvp_call"
_CUSTOM = frozenset({_CUSTOM_JVP, "custom_vjp_call", "custom_vjp_call_jaxpr"})


class Region:
    """Nodes that can be computed for some rows at a time.

    Attributes:
      roles: of each value that the chunks compute, where its rows are, or that it adds them up.
    """

    def __init__(self, callers: frozenset[str] = frozenset()) -> None:
        """Begins without nodes; for `callers`, see `OwnDerivative`."""
        self._callers = callers
        self.roles: dict[Value, Role] = {}
        # Gathers that number the rows, which each chunk does anew: along which axis they pick, and the labels.
        self._picks: dict[Node, tuple[int, Value]] = {}
        self._own: dict[Node, OwnDerivative] = {}

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

    def inputs(self, node: Node) -> tuple[Value, ...]:
        """Returns the values that the node reads in a chunk."""
        return (node.inputs[0], self._picks[node][1]) if node in self._picks else node.inputs

    def run(self, node: Node, size: int, arrays: Sequence[Any]) -> Sequence[Any]:
        """Computes a node's results for a chunk of so many rows."""
        if node in self._own:
            return self._own[node].run(size, arrays)
        role = self.roles[node.outputs[0]]
        if node not in self._picks:
            return row_wise.run(node, role, size, arrays)
        assert isinstance(role, Part)
        (array, labels), (axis, _) = arrays, self._picks[node]
        return [picks.picked(node, axis, array, labels).reshape(role.shape(node.outputs[0].shape, size))]

    def with_bodies(self, nodes: Iterable[Node]) -> list[Node]:
        """Lists the nodes, and those inside functions with a derivative of their own."""
        return [one for node in nodes for one in (node, *(self._own[node].nodes() if node in self._own else ()))]

    def _understood(self, node: Node, dependent: set[Value]) -> tuple[Parts, list[Role]]:
        """Finds where a node's operands and results have their rows."""
        if node.equation.effects:
            raise RefusalError(f"{node.name} on {node.source} has an effect")
        known = [self.roles.get(x) for x in node.inputs]
        if row_wise.is_linear_in_sum(node, known, [x in dependent for x in node.inputs]):
            return [None for _ in node.inputs], [SUM]
        if any(x in dependent and not isinstance(self.roles.get(x), Part) for x in node.inputs):
            raise RefusalError(f"{node.name} on {node.source} needs a sum over all rows first")
        parts = [at if isinstance(at, Part) else None for at in known]
        if node.name in _CUSTOM:
            own = self._own[node] = OwnDerivative(node, parts, self._callers)
            return own.parts, own.roles
        parts, role = self._pick(node, parts) or row_wise.followed(node, parts)
        return parts, [role for _ in node.outputs]

    def _pick(self, node: Node, parts: Parts) -> tuple[Parts, Role] | None:
        """Follows a gather that picks one number in each row; then labels become an operand."""
        if node.name != "gather" or parts[0] is None:
            return None
        found = picks.labels_by_position(node)
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
        return [parts[0], part], role


class RowFunction(Region):
    """A jaxpr that treats all rows of its arguments alike.

    Attributes:
      parts: where its arguments have their rows; None for what all rows share.
      results: where its results have them.
    """

    def __init__(
        self, closed: Any, parts: Sequence[Part | None], wanted: Sequence[Role], callers: frozenset[str]
    ) -> None:
        """Follows the rows of the arguments.

        Args:
          closed: the jaxpr.
          parts: where the arguments have their rows, where that is known.
          wanted: the roles that the results must have; none if that is not known.
          callers: see `OwnDerivative`.

        Raises:
          RefusalError: if it is not known to treat all rows alike.
        """
        super().__init__(callers)
        self._level = level_of(closed, lambda _: True, lambda _: False)
        nodes = needed(self._level, ())
        arguments = self._level.arguments
        self.roles.update({x: part for x, part in zip(arguments, parts, strict=True) if part is not None})
        self._by_row: set[Node] = set()
        self._shared: set[Node] = set()
        operands = self.follow(node for node in self._level.nodes if node in nodes)
        for node, found in operands.items():
            if isinstance(found, RefusalError):
                raise found
            self._by_row.add(node)
            for value, part in zip(self.inputs(node), found, strict=True):
                if value.producer not in operands:
                    self._bring(value, part)
        unknown: list[Role] = [None] * len(self._level.results)
        for value, role in zip(self._level.results, wanted or unknown, strict=True):
            self._require(value, role)
        self.nodes = [node for node in self._level.nodes if node in self._by_row or node in self._shared]
        self.parts: Parts = [at if isinstance(at := self.roles.get(x), Part) else None for x in arguments]
        self.results = [self.roles.get(x) for x in self._level.results]

    def evaluate(self, size: int, arrays: Sequence[Any]) -> list[Any]:
        """Computes the results for a chunk of so many rows."""
        known = dict(zip(self._level.arguments, arrays, strict=True))

        def read(value: Value) -> Any:
            return value.constant if value.is_constant else known[value]

        for node in self.nodes:
            operands = [read(x) for x in self.inputs(node)]
            results = self.run(node, size, operands) if node in self._by_row else node.run(*operands)
            known.update(zip(node.outputs, results, strict=True))
        return [read(x) for x in self._level.results]

    def _require(self, value: Value, role: Role) -> None:
        """Makes a result's rows lie where they must."""
        found = self.roles.get(value)
        if found is None and isinstance(role, Part):
            self._bring(value, role)
        elif found is None and value.producer is not None:
            self._bring(value, None)
        is_right = found in (None, role) if isinstance(role, Part) else found == SUM or only_number(value) == 0
        if role is not None and not is_right:
            raise RefusalError(
                "a derivative of the user's own has its rows elsewhere than what it is the derivative of"
            )

    def _bring(self, value: Value, part: Part | None) -> None:
        """Makes known a value that depends on no row that is known so far: by rows, or whole."""
        node = value.producer
        if value in self.roles or node is None:
            is_known = value.is_constant and part is None
            if not is_known and self.roles.setdefault(value, part) != part:
                raise RefusalError("rows are paired with other rows")
            if value.is_constant and part is not None:
                raise RefusalError("an array with a number for each row is written in the code")
            return
        if part is None:
            if node not in self._shared:
                self._shared.add(node)
                for operand in node.inputs:
                    self._bring(operand, None)
            return
        parts = None if node.equation.effects or len(node.outputs) > 1 else row_wise.parts_of_operands(node, part)
        if parts is None:
            raise RefusalError(f"{node.name} on {node.source} is not known to treat all rows alike")
        for operand, at in zip(node.inputs, parts, strict=True):
            self._bring(operand, at)
        self.roles[value] = part
        self._by_row.add(node)


class OwnDerivative:
    """A call of a function with a derivative of the user's own, `jax.custom_vjp` or `jax.custom_jvp`.

    Each chunk calls a function of as many rows, with the user's equations for value and derivative.

    Attributes:
      parts: where its operands have their rows.
      roles: the same for its results.
    """

    def __init__(self, node: Node, parts: Parts, callers: frozenset[str]) -> None:
        """Takes the call and what is known of where its operands have their rows; the rest follows from its body.

        Args:
          node: the call.
          parts: where its operands have their rows, where that is known.
          callers: the bodies of the functions whose derivatives make this call. A rule often calls its own function,
            whose derivative is then known already; it is looked at again only in a derivative of higher order.

        Raises:
          RefusalError: if the function or its derivative is not known to treat all rows alike.
        """
        self._node = node
        body = next(bodies(node.equation))
        self._callers = callers | {str(body)}
        self._value = RowFunction(body, parts, (), self._callers)
        self.parts, self.roles = self._value.parts, self._value.results
        if any(role is None for role in self.roles):
            raise RefusalError(f"{node.name} on {node.source} returns what all rows share")
        # The operands that have a derivative, and the results that have one.
        self._moving = [i for i, x in enumerate(node.inputs) if _is_inexact(x)]
        self._answering = [i for i, x in enumerate(node.outputs) if _is_inexact(x)]
        if self._callers != callers:
            _ = self._derivatives

    def nodes(self) -> list[Node]:
        """Lists the nodes of the function itself."""
        return self._value.with_bodies(self._value.nodes)

    def run(self, size: int, operands: Sequence[Any]) -> Sequence[Any]:
        """Computes the results for a chunk of so many rows."""
        if self._node.name == _CUSTOM_JVP:
            return self._with_jvp(size, operands)
        return self._with_vjp(size, operands)

    def _with_jvp(self, size: int, operands: Sequence[Any]) -> Sequence[Any]:
        @jax.custom_jvp
        def call(*operands: Any) -> Any:
            return tuple(self._value.evaluate(size, operands))

        @call.defjvp
        def derivative(operands: Any, tangents: Any) -> Any:
            (rule,) = self._derivatives
            found = rule.evaluate(size, [*operands, *(tangents[i] for i in self._moving)])
            results = tuple(found[: len(self.roles)])
            return results, _among(results, self._answering, found[len(self.roles) :])

        return call(*operands)

    def _with_vjp(self, size: int, operands: Sequence[Any]) -> Sequence[Any]:
        @jax.custom_vjp
        def call(*operands: Any) -> Any:
            return tuple(self._value.evaluate(size, operands))

        def forward(*operands: Any) -> Any:
            return tuple(self._derivatives[0].evaluate(size, operands)), operands

        def backward(operands: Any, cotangents: Any) -> Any:
            found = self._derivatives[1].evaluate(size, [*operands, *(cotangents[i] for i in self._answering)])
            return _among(operands, self._moving, found)

        call.defvjp(forward, backward)
        return call(*operands)

    @functools.cached_property
    def _derivatives(self) -> tuple[RowFunction, ...]:
        """The rule of a `custom_jvp`; or the two of a `custom_vjp`, for results and for cotangents."""
        moving, answering = [self.parts[i] for i in self._moving], [self.roles[i] for i in self._answering]
        if self._node.name == _CUSTOM_JVP:
            return (self._row_function(self._jvp, self._moving, [*self.parts, *moving], [*self.roles, *answering]),)
        given = [*self.parts, *(role if isinstance(role, Part) else None for role in answering)]
        wanted = [SUM if part is None else part for part in moving]
        first = self._row_function(self._first, [], self.parts, self.roles)
        return first, self._row_function(self._pulled, self._answering, given, wanted)

    def _row_function(
        self, fn: Callable[..., Any], more: Sequence[int], parts: Sequence[Part | None], wanted: Sequence[Role]
    ) -> RowFunction:
        """Makes a function of the operands, and of others like them or like the results, listed in `more`."""
        others = self._node.inputs if fn == self._jvp else self._node.outputs
        avals = [x.aval for x in (*self._node.inputs, *(others[i] for i in more))]
        is_outside = not jax.sharding.get_abstract_mesh().manual_axes
        try:
            if is_outside and any(x.manual_axis_type.varying for x in avals):
                raise NameError
            with self._node.equation.ctx.manager:
                traced = jax.make_jaxpr(fn)(*avals)
        except NameError:
            # Outside of a shard_map, the axes of its body have no names.
            what = f"{self._node.name} on {self._node.source}"
            raise RefusalError(f"{what} is inside of a shard_map: rewrite the function that is mapped") from None
        return RowFunction(traced, parts, wanted, self._callers)

    def _jvp(self, *arrays: Any) -> Any:
        """Computes the results and their tangents by the user's rule, from the operands and their tangents."""
        tangents = [np.zeros(x.shape, jax.dtypes.float0) for x in self._node.inputs]
        for i, tangent in zip(self._moving, arrays[len(self._node.inputs) :], strict=True):
            tangents[i] = tangent
        results, found = jax.jvp(self._of_all, arrays[: len(self._node.inputs)], tuple(tangents))
        return [*results, *(found[i] for i in self._answering)]

    def _first(self, *operands: Any) -> Any:
        """Computes the results by the user's rule."""
        results, _ = jax.vjp(self._of_all, *operands)
        return results

    def _pulled(self, *arrays: Any) -> Any:
        """Computes the cotangents of the operands, from the operands and the cotangents of the results."""
        count = len(self._node.inputs)
        _, pull = jax.vjp(self._of_moving(arrays), *(arrays[i] for i in self._moving))
        return pull(list(arrays[count:]))

    def _of_all(self, *operands: Any) -> list[Any]:
        return list(self._node.run(*operands))

    def _of_moving(self, arrays: Sequence[Any]) -> Callable[..., list[Any]]:
        """Returns the results that have a derivative, as a function of the operands that have one."""

        def call(*moving: Any) -> list[Any]:
            operands = list(arrays[: len(self._node.inputs)])
            for i, operand in zip(self._moving, moving, strict=True):
                operands[i] = operand
            results = self._node.run(*operands)
            return [results[i] for i in self._answering]

        return call


def equations_within(node: Node) -> Iterator[Any]:
    """Yields the node's equation, and those in the body of a function with a derivative of its own."""
    yield node.equation
    for body in inner_jaxprs(node.equation) if node.name in _CUSTOM else ():
        yield from equations(body)


def _is_inexact(value: Value) -> bool:
    return bool(jnp.issubdtype(value.dtype, jnp.inexact))


def _among(arrays: Sequence[Any], positions: Sequence[int], found: Sequence[Any]) -> tuple[Any, ...]:
    """Puts what was found for arrays at their positions, and zeros without a dtype for the integers between them."""
    given = dict(zip(positions, found, strict=True))
    return tuple(given.get(i, np.zeros(np.shape(x), jax.dtypes.float0)) for i, x in enumerate(arrays))
