"""The operators of dropout, which draws its mask where it is used, and of its gradient, which needs only the mask."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxops._checks.dtypes import accumulation_dtype, check_floating
from jaxops._checks.mcdnn import require
from jaxops._primitive import sharding
from jaxops._primitive.derivative import Active, Arrays, Derivative
from jaxops._primitive.operator import Operator
from pallas_kernels.dropout_mask import (
    WORD_BITS,
    compared,
    decisive_digits,
    digits,
    threshold,
)
from pallas_kernels.gpu import dropout as gpu
from pallas_kernels.tpu import dropout as tpu

_STEP_PAIRS = 2


def words_of(elements: int) -> int:
    """Counts the words that hold one bit per element."""
    return -(-elements // WORD_BITS)


def _check_row(operator: str, argument: str, x: Any) -> None:
    check_floating(operator, **{argument: x})
    require(len(x.shape) > 0, operator, argument, "have shape (..., N)", x)


def _check_keep(operator: str, keep: Any, data: Any) -> None:
    is_pair = keep.shape == (2,) and keep.dtype == accumulation_dtype(data.dtype)
    require(is_pair, operator, "keep", f"be {accumulation_dtype(data.dtype)}[2]", keep)


def _check(streams: Any, x: Any, keep: Any) -> None:
    _check_row("dropout", "x", x)
    shape = (*x.shape[:-1], 3)
    is_stream = streams.shape == shape and streams.dtype == jnp.uint32
    require(is_stream, "dropout", "streams", f"be uint32{list(shape)}", streams)
    _check_keep("dropout", keep, x)


def _check_backward(grad: Any, words: Any, keep: Any) -> None:
    name = "dropout_backward"
    _check_row(name, "grad", grad)
    shape = (*grad.shape[:-1], words_of(grad.shape[-1]))
    is_mask = words.shape == shape and words.dtype == jnp.uint32
    require(is_mask, name, "words", f"be uint32{list(shape)}", words)
    _check_keep(name, keep, grad)


def _drop(streams: jax.Array, x: jax.Array, keep: jax.Array) -> Arrays:
    """Drops elements of each row.

    `streams` holds, for each row, the key's two words and the index of the row's first word; `keep` is
    `probability_and_scale` of a rate.
    """
    key0, key1, first = (streams[..., i, None] for i in range(3))
    count = words_of(x.shape[-1])
    shape = (*x.shape[:-1], count)
    indices = first + jax.lax.broadcasted_iota(jnp.uint32, shape, len(shape) - 1)
    words = _kept_words((jnp.broadcast_to(key0, shape), jnp.broadcast_to(key1, shape)), indices, keep[0])
    unused_bits = -x.shape[-1] % WORD_BITS
    if jax.export.is_symbolic_dim(unused_bits) or unused_bits:
        last = jnp.arange(count) == count - 1
        words = jnp.where(last, words & (jnp.uint32(2**WORD_BITS - 1) >> jnp.asarray(unused_bits, jnp.uint32)), words)
    return *_select(x, words, keep), words


def _kept_words(keys: tuple[jax.Array, jax.Array], indices: jax.Array, kept: jax.Array) -> jax.Array:
    """Returns words whose bit b tells whether element `32 * index + b` is kept: its uniform number is below `kept`."""
    above = threshold(kept)
    less, number = digits(above)
    table = jnp.stack(number).reshape(-1, 2 * _STEP_PAIRS)
    # At least two steps: XLA unrolls a loop of one, and would then draw a word again for each of its elements.
    steps = -(-decisive_digits(above) // table.shape[1])
    steps = jnp.where(steps == 1, 2, steps)

    def step(i: jax.Array, less: jax.Array) -> jax.Array:
        group = steps - 1 - i
        return compared(less, keys, indices, group * _STEP_PAIRS, jnp.unstack(table[group]))

    start = sharding.varying_with([jnp.full_like(indices, less)], [indices, *keys])[0]
    return jax.lax.fori_loop(0, steps, step, start)


def _select(x: jax.Array, words: jax.Array, keep: jax.Array) -> Arrays:
    bits = jnp.uint32(1) << jnp.arange(WORD_BITS, dtype=jnp.uint32)
    kept = (words[..., None] & bits.reshape(*(1,) * words.ndim, WORD_BITS)) != 0
    if x.shape[-1] % WORD_BITS == 0:
        kept_x = x.reshape(kept.shape)
    else:
        kept, kept_x = kept.reshape(*words.shape[:-1], -1)[..., : x.shape[-1]], x
    y = jnp.where(kept, (kept_x.astype(keep.dtype) * keep[1]).astype(x.dtype), jnp.zeros((), x.dtype))
    return (y.reshape(x.shape),)


# Dropout is linear in x and its own transpose, so every derivative selects by the same mask.


def _linearize(operands: Sequence[jax.Array], active: Active) -> tuple[Arrays, Arrays]:
    y, words = DROPOUT(*operands)
    return (y, words), (words, operands[2])


def _tangent(residuals: Arrays, tangents: Any, active: Active) -> Arrays:
    _, x_dot, _ = tangents
    return DROPOUT_BACKWARD(x_dot, *residuals)


def _vjp(residuals: Arrays, cotangents: Any, active: Active) -> Any:
    y_grad, _ = cotangents
    return None, *DROPOUT_BACKWARD(y_grad, *residuals), None


def _linearize_backward(operands: Sequence[jax.Array], active: Active) -> tuple[Arrays, Arrays]:
    return DROPOUT_BACKWARD(*operands), tuple(operands[1:])


def _tangent_of_backward(residuals: Arrays, tangents: Any, active: Active) -> Arrays:
    return DROPOUT_BACKWARD(tangents[0], *residuals)


def _vjp_of_backward(residuals: Arrays, cotangents: Any, active: Active) -> Any:
    return *DROPOUT_BACKWARD(cotangents[0], *residuals), None, None


DROPOUT = Operator(
    "dropout",
    "... s, ... n, k -> ... n, ... w",
    _check,
    _drop,
    Derivative(_vjp, _tangent, _linearize, residuals="... w, k"),
    kernels=(tpu.KERNEL, gpu.KERNEL),
)
DROPOUT_BACKWARD = Operator(
    "dropout_backward",
    "... n, ... w, k -> ... n",
    _check_backward,
    _select,
    Derivative(_vjp_of_backward, _tangent_of_backward, _linearize_backward, residuals="... w, k"),
    kernels=(tpu.BACKWARD_KERNEL, gpu.BACKWARD_KERNEL),
)
