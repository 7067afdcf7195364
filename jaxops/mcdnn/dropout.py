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
      desc: the probability p with which an element is dropped, taken as float32.
      key: a key of `jax.random`, typed or raw, which stands for the documented states: where a C program calls again,
        a JAX program gives another key.
      x: any shape; float16, bfloat16, float32 or float64.

    Returns:
      y, with the shape and dtype of x, and the reserve space: uint8, `dropout_get_reserve_space_size(x)` long. Bit
      `i % 8` of byte `i // 8` is 1 where element i, in row-major order, is kept.

    Raises:
      BadParamError: status MCDNN_STATUS_BAD_PARAM if desc, key or x is missing, or key is no single key.
      NotSupportedError: status MCDNN_STATUS_NOT_SUPPORTED for another dtype.

    Numerics: as `jaxops.dropout`, which keeps the same elements: p = 0 and p = 1 are exact, and dropped elements are
      not read. float64 is scaled by `1 / (1 - p)` in float64, everything else in float32.

    Source: mcDNN `mcdnnDropoutForward`. There is one x and no descriptor of y, and the reserve space is made here: the
      documented errors of unlike descriptors, strides and too little space cannot arise.
    """
    call = Call("dropout_forward")
    call.descriptor(DropoutDescriptor, desc)
    call.present(key=key, x=x)
    (x,) = call.arrays(x=x)
    call.supported_dtype("x", x)
    y, words = dropped_out(call.name, key, x, _rate(desc))
    return y, bits.from_words(words)


def dropout_backward(desc: DropoutDescriptor, dy: jax.Array, reserve_space: jax.Array) -> jax.Array:
    """The gradient of `dropout_forward`: `dx = dy / (1 - p)` where an element was kept, else 0.

    Args:
      desc: as it was given to `dropout_forward`.
      dy: the gradient of y. Its shape may be another one of as many elements.
      reserve_space: of `dropout_forward`; what is behind the documented size is not read.

    Returns:
      The shape and dtype of dy.

    Raises:
      BadParamError: status MCDNN_STATUS_BAD_PARAM if desc, dy or reserve_space is missing, or reserve_space is not one
        axis of uint8 or is shorter than `dropout_get_reserve_space_size(dy)`.
      NotSupportedError: status MCDNN_STATUS_NOT_SUPPORTED for another dtype than `dropout_forward` takes.

    Numerics: as `dropout_forward`; dy is not read where an element was dropped, so that NaN there gives 0.

    Source: mcDNN `mcdnnDropoutBackward`, whose text says that dy is propagated and leaves out the scale. Here are one
      shape, one dtype and no states: the documented errors of unlike element counts, dtypes and strides, and of a
      descriptor without states, cannot arise.
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
    """The bytes of reserve space that `dropout_forward` returns for x: a bit for each element, in words of 32.

    Args:
      x: an array or a `jax.ShapeDtypeStruct`.

    Raises:
      BadParamError: status MCDNN_STATUS_BAD_PARAM if x is missing, or neither of these.

    Source: mcDNN `mcdnnDropoutGetReserveSpaceSize`.
    """
    call = Call("dropout_get_reserve_space_size")
    call.present(x=x)
    (x,) = call.shapes(x=x)
    return bits.size_bytes(math.prod(x.shape))


def _rate(desc: DropoutDescriptor) -> float | jax.Array:
    rate = desc.dropout
    return rate.astype(np.float32) if isinstance(rate, jax.Array) else float(np.float32(rate))
