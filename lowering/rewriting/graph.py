"""A jaxpr as a graph of nodes: to be evaluated again, with some calls inlined, or to be looked at, with all of them."""

import dataclasses
import functools
import itertools
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import jax
import jax.export
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from lowering import _jax_private, cost
from lowering.operators import operator_of
from lowering.source_lines import Site

CHECKPOINTS = frozenset({"remat2", "checkpoint", "remat"})
PRODUCTS = frozenset({"dot_general", "conv_general_dilated"})
# Equations whose results are their operands, perhaps with fewer digits or in another place.
SAME = frozenset(
    {"copy", "copy_p", "name", "optimization_barrier", "sharding_constraint", "layout_constraint", "reduce_precision"}
    | {"reshard", "mesh_cast", "pvary", "pcast", "pbroadcast"}
)
RESHAPES = frozenset({"reshape", "broadcast_in_dim", "squeeze", "expand_dims"})
LOOPS = frozenset({"scan", "while", "cond", "shard_map"})
_CALLS = frozenset({"jit", "pjit", "closed_call", "core_call"})
_LOOKED_INTO = _CALLS | CHECKPOINTS | {"custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr"}
_INLINED = _CALLS | CHECKPOINTS | {"custom_jvp_call"}
_FIRST_POWER = ("integer_pow", 1)
_OWN_DERIVATIVES = os.path.join(os.path.dirname(jax.__file__), "_src", "nn", "functions.py")


@dataclasses.dataclass(eq=False)
class Value:
    """One array.

    Attributes:
      aval: its type.
      producer: the node that computes it; None for arguments and constants.
      users: the nodes that read it.
      constant: the array itself, if the jaxpr holds it.
      is_constant: whether the jaxpr holds it.
      follows_product: whether it depends on the result of a large product.
    """

    aval: Any
    producer: "Node | None" = None
    users: list["Node"] = dataclasses.field(default_factory=list)
    constant: Any = None
    is_constant: bool = False
    follows_product: bool = False

    @property
    def shape(self) -> tuple[Any, ...]:
        """The array's shape; () for a token and the like."""
        return getattr(self.aval, "shape", ())

    @functools.cached_property
    def size(self) -> int:
        """The number of elements; 0 if it depends on a symbolic size, which may be small."""
        return size_of(self.aval)

    @property
    def symbolic_size(self) -> Any:
        """The number of elements, as an expression if it depends on a symbolic size."""
        return math.prod(self.shape)

    @property
    def dtype(self) -> Any:
        """The array's dtype."""
        return getattr(self.aval, "dtype", None)

    @property
    def number(self) -> Any:
        """The value as a Python number, if it is a scalar that the jaxpr holds."""
        is_number = self.is_constant and self.shape == () and self.dtype is not None
        is_plain = is_number and not jnp.issubdtype(self.dtype, jax.dtypes.extended)
        if not is_plain or isinstance(self.constant, jax.core.Tracer):
            return None
        number = self.constant.item() if hasattr(self.constant, "item") else self.constant
        # JAX has subclasses of Python's numbers, with a dtype.
        return next((kind(number) for kind in (bool, int, float) if isinstance(number, kind)), number)


@dataclasses.dataclass(eq=False)
class Node:
    """One equation: what it reads and computes, where the user's code made it, and the primitive's name."""

    equation: Any
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    site: Site
    name: str = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.name = self.equation.primitive.name

    @property
    def params(self) -> dict[str, Any]:
        """The primitive's parameters."""
        return self.equation.params

    @property
    def source(self) -> str:
        """The user's line, such as "model.py:12 (loss_fn)"."""
        return self.site.line

    def at_its_line(self) -> AbstractContextManager[None]:
        """Gives what is traced within the context the user's line."""
        return _jax_private.traced_at(self.site.users.traceback)

    def run(self, *arrays: Any) -> Sequence[Any]:
        """Evaluates the equation as JAX does, with its context, name stack and source line."""
        return _jax_private.evaluate(self.equation, arrays, self.site.users.traceback)


@dataclasses.dataclass(eq=False)
class Level:
    """One jaxpr, or one body of a loop, branch, checkpoint or shard_map, as a graph.

    `named(*names)` yields its nodes of these primitives.

    Attributes:
      nodes: in order.
      arguments: what the jaxpr takes.
      results: what it returns.
      count: how often it runs.
      is_body: whether it is that of a loop, branch or shard_map.
      keeps_each: whether it runs in a loop whose backward pass keeps what it needs of each step until all have run.
      draws_again: tells whether a backward pass around it draws random bits again, in a checkpoint that stays as it is.
      memo: what has been found out about it, by what was asked.
    """

    nodes: list[Node]
    arguments: list[Value]
    results: list[Value]
    count: int = 1
    is_body: bool = False
    keeps_each: bool = False
    draws_again: Callable[[], bool] = lambda: False
    memo: dict[Any, Any] = dataclasses.field(default_factory=dict, init=False)

    def named(self, *names: str) -> Iterator[Node]:
        """Yields the nodes of these primitives."""
        return (node for node in self.nodes if node.name in names)


def level_of(closed: Any, is_inlined: Callable[[Any], bool], is_large: Callable[[Any], bool]) -> Level:
    """Returns the graph of a jaxpr, closed or not.

    Args:
      closed: the jaxpr.
      is_inlined: which calls are inlined, `is_inlined(equation)`.
      is_large: which arrays may be logits, by their type.
    """
    return _Builder(is_inlined, is_large).level(closed)


def levels(closed: Any, count: int = 1, is_kept: Sequence[bool] | None = None) -> Iterator[Level]:
    """Yields the graph of a jaxpr, then one for each body of a loop, branch or shard_map in it, all to be looked at.

    Calls, checkpoints and functions with a derivative of their own are inlined, and casts and copies left out, so the
    graphs cannot be evaluated. Their results lack what a body returns only for its own gradient.

    Args:
      closed: the jaxpr, closed or not.
      count: how often it runs.
      is_kept: which of its results count; by default all.
    """
    level = _Looking(lambda _: True, lambda _: False).level(closed)
    level.count = count
    level.results = list(itertools.compress(level.results, is_kept or itertools.repeat(True)))
    yield level
    for node in level.named(*LOOPS, *_LOOKED_INTO):
        read = [x in level.results or any(_is_apart(user, node) for user in x.users) for x in node.outputs]
        for body in cost.bodies(node.equation):
            fits = len(read) == len(opened(body)[0].outvars)
            yield from levels(body, count * cost.repetitions(node.equation), read if fits else [False])


def _is_apart(user: Node, node: Node) -> bool:
    """Tells whether a node is not the gradient of another, which has its line."""
    return (user.name, user.source) != (node.name, node.source)


def forward(values: Iterable[Value], follows: Callable[[Node, Value], bool]) -> set[Value]:
    """Returns these values and all that is computed from them, by nodes that `follows(node, operand)`."""
    reached = set(values)
    waiting = list(reached)
    while waiting:
        value = waiting.pop()
        for node in value.users:
            if not reached.issuperset(node.outputs) and follows(node, value):
                fresh = [x for x in node.outputs if x not in reached]
                reached.update(fresh)
                waiting += fresh
    return reached


def backward(value: Value, follows: Callable[[Node, Value], bool]) -> set[Value]:
    """Returns this value and all that it is computed from, through nodes that `follows(node, operand)`."""
    reached, waiting = {value}, [value]
    while waiting:
        node = waiting.pop().producer
        if node is not None:
            fresh = [x for x in node.inputs if x not in reached and follows(node, x)]
            reached.update(fresh)
            waiting += fresh
    return reached


def unshaped(value: Value) -> Value:
    """Returns the value before it was reshaped or broadcast."""
    while value.producer is not None and value.producer.name in RESHAPES:
        value = value.producer.inputs[0]
    return value


def described(value: Value) -> str:
    """Returns dtype and shape as text."""
    return f"{value.dtype}[{','.join(map(str, value.shape))}]"


def key_of(equation: Any, inputs: Sequence[Value]) -> Any:
    """Returns what equations that compute the same have in common; None if that is not known, or they have effects."""
    read = tuple(x if x.number is None else (x.aval, repr(x.number)) for x in inputs)
    key = (equation.primitive, equation.ctx, tuple(sorted(equation.params.items())), read)
    try:
        hash(key)
    except TypeError:  # some parameters are arrays or lists
        return None
    return None if equation.effects else key


def names_axes(params: dict[str, Any]) -> bool:
    """Tells whether a primitive with these parameters speaks to other devices, or to a vmap's other elements."""
    names = (*(params.get("axes") or ()), params.get("axis_name"))
    return any(isinstance(name, str | tuple) for name in names)


def size_of(aval: Any) -> int:
    """Counts the elements of an array of this type; 0 if a symbolic size, which may be small, decides."""
    size = math.prod(getattr(aval, "shape", ()))
    return size if isinstance(size, int) else 0


def opened(jaxpr: Any) -> tuple[Jaxpr, Sequence[Any]]:
    """Returns a jaxpr and its constants, whether it was closed or not."""
    return (jaxpr.jaxpr, jaxpr.consts) if isinstance(jaxpr, ClosedJaxpr) else (jaxpr, getattr(jaxpr, "consts", ()))


def constant(array: Any, aval: Any = None) -> Value:
    """Makes a value that is known."""
    return Value(jax.typeof(array) if aval is None else aval, constant=array, is_constant=True)


def equations(jaxpr: Jaxpr) -> Iterator[Any]:
    """Yields the equations of a jaxpr and of all bodies within it; those of a body that several share once."""
    seen, waiting = {jaxpr}, [jaxpr]
    while waiting:
        for equation in waiting.pop().eqns:
            yield equation
            fresh = {*cost.inner_jaxprs(equation)} - seen
            seen |= fresh
            waiting += fresh


class Peeled(NamedTuple):
    """A checkpoint in two parts.

    Attributes:
      equation: the checkpoint of what comes before; None if nothing does.
      tail: what follows, as a jaxpr of the checkpoint's operands and of the results of `equation`.
    """

    equation: Any
    tail: Jaxpr


def peeled(equation: Any, is_large: Callable[[Any], bool]) -> Peeled | None:
    """Returns the two parts of a checkpoint that returns the result of a large product; None for anything else."""
    if equation.primitive.name not in CHECKPOINTS or equation.params["differentiated"]:
        return None
    body = equation.params["jaxpr"]
    body = getattr(body, "jaxpr", body)
    dependent: set[Any] = set()
    before, behind = [], []
    for inner in body.eqns:
        starts = inner.primitive.name in PRODUCTS and any(is_large(x.aval) for x in inner.outvars)
        if starts or any(not isinstance(x, Literal) and x in dependent for x in inner.invars):
            dependent.update(inner.outvars)
            behind.append(inner)
        else:
            before.append(inner)
    returned = [x for x in body.outvars if not isinstance(x, Literal)]
    # Losses of rows, or the results of other layers, are fewer.
    products = [x for inner in behind if inner.primitive.name in PRODUCTS for x in inner.outvars]
    least = max((size_of(x.aval) for x in products), default=0) / 2
    leaves = any(x in dependent and is_large(x.aval) and size_of(x.aval) > least for x in returned)
    if not leaves or any(inner.effects for inner in behind):
        return None
    read = {x for inner in behind for x in inner.invars if not isinstance(x, Literal)} | set(returned)
    outvars = [x for inner in before for x in inner.outvars if x in read]
    names = body.debug_info._replace(arg_names=None, result_paths=None)
    tail = body.replace(eqns=behind, constvars=[], invars=[*body.invars, *outvars], debug_info=names)
    if not outvars:
        return Peeled(None, tail)
    kept = body.replace(eqns=before, outvars=outvars, debug_info=names)
    return Peeled(equation.replace(params={**equation.params, "jaxpr": kept}, outvars=outvars), tail)


@dataclasses.dataclass
class _Builder:
    is_inlined: Callable[[Any], bool]
    is_large: Callable[[Any], bool]
    nodes: list[Node] = dataclasses.field(default_factory=list)
    known: dict[Any, list[Value]] = dataclasses.field(default_factory=dict)

    def level(self, closed: Any) -> Level:
        """Returns the graph of a jaxpr."""
        arguments = [Value(x.aval) for x in opened(closed)[0].invars]
        results = self.inline(closed, arguments, None)
        return Level(self.nodes, arguments, results)

    def inline(self, closed: Any, arguments: Sequence[Value], caller: Site | None) -> list[Value]:
        """Appends the nodes of a jaxpr and returns its results."""
        jaxpr, arrays = opened(closed)
        library = getattr(jaxpr.debug_info, "func_filename", None)
        values: dict[Any, Value] = dict(zip(jaxpr.invars, arguments, strict=True))
        # An open jaxpr may lack its constants; it can be looked at all the same.
        constants = [constant(x) for x in arrays] or [Value(x.aval) for x in jaxpr.constvars]
        values.update(zip(jaxpr.constvars, constants, strict=True))

        def read(atom: Any) -> Value:
            return constant(atom.val, atom.aval) if isinstance(atom, Literal) else values[atom]

        for equation in jaxpr.eqns:
            inputs = [read(atom) for atom in equation.invars]
            site = Site(equation.source_info.traceback, caller if library else None, library)
            outputs = self._inlined(equation, inputs, site)
            if outputs is None:
                outputs = self._node(equation, inputs, site)
            values.update(zip(equation.outvars, outputs, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def _node(self, equation: Any, inputs: list[Value], site: Site) -> list[Value]:
        """Appends a node and returns its results; not if logits, or what follows, are computed a second time.

        XLA merges these, too. All else stays apart, as one array of labels may count rows here and classes there.
        """
        is_large = any(self.is_large(x.aval) for x in equation.outvars)
        follows_product = (is_large and equation.primitive.name in PRODUCTS) or any(x.follows_product for x in inputs)
        key = key_of(equation, inputs) if follows_product else None
        if key in self.known:
            return self.known[key]
        outputs = [Value(x.aval, follows_product=follows_product) for x in equation.outvars]
        node = Node(equation, tuple(inputs), tuple(outputs), site)
        self.nodes.append(node)
        for value in outputs:
            value.producer = node
        for value in dict.fromkeys(inputs):
            value.users.append(node)
        if key is not None:
            self.known[key] = outputs
        return outputs

    def _inlined(self, equation: Any, inputs: list[Value], site: Site) -> list[Value] | None:
        """Returns the results of an equation whose body takes its place; None if none does."""
        name = equation.primitive.name
        if name == "iota" and len(equation.params["shape"]) > 1 and self.is_large(equation.outvars[0].aval):
            return self.inline(_counted_once(**equation.params), inputs, site)
        if name not in _INLINED and operator_of(equation.primitive) is None:
            return None
        follows_product = any(x.follows_product for x in inputs)
        if not (name in _CALLS and follows_product) and not self.is_inlined(equation):
            return None
        parts = peeled(equation, self.is_large)
        if parts is not None:
            before = [] if parts.equation is None else self._node(parts.equation, inputs, site)
            return self.inline(parts.tail, [*inputs, *before], site)
        body = _inlined_body(equation) or (_reference(equation) if follows_product else None)
        return None if body is None else self.inline(body, inputs, site)


class _Looking(_Builder):
    def _inlined(self, equation: Any, inputs: list[Value], site: Site) -> list[Value] | None:
        name = equation.primitive.name
        if name in SAME | {"convert_element_type", "stop_gradient"} or (name, equation.params.get("y")) == _FIRST_POWER:
            return inputs
        inner = cost.bodies(equation) if name in _LOOKED_INTO else []
        is_call = len(inner) == 1 and len(opened(inner[0])[0].invars) == len(inputs)
        return self.inline(inner[0], inputs, site) if is_call else None


def _counted_once(*, dtype: Any, shape: Any, dimension: int, sharding: Any) -> Any:
    """Returns an iota as one of a single axis that is repeated along the others: what counts rows can be cut."""
    count = functools.partial(jax.lax.iota, dtype, shape[dimension])
    return jax.make_jaxpr(lambda: jax.lax.broadcast_in_dim(count(), shape, (dimension,), out_sharding=sharding))()


def _inlined_body(equation: Any) -> Any:
    """Returns the body of a call that may be inlined; None otherwise."""
    name, params = equation.primitive.name, equation.params
    if name in _CALLS:
        shardings = (*params.get("in_shardings", ()), *params.get("out_shardings", ()))
        layouts = (*params.get("in_layouts", ()), *params.get("out_layouts", ()))
        is_free = all("Unspecified" in type(x).__name__ for x in shardings) and all(x is None for x in layouts)
        return params.get("jaxpr", params.get("call_jaxpr")) if is_free else None
    if name == "custom_jvp_call":
        # JAX's own rules are the derivatives of the functions themselves; users' need not be.
        body = params["call_jaxpr"]
        is_own = getattr(opened(body)[0].debug_info, "func_filename", None) == _OWN_DERIVATIVES
        return body if is_own else None
    return None


def _reference(equation: Any) -> Any:
    """Returns the reference of an operator that has no kernels and only reduces its largest operand; None otherwise."""
    operator = operator_of(equation.primitive)
    sizes = [[size_of(x.aval) for x in atoms] for atoms in (equation.invars, equation.outvars)]
    if operator is None or operator.kernels or max(sizes[0], default=0) <= max(sizes[1], default=0):
        return None
    params = {name: value for name, value in equation.params.items() if name != "selection"}
    return jax.make_jaxpr(functools.partial(operator.meaning, **params))(*(x.aval for x in equation.invars))
