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
    """Computes exponentials that add up to 1 in each group: `alpha * result + beta * y`.

    Arguments shared by all calls are described in `jaxops.mcdnn`.

    Args:
      algorithm: ACCURATE is `exp(x - m) / sum(exp(x - m))`, where m is the maximum of the group; LOG is its logarithm.
        FAST is ACCURATE here: the documents let it leave out the maximum, and it then overflows from 88.7 on.
      mode: under INSTANCE a group is a whole image, under CHANNEL the channels of one pixel.
      x: a tensor of four to eight axes.

    Returns:
      An array with the shape and dtype of x.

    Raises:
      BadParamError: also if x has another rank.

    Numerics: see `jaxops.softmax`.

    Example:
      >>> x = jnp.zeros((1, 4, 1, 1))
      >>> jaxops.mcdnn.softmax_forward("ACCURATE", "CHANNEL", x).ravel().tolist()
      [0.25, 0.25, 0.25, 0.25]

    Source: mcDNN `mcdnnSoftmaxForward`.
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
    """Computes the gradient of `softmax_forward`: `alpha * result + beta * dx`, computed from y as stored.

        FAST, ACCURATE  result = y * (dy - sum(y * dy))
        LOG             result = dy - exp(y) * sum(dy)

    Arguments shared by all calls are described in `jaxops.mcdnn`.

    Args:
      algorithm, mode: as in `softmax_forward`.

    Returns:
      An array with the shape and dtype of dy.

    Raises:
      BadParamError: also if y, dy and dx differ in shape or dtype, or do not have four to eight axes.

    Numerics: where x was -inf, y is 0 and so is the result (under LOG y is -inf, and the result dy).

    Example:
      >>> y, dy = (
      ...     jnp.array(values).reshape(1, 2, 1, 1) for values in ([0.25, 0.75], [4.0, 0.0])
      ... )
      >>> jaxops.mcdnn.softmax_backward("ACCURATE", "CHANNEL", y, dy).ravel().tolist()
      [0.75, -0.75]

    Source: mcDNN `mcdnnSoftmaxBackward`.
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
    """Tells whether the logarithm is asked for, and the mode."""
    algorithm = member(call.name, "algorithm", SoftmaxAlgorithm, algorithm)
    return algorithm == SoftmaxAlgorithm.LOG, member(call.name, "mode", SoftmaxMode, mode)


def _groups(call: Call, mode: SoftmaxMode, x: Any, layout: str | None, argument: str) -> Groups:
    channels = call.channel_axis(x, layout, argument)
    return Groups.along(x.shape, (channels,) if mode == SoftmaxMode.CHANNEL else range(1, x.ndim))
