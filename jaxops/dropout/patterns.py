"""Dropout in plain JAX: a random number per element decides whether it is scaled or set to zero."""

from collections.abc import Iterator

from jaxops.dropout.masks import uses_of_all
from lowering.patterns import Finding, Graph, Pattern, describe

# XLA's CPU code keeps this much more per element. Its compilers for TPUs and NVIDIA GPUs report that they keep nothing.
_SAVED_BYTES_PER_ELEMENT = 6


def _find(graph: Graph) -> Iterator[Finding]:
    """Finds random bits that are compared with one number and decide which elements of a like array are kept."""
    for _, uses in uses_of_all(graph.named("random_bits"), graph.results):
        if uses.node is not None and not uses.reason:
            x = uses.node.outputs[0]
            saved = _SAVED_BYTES_PER_ELEMENT * x.size if isinstance(x.size, int) else None
            yield Finding(uses.node, f"dropout of {describe(x)} by a random number for each element", saved)


DROPOUT_BY_UNIFORM = Pattern(
    "dropout by a random number for each element",
    "jaxops.dropout",
    _find,
    remark="with other random bits",
    platforms=frozenset({"cpu"}),
)
