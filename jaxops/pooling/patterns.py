"""Gradients of max pooling that search every window again for its largest element."""

from collections.abc import Iterator

from lowering.patterns import Finding, Graph, Pattern, describe


def _find(graph: Graph) -> Iterator[Finding]:
    """XLA's select-and-scatter, or in forward mode its transpose; those of minima are left alone."""
    for operation in graph.named("select_and_scatter_add", "select_and_gather_add"):
        if str(operation.params["select_prim"]) == "ge":
            pooled = operation.inputs[1]
            yield Finding(operation, f"the gradient of a max pooling of {describe(pooled)} by {operation.name}")


SELECT_AND_SCATTER = Pattern("gradient of a max pooling by select-and-scatter", "jaxops.max_pool", _find)
