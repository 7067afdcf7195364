"""The rewrite of rows that are looked up in a table, by their ids or by a product with one-hot ids."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from jaxops.embedding.api import embedding
from jaxops.linear_cross_entropy.rewriting.head import one_hot_labels
from jaxops.linear_cross_entropy.rewriting.likeness import is_one_hot
from lowering.rewriting.graph import Level, Node, Value, described
from lowering.rewriting.ordering import Step, needed
from lowering.rewriting.rules import Found, Missed, RefusalError, Rule

# Smaller tables, and smaller one-hot arrays, are not worth an operator.
LEAST_ELEMENTS = 2**20


def _find(level: Level, steps: tuple[Step, ...]) -> Iterator[Found | Missed]:
    wanted = needed(level, steps)
    for node in level.named("gather", "dot_general"):
        if node not in wanted or not _is_table(node):
            continue
        found = _of_gather(level, node) if node.name == "gather" else _of_product(node)
        if found is not None:
            yield found


def _is_table(node: Node) -> bool:
    table = node.inputs[node.name == "dot_general"]
    return len(table.shape) == 2 and bool(jnp.issubdtype(table.dtype, jnp.floating))


def _of_gather(level: Level, node: Node) -> Found | None:
    """Finds a lookup of whole rows in a gather."""
    table, indices = node.inputs
    numbers, rank = node.params["dimension_numbers"], len(node.outputs[0].shape)
    is_lookup = (
        numbers.start_index_map == (0,)
        and numbers.collapsed_slice_dims == (0,)
        and numbers.offset_dims == (rank - 1,)
        and not numbers.operand_batching_dims
        and tuple(node.params["slice_sizes"]) == (1, table.shape[1])
    )
    mode = node.params["mode"].name
    is_filled = mode == "FILL_OR_DROP"
    fill = node.params["fill_value"]
    is_nan = fill is None or fill != fill
    if not is_lookup or table.size <= LEAST_ELEMENTS or (is_filled and not is_nan):
        return None

    def run(table: Any, indices: Any) -> Any:
        ids = indices[..., 0]
        if is_filled:
            return (embedding(table, ids),)
        inside = jnp.clip(ids, 0, table.shape[0] - 1)
        rows = embedding(table, inside)
        if mode == "CLIP":
            return (rows,)
        # JAX takes a row for an id that is out of range, but drops its gradient.
        return (jnp.where((ids == inside)[..., None], rows, jax.lax.stop_gradient(rows)),)

    # The gradient of a 16-bit table is added up in a copy of 32 bits, and stays where it is here already; in float32,
    # only time is saved.
    gradients = (x for x in level.named("scatter-add") if indices in x.inputs and x.outputs[0].shape == table.shape)
    saved = 4 * table.size if table.dtype.itemsize == 2 and next(gradients, None) is None else 0
    detail = f"rows of {described(table)} at {described(indices)}"
    return Found(node, detail, saved, (Step(node.inputs, node.outputs, run),))


def _of_product(node: Node) -> Found | None:
    """Finds a lookup in a product of one-hot rows and a table."""
    one_hot, table = node.inputs
    contracted, batch = node.params["dimension_numbers"]
    axis = contracted[0][0] if len(contracted[0]) == 1 else None
    if batch[0] or axis is None or tuple(contracted[1]) != (0,) or one_hot.size <= LEAST_ELEMENTS:
        return None
    if axis != len(one_hot.shape) - 1 or node.outputs[0].dtype != table.dtype or not is_one_hot(one_hot):
        return None
    try:
        labels = one_hot_labels(one_hot, axis)
    except RefusalError:
        return None
    return Found(
        node,
        f"rows of {described(table)} by one-hot {described(one_hot)}",
        one_hot.size * one_hot.dtype.itemsize,
        (_lookup(node, table, *labels),),
    )


def _lookup(node: Node, table: Value, values: tuple[Value, ...], labels: Callable[..., Any]) -> Step:
    classes = table.shape[0]

    def run(table: Any, *arrays: Any) -> Any:
        ids = labels(*arrays)
        is_row = (ids >= 0) & (ids < classes)
        found = embedding(table, jnp.where(is_row, ids, jnp.zeros_like(ids)).astype(jnp.int32))
        return (jnp.where(is_row[..., None], found, jnp.zeros_like(found)),)

    return Step((table, *values), node.outputs, run)


# XLA:TPU keeps neither one-hot rows nor a copy of the gradient.
EMBEDDING_LOOKUP = Rule(
    "embedding",
    frozenset({"gather", "dot_general"}),
    _find,
    lambda: LEAST_ELEMENTS,
    platforms=frozenset({"cpu", "cuda"}),
)
