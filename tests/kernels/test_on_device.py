"""Kernels on the chip that they are written for; skipped where it is not. One command checks them on an H100:

JAX_PLATFORMS=cuda python -m pytest tests/kernels/test_on_device.py
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import softmax_oracle

import lowering
from jaxops import aclnn, softmax
from jaxops.linear_cross_entropy import linear_cross_entropy
from jaxops.linear_cross_entropy.operands import Columns, CotangentTerms, Needs, Rows, RowStatistics
from lowering.targets import here
from pallas_kernels.gpu.linear_cross_entropy import gradients, statistics

needs_hopper = pytest.mark.skipif(
    here().platform != "cuda" or jax.devices()[0].compute_capability != "9.0",
    reason="needs an NVIDIA GPU of compute capability 9.0, and JAX_PLATFORMS=cuda",
)
# Edges of a block of 256 rows, of a tile of 128 classes and of eight; whole runs of tiles; a vocabulary in chunks.
SHAPES = [(1, 64, 128), (255, 136, 1000), (257, 192, 2050), (512, 1024, 32000), (1024, 768, 50257)]


def make_operands(rows, hidden, classes, dtype, scale=4.0):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((rows, hidden), np.float32)
    weight = scale / hidden**0.5 * rng.standard_normal((classes, hidden), np.float32)
    labels = rng.integers(0, classes, rows)
    labels[::7] = -100
    labels[0] = classes - 1
    return jnp.asarray(x, dtype), jnp.asarray(weight, dtype), jnp.asarray(labels, "int32")


def expected(x, weight, labels, bias, softcap, smoothing):
    """The mean loss and its gradients in x, weight and bias, in float64."""
    x, weight, bias = (np.asarray(value).astype(np.float64) for value in (x, weight, bias))
    labels = np.asarray(labels)
    kept = labels >= 0
    z = x @ weight.T + bias
    slope = np.ones_like(z)
    if softcap is not None:
        slope, z = 1 - np.tanh(z / softcap) ** 2, softcap * np.tanh(z / softcap)
    maximum = z.max(axis=1, keepdims=True)
    lse = maximum + np.log(np.exp(z - maximum).sum(axis=1, keepdims=True))
    q = (1 - smoothing) * (np.arange(z.shape[1]) == labels[:, None]) + smoothing / z.shape[1]
    q = q * kept[:, None] / kept.sum()
    dz = (q.sum(axis=1, keepdims=True) * np.exp(z - lse) - q) * slope
    return (q * (lse - z)).sum(), dz @ weight, dz.T @ x, dz.sum(axis=0)


def errors(found, truth):
    """The largest error of each result, relative to its largest value."""
    return [
        np.abs(np.asarray(a).astype(np.float64) - b).max() / np.abs(b).max() for a, b in zip(found, truth, strict=True)
    ]


@needs_hopper
@pytest.mark.parametrize("attributes", [{}, {"softcap": 20.0, "label_smoothing": 0.1}], ids=["plain", "softcap"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_linear_cross_entropy_kernels_agree_with_float64(shape, dtype, attributes):
    x, weight, labels = make_operands(*shape, dtype)
    bias = jnp.linspace(-1, 1, shape[2], dtype=jnp.float32)

    @functools.partial(jax.value_and_grad, argnums=(0, 1, 3))
    def loss(x, weight, labels, bias):
        return linear_cross_entropy(x, weight, labels, bias=bias, strategy="recompute", **attributes)

    results = {}
    for implementation in ("pallas", "reference"):
        with lowering.use(implementation):
            lowered = jax.jit(loss).lower(x, weight, labels, bias)
        assert ("mosaic_gpu" in lowered.as_text()) == (implementation == "pallas")
        value, grads = lowered.compile()(x, weight, labels, bias)
        results[implementation] = (value, *grads)
    truth = expected(x, weight, labels, bias, attributes.get("softcap"), attributes.get("label_smoothing", 0.0))
    of_reference, of_kernel = (errors(results[name], truth) for name in ("reference", "pallas"))
    # The bias gradient sums rounded cotangents, which the reference rounds after it.
    allowed = (1e-5, 1e-3, 1e-3, 2 * float(jnp.finfo(dtype).eps))
    for reference_error, kernel_error, extra in zip(of_reference, of_kernel, allowed, strict=True):
        assert kernel_error <= 1.5 * reference_error + extra


@needs_hopper
@pytest.mark.parametrize("index", range(4))
def test_linear_cross_entropy_configs_agree(index):
    x, weight, labels = make_operands(700, 320, 9000, "bfloat16")
    rows, columns = Rows(x, labels), Columns(weight)
    forward = {"softcap": None, "metrics": True}
    config = statistics.configs(here(), rows, columns, **forward)[index]
    found = RowStatistics(*jax.jit(functools.partial(statistics.run, config=config, **forward))(rows, columns))
    z = np.asarray(x).astype(np.float64) @ np.asarray(weight).astype(np.float64).T
    lse = np.log(np.exp(z - z.max(axis=1, keepdims=True)).sum(axis=1))
    np.testing.assert_allclose(found.max_logit, z.max(axis=1), rtol=1e-5)
    np.testing.assert_allclose(found.log_sum_exp, lse, rtol=1e-4)
    np.testing.assert_array_equal(found.prediction, z.argmax(axis=1))
    operands = CotangentTerms(jnp.ones(700), *found[:2], -jnp.ones(700)), rows, columns
    backward = {"softcap": None, "needs": Needs(x=True, weight=True)}
    config = {**gradients.configs(here(), *operands, **backward)[index], "chunk_columns": 4096}
    run = functools.partial(gradients.run, config=config, **backward)
    x_grad, weight_grad = jax.tree.leaves(jax.jit(run)(*operands))
    dz = np.exp(z - z.max(axis=1, keepdims=True) - lse[:, None])
    dz -= np.arange(z.shape[1]) == np.asarray(labels)[:, None]
    truth = (dz @ np.asarray(weight).astype(np.float64), dz.T @ np.asarray(x).astype(np.float64))
    assert max(errors((x_grad, weight_grad), truth)) < 0.01


@needs_hopper
def test_split_vocabulary_kernels_agree_with_their_references():
    x, weight, labels = make_operands(300, 256, 3000, "bfloat16")
    part = weight[1000:2200]

    def step(x, part, labels):
        found = aclnn.fused_linear_online_max_sum(x, part, labels, vocab_start_index=1000, vocab_end_index=2200)
        maximum, total, predicted, mask, masked_target, _ = found
        grads = aclnn.fused_linear_cross_entropy_loss_grad(
            jnp.ones(300), x, part, mask, masked_target, logits_max=maximum, sum_exp_logits=total
        )
        return maximum, total, predicted, *(grad.astype(jnp.float32) for grad in grads)

    results = []
    for implementation in ("pallas", "reference"):
        with lowering.use(implementation):
            results.append(jax.jit(step)(x, part, jnp.maximum(labels, 0)))
    for kernel, reference in zip(*results, strict=True):
        np.testing.assert_allclose(kernel, reference, rtol=0.02, atol=0.01 * np.abs(reference).max())


# Rows and width of the table, positions, and the part of them that hold one id.
TABLES = [(50257, 768, 8192, 0.0), (1_000_000, 128, 65536, 0.0), (1000, 160, 777, 0.5), (4000, 1024, 65536, 1.0)]


@needs_hopper
@pytest.mark.parametrize("scale", [False, True], ids=["sum", "scaled"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("table", TABLES, ids=str)
def test_embedding_gradients_agree_with_float64_and_repeat_bit_by_bit(table, dtype, scale):
    """The kernel, and the reference, which sums runs of sorted ids."""
    num_weights, width, positions, share = table
    rng = np.random.default_rng(0)
    ids = np.where(rng.uniform(size=positions) < share, num_weights // 2, rng.integers(0, num_weights, positions))
    grad, indices = jnp.asarray(rng.standard_normal((positions, width), np.float32), dtype), jnp.asarray(ids, "int32")
    truth = np.zeros((num_weights, width))
    np.add.at(truth, ids, np.asarray(grad).astype(np.float64))
    if scale:
        truth /= np.maximum(np.bincount(ids, minlength=num_weights), 1)[:, None]
    for implementation in ("pallas", "reference"):

        def gradient(grad, indices):
            return aclnn.embedding_dense_backward(grad, indices, num_weights=num_weights, scale_grad_by_freq=scale)

        with lowering.use(implementation):
            lowered = jax.jit(gradient).lower(grad, indices)
        assert ("mosaic_gpu" in lowered.as_text()) == (implementation == "pallas")
        compiled = lowered.compile()
        first = np.asarray(compiled(grad, indices))
        assert all(np.asarray(compiled(grad, indices)).tobytes() == first.tobytes() for _ in range(3))
        tolerance = 0.51 * float(jnp.finfo(dtype).eps) + 1e-6 * np.sqrt(max(1, share * positions))
        np.testing.assert_allclose(
            first.astype(np.float64), truth, rtol=tolerance, atol=tolerance * np.abs(truth).max()
        )


# Rows that registers hold and that they do not, that accesses overlap in, and channels of the same kinds.
GROUPS = [((64, 1000), 1), ((8, 50257), 1), ((33, 129), 1), ((4, 21, 17, 19), 1), ((2, 700, 40, 40), 1)]


@needs_hopper
@pytest.mark.parametrize("algorithm", ["accurate", "log"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(("shape", "axis"), GROUPS, ids=str)
def test_softmax_kernels_round_once(shape, axis, dtype, algorithm):
    rng = np.random.default_rng(0)
    x, dy = (jnp.asarray(4 * rng.standard_normal(shape, np.float32), dtype) for _ in range(2))

    def both(x, dy):
        y, pull_back = jax.vjp(lambda x: softmax(x, axis=axis, algorithm=algorithm), x)
        return y, pull_back(dy)[0]

    with lowering.use("pallas"):
        lowered = jax.jit(both).lower(x, dy)
    assert lowered.as_text().count("custom_call @mosaic_gpu") == 2
    y, dx = lowered.compile()(x, dy)
    log = algorithm == "log"
    truths = softmax_oracle.forward(x, axis, log), softmax_oracle.backward(y, dy, axis, log)
    for actual, truth in zip((y, dx), truths, strict=True):
        tolerance = 0.51 * float(jnp.finfo(dtype).eps) + 1e-5
        np.testing.assert_allclose(np.asarray(actual).astype(np.float64), truth, rtol=tolerance, atol=tolerance)
