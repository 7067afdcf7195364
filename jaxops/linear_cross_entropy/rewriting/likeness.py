"""Cheap looks at what depends on a matrix product, before anything is proved about it."""

from collections.abc import Iterable

from jaxops._checks.dtypes import accumulation_dtype
from jaxops.linear_cross_entropy.rewriting.reading import ELEMENTWISE
from jaxops.linear_cross_entropy.rewriting.region import equations_within
from jaxops.linear_cross_entropy.savings import LEAST_ARRAYS
from lowering.rewriting.graph import Level, Node, Value, size_of
from lowering.rewriting.peeling import PRODUCTS


def dependents(head: Node) -> tuple[set[Node], set[Value]]:
    """Collects the nodes that depend on a product, up to the next layers', and the values that do."""
    nodes: set[Node] = set()
    values, waiting = set(head.outputs), [*head.outputs]
    while waiting:
        for node in waiting.pop().users:
            if node not in nodes and not is_layer(node):
                nodes.add(node)
                values.update(node.outputs)
                waiting += node.outputs
    return nodes, values


def is_layer(node: Node) -> bool:
    """Tells whether a node is a product with a weight; one with one-hot labels has two operands of the logits' size."""
    return node.name in PRODUCTS and len({x.size for x in node.inputs}) > 1


def is_like_loss(head: Node) -> bool:
    """Tells whether a product is compared with something of its size, and its log sum exp or maximum is taken."""
    nodes, dependent = dependents(head)
    names = _names(nodes)
    others = (x for node in nodes for x in node.inputs if x not in dependent and x.size == head.outputs[0].size)
    is_compared = "gather" in names or any(x.producer is not None for x in others)
    return is_compared and ("reduce_max" in names or has_log_sum_exp(head))


def has_log_sum_exp(head: Node) -> bool:
    """Tells whether logarithms and exponentials depend on a product, as in any log-probabilities or entropies."""
    names = _names(dependents(head)[0])
    return "exp" in names and not names.isdisjoint(("log", "log1p"))


def _names(nodes: Iterable[Node]) -> set[str]:
    return {equation.primitive.name for node in nodes for equation in equations_within(node)}


def reduced_sizes(head: Node) -> set[int]:
    """Returns the lengths of the axes over which arrays of the logits' size are added up."""
    return {
        equation.invars[0].aval.shape[axis]
        for node in dependents(head)[0]
        for equation in equations_within(node)
        if equation.primitive.name == "reduce_sum" and size_of(equation.invars[0].aval) == head.outputs[0].size
        for axis in equation.params["axes"]
    }


def logits_arrays(level: Level, head: Node) -> float:
    """Counts the arrays of the logits' size that plain JAX keeps for the gradient, as XLA was seen to for CPUs.

    Beside the logits and their cotangent, these are what a tanh computes, log-probabilities, the factors of products
    apart from one-hot labels, and exponentials in 16 bits; what has 16 bits counts half.
    """
    size, itemsize = head.outputs[0].size, accumulation_dtype(head.outputs[0].dtype).itemsize
    nodes, dependent = dependents(head)
    # In a gradient the same factors meet again, and what is kept between the two is kept once.
    is_gradient = any(is_layer(node) for x in dependent if x.size == size for node in x.users)
    kept: set[Value] = set()
    logs: set[Value] = set()
    forms_log_probs = False
    for node in filter(nodes.__contains__, level.nodes):
        is_wide = any(x.size == size for x in node.outputs)
        if not is_wide:
            if node.name == "log" or any(x in logs for x in node.inputs):
                logs.update(node.outputs)
        elif node.name == "tanh" or (node.name == "exp" and node.outputs[0].dtype.itemsize < itemsize):
            kept.update(node.outputs)
        elif node.name in ELEMENTWISE and any(x in logs for x in node.inputs):
            forms_log_probs = True
            logs.update(node.outputs)
        if node.name == "mul" and all(x.size == size for x in node.inputs) and not is_gradient:
            kept.update(x for x in node.inputs if x not in logs and (x in dependent or not _is_free(x)))
    return LEAST_ARRAYS + forms_log_probs + sum(x.dtype.itemsize for x in kept) / itemsize


def _is_free(value: Value) -> bool:
    """Tells whether an array is an argument, or one-hot labels, which XLA makes where it reads them."""
    while value.producer is not None and value.producer.name in ("convert_element_type", "broadcast_in_dim"):
        (value, *_) = value.producer.inputs
    return value.producer is None or value.producer.name == "eq"
