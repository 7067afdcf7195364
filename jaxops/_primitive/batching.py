"""The rule of `vmap` that all operators share."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive

from jaxops._primitive import sharding
from jaxops._primitive.signature import Signature


def batching_rule(
    primitive: Primitive, axes_of: Callable[[Sequence[Any], Mapping[str, Any]], Signature]
) -> Callable[..., Any]:
    """Returns the batching rule of a primitive whose operands and results may carry leading batch axes.

    If everything that is mapped carries batch axes and so do all results, the mapped axis becomes one more batch axis
    and the primitive runs once. Otherwise it runs once for each position of the mapped axis. Either way it stays the
    same primitive, with its derivative and its kernels.

    Args:
      primitive: returns several results.
      axes_of: `axes_of(types of operands, params)` returns an equation's signature.
    """

    def batch(operands: Sequence[Any], dims: Sequence[Any], **params: Any) -> tuple[Sequence[Any], Sequence[int]]:
        mapped = [dim is not None for dim in dims]
        operands = [
            jnp.moveaxis(x, dim, 0) if m else sharding.as_array(x)
            for x, dim, m in zip(operands, dims, mapped, strict=True)
        ]
        shapes = [x.shape[1:] if m else x.shape for x, m in zip(operands, mapped, strict=True)]
        types = [jax.ShapeDtypeStruct(shape, x.dtype) for shape, x in zip(shapes, operands, strict=True)]
        axes = axes_of(types, params)
        # A batched operand with one more leading axis is still a valid operand, so the mapped axis just joins the batch
        # axes. That is impossible if a mapped operand is shared by all positions, or if a result reduces over them.
        pairs = zip(axes.operands, mapped, strict=True)
        if all(result.batched for result in axes.results) and all(x.batched or not m for x, m in pairs):
            size = next(x.shape[0] for x, m in zip(operands, mapped, strict=True) if m)
            # The batch axes of all operands that have them are the same, so an operand that is not mapped is repeated.
            operands = [
                jnp.broadcast_to(x, (size, *x.shape)) if of.batched and not m else x
                for x, of, m in zip(operands, axes.operands, mapped, strict=True)
            ]
            results = primitive.bind(*operands, **params)
        else:
            results = _one_by_one(primitive, operands, mapped, params)
        return results, (0,) * len(results)

    return batch


def _one_by_one(primitive: Primitive, operands: Sequence[Any], mapped: Sequence[bool], params: dict[str, Any]) -> Any:
    """Binds the primitive at each position of the mapped axis, in a loop."""

    def bind(mapped_operands: Sequence[Any]) -> Any:
        rest = iter(mapped_operands)
        return primitive.bind(*(next(rest) if m else x for x, m in zip(operands, mapped, strict=True)), **params)

    # On an explicit mesh a loop cannot slice along an axis that is split over devices: it is gathered first.
    return jax.lax.map(bind, [sharding.whole_along_first(x) for x, m in zip(operands, mapped, strict=True) if m])
