"""The documented calls of dropout."""

import math
from typing import Any

import jax
import numpy as np

from jaxops.dropout.api import dropout_gradient, dropped_out
from jaxops.mcdnn import reserve_space as bits
from jaxops.mcdnn.checks import Call
from jaxops.mcdnn.descriptors import DropoutDescriptor


def dropout_forward(desc: DropoutDescriptor, key: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Zeroes elements at random and scales the others: `y = x / (1 - p)` where an element is kept, else 0.

    Args:
      desc: the probability p of dropping an element, taken as float32.
      key: a key of `jax.random`, typed or raw. It takes the place of the documented states: where a C program calls
        again, a JAX program passes another key.
      x: any shape; float16, bfloat16, float32 or float64.

    Returns:
      y, with the shape and dtype of x, and the reserve space: uint8, `dropout_get_reserve_space_size(x)` long. Bit
      `i % 8` of byte `i // 8` is 1 if element i, in row-major order, is kept.

    Raises:
      BadParamError: status MCDNN_STATUS_BAD_PARAM if desc, key or x is missing, or key is not a single key.
      NotSupportedError: status MCDNN_STATUS_NOT_SUPPORTED for another dtype.

    Numerics: `jaxops.dropout` keeps the same elements. p = 0 and p = 1 are exact, and dropped elements are not read.
      float64 is scaled by `1 / (1 - p)` in float64, all else in float32.

    Example:
      >>> desc = jaxops.mcdnn.DropoutDescriptor(0.5)
      >>> y, reserve_space = jaxops.mcdnn.dropout_forward(
      ...     desc, jax.random.key(0), jnp.ones((4, 16))
      ... )
      >>> jnp.unique(y).tolist(), reserve_space.shape
      ([0.0, 2.0], (8,))

    Source: mcDNN `mcdnnDropoutForward`. y and the reserve space are made here, so the documented errors of descriptors
      or strides that differ and of too little space cannot arise.
    """
    call = Call("dropout_forward")
    call.descriptor(DropoutDescriptor, desc)
    call.present(key=key, x=x)
    (x,) = call.arrays(x=x)
    call.supported_dtype("x", x)
    y, words = dropped_out(call.name, key, x, _rate(desc))
    return y, bits.from_words(words)


def dropout_backward(desc: DropoutDescriptor, dy: jax.Array, reserve_space: jax.Array) -> jax.Array:
    """Computes the gradient of `dropout_forward`: `dx = dy / (1 - p)` where an element was kept, else 0.

    Args:
      desc: that of the forward call.
      dy: the gradient of y. It may have another shape with as many elements.
      reserve_space: what `dropout_forward` returned. Bytes beyond the documented size are not read.

    Returns:
      An array with the shape and dtype of dy.

    Raises:
      BadParamError: status MCDNN_STATUS_BAD_PARAM if desc, dy or reserve_space is missing, or reserve_space is not one
        axis of uint8 or is shorter than `dropout_get_reserve_space_size(dy)`.
      NotSupportedError: status MCDNN_STATUS_NOT_SUPPORTED for a dtype that `dropout_forward` does not take.

    Numerics: as `dropout_forward`. Where an element was dropped dy is not read, so NaN there gives 0.

    Example:
      >>> desc, bits = (
      ...     jaxops.mcdnn.DropoutDescriptor(0.5),
      ...     jnp.array([0b101, 0, 0, 0], jnp.uint8),
      ... )
      >>> jaxops.mcdnn.dropout_backward(desc, jnp.array([1.0, 2.0, 3.0]), bits).tolist()
      [2.0, 0.0, 6.0]

    Source: mcDNN `mcdnnDropoutBackward`, whose text says that dy is propagated and leaves out the scale. There are no
      states here, and one shape and dtype: errors of missing states, and of element counts, dtypes or strides that
      differ, cannot arise.
    """
    call = Call("dropout_backward")
    call.descriptor(DropoutDescriptor, desc)
    call.present(dy=dy, reserve_space=reserve_space)
    dy, reserve_space = call.arrays(dy=dy, reserve_space=reserve_space)
    size = bits.size_bytes(dy.size)
    is_space = reserve_space.dtype == np.uint8 and reserve_space.ndim == 1 and reserve_space.size >= size
    call.require(is_space, "reserve_space", f"be uint8 and at least {size} long", reserve_space)
    call.supported_dtype("dy", dy)
    return dropout_gradient(dy, bits.to_words(reserve_space, dy.size), _rate(desc))


def dropout_get_reserve_space_size(x: Any) -> int:
    """Returns the bytes of reserve space of `dropout_forward` for x: a bit for each element, in words of 32 bits.

    Args:
      x: an array or a `jax.ShapeDtypeStruct`.

    Raises:
      BadParamError: status MCDNN_STATUS_BAD_PARAM if x is missing or is neither of these.

    Example:
      >>> jaxops.mcdnn.dropout_get_reserve_space_size(jnp.ones((3, 11)))
      8

    Source: mcDNN `mcdnnDropoutGetReserveSpaceSize`.
    """
    call = Call("dropout_get_reserve_space_size")
    call.present(x=x)
    (x,) = call.shapes(x=x)
    return bits.size_bytes(math.prod(x.shape))


def _rate(desc: DropoutDescriptor) -> float | jax.Array:
    rate = desc.dropout
    return rate.astype(np.float32) if isinstance(rate, jax.Array) else float(np.float32(rate))
