"""`linear_cross_entropy` with a margin, with operands of two dtypes, and of rows that are nearly certain."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from linear_cross_entropy_oracle import IGNORED, STRATEGIES, make_case

import lowering
from jaxops import BadParamError, linear_cross_entropy, linear_log_probs
from jaxops.linear_cross_entropy.operands import Columns, Rows, RowStatistics
from pallas_kernels._jax_private import interpret_gpu_params
from pallas_kernels.gpu.linear_cross_entropy import statistics as gpu_statistics
from pallas_kernels.tpu.linear_cross_entropy import statistics as tpu_statistics

TPU_CONFIG = {"block_rows": 8, "block_vocab": 256, "block_hidden": 16}
GPU_CONFIG = {"block_rows": 64, "block_columns": 64, "stages": 2, "copying": 1, "cluster_blocks": 1, "row_group": 1}
GPU_CONFIG |= {"vocab_splits": 3}


def with_margin(x, weight, labels, margin, softcap=np.inf):
    """The mean loss with a margin behind a softcap, and its gradients of x and weight, in float64."""
    kept = labels != IGNORED
    labels = np.where(kept, labels, 0)
    x, weight, margin = np.float64(x), np.float64(weight), np.broadcast_to(np.float64(margin), weight.shape[:1])
    rows = np.arange(labels.size)
    logits = x @ weight.T
    slope = 1.0
    if softcap < np.inf:
        bounded = np.tanh(logits / softcap)
        logits, slope = softcap * bounded, 1 - bounded**2
    logits[rows, labels] -= margin[labels]
    log_p = logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)
    cotangent = np.exp(log_p)
    cotangent[rows, labels] -= 1
    cotangent *= slope * kept[:, None] / kept.sum()
    return -(log_p[rows, labels] * kept).sum() / kept.sum(), cotangent @ weight, cotangent.T @ x


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("by_class", "cap"),
    [(False, {}), (True, {}), (False, {"softcap": 2.0})],
    ids=["number", "16 bits by class", "behind a softcap"],
)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_margin_is_subtracted_from_the_logit_of_the_label(strategy, by_class, cap, rng):
    x, weight, labels = make_case(rng, rows=(1100,), hidden=5, classes=37, ignored=0.3)
    # Which loses no digits beside logits of float32.
    margin = jnp.asarray(rng.uniform(0.1, 2, size=37), "bfloat16") if by_class else 0.35
    loss = functools.partial(linear_cross_entropy, margin=margin, strategy=strategy, chunk_rows=300, **cap)
    value, gradients = jax.jit(jax.value_and_grad(loss, (0, 1)))(x, weight, labels)
    for actual, wanted in zip((value, *gradients), with_margin(x, weight, labels, margin, **cap), strict=True):
        np.testing.assert_allclose(actual, wanted, rtol=2e-5, atol=1e-7)


@pytest.mark.slow
def test_a_margin_over_a_split_vocabulary_equals_one_device(rng):
    x, weight, labels = make_case(rng, rows=(13,), classes=32)
    margin = rng.uniform(0.1, 2, size=32).astype(np.float32)
    split = jax.shard_map(
        lambda *operands: linear_cross_entropy(*operands[:3], margin=operands[3], vocab_axis="vocab"),
        mesh=jax.make_mesh((4,), ("vocab",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4]),
        in_specs=(P(), P("vocab"), P(), P("vocab")),
        out_specs=P(),
    )
    np.testing.assert_allclose(split(x, weight, labels, margin), with_margin(x, weight, labels, margin)[0], rtol=1e-5)


def test_a_kernel_that_takes_no_margin_is_refused_by_the_field(rng):
    x, weight, labels = make_case(rng, rows=(33,), hidden=128, classes=300, dtype="bfloat16")
    gradient = jax.grad(functools.partial(linear_cross_entropy, margin=0.1))
    (row,) = lowering.explain(gradient, x, weight, labels, target="tpu-v5e").rows
    assert row.implementation == "xla_by_rows"
    assert "takes no margin" in [refusal.reason for refusal in row.refusals]


@pytest.mark.parametrize(
    ("margin", "labels", "words"),
    [
        (np.ones(3, np.float32), np.zeros(4, np.int32), "a finite number, or a floating-point array of shape [5]"),
        (np.inf, np.zeros(4, np.int32), "a finite number, or a floating-point array of shape [5]"),
        (0.1, np.full((4, 5), 0.2, np.float32), "None where labels are probabilities"),
    ],
    ids=["shape", "infinite", "probabilities"],
)
def test_margins_are_refused_in_one_sentence(margin, labels, words):
    with pytest.raises(BadParamError) as refusal:
        linear_cross_entropy(np.ones((4, 3), np.float32), np.ones((5, 3), np.float32), labels, margin=margin)
    assert str(refusal.value).startswith(f"linear_cross_entropy: margin must be {words}; got ")


@pytest.mark.sampled
@pytest.mark.parametrize(("x_dtype", "weight_dtype"), [("float32", "bfloat16"), ("bfloat16", "float32")])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_operands_of_two_dtypes_have_products_in_the_weights(strategy, x_dtype, weight_dtype, rng):
    x, weight, labels = make_case(rng, rows=(40,), hidden=16, classes=30)
    x, weight = x.astype(x_dtype), weight.astype(weight_dtype)
    loss = functools.partial(linear_cross_entropy, strategy=strategy, chunk_rows=16)
    value, gradients = jax.jit(jax.value_and_grad(loss, (0, 1)))(x, weight, labels)
    assert [gradient.dtype for gradient in gradients] == [x_dtype, weight_dtype]
    is_rounded = "linear_cross_entropy: x, float32, is rounded to the weight's dtype, bfloat16"
    assert (is_rounded in lowering.explain(loss, x, weight, labels).notes) == (x_dtype == "float32")
    rounded = np.asarray(x.astype(weight_dtype), np.float64)
    truth = with_margin(rounded, np.asarray(weight, np.float64), labels, 0.0)
    np.testing.assert_allclose(value, truth[0], rtol=1e-5)
    for actual, wanted in zip(gradients, truth[1:], strict=True):
        assert np.linalg.norm(np.float64(actual) - wanted) / np.linalg.norm(wanted) < 6e-3


@pytest.mark.sampled
@pytest.mark.parametrize("form", ["auto", "xla_prior_shift", "reference"])
def test_a_loss_of_rows_that_are_nearly_certain_keeps_its_digits(form, rng):
    """Of about 4e-7: added to the 1 of the label, the small exponentials of most columns would be lost."""
    x, weight = (rng.normal(size=size).astype(np.float32) for size in ((64, 24), (16500, 24)))
    weight *= 0.05
    bias, labels = np.zeros(16500, np.float32), np.full(64, 7)
    bias[7] = 24.3
    logits = np.float64(x) @ np.float64(weight).T + bias
    others = np.delete(logits - logits[:, 7:8], 7, axis=1)
    truth = np.log1p(np.exp(others).sum(-1))
    assert truth.mean() < 1e-6
    with lowering.use(linear_cross_entropy_sum_with_gradients=form):
        loss = functools.partial(linear_cross_entropy, bias=bias, reduction="sum")
        value, _ = jax.jit(jax.value_and_grad(loss))(x, weight, labels)
    # Beside the 1, a row's sum has the digits that plain jnp gives it; with a shift known before, all of float32.
    tolerance = 1e-4 if form == "xla_prior_shift" else 0.25
    np.testing.assert_allclose(value, truth.sum(), rtol=tolerance)
    log_probs = jax.jit(functools.partial(linear_log_probs, bias=bias))(x, weight, labels)
    np.testing.assert_allclose(np.asarray(log_probs, np.float64).sum(), -truth.sum(), rtol=0.25)


@pytest.mark.long
@pytest.mark.parametrize(
    ("run", "config", "interpret"),
    [
        (tpu_statistics.run, TPU_CONFIG, pltpu.InterpretParams()),
        (gpu_statistics.run, GPU_CONFIG, interpret_gpu_params()),
    ],
    ids=["tpu", "gpu"],
)
def test_kernels_keep_the_digits_of_rows_that_are_nearly_certain(run, config, interpret, rng):
    x, weight = (rng.normal(size=size).astype(jnp.bfloat16) for size in ((8, 16), (2000, 16)))
    weight, labels, bias = weight / 16, np.full(8, 7, np.int32), np.zeros(2000, np.float32)
    bias[7] = 22.3
    logits = np.asarray(x, np.float64) @ np.asarray(weight, np.float64).T + bias
    truth = np.log1p(np.exp(np.delete(logits - logits[:, 7:8], 7, axis=1)).sum(-1))
    assert truth.max() < 1e-6
    operands = Rows(jnp.asarray(x), jnp.asarray(labels)), Columns(jnp.asarray(weight), jnp.asarray(bias))
    run = functools.partial(run, softcap=None, metrics=False, config=config, interpret=interpret)
    found = RowStatistics(*jax.jit(run)(*operands))
    np.testing.assert_array_equal(found.label_logit, 0)
    np.testing.assert_allclose(np.float64(found.log_sum_exp).sum(), truth.sum(), rtol=0.05)
