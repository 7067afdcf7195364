"""`check_operator`: the promises that this library's operators keep, for any function of arrays."""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxops._checks.arguments import BadParamError, as_array, is_integer, require
from jaxops._primitive.operator import Operator
from jaxops.testing import accuracy, calls, derivatives, meshes, rows
from jaxops.testing.compare import DEFAULTS, Tolerance
from jaxops.testing.report import Broken, Report, Skipped
from jaxops.testing.trial import Trial
from lowering.errors import UsageError
from lowering.functions import require_function
from lowering.select import current_selection, emulated_chip

_NAME = "check_operator"
_PROMISES = {
    promise.name: promise for module in (calls, derivatives, accuracy, rows, meshes) for promise in module.PROMISES
}
PROMISES = tuple(_PROMISES)
_NOT_EMULATED = frozenset({"export", "float16_accuracy", "shard_map", "auto_mesh", "explicit_mesh"})


def check_operator(
    fn: Callable[..., Any],
    operands: Sequence[Any],
    *,
    differentiable: Sequence[int] | None = None,
    batched: Sequence[int | None] | None = None,
    promises: Sequence[str] | None = None,
    tolerance: Mapping[str, float] | None = None,
    reference: Callable[..., Any] | None = None,
) -> Report:
    """Checks the promises that this library's operators keep, for an operator or a loss of your own.

    Each promise compares two computations that have to agree, `|a - b| <= t * (|b| + max(|b|) / 10)`, element by
    element, where t is the tolerance of the result's dtype. What a function raises is a finding like any other.

    Args:
      fn: takes the operands by position and returns an array or a pytree of arrays.
      operands: arrays to try it on, small ones that show what is special: ignored labels, odd sizes, large logits.
      differentiable: the positions of operands to differentiate. None means all that are floating point; () none.
      batched: for each operand the axis along which its rows are independent, or None if all rows share it. Such axes
        must have the same size, and a multiple of 8 suits 8 devices. None means that no rows are known: promises about
        rows and meshes are skipped.
      promises: which of `jaxops.testing.PROMISES` to check. None means all.
      tolerance: relative tolerances in place of the defaults, by dtype: "float64", "float32", "bfloat16", "float16".
      reference: computes what `fn` means in another way, in jnp. Without it nothing says what the right values are,
        and the report is about consistency alone.

    Returns:
      A `Report`: `kept`, `broken` and `skipped` promises. `print` shows a table, and `raise_if_broken()` suits tests.

    Raises:
      BadParamError: if an argument is not as described. What `fn` does wrong is reported and never raised.
      TypeError: if `fn` or `reference` is not a function.

    Example:
      >>> from jaxops.testing import check_operator
      >>> @jax.custom_vjp
      ... def squared(x):
      ...     return x * x
      >>> squared.defvjp(lambda x: (x * x, x), lambda x, _: (2 * x,))  # forgets the cotangent
      >>> report = check_operator(
      ...     squared, [np.arange(4.0)], promises=["vmap", "cotangent_scaling"]
      ... )
      >>> report.kept
      ('vmap',)
      >>> print(report.broken[0].found)
      the gradient by operand 0 does not follow the cotangent: for one 16 times smaller
      it is 16 times as large as it should be
    """
    trial = Trial(
        _function("fn", fn),
        arrays := _operands(operands),
        _differentiable(differentiable, arrays),
        _batched(batched, arrays),
        None if reference is None else _function("reference", reference),
        _tolerance(tolerance),
    )
    chosen = [_PROMISES[name] for name in _promise_names(promises)]
    kept, broken, skipped = [], [], []
    fault = _PROMISES["runs"].outcome(trial)
    for promise in chosen:
        if fault is not None and promise.name != "runs":
            skipped.append(Skipped(promise.name, "the function itself does not run on these operands"))
            continue
        if promise.name in _NOT_EMULATED and emulated_chip(current_selection().default) is not None:
            skipped.append(Skipped(promise.name, "an emulated chip has no exports, meshes or float16"))
            continue
        match promise.outcome(trial):
            case Broken() as found:
                broken.append(found)
            case Skipped() as reason:
                skipped.append(reason)
            case None:
                kept.append(promise.name)
    if isinstance(fault, Broken) and not any(found.promise == "runs" for found in broken):
        broken.append(fault)
    return Report(_title(fn), tuple(kept), tuple(broken), tuple(skipped))


def _title(fn: Callable[..., Any]) -> str:
    """Returns what a report calls a function, an operator or a module that is called."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    return fn.name if isinstance(fn, Operator) else getattr(fn, "__name__", type(fn).__name__)


def _function(argument: str, fn: Any) -> Callable[..., Any]:
    try:
        require_function(fn)
    except UsageError as error:
        raise UsageError(str(error).replace("lowering: fn", f"{_NAME}: {argument}", 1)) from None
    return fn


def _operands(operands: Any) -> tuple[np.ndarray, ...]:
    is_sequence = isinstance(operands, list | tuple)
    require(is_sequence and len(operands) > 0, _NAME, "operands", "be a list or tuple of arrays", operands)
    arrays = []
    for position, operand in enumerate(operands):
        array = as_array(_NAME, f"operands[{position}]", operand)
        is_number = jnp.issubdtype(array.dtype, jnp.number) or array.dtype == jnp.bool_
        rule = "be an array of numbers (of a key, its jax.random.key_data)"
        require(is_number, _NAME, f"operands[{position}]", rule, operand)
        arrays.append(np.asarray(array))
    return tuple(arrays)


def _differentiable(positions: Any, operands: Sequence[np.ndarray]) -> tuple[int, ...]:
    floats = tuple(i for i, x in enumerate(operands) if jnp.issubdtype(x.dtype, jnp.floating))
    if positions is None:
        return floats
    rule = f"be a list or tuple of different positions of floating-point operands, of {list(floats)}"
    fits = isinstance(positions, list | tuple) and all(is_integer(i) and i in floats for i in positions)
    require(fits and len({*positions}) == len(positions), _NAME, "differentiable", rule, positions)
    return tuple(map(int, positions))


def _batched(axes: Any, operands: Sequence[np.ndarray]) -> tuple[int | None, ...] | None:
    if axes is None:
        return None
    is_sequence = isinstance(axes, list | tuple) and len(axes) == len(operands)
    rule = f"have an axis or None for each of the {len(operands)} operands"
    require(is_sequence, _NAME, "batched", rule, axes)
    for axis, x in zip(axes, operands, strict=True):
        fits = axis is None or (is_integer(axis) and -x.ndim <= axis < x.ndim)
        require(fits, _NAME, "batched", f"be in [-{x.ndim}, {x.ndim}) for an operand of rank {x.ndim}", axis)
    sizes = {x.shape[axis] for axis, x in zip(axes, operands, strict=True) if axis is not None}
    require(len(sizes) == 1, _NAME, "batched", "name axes of one size, and one at least", sorted(sizes))
    return tuple(None if axis is None else int(axis) % x.ndim for axis, x in zip(axes, operands, strict=True))


def _promise_names(names: Any) -> tuple[str, ...]:
    if names is None:
        return PROMISES
    fits = isinstance(names, list | tuple) and all(isinstance(name, str) for name in names)
    require(fits, _NAME, "promises", "be a list or tuple of names", names)
    for name in names:
        require(name in _PROMISES, _NAME, "promises", f"be among {', '.join(PROMISES)}", name)
    return tuple(dict.fromkeys(names))


def _tolerance(given: Any) -> Tolerance:
    if given is None:
        return Tolerance(DEFAULTS)
    require(isinstance(given, Mapping), _NAME, "tolerance", "map names of dtypes to numbers", given)
    by_name = {}
    for dtype, value in given.items():
        try:
            name = jnp.dtype(dtype).name
        except TypeError:
            name = ""
        require(name in DEFAULTS, _NAME, "tolerance", f"be for {', '.join(DEFAULTS)}", dtype)
        fits = isinstance(value, float | int) and not isinstance(value, bool) and 0 <= value < math.inf
        if not fits:
            raise BadParamError(
                f"{_NAME}: tolerance of {name} must be a finite number, 0 or more; got {value!r}", 161002
            )
        by_name[name] = float(value)
    return Tolerance({**DEFAULTS, **by_name})
