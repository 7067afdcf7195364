"""Places where a user could call the operator, as a linear layer computes logits only for a cross entropy."""

import math
from collections.abc import Iterable, Iterator
from typing import Any

from jax.export import is_symbolic_dim

from jaxops.linear_cross_entropy.rewriting import savings
from lowering.rewriting.graph import LOOPS, RESHAPES, Level, Node, Value, backward, described, forward, key_of, unshaped
from lowering.rewriting.rules import Suggestion

# What leads from logits to log-probabilities and losses: a bias, mask, temperature, softcap or shift, and sums.
_STEPS = frozenset(
    {"add", "add_any", "sub", "neg", "mul", "div", "max", "abs", "clamp", "tanh", "select_n", "transpose", "slice"}
    | {"dynamic_slice", "psum", "psum_invariant", *RESHAPES}
)
# These reduce logits to numbers per row or per class, as losses, accuracies and their gradients do.
_SUMMARIES = frozenset({"reduce_sum", "reduce_max", "argmax", "gather", "dynamic_slice", "reduce_and", "reduce_or"})
_ORDERS = frozenset({"sort", "top_k", "approx_top_k", "cumsum", "cummax", "cumlogsumexp"})


def suggest(level: Level) -> Iterator[Suggestion]:
    """Finds matrix products that are normalised over classes and read at the labels, on the way to a log.

    A gradient computes logits, exponentials and picks once more, but no log.
    """
    known: set[Node] = set()
    for log in level.named("log"):
        for total in _nearest("reduce_sum", log.inputs[0], _STEPS | {"gather"}):
            classes = math.prod(total.inputs[0].shape[axis] for axis in total.params["axes"])
            for exp in _nearest("exp", total.inputs[0]):
                for head in _nearest("dot_general", exp.inputs[0]) - known:
                    pick = _pick(level, head, exp, log, classes)
                    if pick is not None:
                        known.add(head)
                        yield _suggestion(level, head, pick, classes)


def _nearest(name: str, value: Value, steps: frozenset[str] = _STEPS) -> set[Node]:
    """Finds the nodes of a primitive from which these steps lead to a value."""
    values = backward(value, lambda node, _: node.name in steps)
    return {x.producer for x in values if x.producer is not None and x.producer.name == name}


def _after(values: Iterable[Value]) -> set[Value]:
    return forward(values, lambda node, _: node.name in _STEPS)


def _pick(level: Level, head: Node, exp: Node, log: Node, classes: Any) -> Node | None:
    """Finds what picks a class in each row, by labels that do not come from the logits themselves."""
    key = key_of(head.equation, head.inputs)
    alike = (
        node
        for node in level.named(head.name)
        if node is head or (key is not None and key_of(node.equation, node.inputs) == key)
    )
    of_logits = forward((x for node in alike for x in node.outputs), lambda *_: True)
    logits = _after(head.outputs) | _after(log.outputs)
    reached = logits | _after(exp.outputs)
    for node in level.nodes:
        for value in reached.intersection(node.inputs):
            others = [x for x in node.inputs if x is not value]
            if of_logits.isdisjoint(others) and _picks(node, value, others, classes):
                # Probabilities may be read before their log is taken, if not weighted by others.
                is_hard = node.name not in ("mul", "dot_general") or _is_one_hot(others[0])
                if value in logits or (is_hard and log.inputs[0] in forward(node.outputs, lambda *_: True)):
                    return node
    return None


def _picks(node: Node, value: Value, others: list[Value], classes: Any) -> bool:
    """Tells whether a node picks one of `classes` in each row, or weights all."""
    if not others or not node.outputs:
        return False
    (result, *_), size = node.outputs, value.symbolic_size
    is_row = bool(result.symbolic_size * classes == size)
    match node.name:
        case "gather" | "dynamic_slice":
            return value is node.inputs[0] and is_row and not all(map(_is_fixed, others))
        case "dot_general":
            return bool(others[0].symbolic_size == size) and (is_row or result.size == 1)
        case "mul" | "select_n" if node.name == "mul" or _is_one_hot(others[0]):
            return bool(unshaped(others[0]).symbolic_size == size) and _is_summed(result, classes)
    return node.name == "nll_loss" and value is node.inputs[0]


def _is_fixed(value: Value) -> bool:
    """Tells whether a value is made of numbers in the code, as one class for all rows is; positions may be labels."""
    made_of = backward(value, lambda *_: True)
    return all(x.number is not None if x.producer is None else x.producer.name != "iota" for x in made_of)


def _is_one_hot(value: Value) -> bool:
    producer = unshaped(value).producer
    return producer is not None and producer.name == "eq"


def _is_summed(products: Value, classes: Any) -> bool:
    """Tells whether an array is then summed over the classes."""
    sums = (node for x in _after([products]) for node in x.users if node.name == "reduce_sum")
    return any(classes in [node.inputs[0].shape[axis] for axis in node.params["axes"]] for node in sums)


def _suggestion(level: Level, head: Node, pick: Node, classes: Any) -> Suggestion:
    (logits,), saved = head.outputs, _saved_bytes(head, classes)
    memory = f" ({logits.size * logits.dtype.itemsize:,} bytes)" if logits.size else ""
    detail = f"logits {described(logits)}{memory} for a log-softmax that labels pick from on {pick.source}"
    readers = [] if saved == 0 else _other_readers(level, head, classes)
    obstacle = f"the logits are also {' and '.join(readers)}" if readers else ""
    return Suggestion(head, detail, saved, obstacle, remark="where it is differentiated")


def _saved_bytes(head: Node, classes: Any) -> int | None:
    """Returns the bytes that the operator saves, 0 if that is not worthwhile; None for symbolic sizes."""
    (logits,), (contracted, _) = head.outputs, head.params["dimension_numbers"]
    if any(map(is_symbolic_dim, (classes, *(x.symbolic_size for x in (logits, *head.inputs))))):
        return None
    features = math.prod(head.inputs[0].shape[axis] for axis in contracted[0])
    sides = [side for side in (1, 0) if head.inputs[side].size == classes * features]
    side = min(sides, key=lambda side: 0 in contracted[side], default=1)
    found = savings.saving(logits, head.inputs[side], classes, is_transposed=0 in contracted[side])
    return found.saved_bytes if found.is_worthwhile else 0


def _other_readers(level: Level, head: Node, classes: Any) -> list[str]:
    """Describes each place that needs whole rows of logits, or of an equally large array computed from them."""

    def stays_whole(node: Node, _: Value) -> bool:
        has_classes = any(bool(size == classes) for x in node.outputs for size in x.shape)
        return has_classes and node.name not in _SUMMARIES | _ORDERS | LOOPS | {"pallas_call", "dot_general"}

    def needs_whole(node: Node, x: Value) -> bool:
        if node.name == "dot_general":
            # The gradient's products carry the line of the forward one; others pick by one-hot labels.
            others = [one for one in node.inputs if one is not x]
            return node.source != head.source and not any(bool(one.symbolic_size == x.symbolic_size) for one in others)
        return not (node.name in _SUMMARIES or node.name.startswith("nll_loss") or stays_whole(node, x))

    whole = forward(head.outputs, stays_whole)
    readers = [node for node in level.nodes if any(x in whole and needs_whole(node, x) for x in node.inputs)]
    read = [f"read by {node.name} on {node.source}" for node in readers]
    return list(dict.fromkeys([*(["returned"] if whole & {*level.results} else []), *read]))
