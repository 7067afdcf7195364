"""The linear cross entropy kernels for TPU in their interpreters, against NumPy float64."""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from linear_cross_entropy_oracle import expected
from linear_cross_entropy_rows_oracle import (
    CLASSES,
    F32,
    HIDDEN,
    ROWS,
    expected_gradients,
    expected_statistics,
    make_operands,
    wide,
)

import lowering
from jaxops import aclnn
from jaxops.linear_cross_entropy import linear_cross_entropy
from jaxops.linear_cross_entropy.operands import Columns, CotangentTerms, Needs, Rows, RowStatistics
from lowering.operators import refusal_by_fields
from lowering.targets import named
from pallas_kernels.hardware import Hardware
from pallas_kernels.tpu.linear_cross_entropy import backward, exponentials, gradients, statistics, tiles, vocab_parallel

pytestmark = pytest.mark.emulated

BF16 = "bfloat16"
FORWARD_CONFIG = {"block_rows": 8, "block_vocab": 8, "block_hidden": 8}
BACKWARD_CONFIG = {"block_staying": 8, "block_streaming": 8, "block_hidden": 8}
NEEDS = Needs(x=True, weight=True)
INTERPRET = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan")
VARIANTS = {
    "plain": {},
    "bfloat16": {"dtype": BF16, "metrics": True},
    "all": {"bias": True, "target": True, "softcap": 3.0, "metrics": True},
}


@pytest.fixture(autouse=True)
def no_races(capfd):
    yield
    assert "RACE DETECTED" not in capfd.readouterr().out


# Kept compiled, as most of an interpreted kernel's time goes there.
@functools.cache
def compiled(name, **attributes):
    run, config = {"forward": (statistics.run, FORWARD_CONFIG), "backward": (backward.run, BACKWARD_CONFIG)}[name]
    return jax.jit(functools.partial(run, config=config, interpret=INTERPRET, **attributes))


def forward(rows, columns, *, softcap=None, metrics=False):
    return RowStatistics(*compiled("forward", softcap=softcap, metrics=metrics)(rows, columns))


def gradients_of(terms, rows, columns, *, needs=NEEDS, softcap=None):
    """The gradients of x, weight, bias and targets; None where they are not needed."""
    (x_grad, *_), of_columns = compiled("backward", softcap=softcap, needs=needs)(terms, rows, columns)
    return x_grad, *of_columns


def make_terms(rng, statistics):
    """Terms for everything that the statistics are of."""
    softmax, slope, label, target = (jnp.asarray(rng.normal(size=statistics.max_logit.shape), F32) for _ in range(4))
    return CotangentTerms(
        softmax,
        statistics.max_logit,
        statistics.log_sum_exp,
        label,
        None if statistics.target_loss is None else target,
        None if statistics.mean_logit is None else slope,
    )


def assert_close(actual, expected, rtol=2e-5):
    scale = max(1.0, float(np.max(np.abs(expected), initial=0)))
    np.testing.assert_allclose(wide(actual), expected, rtol=rtol, atol=rtol * scale)


def assert_statistics_close(actual, expected):
    """Holds statistics against the truth; both lack the same fields."""
    for name, result, true in zip(actual._fields, actual, expected, strict=True):
        assert (result is None) == (true is None), name
        if result is not None:
            dtype = jnp.int32 if name == "prediction" else jnp.float32
            assert (result.shape, result.dtype) == (true.shape, dtype), name
            assert_close(result, true)


@pytest.mark.interpreted
@pytest.mark.sampled
@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
def test_linear_cross_entropy_tpu_kernels_agree_with_float64(variant, rng):
    softcap, metrics = variant.get("softcap"), variant.get("metrics", False)
    rows, columns = make_operands(rng, **variant)
    found = forward(rows, columns, softcap=softcap, metrics=metrics)
    assert_statistics_close(found, expected_statistics(rows, columns, softcap=softcap, metrics=metrics))
    terms = make_terms(rng, found)
    needs = NEEDS._replace(bias=columns.bias is not None, class_targets=columns.class_targets is not None)
    results = gradients_of(terms, rows, columns, needs=needs, softcap=softcap)
    truth = expected_gradients(terms, rows, columns, softcap=softcap)
    eps = float(jnp.finfo(rows.x.dtype).eps)
    for result, true, operand in zip(results, truth, (rows.x, *columns), strict=True):
        assert (result is None) == (operand is None)
        if result is not None:
            assert (result.shape, result.dtype) == (operand.shape, operand.dtype)
            assert_close(result, true, rtol=max(2e-5, eps))


@pytest.mark.long
@pytest.mark.interpreted
@pytest.mark.sampled
@pytest.mark.parametrize("block_hidden", [128, 8], ids=["whole features", "features in parts"])
def test_linear_cross_entropy_tpu_kernel_folds_chunks_of_a_block(block_hidden, rng):
    # A block of rows takes two registers' lanes; the first block of classes is two chunks, and the second is cut in its
    # second chunk.
    operands = make_operands(rng, rows=200, classes=850, **VARIANTS["all"])
    config = {"block_rows": 256, "block_vocab": 512, "block_hidden": block_hidden}
    run = functools.partial(statistics.run, config=config, interpret=INTERPRET, softcap=3.0, metrics=True)
    found = RowStatistics(*jax.jit(run)(*operands))
    assert_statistics_close(found, expected_statistics(*operands, softcap=3.0, metrics=True))


@pytest.mark.long
@pytest.mark.sampled
@pytest.mark.parametrize("classes", [1024, 850], ids=["whole blocks", "a cut block"])
def test_linear_cross_entropy_tpu_kernel_defers_what_a_block_gives_last(classes, rng):
    # The first 128 of 640 rows are not deferred. Labels are also looked for before the first block, among no logits.
    rows, columns = make_operands(rng, rows=600, classes=classes, **VARIANTS["bfloat16"])
    scale = rng.uniform(0.5, 2, size=600).astype(F32)
    scale[300] = 0
    rows = rows._replace(scale=jnp.asarray(scale))
    config = {"block_rows": 640, "block_vocab": 512, "block_hidden": 128}
    run = functools.partial(statistics.run, config=config, interpret=INTERPRET, softcap=None, metrics=True)
    found = RowStatistics(*jax.jit(run)(rows, columns))
    truth = expected_statistics(rows, columns, metrics=True)
    # With a scale of 0 all logits are equal, and the kernel still predicts the largest of x's own.
    truth.prediction[300] = (wide(rows.x)[300] @ wide(columns.weight).T).argmax()
    assert_statistics_close(found, truth)


@pytest.mark.interpreted
@pytest.mark.parametrize("scale", [40.0, 640.0])
def test_linear_cross_entropy_tpu_kernels_take_large_logits(scale, rng):
    operands = make_operands(rng, scale=scale)
    for actual, true in zip(forward(*operands)[:3], expected_statistics(*operands)[:3], strict=True):
        # Against the size of the logits, as products of float32 have their error.
        np.testing.assert_allclose(actual, true, atol=1e-6 * scale * HIDDEN)


@pytest.mark.interpreted
def test_linear_cross_entropy_tpu_kernels_lose_no_digits_to_a_common_offset(rng):
    # Whole numbers, so that the logits themselves are exact: 2^20 + (-4 ... 4).
    x = np.concatenate([rng.integers(-2, 3, size=(ROWS, 2)), np.ones((ROWS, 1)), np.zeros((ROWS, HIDDEN - 3))], axis=1)
    weight = np.concatenate([rng.integers(-1, 2, size=(CLASSES, 2)), np.full((CLASSES, 1), 2**20)], axis=1)
    weight = np.concatenate([weight, np.zeros((CLASSES, HIDDEN - 3))], axis=1)
    rows, columns = make_operands(rng)[0]._replace(x=jnp.asarray(x, F32)), Columns(jnp.asarray(weight, F32))
    truth = expected_statistics(rows, columns)
    found = forward(rows, columns)
    np.testing.assert_allclose(found.log_sum_exp, truth.log_sum_exp, rtol=1e-6)
    np.testing.assert_array_equal(found.label_logit, truth.label_logit)
    terms = make_terms(rng, found)
    x_grad, weight_grad, *_ = gradients_of(terms, rows, columns)
    true_x, true_weight, *_ = expected_gradients(terms, rows, columns)
    np.testing.assert_allclose(x_grad[:, :2], true_x[:, :2], atol=2e-5)
    np.testing.assert_allclose(weight_grad, true_weight, atol=2e-5)


@pytest.mark.slow
def test_linear_cross_entropy_tpu_kernels_skip_rows_that_do_not_count(rng):
    rows, columns = make_operands(rng)
    rows = rows._replace(x=rows.x.at[:8].set(0))
    found = forward(rows, columns)
    assert_statistics_close(found, expected_statistics(rows, columns))
    terms = make_terms(rng, found)
    terms = terms._replace(softmax=terms.softmax.at[:8].set(0), label=terms.label.at[:8].set(0))
    # A block on which nothing pulls is not read.
    poisoned = rows._replace(x=rows.x.at[:8].set(jnp.nan))
    x_grad, weight_grad, *_ = gradients_of(terms, poisoned, columns)
    true_x, true_weight, *_ = expected_gradients(terms, rows, columns)
    np.testing.assert_array_equal(x_grad[:8], 0)
    assert_close(x_grad, true_x)
    assert_close(weight_grad, true_weight)
    nothing = terms._replace(softmax=0 * terms.softmax, label=0 * terms.label)
    for result in gradients_of(nothing, poisoned, columns)[:2]:
        np.testing.assert_array_equal(result, np.zeros_like(result))


@pytest.mark.slow
def test_linear_cross_entropy_tpu_kernel_predicts_the_first_of_equal_logits(rng):
    rows, columns = make_operands(rng, **VARIANTS["bfloat16"])
    weight = columns.weight.at[jnp.array([5, 9, 20])].set(columns.weight[3])
    columns = columns._replace(weight=weight)
    equal = rows._replace(x=4 * weight[jnp.array([3] * ROWS)])
    np.testing.assert_array_equal(forward(equal, columns, metrics=True).prediction, 3)
    all_equal = rows._replace(x=0 * rows.x)
    np.testing.assert_array_equal(forward(all_equal, columns, metrics=True).prediction, 0)
    alike = columns._replace(weight=jnp.ones_like(weight))  # unlike rows of zeros, these are not skipped
    np.testing.assert_array_equal(forward(rows, alike, metrics=True).prediction, 0)


@pytest.mark.slow
def test_linear_cross_entropy_tpu_kernels_allow_forbidden_classes(rng):
    rows, columns = make_operands(rng, **VARIANTS["bfloat16"])
    # The first block of classes is forbidden as a whole.
    columns = columns._replace(bias=jnp.where(jnp.arange(CLASSES) < 10, -jnp.inf, 0.0))
    found = forward(rows._replace(labels=jnp.full(ROWS, 12)), columns, metrics=True)
    logits = wide(rows.x) @ wide(columns.weight[10:]).T
    shifted = logits - logits.max(-1, keepdims=True)
    total = np.exp(shifted).sum(-1)
    assert_close(found.max_logit, logits.max(-1))
    assert_close(found.log_sum_exp, np.log(total))
    assert_close(found.label_logit, shifted[:, 2])
    assert_close(found.mean_logit, (np.exp(shifted) * shifted).sum(-1) / total)
    np.testing.assert_array_equal(found.prediction, 10 + logits.argmax(-1))


LOSSES = {
    "1x100x1000-bfloat16": (1, 100, 1000, BF16, {}),
    "13x6x2050-all": (
        13,
        6,
        2050,
        F32,
        {"bias": True, "class_weight": True, "label_smoothing": 0.2, "z_loss": 0.02, "softcap": 2.0},
    ),
}


@pytest.mark.sampled
@pytest.mark.parametrize(("rows", "hidden", "classes", "dtype", "attributes"), LOSSES.values(), ids=LOSSES)
def test_linear_cross_entropy_runs_on_the_tpu_kernels(rows, hidden, classes, dtype, attributes, rng):
    x, weight = (jnp.asarray(rng.normal(size=(size, hidden)), dtype) for size in (rows, classes))
    labels = np.where(rng.uniform(size=rows) < 0.3 * (rows > 1), -100, rng.integers(0, classes, size=rows))
    vectors = {"bias": rng.normal(size=classes), "class_weight": rng.uniform(0.2, 2, size=classes)}
    attributes = {k: jnp.asarray(vectors[k], F32) if v is True else v for k, v in attributes.items()}
    options = {"reduction": "sum", "strategy": "recompute"}
    loss = functools.partial(linear_cross_entropy, labels=labels, **options, **attributes)
    fn = jax.jit(jax.value_and_grad(lambda x, weight: loss(x, weight), (0, 1)))
    with lowering.use("interpret"):
        ran = {row.operator: row.implementation for row in lowering.explain(fn, x, weight, target="tpu-v5e").rows}
        value, (x_grad, weight_grad) = fn(x, weight)
    for operator in ("linear_cross_entropy", "linear_cross_entropy_backward"):
        assert ran[operator] == "mosaic_tpu (interpreted)"
    true_loss, true_x, true_weight, _ = expected(x, weight, labels, reduction="sum", **attributes)
    np.testing.assert_allclose(value, true_loss, rtol=1e-5)
    rtol = max(2e-5, 2 * float(jnp.finfo(dtype).eps))
    assert_close(x_grad, true_x, rtol)
    assert_close(weight_grad, true_weight, rtol)


def test_aclnn_linear_cross_entropy_runs_on_the_tpu_kernels(rng):
    x, weight = (jnp.asarray(rng.normal(size=(size, 16)), BF16) for size in (11, 130))
    target, grad = rng.integers(0, 260, size=11).astype(np.int32), rng.normal(size=11).astype(np.float32)

    @jax.jit
    def calls(x, weight, target, grad):
        rows = aclnn.fused_linear_online_max_sum(x, weight, target, vocab_start_index=100, vocab_end_index=240)
        statistics = {"logits_max": rows.logits_max_local, "sum_exp_logits": rows.sum_exp_logits_local}
        masks = rows.target_mask, rows.masked_target
        return rows, aclnn.fused_linear_cross_entropy_loss_grad(grad, x, weight, *masks, **statistics)

    with lowering.use("interpret"):
        explanation = lowering.explain(calls, x, weight, target, grad, target="tpu-v5e")
        ran = {row.operator: row.implementation for row in explanation.rows}
        rows, (x_grad, weight_grad) = calls(x, weight, target, grad)
    for operator in ("fused_linear_online_max_sum", "fused_linear_cross_entropy_loss_grad"):
        assert ran[operator] == "mosaic_tpu (interpreted)"
    logits = wide(x) @ wide(weight).T
    maximum, masked = logits.max(-1), (target < 100) | (target >= 240)
    exponentials = np.exp(logits - maximum[:, None])
    # The part has 130 classes, of which its range of 140 has no more: the last ten are no column.
    is_target = ~masked[:, None] & (np.arange(130) == target[:, None] - 100)
    np.testing.assert_allclose(rows.logits_max_local, maximum, rtol=1e-5)
    np.testing.assert_allclose(rows.sum_exp_logits_local, exponentials.sum(-1), rtol=1e-4)
    assert_close(rows.predicted_logits_local, np.where(is_target, logits - maximum[:, None], 0).sum(-1))
    bits = np.unpackbits(np.asarray(rows.target_mask), bitorder="little")
    np.testing.assert_array_equal(bits[:11], masked)
    terms = (exponentials / exponentials.sum(-1, keepdims=True) - is_target) * grad[:, None]
    assert_close(x_grad, terms @ wide(weight), float(jnp.finfo(BF16).eps))
    assert_close(weight_grad, terms.T @ wide(x), float(jnp.finfo(BF16).eps))


def lowered(fn, *operands):
    with lowering.use("pallas"):
        text = jax.jit(fn).trace(*operands).lower(lowering_platforms=("tpu",)).as_text()
    return text, text.count("stablehlo.custom_call @tpu_custom_call")


def test_linear_cross_entropy_launches_no_tpu_kernel_for_frozen_operands(rng):
    x, weight = jnp.zeros((16, 32)), jnp.zeros((200, 32))
    loss = functools.partial(linear_cross_entropy, labels=np.zeros(16, np.int32), strategy="recompute")
    assert lowered(loss, x, weight)[1] == 1
    for argnums, launches in (((0, 1), 3), ((0,), 2), ((1,), 2)):
        assert lowered(jax.grad(loss, argnums), x, weight)[1] == launches


@pytest.mark.slow
def test_linear_cross_entropy_tpu_kernels_run_on_each_devices_rows():
    x, weight, labels = jnp.zeros((16, 8)), jnp.zeros((40, 8)), jnp.zeros(16, jnp.int32)

    def step(x, weight, labels):
        loss = functools.partial(linear_cross_entropy, reduction="sum", strategy="recompute")
        return jax.grad(loss, (0, 1))(x, weight, labels)

    for axis_type in (AxisType.Auto, AxisType.Explicit):
        mesh = jax.make_mesh((8,), ("data",), axis_types=(axis_type,))
        place = [jax.NamedSharding(mesh, spec) for spec in (P("data"), P(), P("data"))]
        operands = [jax.device_put(x, sharding) for x, sharding in zip((x, weight, labels), place, strict=True)]
        fn = step
        if axis_type == AxisType.Auto:
            specs = (P("data"), P(), P("data"))
            fn = jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=(P("data"), P()))
        text, launches = lowered(fn, *operands)
        assert launches == 3
        assert "tensor<2x8xf32>" in text


def test_linear_cross_entropy_tpu_kernel_takes_a_mapped_axis_as_rows():
    x, weight, labels = jnp.zeros((3, 5, 8)), jnp.zeros((40, 8)), jnp.zeros((3, 5), jnp.int32)
    loss = functools.partial(linear_cross_entropy, reduction="none", strategy="recompute")
    text, launches = lowered(jax.vmap(loss, (0, None, 0)), x, weight, labels)
    assert launches == 1
    assert "tensor<1x15xi32>" in text


def array(*shape, dtype=F32):
    return types.SimpleNamespace(shape=shape, dtype=dtype)


HARDWARE = Hardware(name="tpu", platform="tpu")
ROWS_OF_FIVE, COLUMNS = Rows(array(5, 8), array(5)), Columns(array(9, 8))
# Fields of the operands, and what is said of them by the statistics and by the gradients.
REFUSALS = {
    "none": ({}, None, None),
    "float16": ({"x": array(5, 8, dtype="float16")}, "x is float16", "x is float16"),
    "float64": ({"weight": array(9, 8, dtype="float64")}, "weight is float64", "weight is float64"),
    "no rows": ({"x": array(0, 8)}, "x is [0, 8]", "x is [0, 8]"),
    "many classes": ({"weight": array(2**25, 8)}, "weight has 33554432", "weight has 33554432"),
    "probabilities": ({"labels": None, "probabilities": array(5, 9)}, *["takes no probabilities"] * 2),
    "no labels": ({"labels": None}, *["compares rows with labels"] * 2),
    "scale": ({"scale": array(5)}, None, "takes no scale"),
    "margin": ({"margin": array(5)}, "takes no margin", "takes no margin"),
    "many features": (
        {"x": array(5, 2**17), "weight": array(9, 2**17)},
        *(None, "131072 features do not fit into VMEM"),
    ),
}


@pytest.mark.parametrize(("fields", "forward_words", "backward_words"), REFUSALS.values(), ids=REFUSALS)
def test_linear_cross_entropy_tpu_kernels_refuse(fields, forward_words, backward_words):
    rows, columns = (
        record._replace(**{name: field for name, field in fields.items() if name in record._fields})
        for record in (ROWS_OF_FIVE, COLUMNS)
    )
    terms = CotangentTerms(*[array(5)] * 4)
    for kernel, operands, words in (
        (statistics.KERNEL, (rows, columns), forward_words),
        (backward.KERNEL, (terms, rows, columns), backward_words),
    ):
        reason = refusal_by_fields(kernel, operands) or kernel.refuses(HARDWARE, *operands, softcap=None, needs=NEEDS)
        assert (reason is None) == (words is None)
        assert words is None or words in reason


def test_aclnn_linear_cross_entropy_tpu_kernels_refuse():
    x, weight, row = array(5, 8), array(9, 8), array(5)
    max_sum = functools.partial(vocab_parallel.MAX_SUM_KERNEL.refuses, HARDWARE, x, weight, row, array(), array())
    assert max_sum(return_logits=False) is None
    assert "no logits that could be returned" in max_sum(return_logits=True)
    grad = functools.partial(vocab_parallel.GRAD_KERNEL.refuses, HARDWARE, row, x, weight, row, row)
    assert grad(row, row, None) is None
    assert "give logits_max and sum_exp_logits" in grad(None, None, array(5, 9))
    assert "sum_exp_logits is float64" in grad(row, array(5, dtype="float64"), None)


@pytest.mark.parametrize(("rows", "hidden", "classes"), [(1, 5, 7), (8192, 2304, 256000), (16384, 16384, 128256)])
@pytest.mark.parametrize("target", [None, "tpu-v5e", "tpu-v5p"])
def test_linear_cross_entropy_tpu_configs_fit(target, rows, hidden, classes):
    chip = Hardware("tpu", "tpu") if target is None else named(target)
    x, weight = (types.SimpleNamespace(shape=(size, hidden), dtype=BF16) for size in (rows, classes))
    forward_configs = statistics.launch_configs(chip, x, weight)
    backward_configs = gradients.configs(chip, x, weight)
    for configs in (forward_configs, backward_configs):
        assert configs
        assert len(configs) == len({tuple(config.items()) for config in configs})
        assert all(size % 128 == 0 for config in configs for size in config.values())
    for config in forward_configs:
        assert tiles.vmem_limit_bytes(statistics._vmem_bytes(2, **config)) < (chip.on_chip_bytes or 2**26)
    for config in backward_configs:
        assert tiles.vmem_limit_bytes(gradients._vmem_bytes(2, hidden, **config)) < (chip.on_chip_bytes or 2**26)


def test_exponentials_and_their_sums_agree_with_float64(rng):
    # Of bfloat16 numbers, as a chip rounds operands to these.
    x, weight = (rng.normal(size=(rows, 40)).astype(jnp.bfloat16).astype(np.float32) for rows in (300, 200))
    labels, shift = rng.integers(0, 200, 300).astype(np.int32), np.zeros(300, np.float32)
    config = {"block_rows": 128, "block_vocab": 128, "block_hidden": 128}
    run = functools.partial(
        exponentials.exponentials, softcap=None, most_excess=60.0, config=config, interpret=INTERPRET
    )
    off_label, rest, _ = jax.jit(run)(x, weight, None, None, labels, shift)
    truth = np.exp(x.astype(np.float64) @ weight.T.astype(np.float64))
    truth[np.arange(300), labels] = 0
    np.testing.assert_allclose(off_label, truth, rtol=1e-4)
    np.testing.assert_allclose(rest, truth.sum(-1), rtol=1e-4)
