"""Pooling in the words of Flax: channels last, `window_shape`, and strides of 1 unless given."""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxops import pooling
from jaxops._checks.arguments import as_array, require

_LAYOUTS = {1: "NLC", 2: "NHWC", 3: "NDHWC"}  # by the number of spatial axes

Padding = str | Sequence[tuple[int, int]]


def max_pool(
    inputs: jax.Array,
    window_shape: Sequence[int],
    strides: Sequence[int] | None = None,
    padding: Padding = "VALID",
) -> jax.Array:
    """Computes the maximum of each window by `jaxops.max_pool`, with the arguments of `flax.linen.max_pool`.

    Args:
      inputs: (..., spatial axes, channels), floating point, with any number of batch axes, also none.
      window_shape: the extents of the windows, one for each of one, two or three spatial axes.
      strides: the steps between windows, one for each spatial axis. None means 1 for each.
      padding: "VALID", "SAME", or a pair (before, behind) for each spatial axis, less than the window.

    Returns:
      An array with the dtype of inputs and the spatial extents that windows have.

    Numerics:
      As in `jaxops.max_pool`. Where maxima are equal, the gradient goes to the first in row-major order, as in Flax.

    Example:
      >>> from jaxops import linen
      >>> x = jnp.array([1.0, 5.0, 2.0, 3.0]).reshape(1, 4, 1)  # (batch, length, channels)
      >>> linen.max_pool(x, (2,)).ravel().tolist()
      [5.0, 5.0, 3.0]
    """
    return _pooled(pooling.max_pool, "max_pool", inputs, window_shape, strides, padding)


def avg_pool(
    inputs: jax.Array,
    window_shape: Sequence[int],
    strides: Sequence[int] | None = None,
    padding: Padding = "VALID",
    count_include_pad: bool = True,
) -> jax.Array:
    """Computes the mean of each window by `jaxops.avg_pool`, with the arguments of `flax.linen.avg_pool`.

    Args:
      inputs: as in `max_pool`.
      window_shape: as in `max_pool`.
      strides: as in `max_pool`. None means 1 for each spatial axis.
      padding: as in `max_pool`.
      count_include_pad: whether each sum is divided by the size of the window, or by that of its part inside inputs.

    Returns:
      An array with the dtype of inputs, which Flax does not keep for 16 bits without `count_include_pad`.

    Numerics:
      As in `jaxops.avg_pool`: sums in float32, also of 16-bit inputs, where Flax sums in 16 bits.

    Example:
      >>> from jaxops import linen
      >>> x = jnp.arange(8.0).reshape(1, 2, 4, 1)
      >>> linen.avg_pool(x, (2, 2), strides=(2, 2)).ravel().tolist()
      [2.5, 4.5]
    """
    return _pooled(
        pooling.avg_pool, "avg_pool", inputs, window_shape, strides, padding, count_include_pad=count_include_pad
    )


def _pooled(
    pool: Callable[..., jax.Array],
    name: str,
    inputs: Any,
    window_shape: Sequence[int],
    strides: Sequence[int] | None,
    padding: Padding,
    **options: Any,
) -> jax.Array:
    inputs = as_array(name, "inputs", inputs)
    window, axes = tuple(window_shape), len(window_shape)
    require(axes in _LAYOUTS, name, "window_shape", "have 1, 2 or 3 extents", window_shape)
    require(inputs.ndim > axes, name, "inputs", f"have {axes} spatial axes and channels", inputs)
    stride = (1,) * axes if strides is None else tuple(strides)
    return pool(inputs, window, stride=stride, padding=padding, layout=_LAYOUTS[axes], **options)
