"""A number whose gradients are computed together with it, so that its derivative computes no product again."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from jaxops._checks.dtypes import accumulation_dtype
from jaxops._primitive.sharding import laid_out_as, same_varying_axes

Run = Callable[..., Sequence[Any]]
# Returns how to compute a jaxpr in chunks of rows; None if that is not known.
Planning = Callable[[Any], Run | None]


def with_gradients(run: Run, whole: Run, at: int, planned: Planning) -> Run:
    """Returns a function that computes what another does, and the gradients of one of its results where it is wanted.

    The tangent of that result is the inner product of its gradients with the tangents of the operands.

    Args:
      run: computes the results in chunks.
      whole: computes them all at once, which is never done.
      at: the position of the result, a number.
      planned: how to compute results and gradients in chunks.
    """

    @jax.custom_jvp
    def call(*operands: Any) -> Any:
        return tuple(run(*operands))

    def jvp(operands: Any, tangents: Any) -> Any:
        moving = [i for i, dot in enumerate(tangents) if not isinstance(dot, SymbolicZero)]

        def number(*arrays: Any) -> Any:
            given = dict(zip(moving, arrays, strict=True))
            results = whole(*(given.get(i, x) for i, x in enumerate(operands)))
            return results[at], results

        def with_gradient(*arrays: Any) -> Any:
            gradients, results = jax.grad(number, argnums=tuple(range(len(moving))), has_aux=True)(*arrays)
            return *results, *gradients

        arrays, dots = [operands[i] for i in moving], [tangents[i] for i in moving]
        compute = planned(jax.make_jaxpr(with_gradient)(*arrays))

        def others(*arrays: Any) -> Any:
            given = dict(zip(moving, arrays, strict=True))
            return tuple(run(*(given.get(i, x) for i, x in enumerate(operands))))

        if compute is None:
            return jax.jvp(others, arrays, dots)
        found = compute(*arrays)
        results, gradients = tuple(found[: -len(moving)]), found[-len(moving) :]
        if any(i != at and jnp.issubdtype(x.dtype, jnp.floating) for i, x in enumerate(results)):
            # What nobody differentiates goes.
            of_results = list(jax.jvp(others, arrays, dots)[1])
        else:
            of_results = [_zero(x) for x in results]
        of_results[at] = sum(map(_inner_product, gradients, dots)).astype(results[at].dtype)
        return results, tuple(of_results)

    call.defjvp(jvp, symbolic_zeros=True)
    # Inside shard_map, gradients are those of this device's rows; what carries them to what all share adds them up.
    return lambda *operands: call(*same_varying_axes(operands))


def _zero(x: Any) -> SymbolicZero:
    return SymbolicZero(jax.typeof(x).to_tangent_aval())


def _inner_product(gradient: Any, tangent: Any) -> Any:
    dtype = accumulation_dtype(gradient.dtype)
    return jnp.sum(laid_out_as(gradient, jax.typeof(tangent).sharding).astype(dtype) * tangent.astype(dtype))
