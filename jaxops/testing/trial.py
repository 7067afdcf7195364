"""One function on trial: its operands, what is known of them, and what several promises compute alike."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxops._checks.dtypes import accumulation_dtype
from jaxops.testing.compare import Tolerance
from lowering.describe import first_line

SEED = 20260


class FoundError(Exception):
    """Sentence that says what breaks a promise."""


class SkipError(Exception):
    """Sentence that says why a promise cannot be checked."""


@dataclasses.dataclass(frozen=True)
class Trial:
    """A function and operands to try it on.

    Attributes:
      fn: takes arrays and returns an array or a pytree of arrays.
      operands: NumPy arrays.
      differentiable: the positions of operands to differentiate.
      batched: for each operand, the axis along which its rows are independent, or None if all rows share it. None if
        nothing is known.
      reference: computes the same in another way, if there is one to compare with.
      tolerance: how far apart two results may be.
    """

    fn: Callable[..., Any]
    operands: tuple[np.ndarray, ...]
    differentiable: tuple[int, ...]
    batched: tuple[int | None, ...] | None
    reference: Callable[..., Any] | None
    tolerance: Tolerance

    # Kept here, as many promises need them at the same shapes: they are traced and compiled once. Operands that are not
    # used are kept, because JAX takes the devices of a program from its operands.

    @property
    def arrays(self) -> list[jax.Array]:
        """The operands as users have them outside jit."""
        return list(map(jnp.asarray, self.operands))

    @functools.cached_property
    def results(self) -> Any:
        """The function's results outside jit."""
        with during("called outside jit"):
            return jax.tree.map(np.asarray, self.fn(*self.arrays))

    @functools.cached_property
    def jitted(self) -> Callable[..., Any]:
        """The function under jit."""
        return jax.jit(self._call, keep_unused=True)

    @functools.cached_property
    def jitted_loss(self) -> Callable[..., Any]:
        """The jitted `loss`."""
        return jax.jit(self.loss)

    @functools.cached_property
    def gradient(self) -> Callable[..., Any]:
        """The gradient of `loss` by all differentiable operands, under jit."""
        return jax.jit(jax.grad(self.loss, self.differentiable), keep_unused=True)

    @property
    def should_have_gradient(self) -> bool:
        """Tells whether there must be a gradient."""
        return bool(self.differentiable and floating(self.results))

    @functools.cached_property
    def has_gradient(self) -> bool:
        """Tells whether there is a gradient; the promises about derivatives say whether there should be one."""
        try:
            return bool(self.should_have_gradient and self.gradient(*self.operands))
        except Exception:
            return False

    def needs_gradient(self) -> bool:
        """Tells whether a promise is about a gradient as well; skips it where there should be one and is none."""
        if self.should_have_gradient and not self.has_gradient:
            raise SkipError("values keep it; the gradient raises, which `reference` or `derivative` shows")
        return self.should_have_gradient

    def loss(self, *operands: Any) -> jax.Array:
        """Computes a scalar that depends on every floating-point result, and not linearly."""
        # Sines of large numbers would be as good as random.
        scale = 1.0 / max([1.0, *(float(_largest(x)) for x in floating(self.results))])
        terms = [jnp.sum(jnp.sin(x.astype(accumulation_dtype(x.dtype)) * scale)) for x in floating(self.fn(*operands))]
        return functools.reduce(jnp.add, terms)

    def require_derivatives(self) -> None:
        """Skips a promise about derivatives if there are none."""
        if not self.differentiable:
            raise SkipError("no operand is differentiable")
        if not floating(self.results):
            raise SkipError("no result is floating point")

    def at_differentiable(
        self, operands: Sequence[Any], fn: Callable[..., Any] | None = None
    ) -> tuple[Callable[..., Any], list[Any]]:
        """Returns the floating-point results as a function of the differentiable operands alone, and these operands."""

        def of_differentiable(*primals: Any) -> list[Any]:
            full = list(operands)
            for position, primal in zip(self.differentiable, primals, strict=True):
                full[position] = primal
            return floating((fn or self.fn)(*full))

        return of_differentiable, [operands[position] for position in self.differentiable]

    def agree(self, subject: str, actual: Any, expected: Any, *, compared_with: str, exactly: bool = False) -> None:
        """Raises FoundError unless two pytrees of arrays agree."""
        difference = self.tolerance.difference(actual, expected, exactly)
        if difference is not None:
            raise FoundError(f"{subject} differs from {compared_with}: {difference}")

    def gradients_agree(
        self, subject: str, actual: Sequence[Any], expected: Sequence[Any], *, compared_with: str
    ) -> None:
        """Calls `agree` for the gradient by each differentiable operand."""
        for position, a, b in zip(self.differentiable, actual, expected, strict=True):
            self.agree(f"{subject} by operand {position}", a, b, compared_with=compared_with)

    def _call(self, *operands: Any) -> Any:
        # A name of its own: JAX keeps compiled functions by identity, and some callables cannot be hashed.
        return self.fn(*operands)


@contextlib.contextmanager
def during(what: str) -> Iterator[None]:
    """Turns whatever the user's code raises into what was found."""
    try:
        yield
    except (FoundError, SkipError):
        raise
    except Exception as error:
        raise FoundError(f"{what}, it raises {first_line(error)}") from error


def floating(results: Any) -> list[Any]:
    """Returns the floating-point arrays among results."""
    return [x for x in jax.tree.leaves(results) if jnp.issubdtype(x.dtype, jnp.floating)]


def replaced(items: Sequence[Any], position: int, item: Any) -> tuple[Any, ...]:
    """Returns the items with another one in one place."""
    return (*items[:position], item, *items[position + 1 :])


def two_of(x: np.ndarray) -> np.ndarray:
    """Stacks the operand and a different one of the same values."""
    return np.stack([x, np.roll(x, 1, axis=0) if x.ndim else x])


def stacked(results: Sequence[Any]) -> Any:
    """Stacks pytrees of arrays into one, along a new first axis."""
    return jax.tree.map(lambda *xs: np.stack([np.asarray(x) for x in xs]), *results)


def directions(operands: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Draws random arrays of the shapes and dtypes of operands, as large as these on average."""
    rng = np.random.default_rng(SEED)
    return [(rng.standard_normal(x.shape) * _average(x)).astype(x.dtype) for x in operands]


def cotangents(results: Sequence[Any]) -> list[np.ndarray]:
    """Draws random arrays of the shapes and dtypes of results, of size one on average."""
    rng = np.random.default_rng(SEED + 1)
    return [rng.standard_normal(x.shape).astype(x.dtype) for x in results]


def _average(x: np.ndarray) -> float:
    finite = np.abs(x[np.isfinite(x)].astype(np.float64))
    return float(np.sqrt(np.mean(finite**2))) if finite.any() else 1.0


def _largest(x: Any) -> float:
    values = np.abs(np.asarray(x).astype(np.float64))
    return float(np.max(values, initial=0.0, where=np.isfinite(values)))
