"""The pattern of logits that a linear layer computes only for a cross entropy."""

import math
from collections.abc import Iterator
from typing import Any

import jax.export

from jaxops.linear_cross_entropy.readers import other_readers
from jaxops.linear_cross_entropy.rewriting import savings
from lowering.patterns import RESHAPES, Finding, Graph, Operation, Pattern, Value, backward, describe, forward, unshaped

_LINEAR = frozenset({"add", "add_any", "sub", "neg", "transpose", "slice", *RESHAPES})
_SUMS = frozenset({"psum", "psum_invariant"})


def _find(graph: Graph) -> Iterator[Finding]:
    """Finds matrix products that are normalised over classes and read at the labels, on the way to a log."""
    known = set()
    for log in graph.named("log"):
        for matmul, classes, pick in (*_picked_log_softmax(graph, log), *_log_of_picked_softmax(graph, log)):
            if matmul not in known:
                known.add(matmul)
                saved = _saved_bytes(matmul, classes)
                readers = other_readers(graph, matmul, classes) if saved != 0 else []
                reason = f"the logits are also {' and '.join(readers)}" if readers else ""
                yield Finding(matmul, _detail(matmul, pick), saved, reason)


def _saved_bytes(matmul: Operation, classes: Any) -> int | None:
    """Returns the bytes that the operator saves, 0 if that is not worthwhile; None for symbolic sizes."""
    (logits,), (contracted, _) = matmul.outputs, matmul.params["dimension_numbers"]
    if any(map(jax.export.is_symbolic_dim, (classes, *(x.size for x in (logits, *matmul.inputs))))):
        return None
    features = math.prod(matmul.inputs[0].shape[axis] for axis in contracted[0])
    sides = [side for side in (1, 0) if matmul.inputs[side].size == classes * features]
    side = min(sides, key=lambda side: 0 in contracted[side], default=1)
    weight, is_transposed = matmul.inputs[side].aval, 0 in contracted[side]
    found = savings.saving(logits.aval, weight, classes, is_transposed=is_transposed)
    return found.saved_bytes if found.is_worthwhile else 0


def _picked_log_softmax(graph: Graph, log: Operation) -> Iterator[tuple[Operation, Any, Operation]]:
    """Yields the first matrix product whose log sum exp this is, its classes, and what picks from its log-softmax."""
    for matmul, classes in _softmax_inputs(log):
        pick = _pick_by_label(matmul, classes, log, _made_of(graph, matmul))
        if pick is not None:
            yield matmul, classes, pick
            return


def _log_of_picked_softmax(graph: Graph, log: Operation) -> Iterator[tuple[Operation, Any, Operation]]:
    """Yields matrix products whose softmax is picked at a class per row before this log; their classes; what picks."""
    for value in backward(log.inputs[0], _keeps_picked):
        pick = value.producer
        if pick is None or pick.name not in ("gather", "dynamic_slice", "mul", "select_n"):
            continue
        for probabilities in pick.inputs:
            is_weighted = pick.name == "mul" and not all(_is_one_hot(x) for x in pick.inputs if x is not probabilities)
            for matmul, classes in () if is_weighted else _softmax_of(probabilities):
                if _picks(pick, probabilities, classes, _made_of(graph, matmul)):
                    yield matmul, classes, pick


def _softmax_of(probabilities: Value) -> Iterator[tuple[Operation, Any]]:
    """Yields matrix products whose exponentials over their sum these are, and the number of classes summed over."""
    for quotient in _producers(probabilities, _keeps_shape, "div"):
        for total in _producers(quotient.inputs[1], _keeps_sums, "reduce_sum"):
            exponentials = _producers(quotient.inputs[0], _keeps_shape, "exp")
            for exponential in exponentials & _producers(total.inputs[0], _keeps_shape, "exp"):
                for matmul in _producers(exponential.inputs[0], _keeps_logits, "dot_general"):
                    yield matmul, _reduced(total)


def _detail(matmul: Operation, pick: Operation) -> str:
    (logits,) = matmul.outputs
    is_symbolic = not isinstance(logits.size, int)
    memory = "" if is_symbolic else f" ({logits.size * logits.aval.dtype.itemsize:,} bytes)"
    return f"logits {describe(logits)}{memory} for a log-softmax that labels pick from on {pick.source}"


def _softmax_inputs(log: Operation) -> list[tuple[Operation, Any]]:
    """Lists matrix products whose log sum exp this is, and the number of classes."""
    found = {}
    for total in _producers(log.inputs[0], _keeps_sums, "reduce_sum"):
        (terms,) = total.inputs
        classes = _reduced(total)
        for exponential in _producers(terms, _keeps_sums, "exp"):
            for matmul in _producers(exponential.inputs[0], _keeps_logits, "dot_general"):
                found[matmul] = classes
    return list(found.items())


def _producers(value: Value, follows: Any, name: str) -> set[Operation]:
    """Returns the nearest operations of this name that a value is computed from."""
    producers = (x.producer for x in backward(value, follows))
    return {producer for producer in producers if producer is not None and producer.name == name}


def _keeps_logits(operation: Operation, operand: Value) -> bool:
    """Tells whether the result holds logits if the operand does: after a bias, mask, temperature, softcap or shift."""
    if operation.name in ("mul", "div"):
        return operand is operation.inputs[0] if operation.name == "div" else _is_scaled(operation, operand)
    if operation.name in ("select_n", "dynamic_slice"):
        return _is_selected(operation, operand)
    return operation.name in _LINEAR or operation.name == "tanh"


def _keeps_sums(operation: Operation, operand: Value) -> bool:
    """Tells the same on the way from exponentials through their sum to its logarithm."""
    if operation.name == "select_n":
        return _is_selected(operation, operand)
    return operation.name in _LINEAR | _SUMS or operation.name in ("mul", "div", "abs", "max")


def _keeps_losses(operation: Operation, operand: Value) -> bool:
    """Tells the same on the way from picked logits to a loss."""
    if operation.name == "gather":  # optax takes the only column in this way
        return operand is operation.inputs[0] and bool(operation.outputs[0].size == operand.size)
    return operation.name in ("reduce_sum", "mul", "div", *_SUMS) or _keeps_logits(operation, operand)


def _keeps_picked(operation: Operation, operand: Value) -> bool:
    """Tells the same on the way from probabilities through picking to a logarithm."""
    if operation.name in ("gather", "dynamic_slice", "select_n"):
        return _is_selected(operation, operand)
    return operation.name in _LINEAR or operation.name in ("mul", "max", "clamp", "reduce_sum")


def _keeps_shape(operation: Operation, operand: Value) -> bool:
    return operation.name in RESHAPES


def _is_one_hot(value: Value) -> bool:
    producer = unshaped(value).producer
    return producer is not None and producer.name == "eq"


def _is_scaled(operation: Operation, operand: Value) -> bool:
    """Tells whether the other factor is smaller: a number, or one per row or class."""
    other = operation.inputs[operation.inputs[0] is operand]
    return bool(unshaped(other).size != operand.size)


def _is_selected(operation: Operation, operand: Value) -> bool:
    """Tells whether the operand is what is selected from, not what decides."""
    if operation.name == "select_n":
        return operand is not operation.inputs[0]
    return operand is operation.inputs[0]


def _reduced(operation: Operation) -> Any:
    """Counts the elements that a sum adds up."""
    size: Any = 1
    for axis in operation.params["axes"]:
        size = size * operation.inputs[0].shape[axis]
    return size


def _pick_by_label(matmul: Operation, classes: Any, log: Operation, made_of_logits: set[Value]) -> Operation | None:
    """Finds the operation that picks one class per row from the log-softmax, or from the logits that remain of it."""
    log_probs = forward(log.outputs, _keeps_logits)
    losses = forward(log.outputs, _keeps_losses)
    for value in forward(matmul.outputs, _keeps_logits) | log_probs:
        for operation in value.users:
            if not _picks(operation, value, classes, made_of_logits):
                continue
            if value in log_probs or forward(operation.outputs, _keeps_losses) & losses:
                return operation
    return None


def _made_of(graph: Graph, matmul: Operation) -> set[Value]:
    """Returns everything computed from these logits, also where they are computed again."""
    return forward((x for same in graph.duplicates(matmul) for x in same.outputs), lambda *_: True)


def _picks(operation: Operation, logits: Value, classes: Any, made_of_logits: set[Value]) -> bool:
    """Tells whether this picks one of `classes` in each row, by labels that do not come from the logits themselves."""
    rest = [x for x in operation.inputs if x is not logits]
    if not rest or not operation.outputs or made_of_logits & set(rest):
        return False
    result = operation.outputs[0]
    is_row = bool(result.size * classes == logits.size)
    match operation.name:
        case "gather" | "dynamic_slice":
            return logits is operation.inputs[0] and is_row and not all(_is_constant(x) for x in rest)
        case "dot_general":
            return bool(rest[0].size == logits.size) and (is_row or result.size == 1)
        case "mul":
            return bool(unshaped(rest[0]).size == logits.size) and _is_summed(operation, classes)
        case "select_n":
            mask = unshaped(operation.inputs[0])
            return bool(_is_one_hot(mask) and mask.size == logits.size and _is_summed(operation, classes))
    return operation.name == "nll_loss" and logits is operation.inputs[0]


def _is_summed(operation: Operation, classes: Any) -> bool:
    """Tells whether the result is then summed over the classes."""
    products = forward(operation.outputs, _keeps_logits)
    sums = (user for product in products for user in product.users if user.name == "reduce_sum")
    return any(classes in [total.inputs[0].shape[axis] for axis in total.params["axes"]] for total in sums)


def _is_constant(value: Value) -> bool:
    """Tells whether a value is written in the code: a fixed class is not a label."""
    made_of = backward(value, lambda *_: True)
    return all(x.number is not None if x.producer is None else x.producer.name != "iota" for x in made_of)


LOGITS_CROSS_ENTROPY = Pattern(
    "logits for a cross entropy", "jaxops.linear_cross_entropy", _find, remark="where it is differentiated"
)
