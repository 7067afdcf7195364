"""Adds a matrix product to a sum without storing the product, which XLA's CPU compiler does otherwise."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxops._primitive.sharding import explicit_mesh
from lowering.rewriting.graph import Node

# How many elements of the product exist at a time: enough for a fast product, and few next to a chunk of logits.
_BLOCK_SIZE = 2**20


def plus_product(node: Node, total: Any, lhs: Any, rhs: Any) -> Any:
    """Adds the product of a node for these operands to the total, in the total's dtype."""
    contracted, batch = node.params["dimension_numbers"]
    # In the dtype of the sum: 16 bits would round the share of each chunk.
    params = {**node.params, "preferred_element_type": total.dtype}

    def product(lhs: Any, rhs: Any) -> Any:
        with node.equation.ctx.manager:
            return node.equation.primitive.bind(lhs, rhs, **params)

    def whole(total: Any, lhs: Any, rhs: Any) -> Any:
        return total + product(lhs, rhs)

    if total.size <= 2 * _BLOCK_SIZE or batch[0] or explicit_mesh([lhs, rhs]) is not None:
        return whole(total, lhs, rhs)
    axis = max(range(total.ndim), key=lambda i: total.shape[i])
    free = [(side, i) for side in (0, 1) for i in range((lhs, rhs)[side].ndim) if i not in contracted[side]]
    side, operand_axis = free[axis]
    length = total.shape[axis]
    width = min(length, math.ceil(_BLOCK_SIZE * length / total.size))

    def by_blocks(total: Any, lhs: Any, rhs: Any) -> Any:
        def add(step: jax.Array, total: Any) -> Any:
            # If the blocks do not fit evenly, the last one overlaps the one before; what is not new is masked.
            first = jnp.minimum(step * width, length - width)
            operands = [lhs, rhs]
            block = lax.dynamic_slice_in_dim(operands[side], first, width, operand_axis)
            is_new = first + lax.broadcasted_iota(first.dtype, block.shape, operand_axis) >= step * width
            operands[side] = jnp.where(is_new, block, jnp.zeros_like(block))
            before = lax.dynamic_slice_in_dim(total, first, width, axis)
            return lax.dynamic_update_slice_in_dim(total, before + product(*operands), first, axis)

        return lax.fori_loop(0, math.ceil(length / width), add, total)

    return lax.platform_dependent(total, lhs, rhs, cpu=by_blocks, default=whole)
