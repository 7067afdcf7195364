"""The kernels of grid sampling, compiled by the real XLA:TPU and Mosaic compilers."""

import functools
import re

import jax
import pytest

import lowering
from jaxops import grid_sample
from lowering.targets import named
from pallas_kernels.grid_sample_points import Sampling
from pallas_kernels.tpu import grid_sample as kernel

pytestmark = pytest.mark.tpu_compile

F32, BF16 = "float32", "bfloat16"


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_grid_sample_copies_no_image_that_is_stored_with_channels_in_lanes(tpu, dtype):
    x, grid = jax.ShapeDtypeStruct((16, 64, 56, 56), dtype), jax.ShapeDtypeStruct((16, 56, 56, 2), F32)

    def step(x, grid, grad):
        y, pull_back = jax.vjp(functools.partial(grid_sample, align_corners=False), x, grid)
        return y, *pull_back(grad)

    with lowering.use("pallas"):
        report = lowering.compile(jax.jit(step), x, grid, x, target=tpu)
    assert report.kernels == {"grid_sample": 1, "grid_sample_backward": 1}
    assert not re.findall(r"= \w+\[16,(?:64,56,56|56,56,64|3136,64|64,3136)\]\S* (?:copy|transpose)\(", report.hlo)


@pytest.mark.parametrize(
    ("images", "points"),
    [((2, 3, 40, 50), (7, 9)), ((2, 256, 28, 28), (70, 70)), ((1, 1024, 14, 14), (14, 14))],
    ids=["few-channels", "blocks-of-points", "parts"],
)
def test_grid_sample_compiles_in_every_configuration(tpu, images, points):
    operands = (images, BF16), ((images[0], *points, 2), F32), ((*images[:2], *points), BF16)
    operands = [jax.ShapeDtypeStruct(*operand) for operand in operands]
    params = {"sampling": Sampling(padding_mode="reflection")}
    assert kernel.refuses(named(tpu), *operands, **params) is None
    configs = kernel.configs(named(tpu), *operands, **params)
    for config in configs if points == (70, 70) else configs[:1]:  # they differ in blocks of points

        def both(x, grid, grad, config=config):
            return kernel.run(x, grid, config=config, **params), kernel.run_backward(
                x, grid, grad, config=config, **params
            )

        report = lowering.compile(jax.jit(both), *operands, target=tpu)
        assert report.kernels == {"grid_sample": 1, "grid_sample_backward": 1}
