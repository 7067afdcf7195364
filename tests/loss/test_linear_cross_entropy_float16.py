"""Gradients of linear cross entropy in float16, where the gradient of a logit leaves float16's range.

It is p times the cotangent of its row: 1 / rows for a mean, and a loss scale besides. The truth is NumPy's in float64.
"""

import functools
import types

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from linear_cross_entropy_oracle import STRATEGIES

import lowering
from jaxops import aclnn
from jaxops.linear_cross_entropy import linear_cross_entropy, linear_log_probs
from jaxops.linear_cross_entropy.operands import Columns, CotangentTerms, Needs, Rows
from pallas_kernels.gpu.linear_cross_entropy import gradients as gpu_gradients
from pallas_kernels.gpu.linear_cross_entropy import vocab_parallel as gpu_vocab_parallel
from pallas_kernels.hardware import Hardware
from pallas_kernels.tpu.linear_cross_entropy import backward as tpu_backward

CLASSES = 1024
LABELLED = CLASSES // 2  # the classes from here on are no label


def make_case(rows=128, classes=CLASSES, hidden=16, *, mean=1.0, spread=0.3, weight_spread=0.3, seed=0):
    rng = np.random.default_rng(seed)
    x = mean + spread * rng.normal(size=(rows, hidden))
    weight = weight_spread * rng.normal(size=(classes, hidden))
    return jnp.asarray(x, "float16"), jnp.asarray(weight, "float16"), rng.integers(0, classes // 2, rows)


def probabilities(x, weight):
    z = np.asarray(x, np.float64) @ np.asarray(weight, np.float64).T
    p = np.exp(z - z.max(-1, keepdims=True))
    return z, p / p.sum(-1, keepdims=True)


def truth(x, weight, labels, cotangents, entropy_cotangents=0.0):
    """The gradients of x and weight from those of each row's loss and entropy."""
    z, p = probabilities(x, weight)
    labelled = np.eye(len(weight))[labels]
    dz = np.reshape(cotangents, (-1, 1)) * (p - labelled)
    dz = dz - np.reshape(entropy_cotangents, (-1, 1)) * p * (z - (p * z).sum(-1, keepdims=True))
    return dz @ np.asarray(weight, np.float64), dz.T @ np.asarray(x, np.float64)


def error(grad, true):
    return np.linalg.norm(np.asarray(grad, np.float64) - true) / np.linalg.norm(true)


def assert_accurate(grads, truths, labelled=LABELLED):
    (x_grad, weight_grad), (x_true, weight_true) = grads, truths
    assert x_grad.dtype == weight_grad.dtype == jnp.float16
    assert error(x_grad, x_true) <= 1e-3
    assert error(weight_grad, weight_true) <= 1e-3
    assert error(weight_grad[labelled:], weight_true[labelled:]) <= 5e-3


def gradients(loss, x, weight):
    return jax.jit(jax.grad(loss, (0, 1)))(x, weight)


SCALES = {  # the cotangent of each row, and how large x is for gradients that float16 can hold
    "tiny": (2.0**-13, {}),
    "huge": (2.0**17, {"mean": 0.1, "spread": 0.03, "weight_spread": 0.1}),
}


@pytest.mark.sampled
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("form", ["sum", "mean", "none", "aux"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_linear_cross_entropy_float16_gradients_equal_float64(strategy, form, scale):
    factor, sizes = SCALES[scale]
    x, weight, labels = make_case(**sizes)

    def loss(x, weight):
        call = functools.partial(linear_cross_entropy, x, weight, labels, strategy=strategy)
        if form == "aux":
            return factor * call(reduction="sum", return_aux=True)[0]
        return factor * (len(labels) if form == "mean" else 1) * jnp.sum(call(reduction=form))

    assert_accurate(gradients(loss, x, weight), truth(x, weight, labels, np.full(len(labels), factor)))


@pytest.mark.parametrize("scale", SCALES)
def test_linear_log_probs_float16_gradients_of_entropies_equal_float64(scale):
    factor, sizes = SCALES[scale]
    x, weight, labels = make_case(**sizes)

    def loss(x, weight):
        log_probs, entropies = linear_log_probs(x, weight, labels, return_entropy=True)
        return factor * jnp.sum(0.5 * entropies - log_probs)

    assert_accurate(gradients(loss, x, weight), truth(x, weight, labels, np.full(len(labels), factor), factor / 2))


@functools.cache
def full_case(rows):
    """The operands, and the gradients of the sum of all losses."""
    operands = make_case(rows, 4096, 64, mean=0.0)
    return operands, truth(*operands, np.ones(rows))


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "rows"), [("auto", 8192), *((strategy, 4096) for strategy in STRATEGIES)])
@pytest.mark.parametrize("form", ["mean", "mean, loss scale of 2^17", "none", "aux"])
def test_linear_cross_entropy_float16_gradients_equal_float64_in_full(strategy, form, rows):
    (x, weight, labels), of_sum = full_case(rows)
    factor = 2.0**17 if "2^17" in form else 1.0

    def loss(x, weight):
        call = functools.partial(linear_cross_entropy, x, weight, labels, strategy=strategy)
        if form == "none":
            return jnp.mean(call(reduction="none"))
        return call(return_aux=True)[0] if form == "aux" else factor * call()

    assert_accurate(gradients(loss, x, weight), [factor / rows * gradient for gradient in of_sum], 2048)


@pytest.mark.parametrize("strategy", ["recompute"])
def test_linear_cross_entropy_float16_rows_of_different_cotangents_keep_their_digits(strategy):
    """From 2^-20 to 2^4: most rows are far below the largest, and together as large."""
    x, weight, labels = make_case()
    cotangents = np.where(np.arange(128) == 5, 2.0**4, 2.0 ** -np.linspace(2, 20, 128))

    def loss(x, weight):
        losses = linear_cross_entropy(x, weight, labels, strategy=strategy, reduction="none")
        return jnp.sum(jnp.asarray(cotangents, losses.dtype) * losses)

    grads, truths = gradients(loss, x, weight), truth(x, weight, labels, cotangents)
    assert_accurate(grads, truths)
    # Each row's own gradient, as far as float16 holds it.
    held = cotangents > 2.0**-10
    errors = [error(one, true) for one, true in zip(grads[0][held], truths[0][held], strict=True)]
    assert max(errors) <= 2e-3


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_linear_cross_entropy_float16_gradients_of_small_class_weights_equal_float64(strategy):
    x, weight, labels = make_case()
    class_weight = np.where(np.arange(CLASSES) % 2, 2.0**-12, 2.0**-14)

    def loss(x, weight):
        call = functools.partial(linear_cross_entropy, class_weight=class_weight, strategy=strategy, reduction="sum")
        return call(x, weight, labels)

    assert_accurate(gradients(loss, x, weight), truth(x, weight, labels, class_weight[labels]))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_linear_cross_entropy_float16_gradients_of_probabilities_equal_float64(strategy):
    """Probabilities q of every class, softly capped logits, smoothing s and z-loss: every term of the cotangent."""
    x, weight, _ = make_case(32, 256)
    cap, factor, smoothing, z_loss = 4.0, 2.0**-12, 0.1, 0.05
    q = np.random.default_rng(1).dirichlet(np.full(256, 0.05), 32)
    q = np.asarray(jnp.asarray(q, "float32"), np.float64)

    def loss(x, weight):
        attributes = {"softcap": cap, "label_smoothing": smoothing, "z_loss": z_loss, "strategy": strategy}
        return factor * linear_cross_entropy(x, weight, jnp.asarray(q, "float32"), reduction="sum", **attributes)

    tanh = np.tanh(np.asarray(x, np.float64) @ np.asarray(weight, np.float64).T / cap)
    exp = np.exp(cap * tanh)
    lse = np.log(exp.sum(-1, keepdims=True))
    target = (1 - smoothing) * q + smoothing / 256
    dz = (target.sum(-1, keepdims=True) + 2 * z_loss * lse) * exp / exp.sum(-1, keepdims=True) - target
    dz = factor * dz * (1 - tanh**2)
    truths = dz @ np.asarray(weight, np.float64), dz.T @ np.asarray(x, np.float64)
    assert_accurate(gradients(loss, x, weight), truths, 0)


def test_linear_cross_entropy_float16_gradients_over_a_split_vocabulary_equal_float64():
    x, weight, labels = make_case()
    mesh = jax.make_mesh((8,), ("model",), axis_types=(AxisType.Auto,))

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(P(), P("model")), out_specs=P())
    def loss(x, weight):
        return 2.0**-13 * linear_cross_entropy(x, weight, labels, vocab_axis="model", reduction="sum")

    assert_accurate(gradients(loss, x, weight), truth(x, weight, labels, np.full(128, 2.0**-13)))


@pytest.mark.sampled
@pytest.mark.parametrize("form", ["automatic", "explicit", "vmap", "export"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_linear_cross_entropy_float16_gradients_transform_and_split_over_devices(strategy, form):
    x, weight, labels = make_case()
    loss = functools.partial(linear_cross_entropy, strategy=strategy, reduction="sum", chunk_rows=32)
    step = jax.grad(lambda x, weight, labels: 2.0**-13 * loss(x, weight, labels), (0, 1))
    if form == "vmap":
        mapped = jax.jit(jax.vmap(step, (0, None, 0)))(x.reshape(2, 64, 16), weight, labels.reshape(2, 64))
        x_grad, weight_grad = (np.asarray(grad, np.float64) for grad in mapped)
        truths = truth(x, weight, labels, np.full(128, 2.0**-13))
        assert error(x_grad.reshape(128, 16), truths[0]) <= 1e-3
        assert error(weight_grad.sum(0), truths[1]) <= 1e-3
        return
    if form == "export":
        exported = jax.export.export(jax.jit(step), platforms=["cpu", "cuda", "tpu"])(x, weight, labels)
        grads = jax.jit(jax.export.deserialize(exported.serialize()).call)(x, weight, labels)
    else:
        axis_type = AxisType.Explicit if form == "explicit" else AxisType.Auto
        mesh = jax.make_mesh((8,), ("data",), axis_types=(axis_type,))
        specs = P("data"), P(), P("data")
        placed = [jax.device_put(v, NamedSharding(mesh, s)) for v, s in zip((x, weight, labels), specs, strict=True)]
        grads = jax.jit(step)(*placed)
    assert_accurate(grads, truth(x, weight, labels, np.full(128, 2.0**-13)))


@pytest.mark.parametrize("given", ["softmax", "statistics"])
@pytest.mark.parametrize("scale", SCALES)
def test_aclnn_float16_gradients_equal_float64(scale, given):
    factor, sizes = SCALES[scale]
    x, weight, labels = make_case(**sizes)
    z, p = probabilities(x, weight)
    maximum = z.max(-1)
    statistics = {"logits_max": maximum, "sum_exp_logits": np.exp(z - maximum[:, None]).sum(-1)}
    operands = {"softmax": p} if given == "softmax" else statistics
    grads = aclnn.fused_linear_cross_entropy_loss_grad(
        jnp.full(128, factor, "float32"),
        x,
        weight,
        np.zeros(128, bool),
        jnp.asarray(labels, "int32"),
        **{name: jnp.asarray(value, "float32") for name, value in operands.items()},
    )
    assert_accurate(grads, truth(x, weight, labels, np.full(128, factor)))


@pytest.mark.sampled
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_linear_cross_entropy_float16_gradients_of_nothing_are_zero(strategy):
    """Rows that are ignored, whose cotangents are zero, have no part in how others are scaled."""
    x, weight, labels = make_case(32)
    ignored = np.where(np.arange(32) < 16, -100, labels)
    loss = functools.partial(linear_cross_entropy, strategy=strategy, reduction="sum")
    grads = gradients(lambda x, weight: 0.0 * loss(x, weight, labels), x, weight)
    assert not any(np.any(np.asarray(grad)) for grad in grads)
    grads = gradients(lambda x, weight: 2.0**-11 * loss(x, weight, ignored), x, weight)
    assert not np.any(np.asarray(grads[0][:16]))
    assert_accurate(grads, truth(x, weight, labels, 2.0**-11 * (np.arange(32) >= 16)))


@pytest.mark.sampled
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_linear_cross_entropy_float16_second_derivatives_equal_float32s(strategy):
    """Along a direction as large as a training step never is, and through a row whose cotangent is zero here alone."""
    x, weight, labels = make_case(16, 64)
    rng = np.random.default_rng(2)
    offsets = (np.arange(16) > 3).astype(np.float32)
    direction = jnp.asarray(100 * rng.normal(size=x.shape), "float16")

    def slope(x, weight):
        def loss(x):
            losses = linear_cross_entropy(x, weight, labels, strategy=strategy, reduction="none")
            return 2.0**-8 * jnp.sum(jnp.square(losses - jax.lax.stop_gradient(losses) + offsets))

        return jax.jvp(jax.grad(loss), (x,), (direction.astype(x.dtype),))[1]

    found = jax.jit(slope)(x, weight)
    true = jax.jit(slope)(x.astype(jnp.float32), weight.astype(jnp.float32))
    assert found.dtype == jnp.float16
    assert np.isfinite(np.asarray(found)).all()
    assert error(found, np.asarray(true, np.float64)) <= 2e-3


TILES = {"block_rows": 64, "block_columns": 256, "stages": 2, "copying": 1, "cluster_blocks": 1, "row_group": 1}
KERNEL_SIZES = {**TILES, "vocab_splits": 1, "chunk_columns": 1024, "store_slots": 2}


@pytest.mark.sampled
@pytest.mark.parametrize("scale", ["tiny", pytest.param("huge", marks=pytest.mark.slow)])
@pytest.mark.parametrize("operator", ["linear_cross_entropy", "aclnn"])
def test_linear_cross_entropy_float16_gradients_of_the_gpu_kernels_equal_float64(operator, scale):
    """In Mosaic GPU's interpreter."""
    factor, sizes = SCALES[scale]
    x, weight, labels = make_case(**sizes)
    z, p = probabilities(x, weight)
    maximum, row = z.max(-1), np.full(128, factor, np.float32)
    total = np.exp(z - maximum[:, None]).sum(-1)
    maximum, total, labels = (
        jnp.asarray(v, d) for v, d in ((maximum, "float32"), (total, "float32"), (labels, "int32"))
    )
    if operator == "aclnn":
        run = functools.partial(gpu_vocab_parallel.run_grad, config=KERNEL_SIZES, interpret=True)
        operands = (row, x, weight, np.zeros(128, bool), labels, maximum, total, None)
    else:
        run = functools.partial(gpu_gradients.run, config=KERNEL_SIZES, interpret=True, softcap=None)
        run = functools.partial(run, needs=Needs(x=True, weight=True, bias=True))
        terms = CotangentTerms(row, maximum, jnp.log(total), -row)
        operands = (terms, Rows(x, labels), Columns(weight, jnp.zeros(CLASSES)))
    assert str(jax.make_jaxpr(run)(*operands)).count("linear_cross_entropy_backward") >= 1
    x_grad, weight_grad, *bias_grad = jax.tree.leaves(jax.jit(run)(*operands))
    truths = truth(x, weight, np.asarray(labels), row)
    assert_accurate((x_grad, weight_grad), truths)
    assert len(bias_grad) == (operator != "aclnn")
    for grad in bias_grad:
        assert error(grad, factor * (p.sum(0) - np.bincount(labels, minlength=CLASSES))) <= 1e-3


def test_linear_cross_entropy_kernels_for_tpus_refuse_float16():
    """Their matrix units take no float16: there the reference runs, which is held to float64 above."""

    def array(*shape, dtype="float16"):
        return types.SimpleNamespace(shape=shape, dtype=dtype)

    terms = CotangentTerms(*[array(8, dtype="float32")] * 4)
    operands = terms, Rows(array(8, 64), array(8)), Columns(array(100, 64))
    assert "x is float16" in tpu_backward.KERNEL.refuses(Hardware("tpu-v5e", "tpu"), *operands)
    x, weight, labels = make_case()
    loss = functools.partial(linear_cross_entropy, strategy="recompute", reduction="sum")
    with lowering.use("auto"):
        step = jax.jit(jax.grad(loss, (0, 1))).trace(x, weight, labels).lower(lowering_platforms=("tpu",))
    assert "tpu_custom_call" not in step.as_text()


@pytest.mark.long
def test_linear_cross_entropy_over_a_split_vocabulary_takes_the_gpu_kernels_in_float16():
    """There the gradient of x is float32 until it is added up over devices."""
    x, weight, labels = make_case()
    mesh = jax.make_mesh((8,), ("model",), axis_types=(AxisType.Auto,))

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(P(), P("model")), out_specs=P())
    def loss(x, weight):
        return linear_cross_entropy(x, weight, labels, vocab_axis="model", strategy="recompute")

    with lowering.use("pallas"):
        step = jax.jit(jax.grad(loss, (0, 1))).trace(x, weight).lower(lowering_platforms=("cuda",))
    assert step.as_text().count("stablehlo.custom_call @mosaic_gpu") == 2
