"""The kernels of divisive normalization, compiled by the real XLA:TPU and Mosaic compilers."""

import functools
import re

import jax
import pytest

import lowering
from jaxops import divisive_norm
from jaxops.divisive_norm import Images
from lowering.targets import named
from pallas_kernels.tpu import divisive_norm as kernel

pytestmark = pytest.mark.tpu_compile

F32, BF16 = "float32", "bfloat16"
IMAGES = [("NCHW", (128, 96, 27, 27)), ("NHWC", (32, 56, 56, 128)), ("NHWC", (32, 7, 7, 2048))]


@pytest.mark.in_turns("dtype", "with_means", "shape")
@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("with_means", [False, True], ids=["zero-means", "means"])
@pytest.mark.parametrize(("layout", "shape"), IMAGES, ids=str)
def test_divisive_norm_moves_no_image_outside_its_kernels(tpu, layout, shape, with_means, dtype):
    image = jax.ShapeDtypeStruct(shape, dtype)
    operands = (image,) * (1 + with_means)

    def step(operands, grad):
        y, pull_back = jax.vjp(functools.partial(divisive_norm, layout=layout), *operands)
        return y, *pull_back(grad)

    with lowering.use("pallas"):
        report = lowering.compile(jax.jit(step), operands, image, target=tpu)
    assert report.kernels == {"divisive_norm": 1, "divisive_norm_backward": 1}
    assert not re.findall(r"= \S+ (?:copy|transpose|reshape)\(", report.hlo)
    assert report.memory.temporaries == 0


@pytest.mark.in_turns("n", "shape")
@pytest.mark.parametrize("n", [4, 16])
@pytest.mark.parametrize("shape", [(2, 1, 9, 11, 70), (64, 1, 30, 20, 128), (8, 128, 1, 14, 13, 3)], ids=str)
def test_divisive_norm_compiles_in_every_configuration(tpu, shape, n):
    x, grad = jax.ShapeDtypeStruct(shape, BF16), jax.ShapeDtypeStruct(shape, F32)
    params = {"window": (1, n, n), "alpha": 1.5, "beta": 0.75, "k": 0.5, "means_grad": True}
    assert kernel.refuses(named(tpu), Images(x, x), grad, **params) is None
    configs = kernel.configs(named(tpu), Images(x, x), grad, **params)
    for config in configs if n == 4 else configs[:1]:  # they differ in blocks, not in the window
        run = functools.partial(kernel.run_backward, config=config, **params)
        report = lowering.compile(jax.jit(lambda x, grad, run=run: run(Images(x, x), grad)), x, grad, target=tpu)
        assert report.kernels == {"divisive_norm_backward": 1}
