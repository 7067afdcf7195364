"""Checks the arguments of an artifact: the type of each array, by its path in the arguments."""

from collections.abc import Mapping, Sequence
from numbers import Number
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np

from lowering.errors import ArtifactError
from lowering.measurements import type_text
from lowering.static_leaves import is_array


def types_by_path(args: Any, avals: Sequence[Any]) -> dict[str, str]:
    """The types of arguments that are all arrays, by path."""
    return {path: type_text(aval) for (path, _), aval in zip(_leaves(args), avals, strict=True)}


def fixed_text(args: Any, moving: Any) -> dict[str, str]:
    """The Python numbers and strings among the arguments that are not in `moving`, as text."""
    arrays = {path for path, _ in _leaves(moving)}
    return {path: repr(x) for path, x in _leaves(args) if path not in arrays and isinstance(x, Number | str)}


def checked_leaves(
    args: Any, types: Mapping[str, str], fixed: Mapping[str, str], exported: jax.export.Exported
) -> list[Any]:
    """The arrays among the arguments, in order, once all types are checked.

    Raises:
      ArtifactError: for the first wrong argument; the message names it by its path.
    """
    by_path = dict(_leaves(args))
    for path, text in fixed.items():
        _require(repr(by_path.get(path)) == text, path, f"be {text}, as it was exported", repr(by_path.get(path)))
    sizes: dict[str, tuple[int, str]] = {}
    for (path, text), aval in zip(types.items(), exported.in_avals, strict=True):
        _require(path in by_path, path, f"be {text}", "nothing")
        _check(path, text, by_path[path], aval, sizes)
    for path, leaf in by_path.items():
        is_known = path in types or path in fixed or not (is_array(leaf) or isinstance(leaf, Number | str))
        _require(is_known, path, "not be given", _shown(leaf))
    leaves = [by_path[path] for path in types]
    if any(jax.export.is_symbolic_dim(size) for aval in exported.in_avals for size in aval.shape):
        _check_sizes(exported, leaves)
    return leaves


def _check_sizes(exported: jax.export.Exported, leaves: Sequence[Any]) -> None:
    """Refuses sizes that do not solve the symbolic ones, such as an odd size for 2 * rows."""
    try:
        jax.eval_shape(exported.call, *leaves)
    except ValueError as error:
        reason = " ".join(str(error).split()).partition(" Using the following")[0]
        raise ArtifactError(f"export: args must have sizes that were exported; got others: {reason}") from None


def _check(path: str, text: str, leaf: Any, aval: Any, sizes: dict[str, tuple[int, str]]) -> None:
    """Refuses another type. Symbolic sizes that are a single name have to agree; JAX checks the others."""
    is_typed = is_array(leaf) or isinstance(leaf, bool | int | float | complex)
    fits = is_typed and _dtype(leaf) == aval.dtype and len(jnp.shape(leaf)) == len(aval.shape)
    for size, expected in zip(jnp.shape(leaf), aval.shape, strict=True) if fits else ():
        if not jax.export.is_symbolic_dim(expected):
            fits = fits and size == expected
        elif str(expected).isidentifier():
            known, first = sizes.setdefault(str(expected), (size, path))
            _require(size == known, path, f"be {text} with {expected} = {known}, as {first} is", _shown(leaf))
    _require(fits, path, f"be {text}", _shown(leaf))
    if isinstance(leaf, np.ndarray | float) and np.result_type(leaf) != aval.dtype:
        with np.errstate(over="ignore"):
            stays_finite = bool(np.all(np.isfinite(np.asarray(leaf, aval.dtype)) | ~np.isfinite(leaf)))
        _require(stays_finite, path, f"hold numbers that fit {aval.dtype}", _shown(leaf))


def _dtype(leaf: Any) -> Any:
    return leaf.dtype if isinstance(leaf, jax.Array) else jnp.result_type(leaf)


def _shown(leaf: Any) -> str:
    if is_array(leaf):
        return type_text(leaf)
    return repr(leaf) if isinstance(leaf, Number | str) else f"a {type(leaf).__name__}"


def _leaves(args: Any) -> list[tuple[str, Any]]:
    return [(f"args{jax.tree_util.keystr(path)}", leaf) for path, leaf in jax.tree.leaves_with_path(args)]


def _require(condition: bool, path: str, rule: str, got: str) -> None:
    if not condition:
        raise ArtifactError(f"export: {path} must {rule}; got {got}")
