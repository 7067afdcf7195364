"""The arithmetic of EMA-Adam, shared by the kernels of both Pallas dialects."""

from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp

# The order of the kernels' coefficient vector.
COEFFICIENTS = (
    "learning_rate",
    "ema_decay",
    "ema_gain",
    "beta1",
    "gain1",
    "beta2",
    "gain2",
    "correction1",
    "correction2",
    "eps",
    "weight_decay",
)


def ema_adam_update(
    operands: Iterable[jax.Array],
    coefficients: Iterable[jax.Array],
    *,
    mode: str,
    output: str,
    sqrt: Callable[[jax.Array], jax.Array] = jnp.sqrt,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Computes the first output, m', v' and s' in float32, unrounded until the caller stores them.

    Args:
      operands: grad, var, m, v and s, float32 and of one shape.
      coefficients: float32 scalars in the order of `COEFFICIENTS`.
      mode: decays weights beside the moments ("adamw") or through the gradient ("l2").
      output: the first output, var' ("params") or var' - var ("update").
      sqrt: the square root, for a dialect that needs its own.
    """
    grad, var, m, v, s = operands
    learning_rate, ema_decay, ema_gain, beta1, gain1, beta2, gain2, correction1, correction2, eps, weight_decay = (
        coefficients
    )
    if mode == "l2":
        grad = grad + weight_decay * var
    m = beta1 * m + gain1 * grad
    v = beta2 * v + gain2 * grad * grad
    direction = (m / correction1) / (sqrt(v / correction2) + eps)
    if mode == "adamw":
        direction = direction + weight_decay * var
    update = -learning_rate * direction
    params = var + update
    s = ema_decay * s + ema_gain * params
    return params if output == "params" else update, m, v, s
