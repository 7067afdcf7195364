"""The linear cross entropy kernels for TPU in their interpreters, against NumPy float64."""

import functools
import types

import jax
import jax.numpy as jnp
import linear_cross_entropy_rows_oracle as oracle
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
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
from jaxops.linear_cross_entropy.logits import Needs, RowStatistics
from lowering.targets import named
from pallas_kernels.hardware import Hardware
from pallas_kernels.tpu.linear_cross_entropy import backward, gradients, statistics, tiles, vocab_parallel

BF16 = "bfloat16"
FORWARD_CONFIG = {"block_rows": 8, "block_vocab": 8, "block_hidden": 8}
BACKWARD_CONFIG = {"block_staying": 8, "block_streaming": 8, "block_hidden": 8}
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


def forward(operands, *, softcap=None, metrics=False):
    return RowStatistics(*compiled("forward", softcap=softcap, metrics=metrics)(*operands))


def gradients_of(terms, operands, *, needs, softcap=None, metrics=False):
    run = compiled("backward", softcap=softcap, metrics=metrics, needs=needs)
    return run(*terms, *operands, jnp.zeros((ROWS, 0), F32))


def make_terms(rng, rows):
    weights = [jnp.asarray(rng.normal(size=ROWS), F32) for _ in range(4)]
    return [*weights, rows.max_logit, rows.log_sum_exp]


def assert_close(actual, expected, rtol=2e-5):
    scale = max(1.0, float(np.max(np.abs(expected), initial=0)))
    np.testing.assert_allclose(wide(actual), expected, rtol=rtol, atol=rtol * scale)


@pytest.mark.sampled
@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
def test_linear_cross_entropy_tpu_kernels_agree_with_float64(variant, rng):
    attributes = {"softcap": variant.get("softcap"), "metrics": variant.get("metrics", False)}
    operands = make_operands(rng, **variant)
    rows = forward(operands, **attributes)
    for name, actual, true in zip(rows._fields, rows, expected_statistics(operands, **attributes), strict=True):
        assert (actual.shape, actual.dtype) == ((ROWS,), jnp.int32 if name == "prediction" else jnp.float32), name
        assert_close(actual, true)
    terms = make_terms(rng, rows)
    needs = Needs(True, True, operands[2].size > 0, operands[4].size > 0, False)
    results = gradients_of(terms, operands, needs=needs, **attributes)
    truth = expected_gradients(terms, operands, **attributes)
    eps = float(jnp.finfo(operands[0].dtype).eps)
    for result, true, needed in zip(results, truth, needs, strict=False):
        assert result.size == (true.size if needed else 0)
        assert_close(result, true if needed else true[:0], rtol=max(2e-5, eps))
    assert [result.dtype for result in results] == [operand.dtype for operand in (*operands[:3], *operands[4:])]


@pytest.mark.sampled
@pytest.mark.parametrize("block_hidden", [128, 8], ids=["whole features", "features in parts"])
def test_linear_cross_entropy_tpu_kernel_folds_chunks_of_a_block(block_hidden, rng, monkeypatch):
    # A block of rows takes two registers' lanes; the first block of classes is two chunks, and the second is cut in its
    # second chunk.
    for name, size in {"ROWS": 200, "CLASSES": 850}.items():
        monkeypatch.setattr(oracle, name, size)
    operands = make_operands(rng, **VARIANTS["all"])
    config = {"block_rows": 256, "block_vocab": 512, "block_hidden": block_hidden}
    run = functools.partial(statistics.run, config=config, interpret=INTERPRET, softcap=3.0, metrics=True)
    rows = RowStatistics(*jax.jit(run)(*operands))
    for actual, true in zip(rows, expected_statistics(operands, softcap=3.0, metrics=True), strict=True):
        assert_close(actual, true)


@pytest.mark.sampled
@pytest.mark.parametrize("classes", [1024, 850], ids=["whole blocks", "a cut block"])
def test_linear_cross_entropy_tpu_kernel_defers_what_a_block_gives_last(classes, rng, monkeypatch):
    # The first 128 of 640 rows are not deferred. Labels are also looked for before the first block, among no logits.
    for name, size in {"ROWS": 600, "CLASSES": classes}.items():
        monkeypatch.setattr(oracle, name, size)
    x, *others = make_operands(rng, **VARIANTS["bfloat16"])
    scale = rng.uniform(0.5, 2, size=600).astype(F32)
    scale[300] = 0
    config = {"block_rows": 640, "block_vocab": 512, "block_hidden": 128}
    run = functools.partial(statistics.run, config=config, interpret=INTERPRET, softcap=None, metrics=True)
    rows = RowStatistics(*jax.jit(run)(x, *others, scale))
    truth = expected_statistics((wide(x) * scale[:, None], *others), softcap=None, metrics=True)
    # With a scale of 0 all logits are equal, and the kernel still predicts the largest of x's own.
    truth.prediction[300] = (wide(x)[300] @ wide(others[0]).T).argmax()
    for actual, true in zip(rows, truth, strict=True):
        assert_close(actual, true)


@pytest.mark.parametrize("scale", [40.0, 640.0])
def test_linear_cross_entropy_tpu_kernels_take_large_logits(scale, rng):
    operands = make_operands(rng, scale=scale)
    rows = forward(operands)
    for actual, true in zip(rows, expected_statistics(operands, softcap=None, metrics=False), strict=True):
        # Against the size of the logits, as products of float32 have their error.
        np.testing.assert_allclose(actual, true, atol=1e-6 * scale * HIDDEN)


def test_linear_cross_entropy_tpu_kernels_lose_no_digits_to_a_common_offset(rng):
    # Whole numbers, so that the logits themselves are exact: 2^20 + (-4 ... 4).
    x = np.concatenate([rng.integers(-2, 3, size=(ROWS, 2)), np.ones((ROWS, 1)), np.zeros((ROWS, HIDDEN - 3))], axis=1)
    weight = np.concatenate([rng.integers(-1, 2, size=(CLASSES, 2)), np.full((CLASSES, 1), 2**20)], axis=1)
    weight = np.concatenate([weight, np.zeros((CLASSES, HIDDEN - 3))], axis=1)
    operands = jnp.asarray(x, F32), jnp.asarray(weight, F32), *make_operands(rng)[2:]
    truth = expected_statistics(operands, softcap=None, metrics=False)
    rows = forward(operands)
    np.testing.assert_allclose(rows.log_sum_exp, truth.log_sum_exp, rtol=1e-6)
    np.testing.assert_array_equal(rows.label_logit, truth.label_logit)
    terms = make_terms(rng, rows)
    results = gradients_of(terms, operands, needs=Needs(True, True, False, False, False))
    true_x, true_weight, *_ = expected_gradients(terms, operands, softcap=None, metrics=False)
    np.testing.assert_allclose(results[0][:, :2], true_x[:, :2], atol=2e-5)
    np.testing.assert_allclose(results[1], true_weight, atol=2e-5)


@pytest.mark.slow
def test_linear_cross_entropy_tpu_kernels_skip_rows_that_do_not_count(rng):
    x, *others = make_operands(rng)
    operands = x.at[:8].set(0), *others
    rows = forward(operands)
    for actual, true in zip(rows, expected_statistics(operands, softcap=None, metrics=False), strict=True):
        assert_close(actual, true)
    weights = [row.at[:8].set(0) for row in make_terms(rng, rows)[:4]]
    # A block on which nothing pulls is not read.
    poisoned = x.at[:8].set(jnp.nan), *others
    terms = [*weights, rows.max_logit, rows.log_sum_exp]
    x_grad, weight_grad, *_ = gradients_of(terms, poisoned, needs=Needs(True, True, False, False, False))
    true_x, true_weight, *_ = expected_gradients(terms, operands, softcap=None, metrics=False)
    np.testing.assert_array_equal(x_grad[:8], 0)
    assert_close(x_grad, true_x)
    assert_close(weight_grad, true_weight)
    nothing = [0 * row for row in terms[:4]] + terms[4:]
    for result in gradients_of(nothing, poisoned, needs=Needs(True, True, False, False, False)):
        np.testing.assert_array_equal(result, np.zeros_like(result))


@pytest.mark.slow
def test_linear_cross_entropy_tpu_kernel_predicts_the_first_of_equal_logits(rng):
    x, weight, *others = make_operands(rng, **VARIANTS["bfloat16"])
    weight = weight.at[jnp.array([5, 9, 20])].set(weight[3])
    operands = 4 * weight[jnp.array([3] * ROWS)] + 0 * x, weight, *others
    rows = forward(operands, metrics=True)
    np.testing.assert_array_equal(rows.prediction, 3)
    all_equal = 0 * x, weight, *others
    np.testing.assert_array_equal(forward(all_equal, metrics=True).prediction, 0)


@pytest.mark.slow
def test_linear_cross_entropy_tpu_kernels_allow_forbidden_classes(rng):
    x, weight, _, _, *targets = make_operands(rng, **VARIANTS["bfloat16"])
    # The first block of classes is forbidden as a whole.
    bias = jnp.where(jnp.arange(CLASSES) < 10, -jnp.inf, 0.0)
    rows = forward((x, weight, bias, jnp.full(ROWS, 12), *targets), metrics=True)
    logits = wide(x) @ wide(weight[10:]).T
    shifted = logits - logits.max(-1, keepdims=True)
    total = np.exp(shifted).sum(-1)
    assert_close(rows.max_logit, logits.max(-1))
    assert_close(rows.log_sum_exp, np.log(total))
    assert_close(rows.label_logit, shifted[:, 2])
    assert_close(rows.mean_logit, (np.exp(shifted) * shifted).sum(-1) / total)
    np.testing.assert_array_equal(rows.prediction, 10 + logits.argmax(-1))


def oracle_loss(x, weight, labels, *, bias=None, class_weight=None, label_smoothing=0.0, z_loss=0.0, softcap=None):
    """The documented formula summed over kept rows in float64, with its gradients in x and weight."""
    classes = weight.shape[0]
    kept = np.asarray(labels) != -100
    weights = np.ones(classes) if class_weight is None else wide(class_weight)
    q = (
        (1 - label_smoothing) * (np.asarray(labels)[:, None] == np.arange(classes)) + label_smoothing / classes
    ) * weights
    q, x = np.where(kept[:, None], q, 0), np.where(kept[:, None], wide(x), 0)
    logits = x @ wide(weight).T + (0 if bias is None else wide(bias))
    slope = 1.0
    if softcap is not None:
        logits = softcap * np.tanh(logits / softcap)
        slope = 1 - (logits / softcap) ** 2
    lse = np.log(np.exp(logits - logits.max(-1)[:, None]).sum(-1)) + logits.max(-1)
    loss = (q.sum(-1) * lse - (q * logits).sum(-1) + kept * z_loss * lse**2).sum()
    terms = (q.sum(-1) + 2 * kept * z_loss * lse)[:, None] * np.exp(logits - lse[:, None]) - q
    return loss, (terms * slope) @ wide(weight), (terms * slope).T @ x


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
    true_loss, true_x, true_weight = oracle_loss(x, weight, labels, **attributes)
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


SHAPES = {
    "x": (5, 8),
    "weight": (9, 8),
    "bias": (0,),
    "labels": (5,),
    "shared_target": (0,),
    "row_target": (5, 0),
    "logits": (5, 0),
}
REFUSALS = {
    "none": ({}, {}, None, None),
    "float16": ({}, {"x": "float16"}, "x is float16", "x is float16"),
    "float64": ({}, {"weight": "float64"}, "weight is float64", "weight is float64"),
    "no rows": ({"x": (0, 8)}, {}, "x is [0, 8]", "x is [0, 8]"),
    "many classes": ({"weight": (2**25, 8)}, {}, "weight has 33554432", "weight has 33554432"),
    "probabilities": ({"row_target": (5, 9)}, {}, "probabilities of every class", "probabilities of every class"),
    "kept logits": ({"logits": (5, 9)}, {}, None, "use strategy='recompute'"),
    "many features": ({"x": (5, 2**17), "weight": (9, 2**17)}, {}, None, "131072 features do not fit into VMEM"),
}


@pytest.mark.parametrize(("shapes", "dtypes", "forward_words", "backward_words"), REFUSALS.values(), ids=REFUSALS)
def test_linear_cross_entropy_tpu_kernels_refuse(shapes, dtypes, forward_words, backward_words):
    operands = [
        types.SimpleNamespace(shape=shapes.get(name, shape), dtype=dtypes.get(name, F32))
        for name, shape in SHAPES.items()
    ]
    hardware = Hardware(name="tpu", platform="tpu")
    forward_reason = statistics.KERNEL.refuses(hardware, *operands[:6], softcap=None, metrics=False)
    rows = [types.SimpleNamespace(shape=(5,), dtype=F32)] * 6
    backward_reason = backward.KERNEL.refuses(hardware, *rows, *operands, softcap=None, metrics=False)
    for reason, words in ((forward_reason, forward_words), (backward_reason, backward_words)):
        assert (reason is None) == (words is None)
        assert words is None or words in reason


def test_aclnn_linear_cross_entropy_tpu_kernels_refuse():
    def array(*shape, dtype=F32):
        return types.SimpleNamespace(shape=shape, dtype=dtype)

    hardware, x, weight, row = Hardware(name="tpu", platform="tpu"), array(5, 8), array(9, 8), array(5)
    max_sum = functools.partial(vocab_parallel.MAX_SUM_KERNEL.refuses, hardware, x, weight, row, array(), array())
    assert max_sum(return_logits=False) is None
    assert "no logits that could be returned" in max_sum(return_logits=True)
    grad = functools.partial(vocab_parallel.GRAD_KERNEL.refuses, hardware, row, x, weight, row, row)
    assert grad(row, row, array(5, 0)) is None
    assert "give logits_max and sum_exp_logits" in grad(row, row, array(5, 9))
    assert "sum_exp_logits is float64" in grad(row, array(5, dtype="float64"), array(5, 0))


@pytest.mark.parametrize(("rows", "hidden", "classes"), [(1, 5, 7), (8192, 2304, 256000), (16384, 16384, 128256)])
@pytest.mark.parametrize("target", [None, "tpu-v5e", "tpu-v5p"])
def test_linear_cross_entropy_tpu_configs_fit(target, rows, hidden, classes):
    chip = Hardware("tpu", "tpu") if target is None else named(target)
    x, weight = (types.SimpleNamespace(shape=(size, hidden), dtype=BF16) for size in (rows, classes))
    forward_configs = statistics.configs(chip, x, weight)
    backward_configs = gradients.configs(chip, x, weight)
    for configs in (forward_configs, backward_configs):
        assert configs
        assert len(configs) == len({tuple(config.items()) for config in configs})
        assert all(size % 128 == 0 for config in configs for size in config.values())
    for config in forward_configs:
        assert tiles.vmem_limit_bytes(statistics._vmem_bytes(2, **config)) < (chip.on_chip_bytes or 2**26)
    for config in backward_configs:
        assert tiles.vmem_limit_bytes(gradients._vmem_bytes(2, hidden, **config)) < (chip.on_chip_bytes or 2**26)
