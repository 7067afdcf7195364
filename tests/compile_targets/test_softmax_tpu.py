"""The softmax kernels compiled by the real XLA:TPU and Mosaic compilers; run with `-m tpu_compile`."""

import functools
import re

import jax
import pytest

import lowering
from jaxops import softmax as softmax_layer
from lowering.targets import named
from pallas_kernels.softmax_groups import Groups
from pallas_kernels.tpu import softmax, softmax_backward

pytestmark = pytest.mark.tpu_compile

# Rows of a classifier, of attention, of vocabularies, and of one; channels of images, first and last, deep ones, and
# whole images; groups parted by other axes.
ARRAYS = [
    *[((1024, 1000), (1,)), ((8, 16, 512, 512), (3,)), ((512, 15003), (1,)), ((16, 151937), (1,)), ((4096, 1), (1,))],
    *[((16, 64, 56, 56), (1,)), ((16, 56, 56, 64), (3,)), ((8, 10, 7, 7), (1,)), ((2, 15000, 40, 40), (1,))],
    *[((16, 3, 224, 224), (1, 2, 3)), ((8, 12, 16, 20), (1, 3))],
]


def compile_both(target, shape, axes, dtypes, log, config_index=0):
    groups = Groups.along(shape, axes)
    y, grad = (jax.eval_shape(groups.of, jax.ShapeDtypeStruct(shape, dtype)) for dtype in dtypes)
    for name, kernel, operands in (("softmax", softmax, [grad]), ("softmax_backward", softmax_backward, [y, grad])):
        params = {"log": log, "groups": groups}
        assert kernel.KERNEL.refuses(named(target), *operands, **params) is None
        config = kernel.KERNEL.configs(named(target), *operands, **params)[config_index]
        run = functools.partial(kernel.run, config=config, **params)
        report = lowering.compile(jax.jit(run), *operands, target=target)
        assert report.kernels == {name: 1}


@pytest.mark.in_turns("dtypes", "shape")
@pytest.mark.parametrize("dtypes", [("float32",) * 2, ("bfloat16",) * 2, ("bfloat16", "float32")], ids=str)
@pytest.mark.parametrize(("shape", "axes"), ARRAYS, ids=str)
def test_softmax_compiles_forward_and_backward(tpu, shape, axes, dtypes):
    compile_both(tpu, shape, axes, dtypes, log=dtypes[0] == "bfloat16")


@pytest.mark.parametrize("config_index", [1, 2])
@pytest.mark.parametrize(("shape", "axes"), [ARRAYS[0], ARRAYS[5]], ids=str)
def test_softmax_compiles_in_every_configuration(tpu, shape, axes, config_index):
    compile_both(tpu, shape, axes, ("float32",) * 2, False, config_index)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("shape", "axis"),
    [
        ((1024, 4096), -1),
        ((16, 64, 56, 56), 1),
        ((16, 56, 56, 64), -1),
        ((8, 21, 512, 512), 1),
        ((8, 256, 400), 1),
        ((8, 2048, 7, 7), 1),
    ],
    ids=str,
)
def test_softmax_moves_nothing_outside_its_kernels(tpu, shape, axis, dtype):
    x = jax.ShapeDtypeStruct(shape, dtype)

    def step(x, grad):
        y, pull_back = jax.vjp(lambda x: softmax_layer(x, axis=axis), x)
        return y, pull_back(grad)[0]

    with lowering.use("pallas"):
        report = lowering.compile(jax.jit(step), x, x, target=tpu)
    assert report.kernels == {"softmax": 1, "softmax_backward": 1}
    assert not re.findall(r"= \S+ (?:copy|transpose|reshape|fusion)\(", report.hlo)
