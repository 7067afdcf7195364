"""Promises about derivatives: in both modes, of second order, and under other transformations."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxops.testing.promise import Promise
from jaxops.testing.slopes import slopes, widest
from jaxops.testing.trial import (
    FoundError,
    SkipError,
    Trial,
    cotangents,
    directions,
    during,
    floating,
    replaced,
    stacked,
    two_of,
)


def derivative(trial: Trial) -> None:
    """Checks that the gradient is the slope of the function, as differences in float64 measure it."""
    trial.require_derivatives()
    chosen = cotangents(floating(trial.results))

    def projected(*operands: Any) -> jax.Array:
        return inner(floating(trial.fn(*operands)), chosen)

    _is_slope(trial, projected, "the gradient")


def second_order(trial: Trial) -> None:
    """Checks that second derivatives in both modes agree, and are the slope of the gradient."""
    trial.require_derivatives()
    tangents = directions(trial.operands)

    def along(*operands: Any) -> jax.Array:
        """Computes the derivative of the loss along fixed directions."""
        gradients = jax.grad(trial.loss, trial.differentiable)(*operands)
        return inner(gradients, [tangents[position] for position in trial.differentiable])

    of_differentiable = functools.partial(_gradients, trial)
    _, primals = trial.at_differentiable(trial.operands)
    dots = [tangents[position] for position in trial.differentiable]
    with during("when its gradient is differentiated in reverse mode"):
        reverse = jax.jit(jax.grad(along, trial.differentiable))(*trial.operands)
    with during("when its gradient is differentiated in forward mode"):
        forward = jax.jit(lambda *xs: jax.jvp(of_differentiable, xs, tuple(dots))[1])(*primals)
    trial.gradients_agree(
        "forward-over-reverse differentiation", forward, reverse, compared_with="reverse-over-reverse"
    )
    _is_slope(trial, along, "the second derivative")


def jvp(trial: Trial) -> None:
    """Checks that forward mode works, and is the transpose of reverse mode."""
    trial.require_derivatives()
    of_differentiable, primals = trial.at_differentiable(trial.operands)
    of_differentiable = jax.jit(of_differentiable)
    tangents = directions(primals)
    with during("under jax.jvp"):
        results, result_tangents = jax.jvp(of_differentiable, tuple(primals), tuple(tangents))
    with during("under jax.linearize"):
        linear = jax.linearize(of_differentiable, *primals)[1](*tangents)
    trial.agree("jax.linearize", linear, result_tangents, compared_with="jax.jvp")
    chosen = cotangents(results)
    with during("under jax.vjp"):
        pulled_back = jax.vjp(of_differentiable, *primals)[1](list(chosen))
    pushed, pulled = _sum_of_products(result_tangents, chosen), _sum_of_products(pulled_back, tangents)
    error = abs(pushed[0] - pulled[0])
    allowed = _relative(trial, [*results, *primals]) * max(pushed[1], pulled[1])
    if not error <= allowed:
        raise FoundError(
            f"forward mode gives {pushed[0]:.6g} along random directions where reverse mode gives {pulled[0]:.6g}; "
            f"rounding explains {allowed:.2g}"
        )


def cotangent_scaling(trial: Trial) -> None:
    """Checks that reverse mode is linear in the cotangents: scaled ones give scaled gradients, and zeros give zeros."""
    trial.require_derivatives()
    of_differentiable, primals = trial.at_differentiable(trial.operands)

    @jax.jit
    def pullback(primals: Any, chosen: Any) -> Any:
        return jax.vjp(of_differentiable, *primals)[1](chosen)

    chosen = cotangents(floating(trial.results))
    with during("under jax.vjp"):
        # By a power of two, which rounds nothing.
        whole, part, none = (
            pullback(primals, [(x * scale).astype(x.dtype) for x in chosen]) for scale in (1, 1 / 16, 0)
        )
    for position, full, scaled, zero in zip(trial.differentiable, whole, part, none, strict=True):
        full, scaled, zero = map(np.asarray, (full, scaled, zero))
        scaled = scaled.astype(np.float64) * 16
        if trial.tolerance.difference(full, scaled) is not None:
            sizes = [float(np.linalg.norm(x)) for x in (scaled, full.astype(np.float64))]
            raise FoundError(
                f"the gradient by operand {position} does not follow the cotangent: for one 16 times smaller it is "
                f"{sizes[0] / max(sizes[1], 1e-300):.4g} times as large as it should be"
            )
        zeros = np.where(np.isfinite(full), 0, full).astype(full.dtype)
        trial.agree(f"the gradient by operand {position} for a cotangent of zeros", zero, zeros, compared_with="zeros")


def vmap_of_gradient(trial: Trial) -> None:
    """Checks that the gradient under vmap is a loop of gradients."""
    trial.require_derivatives()
    mapped = [two_of(x) for x in trial.operands]
    loop = [trial.gradient(*parts) for parts in zip(*mapped, strict=True)]
    with during("under jax.vmap of jax.grad"):
        actual = jax.jit(jax.vmap(trial.gradient))(*mapped)
    trial.gradients_agree("jax.vmap of the gradient", actual, stacked(loop), compared_with="a loop")


def gradient_of_vmap(trial: Trial) -> None:
    """Checks that the gradient of a sum over vmap, by what is mapped and by what is shared, is a loop of gradients."""
    trial.require_derivatives()
    for position in range(len(trial.operands)):
        in_axes = replaced((None,) * len(trial.operands), position, 0)
        mapped = replaced(trial.operands, position, two_of(trial.operands[position]))

        def total(*xs: Any, axes: Any = in_axes) -> jax.Array:
            return jnp.sum(jax.vmap(trial.loss, axes)(*xs))

        with during(f"under jax.grad of jax.vmap over operand {position}"):
            actual = jax.jit(jax.grad(total, trial.differentiable))(*mapped)
        parts = [trial.gradient(*replaced(trial.operands, position, part)) for part in mapped[position]]
        both = stacked(parts)
        expected = [
            x if by == position else x.astype(np.float64).sum(0)
            for by, x in zip(trial.differentiable, both, strict=True)
        ]
        subject = f"the gradient of jax.vmap over operand {position}"
        trial.gradients_agree(subject, actual, expected, compared_with="a loop of gradients")


def scan(trial: Trial) -> None:
    """Checks that a loss and its gradient inside scan are those of a loop; without derivatives, that the result is."""
    mapped = [two_of(x) for x in trial.operands]
    has_loss = trial.should_have_gradient
    subject, fn, jitted = (
        ("a loss", trial.loss, trial.jitted_loss) if has_loss else ("a result", trial.fn, trial.jitted)
    )

    def inside(*xs: Any) -> Any:
        return jax.lax.scan(lambda carry, x: (carry, fn(*x)), None, xs)[1]

    expected = stacked([jitted(*parts) for parts in zip(*mapped, strict=True)])
    with during("inside jax.lax.scan"):
        actual = jax.jit(inside)(*mapped)
    trial.agree(f"{subject} inside scan", actual, expected, compared_with="a loop's")
    if not has_loss:
        return
    loop = [trial.gradient(*parts) for parts in zip(*mapped, strict=True)]
    with during("when jax.lax.scan around it is differentiated"):
        gradients = jax.jit(jax.grad(lambda *xs: jnp.sum(inside(*xs)), trial.differentiable))(*mapped)
    trial.gradients_agree("the gradient through scan", gradients, stacked(loop), compared_with="a loop's")


def checkpoint(trial: Trial) -> None:
    """Checks that gradients under checkpoint, which computes results again, are the same."""
    trial.require_derivatives()
    with during("under jax.checkpoint"):
        actual = jax.jit(jax.grad(jax.checkpoint(trial.loss), trial.differentiable))(*trial.operands)
    trial.gradients_agree(
        "the gradient under jax.checkpoint", actual, trial.gradient(*trial.operands), compared_with="the one without"
    )


def inner(left: Any, right: Any) -> jax.Array:
    """Computes the inner product of two lists of arrays, in float32 at least."""
    terms = [jnp.sum(a.astype(widest(a)) * jnp.asarray(b).astype(widest(a))) for a, b in zip(left, right, strict=True)]
    return functools.reduce(jnp.add, terms)


def _gradients(trial: Trial, *primals: Any) -> tuple[jax.Array, ...]:
    full = list(trial.operands)
    for position, primal in zip(trial.differentiable, primals, strict=True):
        full[position] = primal
    return jax.grad(trial.loss, trial.differentiable)(*full)


def _is_slope(trial: Trial, scalar: Callable[..., jax.Array], subject: str) -> None:
    """Compares the derivative of a scalar along a random direction, operand by operand, with differences."""
    tangents = directions(trial.operands)
    with during(f"when {subject} is compared with differences"):
        found = slopes(scalar, trial.operands, {position: tangents[position] for position in trial.differentiable})
    for position, slope in zip(trial.differentiable, found, strict=True):
        if slope is None:
            raise SkipError(f"the function is not finite around operand {position}")
        claimed, measured, uncertainty = slope
        allowed = trial.tolerance.by_dtype["float32"] * max(abs(measured), abs(claimed)) + uncertainty
        if not abs(claimed - measured) <= allowed:
            raise FoundError(
                f"{subject} by operand {position} gives {claimed:.6g} along a random direction, where differences of "
                f"the function give {measured:.6g} ± {uncertainty:.1g}"
            )


def _sum_of_products(left: Sequence[Any], right: Sequence[Any]) -> tuple[float, float]:
    """Computes an inner product in float64, and the sum of its terms' magnitudes."""
    products = [np.asarray(a, np.float64) * np.asarray(b, np.float64) for a, b in zip(left, right, strict=True)]
    return sum(float(np.sum(x)) for x in products), sum(float(np.sum(np.abs(x))) for x in products)


def _relative(trial: Trial, arrays: Sequence[Any]) -> float:
    return max(trial.tolerance.by_dtype.get(jnp.dtype(x.dtype).name, 2e-2) for x in arrays)


PROMISES = tuple(
    Promise(check.__name__, check)
    for check in (
        jvp,
        derivative,
        second_order,
        cotangent_scaling,
        vmap_of_gradient,
        gradient_of_vmap,
        scan,
        checkpoint,
    )
)
