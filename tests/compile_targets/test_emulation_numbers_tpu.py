"""Kernels of narrow numbers, masks and places of extremes, as compiled for each chip, by the truth of NumPy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

import lowering
from lowering.select import EMULATED

pytestmark = pytest.mark.tpu_compile

RNG = np.random.default_rng(20260)
FLOATS = RNG.normal(size=(64, 256)).astype(np.float32)
OTHERS = RNG.normal(size=(256, 256)).astype(np.float32)
INTEGERS = RNG.integers(-128, 128, (64, 256))
E4M3, E5M2, INT4 = (np.dtype(x) for x in (jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.int4))


def kernel(body, like):
    """Returns a function whose results a kernel writes."""
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), like)
    return lambda *operands: pl.pallas_call(body, out_shape=shapes)(*operands)


def converted(dtype, x, out):
    out[...] = x[...].astype(dtype)


def multiplied(x, y, out):
    out[...] = jax.lax.dot(x[...], y[...], preferred_element_type=out.dtype)


def places(x, largest, smallest):
    largest[...] = jnp.argmax(x[...], axis=1, keepdims=True)
    smallest[...] = jnp.argmin(x[...], axis=1, keepdims=True)


def summed_up(x, out):
    # Masks of 16 bits, so many that the compiler keeps some in memory.
    row, column = (jax.lax.broadcasted_iota(jnp.int32, (256, 256), axis) for axis in (0, 1))
    out[...] = jax.lax.dot(x[...], (row <= column).astype(jnp.float32), precision=jax.lax.Precision.HIGHEST)


def masked(x, mask, out, inverted, is_any):
    out[...] = jnp.where(mask[...], x[...], 0.0)
    inverted[...] = ~mask[...]
    is_any[...] = jnp.any(x[...] > 2.5, axis=1, keepdims=True)


def largest_of_absolute(x, wide, narrow, least):
    wide[...] = jnp.max(jnp.abs(x[...]), axis=0, keepdims=True)
    narrow[...] = jnp.max(jnp.abs(x[...].astype(jnp.bfloat16)), axis=1, keepdims=True)
    least[...] = jnp.min(x[...].astype(jnp.bfloat16), axis=1, keepdims=True)


def quantized(x, out, scale):
    most = jnp.max(jnp.abs(x[...]), axis=1, keepdims=True)
    scale[...] = most
    out[...] = jnp.clip(jnp.round(x[...] * (127.0 / most)), -127, 127).astype(jnp.int8)


def rounded_away(x, out):
    out[...] = jax.lax.round(x[...], jax.lax.RoundingMethod.AWAY_FROM_ZERO)


def tripled(x, out):
    out[...] = x[...] * jnp.int16(3)


def turned(x, out):
    out[...] = x[...].T


def in_shape(x, out):
    out[...] = x[...].reshape(out.shape)


def repeated(x, out):
    out[...] = jnp.broadcast_to(x[3:4], out.shape)


def packed(low, high, out):
    out[...] = pltpu.pack_elementwise([low[...], high[...]], packed_dtype=jnp.int16)


def conversions():
    """Lists operands and what they are converted to: floats of 8 bits, integers of 8 and of 4."""
    eights = [np.arange(256, dtype=np.uint8).view(dtype) for dtype in (E4M3, E5M2)]
    eights = [np.where(np.isnan(x.astype(np.float32)), x.dtype.type(0), x) for x in eights]
    wide = [FLOATS * scale for scale in (1.0, 60.0)]
    found = {f"{x.dtype.name} to {to}": (np.tile(x, (64, 1)), to) for x in eights for to in ("float32", "bfloat16")}
    found |= {f"{of} to {to}": (wide[0].astype(of), to) for of in ("float32", "bfloat16") for to in (E4M3, E5M2)}
    found |= {f"{of} to int8": (wide[1].clip(-128, 127).astype(of), "int8") for of in ("float32", "bfloat16")}
    found["float32 to uint8"] = np.abs(wide[1]).clip(0, 255), "uint8"
    fours = (INTEGERS >> 4).astype(INT4)
    found |= {f"int4 to {to}": (fours, to) for to in ("float32", "bfloat16", "int8")}
    return found | {"int8 to int4": (fours.astype(np.int8), INT4)}


def cases():
    """Lists kernels, their operands and what they should give."""
    as_double = FLOATS.astype(np.float64)
    found = {}
    for name, (x, to) in conversions().items():
        found[name] = functools.partial(converted, jnp.dtype(to)), [x], x.astype(np.float32).astype(jnp.dtype(to))
    for dtype in (E4M3, E5M2):
        x, y = FLOATS.astype(dtype), OTHERS.astype(dtype)
        found[f"product of {dtype.name}"] = (
            multiplied,
            [x, y],
            (x.astype(np.float64) @ y.astype(np.float64)).astype(np.float32),
        )
    extremes = [function(FLOATS, 1, keepdims=True).astype(np.int32) for function in (np.argmax, np.argmin)]
    found["places of extremes"] = places, [FLOATS], extremes
    found["sums by a triangle"] = summed_up, [FLOATS], as_double.cumsum(1).astype(np.float32)
    mask = OTHERS[:64] > 0
    found["booleans"] = (
        masked,
        [FLOATS, mask],
        [np.where(mask, FLOATS, 0), ~mask, (FLOATS > 2.5).any(1, keepdims=True)],
    )
    of_bfloat16 = FLOATS.astype(jnp.bfloat16).astype(np.float32)
    found["absolute values"] = (
        largest_of_absolute,
        [FLOATS],
        [
            np.abs(FLOATS).max(0, keepdims=True),
            np.abs(of_bfloat16).max(1, keepdims=True).astype(jnp.bfloat16),
            of_bfloat16.min(1, keepdims=True).astype(jnp.bfloat16),
        ],
    )
    found["rounding away from 0"] = (
        rounded_away,
        [np.rint(20 * FLOATS) / 2],
        np.copysign(np.floor(np.abs(np.rint(20 * FLOATS) / 2) + 0.5), FLOATS),
    )
    found["products of 16 bits"] = tripled, [INTEGERS.astype(np.int16)], (3 * INTEGERS).astype(np.int16)
    found["transposed bytes"] = turned, [INTEGERS.astype(np.int8)], INTEGERS.astype(np.int8).T
    shapes = [((2, 4), (4, 2), "float32"), ((33, 99), (99, 33), "int32"), ((8, 512), (8, 4, 128), "bfloat16")]
    shapes += [((2, 3, 5, 128), (2, 3, 640), "bfloat16"), ((2, 3, 5, 128), (2, 3, 640), "int8")]
    for of, to, dtype in shapes:
        x = RNG.integers(-128, 128, of).astype(jnp.dtype(dtype))
        found[f"{dtype} {of} as {to}"] = in_shape, [x], x.reshape(to)
    row = INTEGERS[:, :128].astype(np.int8)
    found["a row of bytes"] = repeated, [row], np.broadcast_to(row[3:4], row.shape)
    low, high = (RNG.integers(-(2**15), 2**15, (64, 128)).astype(np.int32) for _ in range(2))
    found["packed halves"] = packed, [low, high], low & 0xFFFF | high << 16
    return found


CASES = cases()


@pytest.mark.parametrize("chip", EMULATED)
@pytest.mark.parametrize("name", CASES)
def test_narrow_numbers_are_those_of_numpy(name, chip):
    body, operands, expected = CASES[name]
    emulation = lowering.emulate(kernel(body, expected), *operands, target=chip, checks=False)
    assert len(emulation.kernels) == 1
    for found, right in zip(jax.tree.leaves(emulation.results), jax.tree.leaves(expected), strict=True):
        found = np.asarray(found)
        assert found.dtype == right.dtype
        tolerance = 3e-5 if "of float8" in name or "triangle" in name else 0.0
        np.testing.assert_allclose(found.astype(np.float64), right.astype(np.float64), rtol=0, atol=tolerance)


@pytest.mark.parametrize("chip", EMULATED)
def test_quantized_rows_are_within_one_step(chip):
    like = [jax.ShapeDtypeStruct(FLOATS.shape, np.int8), jax.ShapeDtypeStruct((64, 1), np.float32)]
    steps, scales = lowering.emulate(kernel(quantized, like), FLOATS, target=chip).results
    np.testing.assert_array_equal(scales, np.abs(FLOATS).max(1, keepdims=True))
    exact = FLOATS.astype(np.float64) * 127 / scales
    np.testing.assert_allclose(steps, exact, rtol=0, atol=0.5 + 1e-4)
