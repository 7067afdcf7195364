"""Operators as `lowering` knows them: record, forms, how equations bind operands, the list of all, and notes.

Operands and results are tuples and NamedTuples, whose fields may be absent. A primitive takes arrays alone. So those
that are present are bound, and their structure is a parameter of the equation, `structure`, unless it is a plain tuple
of arrays. An absent field is None, as in every pytree of JAX.

Notes are sentences in which operators explain a choice that they make while they are traced; `explain` collects them.
"""

import contextlib
import dataclasses
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import jax
from jax.extend.core import Primitive

from lowering import source_lines
from lowering.describe import show
from lowering.targets import PLATFORMS
from pallas_kernels.hardware import Hardware
from pallas_kernels.kernel import Kernel, Kind

# The platforms of a form that is the default on all of them, if none before it is.
EVERYWHERE = frozenset(PLATFORMS)
Structure = Any  # what `jax.tree.structure` returns
_STRUCTURE = "structure"


@dataclasses.dataclass(frozen=True)
class Place:
    """A platform, and over how many of its devices the compiler splits the operands; 1 if it does not."""

    platform: str
    device_count: int = 1

    @property
    def is_split(self) -> bool:
        """Tells whether the compiler splits the operands."""
        return self.device_count > 1


def refusal_of_parts(place: Place, *operands: Any) -> str | None:
    """Says why a form that is for one device and for sizes in numbers cannot take these operands; None if it can."""
    if place.is_split:
        return f"operands are split over {place.device_count} devices, and this form is for one"
    for operand in operands:
        if any(map(jax.export.is_symbolic_dim, operand.shape)):
            return f"this form needs sizes that are numbers; an operand is {list(operand.shape)}"
    return None


def _never(place: Place, *operands: Any, **params: Any) -> str | None:
    return None


@dataclasses.dataclass(frozen=True)
class Form:
    """Another program in jnp for an operator's results, which suits some platforms better than the reference.

    It is lowered and never differentiated, so it may depend on the place where it runs and on the values of operands.
    Like the reference, XLA may split it over devices, unless it runs `per_device`.

    Attributes:
      name: unique among an operator's implementations; begins with "xla_" and says what is special, as in
        "xla_prior_shift".
      platforms: the lowering platforms where it is the default.
      run: `run(*operands, place, **params)` returns the results, as the reference does.
      refuses: `refuses(place, *operands, **params) -> str | None`. Why it cannot take these operands there, in words;
        None if it can.
      per_device: whether each device runs it on its own part, as kernels do, because XLA's own way to split it would
        change results. Where that is impossible, an error says so.
    """

    name: str
    platforms: frozenset[str]
    run: Callable[..., Any]
    refuses: Callable[..., str | None] = _never
    per_device: bool = False


class Operator(Protocol):
    """Facts that `lowering` needs to know about an operator; `jaxops.Operator` is one implementation."""

    @property
    def name(self) -> str:
        """The name of the operator and of its primitive."""

    @property
    def primitive(self) -> Primitive:
        """The JAX primitive that stands for the operator in a jaxpr."""

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        """The hand-written kernels, in order of preference."""

    @property
    def forms(self) -> tuple[Form, ...]:
        """The forms in jnp beside the reference, in order of preference."""

    @property
    def no_kernel(self) -> str:
        """The reason for having no kernel, in a few words; "" if nobody said."""

    def meaning(self, *arrays: Any, **params: Any) -> tuple[jax.Array, ...]:
        """Computes the results of an equation in plain JAX: the reference implementation."""

    def in_jnp(self, run: Callable[..., Any], arrays: Any, params: Any) -> tuple[jax.Array, ...]:
        """Computes the results of an equation by a form's `run`."""

    def local_kernel(self, run: Callable[..., Any], arrays: Any, params: Any) -> Callable[..., Any]:
        """Wraps a kernel's `run`, on arrays, so that each device of a mesh applies it to its own part of them."""


_operators: dict[Primitive, Operator] = {}


def add(operator: Operator) -> None:
    """Adds an operator. The files of its package count as library code from now on."""
    _operators[operator.primitive] = operator
    source_lines.add_operators(type(operator).__module__.partition(".")[0])


def registered() -> tuple[Operator, ...]:
    """Returns all operators, in order of registration."""
    return tuple(_operators.values())


def names() -> frozenset[str]:
    """Returns the names of all operators."""
    return frozenset(operator.name for operator in _operators.values())


def form_names() -> frozenset[str]:
    """Returns the names of all operators' forms in jnp."""
    return frozenset(form.name for operator in _operators.values() for form in operator.forms)


def operator_of(primitive: Primitive) -> Operator | None:
    """Returns the operator that a primitive stands for; None for a primitive of JAX or of another library."""
    return _operators.get(primitive)


def packed(operands: Sequence[Any], attributes: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Splits operands into arrays and their structure, which joins the attributes as the equation's parameters."""
    arrays, structure = jax.tree.flatten(tuple(operands))
    plain: Structure = jax.tree.structure(tuple(arrays))
    if plain == structure:
        return arrays, dict(attributes)
    return arrays, {**attributes, _STRUCTURE: structure}


def unpacked(arrays: Sequence[Any], params: Mapping[str, Any]) -> tuple[Sequence[Any], dict[str, Any]]:
    """Computes the inverse of `packed`: the operands as an operator and its kernels take them, and the attributes."""
    attributes = {name: value for name, value in params.items() if name != _STRUCTURE}
    return jax.tree.unflatten(structure_of(arrays, params), arrays), attributes


def structure_of(arrays: Sequence[Any], params: Mapping[str, Any]) -> Structure:
    """Returns the structure of an equation's operands."""
    structure = params.get(_STRUCTURE)
    return jax.tree.structure(tuple(arrays)) if structure is None else structure


def on_arrays(fn: Callable[..., Any], params: Mapping[str, Any]) -> Callable[..., tuple[Any, ...]]:
    """Returns `fn`, which takes operands and attributes and returns results, as a function of the arrays in both."""

    def call(*arrays: Any) -> tuple[Any, ...]:
        operands, attributes = unpacked(arrays, params)
        return tuple(jax.tree.leaves(fn(*operands, **attributes)))

    return call


def is_absent_field(field: Any) -> bool:
    """Tells whether a field is absent; makes such fields leaves, as `is_leaf` of `jax.tree` functions."""
    return field is None


def fields(tree: Any) -> list[Any]:
    """Returns what is in each field of a structure, None where it is absent."""
    return jax.tree.leaves(tree, is_leaf=is_absent_field)


def presence(structure: Structure) -> tuple[bool, ...]:
    """Returns for each field of a structure whether it is present."""
    return tuple(field is not None for field in fields(jax.tree.unflatten(structure, [True] * structure.num_leaves)))


def present_names(operands: Sequence[Any]) -> list[str]:
    """Returns the names of the fields of NamedTuples, at any depth, that are present."""
    names: list[str] = []
    for operand in operands:
        if isinstance(operand, tuple) and hasattr(operand, "_fields"):
            for name, field in zip(operand._fields, operand, strict=True):
                names += present_names([field]) if isinstance(field, tuple) else [name] * (field is not None)
    return names


def refusal_by_fields(kernel: Kernel, operands: Sequence[Any]) -> str | None:
    """Says which of the operands' fields that are present the kernel does not take; None if it takes them all."""
    beyond = [] if kernel.takes is None else [name for name in present_names(operands) if name not in kernel.takes]
    return f"takes no {' and no '.join(beyond)}" if beyond else None


def kind_of(kernel: Kernel, hardware: Hardware, operands: Sequence[Any], attributes: Mapping[str, Any]) -> Kind | None:
    """Returns which cases of a kernel are like this one; None if it refuses the operands, or if no case is."""
    reason = refusal_by_fields(kernel, operands) or kernel.refuses(hardware, *operands, **attributes)
    return None if reason is not None else kernel.kind(hardware, *operands, **attributes)


def type_text(x: Any) -> str:
    """Returns an array's dtype and shape, such as "float32[128,64]"."""
    return f"{x.dtype}[{','.join(map(str, x.shape))}]"


def operator_in(op_name: str) -> str:
    """Returns the outermost operator in an instruction's `op_name`, such as "softmax(f32[8,128])"; "" for none."""
    parts = op_name.split("/")
    return next((part for part in parts if "(" in part and part.partition("(")[0] in names()), "")


def brief(operands: Sequence[str]) -> str:
    """Returns `type_text`s as jaxprs write them, equal neighbours once."""
    short = (re.sub(r"^(bf|f|u|i)(?:loat|int|nt)(?=\d)", r"\1", operand) for operand in operands)
    groups = ((operand, len(list(group))) for operand, group in itertools.groupby(short))
    return ", ".join(operand if number == 1 else f"{number} x {operand}" for operand, number in groups)


class _Listener:
    """Collector of sentences; compared by identity, so each listener is its own cache key."""

    def __init__(self) -> None:
        self.heard: list[str] = []


# A user context is part of the keys of JAX's caches, so a function is traced again for each listener.
_listener = jax.make_user_context(None)


def note(text: str) -> None:
    """Explains a choice that an operator makes while it is traced; `lowering.explain` shows the sentence.

    Outside of `explain` this does nothing. A sentence that is repeated is shown once.

    Args:
      text: one sentence.

    Raises:
      TypeError: if `text` is not a string.

    Example:
      >>> def double(x):
      ...     lowering.note("double: adds x to itself")
      ...     return x + x
      >>> lowering.explain(double, 1.0).notes
      ('double: adds x to itself',)
    """
    if not isinstance(text, str):
        raise TypeError(f"note: text must be a string; got {show(text)}")
    if _listener.value is not None and text not in _listener.value.heard:
        _listener.value.heard.append(text)


@contextlib.contextmanager
def heard() -> Iterator[list[str]]:
    """Collects the sentences that are noted within the context, in order, each once."""
    listener = _Listener()
    with _listener(listener):
        yield listener.heard
