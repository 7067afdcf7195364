"""Derivatives of functions that are computed in chunks of rows: JAX differentiates the whole, and that runs in chunks.

So a user's `jax.custom_vjp` is used as it is, and a number's gradients are computed together with it: its derivative
computes no product again.
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
from lowering.rewriting.graph import SAME, Node, Value, forward, level_of
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


def with_users_rules(run: Run, whole: Run, chunked: Chunked) -> Run:
    """Returns a function that computes what another does, with the rules of `jax.custom_vjp` in it.

    Args:
      run: computes the results in chunks.
      whole: computes them all at once, which is never done, unless no other way to a derivative is known.
      chunked: how to compute derivatives in chunks.
    """

    def computed(fn: Callable[..., Any], *args: Any) -> Any:
        jaxpr, shapes = jax.make_jaxpr(functools.partial(fn, whole), return_shape=True)(*args)
        try:
            return jax.tree.unflatten(jax.tree.structure(shapes), chunked(jaxpr)(*jax.tree.leaves(args)))
        except RefusalError:
            return fn(whole, *args)

    def pulled(operands: Any, cotangents: Any) -> Any:
        return among(operands, computed(cotangents_of, list(operands), of_moving(cotangents, cotangents)))

    call = jax.custom_vjp(lambda *operands: tuple(run(*operands)))
    call.defvjp(lambda *operands: (tuple(computed(results_of, operands)), operands), pulled)
    return call


def results_of(whole: Run, operands: Any) -> Any:
    """Computes the results as the users' rules for derivatives do."""
    return jax.vjp(lambda *arrays: list(whole(*arrays)), *operands)[0]


def tangents_of(whole: Run, operands: Any, dots: Any) -> Any:
    """Computes the results, and the tangents of those that have one."""
    moving = [i for i, x in enumerate(operands) if _moves(x)]
    results, found = jax.jvp(_of(whole, operands, moving), [operands[i] for i in moving], dots)
    return results, of_moving(results, found)


def cotangents_of(whole: Run, operands: Any, given: Any) -> Any:
    """Computes the cotangents of the operands that have one, from those of the results."""
    moving = [i for i, x in enumerate(operands) if _moves(x)]
    fn = _of(whole, operands, moving)

    def answering(*arrays: Any) -> list[Any]:
        results = fn(*arrays)
        return of_moving(results, results)

    _, pull = jax.vjp(answering, *(operands[i] for i in moving))
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


def of_moving(arrays: Sequence[Any], values: Sequence[Any]) -> list[Any]:
    """Returns the values that belong to those arrays that have a derivative."""
    return [value for x, value in zip(arrays, values, strict=True) if _moves(x)]


def among(arrays: Sequence[Any], found: Sequence[Any]) -> tuple[Any, ...]:
    """Puts what was found for those arrays that have a derivative between zeros without a dtype for the others."""
    given = iter(found)
    return tuple(next(given) if _moves(x) else np.zeros(x.shape, jax.dtypes.float0) for x in arrays)


# Linear in their first operand; in one of them; and in all together.
_IN_FIRST = frozenset(
    {"neg", "convert_element_type", "reshape", "squeeze", "expand_dims", "broadcast_in_dim", "transpose", "reduce_sum"}
    | {"slice", "gather", "cumsum", "rev", "div", "real", "imag", *SAME}
)
_IN_ONE = frozenset({"mul", "dot_general", "conv_general_dilated"})
_TOGETHER = frozenset(
    {"add", "add_any", "sub", "concatenate", "select_n", "scatter-add", "pad", "dynamic_update_slice"}
)


def has_linear_rule(call: Run, operands: Sequence[Any], results: Sequence[Any]) -> bool:
    """Tells whether cotangents of operands are linear in those of results, by their types, as derivatives are.

    A `jax.custom_vjp` may do anything with them, such as to clip them.
    """
    dots = of_moving(results, results)
    try:
        return is_linear(jax.make_jaxpr(functools.partial(cotangents_of, call))(list(operands), dots), len(dots))
    except NameError:  # outside of a shard_map, the axes of its body have no names
        return False


def is_linear(jaxpr: Any, count: int) -> bool:
    """Tells whether all results are known to be linear in the last arguments, so many together."""
    level = level_of(jaxpr, lambda _: True, lambda _: False)
    moving = forward(level.arguments[len(level.arguments) - count :], lambda *_: True)
    nodes = [node for node in level.nodes if not moving.isdisjoint(node.outputs)]
    return all(x in moving or _is_zero(x) for x in level.results) and all(_is_linear(x, moving) for x in nodes)


def _is_linear(node: Node, moving: set[Value]) -> bool:
    moves = [x in moving for x in node.inputs]
    if node.name in _TOGETHER:
        return all(x in moving or _is_zero(x) for x in node.inputs if jnp.issubdtype(x.dtype, jnp.inexact))
    return sum(moves) == 1 and (node.name in _IN_ONE or (node.name in _IN_FIRST and moves[0]))


def _is_zero(value: Value) -> bool:
    """Tells whether all elements of an array are 0 by the code."""
    while value.producer is not None and value.producer.name in ("broadcast_in_dim", "convert_element_type", "reshape"):
        value = value.producer.inputs[0]
    return value.number == 0
