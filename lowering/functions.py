"""Checks the functions that users give to the tools."""

import functools
import inspect
import types
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from lowering.describe import first_line, show
from lowering.errors import UsageError

_KINDS = (
    (inspect.iscoroutinefunction, "an async function"),
    (inspect.isasyncgenfunction, "an async generator function"),
    (inspect.isgeneratorfunction, "a generator function"),
)


def require_function(fn: Any, tool: str = "lowering") -> None:
    """Refuses what cannot be called, and functions whose calls return before their bodies have run."""
    if not callable(fn):
        raise UsageError(f"{tool}: fn must be a function or an operator; got {show(fn)}")
    body = _body(fn)
    for is_kind, kind in _KINDS:
        if is_kind(body):
            name = name_of(fn)
            raise UsageError(f"{tool}: fn must be a plain function; got {kind}{'' if name == 'fn' else f', {name}'}")


def name_of(fn: Any) -> str:
    """Returns the name of a function for messages; "fn", as the tools' arguments are called, if it has none."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    name = getattr(fn, "__name__", "")
    return name if isinstance(name, str) and name.isidentifier() else "fn"


def named_as(fn: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorates a function that stands for another, so that programs and messages have the other's name."""

    def named(call: Callable[..., Any]) -> Callable[..., Any]:
        call.__name__ = call.__qualname__ = name_of(fn)
        return call

    return named


def traceable(fn: Callable[..., Any], args: Sequence[Any]) -> Callable[..., Any]:
    """Returns a function that JAX can hold and trace, for arguments that are all arrays.

    JAX keeps weak references to functions, and hashes them. What has neither, such as `numpy.sin`, crashes JAX 0.12 the
    second time that it is jitted. So it is called from a function that has both. What is not written in Python is
    traced once to see whether it can be.
    """
    if not (_is_foreign(fn) or _is_unholdable(fn)):
        return fn

    @named_as(fn)
    def call(*args: Any) -> Any:
        return fn(*args)

    if _is_foreign(fn):
        try:
            jax.eval_shape(call, *args)
        except Exception as error:
            message = f"lowering: fn must be a function that JAX can trace; got {show(fn)}: {first_line(error)}"
            raise UsageError(message) from error
    return call


def with_changes(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that also returns the arrays which it leaves in its arguments in place of others.

    A train step that updates a module of NNX in place has no other results than its loss; without them, XLA would leave
    its gradient out. A function that is jitted returns what it changes by itself.
    """
    if hasattr(fn, "trace"):
        return fn

    @named_as(fn)
    def changing(*args: Any) -> Any:
        before = {id(leaf) for leaf in jax.tree.leaves(args)}
        results = fn(*args)
        changed = [x for x in jax.tree.leaves(args) if isinstance(x, jax.Array) and id(x) not in before]
        return (results, changed) if changed else results

    return changing


def _body(fn: Any) -> Any:
    """Returns the Python function that runs when this is called, as far as that can be told."""
    while not (inspect.isfunction(fn) or inspect.ismethod(fn)):
        if isinstance(fn, functools.partial):
            fn = fn.func
        elif hasattr(fn, "trace") and hasattr(fn, "__wrapped__"):  # jitted
            fn = fn.__wrapped__
        else:
            return type(fn).__call__
    return fn


def _is_foreign(fn: Any) -> bool:
    while isinstance(fn, functools.partial):
        fn = fn.func
    return isinstance(fn, np.ufunc | np.vectorize | types.BuiltinFunctionType | type)


def _is_unholdable(fn: Any) -> bool:
    try:
        weakref.ref(fn)
        hash(fn)
    except TypeError:
        return True
    return False
