"""The documented calls of softmax."""

from typing import Any

import jax

from jaxops.mcdnn.blend import Blend
from jaxops.mcdnn.checks import Call
from jaxops.mcdnn.enums import SoftmaxAlgorithm, SoftmaxMode, member
from jaxops.softmax import gradient_over_groups, over_groups
from pallas_kernels.softmax_groups import Groups


def softmax_forward(
    algorithm: SoftmaxAlgorithm | str | int,
    mode: SoftmaxMode | str | int,
    x: jax.Array,
    *,
    alpha: float | jax.Array = 1.0,
    beta: float | jax.Array = 0.0,
    y: jax.Array | None = None,
    layout: str | None = None,
) -> jax.Array:
    """Exponentials that add up to 1 in each group: `alpha * result + beta * y`.

    Args:
      algorithm: ACCURATE, `exp(x - m) / sum(exp(x - m))` with the maximum m of the group; LOG, the logarithm of that;
        or FAST, which is ACCURATE here: the documents let it leave out the maximum, and then it overflows from 88.7 on.
      mode: INSTANCE, where a group is all of an image, or CHANNEL, where it is the channels of one of its points.
      x: a tensor of four to eight axes; float16, bfloat16, float32 or float64.
      alpha: factor of the result: a Python or NumPy number, or a traced scalar.
      beta: factor of the prior, likewise; with 0 the prior is not read, but a traced beta needs one.
      y: the prior, with the shape and dtype of x.
      layout: "NCHW", "NHWC", "NCDHW" or "NDHWC"; None is the one with the channels first.

    Returns:
      The shape and dtype of x.

    Raises:
      BadParamError: status MCDNN_STATUS_BAD_PARAM if x, alpha, beta or a prior that beta needs is missing, the prior is
        unlike x, an enumeration has no such member, x has another rank, or the layout is unknown or not that of the
        rank.
      NotSupportedError: status MCDNN_STATUS_NOT_SUPPORTED for another dtype or a vectorised layout.

    Numerics: computed and blended in float32 (float64 for float64) and rounded once; see `jaxops.softmax`.

    Source: mcDNN `mcdnnSoftmaxForward`. JAX's arrays are packed, so that equal shapes have equal strides, and a
      result never lies in an operand: the documented errors of strides and of calls in place cannot arise. To reuse a
      buffer, donate it to jit.
    """
    call = Call("softmax_forward")
    log, mode = _members(call, algorithm, mode)
    call.present(x=x)
    blend = Blend.requested(call.name, alpha=alpha, beta=beta, y=y)
    (x,) = call.arrays(x=x)
    groups = _groups(call, mode, x, layout, "x")
    blend.check(x.shape, x.dtype)
    call.supported_dtype("x", x)
    result = over_groups(blend.upcast(x), log=log, groups=groups)
    return blend.apply(result, x.dtype)


def softmax_backward(
    algorithm: SoftmaxAlgorithm | str | int,
    mode: SoftmaxMode | str | int,
    y: jax.Array,
    dy: jax.Array,
    *,
    alpha: float | jax.Array = 1.0,
    beta: float | jax.Array = 0.0,
    dx: jax.Array | None = None,
    layout: str | None = None,
) -> jax.Array:
    """The gradient of `softmax_forward`: `alpha * result + beta * dx`, of y as it is given.

        FAST, ACCURATE  result = y * (dy - sum(y * dy))
        LOG             result = dy - exp(y) * sum(dy)

    Args:
      algorithm: as it was given to `softmax_forward`.
      mode: as it was given to `softmax_forward`.
      y: the output of `softmax_forward`, as it was stored.
      dy: its gradient.
      alpha: factor of the result: a Python or NumPy number, or a traced scalar.
      beta: factor of the prior, likewise; with 0 the prior is not read, but a traced beta needs one.
      dx: the prior, with the shape and dtype of dy.
      layout: "NCHW", "NHWC", "NCDHW" or "NDHWC"; None is the one with the channels first.

    Returns:
      The shape and dtype of dy.

    Raises:
      BadParamError: status MCDNN_STATUS_BAD_PARAM if y, dy, alpha, beta or a prior that beta needs is missing, shapes
        or dtypes of y, dy and dx are not all equal, or for the reasons of `softmax_forward`.
      NotSupportedError: as of `softmax_forward`.

    Numerics: computed and blended in float32 (float64 for float64) and rounded once. Where y is 0 (-inf for LOG) as x
      was -inf, the result is 0 (dy for LOG).

    Source: mcDNN `mcdnnSoftmaxBackward`. As to strides and calls in place, see `softmax_forward`.
    """
    call = Call("softmax_backward")
    log, mode = _members(call, algorithm, mode)
    call.present(y=y, dy=dy)
    blend = Blend.requested(call.name, alpha=alpha, beta=beta, dx=dx)
    y, dy = call.arrays(y=y, dy=dy)
    groups = _groups(call, mode, dy, layout, "dy")
    same = (y.shape, y.dtype) == (dy.shape, dy.dtype)
    call.require(same, "y", f"have the shape and dtype of dy, {dy.dtype}{list(dy.shape)}", y)
    blend.check(dy.shape, dy.dtype)
    call.supported_dtype("dy", dy)
    result = gradient_over_groups(y, blend.upcast(dy), log=log, groups=groups)
    return blend.apply(result, dy.dtype)


def _members(call: Call, algorithm: Any, mode: Any) -> tuple[bool, SoftmaxMode]:
    """Whether the logarithm is asked for, and the mode."""
    algorithm = member(call.name, "algorithm", SoftmaxAlgorithm, algorithm)
    return algorithm == SoftmaxAlgorithm.LOG, member(call.name, "mode", SoftmaxMode, mode)


def _groups(call: Call, mode: SoftmaxMode, x: Any, layout: str | None, argument: str) -> Groups:
    channels = call.channel_axis(x, layout, argument)
    return Groups.along(x.shape, (channels,) if mode == SoftmaxMode.CHANNEL else range(1, x.ndim))
