"""Weights of rows in `linear_cross_entropy`, and conventions of label smoothing, against NumPy float64 and optax."""

import functools
import re

import contract
import jax
import jax.numpy as jnp
import numpy as np
import optax
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

from jaxops import BadParamError, linear_cross_entropy

TERMS = {"label_smoothing": 0.2, "z_loss": 0.02, "softcap": 2.0}


def draw(rng, by="labels", rows=(13,)):
    """x, weight, labels; the weights of rows as they count, and as they are given; and options."""
    x, weight, labels = make_case(rng, rows=rows)
    if by == "probabilities":
        labels = rng.dirichlet(np.ones(7), size=rows).astype(np.float32)
    by_row = rng.uniform(-0.5, 2, size=rows).astype(np.float32)
    given = by_row.copy()
    if by == "labels":
        given[labels == IGNORED] = np.nan
    vectors = rng.normal(size=7).astype(np.float32), rng.uniform(0.2, 2, size=7).astype(np.float32)
    return (x, weight, labels), by_row, given, TERMS | dict(zip(("bias", "class_weight"), vectors, strict=True))


@pytest.mark.sampled
@pytest.mark.parametrize("by", ["labels", "probabilities"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_row_weight_equals_float64(strategy, by, rng):
    operands, by_row, given, options = draw(rng, by)
    reductions = ("mean",) if strategy == "grad_in_forward" else ("mean", "none")
    for reduction in reductions:
        options |= {"reduction": reduction, "strategy": strategy, "chunk_rows": 4}
        actual = value_and_gradients(*operands, row_weight=given, **options)
        assert_equals_float64(actual, operands, options | {"row_weight": by_row}, rtol=5e-5)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("by", contract.first_in_every_run(["labels", "probabilities"]))
def test_gradient_of_row_weight_equals_float64(by, strategy, rng):
    operands, by_row, given, options = draw(rng, by)
    losses = expected(*operands, reduction="none", **options)[0]
    kept = np.ones(13, bool) if by == "probabilities" else operands[2] != IGNORED
    of_label = np.ones(13) if by == "probabilities" else options["class_weight"][np.where(kept, operands[2], 0)]
    total, divisor = np.sum(by_row * losses), np.sum(np.where(kept, by_row * of_label, 0))
    truth = {"sum": losses, "mean": np.where(kept, losses / divisor - total * of_label / divisor**2, 0)}
    for reduction, gradient in truth.items():
        loss = functools.partial(linear_cross_entropy, *operands, reduction=reduction, strategy=strategy, **options)
        actual = jax.jit(jax.grad(lambda row_weight, loss=loss: loss(row_weight=row_weight)))(given)
        np.testing.assert_allclose(actual, gradient, rtol=1e-4, atol=1e-5)


def test_mean_equals_that_of_repeated_rows(rng):
    x, weight, labels = make_case(rng, ignored=0)
    counts = rng.integers(0, 4, size=13)
    repeated = (np.repeat(x, counts, axis=0), weight, np.repeat(labels, counts))
    actual = linear_cross_entropy(x, weight, labels, row_weight=counts.astype(np.float32), label_smoothing=0.1)
    np.testing.assert_allclose(actual, expected(*repeated, label_smoothing=0.1)[0], rtol=1e-5)


@pytest.mark.sampled
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_mean_of_rows_that_weigh_nothing_is_nan_without_gradients(strategy, rng):
    x, weight, labels = make_case(rng)
    loss = functools.partial(linear_cross_entropy, strategy=strategy, chunk_rows=4)
    fn = jax.value_and_grad(lambda x, weight, row_weight: loss(x, weight, labels, row_weight=row_weight), (0, 1))
    value, grads = jax.jit(fn)(x, weight, np.zeros(13, np.float32))
    assert np.isnan(value)
    for grad in grads:
        np.testing.assert_array_equal(grad, np.zeros_like(grad))


@pytest.mark.parametrize("dtype", [bool, jnp.bfloat16], ids=["mask", "bfloat16"])
def test_weights_of_rows_may_be_a_mask_or_have_16_bits(dtype, rng):
    operands = [rng.normal(size=shape).astype(np.float32) for shape in ((7, 3), (5, 3))]
    labels, row_weight = rng.integers(0, 5, 7), (np.arange(7) / 3 % 1).astype(dtype)
    actual = linear_cross_entropy(*operands, labels, row_weight=row_weight)
    np.testing.assert_allclose(actual, expected(*operands, labels, row_weight=row_weight.astype(float))[0], rtol=1e-5)


def test_row_weight_leaves_aux_as_it_is(rng):
    operands, by_row, given, options = draw(rng)
    loss, aux = linear_cross_entropy(*operands, row_weight=given, return_aux=True, **options)
    contract.assert_close(aux, linear_cross_entropy(*operands, return_aux=True, **options)[1])
    np.testing.assert_allclose(loss, expected(*operands, row_weight=by_row, **options)[0], rtol=1e-5)


def test_row_weight_over_a_split_vocabulary_equals_one_device(rng):
    x, weight, labels = make_case(rng, classes=8)
    row_weight = rng.uniform(0.2, 2, size=13).astype(np.float32)

    def loss(x, weight, row_weight, vocab_axis):
        return linear_cross_entropy(x, weight, labels, row_weight=row_weight, vocab_axis=vocab_axis, **TERMS)

    mesh = jax.make_mesh((4,), ("vocab",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
    split = jax.shard_map(
        functools.partial(loss, vocab_axis="vocab"), mesh=mesh, in_specs=(P(), P("vocab"), P()), out_specs=P()
    )
    of_split, of_whole = (
        jax.jit(jax.value_and_grad(fn, (0, 1, 2))) for fn in (split, functools.partial(loss, vocab_axis=None))
    )
    contract.assert_close(of_split(x, weight, row_weight), of_whole(x, weight, row_weight))


@pytest.mark.slow
@pytest.mark.parametrize("by", ["labels", "probabilities"])
@pytest.mark.parametrize("strategy", contract.first_in_every_run(STRATEGIES))
def test_row_weight_may_be_split_otherwise(strategy, by, rng):
    (x, weight, labels), by_row, given, options = draw(rng, by, rows=(4, 8))
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(AxisType.Explicit,) * 2)

    def loss(x, weight, row_weight, labels):
        return linear_cross_entropy(x, weight, labels, row_weight=row_weight, strategy=strategy, **options)

    fn = jax.jit(jax.value_and_grad(loss, (0, 1, 2)))
    truth = expected(x, weight, labels, row_weight=by_row, **options)[0]
    operands = (x, weight, given, labels)
    for specs in ((P("a"), P(), P("b"), P(None, "a")), (P(), P(), P("b"), P()), (P(), P(), P(), P("b"))):
        pairs = zip(operands, specs, strict=True)
        placed = [jax.device_put(v, NamedSharding(mesh, spec)) for v, spec in pairs]
        with jax.set_mesh(mesh):
            value, grads = fn(*placed)
        np.testing.assert_allclose(value, truth, rtol=1e-5)
        contract.assert_close(grads, fn(*operands)[1])


def test_label_smoothing_is_that_of_optax(rng):
    x, weight, labels = make_case(rng, ignored=0)
    logits = x @ weight.T
    for smoothing in (0.1, 1.0):
        targets = optax.smooth_labels(jax.nn.one_hot(labels, 7), smoothing)
        actual = linear_cross_entropy(x, weight, labels, label_smoothing=smoothing, reduction="none")
        np.testing.assert_allclose(actual, optax.softmax_cross_entropy(logits, targets), rtol=1e-5)


def test_label_smoothing_of_flax_examples_is_another_number(rng):
    x, weight, labels = make_case(rng, ignored=0)
    smoothing, classes = 0.1, 7
    rest = smoothing / (classes - 1)
    targets = jax.nn.one_hot(labels, classes) * (1 - smoothing - rest) + rest
    entropy = -((1 - smoothing) * np.log(1 - smoothing) + smoothing * np.log(rest))
    flax = optax.softmax_cross_entropy(x @ weight.T, targets) - entropy
    options = {"label_smoothing": smoothing * classes / (classes - 1), "reduction": "none"}
    np.testing.assert_allclose(linear_cross_entropy(x, weight, labels, **options) - entropy, flax, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "wrong", [np.ones(3, np.float32), np.ones((4, 1), np.float32), np.ones(4, np.int32), np.ones(3, bool), 1.0]
)
def test_row_weight_is_refused(wrong):
    operands = np.ones((4, 3), np.float32), np.ones((5, 3), np.float32), np.zeros(4, np.int32)
    got = "float32[]" if isinstance(wrong, float) else f"{wrong.dtype}[{', '.join(map(str, wrong.shape))}]"
    words = f"linear_cross_entropy: row_weight must be a floating-point array or a mask of shape [4]; got {got}"
    with pytest.raises(BadParamError, match=re.escape(words)) as refusal:
        linear_cross_entropy(*operands, row_weight=wrong)
    assert refusal.value.status == 161002


def draw_rows(rng):
    x, weight = (rng.normal(size=shape).astype(np.float32) for shape in ((16, 3), (6, 3)))
    return x, weight, rng.integers(-1, 6, size=16).astype(np.int32), rng.uniform(0.5, 2, size=16).astype(np.float32)


def weighted(x, weight, labels, row_weight):
    options = {"ignore_index": -1, "strategy": "grad_in_forward", "chunk_rows": 8, "label_smoothing": 0.2}
    return linear_cross_entropy(x, weight, labels, row_weight=row_weight, **options)


CASE = contract.Case(
    name="weighted",
    fn=weighted,
    operands=draw_rows,
    differentiable=(0, 1, 3),
    batched=(0, None, 0, 0),
    operator="linear_cross_entropy",
    backward="linear_cross_entropy_sum_with_gradients",
)


@pytest.mark.slow
@pytest.mark.parametrize("promise", contract.PROMISES, ids=contract.promise_name)
def test_row_weight_keeps_promise(promise):
    promise(CASE)
