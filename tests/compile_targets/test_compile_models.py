"""Whole train steps, compiled for chips that are not here: the demo's, and one that does not know this library."""

import math
import re

import jax
import jax.numpy as jnp
import pytest
from flax_classifier import classifier_step, init_state

import lowering
from jaxops._demo import corpus, model, train

V5E, V6E = (pytest.param(name, marks=pytest.mark.tpu_compile) for name in ("tpu-v5e", "tpu-v6e"))
H100 = pytest.param("cuda-h100", marks=pytest.mark.cuda_compile)


@pytest.fixture(autouse=True)
def standard_promotion():
    """What users have."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def bytes_of_parameters(hlo):
    """What the program's own text declares; a chip may pad them."""
    parameters = re.search(r"entry_computation_layout=\{\((.*?)\)->", hlo).group(1)
    arrays = re.findall(r"\b([a-z]+)(\d*)\[([\d,]*)\]", parameters)
    return sum(int(bits or 8) // 8 * math.prod(int(n) for n in sizes.split(",") if n) for _, bits, sizes in arrays)


@pytest.mark.parametrize("chip", [V5E, H100], indirect=True)
def test_demo_step_is_compiled_as_it_is_explained(chip):
    settings, shape = train.Settings(), model.Shape(corpus.VOCABULARY_SIZE)
    ours = train.operators(settings)
    args, step = train.step_arguments(ours, settings, shape), train.train_step(ours, shape)
    # The GPU's kernels of the cross entropy refuse this model's float32.
    loss = "reference" if chip.startswith("cuda") else "pallas"
    with lowering.use("pallas", linear_cross_entropy_sum_with_gradients=loss):
        explanation = lowering.explain(step, *args, target=chip)
        report = lowering.compile(step, *args, target=chip)
    counts = {}
    for row in explanation.rows:
        counts[row.operator] = counts.get(row.operator, 0) + row.count * row.implementation.startswith("mosaic")
    # One update a parameter array.
    assert report.kernels["ema_adam"] == counts["apply_fused_ema_adam"] == len(jax.tree.leaves(args[0]))
    assert counts["linear_cross_entropy_sum_with_gradients"] == (loss == "pallas")
    assert report.kernels.get("linear_cross_entropy_exponentials", 0) == (loss == "pallas")
    assert counts["embedding"] == 0
    # On a GPU one gradient of an embedding is several launches.
    assert report.kernels["embedding_dense_backward"] >= counts["embedding_dense_backward"] == 1
    launches = len(re.findall(r'custom_call_target="(?:tpu_custom_call|mosaic_gpu_v2)"', report.hlo))
    assert sum(report.kernels.values()) == launches
    assert explanation.seconds > 0
    declared = bytes_of_parameters(report.hlo)
    assert declared <= report.memory.arguments <= 1.05 * declared
    # Parameters and state are donated, and so are nearly all of the arguments; tokens are not.
    assert 0 < report.memory.arguments - report.memory.aliased <= 4 * args[2].size + 4096


@pytest.mark.parametrize("chip", [V6E, H100], indirect=True)
def test_flax_model_is_explained_and_compiled(chip):
    images, labels = jax.ShapeDtypeStruct((32, 28, 28, 1), jnp.float32), jax.ShapeDtypeStruct((32,), jnp.int32)
    state = jax.eval_shape(init_state, jax.random.key(0))
    explanation = lowering.explain(classifier_step, state, images, labels, target=chip)
    assert explanation.rows == ()
    products = 32 * (28 * 28 * 9 * 32 + 14 * 14 * 9 * 32 * 64 + 7 * 7 * 64 * 256 + 256 * 10)
    # Forward, and two gradients of each layer but the first, whose images have none.
    assert explanation.total_flops > 2 * 3 * products - 2 * 32 * 28 * 28 * 9 * 32
    report = lowering.compile(classifier_step, state, images, labels, target=chip)
    assert report.kernels == {}
    assert report.memory.arguments >= bytes_of_parameters(report.hlo)
    assert "convolution" in report.hlo or "conv" in report.hlo
