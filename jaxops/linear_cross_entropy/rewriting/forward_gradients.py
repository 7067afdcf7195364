"""A number whose gradients are computed together with it, so that its derivative computes no product again."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from jaxops._checks.dtypes import accumulation_dtype
from jaxops._primitive.sharding import same_varying_axes
from jaxops.linear_cross_entropy.sum_operator import inner_product

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
        arrays, dots = [operands[i] for i in moving], [tangents[i] for i in moving]

        def of_moving(fn: Run, arrays: Sequence[Any]) -> tuple[Any, ...]:
            given = dict(zip(moving, arrays, strict=True))
            return tuple(fn(*(given.get(i, x) for i, x in enumerate(operands))))

        def and_gradients(*arrays: Any) -> Any:
            def number(*arrays: Any) -> Any:
                results = of_moving(whole, arrays)
                return results[at], results

            gradients, results = jax.grad(number, argnums=tuple(range(len(moving))), has_aux=True)(*arrays)
            return *results, *gradients

        compute = planned(jax.make_jaxpr(and_gradients)(*arrays))
        again = functools.partial(jax.jvp, lambda *arrays: of_moving(run, arrays), arrays, dots)
        if compute is None:
            return again()
        found = compute(*arrays)
        results, gradients = tuple(found[: -len(moving)]), found[-len(moving) :]
        has_more = any(i != at and jnp.issubdtype(x.dtype, jnp.inexact) for i, x in enumerate(results))
        # Compilers leave out what nobody differentiates.
        of_results = list(again()[1]) if has_more else [SymbolicZero(jax.typeof(x).to_tangent_aval()) for x in results]
        terms = [inner_product(x, dot, accumulation_dtype(x.dtype)) for x, dot in zip(gradients, dots, strict=True)]
        of_results[at] = sum(terms[1:], terms[0]).astype(results[at].dtype)
        return results, tuple(of_results)

    call.defjvp(jvp, symbolic_zeros=True)
    # Inside shard_map, gradients are those of this device's rows; what carries them to what all share adds them up.
    return lambda *operands: call(*same_varying_axes(operands))
