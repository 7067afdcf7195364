"""Dropout in plain JAX: a random number per element decides whether it is scaled or set to zero."""

from collections.abc import Iterator

from lowering.patterns import RESHAPES, Finding, Graph, Operation, Pattern, Value, describe, forward, unshaped

# XLA's CPU code keeps this much more per element. Its compilers for TPUs and NVIDIA GPUs report that they keep nothing.
_SAVED_BYTES_PER_ELEMENT = 6

_TO_UNIFORM = frozenset({"shift_right_logical", "or", "bitcast_convert_type", "sub", "add", "mul", "max", *RESHAPES})
_COMPARISONS = frozenset({"lt", "le", "gt", "ge"})


def _find(graph: Graph) -> Iterator[Finding]:
    """Random bits that are compared with one number, and decide which elements of an equally large array are kept."""
    for bits in graph.named("random_bits"):
        for kept in _masked(bits):
            x = kept.outputs[0]
            saved = _SAVED_BYTES_PER_ELEMENT * x.size if isinstance(x.size, int) else None
            yield Finding(kept, f"dropout of {describe(x)} by a random number for each element", saved)
            break


def _masked(bits: Operation) -> Iterator[Operation]:
    """Operations that select elements by a mask made of these bits, and scale them before or after."""
    uniform = forward(bits.outputs, lambda operation, _: operation.name in _TO_UNIFORM)
    compared = {user for value in uniform for user in value.users if _is_threshold(user, uniform)}
    masks = forward((x for user in compared for x in user.outputs), lambda op, _: op.name in RESHAPES | {"not"})
    for mask in masks:
        for user in mask.users:
            others = [x for x in user.inputs if x is not mask and not _is_zero(x)]
            if user.outputs and len(others) == 1 and bool(mask.size == bits.outputs[0].size == user.outputs[0].size):
                is_masked = user.name == "mul" or (user.name == "select_n" and len(user.inputs) == 3)
                if is_masked and (_is_scaled(others[0]) or any(map(_scales, user.outputs[0].users))):
                    yield user


def _is_threshold(operation: Operation, uniform: set[Value]) -> bool:
    others = [x for x in operation.inputs if x not in uniform]
    return operation.name in _COMPARISONS and len(others) == 1 and bool(unshaped(others[0]).size == 1)


def _is_zero(value: Value) -> bool:
    number = unshaped(value).number
    return number is not None and not number


def _is_scaled(value: Value) -> bool:
    producer = unshaped(value).producer
    return producer is not None and _scales(producer)


def _scales(operation: Operation) -> bool:
    return operation.name in ("mul", "div") and any(bool(unshaped(x).size == 1) for x in operation.inputs)


DROPOUT_BY_UNIFORM = Pattern(
    "dropout by a random number for each element",
    "jaxops.dropout",
    _find,
    remark="with other random bits",
    platforms=frozenset({"cpu"}),
)
