"""Patterns of plain JAX that an operator would replace: a jaxpr as a flow of data, and where they stand in the code."""

import dataclasses
import functools
import itertools
import math
import os
import re
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, Literal

from lowering import cost

# Equations whose one body runs once, with their own operands.
_CALLS = frozenset(
    {
        *("jit", "pjit", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call"),
        *("remat", "remat2", "checkpoint", "custom_vjp_call_jaxpr"),
    }
)
_BODIES = frozenset({"scan", "while", "cond", "shard_map"})
# Equations whose results are their operands, in another dtype or place.
_SAME = frozenset(
    {
        *("convert_element_type", "reduce_precision", "copy", "copy_p", "name", "stop_gradient"),
        *("optimization_barrier", "sharding_constraint", "layout_constraint"),
        *("reshard", "mesh_cast", "pvary", "pcast", "pbroadcast"),
    }
)
RESHAPES = frozenset({"reshape", "broadcast_in_dim", "squeeze", "expand_dims"})

_LIBRARIES = (
    *("jax", "jaxlib", "numpy", "optax", "flax", "equinox", "haiku", "chex", "orbax", "penzai", "distrax", "rlax"),
    *("jaxtyping", "beartype", "typeguard"),
)
_IN_LIBRARY = re.compile(rf"[\\/](?:site|dist)-packages[\\/](?:{'|'.join(_LIBRARIES)})[\\/]|^<frozen |^<@beartype")
_HERE = os.path.dirname(__file__)
_OPERATORS = os.path.join(os.path.dirname(_HERE), "jaxops")


@dataclasses.dataclass(eq=False)
class Value:
    """One array.

    Attributes:
      aval: its type.
      producer: what computes it; None for arguments and constants.
      users: what reads it.
      number: what it is, for a number that stands in the jaxpr.
      is_counted: whether integers and such numbers are all that it is made of.
    """

    aval: Any
    producer: "Operation | None" = None
    users: list["Operation"] = dataclasses.field(default_factory=list)
    number: Any = None
    is_counted: bool = False

    @property
    def shape(self) -> tuple[Any, ...]:
        """Of the array; () of what is none, such as a token."""
        return getattr(self.aval, "shape", ())

    @property
    def size(self) -> Any:
        """How many elements it has."""
        return math.prod(self.shape)


@dataclasses.dataclass(frozen=True)
class Site:
    """Where an equation was made.

    What a library jits, such as `log_softmax`, is traced once for all of its callers, and remembers the first of them:
    unless a user's function was called there, `caller` knows better.

    Attributes:
      traceback: JAX's.
      caller: where the library's function was called in whose jaxpr the equation is.
      library: the file of that function.
    """

    traceback: Any
    caller: "Site | None" = None
    library: str | None = None

    def frames(self) -> list[Any]:
        """Frames of the function that was traced, the innermost first; not those of the call that traced it."""
        frames = getattr(self.traceback, "frames", ())
        own = list(itertools.takewhile(lambda frame: not _within(frame.file_name, _HERE), frames))
        if self.caller is not None:
            inner = list(itertools.takewhile(lambda frame: _is_library(frame.file_name), own))
            if len(inner) == len(own) or any(frame.file_name == self.library for frame in inner):
                return self.caller.frames()
        return own


@dataclasses.dataclass(eq=False)
class Operation:
    """One equation, and where it was made."""

    name: str
    params: dict[str, Any]
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    site: Site

    @property
    def source(self) -> str:
        """The user's line, such as "model.py:12 (loss_fn)"."""
        for frame in self.site.frames():
            if not _is_library(frame.file_name):
                function = frame.function_name.rpartition("<locals>.")[2]
                return f"{os.path.basename(frame.file_name)}:{frame.line_num} ({function})"
        return "an unknown line"

    @property
    def is_ours(self) -> bool:
        """Whether one of our own operators is made of this."""
        made_by_libraries = itertools.takewhile(lambda frame: _is_library(frame.file_name), self.site.frames())
        return any(_within(frame.file_name, _OPERATORS) for frame in made_by_libraries)


@dataclasses.dataclass(frozen=True)
class Graph:
    """The operations of a jaxpr in order, through jit, checkpoint and custom derivatives; and how often they run."""

    operations: tuple[Operation, ...]
    count: int

    def named(self, *names: str) -> Iterator[Operation]:
        """The operations of these primitives."""
        return (operation for operation in self.operations if operation.name in names)


@dataclasses.dataclass(frozen=True)
class Finding:
    """A pattern that was found: the operation at which it begins, and in words what stands there."""

    operation: Operation
    detail: str


@dataclasses.dataclass(frozen=True)
class Pattern:
    """What to look for, and what would replace it.

    Attributes:
      name: of the pattern, in a few words.
      replacement: the public name of what would replace it.
      find: yields the places where a graph has it, each once. Gradients carry the source of what they are gradients
        of, so it looks for something of which a function and its gradient together have one.
    """

    name: str
    replacement: str
    find: Callable[[Graph], Iterable[Finding]]


@dataclasses.dataclass(frozen=True)
class Opportunity:
    """A pattern on one line of the user's code.

    Attributes:
      pattern: its name.
      replacement: what would replace it.
      source: the line where it begins, such as "model.py:12 (loss_fn)".
      detail: what stands there.
      count: how often that is run.
    """

    pattern: str
    replacement: str
    source: str
    detail: str
    count: int

    def __str__(self) -> str:
        times = f"{self.count} x " if self.count != 1 else ""
        return f"{self.source}: {times}{self.detail}: {self.replacement} would replace this"


def opportunities(jaxpr: Jaxpr, patterns: Iterable[Pattern]) -> tuple[Opportunity, ...]:
    """Where a jaxpr has these patterns: each line of the user's code once, in the order of the jaxpr."""
    patterns = tuple(patterns)
    found: dict[tuple[str, str], Opportunity] = {}
    for graph in graphs(jaxpr) if patterns else ():
        for pattern in patterns:
            for finding in pattern.find(graph):
                if finding.operation.is_ours:
                    continue
                source = finding.operation.source
                first = Opportunity(pattern.name, pattern.replacement, source, finding.detail, 0)
                known = found.get((pattern.name, source), first)
                found[pattern.name, source] = dataclasses.replace(known, count=known.count + graph.count)
    return tuple(found.values())


def graphs(jaxpr: Jaxpr, count: int = 1) -> Iterator[Graph]:
    """A graph of the jaxpr, and one of each body of a loop, a branch or a shard_map in it."""
    operations: list[Operation] = []
    bodies: list[tuple[Jaxpr, int]] = []
    _inline(jaxpr, [_argument(x.aval) for x in jaxpr.invars], None, operations, bodies)
    yield Graph(tuple(operations), count)
    for body, repetitions in bodies:
        yield from graphs(body, count * repetitions)


def forward(values: Iterable[Value], follows: Callable[[Operation, Value], bool]) -> set[Value]:
    """These values and what is made of them, by operations that `follows(operation, operand)` lets through."""
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
    """This value and what it is made of, through operands that `follows(operation, operand)` lets through."""
    reached, waiting = {value}, [value]
    while waiting:
        operation = waiting.pop().producer
        if operation is not None:
            fresh = [x for x in operation.inputs if x not in reached and follows(operation, x)]
            reached.update(fresh)
            waiting.extend(fresh)
    return reached


def unshaped(value: Value) -> Value:
    """The value before it was reshaped or broadcast."""
    while value.producer is not None and value.producer.name in RESHAPES:
        value = value.producer.inputs[0]
    return value


def describe(value: Value) -> str:
    """Dtype and shape."""
    return f"{value.aval.dtype}[{','.join(map(str, value.shape))}]"


def _inline(
    jaxpr: Jaxpr,
    arguments: list[Value],
    caller: Site | None,
    operations: list[Operation],
    bodies: list[tuple[Jaxpr, int]],
) -> list[Value]:
    """Adds a jaxpr's operations and returns its results; `caller` is where it is called."""
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
            bodies.extend((body, cost.repetitions(equation)) for body in inner)
            is_counted = all(value.is_counted for value in inputs)
            results = [Value(x.aval, is_counted=is_counted) for x in equation.outvars]
            operation = Operation(name, equation.params, tuple(inputs), tuple(results), site)
            operations.append(operation)
            for value in results:
                value.producer = operation
            for value in dict.fromkeys(inputs):
                value.users.append(operation)
        values.update(zip(equation.outvars, results, strict=False))
    return [read(atom) for atom in jaxpr.outvars]


def _argument(aval: Any) -> Value:
    return Value(aval, is_counted=hasattr(aval, "dtype") and bool(jnp.issubdtype(aval.dtype, jnp.integer)))


def _within(path: str, folder: str) -> bool:
    return path.startswith(folder + os.sep)


@functools.cache
def _is_library(path: str) -> bool:
    """Whether a file is no user's: of JAX, of a library that is built on it, or of Python."""
    if _IN_LIBRARY.search(path):
        return True
    if _within(path, os.path.dirname(jax.__file__)) or _within(path, _OPERATORS):
        return True
    installed = ("site-packages", "dist-packages")
    return _within(path, sysconfig.get_path("stdlib")) and not any(folder in path for folder in installed)
