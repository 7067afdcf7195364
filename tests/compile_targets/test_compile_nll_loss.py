"""The gradient of `nll_loss`, compiled for chips that are not here: written once, by one loop, and fused."""

import math
import re

import jax
import jax.numpy as jnp
import pytest

import lowering
from jaxops import nll_loss

CHIPS = [
    *(pytest.param(name, marks=pytest.mark.tpu_compile) for name in ("tpu-v5e", "tpu-v6e")),
    pytest.param("cuda-h100", marks=pytest.mark.cuda_compile),
]
LOSSES = {
    "rows": ((1024, 32000), lambda x, labels: nll_loss(x, labels)),
    "images": ((8, 21, 256, 256), lambda x, labels: nll_loss(x, labels, axis=1)),
    "log-softmax": (
        (1024, 32000),
        lambda x, labels: nll_loss(jax.nn.log_softmax(x.astype(jnp.float32)), labels),
    ),
}


@pytest.mark.parametrize("chip", CHIPS, indirect=True)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("shape", "loss"), LOSSES.values(), ids=LOSSES)
def test_nll_loss_gradient_is_one_write(chip, shape, loss, dtype):
    labels = jax.ShapeDtypeStruct((shape[0], *shape[2:]), jnp.int32)
    report = lowering.compile(jax.grad(loss), jax.ShapeDtypeStruct(shape, dtype), labels, target=chip)
    entry = report.hlo.split("ENTRY")[1]
    arrays = re.findall(rf"= \w+\[{','.join(map(str, shape))}\]\S* (\w+)\(", entry)
    assert arrays.count("fusion") == 1
    assert set(arrays) <= {"fusion", "parameter", "copy"}
    assert report.memory.temporaries <= 12 * math.prod(labels.shape) + 2**20
