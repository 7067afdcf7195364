"""Turns functions of pytrees that hold more than arrays, such as Equinox modules, into functions of the arrays."""

import dataclasses
from collections.abc import Callable, Sequence
from numbers import Number
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Jaxpr

from lowering.describe import show
from lowering.errors import UsageError
from lowering.functions import named_as, require_function, traceable
from lowering.pytrees import flattening_fault


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class FixedLeaf:
    """Placeholder in results for a fixed leaf of the arguments.

    Attributes:
      path: of that leaf, such as `args[0].activation`.
    """

    path: str


@dataclasses.dataclass(frozen=True)
class Stages:
    """The stages of JAX of a function that another library has jitted, as `flax.nnx.jit` does."""

    fn: Any

    def __call__(self, *args: Any) -> Any:
        """Calls the function."""
        return self.fn(*args)

    def trace(self, *args: Any) -> jax.stages.Traced:
        """Traces the function; results are what the library makes its own of, such as what modules have become."""
        traced = self.fn.trace(*args)
        return getattr(traced, "traced", traced)

    def lower(self, *args: Any) -> jax.stages.Lowered:
        """Lowers the function."""
        return self.trace(*args).lower()


def of_arrays(
    fn: Callable[..., Any], args: Sequence[Any], *, marked: bool = False
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Returns a function and arguments that `jax.jit` accepts: every leaf that is not an array is fixed.

    Python numbers count as arrays, as under `jax.jit`, with two exceptions. An argument that holds a function, a string
    or a bool beside its arrays is configuration, so its numbers are fixed too. All numbers are fixed if the function is
    wrapped by `equinox.filter_jit`. A function that JAX has jitted declares its static arguments itself.

    Returns:
      Both, unchanged if nothing is fixed. Otherwise a function whose results have None in place of leaves that are not
      arrays (with `marked`, a `FixedLeaf` in place of those that are fixed leaves of the arguments), and arguments with
      None in place of fixed leaves, as `without_fixed` makes them.

    Raises:
      UsageError: if JAX cannot trace `fn`, or the arguments are not pytrees.
    """
    require_function(fn)
    fault = flattening_fault(tuple(args))
    if fault is not None:
        raise UsageError(f"lowering: args must be pytrees; got {fault}")
    leaves, structure = jax.tree.flatten(tuple(args))
    fixed = _fixed(fn, args)
    for leaf, is_fixed in zip(leaves, fixed, strict=True):
        # A static argument of a jitted function may be anything hashable, which NumPy's arrays are not.
        may_be_static = hasattr(fn, "trace") and not isinstance(leaf, np.ndarray)
        if not (is_fixed or may_be_static or _is_value(leaf)):
            raise UsageError(f"lowering: args must hold arrays, or numbers that JAX can hold; got {show(leaf)}")
    if hasattr(fn, "trace") or not (any(fixed) or _is_filtered(fn)):
        is_wrapped = hasattr(fn, "trace") and type(fn).__module__.startswith("flax.")
        return Stages(fn) if is_wrapped else traceable(fn, args), tuple(args)

    paths = [f"args{jax.tree_util.keystr(path)}" for path, _ in jax.tree.leaves_with_path(tuple(args))]
    marks = {id(leaf): FixedLeaf(path) for leaf, path, is_one in zip(leaves, paths, fixed, strict=True) if is_one}

    def without_others(leaf: Any) -> Any:
        if is_array(leaf):
            return leaf
        return marks[id(leaf)] if marked and id(leaf) in marks else leaf if isinstance(leaf, Number) else None

    @named_as(fn)
    def call(*arrays: Any) -> Any:
        moving = iter(jax.tree.leaves(arrays))
        filled = [leaf if is_fixed else next(moving) for leaf, is_fixed in zip(leaves, fixed, strict=True)]
        results = fn(*jax.tree.unflatten(structure, filled))
        return jax.tree.map(without_others, results)

    return call, without_fixed(fn, args)


def jaxpr_of(fn: Callable[..., Any], args: Sequence[Any]) -> Jaxpr:
    """Returns what `fn` computes; a function that JAX has jitted may have static arguments among these."""
    if not hasattr(fn, "trace"):
        return jax.make_jaxpr(fn)(*args).jaxpr
    return fn.trace(*args).jaxpr.jaxpr


def without_fixed(fn: Callable[..., Any], args: Sequence[Any]) -> tuple[Any, ...]:
    """Returns the arguments with None in place of the leaves that `of_arrays` fixes."""
    leaves, structure = jax.tree.flatten(tuple(args))
    moving = [None if is_fixed else leaf for leaf, is_fixed in zip(leaves, _fixed(fn, args), strict=True)]
    return tuple(jax.tree.unflatten(structure, moving))


def is_array(leaf: Any) -> bool:
    """Tells whether this has a shape and a dtype."""
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype") and not isinstance(leaf, str)


def _fixed(fn: Any, args: Sequence[Any]) -> list[bool]:
    """Tells whether each leaf is fixed."""
    fixed = []
    for arg in args:
        leaves, structure = jax.tree.flatten(arg)
        is_tree = not jax.tree_util.treedef_is_leaf(structure)
        holds_configuration = _is_filtered(fn) or (is_tree and any(map(_is_configuration, leaves)))
        fixed += [not is_array(leaf) and (holds_configuration or not isinstance(leaf, Number)) for leaf in leaves]
    return fixed


def _is_value(leaf: Any) -> bool:
    """Tells whether JAX can hold this array or number."""
    if isinstance(leaf, np.ndarray | np.generic):
        return leaf.dtype.kind not in "OSUMm" and leaf.dtype.names is None
    if isinstance(leaf, int) and not isinstance(leaf, bool):
        limits = jnp.iinfo(jax.dtypes.canonicalize_dtype(int))
        return bool(limits.min <= leaf <= limits.max)
    return True


def _is_configuration(leaf: Any) -> bool:
    return not is_array(leaf) and (isinstance(leaf, bool) or not isinstance(leaf, Number))


def _is_filtered(fn: Any) -> bool:
    """Tells whether something other than `jax.jit` has jitted this."""
    return hasattr(fn, "lower") and not hasattr(fn, "trace")
