"""What an artifact is called with: the type of each array, by its path in the arguments, and the refusal of others."""

from collections.abc import Mapping, Sequence
from numbers import Number
from typing import Any

import jax
import jax.export
import jax.numpy as jnp

from lowering.errors import ArtifactError
from lowering.measurements import type_text
from lowering.static_leaves import is_array


def types_by_path(args: Any, avals: Sequence[Any]) -> dict[str, str]:
    """The types of arguments that are all arrays."""
    return {path: type_text(aval) for (path, _), aval in zip(_leaves(args), avals, strict=True)}


def fixed_text(args: Any, moving: Any) -> dict[str, str]:
    """The Python numbers and strings of arguments that are not among `moving`, as text."""
    arrays = {path for path, _ in _leaves(moving)}
    return {path: repr(x) for path, x in _leaves(args) if path not in arrays and isinstance(x, Number | str)}


def checked_leaves(
    args: Any, types: Mapping[str, str], fixed: Mapping[str, str], exported: jax.export.Exported
) -> list[Any]:
    """The arrays among the arguments, in order, if they are of these types.

    Raises:
      ArtifactError: for the first that is not, in one sentence that names it by its path.
    """
    given = dict(_leaves(args))
    for path, text in fixed.items():
        _require(repr(given.get(path)) == text, path, f"be {text}, as it was exported", repr(given.get(path)))
    sizes: dict[str, tuple[int, str]] = {}
    for (path, text), aval in zip(types.items(), exported.in_avals, strict=True):
        _require(path in given, path, f"be {text}", "nothing")
        _check(path, text, given[path], aval, sizes)
    for path, leaf in given.items():
        is_known = path in types or path in fixed or not (is_array(leaf) or isinstance(leaf, Number | str))
        _require(is_known, path, "not be given", _shown(leaf))
    leaves = [given[path] for path in types]
    if any(jax.export.is_symbolic_dim(size) for aval in exported.in_avals for size in aval.shape):
        _check_sizes(exported, leaves)
    return leaves


def _check_sizes(exported: jax.export.Exported, leaves: Sequence[Any]) -> None:
    """Refuses sizes that, as JAX finds, the symbolic ones cannot have, such as an odd one for 2 * rows."""
    try:
        jax.eval_shape(exported.call, *leaves)
    except ValueError as error:
        reason = " ".join(str(error).split()).partition(" Using the following")[0]
        raise ArtifactError(f"export: args must have sizes that were exported; got others: {reason}") from None


def _check(path: str, text: str, leaf: Any, aval: Any, sizes: dict[str, tuple[int, str]]) -> None:
    """Refuses another type; symbolic sizes that are only a name have to agree, others are left to JAX."""
    is_typed = is_array(leaf) or isinstance(leaf, bool | int | float | complex)
    fits = is_typed and _dtype(leaf) == aval.dtype and len(jnp.shape(leaf)) == len(aval.shape)
    for size, expected in zip(jnp.shape(leaf), aval.shape, strict=True) if fits else ():
        if not jax.export.is_symbolic_dim(expected):
            fits = fits and size == expected
        elif str(expected).isidentifier():
            known, first = sizes.setdefault(str(expected), (size, path))
            _require(size == known, path, f"be {text} with {expected} = {known}, as {first} is", _shown(leaf))
    _require(fits, path, f"be {text}", _shown(leaf))


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
