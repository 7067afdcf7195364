"""Promises about 16-bit operands: results and gradients are those in float64, but for the rounding of 16 bits."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxops.testing.promise import Promise
from jaxops.testing.slopes import in_float64
from jaxops.testing.trial import SkipError, Trial, cotangents, during, floating
from lowering.errors import NotSupportedError
from lowering.select import current_selection


def _accuracy(trial: Trial, name: str) -> None:
    dtype = jnp.dtype(name)
    if not floating(trial.operands):
        raise SkipError("no operand is floating point")
    with np.errstate(over="ignore"):
        narrow = [x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x for x in trial.operands]
    with during(f"on {name} operands"), _may_lack_kernels(name):
        results = jax.jit(trial.fn)(*narrow)
    chosen = [x.astype(np.float64) for x in cotangents(floating(results))]
    expected, gradients, truth = _truth(trial, narrow, chosen)
    trial.agree(f"the result of {name} operands", results, expected, compared_with=truth)
    if trial.needs_gradient():
        with during(f"when its gradient is computed on {name} operands"), _may_lack_kernels(name):
            actual = _pulled_back(trial, trial.fn, narrow, chosen)
        trial.gradients_agree(f"the gradient of {name} operands", actual, gradients, compared_with=truth)


@contextlib.contextmanager
def _may_lack_kernels(name: str) -> Iterator[None]:
    """Skips operands that no kernel takes where kernels are asked for: an operator promises nothing of its kernels."""
    try:
        yield
    except NotSupportedError as refusal:
        selection = current_selection()
        requests = (selection.default, *dict(selection.by_operator).values())
        if not any(request.startswith(("pallas", "interpret", "emulate")) for request in requests):
            raise
        raise SkipError(f"the kernel that `use` asks for refuses {name} operands: {refusal}") from None


def _truth(trial: Trial, narrow: Sequence[Any], chosen: Sequence[Any]) -> tuple[Any, Any, str]:
    """Computes results and gradients for the same values in float64; in float32 if the function refuses float64."""
    fn = trial.reference or trial.fn
    try:
        with jax.enable_x64(True):
            return *_computed(trial, fn, [in_float64(x) for x in narrow], chosen), "the one in float64"
    except Exception:  # it mixes dtypes, or has kernels for narrower ones alone
        wide = [x.astype(np.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x for x in narrow]
        with during("on float32 operands, to compare with"):
            return *_computed(trial, fn, wide, chosen), "the one in float32"


def _computed(trial: Trial, fn: Callable[..., Any], operands: Sequence[Any], chosen: Sequence[Any]) -> tuple[Any, Any]:
    results = jax.tree.map(np.asarray, jax.jit(lambda *xs: fn(*xs))(*operands))
    return results, _pulled_back(trial, fn, operands, chosen) if trial.has_gradient else ()


def _pulled_back(trial: Trial, fn: Callable[..., Any], operands: Sequence[Any], chosen: Sequence[Any]) -> Any:
    of_differentiable, primals = trial.at_differentiable(operands, fn)

    @jax.jit
    def pullback(primals: Any, chosen: Any) -> Any:
        results, vjp = jax.vjp(of_differentiable, *primals)
        return vjp([c.astype(x.dtype) for c, x in zip(chosen, results, strict=True)])

    return jax.tree.map(np.asarray, pullback(primals, chosen))


PROMISES = tuple(
    Promise(f"{name}_accuracy", functools.partial(_accuracy, name=name)) for name in ("bfloat16", "float16")
)
