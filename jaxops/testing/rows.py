"""Promises about rows: each depends on itself alone, whatever the others are and however many there are."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxops.testing.promise import Promise
from jaxops.testing.trial import SkipError, Trial, during


@dataclasses.dataclass(frozen=True)
class Rows:
    """The rows of a function's operands and results.

    Attributes:
      trial: the function and its operands.
      axes: for each operand, the axis of its rows, or None.
      count: how many rows there are.
    """

    trial: Trial
    axes: tuple[int | None, ...]
    count: int

    @classmethod
    def of(cls, trial: Trial) -> "Rows":
        """Finds the rows of a function on trial; skips the promise if nobody knows them."""
        if trial.batched is None:
            raise SkipError("no rows are known: pass batched=, an axis for each operand or None")
        ((count, *_),) = {
            (x.shape[axis],) for x, axis in zip(trial.operands, trial.batched, strict=True) if axis is not None
        }
        if count < 2:
            raise SkipError(f"operands have {count} rows; two are needed")
        return cls(trial, trial.batched, count)

    def taken(self, rows: Any) -> tuple[np.ndarray, ...]:
        """Returns the operands with some of the rows."""
        return tuple(
            x if axis is None else x[(slice(None),) * axis + (rows,)]
            for x, axis in zip(self.trial.operands, self.axes, strict=True)
        )

    @functools.cached_property
    def result_axes(self) -> list[int | None]:
        """The axis of rows of each array among the results, or None if rows are combined in it."""
        with during(f"on {self.count - self.count // 2} of {self.count} rows"):
            whole = jax.eval_shape(self.trial.fn, *self.trial.operands)
            part = jax.eval_shape(self.trial.fn, *self.taken(slice(self.count // 2, None)))
        pairs = zip(jax.tree.leaves(whole), jax.tree.leaves(part), strict=True)
        return [next((i for i in range(a.ndim) if a.shape[i] != b.shape[i]), None) for a, b in pairs]

    def require_results(self) -> None:
        """Skips a promise about the rows of results if rows are combined in all of them."""
        if all(axis is None for axis in self.result_axes):
            raise SkipError("no result has an axis of rows: rows are combined in all of them")

    def row_results(self, *operands: Any) -> list[Any]:
        """Returns the results that have rows, with these in front."""
        leaves = zip(jax.tree.leaves(self.trial.fn(*operands)), self.result_axes, strict=True)
        return [jnp.moveaxis(x, axis, 0) for x, axis in leaves if axis is not None]

    @property
    def row_gradient(self) -> Callable[..., list[Any]] | None:
        """The gradient of a sum over rows by operands that have rows, with these in front; None if there is none."""
        axes = {i: axis for i, axis in enumerate(self.axes) if i in self.trial.differentiable and axis is not None}

        def loss(*operands: Any) -> jax.Array:
            floats = [x for x in self.row_results(*operands) if jnp.issubdtype(x.dtype, jnp.floating)]
            return functools.reduce(jnp.add, [jnp.sum(jnp.sin(x.astype(jnp.float32))) for x in floats])

        if not axes or not any(jnp.issubdtype(x.dtype, jnp.floating) for x in jax.tree.leaves(self.trial.results)):
            return None
        gradient = jax.grad(loss, tuple(axes))
        return lambda *operands: [
            jnp.moveaxis(x, axis, 0) for axis, x in zip(axes.values(), gradient(*operands), strict=True)
        ]


def nan_in_padding(trial: Trial) -> None:
    """Checks that NaN in the last rows reaches no other row of results, or of gradients by operands with rows."""
    rows = Rows.of(trial)
    rows.require_results()
    kept = rows.count - max(1, rows.count // 4)
    padded = []
    for x, axis in zip(trial.operands, rows.axes, strict=True):
        x = x.copy()
        if axis is not None and jnp.issubdtype(x.dtype, jnp.floating):
            x[(slice(None),) * axis + (slice(kept, None),)] = np.nan
        padded.append(x)
    for subject, fn in _of_rows(rows):
        with during(f"with NaN in rows from {kept} on"):
            actual = [x[:kept] for x in fn(*padded)]
        subject = f"with NaN in all rows from {kept} on, {subject} of an earlier row"
        trial.agree(subject, actual, [x[:kept] for x in fn(*trial.operands)], compared_with="the one without")


def batch_invariance(trial: Trial) -> None:
    """Checks that a row has the same bits whichever other rows there are, and in whichever order."""
    rows = Rows.of(trial)
    rows.require_results()
    orders: Sequence[tuple[str, Any]] = (
        ("reversed order", slice(None, None, -1)),
        ("the first half alone", slice(None, rows.count // 2)),
        ("one row alone", slice(1)),
    )
    for subject, fn in _of_rows(rows):
        whole = fn(*trial.operands)
        for order, which in orders:
            with during(f"on rows in {order}"):
                actual = fn(*rows.taken(which))
            expected = [np.asarray(x)[which] for x in whole]
            subject_there = f"on {order}, {subject} of a row"
            trial.agree(subject_there, actual, expected, compared_with="the one among all rows", exactly=True)


def _of_rows(rows: Rows) -> list[tuple[str, Callable[..., list[Any]]]]:
    functions: list[tuple[str, Callable[..., list[Any]]]] = [("the result", jax.jit(rows.row_results))]
    if rows.row_gradient is not None:
        functions.append(("the gradient", jax.jit(rows.row_gradient)))
    return functions


PROMISES = tuple(Promise(check.__name__, check) for check in (nan_in_padding, batch_invariance))
