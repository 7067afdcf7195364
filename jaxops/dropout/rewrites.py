"""The rewrite of dropout by a random number for each element. It draws other bits, so it has to be asked for."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxops.dropout.api import dropout
from jaxops.linear_cross_entropy.rewriting.sinks import constant_of
from lowering.rewriting.graph import Level, Node, Value
from lowering.rewriting.rules import Found, Missed, Rule, described
from lowering.rewriting.schedule import Step, needed

_SHAPED = frozenset({"broadcast_in_dim", "reshape", "squeeze", "convert_element_type", "copy"})
_TO_UNIFORM = _SHAPED | {"shift_right_logical", "or", "bitcast_convert_type", "sub", "add", "mul", "max"}
# What JAX makes of a number in [1, 2), for a range from 0 to 1.
_UNIT = {"sub": 1.0, "mul": 1.0, "add": 0.0, "max": 0.0}
# XLA's CPU code keeps this much more per element.
_SAVED_BYTES_PER_ELEMENT = 6


def _find(level: Level, steps: tuple[Step, ...]) -> Iterator[Found | Missed]:
    wanted = needed(level, steps)
    for node in level.named("select_n"):
        if node not in wanted or len(node.inputs) != 3 or not jnp.issubdtype(node.outputs[0].dtype, jnp.floating):
            continue
        mask, dropped, kept = node.inputs
        random, x = _random(mask), _unscaled(kept)
        if random is None or x is None or _number(dropped) != 0:
            continue
        key, kept_rate, shape = random
        detail = f"dropout of {described(node.outputs[0])}"
        if abs(x[1] - kept_rate) > 1e-6:
            yield Missed(node, detail, "what is kept is not divided by the rate at which it is kept")
        elif tuple(shape) != tuple(node.outputs[0].shape):
            yield Missed(node, detail, "the elements do not have a random number each")
        else:
            saved = _SAVED_BYTES_PER_ELEMENT * node.outputs[0].size
            yield Found(node, detail, saved, (_step(node, key, x[0], 1 - kept_rate),))


def _step(node: Node, key: Value, x: Value, rate: float) -> Step:
    def run(key: Any, x: Any) -> Any:
        return (dropout(key, x, rate).astype(node.outputs[0].dtype),)

    return Step((key, x), node.outputs, run)


def _random(mask: Value) -> tuple[Value, float, Any] | None:
    """The key and the rate of a mask that is true where a uniform random number is below the rate; its shape."""
    compared = _source(mask, _SHAPED)
    node = None if compared is None else compared.producer
    if node is None or node.name != "lt":
        return None
    rate, bits = _number(node.inputs[1]), _source(node.inputs[0], _TO_UNIFORM)
    if rate is None or not 0 < rate < 1 or bits is None or bits.producer is None or bits.producer.name != "random_bits":
        return None
    (key,) = bits.producer.inputs
    return (key, rate, bits.shape) if key.shape == () else None


def _unscaled(value: Value) -> tuple[Value, float] | None:
    """An array and the number that it is divided by."""
    node = value.producer
    number = None if node is None or node.name != "div" else _number(node.inputs[1])
    return None if node is None or number is None else (node.inputs[0], float(number))


def _source(value: Value, through: frozenset[str]) -> Value | None:
    """What a value is made of by these primitives alone; None if random numbers are not between 0 and 1."""
    while value.producer is not None and value.producer.name in through:
        node = value.producer
        value = max(node.inputs, key=lambda x: x.size)
        if node.name in _UNIT:
            others = [constant_of(x) for x in node.inputs if x is not value]
            if len(others) != 1 or others[0] is None or not np.all(others[0] == _UNIT[node.name]):
                return None
    return value


def _number(value: Value) -> Any:
    """The number that all elements have, if it is written in the code."""
    while value.producer is not None and value.producer.name in _SHAPED:
        value = value.producer.inputs[0]
    if value.is_constant and not isinstance(value.constant, jax.core.Tracer) and value.size == 1:
        return value.number if value.shape == () else None
    return None


DROPOUT_MASKS = Rule(
    "dropout",
    _find,
    lambda: 2**62,
    primitives=frozenset({"random_bits"}),
    asked=True,
    remark="with other random bits",
)
