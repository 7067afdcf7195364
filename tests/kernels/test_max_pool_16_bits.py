"""The gradient of max pooling of bfloat16 images on TPU, compared and routed in 16 bits, under Mosaic's interpreter."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from pooling_oracle import make_case, sides

from jaxops.pooling.max_pool import MAX_POOL_BACKWARD
from lowering.targets import named
from pallas_kernels.tpu import max_pool_backward as kernel
from pallas_kernels.tpu import max_pool_pairs

pytestmark = pytest.mark.emulated

SPECIAL = np.array([np.nan, -np.nan, np.inf, -np.inf, 0.0, -0.0, 1.5, 1.5, -2.0, 3e38], np.float32)
# Images whose pixels lie outside of the tiles: a batch of 128 fills the lanes, 16 channels the sublanes.
PIXELS = {
    "overlapping-and-padded": (128, 16, ((7, 9), (3, 3), (2, 2), (1, 1))),
    "last-row-alone": (128, 16, ((6, 6), (3, 3), (2, 2), (1, 1))),
    "begun-late": (128, 16, ((9, 7), (3, 3), (2, 2), (0, 0))),
    "apart": (128, 16, ((5, 6), (2, 2), (2, 2), (0, 0))),
    "with-gaps": (128, 16, ((7, 8), (2, 1), (3, 3), (0, 0))),
    "before-only": (128, 16, ((7, 6), (3, 2), (2, 2), ((2, 0), (1, 0)))),
}
# Images whose windows are pairs of columns, with the windows' columns or images in sublanes.
PAIRS = {
    "pairs-of-images": (32, 128, ((6, 24), (2, 2), (2, 2), (0, 0))),
    "pairs-of-three-rows": (16, 128, ((9, 24), (3, 2), (3, 2), (0, 0))),
    "pairs-of-columns": (2, 128, ((6, 32), (2, 2), (2, 2), (0, 0))),
    "pairs-in-a-row": (2, 200, ((5, 32), (1, 2), (1, 2), (0, 0))),
}
CASES = {**PIXELS, **PAIRS}


def operands_of(rng, images, channels, geometry):
    """Images with many special numbers and ties, gradients of their windows, and the operator's attributes."""
    x, grad = make_case(rng, geometry, images=(images, channels))
    x = np.where(rng.random(x.shape) < 0.5, SPECIAL[rng.integers(len(SPECIAL), size=x.shape)], x)
    window, stride, padding = geometry[1:]
    params = {"window": (1, *window), "stride": (1, *stride), "padding": ((0, 0), *sides(padding))}
    return [jnp.asarray(np.moveaxis(array, 1, -1)[:, None], jnp.bfloat16) for array in (x, grad)], params


@pytest.mark.sampled
@pytest.mark.parametrize("propagate_nan", [True, False])
@pytest.mark.parametrize("target", ["tpu-v7x", "tpu-v5e"])
@pytest.mark.parametrize("case", CASES)
def test_max_pool_gradient_in_16_bits_is_that_of_the_reference(case, target, propagate_nan, rng, capfd):
    operands, params = operands_of(rng, *CASES[case])
    config = kernel.configs(named(target), *operands, **params)[0]
    assert config.get("is_packed", False) == (target == "tpu-v7x")
    assert max_pool_pairs.suits(*operands, **params) == (case in PAIRS)
    run = functools.partial(kernel.run, **params, propagate_nan=propagate_nan, config=config)
    (dx,) = jax.jit(functools.partial(run, interpret=pltpu.InterpretParams(detect_races=True)))(*operands)
    (expected,) = MAX_POOL_BACKWARD.meaning(*operands, **params, propagate_nan=propagate_nan)
    np.testing.assert_array_equal(np.asarray(dx, np.float32), np.asarray(expected, np.float32))
    assert "RACE DETECTED" not in capfd.readouterr().out


@pytest.mark.long
def test_max_pool_pairs_come_in_bands_of_rows(rng, capfd):
    operands, params = operands_of(rng, *CASES["pairs-of-images"])
    blocks = max_pool_pairs.blocks_of(*operands, 3 * 2**20, **params)
    assert (blocks.bands, blocks.is_grouped) == (3, True)
    config = {"vmem_bytes": 3 * 2**20}
    run = functools.partial(kernel.run, **params, propagate_nan=True, config=config)
    (dx,) = jax.jit(functools.partial(run, interpret=pltpu.InterpretParams(detect_races=True)))(*operands)
    (expected,) = MAX_POOL_BACKWARD.meaning(*operands, **params, propagate_nan=True)
    np.testing.assert_array_equal(np.asarray(dx, np.float32), np.asarray(expected, np.float32))
    assert "RACE DETECTED" not in capfd.readouterr().out
