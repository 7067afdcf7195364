"""Derivatives of functions that are computed in chunks of rows: JAX differentiates the whole, and is taken in chunks.

So the rule of a `jax.custom_jvp` or `jax.custom_vjp` of the user's is used as it is, and a number's gradients are
computed together with it, so that its derivative computes no product again.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero

from jaxops._checks.dtypes import accumulation_dtype
from jaxops._primitive.sharding import same_varying_axes
from jaxops.linear_cross_entropy.sum_operator import inner_product
from lowering.rewriting.rules import RefusalError

Run = Callable[..., Sequence[Any]]
# Returns how to compute a jaxpr in chunks of rows, or raises a RefusalError.
Chunked = Callable[[Any], Run]


def with_gradients(run: Run, whole: Run, at: int, chunked: Chunked) -> Run:
    """Returns a function that computes what another does, and the gradients of one of its results where it is wanted.

    The tangent of that result is the inner product of its gradients with the tangents of the operands.

    Args:
      run: computes the results in chunks.
      whole: computes them all at once, which is never done.
      at: the position of the result, a number.
      chunked: how to compute results and gradients in chunks.
    """

    @jax.custom_jvp
    def call(*operands: Any) -> Any:
        return tuple(run(*operands))

    def jvp(operands: Any, tangents: Any) -> Any:
        moving = [i for i, dot in enumerate(tangents) if not isinstance(dot, SymbolicZero)]
        arrays, dots = [operands[i] for i in moving], [tangents[i] for i in moving]

        def number(*arrays: Any) -> Any:
            results = _of(whole, operands, moving)(*arrays)
            return results[at], results

        def and_gradients(*arrays: Any) -> Any:
            gradients, results = jax.grad(number, argnums=tuple(range(len(moving))), has_aux=True)(*arrays)
            return *results, *gradients

        def again() -> Any:
            return jax.jvp(_of(run, operands, moving), arrays, dots)

        try:
            found = chunked(jax.make_jaxpr(and_gradients)(*arrays))(*arrays)
        except RefusalError:
            return again()
        results, gradients = tuple(found[: -len(moving)]), found[-len(moving) :]
        has_more = any(i != at and _moves(x) for i, x in enumerate(results))
        # Compilers leave out what nobody differentiates.
        of_results = list(again()[1]) if has_more else [SymbolicZero(jax.typeof(x).to_tangent_aval()) for x in results]
        terms = [inner_product(x, dot, accumulation_dtype(x.dtype)) for x, dot in zip(gradients, dots, strict=True)]
        of_results[at] = sum(terms[1:], terms[0]).astype(results[at].dtype)
        return results, tuple(of_results)

    call.defjvp(jvp, symbolic_zeros=True)
    # Inside shard_map, gradients are those of this device's rows; what carries them to what all share adds them up.
    return lambda *operands: call(*same_varying_axes(operands))


def with_users_rules(run: Run, whole: Run, chunked: Chunked, *, is_jvp: bool) -> Run:
    """Returns a function that computes what another does, with the derivative of the user's own functions in it.

    Args:
      run: computes the results in chunks.
      whole: computes them all at once, which is never done, unless no other way to a derivative is known.
      chunked: how to compute derivatives in chunks.
      is_jvp: whether all these functions are of `jax.custom_jvp`, so that tangents are known as well.
    """

    def computed(fn: Callable[..., Any], *args: Any) -> Any:
        jaxpr, shapes = jax.make_jaxpr(functools.partial(fn, whole), return_shape=True)(*args)
        try:
            return jax.tree.unflatten(jax.tree.structure(shapes), chunked(jaxpr)(*jax.tree.leaves(args)))
        except RefusalError:
            return fn(whole, *args)

    def with_dots(operands: Any, dots: Any) -> Any:
        results, found = computed(
            tangents, list(operands), [dot for x, dot in zip(operands, dots, strict=True) if _moves(x)]
        )
        return tuple(results), _among(results, found)

    def pulled(operands: Any, cotangents: Any) -> Any:
        given = [x for x in cotangents if _moves(x)]
        return _among(operands, computed(cotangents_of, list(operands), given))

    if is_jvp:
        with_jvp = jax.custom_jvp(lambda *operands: tuple(run(*operands)))
        with_jvp.defjvp(with_dots)
        return with_jvp
    with_vjp = jax.custom_vjp(lambda *operands: tuple(run(*operands)))
    with_vjp.defvjp(lambda *operands: (tuple(computed(results_of, operands)), operands), pulled)
    return with_vjp


def results_of(whole: Run, operands: Any) -> Any:
    """Computes the results as the users' rules for derivatives do."""
    return jax.vjp(lambda *arrays: list(whole(*arrays)), *operands)[0]


def tangents(whole: Run, operands: Any, dots: Any) -> Any:
    """Computes the results, and the tangents of those that have one."""
    moving = [i for i, x in enumerate(operands) if _moves(x)]
    results, found = jax.jvp(_of(whole, operands, moving), [operands[i] for i in moving], dots)
    return results, [dot for x, dot in zip(results, found, strict=True) if _moves(x)]


def cotangents_of(whole: Run, operands: Any, given: Any) -> Any:
    """Computes the cotangents of the operands that have one, from those of the results."""
    moving = [i for i, x in enumerate(operands) if _moves(x)]
    of_moving = _of(whole, operands, moving)
    _, pull = jax.vjp(lambda *arrays: [x for x in of_moving(*arrays) if _moves(x)], *(operands[i] for i in moving))
    return list(pull(given))


def _of(fn: Run, operands: Sequence[Any], moving: Sequence[int]) -> Callable[..., tuple[Any, ...]]:
    """Returns what a function computes, as a function of some of its operands."""

    def call(*arrays: Any) -> tuple[Any, ...]:
        given = dict(zip(moving, arrays, strict=True))
        return tuple(fn(*(given.get(i, x) for i, x in enumerate(operands))))

    return call


def _moves(array: Any) -> bool:
    """Tells whether an array has a derivative."""
    return bool(jnp.issubdtype(array.dtype, jnp.inexact))


def _among(arrays: Sequence[Any], found: Sequence[Any]) -> tuple[Any, ...]:
    """Puts what was found for those arrays that have a derivative between zeros without a dtype for the others."""
    given = iter(found)
    return tuple(next(given) if _moves(x) else np.zeros(x.shape, jax.dtypes.float0) for x in arrays)
