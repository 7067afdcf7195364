"""`aclnnApplyFusedEmaAdam` under its own name."""

import math

import jax
import jax.numpy as jnp

from jaxops._checks.arguments import as_arrays, require, require_bool, require_integer, require_real
from jaxops._checks.dtypes import accumulation_dtype
from jaxops.ema_adam.operator import APPLY_FUSED_EMA_ADAM, Number, require_wide_decay, step_coefficients

_NAME = "apply_fused_ema_adam"
_DTYPES = ("float32", "float16", "bfloat16")
_MODES = {0: "l2", 1: "adamw"}
_MAX_RANK = 8


def apply_fused_ema_adam(
    grad: jax.typing.ArrayLike,
    var: jax.typing.ArrayLike,
    m: jax.typing.ArrayLike,
    v: jax.typing.ArrayLike,
    s: jax.typing.ArrayLike,
    step: jax.typing.ArrayLike,
    *,
    lr: Number,
    ema_decay: Number,
    beta1: Number,
    beta2: Number,
    eps: Number,
    mode: int = 1,
    bias_correction: bool = True,
    weight_decay: Number = 0.0,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Takes one step of Adam or AdamW, and of the exponential moving average of the parameters.

        c1, c2 = (1 - beta1^step, 1 - beta2^step) if bias_correction else (1, 1)
        g  = grad + weight_decay * var   (mode 0)  |  grad   (mode 1)
        m' = beta1 * m + (1 - beta1) * g
        v' = beta2 * v + (1 - beta2) * g^2
        u  = (m' / c1) / (sqrt(v' / c2) + eps)   [+ weight_decay * var, in mode 1]
        var' = var - lr * u
        s'   = ema_decay * s + (1 - ema_decay) * var'

    Args:
      grad: gradients; float32, float16 or bfloat16, of rank 1 to 8. May be empty.
      var: parameters; like `grad`.
      m: first moment; like `grad`.
      v: second moment; like `grad`.
      s: average of the parameters; like `grad`.
      step: the number of this step, from 1. Any integer dtype and shape; element 0 is read.
      lr: learning rate. This and the other floating-point attributes may be 0-d arrays, whose values are not checked.
        Decays must be at least float32 then: in 16 bits a decay near 1 is 1.
      ema_decay: decay of the average.
      beta1: decay of the first moment.
      beta2: decay of the second moment.
      eps: added to the square root.
      mode: 0 decays weights through the gradient (L2), 1 directly (AdamW).
      bias_correction: whether to divide by c1 and c2.
      weight_decay: strength of the decay.

    Returns:
      (var', m', v', s'), with the dtype of the operands.

    Raises:
      BadParamError: with status 161001 if a tensor is None, 161002 if a dtype, shape or the mode is wrong.

    Numerics:
      Computed in float32 without intermediate rounding; each result is rounded once. So an overflow of v' in float16
      does not disturb var', and s' follows the unrounded var'. Step 0 with bias correction divides by 0 and gives
      infinity or NaN. A negative v' gives NaN in var' and s'. For attributes given as numbers, 1 - beta is computed in
      float64, where the device computes it in float32.

    Example:
      >>> w, zeros = jnp.array([1.0]), jnp.zeros(1)
      >>> var, m, v, s = jaxops.aclnn.apply_fused_ema_adam(
      ...     jnp.array([2.0]), w, zeros, zeros, w, jnp.array([1]),
      ...     lr=0.5, ema_decay=0.5, beta1=0.5, beta2=0.5, eps=0.0,
      ... )
      >>> # m' = 0.5 * 2, v' = 0.5 * 2**2, u = 1
      >>> var.tolist(), m.tolist(), v.tolist(), s.tolist()
      ([0.5], [1.0], [2.0], [0.75])

    Source: CANN `aclnnApplyFusedEmaAdam`.
    """
    operands = {"grad": grad, "var": var, "m": m, "v": v, "s": s, "step": step}
    grad, var, m, v, s, step = as_arrays(_NAME, operands)
    _check({"grad": grad, "var": var, "m": m, "v": v, "s": s}, step, mode)
    numbers = {
        "lr": lr,
        "ema_decay": ema_decay,
        "beta1": beta1,
        "beta2": beta2,
        "eps": eps,
        "weight_decay": weight_decay,
    }
    rule = "be a finite number or a 0-d array of one"
    numbers = {name: require_real(_NAME, name, number, rule, traced=True) for name, number in numbers.items()}
    for name, decay in (("ema_decay", ema_decay), ("beta1", beta1), ("beta2", beta2)):
        require_wide_decay(_NAME, name, decay)
    bias_correction = require_bool(_NAME, "bias_correction", bias_correction, or_int=True)
    coefficients = step_coefficients(
        step.reshape(-1)[0],
        accumulation_dtype(var.dtype),
        learning_rate=numbers.pop("lr"),
        **numbers,
        bias_correction=bias_correction,
    )
    return APPLY_FUSED_EMA_ADAM(grad, var, m, v, s, coefficients, mode=_MODES[mode], output="params")


def _check(tensors: dict[str, jax.Array], step: jax.Array, mode: int) -> None:
    grad = tensors["grad"]
    require(grad.dtype.name in _DTYPES, _NAME, "grad", f"have one of the dtypes {', '.join(_DTYPES)}", grad)
    for name, tensor in tensors.items():
        require(tensor.dtype == grad.dtype, _NAME, name, f"have grad's dtype {grad.dtype}", tensor)
    require(jnp.issubdtype(step.dtype, jnp.integer), _NAME, "step", "have an integer dtype", step)
    require_integer(_NAME, "mode", mode, "be 0 or 1", least=0, most=1)
    require(1 <= grad.ndim <= _MAX_RANK, _NAME, "grad", f"have rank 1 to {_MAX_RANK}", grad)
    for name, tensor in tensors.items():
        require(tensor.shape == grad.shape, _NAME, name, f"have grad's shape {list(grad.shape)}", tensor)
    require(math.prod(step.shape) > 0, _NAME, "step", "have at least one element", step)
