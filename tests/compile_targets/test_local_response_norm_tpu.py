"""The kernels of local response normalization, compiled by the real XLA:TPU and Mosaic compilers."""

import functools
import re

import jax
import pytest

import lowering
from jaxops import local_response_norm as layer
from lowering.targets import named
from pallas_kernels.tpu import local_response_norm as kernel

pytestmark = pytest.mark.tpu_compile

F32, BF16 = "float32", "bfloat16"
STRONG = {"alpha": 1.5, "beta": 0.75, "k": 0.5}
IMAGES = [
    ("NCHW", (128, 96, 27, 27)),
    ("NCHW", (16, 64, 56, 56)),
    ("NCHW", (8, 30, 128, 128)),
    ("NHWC", (32, 56, 56, 256)),
    ("NHWC", (32, 7, 7, 2048)),
    ("NHWC", (3, 7, 5, 5)),
    ("NCDHW", (2, 32, 16, 28, 28)),
]


@pytest.mark.in_turns("dtype", "shape")
@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize(("layout", "shape"), IMAGES, ids=str)
def test_local_response_norm_moves_no_image_outside_its_kernels(tpu, layout, shape, dtype):
    image = jax.ShapeDtypeStruct(shape, dtype)

    def step(x, grad):
        y, pull_back = jax.vjp(functools.partial(layer, layout=layout), x)
        return y, *pull_back(grad)

    with lowering.use("pallas"):
        report = lowering.compile(jax.jit(step), image, image, target=tpu)
    assert report.kernels == {"local_response_norm": 1, "local_response_norm_backward": 1}
    assert not re.findall(r"= \S+ (?:copy|transpose|reshape)\(", report.hlo)
    assert report.memory.temporaries == 0


@pytest.mark.in_turns("n", "shape")
@pytest.mark.parametrize("n", [4, 16])
@pytest.mark.parametrize("shape", [(16, 64, 1, 56, 56), (8, 30, 1, 128, 128), (32, 7, 7, 2048, 1, 1, 1)], ids=str)
def test_local_response_norm_compiles_in_every_configuration(tpu, shape, n):
    x, grad = jax.ShapeDtypeStruct(shape, BF16), jax.ShapeDtypeStruct(shape, F32)
    assert kernel.refuses(named(tpu), x, grad, n=n, **STRONG) is None
    configs = kernel.configs(named(tpu), x)
    for config in configs if n == 4 else configs[:1]:  # they differ in blocks, not in the window
        run = functools.partial(kernel.run_backward, config=config, n=n, **STRONG)
        report = lowering.compile(jax.jit(run), x, grad, target=tpu)
        assert report.kernels == {"local_response_norm_backward": 1}
