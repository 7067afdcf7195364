"""The public function `divisive_norm`."""

import jax

from jaxops._checks import layouts
from jaxops._checks.dtypes import check_floating
from jaxops._checks.mcdnn import as_array, as_optional, require
from jaxops.divisive_norm.operator import DIVISIVE_NORM, Images, window_of
from jaxops.local_response_norm import check_attributes
from jaxops.pooling import windows


@layouts.layout_required
def divisive_norm(
    x: jax.Array,
    means: jax.Array | None = None,
    *,
    n: int = 5,
    alpha: float = 1e-4,
    beta: float = 0.75,
    k: float = 2.0,
    layout: str,
) -> jax.Array:
    """Divides each pixel by a power of the mean squared deviation around it: `y = x * s**-beta`.

        s[i] = k + alpha / n**d * sum of (x[j] - means[i])**2
               over the pixels j in the window around i

    Every channel is treated on its own. There are d spatial axes. Along each, the window starts at `i - (n - 1) // 2`
    and covers n pixels, so a window of even length reaches one pixel further ahead. At the border the window is
    clipped, but the divisor stays n**d. x itself is divided, not its deviation.

    Args:
      x: images of any floating dtype: (N, C, H, W), or as `layout` says.
      means: the shape and dtype of x. Deviations in a window are measured from the mean at its centre. They may be any
        function of x; its gradient flows through them. None means zeros.
      n: the extent of a window along each spatial axis; may exceed the extent of x.
      alpha: the factor of the mean square.
      beta: the power.
      k: the constant added to the mean square.
      layout: "NCHW", "NHWC", "NCDHW" or "NDHWC". There is no default.

    Returns:
      An array with the shape and dtype of x.

    Raises:
      BadParamError: if x is not floating point, no layout is given or its rank does not match it, means differ
        from x in shape or dtype, n is not a positive integer, or another attribute is not a number.

    Numerics:
      Computed in float32 (float64 for float64) and rounded once, forward and backward. Powers are computed as in
      `local_response_norm`.

      Without means, squares are summed along one axis after the other. With means, the squares of a window are taken
      about its own mean, in a number of steps that grows with the logarithm of n. Only terms that are never negative
      are added. So pixels and means near 1e4 keep the digits of deviations near 1, and outliers cost few digits. Only
      gradients of x near a mean far from all others lose some.

      A window with an infinite pixel has an infinite s, and one with NaN gives NaN. If means are given, pixels beyond
      an eighth of the largest number count as that much in s.

      Derivatives of all modes and orders exist; the gradient keeps x and means. XLA runs this as one-dimensional window
      reductions or, with means, as slices of windows that double. On TPUs, kernels take images of float32 and bfloat16
      row by row, and read each once.

    Example:
      >>> x = jnp.array([1.0, 3.0, 5.0]).reshape(1, 1, 1, 3)
      >>> means = jnp.full_like(x, 2.0)
      >>> y = jaxops.divisive_norm(x, means, n=1, alpha=1.0, beta=1.0, k=1.0, layout="NCHW")
      >>> print(np.asarray(y.ravel()).round(3))  # s = 1 + 1, 1 + 1, 1 + 9
      [0.5 1.5 0.5]

    Source: mcDNN `mcdnnDivisiveNormalizationForward` and `mcdnnDivisiveNormalizationBackward`, whose limits on n, beta
      and k are not enforced here. Without means, Caffe calls it a response norm within the channel.
    """
    name = "divisive_norm"
    x = as_array(name, "x", x)
    means = as_optional(name, "means", means)
    layout = layouts.resolved(name, x, layout)
    check_floating(name, x=x)
    if means is not None:
        is_same_type = (means.shape, means.dtype) == (x.shape, x.dtype)
        require(is_same_type, name, "means", f"have x's shape and dtype, {x.dtype}{list(x.shape)}", means)
    check_attributes(name, n, alpha, beta, k)
    (y,) = DIVISIVE_NORM(
        Images(windows.to_volume(x, layout), None if means is None else windows.to_volume(means, layout)),
        window=window_of(int(n), layout),
        alpha=float(alpha),
        beta=float(beta),
        k=float(k),
    )
    return windows.from_volume(y, layout)
