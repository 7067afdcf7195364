"""Finds plain-JAX patterns that an operator can replace, in a jaxpr as a data-flow graph."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.extend.core import Jaxpr, Literal

from lowering import cost
from lowering.source_lines import Site

# Equations with a single body that runs once, on the equation's own operands.
_CALLS = frozenset(
    {
        *("jit", "pjit", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call"),
        *("remat", "remat2", "checkpoint", "custom_vjp_call_jaxpr"),
    }
)
_BODIES = frozenset({"scan", "while", "cond", "shard_map"})
# Equations whose results are their operands with another dtype or placement.
_SAME = frozenset(
    {
        *("convert_element_type", "reduce_precision", "copy", "copy_p", "name", "stop_gradient"),
        *("optimization_barrier", "sharding_constraint", "layout_constraint"),
        *("reshard", "mesh_cast", "pvary", "pcast", "pbroadcast"),
    }
)
RESHAPES = frozenset({"reshape", "broadcast_in_dim", "squeeze", "expand_dims"})


@dataclasses.dataclass(eq=False)
class Value:
    """One array.

    Attributes:
      aval: its type.
      producer: the operation that computes it; None for arguments and constants.
      users: the operations that read it.
      number: its value, if it is a scalar literal of the jaxpr.
      is_counted: whether it is computed from integers and literals only.
    """

    aval: Any
    producer: "Operation | None" = None
    users: list["Operation"] = dataclasses.field(default_factory=list)
    number: Any = None
    is_counted: bool = False

    @property
    def shape(self) -> tuple[Any, ...]:
        """The array's shape; () for a token and the like."""
        return getattr(self.aval, "shape", ())

    @property
    def size(self) -> Any:
        """The number of elements."""
        return math.prod(self.shape)


@dataclasses.dataclass(eq=False)
class Operation:
    """One equation, and where the user's code made it."""

    name: str
    params: dict[str, Any]
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    site: Site

    @property
    def source(self) -> str:
        """The user's line, such as "model.py:12 (loss_fn)"."""
        return self.site.line


@dataclasses.dataclass(frozen=True)
class Graph:
    """A jaxpr as a data-flow graph, with the bodies of jit, checkpoint and custom derivatives inlined.

    `named(*names)` yields its operations of these primitives, and `duplicates(operation)` those that compute the same.

    Attributes:
      operations: in order.
      results: the returned values, without those that a loop or branch returns only for its own gradient.
      count: how often the graph runs.
    """

    operations: tuple[Operation, ...]
    results: frozenset[Value]
    count: int

    def duplicates(self, operation: Operation) -> list[Operation]:
        """Returns this operation and the others that compute the same, which XLA merges into one."""
        return [x for x in self.operations if self._numbers[x] == self._numbers[operation]]

    @functools.cached_property
    def _numbers(self) -> dict[Operation, int]:
        """A number for each operation, the same for operations that compute the same."""
        numbers: dict[Any, int] = {}
        found: dict[Operation, int] = {}

        def number(value: Value) -> int:
            key: Any = value
            if value.producer is not None:
                key = found[value.producer], value.producer.outputs.index(value)
            elif value.number is not None:
                key = str(value.aval), str(value.number)
            return numbers.setdefault(key, len(numbers))

        for operation in self.operations:
            params = tuple(sorted(operation.params.items()))
            key = (operation.name, params, tuple(map(number, operation.inputs)))
            found[operation] = numbers.setdefault(key if _is_hashable(params) else operation, len(numbers))
        return found

    def named(self, *names: str) -> Iterator[Operation]:
        """Yields the operations of these primitives."""
        return (operation for operation in self.operations if operation.name in names)


@dataclasses.dataclass(frozen=True)
class Finding:
    """One place where a pattern was found.

    Attributes:
      operation: where the pattern begins.
      detail: what it computes there, in words.
      saved_bytes: about how much a replacement saves in temporaries; None if sizes are symbolic.
      obstacle: why a replacement would save nothing after all, in words; empty if it saves.
      arguments: what a call must say besides its operands, such as 'layout="NHWC"'; may be empty.
    """

    operation: Operation
    detail: str
    saved_bytes: int | None
    obstacle: str = ""
    arguments: str = ""


@dataclasses.dataclass(frozen=True)
class Pattern:
    """A computation to look for, and the operator that can replace it.

    Attributes:
      name: a few words.
      replacement: the public name of the operator.
      find: yields each place in a graph where the replacement would fit, once. A gradient carries the source line of
        its function, so `find` looks for something that a function and its gradient have only one of between them.
      remark: under which condition the replacement saves memory, or what else it changes.
      platforms: where the replacement saves memory; None for all.
    """

    name: str
    replacement: str
    find: Callable[[Graph], Iterable[Finding]]
    remark: str = ""
    platforms: frozenset[str] | None = None


@dataclasses.dataclass(frozen=True)
class Opportunity:
    """A pattern on one line of the user's code.

    Attributes:
      pattern: its name.
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
        size = "" if self.saved_bytes is None else f" about {_megabytes(self.saved_bytes)} of"
        return " ".join(filter(None, (f"{found} replace this and save{size} temporaries", self.remark)))


def opportunities(jaxpr: Jaxpr, patterns: Iterable[Pattern], platform: str) -> tuple[Opportunity, ...]:
    """Returns the patterns in a jaxpr: each line of the user's code once, the largest saving first, obstacles last."""
    patterns = [pattern for pattern in patterns if pattern.platforms is None or platform in pattern.platforms]
    found: dict[tuple[str, str, str], Opportunity] = {}
    for graph in graphs(jaxpr) if patterns else ():
        for pattern in patterns:
            for finding in pattern.find(graph):
                if finding.operation.site.is_ours or finding.saved_bytes == 0:
                    continue
                one = _opportunity(pattern, finding, graph.count)
                key = (one.pattern, one.source, one.obstacle)
                if key in found:
                    before = found[key]
                    saved = max((x.saved_bytes for x in (before, one) if x.saved_bytes is not None), default=None)
                    one = dataclasses.replace(before, count=before.count + one.count, saved_bytes=saved)
                found[key] = one
    return tuple(sorted(found.values(), key=lambda x: (bool(x.obstacle), -(x.saved_bytes or 0))))


def _opportunity(pattern: Pattern, finding: Finding, count: int) -> Opportunity:
    return Opportunity(
        pattern=pattern.name,
        replacement=pattern.replacement,
        source=finding.operation.source,
        detail=finding.detail,
        count=count,
        saved_bytes=finding.saved_bytes,
        remark=pattern.remark,
        obstacle=finding.obstacle,
        arguments=finding.arguments,
    )


def _megabytes(size: int) -> str:
    return f"{size / 1e6:.3g} MB" if size < 1e9 else f"{size / 1e9:.3g} GB"


def graphs(jaxpr: Jaxpr) -> Iterator[Graph]:
    """Yields the graph of a jaxpr, then one for each body of a loop, a branch or a shard_map in it."""
    yield from _graphs(jaxpr, 1, [True] * len(jaxpr.outvars))


def _graphs(jaxpr: Jaxpr, count: int, is_kept: Sequence[bool]) -> Iterator[Graph]:
    """Yields the graphs of a body; `is_kept` says which of its results are used by more than its own gradient."""
    operations: list[Operation] = []
    bodies: list[_Body] = []
    returned = _inline(jaxpr, [_argument(x.aval) for x in jaxpr.invars], None, operations, bodies)
    results = frozenset(value for value, kept in zip(returned, is_kept, strict=True) if kept)
    yield Graph(tuple(operations), results, count)
    for body in bodies:
        yield from _graphs(body.jaxpr, count * body.repetitions, body.kept_results(results))


class _Body(NamedTuple):
    """The jaxpr inside a loop, a branch or a shard_map."""

    jaxpr: Jaxpr
    repetitions: int
    operation: Operation

    def kept_results(self, results: frozenset[Value]) -> list[bool]:
        """Tells whether each result is returned, or read by anything but the operation's own gradient."""
        outputs = self.operation.outputs
        if len(outputs) != len(self.jaxpr.outvars):
            return [False] * len(self.jaxpr.outvars)
        return [x in results or any(self._is_other(user) for user in x.users) for x in outputs]

    def _is_other(self, user: Operation) -> bool:
        return (user.name, user.source) != (self.operation.name, self.operation.source)


def forward(values: Iterable[Value], follows: Callable[[Operation, Value], bool]) -> set[Value]:
    """Returns these values and all that is computed from them, by operations that `follows(operation, operand)`."""
    reached = set(values)
    waiting = list(reached)
    while waiting:
        value = waiting.pop()
        for operation in value.users:
            if follows(operation, value):
                fresh = [x for x in operation.outputs if x not in reached]
                reached.update(fresh)
                waiting.extend(fresh)
    return reached


def backward(value: Value, follows: Callable[[Operation, Value], bool]) -> set[Value]:
    """Returns this value and all that it is computed from, through operations that `follows(operation, operand)`."""
    reached, waiting = {value}, [value]
    while waiting:
        operation = waiting.pop().producer
        if operation is not None:
            fresh = [x for x in operation.inputs if x not in reached and follows(operation, x)]
            reached.update(fresh)
            waiting.extend(fresh)
    return reached


def unshaped(value: Value) -> Value:
    """Returns the value before it was reshaped or broadcast."""
    while value.producer is not None and value.producer.name in RESHAPES:
        value = value.producer.inputs[0]
    return value


def describe(value: Value) -> str:
    """Returns dtype and shape as text."""
    return f"{value.aval.dtype}[{','.join(map(str, value.shape))}]"


def _inline(
    jaxpr: Jaxpr,
    arguments: list[Value],
    caller: Site | None,
    operations: list[Operation],
    bodies: list[_Body],
) -> list[Value]:
    """Appends a jaxpr's operations and returns its results; `caller` is where the jaxpr is called."""
    library = getattr(jaxpr.debug_info, "func_filename", None)
    values = dict(zip(jaxpr.invars, arguments, strict=True)) | {x: _argument(x.aval) for x in jaxpr.constvars}

    def read(atom: Any) -> Value:
        if not isinstance(atom, Literal):
            return values[atom]
        constant = Value(atom.aval, is_counted=True)
        constant.number = None if constant.shape else atom.val
        return constant

    for equation in jaxpr.eqns:
        name, inputs = equation.primitive.name, [read(atom) for atom in equation.invars]
        site = Site(equation.source_info.traceback, caller if library else None, library)
        inner = list(cost.inner_jaxprs(equation)) if name in _CALLS | _BODIES else []
        if name in _CALLS and len(inner) == 1 and len(inner[0].invars) == len(inputs):
            results = _inline(inner[0], inputs, site, operations, bodies)
        elif name in _SAME or (name == "integer_pow" and equation.params["y"] == 1):
            results = inputs
        else:
            is_counted = all(value.is_counted for value in inputs)
            results = [Value(x.aval, is_counted=is_counted) for x in equation.outvars]
            operation = Operation(name, equation.params, tuple(inputs), tuple(results), site)
            operations.append(operation)
            bodies.extend(_Body(body, cost.repetitions(equation), operation) for body in inner)
            for value in results:
                value.producer = operation
            for value in dict.fromkeys(inputs):
                value.users.append(operation)
        values.update(zip(equation.outvars, results, strict=False))
    return [read(atom) for atom in jaxpr.outvars]


def _is_hashable(params: tuple[tuple[str, Any], ...]) -> bool:
    try:
        hash(params)
    except TypeError:
        return False
    return True


def _argument(aval: Any) -> Value:
    return Value(aval, is_counted=hasattr(aval, "dtype") and bool(jnp.issubdtype(aval.dtype, jnp.integer)))
