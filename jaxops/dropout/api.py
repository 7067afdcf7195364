"""The public function `dropout`: keys, rates and shapes become what the operators take."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np

from jaxops._checks.dtypes import accumulation_dtype, check_floating
from jaxops._checks.mcdnn import as_array, as_key, require, require_present, require_real
from jaxops._primitive import sharding
from jaxops.dropout.operator import DROPOUT, DROPOUT_BACKWARD, words_of
from pallas_kernels.dropout_mask import RESOLUTION_BITS, WORD_BITS, threefry

_MAX_WORDS = 2**32


def dropout(key: jax.Array, x: jax.Array, rate: float | jax.Array) -> jax.Array:
    """Zeroes elements at random and scales the rest: `y = x / (1 - rate)` where an element is kept, else 0.

    Which elements are kept depends on the key, the rate and the element's row-major position. It does not depend on the
    implementation or on how x is laid out or split over devices. The gradient is `grad_y / (1 - rate)` where an element
    was kept, else 0. It comes from a mask of one bit per element.

    Args:
      key: a key of `jax.random`, typed or raw, of any implementation. Do not reuse it, just as for
        `jax.random.bernoulli`.
      x: floating point, of any shape.
      rate: the probability of dropping an element, in [0, 1]: a Python or NumPy number, or a traced scalar. A new value
        does not recompile.

    Returns:
      An array with the shape and dtype of x.

    Raises:
      BadParamError: if key is not a single key, x is not floating point, or rate is not a number in [0, 1]. The value
        of a JAX array is not checked but clamped to [0, 1], and NaN gives NaN.

    Numerics:
      The probability is rounded to a multiple of 2**-24; rates 0 and 1 are exact. The bits are those of Threefry-2x32
      with 20 rounds, counted by element. The scale `1 / (1 - rate)` is computed in float32 (float64 for float64), and
      the product is rounded once. Dropped elements are not read, so NaN there gives 0.

      Derivatives of all modes and orders exist in x, and none in the rate. The backward pass keeps the mask and nothing
      of x. Under `vmap` with one key, all mapped calls keep the same elements, as with `jax.random`.

    Example:
      >>> y = jaxops.dropout(jax.random.key(0), jnp.ones(1000), 0.75)
      >>> sorted({float(value) for value in y})  # dropped, or 1 / (1 - 0.75)
      [0.0, 4.0]

    Source: mcDNN `mcdnnDropoutForward` and `mcdnnDropoutBackward`.
    """
    is_in_order = _is_key(key) or not (_is_key(x) or _is_key(rate))
    require(is_in_order, "dropout", "key", "come first, as in dropout(key, x, rate)", key)
    require_present("dropout", {"key": key, "x": x})
    x = as_array("dropout", "x", x)
    check_floating("dropout", x=x)
    return dropped_out("dropout", key, x, checked_rate("dropout", "rate", rate))[0]


def dropped_out(operator: str, key: jax.Array, x: jax.Array, rate: float | jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the result and the words of its mask, in the name of `operator`; x and rate are checked already."""
    lead, length = row_view(x.shape)
    word_count = math.prod(lead) * words_of(length)
    fits = jax.export.is_symbolic_dim(word_count) or word_count <= _MAX_WORDS
    require(fits, operator, "x", f"have at most {_MAX_WORDS * WORD_BITS} elements, whose words 32 bits can number", x)
    key0, key1 = _two_words(operator, key)
    first_words = _row_indices(lead) * jnp.uint32(words_of(length))
    streams = jnp.stack([jnp.broadcast_to(key0, lead), jnp.broadcast_to(key1, lead), first_words], axis=-1)
    y, words = DROPOUT(
        streams, sharding.reshaped(x, (*lead, length)), probability_and_scale(rate, accumulation_dtype(x.dtype))
    )
    return sharding.reshaped(y, x.shape, sharding=jax.typeof(x).sharding), words


def dropout_gradient(dy: jax.Array, words: jax.Array, rate: float | jax.Array) -> jax.Array:
    """Computes the gradient from the words of the mask, in any shape."""
    lead, length = row_view(dy.shape)
    rows = sharding.reshaped(dy, (*lead, length))
    (dx,) = DROPOUT_BACKWARD(
        rows,
        sharding.reshaped(words, (*lead, words_of(length))),
        probability_and_scale(rate, accumulation_dtype(dy.dtype)),
    )
    return sharding.reshaped(dx, dy.shape, sharding=jax.typeof(dy).sharding)


def row_view(shape: Sequence[int]) -> tuple[tuple[int, ...], int]:
    """Returns the leading axes, which may be split over devices, and the length of a row of the other axes.

    A row consists of the fewest trailing axes that fill whole words, or else of the whole array.
    """
    for axis in reversed(range(len(shape))):
        length = math.prod(shape[axis:])
        if length % WORD_BITS == 0 and length > 0:
            return tuple(shape[:axis]), length
    return (), math.prod(shape)


def checked_rate(operator: str, argument: str, rate: Any) -> float | jax.Array:
    """Returns a rate as a float or a JAX scalar; raises BadParamError for a number outside [0, 1]."""
    checked: float | jax.Array = require_real(
        operator, argument, rate, "be a number in [0, 1]", least=0, most=1, traced=True
    )
    return checked


def probability_and_scale(rate: float | jax.Array, dtype: Any) -> jax.Array:
    """Returns, (2,): `1 - rate` rounded to 24 binary digits, and the scale `1 / (1 - rate)`.

    The scale is 0 if nothing is kept.

    Args:
      rate: a number in [0, 1], or a traced scalar, which is clamped to [0, 1]. NaN keeps every element, as NaN.
      dtype: the dtype of the result and of the scale's arithmetic: float32 or float64.
    """
    # float32 rounds `1 - rate` to exactly these digits, and halves to even as Python does. So a number and a scalar of
    # the same value keep the same elements.
    if not isinstance(rate, jax.Array):
        kept = round((1 - rate) * 2**RESOLUTION_BITS) / 2**RESOLUTION_BITS
        one = np.ones((), dtype)
        return jnp.asarray([kept, one / (one - np.asarray(rate, dtype)) if kept else 0], dtype)
    # The choice of elements does not change smoothly with the rate, so a derivative of the scale alone would mislead.
    rate = jax.lax.stop_gradient(jnp.clip(rate.astype(accumulation_dtype(rate.dtype)), 0, 1))
    kept = jnp.where(jnp.isnan(rate), 1, jnp.round((1 - rate) * 2**RESOLUTION_BITS) / 2**RESOLUTION_BITS)
    scale = jnp.where(kept == 0, 0, 1 / (1 - rate.astype(dtype)))
    return jnp.stack([kept.astype(dtype), scale.astype(dtype)])


def _is_key(value: Any) -> bool:
    if not isinstance(value, jax.Array | np.ndarray):
        return False
    return bool(jnp.issubdtype(value.dtype, jax.dtypes.prng_key)) or (value.dtype == np.uint32 and value.ndim == 1)


def _two_words(operator: str, key: Any) -> tuple[jax.Array, jax.Array]:
    """Returns the generator's two key words, from a JAX key of any implementation."""
    words = as_key(operator, "key", key)
    first, second, *rest = jnp.unstack(sharding.whole_along_first(words))
    for pair in zip(rest[::2], [*rest[1::2], jnp.zeros_like(first)], strict=False):
        first, second = threefry(first, second, *pair)
    return first, second


def _row_indices(lead: Sequence[int]) -> jax.Array:
    strides = [math.prod(lead[axis + 1 :]) for axis in range(len(lead))]
    along = (
        jax.lax.broadcasted_iota(jnp.uint32, lead, axis) * jnp.uint32(stride) for axis, stride in enumerate(strides)
    )
    return sum(along, jnp.zeros(lead, jnp.uint32))
