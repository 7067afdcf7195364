"""Dropout written in plain JAX: what becomes of random bits, followed through a graph to the arrays that they keep."""

import dataclasses
from collections.abc import Callable, Collection, Iterable, Iterator

import jax.numpy as jnp

from lowering.rewriting.graph import Node, Value

_SHAPED = frozenset(
    {"broadcast_in_dim", "reshape", "squeeze", "expand_dims", "convert_element_type", "copy", "stop_gradient"}
)
_COMPARISONS = {"lt": True, "le": True, "gt": False, "ge": False}  # whether small numbers pass
_TO_FLOATS = frozenset({"shift_right_logical", "or", "bitcast_convert_type"})
# What JAX makes of a number in [1, 2), for a range from 0 to 1.
_TO_UNIT = {"sub": 1.0, "mul": 1.0, "add": 0.0, "max": 0.0}
_ARITHMETIC: dict[str, Callable[..., float]] = {
    "add": lambda x, y: x + y,
    "sub": lambda x, y: x - y,
    "mul": lambda x, y: x * y,
    "div": lambda x, y: x / y if y else float("nan"),
}
_TOLERANCE = 1e-6

UNSCALED = "what is kept is not divided by the rate at which it is kept"
DRAWN_AGAIN = "its key draws numbers for something else too, which would no longer agree"
SHARED = "the elements do not have a random number each"


@dataclasses.dataclass(frozen=True)
class Dropout:
    """An array of which random elements are kept and scaled by the inverse of the rate at which they are kept.

    Attributes:
      node: where elements are zeroed.
      x: the array, before it is scaled.
      y: the result, after it is scaled.
      kept_rate: the probability of keeping an element.
    """

    node: Node
    x: Value
    y: Value
    kept_rate: float


@dataclasses.dataclass(frozen=True)
class Uses:
    """Uses of random bits.

    Attributes:
      node: the first place where they zero elements; None if there is none.
      dropouts: all places where they do.
      reason: why they cannot be replaced by the operator's, which are others; empty if they can.
    """

    node: Node | None
    dropouts: tuple[Dropout, ...]
    reason: str


@dataclasses.dataclass(frozen=True)
class _Mask:
    """An array that is `factor` with a probability of `kept_rate`, else 0; or true and false."""

    kept_rate: float
    factor: float = 1.0


@dataclasses.dataclass(frozen=True)
class _Masked:
    """An array times a mask."""

    x: Value
    mask: _Mask


def uses_of_all(
    draws: Iterable[Node], results: Collection[Value], is_wanted: Callable[[Node], bool] = lambda node: True
) -> Iterator[tuple[Node, Uses]]:
    """Finds what is made of each result of `random_bits`; those with the same key are all dropout, or none of them is.

    A mask that is drawn again, for instance to fill what was dropped, has to stay the same mask.
    """
    found = [(bits, uses_of(bits, results, is_wanted)) for bits in draws]
    for bits, uses in found:
        twins = (other for node, other in found if _key_of(node) is _key_of(bits))
        if not uses.reason and any(twin.node is None or twin.reason for twin in twins):
            uses = dataclasses.replace(uses, reason=DRAWN_AGAIN)
        yield bits, uses


def _key_of(bits: Node) -> Value:
    """Finds the key of random bits; each call of a function of `jax.random` wraps a raw key anew."""
    key = bits.inputs[0]
    while key.producer is not None and key.producer.name in ("random_wrap", "random_unwrap"):
        (key,) = key.producer.inputs
    return key


def uses_of(bits: Node, results: Collection[Value], is_wanted: Callable[[Node], bool] = lambda node: True) -> Uses:
    """Finds what is made of the result of `random_bits`.

    All that is read of the bits, of their mask and of what leads to it has to be dropout, as the operator draws others.
    Several arrays may share a mask: the operator keeps the same elements for the same key, rate and position.

    Args:
      bits: the node.
      results: values that are read outside of the graph's nodes.
      is_wanted: whether a node has to run.
    """
    nodes: list[Node] = []
    dropouts: list[Dropout] = []
    reasons: list[str] = []
    waiting: list[tuple[Value, _Mask | None]] = [(bits.outputs[0], None)]
    while waiting:
        value, mask = waiting.pop()
        if value in results:
            reasons.append("its mask, or what that is made of, is a result too")
        for user in filter(is_wanted, value.users):
            followed = _of_bits(user, value) if mask is None else _of_mask(user, value, mask)
            if isinstance(followed, str):
                reasons.append(followed)
                continue
            y = user.outputs[0]
            reasons += [] if value.symbolic_size == y.symbolic_size else [SHARED]
            if isinstance(followed, _Masked):
                nodes.append(user)
                one = _dropout(user, followed, results, is_wanted)
                dropouts += [] if one is None else [one]
                reasons += [UNSCALED] if one is None else []
            else:
                waiting.append((y, followed))
    return Uses(nodes[0] if nodes else None, tuple(dropouts), reasons[0] if reasons else "")


def _of_bits(user: Node, value: Value) -> "_Mask | str | None":
    """Follows random bits or uniform numbers through a node: to a mask, uniform numbers (None), or what forbids it."""
    if user.name in _SHAPED or user.name in _TO_FLOATS:
        return None
    others = [number_of(x) for x in user.inputs if x is not value]
    number = others[0] if len(others) == 1 else None
    if number is not None and user.name in _TO_UNIT:
        return None if number == _TO_UNIT[user.name] else "the random numbers are not between 0 and 1"
    if number is not None and user.name in _COMPARISONS and 0 < number < 1:
        is_below = _COMPARISONS[user.name] == (user.inputs[0] is value)
        return _Mask(number if is_below else 1 - number)
    return f"its random numbers are read by {user.name} too"


def _of_mask(user: Node, value: Value, mask: _Mask) -> _Mask | _Masked | str:
    """Follows a mask through a node: to another mask, to an array times the mask, or to what forbids a rewrite."""
    others = [x for x in user.inputs if x is not value]
    numbers = [number_of(x) for x in others]
    match user.name, numbers:
        case name, _ if name in _SHAPED:
            return mask
        case "not", []:
            return _Mask(1 - mask.kept_rate)
        case "sub", [1.0] if user.inputs[1] is value and mask.factor == 1:
            return _Mask(1 - mask.kept_rate)
        case "mul", [None] if jnp.issubdtype(others[0].aval.dtype, jnp.floating):
            return _Masked(others[0], mask)
        case "mul", [float(number)]:
            return _Mask(mask.kept_rate, mask.factor * number)
        case "div", [float(number)] if number and user.inputs[0] is value:
            return _Mask(mask.kept_rate, mask.factor / number)
        case "select_n", [0.0, None] if user.inputs[0] is value:
            return _Masked(others[1], mask)
        case "select_n", [None, 0.0] if user.inputs[0] is value:
            return _Masked(others[0], _Mask(1 - mask.kept_rate))
        case "select_n", [0.0, float(number)] if user.inputs[0] is value:
            return _Mask(mask.kept_rate, number)
        case "select_n", [float(number), 0.0] if user.inputs[0] is value:
            return _Mask(1 - mask.kept_rate, number)
    return f"its mask is read by {user.name} too"


def _dropout(
    node: Node, masked: _Masked, results: Collection[Value], is_wanted: Callable[[Node], bool]
) -> Dropout | None:
    """Returns the whole dropout, with the scaling of x before or of the result after; None if the scale is another."""
    y, kept_rate, factor = node.outputs[0], masked.mask.kept_rate, masked.mask.factor
    tolerance = max(_TOLERANCE, float(jnp.finfo(y.aval.dtype).eps)) if jnp.issubdtype(y.aval.dtype, jnp.floating) else 0

    def is_inverse(factor: float) -> bool:
        return abs(factor * kept_rate - 1) <= tolerance

    for x, scale in _before(masked.x):
        if is_inverse(factor * scale):
            return Dropout(node, x, y, kept_rate) if x.shape == y.shape else None
    while y not in results and len(users := [*filter(is_wanted, y.users)]) == 1:
        scaled = _by_number(users[0], y)
        if scaled is None:
            return None
        y, factor = users[0].outputs[0], factor * scaled
        if is_inverse(factor):
            return Dropout(node, masked.x, y, kept_rate) if masked.x.shape == y.shape else None
    return None


def _before(x: Value) -> Iterator[tuple[Value, float]]:
    """Yields an array and what it was before each multiplication or division by a number, with the numbers' product."""
    scale = 1.0
    while True:
        yield x, scale
        node = x.producer
        if node is None or node.name not in ("mul", "div"):
            return
        inner = next((one for one in node.inputs if number_of(one) is None), None)
        scaled = None if inner is None else _by_number(node, inner)
        if inner is None or scaled is None:
            return
        x, scale = inner, scale * scaled


def _by_number(node: Node, value: Value) -> float | None:
    """Returns the number that a node multiplies a value by."""
    numbers = [number_of(x) for x in node.inputs if x is not value]
    if len(numbers) != 1 or numbers[0] is None:
        return None
    if node.name == "mul":
        return numbers[0]
    return 1 / numbers[0] if node.name == "div" and node.inputs[0] is value and numbers[0] else None


def number_of(value: Value) -> float | None:
    """Returns the number that all elements have, if it is written in the code or computed from such numbers."""
    node = value.producer
    if node is None:
        is_real = any(jnp.issubdtype(value.aval.dtype, kind) for kind in (jnp.floating, jnp.integer))
        return float(value.number) if is_real and value.number is not None else None
    if node.name in _SHAPED:
        return number_of(node.inputs[0])
    if node.name not in _ARITHMETIC:
        return None
    numbers = [number_of(x) for x in node.inputs]
    return None if None in numbers else _ARITHMETIC[node.name](*numbers)
