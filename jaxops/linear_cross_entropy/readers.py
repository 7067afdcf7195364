"""Finds what reads the logits of a linear layer besides a cross entropy and its gradient."""

from typing import Any

from lowering.patterns import Graph, Operation, Value, forward

# These reduce logits to numbers per row or per class, as losses, accuracies and their gradients do.
_SUMMARIES = frozenset({"reduce_sum", "reduce_max", "argmax", "gather", "dynamic_slice", "reduce_and", "reduce_or"})
_ORDERS = frozenset({"sort", "top_k", "approx_top_k", "cumsum", "cummax", "cumlogsumexp"})
_BODIES = frozenset({"scan", "while", "cond", "shard_map", "pallas_call"})


def other_readers(graph: Graph, matmul: Operation, classes: Any) -> list[str]:
    """Describes each place that needs whole rows of logits, or of an equally large array computed from them."""
    whole = forward(matmul.outputs, lambda operation, _: _stays_whole(operation, classes))
    readers = ["returned"] if whole & graph.results else []
    for operation in graph.operations:
        if any(_needs_whole_rows(operation, x, matmul, classes) for x in operation.inputs if x in whole):
            readers.append(f"read by {operation.name} on {operation.source}")
    return list(dict.fromkeys(readers))


def _stays_whole(operation: Operation, classes: Any) -> bool:
    """Tells whether the result still has all classes of a row."""
    if operation.name in _SUMMARIES | _ORDERS | _BODIES or operation.name == "dot_general":
        return False
    return any(_has_classes(x, classes) for x in operation.outputs)


def _needs_whole_rows(operation: Operation, operand: Value, matmul: Operation, classes: Any) -> bool:
    if operation.name == "dot_general":
        # The gradient's products carry the line of the forward one; others pick by one-hot labels.
        others = [x for x in operation.inputs if x is not operand]
        return operation.source != matmul.source and not any(bool(x.size == operand.size) for x in others)
    if operation.name in _SUMMARIES or operation.name.startswith("nll_loss"):
        return False
    return not _stays_whole(operation, classes)


def _has_classes(value: Value, classes: Any) -> bool:
    return any(bool(size == classes) for size in value.shape)
