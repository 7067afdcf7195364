"""Cheap looks at what depends on a matrix product, before anything is proved about it."""

from collections.abc import Iterable
from typing import Any

from jaxops.linear_cross_entropy.rewriting.region import equations_within
from lowering.rewriting.graph import PRODUCTS, Node, Value, backward, forward, size_of

_IN_ORDER = frozenset({"argmax", "argmin", "top_k", "approx_top_k", "sort", "cumsum", "cummax", "cumlogsumexp"})


def dependents(head: Node) -> tuple[set[Node], set[Value]]:
    """Collects the nodes that depend on a product, up to the next layers', and the values that do."""
    values = forward(head.outputs, lambda node, _: not is_layer(node))
    return {node for value in values for node in value.users if not is_layer(node)}, values


def is_layer(node: Node) -> bool:
    """Tells whether a node is a product with a weight; one with one-hot labels has two operands of the logits' size."""
    return node.name in PRODUCTS and len({x.size for x in node.inputs}) > 1


def is_like_loss(head: Node) -> bool:
    """Tells whether a product is compared with something of its size, and its log sum exp or maximum is taken."""
    nodes, dependent = dependents(head)
    names = _names(nodes)
    others = (x for node in nodes for x in node.inputs if x not in dependent and _is_wide(x.aval, head))
    is_compared = "gather" in names or any(x.producer is not None for x in others)
    return is_compared and ("reduce_max" in names or has_log_sum_exp(head))


def has_log_sum_exp(head: Node) -> bool:
    """Tells whether logarithms and exponentials depend on a product, as in any log-probabilities or entropies."""
    names = _names(dependents(head)[0])
    return "exp" in names and not names.isdisjoint(("log", "log1p", "log2"))


def read_at_labels(head: Node) -> str:
    """Says what is computed of a product and labels without a log sum exp; nothing if there are no labels."""
    nodes, dependent = dependents(head)
    names = _names(nodes)
    if "exp" in names or not any(_reads_labels(node, head.outputs[0].size, dependent) for node in nodes):
        return ""
    if not names.isdisjoint(("square", "integer_pow")):
        return "squared differences from labels"
    if "reduce_max" in names:
        return "maxima of rows and the numbers at labels"
    return "the positive part of products with labels" if "max" in names else "the numbers at labels"


def read_in_order(head: Node) -> str:
    """Lists the primitives that rank or add up the numbers of each row of a product, such as "argmax and top_k"."""
    nodes, dependent = dependents(head)
    read = (node.name for node in nodes if node.inputs[0] in dependent and node.inputs[0].size == head.outputs[0].size)
    return " and ".join(sorted(_IN_ORDER.intersection(read)))


def _reads_labels(node: Node, size: int, dependent: set[Value]) -> bool:
    """Tells whether a node picks a number from each row by integers, or compares all with one-hot labels."""
    operand, *others = node.inputs
    if node.name == "gather":
        is_picked = node.outputs[0].size in operand.shape or node.outputs[0].size * operand.shape[-1] == operand.size
        return operand in dependent and operand.size == size and is_picked and not _is_constant(others[0])
    return any(x.size == size and x not in dependent and is_one_hot(x) for x in node.inputs)


def _is_constant(value: Value) -> bool:
    return all(x.producer is not None or x.number is not None for x in backward(value, lambda *_: True))


def is_one_hot(value: Value) -> bool:
    """Tells whether an array is computed from one-hot labels, element by element."""
    made_of = backward(value, lambda _, x: x.size == value.size and not _is_product(x))
    producers = (x.producer for x in made_of)
    compared = (node.inputs for node in producers if node is not None and node.name == "eq")
    return any(not all(map(_is_constant, inputs)) for inputs in compared)


def _is_product(value: Value) -> bool:
    return value.producer is not None and value.producer.name in PRODUCTS


def _names(nodes: Iterable[Node]) -> set[str]:
    return {equation.primitive.name for node in nodes for equation in equations_within(node)}


def is_about(size: int, other: int) -> bool:
    """Tells whether a number of classes is another one, or that without padding, or with classes added to it."""
    return 0.8 * other < size < 1.25 * other


def reduced_sizes(head: Node) -> set[int]:
    """Returns the lengths of the axes over which arrays of the logits' size are added up, or of many of their rows."""
    return {
        equation.invars[0].aval.shape[axis]
        for node in dependents(head)[0]
        for equation in equations_within(node)
        if equation.primitive.name == "reduce_sum" and _is_wide(equation.invars[0].aval, head, 16)
        for axis in equation.params["axes"]
    }


def _is_wide(aval: Any, head: Node, share: int = 2) -> bool:
    return head.outputs[0].size // share < size_of(aval) < 1.25 * head.outputs[0].size
