"""Functions of trees that hold more than arrays, such as the modules of Equinox, as functions of their arrays alone."""

from collections.abc import Callable, Sequence
from numbers import Number
from typing import Any

import jax


def of_arrays(fn: Callable[..., Any], args: Sequence[Any]) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A function and arguments as `jax.jit` takes them: what is no array is fixed.

    An argument that holds a function, a string or a bool beside its arrays holds configuration: its Python numbers are
    fixed, too, and so are all where the function is wrapped by `equinox.filter_jit`. Otherwise they are arrays, as
    under `jax.jit`. What is jitted by JAX says itself what is static.

    Returns:
      Both, unchanged where nothing is fixed. Otherwise arguments with None for what is fixed, as `without_fixed` makes
      them, and a function whose results have None for what is no array.
    """
    leaves, structure = jax.tree.flatten(tuple(args))
    fixed = _fixed(fn, args)
    if hasattr(fn, "trace") or not (any(fixed) or _is_filtered(fn)):
        return fn, tuple(args)

    def call(*arrays: Any) -> Any:
        moving = iter(jax.tree.leaves(arrays))
        filled = [leaf if is_fixed else next(moving) for leaf, is_fixed in zip(leaves, fixed, strict=True)]
        results = fn(*jax.tree.unflatten(structure, filled))
        return jax.tree.map(lambda leaf: leaf if is_array(leaf) or isinstance(leaf, Number) else None, results)

    return call, without_fixed(fn, args)


def without_fixed(fn: Callable[..., Any], args: Sequence[Any]) -> tuple[Any, ...]:
    """The arguments with None for what `of_arrays` fixes."""
    leaves, structure = jax.tree.flatten(tuple(args))
    moving = [None if is_fixed else leaf for leaf, is_fixed in zip(leaves, _fixed(fn, args), strict=True)]
    return tuple(jax.tree.unflatten(structure, moving))


def is_array(leaf: Any) -> bool:
    """Whether this is an array, or has the type of one."""
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype")


def _fixed(fn: Any, args: Sequence[Any]) -> list[bool]:
    """Whether each leaf is fixed."""
    fixed = []
    for arg in args:
        leaves, structure = jax.tree.flatten(arg)
        is_tree = not jax.tree_util.treedef_is_leaf(structure)
        holds_configuration = _is_filtered(fn) or (is_tree and any(map(_is_configuration, leaves)))
        fixed += [not is_array(leaf) and (holds_configuration or not isinstance(leaf, Number)) for leaf in leaves]
    return fixed


def _is_configuration(leaf: Any) -> bool:
    return not is_array(leaf) and (isinstance(leaf, bool) or not isinstance(leaf, Number))


def _is_filtered(fn: Any) -> bool:
    """Whether this is jitted, but not by JAX."""
    return hasattr(fn, "lower") and not hasattr(fn, "trace")
