"""Divisive normalization as users call it."""

import jax

from jaxops._checks import layouts
from jaxops._checks.dtypes import check_floating
from jaxops._checks.mcdnn import as_array, as_optional, require
from jaxops.divisive_norm.operator import DIVISIVE_NORM, no_means, window_of
from jaxops.local_response_norm import check_attributes
from jaxops.pooling import windows


def divisive_norm(
    x: jax.Array,
    means: jax.Array | None = None,
    *,
    n: int = 5,
    alpha: float = 1e-4,
    beta: float = 0.75,
    k: float = 2.0,
    layout: str | None = None,
) -> jax.Array:
    """Divides by a power of the mean squared deviation around each pixel: `y = x * s**-beta`.

        s[i] = k + alpha / n**d * sum of (x[j] - means[i])**2 over the pixels j in the window around i

    in every channel alone, with d spatial axes, along each of which the window reaches from `i - (n - 1) // 2` over n
    pixels: an even window looks one pixel further ahead. It is clipped at the border; the divisor stays n**d.
    What is divided is x itself.

    Args:
      x: images of any floating dtype: (N, C, H, W), or as `layout` says.
      means: of the shape and dtype of x: what deviates is measured from the mean at the centre of each window. They
        may come from any function of x: its gradient flows through them. None stands for zeros.
      n: extent of a window along each spatial axis; may be more than there is.
      alpha: factor of the mean square.
      beta: the power.
      k: what is added to the mean square.
      layout: "NCHW", "NHWC", "NCDHW" or "NDHWC"; None means the one with the channels first, by the rank of x.

    Returns:
      The shape and dtype of x.

    Raises:
      BadParamError: if x is not floating point or has another rank than the layout, means differ from x in shape or
        dtype, n is not a positive integer, or another attribute is not a number.

    Numerics: computed in float32 (float64 for float64) and rounded once, forward and backward; the power as in
      `local_response_norm`. Without means, squares are summed along one axis after the other. With means, each window's
      squares are taken about its own mean, in a number of steps that grows with the logarithm of n: only what is never
      negative is added, so that pixels and means of 1e4 keep the digits of deviations of 1, and pixels far from all
      others cost few. Only gradients of x near a mean far from all others lose some. A window with an infinite pixel
      has an infinite s, and one with a NaN is NaN; where there are means, pixels beyond an eighth of the largest number
      count as that in s. All modes and orders of derivatives exist; the gradient keeps x and means. On every platform
      it runs as XLA operations: one-dimensional window reductions, or slices of windows that double.

    Source: mcDNN `mcdnnDivisiveNormalizationForward` and `mcdnnDivisiveNormalizationBackward`, whose limits on n, beta
      and k are not enforced here. Without means it is what Caffe calls a response norm within the channel.
    """
    name = "divisive_norm"
    x = as_array(name, "x", x)
    means = as_optional(name, "means", means)
    layout = layouts.resolved(name, x, layout)
    check_floating(name, x=x)
    if means is not None:
        alike = (means.shape, means.dtype) == (x.shape, x.dtype)
        require(alike, name, "means", f"have x's shape and dtype, {x.dtype}{list(x.shape)}", means)
    check_attributes(name, n, alpha, beta, k)
    volume = windows.to_volume(x, layout)
    (y,) = DIVISIVE_NORM(
        volume,
        no_means(volume) if means is None else windows.to_volume(means, layout),
        window=window_of(int(n), layout),
        alpha=float(alpha),
        beta=float(beta),
        k=float(k),
    )
    return windows.from_volume(y, layout)
