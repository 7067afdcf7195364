"""Gradients whose exponentials have a shift that is known before the product, as on TPUs, made to run on CPU.

The truth is NumPy's in float64.
"""

import functools

import contract
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from linear_cross_entropy_oracle import expected, make_case, value_and_gradients

import lowering
from jaxops.linear_cross_entropy import fold_rows, linear_cross_entropy, prior_shift
from jaxops.linear_cross_entropy.by_rows import Sums
from jaxops.linear_cross_entropy.operands import Columns, Needs, Rows, RowWeights
from jaxops.testing import derivatives, meshes
from jaxops.testing.meshes import gathered_sizes
from lowering.operators import Place
from pallas_kernels.tpu.linear_cross_entropy import exponentials

CLASSES = 300  # some beyond the first columns
OPTIONS = {"strategy": "grad_in_forward", "chunk_rows": 16, "reduction": "sum"}


@pytest.fixture(autouse=True)
def chunks(monkeypatch):
    """Takes the form on CPU, and lists the rows of its chunks."""
    traced = []
    chunk_step = prior_shift._chunk_step

    def counted(*args):
        step = chunk_step(*args)

        def counting(sums, rows, weights):
            traced.append(rows.x)
            return step(sums, rows, weights)

        return counting

    monkeypatch.setattr(prior_shift, "_chunk_step", counted)
    with lowering.use(linear_cross_entropy_sum_with_gradients="xla_prior_shift"):
        yield traced


def set_fusing(monkeypatch, is_fusing):
    for module in (fold_rows, prior_shift):
        monkeypatch.setattr(module, "fuses", lambda _: is_fusing)


@pytest.fixture(params=[False, True], ids=["in place", "fused"])
def fuses(request, monkeypatch):
    """Takes labels and sums as on GPUs, or as on TPUs."""
    set_fusing(monkeypatch, request.param)
    monkeypatch.setattr(jax.lax, "empty", lambda shape, dtype: jnp.full(shape, jnp.nan, dtype))


def errors(x, weight, labels, **attributes):
    """The relative errors of the loss and of each gradient, in the Euclidean norm."""
    actual = value_and_gradients(x, weight, labels, **OPTIONS, **attributes)
    truth = expected(x, weight, labels, reduction="sum", **attributes)
    pairs = [(np.asarray(a, np.float64), t) for a, t in zip(actual, truth, strict=False)]
    return [np.linalg.norm(a - t) / np.linalg.norm(t) for a, t in pairs]


CASES = [
    ((), {}),
    (("bias",), {"z_loss": 0.01}),
    (("class_weight",), {}),
    (("bias", "class_weight"), {"label_smoothing": 0.2, "z_loss": 0.01}),
    (("bias",), {"softcap": 3.0, "z_loss": 0.01}),
]


@pytest.mark.sampled
@pytest.mark.parametrize(("names", "attributes"), CASES, ids=str)
def test_prior_shift_equals_float64(names, attributes, rng, chunks):
    x, weight, labels = make_case(rng, rows=(3, 17), classes=CLASSES)
    labels[0, :2] = 0, CLASSES - 1
    vectors = {name: rng.uniform(0.5, 2, size=CLASSES).astype(np.float32) for name in names}
    assert max(errors(x, weight, labels, **vectors, **attributes)) < 2e-6
    assert chunks


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(("names", "attributes"), CASES, ids=str)
@pytest.mark.usefixtures("fuses")
def test_exponentials_from_the_tpu_kernel_equal_float64(names, attributes, dtype, rng, chunks):
    x, weight, labels = make_case(rng, rows=(3, 17), hidden=130, classes=CLASSES, dtype=dtype, scale=0.3)
    vectors = {name: jnp.asarray(rng.uniform(0.5, 2, size=CLASSES), jnp.float32) for name in names}
    with lowering.use("interpret:mosaic_tpu", linear_cross_entropy_sum_with_gradients="interpret:mosaic_tpu"):
        gradients = functools.partial(value_and_gradients, **OPTIONS, **vectors, **attributes)
        explained = lowering.explain(gradients, x, weight, labels, target="tpu-v5e").rows
        loss, *others = errors(x, weight, labels, **vectors, **attributes)
    ran = {row.operator: row.implementation for row in explained}
    assert ran["linear_cross_entropy_sum_with_gradients"] == "mosaic_tpu (interpreted)"
    assert chunks
    assert loss < 2e-6
    assert max(others) < (1e-5 if dtype == "float32" else 5e-3)


@pytest.mark.long
@pytest.mark.parametrize("features", [512, 200])
def test_exponentials_of_the_tpu_kernel_are_complete_when_features_come_in_parts(features, rng):
    x, weight, labels = make_case(rng, rows=(130,), hidden=features, classes=CLASSES, scale=0.2, ignored=0)
    reference, bias = rng.normal(size=130).astype(np.float32), rng.normal(size=CLASSES).astype(np.float32)
    config = {"block_rows": 128, "block_vocab": 256, "block_hidden": 128}
    options = {"softcap": None, "most_excess": 60.0, "config": config, "interpret": True}
    with jax.default_matmul_precision("highest"):
        off_label, rest, _ = exponentials.exponentials(x, weight, bias, None, labels, reference, **options)
    truth = np.exp(np.float64(x) @ np.float64(weight).T + bias - reference[:, None])
    truth[np.arange(130), labels] = 0
    np.testing.assert_allclose(off_label, truth, rtol=2e-5)
    np.testing.assert_allclose(rest, truth.sum(-1), rtol=2e-5)


@pytest.mark.long
def test_the_sum_alone_takes_the_kernel_of_the_statistics(rng):
    x, weight, labels = make_case(rng, rows=(33,), classes=CLASSES, dtype="bfloat16")
    loss = functools.partial(linear_cross_entropy, **OPTIONS, label_smoothing=0.1)
    with lowering.use("interpret:mosaic_tpu", linear_cross_entropy_sum_with_gradients="interpret:mosaic_tpu"):
        (row,) = lowering.explain(loss, x, weight, labels, target="tpu-v5e").rows
        actual = loss(x, weight, labels)
    assert (row.operator, row.implementation) == ("linear_cross_entropy", "mosaic_tpu (interpreted)")
    truth = expected(x, weight, labels, reduction="sum", label_smoothing=0.1)[0]
    np.testing.assert_allclose(actual, truth, rtol=2e-6)


@pytest.mark.parametrize(
    ("attributes", "dtype", "reason"),
    [
        ({}, "float16", "float16 cannot hold exponentials above their reference"),
        ({"label_smoothing": 0.1, "softcap": 2.0}, "float32", "label smoothing of bounded logits needs the logits"),
    ],
    ids=str,
)
def test_explain_says_why_no_kernel_computes_the_exponentials(attributes, dtype, reason, rng):
    x, weight, labels = make_case(rng, rows=(33,), classes=CLASSES, dtype=dtype)
    gradients = functools.partial(value_and_gradients, **OPTIONS, **attributes)
    with lowering.use("auto"):
        (row,) = lowering.explain(gradients, x, weight, labels, target="tpu-v5e").rows
    assert row.operator == "linear_cross_entropy_sum_with_gradients"
    assert reason in row.refusals[0].reason


@pytest.mark.sampled
@pytest.mark.parametrize("scale", [0.02, 1.0, 8.0, 64.0])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_prior_shift_takes_logits_of_any_size(scale, dtype, rng):
    x, weight, labels = make_case(rng, rows=(64,), hidden=16, classes=CLASSES, dtype=dtype, scale=scale / 4)
    loss, *gradients = errors(x, weight, labels)
    assert loss < 2e-6
    assert max(gradients) < (1e-5 if dtype == "float32" else 4e-3)


@pytest.mark.long
@pytest.mark.sampled
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.usefixtures("fuses")
def test_chunks_are_computed_again_in_whatever_order_rows_are_taken(dtype, rng, chunks):
    """Some rows are ignored and hold NaN, some fail, and the weight's gradient may be added up in bfloat16."""
    x, weight, labels = make_case(rng, rows=(2, 30), hidden=128, classes=CLASSES, dtype="bfloat16", scale=0.2)
    x = x.at[..., 0].set(1).at[:, ::3, 0].set(0)
    weight = weight.at[:, 0].set(0).at[-1, 0].set(100)
    labels = np.where(labels >= 0, labels % 200, labels)
    truth = expected(x, weight, labels, reduction="mean")
    x = jnp.where(labels[..., None] < 0, jnp.nan, x)
    options = OPTIONS | {"reduction": "mean", "weight_grad_dtype": dtype}
    with lowering.use("interpret:mosaic_tpu", linear_cross_entropy_sum_with_gradients="interpret:mosaic_tpu"):
        loss, x_grad, weight_grad, *_ = value_and_gradients(x, weight, labels, **options)
    assert chunks
    np.testing.assert_allclose(loss, truth[0], rtol=2e-6)
    for actual, wanted, limit in (
        (x_grad, truth[1], 3e-3),
        (weight_grad, truth[2], 3e-3 + 2e-3 * (dtype != jnp.float32)),
    ):
        assert np.linalg.norm(np.float64(actual) - wanted) / np.linalg.norm(wanted) < limit


@pytest.mark.long
@pytest.mark.sampled
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("excess", [0.0, 100.0])
def test_each_device_of_a_mesh_takes_its_own_rows_and_those_that_fail_again(
    excess, axis_type, rng, chunks, monkeypatch
):
    """Some rows are ignored and hold NaN; with an excess some fail, on a few of the devices."""
    set_fusing(monkeypatch, True)
    x, weight, labels = make_case(rng, rows=(8, 40), classes=CLASSES)
    x = x.at[..., 0].set(1).at[2:, :, 0].set(0)
    weight = weight.at[:, 0].set(0).at[-1, 0].set(excess)
    labels = np.where(labels >= 0, labels % 200, labels)
    truth = expected(x, weight, labels, reduction="sum")
    x = jnp.where(labels[..., None] < 0, jnp.nan, x)
    mesh = jax.make_mesh((4,), ("data",), axis_types=(axis_type,))
    operands = zip((x, weight, labels), (P("data"), P(), P("data")), strict=True)
    on_mesh = [jax.device_put(operand, NamedSharding(mesh, spec)) for operand, spec in operands]
    gradients = jax.jit(functools.partial(value_and_gradients, **OPTIONS | {"chunk_rows": 40}))
    compiled = gradients.lower(*on_mesh).compile()
    for actual, wanted in zip(compiled(*on_mesh), truth, strict=False):
        np.testing.assert_allclose(actual, wanted, rtol=1e-5, atol=1e-5)
    # 40 rows on each of the four devices: two chunks of the 320.
    assert chunks[0].shape == (8, 20, x.shape[-1])
    assert list(gathered_sizes(compiled.as_text())) == []


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize("excess", [50.0, 70.0, 1e4])
def test_rows_whose_maximum_is_nowhere_near_the_reference_are_computed_again(excess, rng, chunks):
    """The label and the first columns say nothing of the column that has all the probability."""
    x, weight, labels = make_case(rng, rows=(40,), classes=CLASSES, ignored=0)
    x = x.at[:, 0].set(1).at[::3, 0].set(0)
    weight = weight.at[:, 0].set(0).at[-1, 0].set(excess)
    assert max(errors(x, weight, labels % 200)) < 2e-6
    assert chunks
    needs = Needs(x=True, weight=True)
    for rows, may_fail in ((slice(None), excess > 60), (slice(None, None, 3), False)):
        operands = Rows(x[rows], labels[rows] % 200), Columns(weight)
        exponentiating = functools.partial(prior_shift.exponentials, operands[1], None, False)
        step = prior_shift._chunk_step(operands[1], None, needs, False, exponentiating, Place("cpu"))
        weights = RowWeights(label=jnp.ones(operands[0].labels.shape))
        exact = step(Sums.zeros(operands[1], needs, None), operands[0], weights)[1]
        assert exact.all() == (not may_fail)


@pytest.mark.parametrize("excess", [0.0, 100.0])
def test_a_chunk_behind_a_tpu_s_kernel_is_computed_again_in_a_branch(excess, rng, monkeypatch):
    """Also by kernels on TPUs, whose exponentials stand here in jnp."""
    set_fusing(monkeypatch, True)
    x, weight, labels = make_case(rng, rows=(40,), classes=CLASSES, ignored=0)
    x = x.at[:, 0].set(1).at[::3, 0].set(0)
    weight = weight.at[:, 0].set(0).at[-1, 0].set(excess)
    labels = labels % 200

    def summed(x, weight):
        columns = Columns(weight)
        options = {"softcap": None, "chunk_rows": 40, "metrics": False, "weight_grad_dtype": None}
        loss, _, of_rows, of_columns = prior_shift.summed_by_prior_shift(
            Rows(x, labels),
            columns,
            RowWeights(label=jnp.ones(40)),
            needs=Needs(x=True, weight=True),
            place=Place("tpu"),
            exponentiating=functools.partial(prior_shift.exponentials, columns, None, False),
            **options,
        )
        return loss, of_rows.x, of_columns.weight

    assert "cond" in {equation.primitive.name for equation in jax.make_jaxpr(summed)(x, weight).eqns}
    truth = expected(x, weight, labels, reduction="sum")
    for actual, wanted in zip(jax.jit(summed)(x, weight), truth, strict=False):
        np.testing.assert_allclose(actual, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("excess", [0.0, 100.0])
def test_what_aux_says_of_rows_equals_float64(excess, rng, chunks):
    """With an excess some rows are computed again. Two classes are alike: the first of them is predicted."""
    x, weight, labels = make_case(rng, rows=(40,), classes=CLASSES)
    x = x.at[:, 0].set(1).at[::3, 0].set(0)
    weight = weight.at[:, 0].set(0).at[-1, 0].set(excess).at[:40:5].set(weight[5])
    labels = np.where(labels >= 0, labels % 200, labels)

    def loss(x, weight):
        return linear_cross_entropy(x, weight, labels, return_aux=True, **OPTIONS)

    (total, aux), gradients = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(x, weight)
    truth = expected(x, weight, labels, reduction="sum")
    for actual, wanted in zip((total, *gradients), truth, strict=False):
        np.testing.assert_allclose(actual, wanted, rtol=1e-5, atol=1e-5)
    logits = np.float64(x) @ np.float64(weight).T
    lse = np.logaddexp.reduce(logits, axis=-1)
    p = np.exp(logits - lse[:, None])
    np.testing.assert_allclose(aux.lse, lse, rtol=1e-6)
    np.testing.assert_allclose(aux.entropy, np.sum(p * (lse[:, None] - logits), axis=-1), rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(aux.prediction, logits.argmax(-1))
    np.testing.assert_array_equal(aux.accuracy, (logits.argmax(-1) == labels) & (labels >= 0))
    assert chunks


def test_a_confident_row_keeps_the_digits_of_its_gradient(rng):
    """Where p of the label is nearly 1, p - 1 cancels, and is taken in float32."""
    x, weight, labels = make_case(rng, rows=(32,), hidden=64, classes=CLASSES, dtype="bfloat16", ignored=0)
    x = (x.astype(jnp.float32) / 8 + weight.astype(jnp.float32)[labels] / 3).astype(jnp.bfloat16)
    assert expected(x, weight, labels, reduction="none")[0].max() < 0.1
    _, x_error, weight_error = errors(x, weight, labels)
    assert max(x_error, weight_error) < 5e-3


def test_forbidden_classes_and_ignored_rows_count_nothing(rng):
    x, weight, labels = make_case(rng, rows=(48,), classes=CLASSES)
    bias = np.where(np.arange(CLASSES) % 3 == 0, -np.inf, 0).astype(np.float32)
    labels = np.where((labels >= 0) & (labels % 3 == 0), labels + 1, labels)[:47]  # one row short of whole chunks
    x = x[:47]
    x = np.where((labels < 0)[:, None], np.nan, x)
    loss, x_grad, weight_grad, _ = value_and_gradients(x, weight, labels, bias=jnp.asarray(bias), **OPTIONS)
    allowed = np.arange(CLASSES) % 3 != 0
    position = np.where(labels >= 0, np.cumsum(allowed)[np.maximum(labels, 0)] - 1, labels)
    truth = expected(np.where(np.isnan(x), 0, x), weight[allowed], position, reduction="sum")
    np.testing.assert_allclose(loss, truth[0], rtol=2e-6)
    np.testing.assert_allclose(x_grad, truth[1], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(weight_grad[allowed], truth[2], rtol=1e-5, atol=1e-6)
    assert not weight_grad[~allowed].any()


def test_a_label_that_is_no_class_makes_the_loss_nan_and_no_other_row_wrong(rng):
    x, weight, labels = make_case(rng, rows=(20,), classes=CLASSES, ignored=0)
    labels[7] = CLASSES
    loss, x_grad, _ = value_and_gradients(x, weight, labels, **OPTIONS)
    assert np.isnan(loss)
    others = np.arange(20) != 7
    truth = expected(x[others], weight, labels[others], reduction="sum")
    np.testing.assert_allclose(x_grad[others], truth[1], rtol=1e-5, atol=1e-6)


def test_a_symbolic_number_of_rows_exports_for_tpus(rng, chunks):
    concrete, weight, concrete_labels = make_case(rng, rows=(9,), classes=CLASSES)
    (rows,) = jax.export.symbolic_shape("rows")
    x, labels = jax.ShapeDtypeStruct((rows, 6), jnp.float32), jax.ShapeDtypeStruct((rows,), jnp.int32)
    step = jax.jit(jax.grad(lambda x, labels: linear_cross_entropy(x, weight, labels, **OPTIONS)))
    with lowering.use("auto"):
        exported = jax.export.export(step, platforms=["tpu", "cpu"])(x, labels)
    assert not chunks
    truth = expected(concrete, weight, concrete_labels, reduction="sum")[1]
    np.testing.assert_allclose(exported.call(concrete, concrete_labels), truth, rtol=1e-4, atol=1e-6)


def draw_rows(rng):
    x, weight = (rng.normal(size=shape).astype(np.float32) for shape in ((16, 3), (6, 3)))
    return x, weight, rng.integers(-1, 6, size=16).astype(np.int32), rng.uniform(0.5, 2, size=6).astype(np.float32)


def by_prior_shift(x, weight, labels, bias):
    options = {"ignore_index": -1, "label_smoothing": 0.2, "z_loss": 0.05}
    return linear_cross_entropy(x, weight, labels, bias=bias, **OPTIONS | {"chunk_rows": 6} | options)


CASE = contract.Case(
    name="by_prior_shift",
    fn=by_prior_shift,
    operands=draw_rows,
    differentiable=(0, 1, 3),
    batched=(0, None, 0, None),
    operator="linear_cross_entropy",
    backward="linear_cross_entropy_sum_with_gradients",
    implementation="xla_prior_shift",
)


# Those in which gradients are lowered.
NAMES = (
    *(one.name for one in (*derivatives.PROMISES, *meshes.PROMISES)),
    "jacobians_and_hessians_agree_in_both_modes",
    "crossed_splits_equal_one_device",
    "every_split_equals_one_device",
)
PROMISES = [contract.BY_NAME[name] for name in NAMES]


@pytest.mark.slow
@pytest.mark.parametrize("promise", PROMISES, ids=contract.promise_name)
def test_prior_shift_keeps_promise(promise, chunks):
    promise(CASE)
    assert chunks


def test_what_needs_no_gradient_has_no_product(rng):
    x, weight, labels = make_case(rng, rows=(64,), hidden=32, classes=CLASSES, ignored=0)

    def loss(x, weight):
        return linear_cross_entropy(x, weight, labels, **OPTIONS)

    products = {
        argnums: jax.jit(jax.grad(loss, argnums)).lower(x, weight).as_text().count("stablehlo.dot_general")
        for argnums in ((0, 1), (0,), (1,))
    }
    # Of the first columns, of all, and one for each gradient; the last three again for rows that are computed again.
    assert products == {(0, 1): 7, (0,): 5, (1,): 5}
