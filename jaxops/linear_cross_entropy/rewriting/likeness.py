"""Cheap looks at what depends on a matrix product, before anything is proved about it."""

from collections.abc import Iterable

from jaxops._checks.dtypes import accumulation_dtype
from jaxops.linear_cross_entropy.rewriting.region import equations_within
from jaxops.linear_cross_entropy.rewriting.row_wise import ELEMENTWISE
from jaxops.linear_cross_entropy.rewriting.savings import KEEPS_ROUNDED, LEAST_ARRAYS, MANY_ROWS
from lowering.rewriting.graph import Level, Node, Value, backward, forward, size_of
from lowering.rewriting.peeling import PRODUCTS

_IN_ORDER = frozenset({"argmax", "argmin", "top_k", "approx_top_k", "sort", "cumsum", "cummax", "cumlogsumexp"})


def dependents(head: Node) -> tuple[set[Node], set[Value]]:
    """Collects the nodes that depend on a product, up to the next layers', and the values that do."""
    values = forward(head.outputs, lambda node, _: not is_layer(node))
    return {node for value in values for node in value.users if not is_layer(node)}, values


def is_alike(node: Node, other: Node) -> bool:
    """Tells whether two nodes compute the same, which XLA merges into one."""
    same = [
        a is b or (a.number is not None and a.number == b.number)
        for a, b in zip(node.inputs, other.inputs, strict=True)
    ]
    return node is other or (all(same) and str(node.params) == str(other.params))


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


def reduced_sizes(head: Node) -> set[int]:
    """Returns the lengths of the axes over which arrays of the logits' size are added up."""
    return {
        equation.invars[0].aval.shape[axis]
        for node in dependents(head)[0]
        for equation in equations_within(node)
        if equation.primitive.name == "reduce_sum" and size_of(equation.invars[0].aval) == head.outputs[0].size
        for axis in equation.params["axes"]
    }


def is_plain(head: Node) -> bool:
    """Tells whether nothing is added to the result of a product, nor is it bounded, before its rows are reduced."""
    nodes, dependent = dependents(head)
    wide = (node for node in nodes if any(x.size == head.outputs[0].size for x in node.outputs))
    return not any(
        node.name == "tanh" or (node.name == "add" and not dependent.issuperset(node.inputs)) for node in wide
    )


def logits_arrays(level: Level, head: Node) -> float:
    """Counts the arrays of the logits' size that plain JAX keeps for the gradient, as XLA was seen to for CPUs.

    Beside the logits and their cotangent, these are what a tanh computes, log-probabilities, the factors of products
    apart from one-hot labels, and exponentials in 16 bits; what has 16 bits counts half. There may be more beside.
    """
    size, itemsize = head.outputs[0].size, accumulation_dtype(head.outputs[0].dtype).itemsize
    nodes, dependent = dependents(head)
    # In a gradient the same factors meet again, and what is kept between the two is kept once.
    is_gradient = any(is_layer(node) for x in dependent if x.size == size for node in x.users)
    kept: set[Value] = set()
    logs: set[Value] = set()
    forms_log_probs = multiplies_log_probs = False
    for node in filter(nodes.__contains__, level.nodes):
        is_wide = any(x.size == size for x in node.outputs)
        if not is_wide:
            if node.name == "log" or any(x in logs for x in node.inputs):
                logs.update(node.outputs)
        elif node.name == "tanh" or (KEEPS_ROUNDED and node.name == "exp" and _is_rounded(node)):
            kept.update(node.outputs)
        elif node.name in ELEMENTWISE and any(x in logs for x in node.inputs):
            forms_log_probs = True
            logs.update(node.outputs)
        if node.name == "mul" and all(x.size == size for x in node.inputs) and not is_gradient:
            kept.update(x for x in node.inputs if x not in logs and (x in dependent or not _is_free(x)))
            multiplies_log_probs |= any(x in logs and x.dtype.itemsize == itemsize for x in node.inputs)
    if (
        KEEPS_ROUNDED
        and _is_rounded(head)
        and len(head.outputs[0].shape) == 2
        and min(head.outputs[0].shape) < MANY_ROWS
    ):
        # Few float32 log-probabilities are computed together with what they are multiplied by.
        forms_log_probs &= not multiplies_log_probs
    arrays = LEAST_ARRAYS + forms_log_probs + sum(x.dtype.itemsize for x in kept) / itemsize
    arrays += _arrays_of_own_derivative(nodes, size)
    wide = [node for node in nodes if any(x.size == size for x in node.outputs)]
    if len(head.outputs[0].shape) > 2:
        return arrays + _arrays_beside(head, nodes, wide)
    # Kept 16-bit logits that fit into the gradient of the weight take no memory beside it.
    fits = any(x.size >= size for x in head.inputs)
    keeps_logits = not KEEPS_ROUNDED and _is_rounded(head) and not fits and _keeps_logits(nodes, dependent, wide)
    return arrays + 0.5 * keeps_logits


def _arrays_of_own_derivative(nodes: set[Node], size: int) -> float:
    """Counts what a function of its own derivative keeps beside, if it takes logits in 16 bits, and targets as well."""
    wide = [[x for x in node.inputs if x.size == size] for node in nodes if _has_own_derivative({node})]
    narrow = [[x.dtype.itemsize == 2 for x in operands] for operands in wide]
    return max(((0.5 * KEEPS_ROUNDED if any(x) else 0) + (len(x) > 1 and all(x)) for x in narrow), default=0)


def _has_own_derivative(nodes: set[Node]) -> bool:
    return any(node.name.startswith("custom_vjp") for node in nodes)


def _keeps_logits(nodes: set[Node], dependent: set[Value], wide: list[Node]) -> bool:
    """Tells whether XLA keeps 16-bit logits beside what it computes from them: with a bias, or rows that weigh."""
    adds_bias = any(node.name == "add" and not dependent.issuperset(node.inputs) for node in wide)
    weighs_rows = any(
        node.name in ("mul", "square", "integer_pow") and not any(x.shape == () for x in (*node.inputs, *node.outputs))
        for node in nodes.difference(wide)
    )
    return adds_bias or weighs_rows or _has_own_derivative(nodes)


def _arrays_beside(head: Node, nodes: set[Node], wide: list[Node]) -> float:
    """Counts what is kept beside, where XLA lays rows of several axes out as one for products, and not for the rest."""
    if _has_own_derivative(nodes):
        # What a function of its own derivative keeps is computed before.
        return 0.5 if _is_rounded(head) else 2
    if not (KEEPS_ROUNDED and _is_rounded(head)):
        return 0
    # A bias is added in float32, to logits that are kept in both dtypes; so are those of exponentials in 16 bits.
    adds_bias = any(node.name == "add" and _is_rounded(node) for node in wide)
    has_exponentials = any(node.name == "exp" and _is_rounded(node) for node in wide)
    return adds_bias + 0.5 * (not has_exponentials)


def _is_rounded(node: Node) -> bool:
    return node.outputs[0].dtype.itemsize < accumulation_dtype(node.outputs[0].dtype).itemsize


def _is_free(value: Value) -> bool:
    """Tells whether an array is an argument, or one-hot labels, which XLA makes where it reads them."""
    while value.producer is not None and value.producer.name in ("convert_element_type", "broadcast_in_dim"):
        (value, *_) = value.producer.inputs
    return value.producer is None or value.producer.name == "eq"
