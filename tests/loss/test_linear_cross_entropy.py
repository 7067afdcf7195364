"""`linear_cross_entropy`: values and gradients against NumPy float64, and bad input."""

import functools
import re

import contract
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from linear_cross_entropy_oracle import (
    IGNORED,
    STRATEGIES,
    assert_equals_float64,
    expected,
    make_case,
    value_and_gradients,
)

import lowering
from jaxops._checks.arguments import BadParamError
from jaxops.linear_cross_entropy import linear_cross_entropy

ATTRIBUTES = {
    "plain": {},
    "bias": {"bias": True},
    "class_weight": {"class_weight": True},
    "smoothing": {"label_smoothing": 0.1},
    "z_loss-softcap": {"z_loss": 0.01, "softcap": 3.0},
    "all": {"bias": True, "class_weight": True, "label_smoothing": 0.2, "z_loss": 0.02, "softcap": 2.0},
}


@pytest.mark.sampled
@pytest.mark.parametrize("by", contract.first_in_every_run(["labels", "probabilities"]))
@pytest.mark.parametrize("attributes", ATTRIBUTES.values(), ids=ATTRIBUTES)
def test_linear_cross_entropy_equals_float64(attributes, by, rng):
    x, weight, labels = make_case(rng)
    if by == "probabilities":
        labels = rng.dirichlet(np.ones(7), size=13).astype(np.float32)
    arrays = {
        "bias": rng.normal(size=7).astype(np.float32),
        "class_weight": rng.uniform(0.2, 2, size=7).astype(np.float32),
    }
    attributes = {name: arrays[name] if value is True else value for name, value in attributes.items()}
    for strategy in STRATEGIES:
        reduction = {"grad_in_forward": "mean", "recompute": "none"}[strategy]
        options = {**attributes, "reduction": reduction, "strategy": strategy, "chunk_rows": 4}
        assert_equals_float64(value_and_gradients(x, weight, labels, **options), (x, weight, labels), options)


@pytest.mark.sampled
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_linear_cross_entropy_strategy_does_not_change_reductions(reduction, strategy, rng):
    case = make_case(rng, rows=(3, 5))
    options = {"reduction": reduction, "strategy": strategy, "chunk_rows": 2}
    assert_equals_float64(value_and_gradients(*case, **options), case, options)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("rows", "classes"),
    [((), 7), ((0,), 3), ((1,), 1), ((1,), 1000), ((5,), 2050), ((2, 3, 1), 7), ((17,), 2)],
    ids=str,
)
@pytest.mark.parametrize("strategy", contract.first_in_every_run(STRATEGIES))
def test_linear_cross_entropy_takes_any_shape(strategy, rows, classes, rng):
    case = make_case(rng, rows=rows, classes=classes, ignored=0)
    options = {"reduction": "sum", "strategy": strategy, "chunk_rows": 3}
    assert_equals_float64(value_and_gradients(*case, **options), case, options)


def test_linear_cross_entropy_takes_no_features(rng):
    x, weight, labels = jnp.zeros((4, 0)), jnp.zeros((5, 0)), np.zeros(4, np.int32)
    np.testing.assert_allclose(linear_cross_entropy(x, weight, labels), np.log(5), rtol=1e-6)


@pytest.mark.sampled
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_linear_cross_entropy_keeps_float32_logits(dtype, strategy, rng):
    case = make_case(rng, rows=(12,), hidden=16, classes=50, dtype=dtype)
    options = {"strategy": strategy, "chunk_rows": 4}
    loss, *grads = value_and_gradients(*case, **options)
    assert loss.dtype == jnp.float32
    assert [grad.dtype for grad in grads] == [dtype, dtype]
    # The loss has float32's error; gradients that of rounding the logits' cotangent and the result.
    np.testing.assert_allclose(loss, expected(*case)[0], rtol=1e-5)
    assert_equals_float64((loss, *grads), case, options, rtol=2 * float(jnp.finfo(dtype).eps))


def test_linear_cross_entropy_smooths_and_weighs_16_bit_probabilities_in_float32(rng):
    x, weight, _ = make_case(rng)
    probabilities = jnp.asarray(rng.dirichlet(np.ones(7), size=13), "bfloat16")
    for options in ({"label_smoothing": 0.1}, {"class_weight": jnp.asarray(rng.uniform(0.2, 2, size=7), "bfloat16")}):
        loss = linear_cross_entropy(x, weight, probabilities, **options)
        np.testing.assert_allclose(loss, expected(x, weight, probabilities, **options)[0], rtol=1e-5)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_linear_cross_entropy_of_float16_keeps_small_gradients(strategy):
    # Divided by 65536 rows, the gradient of each row is 2.4e-7, where float16 has a digit or two left.
    rows = 65536 if strategy == "grad_in_forward" else 256
    x, weight = jnp.ones((rows, 2), jnp.float16), jnp.zeros((64, 2), jnp.float16)
    loss = jax.jit(functools.partial(linear_cross_entropy, strategy=strategy, chunk_rows=rows))
    grad = jax.grad(loss, 1)(x, weight, np.zeros(rows, np.int32))
    np.testing.assert_allclose(np.asarray(grad[1:]).astype(np.float32), 1 / 64, rtol=2e-3)


@pytest.mark.sampled
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("scale", [1.0, 40.0, 640.0])
def test_linear_cross_entropy_takes_large_logits(scale, strategy, rng):
    case = make_case(rng, scale=scale)
    options = {"strategy": strategy, "chunk_rows": 4}
    assert_equals_float64(value_and_gradients(*case, **options), case, options)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_linear_cross_entropy_loses_no_digits_to_a_common_offset(strategy, rng):
    # Whole numbers, so that the logits themselves are exact: 2^20 + (-4 ... 4).
    x = np.concatenate([rng.integers(-2, 3, size=(9, 2)), np.ones((9, 1))], axis=1).astype(np.float32)
    weight = np.concatenate([rng.integers(-1, 2, size=(7, 2)), np.full((7, 1), 2**20)], axis=1).astype(np.float32)
    case = (x, weight, rng.integers(0, 7, size=9))
    options = {"strategy": strategy, "chunk_rows": 4, "reduction": "none" if strategy == "recompute" else "sum"}
    loss, x_grad, weight_grad = value_and_gradients(*case, **options)
    truth = expected(*case, reduction=options["reduction"])
    np.testing.assert_allclose(loss, truth[0], rtol=2e-6)
    np.testing.assert_allclose(weight_grad, truth[2], atol=1e-5)
    np.testing.assert_allclose(x_grad[:, :2], truth[1][:, :2], atol=1e-5)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_linear_cross_entropy_skips_ignored_rows(strategy, rng):
    x, weight, labels = make_case(rng, rows=(8,), ignored=0)
    labels[[1, 6]] = 3
    kept = labels != 3
    poisoned = x.at[~kept].set(jnp.nan)
    options = {"ignore_index": 3, "strategy": strategy, "chunk_rows": 3}
    loss, x_grad, weight_grad = value_and_gradients(poisoned, weight, labels, **options)
    truth = expected(x[kept], weight, labels[kept])
    np.testing.assert_allclose(loss, truth[0], rtol=1e-5)
    np.testing.assert_allclose(x_grad[kept], truth[1], atol=1e-6)
    np.testing.assert_array_equal(x_grad[~kept], 0)
    np.testing.assert_allclose(weight_grad, truth[2], atol=1e-6)


@pytest.mark.sampled
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("rows", [13, 0])
def test_linear_cross_entropy_of_no_kept_rows(rows, strategy, rng):
    x, weight, _ = make_case(rng, rows=(rows,))
    ignored = np.full(rows, IGNORED, np.int32)
    for reduction in ("mean", "sum"):
        options = {"reduction": reduction, "strategy": strategy, "chunk_rows": 4}
        loss, *grads = value_and_gradients(x, weight, ignored, **options)
        np.testing.assert_equal(float(loss), np.nan if reduction == "mean" else 0.0)
        for grad in grads:
            np.testing.assert_array_equal(grad, np.zeros_like(grad))


def test_linear_cross_entropy_raises_no_false_alarm_about_nan(rng):
    with jax.debug_nans(True):
        assert np.isfinite(linear_cross_entropy(*make_case(rng)))


def test_linear_cross_entropy_of_a_label_that_is_no_class_is_nan(rng):
    x, weight, labels = make_case(rng, ignored=0)
    labels[2], labels[5] = 7, -1
    assert np.flatnonzero(np.isnan(linear_cross_entropy(x, weight, labels, reduction="none"))).tolist() == [2, 5]


@pytest.mark.parametrize(("dtype", "ignore_index"), [("uint8", -100), ("uint8", 255), ("int8", 300), ("int16", -1)])
def test_linear_cross_entropy_takes_any_integer_labels(dtype, ignore_index, rng):
    # More classes than the narrow dtypes can count.
    x, weight, labels = make_case(rng, classes=300, ignored=0)
    labels %= 100
    labels = labels.astype(dtype)
    if np.iinfo(dtype).min <= ignore_index <= np.iinfo(dtype).max:
        labels[4] = ignore_index
    truth = expected(x, weight, labels.astype(np.int32), ignore_index=ignore_index)
    np.testing.assert_allclose(linear_cross_entropy(x, weight, labels, ignore_index=ignore_index), truth[0], rtol=1e-5)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_linear_cross_entropy_allows_forbidden_classes(strategy, rng):
    x, weight, labels = make_case(rng)
    bias = np.array([0, 0, 0, 0, 0, 0, -np.inf], np.float32)
    labels = np.where(labels == 6, 0, labels)
    truth = expected(x, weight[:6], labels)
    loss, x_grad, weight_grad, _ = value_and_gradients(x, weight, labels, bias=bias, strategy=strategy, chunk_rows=4)
    np.testing.assert_allclose(loss, truth[0], rtol=1e-5)
    np.testing.assert_allclose(x_grad, truth[1], atol=1e-6)
    np.testing.assert_allclose(weight_grad[:6], truth[2], atol=1e-6)
    np.testing.assert_array_equal(weight_grad[6], 0)


def test_linear_cross_entropy_takes_a_transposed_weight(rng):
    x, weight, labels = make_case(rng)
    swapped = linear_cross_entropy(x, weight.T, labels, transpose_weight=True)
    np.testing.assert_array_equal(swapped, linear_cross_entropy(x, weight, labels))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_linear_cross_entropy_aux(strategy, rng):
    x, weight, labels = make_case(rng)
    x, weight = x.at[0].set(0), weight.at[3].set(weight[2])
    logits = np.asarray(x).astype(np.float64) @ np.asarray(weight).astype(np.float64).T
    lse = np.log(np.exp(logits).sum(-1))
    p = np.exp(logits - lse[:, None])
    loss, aux = jax.jit(functools.partial(linear_cross_entropy, return_aux=True, strategy=strategy, chunk_rows=4))(
        x, weight, labels
    )
    np.testing.assert_allclose(loss, expected(x, weight, labels)[0], rtol=1e-5)
    np.testing.assert_allclose(aux.lse, lse, rtol=1e-5)
    np.testing.assert_allclose(aux.entropy, -(p * np.log(p)).sum(-1), rtol=1e-4, atol=1e-6)
    np.testing.assert_array_equal(aux.prediction, logits.argmax(-1))
    np.testing.assert_array_equal(aux.kept, labels != IGNORED)
    np.testing.assert_array_equal(aux.accuracy, (logits.argmax(-1) == labels) & (labels != IGNORED))
    assert (aux.accuracy.dtype, aux.prediction.dtype, aux.kept.dtype) == (jnp.float32, jnp.int32, jnp.bool_)


def test_linear_cross_entropy_does_no_work_for_frozen_operands(rng):
    x, weight, labels = make_case(rng, rows=(64,), hidden=32, classes=96, ignored=0)
    counts = {"grad_in_forward": (3, 2, 2), "recompute": (4, 3, 3)}
    for strategy in STRATEGIES:
        loss = functools.partial(linear_cross_entropy, strategy=strategy, chunk_rows=16)
        texts = (
            jax.jit(jax.grad(loss, argnums)).lower(x, weight, labels).as_text() for argnums in ((0, 1), (0,), (1,))
        )
        assert tuple(text.count("stablehlo.dot_general") for text in texts) == counts[strategy]


def test_linear_cross_entropy_keeps_no_logits_in_chunks(rng):
    x, weight, labels = make_case(rng, rows=(256,), hidden=8, classes=512)
    for strategy in STRATEGIES:
        loss = functools.partial(linear_cross_entropy, strategy=strategy, chunk_rows=16)
        compiled = jax.jit(jax.grad(loss, (0, 1))).lower(x, weight, labels).compile()
        assert compiled.memory_analysis().temp_size_in_bytes < 256 * 512 * 4 // 2


X, WEIGHT, LABELS = np.zeros((4, 3), np.float32), np.zeros((5, 3), np.float32), np.zeros(4, np.int32)
REFUSALS = {
    "x-integer": (
        (X.astype(np.int32), WEIGHT, LABELS),
        {},
        "x must be a floating-point array of shape (..., H); got int32[4, 3]",
    ),
    "x-scalar": ((X[0, 0], WEIGHT, LABELS), {}, "x must be a floating-point array of shape (..., H); got float32[]"),
    "weight-rank": ((X, WEIGHT[0], LABELS), {}, "weight must have shape (V, 3), as x has 3 features; got float32[3]"),
    "weight-features": (
        (X, WEIGHT[:, :2], LABELS),
        {},
        "weight must have shape (V, 3), as x has 3 features; got float32[5, 2]",
    ),
    "weight-empty": ((X, WEIGHT[:0], LABELS), {}, "weight must have a vocabulary of at least 1; got float32[0, 3]"),
    "weight-dtype": (
        (X, WEIGHT.astype(np.int32), LABELS),
        {},
        "weight must have a floating-point dtype of at least 8 bits; got int32[5, 3]",
    ),
    "weight-transposed": (
        (X, WEIGHT[0], LABELS),
        {"transpose_weight": True},
        "weight must have shape (3, V), as x has 3 features; got float32[3]",
    ),
    "weight-of-flax": (
        (X, WEIGHT.T, LABELS),
        {},
        "weight must have shape (V, 3), as x has 3 features, or be given with transpose_weight=True; got float32[3, 5]",
    ),
    "weight-not-of-flax": (
        (X, WEIGHT, LABELS),
        {"transpose_weight": True},
        "weight must have shape (3, V), as x has 3 features, or be given without transpose_weight; got float32[5, 3]",
    ),
    "labels-shape": (
        (X, WEIGHT, LABELS[:3]),
        {},
        "labels must have shape [4], as x without its last axis; got int32[3]",
    ),
    "labels-bool": (
        (X, WEIGHT, LABELS > 0),
        {},
        "labels must be integers, or floating-point probabilities; got bool[4]",
    ),
    "probabilities": ((X, WEIGHT, X), {}, "labels must be integers, or have shape [4, 5] as probabilities; got float"),
    "bias-shape": (
        (X, WEIGHT, LABELS),
        {"bias": X[0]},
        "bias must be a floating-point array of shape [5]; got float32[3]",
    ),
    "bias-empty": (
        (X, WEIGHT, LABELS),
        {"bias": X[0, :0]},
        "bias must be a floating-point array of shape [5]; got float32[0]",
    ),
    "class_weight-dtype": (
        (X, WEIGHT, LABELS),
        {"class_weight": np.zeros(5, np.int32)},
        "class_weight must be a floating-point array of shape [5]; got int32[5]",
    ),
    "reduction": ((X, WEIGHT, LABELS), {"reduction": "avg"}, "reduction must be one of none, mean, sum; got 'avg'"),
    "strategy": (
        (X, WEIGHT, LABELS),
        {"strategy": "fast"},
        "strategy must be one of auto, grad_in_forward, recompute; got 'fast'",
    ),
    "label_smoothing": (
        (X, WEIGHT, LABELS),
        {"label_smoothing": 1.5},
        "label_smoothing must be a number from 0 to 1; got 1.5",
    ),
    "label_smoothing-word": (
        (X, WEIGHT, LABELS),
        {"label_smoothing": "a"},
        "label_smoothing must be a number from 0 to 1; got 'a'",
    ),
    "softcap": (
        (X, WEIGHT, LABELS),
        {"softcap": 0.0},
        "softcap must be a positive number that float32 can hold; got 0.0",
    ),
    "softcap-infinite": (
        (X, WEIGHT, LABELS),
        {"softcap": np.inf},
        "softcap must be a positive number that float32 can hold; got inf",
    ),
    "softcap-array": (
        (X, WEIGHT, LABELS),
        {"softcap": X[0, 0:1]},
        "softcap must be a positive number that float32 can hold, not an array; got float32[1]",
    ),
    "chunk_rows": (
        (X, WEIGHT, LABELS),
        {"chunk_rows": 0},
        "chunk_rows must be a positive integer up to 2147483647; got 0",
    ),
    "ignore_index": ((X, WEIGHT, LABELS), {"ignore_index": 1.5}, "ignore_index must be an integer; got 1.5"),
    "weight_grad_dtype-name": (
        (X, WEIGHT, LABELS),
        {"weight_grad_dtype": "bf16"},
        "weight_grad_dtype must be a floating dtype, such as bfloat16 or float32; got 'bf16'",
    ),
    "weight_grad_dtype": (
        (X, WEIGHT, LABELS),
        {"weight_grad_dtype": jnp.bfloat16},
        "weight_grad_dtype must be None or float32, as the weight is float32; got bfloat16",
    ),
    "z_loss": ((X, WEIGHT, LABELS), {"z_loss": -1.0}, "z_loss must be at least 0; got -1.0"),
    "vocab_axis": (
        (X, WEIGHT, LABELS),
        {"vocab_axis": "model"},
        "vocab_axis must name a mesh axis of the surrounding shard_map, and there is none here; got 'model'",
    ),
}


@pytest.mark.parametrize(("operands", "attributes", "words"), REFUSALS.values(), ids=REFUSALS)
def test_linear_cross_entropy_refuses(operands, attributes, words):
    def call(*operands):
        return linear_cross_entropy(*operands, **attributes)

    for ask in (call, jax.jit(call), lambda *operands: lowering.explain(call, *operands)):
        with pytest.raises(BadParamError, match=re.escape(f"linear_cross_entropy: {words}")) as refusal:
            ask(*operands)
        assert refusal.value.status == 161002


def test_options_that_are_traced_are_refused_in_words():
    words = "label_smoothing must be a number from 0 to 1, known before the function is traced; got float32[]"
    with pytest.raises(BadParamError, match=re.escape(words)):
        jax.jit(lambda smoothing: linear_cross_entropy(X, WEIGHT, LABELS, label_smoothing=smoothing))(0.1)


def test_z_loss_may_be_traced_and_is_then_not_checked():
    def loss(z_loss):
        return linear_cross_entropy(X, WEIGHT, LABELS, z_loss=z_loss)

    assert jnp.allclose(jax.jit(loss)(0.5), loss(0.5))
    assert jnp.allclose(jax.jit(loss)(-1.0), 2 * loss(0.0) - loss(1.0), rtol=1e-5)


@pytest.mark.parametrize("missing", ["x", "weight", "labels"])
def test_linear_cross_entropy_refuses_none(missing):
    operands = {"x": X, "weight": WEIGHT, "labels": LABELS, missing: None}
    with pytest.raises(BadParamError, match=f"linear_cross_entropy: {missing} must be given; got None") as refusal:
        linear_cross_entropy(**operands)
    assert refusal.value.status == 161001


@pytest.mark.sampled
@pytest.mark.parametrize("strategy", ["auto", *STRATEGIES])
def test_linear_cross_entropy_exports_with_a_symbolic_number_of_rows(strategy, rng):
    x, weight, labels = make_case(rng)
    (rows,) = jax.export.symbolic_shape("rows")
    fn = jax.jit(jax.value_and_grad(functools.partial(linear_cross_entropy, strategy=strategy), (0, 1)))
    shapes = jax.ShapeDtypeStruct((rows, 6), x.dtype), jax.ShapeDtypeStruct((7, 6), x.dtype)
    exported = jax.export.export(fn)(*shapes, jax.ShapeDtypeStruct((rows,), labels.dtype))
    contract.assert_close(exported.call(x, weight, labels), fn(x, weight, labels))


@pytest.mark.parametrize("strategy", ["grad_in_forward", "recompute"])
def test_linear_cross_entropy_copies_no_probabilities_in_chunks(strategy, rng):
    x, weight, _ = make_case(rng, rows=(256,), hidden=8, classes=512)
    labels = rng.dirichlet(np.ones(512), size=256).astype(np.float32)
    loss = functools.partial(linear_cross_entropy, strategy=strategy, chunk_rows=16)
    compiled = jax.jit(jax.grad(loss, (0, 1))).lower(x, weight, labels).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < labels.nbytes // 2


FEWEST = "as it takes the fewest products"
BY_ROW = "the loss is not a scalar on one shard"


@pytest.mark.parametrize(
    ("rows", "dtype", "options", "implementation", "note"),
    [
        (8, "float32", {}, "auto", f"grad_in_forward, {FEWEST}"),
        (2**20, "float32", {"reduction": "none"}, "auto", f"recompute, as {BY_ROW}"),
        (8, "float32", {"strategy": "recompute"}, "auto", "recompute, as asked"),
        (2**20, "bfloat16", {}, "pallas", f"grad_in_forward, {FEWEST}"),
    ],
)
def test_explain_says_why_a_strategy_is_taken(rows, dtype, options, implementation, note):
    shapes = (rows, 16), (65, 16)
    x, weight = (jax.ShapeDtypeStruct(shape, dtype) for shape in shapes)
    loss = jax.jit(functools.partial(linear_cross_entropy, **options))
    with lowering.use(implementation):
        for _ in range(2):  # also once it has been traced
            explanation = lowering.explain(loss, x, weight, jax.ShapeDtypeStruct((rows,), "int32"), target="tpu-v5e")
            assert explanation.notes == (f"linear_cross_entropy: strategy {note}",)
    assert explanation.notes[0] in str(explanation)
