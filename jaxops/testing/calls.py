"""Promises about values: a transformation of a function means what the function means."""

import dataclasses

import jax
import jax.export
import jax.numpy as jnp
import numpy as np

from jaxops.testing.promise import Promise
from jaxops.testing.trial import FoundError, SkipError, Trial, during, replaced, stacked, two_of
from lowering.compiling.report import UNCHECKED_CALLS

_PLATFORMS = ("cpu", "cuda", "tpu")


def runs(trial: Trial) -> None:
    """Checks that the function, outside jit, returns arrays of numbers."""
    for x in jax.tree.leaves(trial.results):
        if not (jnp.issubdtype(x.dtype, jnp.number) or x.dtype == np.bool_):
            raise FoundError(f"it returns {x.dtype}{list(x.shape)}, which is no array of numbers")


def reference(trial: Trial) -> None:
    """Checks that results, and gradients of a loss, are those of the reference."""
    if trial.reference is None:
        raise SkipError("there is nothing to compare with: pass reference=, the same in plain JAX")
    other = dataclasses.replace(trial, fn=trial.reference)
    trial.agree("the result", trial.jitted(*trial.operands), other.results, compared_with="the reference's")
    if not trial.should_have_gradient:
        return
    with during("when the gradient of the reference is computed"):
        expected = other.gradient(*trial.operands)
    with during("when the gradient is computed"):
        gradient = trial.gradient(*trial.operands)
    trial.gradients_agree("the gradient", gradient, expected, compared_with="that of the reference")


def jit(trial: Trial) -> None:
    """Checks that results under jit are those outside it."""
    with during("under jax.jit"):
        actual = trial.jitted(*trial.operands)
    trial.agree("the result under jax.jit", actual, trial.results, compared_with="the result outside it")


def disable_jit(trial: Trial) -> None:
    """Checks that results with jit disabled, as debuggers want it, are the same."""
    with during("under jax.disable_jit"), jax.disable_jit():
        actual = trial.fn(*trial.arrays)
    trial.agree("the result under jax.disable_jit", actual, trial.results, compared_with="the result without it")


def deterministic(trial: Trial) -> None:
    """Checks that a second run gives the same bits, in results and gradients."""
    first, second = (trial.jitted(*trial.operands) for _ in range(2))
    trial.agree("a second result", second, first, compared_with="the first", exactly=True)
    if trial.needs_gradient():
        first, second = (trial.gradient(*trial.operands) for _ in range(2))
        trial.agree("a second gradient", second, first, compared_with="the first", exactly=True)


def vmap(trial: Trial) -> None:
    """Checks that results under vmap over each operand, and over all on their last axes, are those of a loop."""
    for position, operand in enumerate(trial.operands):
        mapped = replaced(trial.operands, position, two_of(operand))
        in_axes = replaced((None,) * len(mapped), position, 0)
        with during(f"under jax.vmap over operand {position}"):
            actual = jax.jit(jax.vmap(trial.fn, in_axes))(*mapped)
        loop = [trial.jitted(*replaced(trial.operands, position, part)) for part in mapped[position]]
        trial.agree(f"the result of jax.vmap over operand {position}", actual, stacked(loop), compared_with="a loop's")
    last = [np.stack([x, x], axis=-1) for x in trial.operands]
    with during("under jax.vmap over the last axis of all operands"):
        actual = jax.jit(jax.vmap(trial.fn, -1))(*last)
    expected = stacked([trial.jitted(*trial.operands)] * 2)
    trial.agree("the result of jax.vmap over the last axes", actual, expected, compared_with="a loop's")


def export(trial: Trial) -> None:
    """Checks that function and gradient can be exported for three platforms at once, stored, and called again."""
    functions = {"the result": trial.jitted}
    if trial.should_have_gradient:
        functions["the gradient"] = trial.gradient
    for subject, fn in functions.items():
        with during(f"when {subject} is exported for {', '.join(_PLATFORMS)}"):
            export = jax.export.export(jax.jit(fn), platforms=_PLATFORMS, disabled_checks=UNCHECKED_CALLS)
            exported = export(*trial.operands)
            restored = jax.export.deserialize(exported.serialize())
        with during(f"when {subject} is called after export"):
            actual = jax.jit(restored.call)(*trial.operands)
        trial.agree(f"{subject} after export", actual, fn(*trial.operands), compared_with="the one before")


PROMISES = tuple(
    Promise(check.__name__, check) for check in (runs, reference, deterministic, jit, disable_jit, vmap, export)
)
