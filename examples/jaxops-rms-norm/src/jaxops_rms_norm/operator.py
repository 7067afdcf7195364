"""RMS normalization: the public function, its checks, the reference, the derivative and the records."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxops import BadParamError, Derivative, Operator
from jaxops_rms_norm import tpu


def rms_norm(x: jax.Array, weight: jax.Array, *, epsilon: float = 1e-6) -> jax.Array:
    """Computes `y = x / sqrt(mean(x**2) + epsilon) * weight` over the last axis.

    Args:
      x: (..., C), floating point.
      weight: (C,), floating point.
      epsilon: keeps rows of zeros finite.

    Returns:
      An array with the shape and dtype of x.

    Raises:
      BadParamError: if a shape or dtype differs from the above.

    Numerics:
      Computed in float32 (float64 for float64 x) and rounded once.
    """
    (y,) = RMS_NORM(jnp.asarray(x), jnp.asarray(weight), epsilon=float(epsilon))
    return y


def _check(x: Any, weight: Any, *, epsilon: float) -> None:
    """Checks shapes and dtypes alone, in the same words outside jit, under it and ahead of time."""
    for name, operand in (("x", x), ("weight", weight)):
        if not jnp.issubdtype(operand.dtype, jnp.floating):
            raise BadParamError(f"rms_norm: {name} must be floating point; got {operand.dtype}")
    if not x.shape or weight.shape != x.shape[-1:]:
        rule = "have one element for each of the last axis of x"
        shapes = f"{list(weight.shape)} for {list(x.shape)}"
        raise BadParamError(f"rms_norm: weight must {rule}; got {shapes}")


def _normalized(x: jax.Array, epsilon: float) -> tuple[jax.Array, jax.Array]:
    """Returns rows in float32 at least, over their root mean squares; and one over these."""
    wide = x.astype(jnp.float64 if x.dtype == jnp.float64 else jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + epsilon)
    return wide * scale, scale


def _along_rows(weight: jax.Array, rows: jax.Array) -> jax.Array:
    """Returns the weight at every position of the rows, in their dtype."""
    return jnp.broadcast_to(weight.astype(rows.dtype), rows.shape)


def _forward(x: jax.Array, weight: jax.Array, *, epsilon: float) -> tuple[jax.Array, ...]:
    normalized, _ = _normalized(x, epsilon)
    return ((normalized * _along_rows(weight, normalized)).astype(x.dtype),)


def _backward(grad: jax.Array, x: jax.Array, weight: jax.Array, *, epsilon: float) -> tuple[jax.Array, ...]:
    """Computes, for n = x / rms and g = grad * weight, (g - n * mean(g * n)) / rms and sum(grad * n)."""
    normalized, scale = _normalized(x, epsilon)
    wide = grad.astype(normalized.dtype)
    scaled = wide * _along_rows(weight, wide)
    dx = scale * (scaled - normalized * jnp.mean(scaled * normalized, axis=-1, keepdims=True))
    dweight = jnp.sum(wide * normalized, axis=tuple(range(x.ndim - 1)))
    return dx.astype(x.dtype), dweight.astype(weight.dtype)


def _check_backward(grad: Any, x: Any, weight: Any, *, epsilon: float) -> None:
    _check(x, weight, epsilon=epsilon)
    if grad.shape != x.shape:
        raise BadParamError(f"rms_norm_backward: grad must have the shape of x; got {list(grad.shape)}")


def _vjp(
    residuals: Sequence[jax.Array], cotangents: Sequence[jax.Array], active: Sequence[bool], *, epsilon: float
) -> tuple[jax.Array, ...]:
    """Computes the gradients of the operands. The residuals are the operands, then the results."""
    x, weight, _ = residuals
    return RMS_NORM_BACKWARD(*cotangents, x, weight, epsilon=epsilon)


# `...` stands for the batch axes, `c` for the normalized one. The weight has no batch axes: all rows share it, and its
# gradient is summed over them. vmap, meshes and kernels on them follow from these two lines.
RMS_NORM = Operator(
    "rms_norm",
    "... c, c -> ... c",
    _check,
    _forward,
    Derivative(_vjp),
    kernels=(tpu.KERNEL,),
)
RMS_NORM_BACKWARD = Operator("rms_norm_backward", "... c, ... c, c -> ... c, c", _check_backward, _backward)
