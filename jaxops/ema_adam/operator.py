"""The operator that takes one step of EMA-Adam on one array, and the coefficients of such a step."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxops._checks.arguments import require
from jaxops._checks.dtypes import accumulation_dtype
from jaxops._primitive.operator import Operator
from pallas_kernels.gpu import ema_adam as gpu
from pallas_kernels.tpu import ema_adam as tpu

Number = jax.typing.ArrayLike

_NAME = "apply_fused_ema_adam"
MODES = ("adamw", "l2")
_OUTPUTS = ("params", "update")


class Coefficients(NamedTuple):
    """The coefficients of one step, in the order of the operator's vector. A gain is 1 - decay."""

    learning_rate: Any
    ema_decay: Any
    ema_gain: Any
    beta1: Any
    gain1: Any
    beta2: Any
    gain2: Any
    correction1: Any
    correction2: Any
    eps: Any
    weight_decay: Any


def require_wide_decay(operator: str, argument: str, decay: Number, advice: str = "") -> None:
    """Refuses a decay that is an array of 16 bits."""
    if hasattr(decay, "dtype"):
        rule = f"be at least float32: in 16 bits a decay near 1 is 1{advice}"
        require(jnp.dtype(decay.dtype).itemsize >= 4, operator, argument, rule, decay)


def step_coefficients(
    step: jax.typing.ArrayLike,
    dtype: Any,
    *,
    learning_rate: Number,
    ema_decay: Number,
    beta1: Number,
    beta2: Number,
    eps: Number,
    weight_decay: Number,
    bias_correction: bool,
) -> jax.Array:
    """Computes the operator's vector of coefficients.

    A decay near 1 loses most of its digits in 1 - decay. For Python and NumPy numbers this is computed in float64,
    before anything is rounded to `dtype`; for JAX arrays, in their own dtype.

    Args:
      step: a scalar of any integer dtype, 1 for the first step. 0 makes the corrections 0.
      dtype: the dtype of the result: float64 for float64 parameters, else float32.
      learning_rate: a number or a 0-d array, like all that follow up to `weight_decay`.
      ema_decay: decay of the average.
      beta1: decay of the first moment.
      beta2: decay of the second moment.
      eps: added to the square root.
      weight_decay: strength of the decay.
      bias_correction: False makes both corrections 1.
    """
    learning_rate, eps, weight_decay = (_number(x) for x in (learning_rate, eps, weight_decay))
    ema_decay, beta1, beta2 = (_number(x) for x in (ema_decay, beta1, beta2))
    step = jnp.asarray(step).astype(dtype)
    correction1, correction2 = (_correction(beta, step) if bias_correction else 1.0 for beta in (beta1, beta2))
    decays = (ema_decay, 1 - ema_decay, beta1, 1 - beta1, beta2, 1 - beta2)
    numbers = Coefficients(learning_rate, *decays, correction1, correction2, eps, weight_decay)
    return jnp.stack([jnp.asarray(x).astype(dtype) for x in numbers])


def _number(x: Number) -> Any:
    """Returns a Python float for a Python or NumPy number, else a floating JAX scalar."""
    if isinstance(x, int | float | np.generic | np.ndarray):
        return float(x)
    x = jnp.asarray(x)
    return x if jnp.issubdtype(x.dtype, jnp.floating) else x.astype(jnp.float32)


def _correction(beta: Any, step: jax.Array) -> jax.Array:
    """Computes 1 - beta^step, with the digits that the plain difference would lose."""
    log_beta: Any
    if isinstance(beta, float):
        log_beta = math.log(beta) if beta > 0 else -math.inf if beta == 0 else math.nan
    else:
        log_beta = jnp.log1p(-(1 - beta)).astype(step.dtype)
    return -jnp.expm1(jnp.where(step == 0, 0, step * log_beta))


def check(
    grad: Any, var: Any, m: Any, v: Any, s: Any, coefficients: Any, *, mode: str = "adamw", output: str = "params"
) -> None:
    """Raises BadParamError if the operator cannot take these operands."""
    arrays = {"grad": grad, "var": var, "m": m, "v": v, "s": s}
    for name, array in arrays.items():
        require(jnp.issubdtype(array.dtype, jnp.floating), _NAME, name, "have a floating dtype", array)
    require(mode in MODES, _NAME, "mode", f"be one of {', '.join(MODES)}", mode)
    require(output in _OUTPUTS, _NAME, "output", f"be one of {', '.join(_OUTPUTS)}", output)
    for name, array in arrays.items():
        require(array.shape == grad.shape, _NAME, name, f"have grad's shape {list(grad.shape)}", array)
    expected = accumulation_dtype(var.dtype)
    is_vector = coefficients.shape == (len(Coefficients._fields),) and coefficients.dtype == expected
    require(is_vector, _NAME, "coefficients", f"be {expected}[{len(Coefficients._fields)}]", coefficients)


def _reference(
    grad: jax.Array,
    var: jax.Array,
    m: jax.Array,
    v: jax.Array,
    s: jax.Array,
    coefficients: jax.Array,
    *,
    mode: str,
    output: str,
) -> tuple[jax.Array, ...]:
    dtypes = [x.dtype for x in (var, m, v, s)]
    grad, var, m, v, s = (x.astype(coefficients.dtype) for x in (grad, var, m, v, s))
    c = Coefficients(*jnp.unstack(coefficients))
    if mode == "l2":
        grad = grad + c.weight_decay * var
    m = c.beta1 * m + c.gain1 * grad
    v = c.beta2 * v + c.gain2 * (grad * grad)
    direction = (m / c.correction1) / (_sqrt(v / c.correction2) + c.eps)
    if mode == "adamw":
        direction = direction + c.weight_decay * var
    update = -c.learning_rate * direction
    var = var + update
    s = c.ema_decay * s + c.ema_gain * var
    results = (var if output == "params" else update, m, v, s)
    return tuple(x.astype(dtype) for x, dtype in zip(results, dtypes, strict=True))


def _sqrt(x: jax.Array) -> jax.Array:
    """Computes the square root, with derivative 0 at 0: a parameter without gradients so far does not produce NaN."""
    is_zero = x == 0
    return jnp.where(is_zero, 0, jnp.sqrt(jnp.where(is_zero, 1, x)))


APPLY_FUSED_EMA_ADAM = Operator(
    name=_NAME,
    signature="..., ..., ..., ..., ..., k -> ..., ..., ..., ...",
    check=check,
    reference=_reference,
    kernels=(tpu.KERNEL, gpu.KERNEL),
)
