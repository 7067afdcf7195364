"""`linear_cross_entropy` computed in pieces: tiles of the vocabulary, chunks of rows, and chunks that are skipped."""

import functools

import contract
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from linear_cross_entropy_oracle import (
    IGNORED,
    STRATEGIES,
    assert_equals_float64,
    expected,
    make_case,
    value_and_gradients,
)
from linear_cross_entropy_rows_oracle import expected_statistics, make_operands

from jaxops.linear_cross_entropy import linear_cross_entropy
from jaxops.linear_cross_entropy.fold_rows import kept_rows
from jaxops.linear_cross_entropy.operands import SKIPPED, Rows
from jaxops.linear_cross_entropy.operator import statistics_by_columns
from jaxops.linear_cross_entropy.row_statistics import Logits
from jaxops.testing.meshes import gathered_sizes
from lowering.operators import Place

# More rows than two chunks have, where chunks may be skipped.
MANY = 1100


@pytest.mark.sampled
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("classes", [50257, 128256])
def test_linear_cross_entropy_counts_no_padding_of_a_vocabulary(classes, strategy, rng):
    case = make_case(rng, rows=(5,), hidden=3, classes=classes)
    # The last classes of all, which any padding would be beside.
    case[2][:2] = classes - 1, 0
    options = {"strategy": strategy, "chunk_rows": 2}
    assert_equals_float64(value_and_gradients(*case, **options), case, options)


@pytest.mark.sampled
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("classes", contract.first_in_every_run([50, 48, 7]))
def test_linear_cross_entropy_of_many_rows_equals_float64(classes, strategy, rng):
    x, weight, labels = make_case(rng, rows=(MANY,), hidden=4, classes=classes, ignored=0.5)
    poisoned = x.at[labels == IGNORED].set(jnp.nan)
    bias, class_weight = (rng.uniform(0.2, 2, size=classes).astype(np.float32) for _ in range(2))
    options = {"bias": bias, "class_weight": class_weight, "label_smoothing": 0.1, "z_loss": 0.01, "softcap": 3.0}
    options |= {"strategy": strategy, "chunk_rows": 300}
    actual = value_and_gradients(poisoned, weight, labels, **options)
    assert_equals_float64(actual, (x, weight, labels), options, rtol=5e-5)


@pytest.mark.sampled
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("kept", [0, 1, MANY], ids=["none", "one", "all"])
def test_linear_cross_entropy_skips_chunks(kept, strategy, rng):
    x, weight, labels = make_case(rng, rows=(2, MANY // 2), ignored=0)
    labels.reshape(-1)[: MANY - kept] = IGNORED
    # exp(bias) overflows: what is computed of a skipped row must not be used.
    options = {"strategy": strategy, "chunk_rows": 300, "reduction": "sum", "bias": np.full(7, 120, np.float32)}
    actual = value_and_gradients(x, weight, labels, **options)
    assert_equals_float64(actual, (x, weight, labels), options, rtol=5e-5)


def test_weight_gradient_may_be_added_up_in_bfloat16(rng):
    x, weight, labels = make_case(rng, rows=(512,), hidden=32, classes=130, dtype="bfloat16", ignored=0)
    options = {"strategy": "grad_in_forward", "chunk_rows": 64, "weight_grad_dtype": "bfloat16"}
    loss, x_grad, weight_grad = value_and_gradients(x, weight, labels, **options)
    true_loss, true_x, true_weight = expected(x, weight, labels)[:3]
    np.testing.assert_allclose(loss, true_loss, rtol=2e-6)
    x_error, weight_error = (
        np.linalg.norm(np.float64(actual) - truth) / np.linalg.norm(truth) * 2**9
        for actual, truth in ((x_grad, true_x), (weight_grad, true_weight))
    )
    # Eight chunks: the error of the documented size, which shows that they were added in bfloat16.
    assert x_error < 1.2
    assert 1.2 < weight_error < 2.4


@pytest.mark.sampled
@pytest.mark.parametrize("return_aux", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_whole_chunks_of_ignored_rows_are_left_out_unless_aux_is_returned(strategy, return_aux, rng, monkeypatch):
    x, weight, labels = make_case(rng, rows=(MANY,), hidden=2, classes=11)
    labels[:] = IGNORED
    labels[7::100] = 3
    counts: list[int] = []
    logits_of = Logits.of

    def counted(rows, columns, softcap):
        jax.debug.callback(lambda: counts.append(rows.x.shape[0] * columns.weight.shape[0]))
        return logits_of(rows, columns, softcap)

    monkeypatch.setattr(Logits, "of", counted)
    options = {"strategy": strategy, "chunk_rows": MANY // 2, "reduction": "sum", "return_aux": return_aux}
    loss = functools.partial(linear_cross_entropy, **options)
    jax.block_until_ready(jax.jit(jax.value_and_grad(loss, has_aux=return_aux))(x, weight, labels))
    jax.effects_barrier()
    # "recompute" computes logits again for the gradients.
    passes = 2 if strategy == "recompute" else 1
    all_logits = passes * labels.size * weight.shape[0]
    assert sum(counts) >= all_logits if return_aux else 0 < sum(counts) <= all_logits // 2


@pytest.mark.sampled
@pytest.mark.parametrize(("platform", "kept"), [("cpu", 4), ("cpu", 0), ("tpu", 4), ("tpu", 0)])
def test_tuning_store_rows_run_no_step_without_a_row_that_counts(platform, kept, monkeypatch):
    """Eleven rows in chunks of three, so that one is filled up. On TPUs, sums start from memory that holds anything."""
    monkeypatch.setattr(jax.lax, "empty", lambda shape, dtype: jnp.full(shape, 99, dtype))
    labels = np.full((1, 11), SKIPPED)
    labels[0, [1, 3, 7, 8][:kept]] = [3, -1, 0, 5][:kept]
    x, weights = np.arange(22.0).reshape(1, 11, 2) + 1, np.linspace(1, 2, 11).reshape(1, 11)

    def step(sums, rows):
        x, labels, weights = rows
        total, steps = sums
        total = total + jnp.sum(jnp.where(labels == SKIPPED, 0, weights))
        return (x * weights[:, None], weights), (total, steps + 1)

    @jax.jit
    def mapped(labels, x, weights):
        kept = kept_rows(Rows(x, labels), Place(platform), 3)
        return kept.map(step, (jnp.float32(0), jnp.int32(0)), (x, labels, weights))

    results, (total, steps) = mapped(labels, x, weights)
    # Four rows fill a chunk and a third of the next, whose others are the first of the rest. A TPU takes at least one
    # chunk, which writes the sums.
    assert steps == (2 if kept else int(platform == "tpu"))
    np.testing.assert_allclose(total, weights[labels != SKIPPED].sum(), rtol=1e-6)
    computed = np.flatnonzero(labels[0] != SKIPPED)
    computed = np.append(computed, np.flatnonzero(labels[0] == SKIPPED)[: 3 * steps - kept])
    for actual, wanted in zip(results, (x * weights[..., None], weights), strict=True):
        assert actual.shape == wanted.shape
        np.testing.assert_allclose(actual[0, computed], wanted[0, computed], rtol=1e-6)
        assert not np.any(np.delete(actual[0], computed, 0))


def test_tuning_store_rows_that_all_count_stay_in_place():
    x = jnp.arange(11.0)
    kept = kept_rows(Rows(x[:, None], jnp.zeros(11, jnp.int32)), Place("cpu"), 3)
    np.testing.assert_array_equal(kept.restore(kept.take((x, x[:, None])))[1][:, 0], x)


@pytest.mark.parametrize("device_count", [1, 2])
def test_rows_are_only_reordered_on_one_device(device_count):
    rows = Rows(jnp.zeros((12, 2)), jnp.zeros(12, jnp.int32))
    assert kept_rows(rows, None, 3) is None
    assert (kept_rows(rows, Place("tpu", device_count), 3) is not None) == (device_count == 1)
    assert kept_rows(rows._replace(labels=None, probabilities=jnp.zeros((12, 3))), Place("tpu"), 3) is None


@pytest.mark.parametrize("metrics", [False, True])
def test_row_statistics_as_tpus_compute_them_equal_float64(metrics, rng):
    """TPUs compare each column with the label and each logit with the maximum; of equal maxima, the first counts."""
    rows, columns = make_operands(rng, rows=MANY, classes=23, bias=True)
    columns = jax.tree.map(lambda x: x.at[20:].set(x[2:5]), columns)
    run = functools.partial(statistics_by_columns, softcap=None, chunk_rows=300, metrics=metrics)
    computed = functools.partial(run, place=Place("tpu"))
    on_cpu, on_tpu = (
        str(jax.make_jaxpr(functools.partial(run, place=Place(name)))(rows, columns)) for name in ("cpu", "tpu")
    )
    assert on_tpu.count("gather[") < on_cpu.count("gather[")
    assert "argmax" not in on_tpu
    actual, counts = jax.jit(computed)(rows, columns), np.asarray(rows.labels) != SKIPPED
    for found, wanted in zip(actual, expected_statistics(rows, columns, metrics=metrics), strict=True):
        assert (found is None) == (wanted is None)
        if found is not None:
            is_compared = counts | metrics
            np.testing.assert_allclose(found[is_compared], wanted[is_compared], rtol=1e-5, atol=2e-5)
    with_nan = jax.jit(computed)(rows._replace(x=rows.x.at[5, 0].set(jnp.nan)), columns)
    assert jnp.isnan(with_nan.log_sum_exp[5])
    assert with_nan.prediction is None or with_nan.prediction[5] == 0


@pytest.mark.sampled
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_linear_cross_entropy_allows_a_tile_of_forbidden_classes(strategy, rng):
    x, weight, labels = make_case(rng, rows=(9,), classes=64)
    bias = np.where(np.arange(64) < 40, 0, -np.inf).astype(np.float32)
    labels = np.where(labels == IGNORED, IGNORED, labels % 40)
    loss = functools.partial(linear_cross_entropy, labels=labels, bias=bias, strategy=strategy, chunk_rows=2)
    truth, x_grad, weight_grad, _ = expected(x, weight[:40], labels)
    tangents = rng.normal(size=x.shape).astype(np.float32), rng.normal(size=weight.shape).astype(np.float32)
    value, tangent = jax.jit(functools.partial(jax.jvp, loss))((x, weight), tangents)
    np.testing.assert_allclose(value, truth, rtol=1e-5)
    np.testing.assert_allclose(
        tangent, np.sum(x_grad * tangents[0]) + np.sum(weight_grad * tangents[1][:40]), rtol=1e-4
    )
    grads = jax.jit(jax.grad(loss, (0, 1)))(x, weight)
    contract.assert_close(grads, (x_grad, np.concatenate([weight_grad, np.zeros((24, 6))])))


@pytest.mark.sampled
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_linear_cross_entropy_sums_equal_labels_in_float32(strategy):
    # In bfloat16, a sum of 40960 terms of -7 / 8 would stop at -256.
    rows = 40960
    x, weight = jnp.ones((rows, 2), jnp.bfloat16), jnp.zeros((8, 2), jnp.bfloat16)
    loss = functools.partial(linear_cross_entropy, strategy=strategy, reduction="sum", chunk_rows=4096)
    grad = jax.jit(jax.grad(loss, 1))(x, weight, np.zeros(rows, np.int32)).astype(jnp.float32)
    np.testing.assert_array_equal(grad[0], -rows * 7 / 8)
    np.testing.assert_array_equal(grad[1:], rows / 8)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_linear_cross_entropy_aux_has_no_derivative(strategy, rng):
    x, weight, labels = make_case(rng, classes=64)

    def total(x):
        loss, aux = linear_cross_entropy(x, weight, labels, return_aux=True, strategy=strategy, chunk_rows=4)
        return loss + jnp.sum(aux.lse) + jnp.sum(aux.entropy)

    contract.assert_close(jax.jit(jax.grad(total))(x), expected(x, weight, labels)[1])


def test_linear_cross_entropy_aux_costs_no_product_beside_gradients_in_the_forward_pass(rng):
    x, weight, labels = make_case(rng, classes=64)

    def products(**options):
        def loss(x, weight):
            result = linear_cross_entropy(x, weight, labels, strategy="grad_in_forward", chunk_rows=4, **options)
            return result if options else (result, None)

        step = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))
        return step.lower(x, weight).as_text().count("stablehlo.dot_general")

    assert products(return_aux=True) == products() == 3


def test_linear_cross_entropy_aux_costs_nothing_unused(rng):
    x, weight, labels = make_case(rng, classes=1024)

    def loss(x, return_aux):
        result = linear_cross_entropy(x, weight, labels, return_aux=bool(return_aux))
        return (result[0], result[1].prediction) if return_aux == "used" else result[0] if return_aux else result

    logits_size = 13 * 1024
    compiled = [jax.jit(loss, static_argnums=1).lower(x, aux).compile() for aux in ("used", True, False)]
    used, unused, without = (program.cost_analysis()["flops"] for program in compiled)
    # Of single rows there is more to do, as which of x are finite; but nothing of each logit.
    assert without <= unused < without + logits_size / 2
    assert used > unused + logits_size


def test_linear_cross_entropy_meets_its_memory_targets():
    shapes = (2048, 512), (32000, 512)
    x, weight = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)
    labels = jax.ShapeDtypeStruct((2048,), jnp.int32)
    temporaries = {}
    for strategy in STRATEGIES:
        fn = jax.value_and_grad(functools.partial(linear_cross_entropy, strategy=strategy), (0, 1))
        compiled = jax.jit(fn).lower(x, weight, labels).compile()
        temporaries[strategy] = compiled.memory_analysis().temp_size_in_bytes
    logits_bytes = 2 * 2048 * 32000 * 4  # what the plain path takes: logits, and their gradient
    assert temporaries["grad_in_forward"] <= 0.2 * logits_bytes
    assert temporaries["recompute"] <= 0.05 * logits_bytes


@pytest.mark.long
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("strategy", contract.first_in_every_run(STRATEGIES))
def test_linear_cross_entropy_in_tiles_leaves_a_split_weight_split(strategy, axis_type, rng):
    mesh = jax.make_mesh((2, 4), ("data", "vocab"), axis_types=(axis_type,) * 2)
    x, weight, labels = make_case(rng, rows=(32,), classes=96)
    specs = (P("data"), P("vocab"), P("data"))
    placed = [jax.device_put(v, NamedSharding(mesh, spec)) for v, spec in zip((x, weight, labels), specs, strict=True)]
    fn = jax.value_and_grad(functools.partial(linear_cross_entropy, strategy=strategy, chunk_rows=8), (0, 1))
    compiled = jax.jit(fn).lower(*placed).compile()
    results = compiled(*placed)
    contract.assert_close(results, jax.jit(fn)(x, weight, labels))
    largest = max(gathered_sizes(compiled.as_text()), default=0)
    # No part of x, of the weight or of the logits is gathered; row statistics may be.
    assert largest < x.size // 2
    assert [grad.sharding.spec[0] for grad in results[1]] == ["data", "vocab"]


@pytest.mark.long
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_linear_cross_entropy_skips_other_chunks_on_each_device(strategy, rng):
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    x, weight, labels = make_case(rng, rows=(2 * MANY,), ignored=0)
    labels[:MANY] = IGNORED

    def loss(x, weight, labels):
        return linear_cross_entropy(x, weight, labels, strategy=strategy, chunk_rows=300, reduction="sum")

    def total(x, weight, labels):
        return jax.lax.psum(loss(x, weight, labels), "data")

    sharded = jax.shard_map(total, mesh=mesh, in_specs=(P("data"), P(), P("data")), out_specs=P())
    results = jax.jit(jax.value_and_grad(sharded, (0, 1)))(x, weight, labels)
    truth, x_grad, weight_grad, _ = expected(x, weight, labels, reduction="sum")
    np.testing.assert_allclose(results[0], truth, rtol=1e-5)
    np.testing.assert_allclose(results[1][0], x_grad, atol=1e-5)
    np.testing.assert_allclose(results[1][1], weight_grad, atol=1e-3)


def test_linear_cross_entropy_allows_the_first_class_to_be_forbidden(rng):
    """No row has that label, but rows that fill up a chunk must have none either."""
    x, weight, labels = make_case(rng, rows=(47,), ignored=0)
    bias = jnp.where(jnp.arange(7) == 0, -jnp.inf, 0.0)
    loss, *gradients = value_and_gradients(
        x, weight, np.maximum(labels, 1), bias=bias, strategy="grad_in_forward", chunk_rows=16
    )
    truth = expected(x, weight[1:], np.maximum(labels, 1) - 1)
    np.testing.assert_allclose(loss, truth[0], rtol=1e-6)
    np.testing.assert_allclose(gradients[0], truth[1], rtol=1e-4, atol=1e-7)
