"""Checks the arguments of programs that are already compiled or exported: each by its path in the arguments."""

import dataclasses
from collections.abc import Mapping, Sequence
from numbers import Number
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np

from lowering.describe import show
from lowering.operators import type_text
from lowering.pytrees import flattening_fault
from lowering.static_leaves import is_array

_VALUES = (jax.Array, np.ndarray, np.generic, bool, int, float, complex)


@dataclasses.dataclass(frozen=True)
class Expected:
    """Arguments that a program takes.

    Attributes:
      subject: whose arguments these are, for messages.
      error: what is raised.
      made: how the program was made, for messages.
      count: how many arguments there are.
      types: the type of each array, by path.
      fixed: the Python numbers and strings that are part of the program, as text, by path.
      avals: the types again, as JAX has them.
    """

    subject: str
    error: type[Exception]
    made: str
    count: int
    types: Mapping[str, str]
    fixed: Mapping[str, str]
    avals: Sequence[Any]

    def leaves(self, args: tuple[Any, ...]) -> list[Any]:
        """Returns the arrays among the arguments, in order; raises `error` for the first wrong one, by its path."""
        fault = flattening_fault(args)
        self._require(fault is None, "args", "be pytrees", str(fault))
        by_path = dict(leaves_with_paths(args))
        for path, text in self.fixed.items():
            got = repr(by_path.get(path))
            self._require(got == text, path, f"be {text}, as it was {self.made}", show(by_path.get(path)))
        sizes: dict[str, tuple[int, str]] = {}
        for (path, text), aval in zip(self.types.items(), self.avals, strict=True):
            self._require(path in by_path, path, f"be {text}", "nothing")
            self._check(path, text, by_path[path], aval, sizes)
        for path, leaf in by_path.items():
            is_known = path in self.types or path in self.fixed
            is_known = is_known or not (is_array(leaf) or isinstance(leaf, Number | str))
            self._require(is_known, path, "not be given", _shown(leaf))
        self._require(len(args) <= self.count, "args", f"be {self.count}, as {self.made}", str(len(args)))
        return [by_path[path] for path in self.types]

    def _check(self, path: str, text: str, leaf: Any, aval: Any, sizes: dict[str, tuple[int, str]]) -> None:
        """Refuses another type. Symbolic sizes that are a single name have to agree; JAX checks the others."""
        fits = _is_value(leaf) and _dtype(leaf) == aval.dtype and len(jnp.shape(leaf)) == len(aval.shape)
        for size, expected in zip(jnp.shape(leaf), aval.shape, strict=True) if fits else ():
            if not jax.export.is_symbolic_dim(expected):
                fits = fits and size == expected
            elif str(expected).isidentifier():
                known, first = sizes.setdefault(str(expected), (size, path))
                rule = f"be {text} with {expected} = {known}, as {first} is"
                self._require(size == known, path, rule, _shown(leaf))
        self._require(fits, path, f"be {text}", _shown(leaf))
        self._require(_can_hold(aval.dtype, leaf), path, f"hold numbers that fit {aval.dtype}", _shown(leaf))

    def _require(self, condition: bool, path: str, rule: str, got: str) -> None:
        if not condition:
            raise self.error(f"{self.subject}: {path} must {rule}; got {got}")


def types_by_path(args: Any, avals: Sequence[Any]) -> dict[str, str]:
    """Returns the types of arguments that are all arrays, by path."""
    return {path: type_text(aval) for (path, _), aval in zip(leaves_with_paths(args), avals, strict=True)}


def fixed_text(args: Any, moving: Any) -> dict[str, str]:
    """Returns the Python numbers and strings among the arguments that are not in `moving`, as text."""
    arrays = {path for path, _ in leaves_with_paths(moving)}
    return {path: repr(x) for path, x in leaves_with_paths(args) if path not in arrays and isinstance(x, Number | str)}


def _is_value(leaf: Any) -> bool:
    return isinstance(leaf, _VALUES) and not isinstance(leaf, np.ma.MaskedArray)


def _dtype(leaf: Any) -> Any:
    """Returns the dtype that JAX gives a leaf; None if it takes no such value."""
    if isinstance(leaf, jax.Array):
        return leaf.dtype
    try:
        return jnp.result_type(leaf)
    except (TypeError, ValueError):
        return None


def _can_hold(dtype: Any, leaf: Any) -> bool:
    """Tells whether a number or NumPy array, which JAX casts silently, keeps its value in this dtype."""
    if isinstance(leaf, jax.Array):
        return True
    host = np.asarray(leaf)
    if host.dtype.kind in "iuO" and host.size:  # Python integers may be too large for NumPy's
        limits = jnp.iinfo(dtype)
        return bool(limits.min <= host.min() and host.max() <= limits.max)
    with np.errstate(over="ignore"):
        is_finite = np.isfinite(host.astype(dtype)) | ~np.isfinite(host) if host.dtype.kind in "fc" else np.True_
    return bool(np.all(is_finite))


def _shown(leaf: Any) -> str:
    if is_array(leaf):
        return type_text(leaf) if _is_value(leaf) else f"a {type(leaf).__name__} of {type_text(leaf)}"
    return show(leaf) if isinstance(leaf, Number | str) else f"a {type(leaf).__name__}"


def leaves_with_paths(args: Any) -> list[tuple[str, Any]]:
    """Returns the leaves of arguments, each with its path, such as `args[0]['weight']`."""
    return [(f"args{jax.tree_util.keystr(path)}", leaf) for path, leaf in jax.tree.leaves_with_path(args)]
