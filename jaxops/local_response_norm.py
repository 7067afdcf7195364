"""Local response normalization: divides activations by a power of the squares of neighbouring channels."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxops._cases import IMAGES, LARGE_IMAGES, SMALL_IMAGES, arrays, with_gradient
from jaxops._checks import layouts
from jaxops._checks.arguments import INT32_MAX
from jaxops._checks.dtypes import accumulation_dtype, check_floating
from jaxops._checks.mcdnn import as_array, require, require_integer, require_real
from jaxops._primitive.derivative import Active, Arrays, Derivative
from jaxops._primitive.operator import Operator
from jaxops.pooling.windows import Span, pooled
from lowering.campaign.suite import Case
from pallas_kernels.gpu import local_response_norm as gpu
from pallas_kernels.tpu import local_response_norm as tpu

# The operators see (..., C, D, H, W); axes before the channels are batch axes. These are the axes of length 1 that turn
# each layout into that.
_ADDED_AXES = {"NCHW": (2,), "NHWC": (4, 5, 6), "NCDHW": (), "NDHWC": (5, 6, 7)}
_CHANNELS = -4


@layouts.layout_required
def local_response_norm(
    x: jax.Array,
    *,
    n: int = 5,
    alpha: float = 1e-4,
    beta: float = 0.75,
    k: float = 2.0,
    layout: str,
) -> jax.Array:
    """Divides each activation by a power of the mean square over neighbouring channels: `y = x * s**-beta`.

        s[c] = k + alpha / n * sum of x[j]**2 over the channels j from c - before to c + after

    with `before = (n - 1) // 2` and `after = n - 1 - before`: a window of even length reaches one channel further
    ahead. At the first and last channels the window is clipped, but the divisor stays n.

    Args:
      x: images of any floating dtype: (N, C, H, W), or as `layout` says.
      n: the number of channels in a window; may exceed the number of channels.
      alpha: the factor of the mean square.
      beta: the power.
      k: the constant added to the mean square.
      layout: "NCHW", "NHWC", "NCDHW" or "NDHWC". There is no default.

    Returns:
      An array with the shape and dtype of x.

    Raises:
      BadParamError: if x is not floating point, no layout is given or its rank does not match it, n is not a
        positive integer, or another attribute is not a number.

    Numerics:
      Computed in float32 (float64 for float64) and rounded once, forward and backward. A power that is not an integer
      is computed as exp(-beta log s), with a relative error of beta |log s| roundings.

      Derivatives of all modes and orders exist. The gradient keeps only x.

    Example:
      >>> x = jnp.array([1.0, 2.0, 3.0]).reshape(1, 3, 1, 1)  # three channels, one pixel
      >>> y = jaxops.local_response_norm(x, n=3, alpha=3.0, beta=1.0, k=0.0, layout="NCHW")
      >>> print(np.asarray(y.ravel()).round(3))  # 1 / (1 + 4), 2 / (1 + 4 + 9), 3 / (4 + 9)
      [0.2   0.143 0.231]

    Source: mcDNN `mcdnnLRNCrossChannelForward` and `mcdnnLRNCrossChannelBackward`, whose limits on n, beta and k are
      not enforced here. PyTorch's `torch.nn.functional.local_response_norm` has k = 1 by default, and its windows of
      even length reach one channel further back.
    """
    name = "local_response_norm"
    x = as_array(name, "x", x)
    layout = layouts.resolved(name, x, layout)
    check_floating(name, x=x)
    check_attributes(name, n, alpha, beta, k)
    (y,) = LOCAL_RESPONSE_NORM(
        channels_before_space(x, layout), n=int(n), alpha=float(alpha), beta=float(beta), k=float(k)
    )
    return channels_back(y, layout)


def channels_before_space(x: jax.Array, layout: str) -> jax.Array:
    """Returns images of any layout as the operators see them, without transposing."""
    return jnp.expand_dims(x, _ADDED_AXES[layout])


def channels_back(x: jax.Array, layout: str) -> jax.Array:
    """Inverts `channels_before_space`."""
    return jnp.squeeze(x, _ADDED_AXES[layout])


def check_attributes(operator: str, n: Any, alpha: Any, beta: Any, k: Any) -> None:
    """Refuses empty windows, and attributes that are not finite numbers."""
    require_integer(operator, "n", n, f"be an integer from 1 to {INT32_MAX}", least=1, most=INT32_MAX)
    for argument, value in (("alpha", alpha), ("beta", beta), ("k", k)):
        require_real(operator, argument, value)


def reach(n: int) -> tuple[int, int]:
    """Returns how far a window of n reaches before and after its centre."""
    before = (n - 1) // 2
    return before, n - 1 - before


def negative_power(s: jax.Array, beta: float) -> jax.Array:
    """Computes s**-beta. XLA's `pow` takes several times as long as `exp` and `log`, which vectorise."""
    return jax.lax.integer_pow(s, -int(beta)) if beta.is_integer() else jnp.exp(-beta * jnp.log(s))


def _check(x: Any, **_: Any) -> None:
    _check_images("local_response_norm", "x", x)


def _check_backward(x: Any, grad: Any, **_: Any) -> None:
    name = "local_response_norm_backward"
    _check_images(name, "x", x)
    check_floating(name, grad=grad)
    require(grad.shape == x.shape, name, "grad", f"have the shape of x, {x.shape}", grad)


def _check_images(operator: str, argument: str, x: Any) -> None:
    check_floating(operator, **{argument: x})
    require(len(x.shape) >= 4, operator, argument, "have shape (..., C, D, H, W)", x)


def _forward(x: jax.Array, *, n: int, alpha: float, beta: float, k: float) -> Arrays:
    wide = x.astype(accumulation_dtype(x.dtype))
    s = k + alpha / n * _neighbours(jnp.square(wide), *reach(n))
    return ((wide * negative_power(s, beta)).astype(x.dtype),)


def _backward(x: jax.Array, grad: jax.Array, *, n: int, alpha: float, beta: float, k: float) -> Arrays:
    """Computes the gradient dy s**-beta - 2 alpha beta / n x (sum of dy y / s over the windows with the channel)."""
    dtype = accumulation_dtype(x.dtype)
    wide, dy = x.astype(dtype), grad.astype(dtype)
    before, after = reach(n)
    s = k + alpha / n * _neighbours(jnp.square(wide), before, after)
    scaled = dy * negative_power(s, beta)
    # The centres of those windows lie in the mirror image of the channel's own window.
    dx = scaled - (2 * alpha * beta / n) * wide * _neighbours(scaled * wide / s, after, before)
    return (dx.astype(grad.dtype),)


def _neighbours(x: jax.Array, before: int, after: int) -> jax.Array:
    """Sums over the channels around each channel."""
    # XLA finds worse layouts for arrays with axes of length 1.
    ones = tuple(axis for axis in range(_CHANNELS + 1, 0) if x.shape[axis] == 1)
    channels = x.shape[_CHANNELS]
    farthest = max(before, after) if jax.export.is_symbolic_dim(channels) else max(channels - 1, 0)
    padding = min(before, farthest), min(after, farthest)
    packed = jnp.squeeze(x, ones)
    window = Span(_CHANNELS + len(ones), channels, sum(padding) + 1, 1, *padding)
    return jnp.expand_dims(pooled(packed, [window], 0.0, jax.lax.add), ones)


# The derivative keeps only x, not y.


def _linearize(operands: Sequence[jax.Array], active: Active, **params: Any) -> tuple[Arrays, Arrays]:
    return LOCAL_RESPONSE_NORM(*operands, **params), tuple(operands)


def _vjp(residuals: Arrays, cotangents: Arrays, active: Active, **params: Any) -> Arrays:
    return LOCAL_RESPONSE_NORM_BACKWARD(*residuals, *cotangents, **params)


_IMAGES = "... c d h w"
LOCAL_RESPONSE_NORM = Operator(
    "local_response_norm",
    f"{_IMAGES} -> {_IMAGES}",
    _check,
    _forward,
    Derivative(_vjp, linearize=_linearize, residuals=_IMAGES),
    kernels=(tpu.KERNEL, gpu.KERNEL),
)
LOCAL_RESPONSE_NORM_BACKWARD = Operator(
    "local_response_norm_backward",
    f"{_IMAGES}, {_IMAGES} -> {_IMAGES}",
    _check_backward,
    _backward,
    kernels=(tpu.BACKWARD_KERNEL, gpu.BACKWARD_KERNEL),
)

SUITE = (
    Case(
        "local response norm",
        functools.partial(with_gradient, functools.partial(local_response_norm, layout="NCHW")),
        arrays,
        IMAGES,
        LARGE_IMAGES,
        SMALL_IMAGES,
    ),
)
