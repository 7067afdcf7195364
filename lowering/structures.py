"""Structures of an operator's operands and results: tuples and NamedTuples, of which fields may be absent.

A primitive takes arrays alone. So those that are present are bound, and their structure is a parameter of the equation,
`structure`, unless it is a plain tuple of arrays. An absent field is None, as in every pytree of JAX.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

Structure = Any  # what `jax.tree.structure` returns
_STRUCTURE = "structure"


def packed(operands: Sequence[Any], attributes: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Splits operands into arrays and their structure, which joins the attributes as the equation's parameters."""
    arrays, structure = jax.tree.flatten(tuple(operands))
    plain: Structure = jax.tree.structure(tuple(arrays))
    if plain == structure:
        return arrays, dict(attributes)
    return arrays, {**attributes, _STRUCTURE: structure}


def unpacked(arrays: Sequence[Any], params: Mapping[str, Any]) -> tuple[Sequence[Any], dict[str, Any]]:
    """Computes the inverse of `packed`: the operands as an operator and its kernels take them, and the attributes."""
    return jax.tree.unflatten(structure_of(arrays, params), arrays), attributes_of(params)


def attributes_of(params: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the operator's attributes among an equation's parameters."""
    return {name: value for name, value in params.items() if name != _STRUCTURE}


def structure_of(arrays: Sequence[Any], params: Mapping[str, Any]) -> Structure:
    """Returns the structure of an equation's operands."""
    structure = params.get(_STRUCTURE)
    return jax.tree.structure(tuple(arrays)) if structure is None else structure


def on_arrays(fn: Callable[..., Any], params: Mapping[str, Any]) -> Callable[..., tuple[Any, ...]]:
    """Returns `fn`, which takes operands and attributes and returns results, as a function of the arrays in both."""

    def call(*arrays: Any) -> tuple[Any, ...]:
        operands, attributes = unpacked(arrays, params)
        return tuple(jax.tree.leaves(fn(*operands, **attributes)))

    return call


def is_absent_field(field: Any) -> bool:
    """Tells whether a field is absent; makes such fields leaves, as `is_leaf` of `jax.tree` functions."""
    return field is None


def fields(tree: Any) -> list[Any]:
    """Returns what is in each field of a structure, None where it is absent."""
    return jax.tree.leaves(tree, is_leaf=is_absent_field)


def presence(structure: Structure) -> tuple[bool, ...]:
    """Returns for each field of a structure whether it is present."""
    return tuple(field is not None for field in fields(jax.tree.unflatten(structure, [True] * structure.num_leaves)))


def present_names(operands: Sequence[Any]) -> list[str]:
    """Returns the names of the fields of NamedTuples, at any depth, that are present."""
    names: list[str] = []
    for operand in operands:
        if isinstance(operand, tuple) and hasattr(operand, "_fields"):
            for name, field in zip(operand._fields, operand, strict=True):
                names += present_names([field]) if isinstance(field, tuple) else [name] * (field is not None)
    return names
