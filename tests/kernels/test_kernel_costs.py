"""Every TPU kernel tells XLA what it costs."""

import json
import re

import jax
import jax.numpy as jnp
import pytest

import jaxops
import lowering
from jaxops import aclnn
from jaxops._suite import SUITE

F32 = jnp.float32


def shaped(*shape, dtype=F32):
    return jax.ShapeDtypeStruct(shape, dtype)


def with_gradient(function):
    def value_and_gradient(x):
        y, pull_back = jax.vjp(function, x)
        return y, *pull_back(y)

    return value_and_gradient


def ema_adam(grad, var, m, v, s):
    hyperparameters = {"lr": 1e-3, "ema_decay": 0.999, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.01}
    return aclnn.apply_fused_ema_adam(grad, var, m, v, s, jnp.int32(1), **hyperparameters)


def normalized(x):
    channels = jnp.ones(x.shape[-1])
    options = {"momentum": 0.1, "epsilon": 1e-5, "layout": "NHWC"}
    return jaxops.batch_norm(x, channels, channels, channels, channels, **options).y


# A call, its operands, and the least and most bytes that its kernels pass, in units of the first operand.
CASES = {
    "softmax": (with_gradient(jaxops.softmax), [shaped(64, 256)], 5, 5),
    "ema_adam": (ema_adam, [shaped(64, 256)] * 5, 9, 9),
    "local_response_norm": (
        with_gradient(lambda x: jaxops.local_response_norm(x, n=5, layout="NCHW")),
        [shaped(2, 8, 16, 16)],
        5,
        5,
    ),
    "dropout": (with_gradient(lambda x: jaxops.dropout(jax.random.key(0), x, 0.5)), [shaped(64, 4096)], 4, 4.2),
    "embedding": (
        lambda grad: jax.vjp(lambda table: jaxops.embedding(table, jnp.arange(64)), jnp.zeros((64, 256)))[1](grad)[0],
        [shaped(64, 256)],
        2,
        4.1,
    ),
    "batch_norm": (with_gradient(normalized), [shaped(8, 4, 4, 128)], 3, 9),
    "max_pool": (
        with_gradient(lambda x: jaxops.max_pool(x, 2, stride=2, layout="NHWC")),
        [shaped(2, 16, 16, 128)],
        2.25,
        2.25,
    ),
}


def bytes_of_kernels(function, operands):
    """What each TPU kernel of a function says that it passes; all of them also say what they compute."""
    with lowering.use("pallas"):
        text = jax.jit(function).trace(*operands).lower(lowering_platforms=("tpu",)).as_text()
    configs = text.replace("\\22", '"').replace("\\0A", "")
    costs = [json.loads(found) for found in re.findall(r'"cost_estimate": (\{.*?\})', configs)]
    assert len(costs) == text.count("stablehlo.custom_call @tpu_custom_call") > 0
    assert all(cost["flops"] > 0 for cost in costs)
    return [cost["bytes_accessed"] for cost in costs]


@pytest.mark.sampled
@pytest.mark.parametrize("name", CASES)
def test_kernel_costs_count_the_bytes_that_pass(name):
    function, operands, least, most = CASES[name]
    passed = sum(bytes_of_kernels(function, operands)) / (operands[0].size * operands[0].dtype.itemsize)
    assert least <= passed <= most


@pytest.mark.sampled
@pytest.mark.parametrize("case", [case for case in SUITE if case.rehearsed_at], ids=lambda case: case.name)
def test_kernels_of_the_suite_count_the_largest_operand_at_least(case):
    operands = jax.eval_shape(lambda: case.arguments(*case.rehearsed_at[-1]))
    largest = max(x.size * x.dtype.itemsize for x in operands)
    assert sum(bytes_of_kernels(case.fn, operands)) >= largest
