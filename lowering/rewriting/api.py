"""The public function `rewrite`."""

import functools
import inspect
import sys
import types
from collections.abc import Callable, Collection
from typing import Any, Generic, ParamSpec, TypeVar, overload

import jax
import jax.numpy as jnp
import numpy as np

from lowering.describe import meant, show
from lowering.errors import UsageError
from lowering.functions import name_of, require_function
from lowering.operators import note
from lowering.rewriting.plan import Plan, Planner, overlooked
from lowering.rewriting.report import Rewrites
from lowering.rewriting.rules import Rule, rules

_P = ParamSpec("_P")
_R = TypeVar("_R")
_Names = str | Collection[str]


@overload
def rewrite(fn: Callable[_P, _R], *, only: _Names = (), off: _Names = ()) -> "Rewritten[_P, _R]": ...
@overload
def rewrite(*, only: _Names = (), off: _Names = ()) -> "Callable[[Callable[_P, _R]], Rewritten[_P, _R]]": ...
def rewrite(fn: Any = inspect.Parameter.empty, *, only: _Names = (), off: _Names = ()) -> Any:
    """Rewrites a function of plain JAX, so that some of its equations become operators of this library.

    The function is traced to a jaxpr, which is evaluated again with some equations replaced; everything else stays the
    user's own. So it composes with `jax.jit`, `jax.grad`, `jax.vmap`, `jax.lax.scan`, `jax.checkpoint` and
    `jax.shard_map`, in either order. Rewrite the loss before it is differentiated: `jax.value_and_grad(rewrite(loss))`.

    Args:
      fn: the function. Its arguments may be pytrees, modules and static values, as in a plain call; what is no JAX
        array stays what it is. It is traced at each call, so call it under `jax.jit` where that matters.
        Without a function, as in `@lowering.rewrite(only="dropout")`, a decorator with these options is returned.
      only: the names of the patterns to rewrite, of "cross_entropy_sum", "row_cone_sum", "cross_entropy", "row_cone",
        "max_pool", "embedding" and "dropout". By default all but "dropout", which draws other random bits.
      off: the names of patterns to leave alone.

    Returns:
      A function with the same signature. `.report(*args, **kwargs)` returns `Rewrites`: what is rewritten for such
      arguments, and what is left alone and why. Where nothing is found, the call is one of `fn` itself.

    Raises:
      TypeError: if `fn` is no plain function.
      ValueError: if `only` or `off` names something that is not a pattern, or `off` names everything that `only` does.

    Numerics:
      Pooling has the same bits. Other values and gradients differ by rounding: logits are kept in float32 where a
      function rounds them to 16 bits, and sums are added up in another order. Equal largest logits may share the
      gradient of a maximum over all rows in another proportion.

    Example:
      >>> def loss(weight, x, labels):
      ...     logits = x @ weight
      ...     return (
      ...         jax.nn.logsumexp(logits, axis=-1) - logits[jnp.arange(2048), labels]
      ...     ).mean()
      >>> shapes = (
      ...     ((512, 32000), jnp.float32),
      ...     ((2048, 512), jnp.float32),
      ...     ((2048,), jnp.int32),
      ... )
      >>> report = lowering.rewrite(loss).report(
      ...     *(jax.ShapeDtypeStruct(*each) for each in shapes)
      ... )
      >>> [(one.pattern, one.saved_bytes) for one in report.applied]
      [('cross_entropy_sum', 389021696)]
    """
    chosen = _chosen(only, off)
    if fn is inspect.Parameter.empty:
        return functools.partial(rewrite, only=only, off=off)
    require_function(fn, "lowering.rewrite")
    if isinstance(fn, type):
        raise UsageError(f"lowering.rewrite: fn must be a function, and no class; got {show(fn)}")
    return Rewritten(fn, chosen)


class Rewritten(Generic[_P, _R]):
    """A function that computes what another does, with some of its equations replaced by operators."""

    def __init__(self, fn: Callable[_P, _R], chosen: tuple[Rule, ...]) -> None:
        """Takes the function, and the rules by which to rewrite it."""
        functools.update_wrapper(self, fn, updated=())
        self._fn = fn
        self._rules = chosen

    def __call__(self, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        """Calls the function, rewritten."""
        traced = _Traced(self._fn, args, kwargs)
        plan = Planner(self._rules).plan(traced.jaxpr)
        if not plan.applied:
            return self._fn(*args, **kwargs)
        loops = {rule.name for rule in self._rules if rule.makes_loops}
        for one in plan.applied:
            if one.pattern in loops:
                note(f"{one.source}: {one.pattern} computes {one.detail}, in a loop of JAX, which takes no kernel")
        return traced.results(plan)

    def __reduce__(self) -> Any:
        """Pickles a module's function by its name, where it is this one, and others by what is rewritten."""
        name = str(getattr(self, "__qualname__", ""))
        found: Any = sys.modules.get(self.__module__)
        for part in name.split("."):
            found = getattr(found, part, None)
        return name if found is self else (_with_rules, (self._fn, [rule.name for rule in self._rules]))

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        """Binds a method to its instance."""
        return self if instance is None else types.MethodType(self, instance)

    def report(self, *args: _P.args, **kwargs: _P.kwargs) -> Rewrites:
        """Reports what is rewritten for these arguments under `jax.jit`, and what is left alone and why.

        It computes nothing. NumPy's arrays are traced as `jax.jit` would, unless the function needs their values.

        Args:
          *args: the function's arguments: arrays, `jax.ShapeDtypeStruct`s, or pytrees of them.
          **kwargs: its keyword arguments.
        """
        try:
            jaxpr = _Traced(self._fn, args, kwargs, numpy_is_traced=True).jaxpr
        except (jax.errors.JAXTypeError, jax.errors.JAXIndexError):
            jaxpr = _Traced(self._fn, args, kwargs).jaxpr
        plan = Planner(self._rules).plan(jaxpr)
        applied = tuple(sorted(plan.applied, key=lambda one: -one.saved_bytes))
        return Rewrites(applied, (*plan.refused, *overlooked(self._rules, jaxpr, plan)))


class _Arguments:
    """The arguments of a call as a pytree; what the call changes in them is written back by `update`."""

    def __init__(self, args: Any, kwargs: Any) -> None:
        """Takes positional and keyword arguments."""
        self._nnx = sys.modules.get("flax.nnx")  # who has one of its modules has imported it
        leaves, self._structure = jax.tree.flatten((args, kwargs), is_leaf=self._is_object)
        self._is_object_at = [self._is_object(leaf) for leaf in leaves]
        self._objects = [leaf for leaf in leaves if self._is_object(leaf)]
        others = [leaf for leaf in leaves if not self._is_object(leaf)]
        self._graph: Any
        self._graph, state = self._nnx.split(self._objects) if self._nnx and self._objects else (None, ())
        self.tree = (others, state)

    def merged(self, tree: Any) -> tuple[Any, Any, Any]:
        """Returns positional and keyword arguments made of such a tree, and the new objects in them."""
        others, state = tree
        objects = self._nnx.merge(self._graph, state) if self._nnx and self._objects else []
        sources = {True: iter(objects), False: iter(others)}
        args, kwargs = jax.tree.unflatten(self._structure, [next(sources[at]) for at in self._is_object_at])
        return args, kwargs, objects

    def state(self, objects: Any) -> Any:
        """Returns what a call has left in the objects of `merged`."""
        return self._nnx.split(objects)[1] if self._nnx and self._objects else ()

    def update(self, state: Any) -> None:
        """Writes such a state into the objects of the call."""
        if self._nnx and self._objects:
            self._nnx.update(self._objects, state)

    def _is_object(self, leaf: Any) -> bool:
        return self._nnx is not None and isinstance(leaf, getattr(self._nnx, "Pytree", self._nnx.Object))


class _Traced:
    """A function's jaxpr for some arguments, and how to make its results of the jaxpr's.

    Every leaf that is no JAX array stays what it is, as in a plain call: numbers, strings and, unless they are to be
    traced, NumPy's arrays.
    """

    def __init__(self, fn: Callable[..., Any], args: Any, kwargs: Any, *, numpy_is_traced: bool = False) -> None:
        """Traces the function."""
        self._arguments = _Arguments(args, kwargs)
        leaves, structure = jax.tree.flatten(self._arguments.tree)
        moving = [_is_traced(leaf) or (numpy_is_traced and _is_numeric(leaf)) for leaf in leaves]
        self._arrays = [leaf for leaf, moves in zip(leaves, moving, strict=True) if moves]
        self._outputs: list[Any] = []
        self._structure: Any = None

        def of_arrays(*arrays: Any) -> list[Any]:
            given = iter(arrays)
            filled = [next(given) if moves else leaf for leaf, moves in zip(leaves, moving, strict=True)]
            args, kwargs, objects = self._arguments.merged(jax.tree.unflatten(structure, filled))
            results = fn(*args, **kwargs)
            found, self._structure = jax.tree.flatten((results, self._arguments.state(objects)))
            self._outputs = [_TRACED if isinstance(leaf, jax.Array) else leaf for leaf in found]
            return [leaf for leaf in found if isinstance(leaf, jax.Array)]

        try:
            self.jaxpr = jax.make_jaxpr(of_arrays)(*self._arrays)
        except Exception as error:
            if type(error).__name__ != "TraceContextError":  # of Flax, which who has no modules of it need not have
                raise
            rule = "take the modules of Flax NNX that it changes as arguments"
            raise UsageError(f"lowering.rewrite: fn must {rule}; got {name_of(fn)}, which does not") from error

    def results(self, plan: Plan) -> Any:
        """Computes the function's results as planned."""
        computed = iter(plan.run(*self._arrays))
        filled = [next(computed) if leaf is _TRACED else leaf for leaf in self._outputs]
        results, state = jax.tree.unflatten(self._structure, filled)
        self._arguments.update(state)
        return results


# Stands for a result that is computed.
_TRACED = object()


def _is_traced(leaf: Any) -> bool:
    is_array = hasattr(leaf, "shape") and hasattr(leaf, "dtype")
    return isinstance(leaf, jax.Array) or (is_array and not isinstance(leaf, np.ndarray | np.generic))


def _is_numeric(leaf: Any) -> bool:
    return isinstance(leaf, np.ndarray) and (leaf.dtype == bool or jnp.issubdtype(leaf.dtype, np.number))


def _with_rules(fn: Callable[_P, _R], names: Collection[str]) -> Rewritten[_P, _R]:
    return Rewritten(fn, tuple(rule for rule in rules() if rule.name in names))


def _chosen(only: str | Collection[str], off: str | Collection[str]) -> tuple[Rule, ...]:
    """Returns the rules that are on."""
    known = {rule.name: rule for rule in rules() if rule.find}
    wanted, unwanted = (_names(argument, given, known) for argument, given in (("only", only), ("off", off)))
    on = [rule for rule in known.values() if (rule.name in wanted if wanted else not rule.asked)]
    left = tuple(rule for rule in on if rule.name not in unwanted)
    if wanted and not left:
        raise ValueError(f"lowering.rewrite: off must leave a pattern that `only` names; got {show(off)}")
    return left


def _names(argument: str, given: Any, known: Collection[str]) -> tuple[str, ...]:
    """Returns the names of patterns that an argument holds."""
    names = (given,) if isinstance(given, str) or not isinstance(given, Collection) else tuple(given)
    for name in names:
        if not isinstance(name, str) or name not in known:
            rule = f"be the name of a pattern, or a tuple of names, from {', '.join(known)}"
            raise ValueError(f"lowering.rewrite: {argument} must {rule}; got {show(name)}{meant(name, known)}")
    return names
