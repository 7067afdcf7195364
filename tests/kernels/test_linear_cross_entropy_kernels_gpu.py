"""The linear cross entropy kernels for Hopper in Mosaic GPU's interpreter, against NumPy float64.

Tiles far smaller than the default let small arrays span several of them. What nobody has written is NaN there, and the
weight is filled up with the zeros that TMA reads beyond its end.
"""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from linear_cross_entropy_rows_oracle import expected_gradients, expected_statistics, make_logits, wide

import lowering
from jaxops import aclnn
from jaxops.linear_cross_entropy import linear_cross_entropy
from jaxops.linear_cross_entropy.operands import Columns, CotangentTerms, Needs, Rows, RowStatistics
from lowering.operators import refusal_by_fields
from pallas_kernels._jax_private import interpret_gpu_params
from pallas_kernels.gpu.linear_cross_entropy import gradients, statistics, vocab_parallel
from pallas_kernels.hardware import Hardware

INTERPRET = interpret_gpu_params(detect_races=True)
TILES = {"block_rows": 64, "block_columns": 64, "stages": 2, "copying": 1, "cluster_blocks": 1, "row_group": 2}
SIZES = {**TILES, "vocab_splits": 1, "chunk_columns": 128, "store_slots": 2}
H100 = Hardware("cuda-h100", "cuda", compute_capability=(9, 0), cores=132)
NEEDS = Needs(x=True, weight=True)


def make_case(
    rows, hidden, classes, *, dtype="bfloat16", scale=1.0, offset=0.0, bias=False, target=False, softcap=None, seed=0
):
    """Operands of the forward kernel; `scale` is about that of the logits, which `offset` is added to by the bias."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, hidden))
    weight = scale / hidden**0.5 * rng.normal(size=(classes, hidden))
    labels = rng.integers(-2, classes + 2, rows)  # some are no column
    labels[0] = classes - 1
    columns = Columns(
        jnp.asarray(weight, dtype),
        jnp.asarray(offset + rng.normal(size=classes), "float32") if bias or offset else None,
        jnp.asarray(rng.uniform(size=classes), "float32") if target else None,
    )
    return Rows(jnp.asarray(x, dtype), jnp.asarray(labels, "int32")), columns, softcap


STATISTICS = {
    "one row, tiles that reach beyond 1000 classes": (make_case(1, 64, 1000), False, {"block_columns": 128}),
    "hidden size below a block": (make_case(5, 8, 90), True, {}),
    "two row blocks, everything at once": (
        make_case(130, 136, 150, bias=True, target=True, softcap=5.0),
        True,
        {},
    ),
    "logits of 640, common offset, smoothing": (
        make_case(33, 72, 200, dtype="float16", scale=640.0, offset=1000.0, target=True),
        False,
        {"stages": 3, "copying": 0},
    ),
}


@pytest.mark.sampled
@pytest.mark.parametrize("name", STATISTICS)
def test_linear_cross_entropy_statistics_agree_with_float64(name, capfd):
    (rows, columns, softcap), metrics, sizes = STATISTICS[name]
    options = {"softcap": softcap, "metrics": metrics}
    run = functools.partial(statistics.run, config=SIZES | sizes, interpret=INTERPRET, **options)
    found = RowStatistics(*jax.jit(run)(rows, columns))
    truth = expected_statistics(rows, columns, **options)
    # What float32 arithmetic and logits kept in 16 bits would cost; the kernel is held to the former.
    naive = expected_statistics(rows, columns, dtype=np.float32, **options)
    spread = np.abs(make_logits(rows, columns, softcap)).max() * np.finfo(np.float32).eps
    weight = 1 if columns.class_targets is None else len(columns.class_targets)
    for field, value, exact, rounded in zip(found._fields, found, truth, naive, strict=True):
        assert (value is None) == (exact is None), field
        if field == "prediction":
            np.testing.assert_array_equal(value, exact)
        elif value is not None:
            assert value.shape == rows.labels.shape
            assert np.all(np.abs(value - exact) <= 2 * np.abs(rounded - exact).max() + 4 * weight * spread), field
    assert "RACE DETECTED" not in capfd.readouterr().out


@pytest.mark.sampled
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_linear_cross_entropy_statistics_of_scaled_logits_agree_with_float64(softcap, rng, capfd):
    rows, columns, softcap = make_case(5, 8, 90, softcap=softcap)
    rows = rows._replace(scale=rng.uniform(0.5, 2.0, 5).astype(np.float32))
    run = functools.partial(statistics.run, softcap=softcap, metrics=True, config=SIZES, interpret=INTERPRET)
    found = RowStatistics(*jax.jit(run)(rows, columns))
    atol = 2e-6 * np.abs(make_logits(rows, columns, softcap)).max()
    truth = expected_statistics(rows, columns, softcap=softcap, metrics=True)
    for name in ("max_logit", "log_sum_exp", "label_logit", "mean_logit"):
        np.testing.assert_allclose(getattr(found, name), getattr(truth, name), rtol=2e-6, atol=atol)
    np.testing.assert_array_equal(found.prediction, truth.prediction)
    assert "RACE DETECTED" not in capfd.readouterr().out


@pytest.mark.slow
def test_linear_cross_entropy_statistics_take_the_first_of_equal_logits_and_skip_excluded_classes():
    """A bias of -inf excludes classes, here all of the first tile. Of three splits of four tiles the last has none."""
    rows = Rows(jnp.asarray([[1.0] * 8, [0.0] * 8], "bfloat16"), jnp.asarray([70, 140], "int32"))
    weight = jnp.zeros((200, 8), "bfloat16").at[70].set(1).at[140].set(1)
    columns = Columns(weight, jnp.zeros(200).at[:64].set(-jnp.inf))
    run = functools.partial(statistics.run, softcap=None, metrics=True, config=SIZES | {"vocab_splits": 3})
    found = RowStatistics(*jax.jit(functools.partial(run, interpret=INTERPRET))(rows, columns))
    kept = 200 - 64
    np.testing.assert_allclose(found.max_logit, [8, 0])
    np.testing.assert_allclose(found.log_sum_exp, np.log([2 + (kept - 2) * np.exp(-8), kept]), rtol=1e-6)
    np.testing.assert_allclose(found.label_logit, [0, 0])
    true_mean = -8 * (kept - 2) * np.exp(-8) / (2 + (kept - 2) * np.exp(-8))
    np.testing.assert_allclose(found.mean_logit[0], true_mean, rtol=1e-5)
    np.testing.assert_array_equal(found.prediction, [70, 64])


GRADIENTS = {
    "one row": (make_case(1, 64, 70), False, {}),
    "chunks of 1000 classes": (make_case(33, 64, 1000, bias=True), False, {"chunk_columns": 512}),
    "two row blocks, everything at once": (
        make_case(130, 136, 90, bias=True, target=True, softcap=5.0),
        True,
        {"block_columns": 128},
    ),
    "logits of 640, common offset": (
        make_case(7, 8, 130, dtype="float16", scale=640.0, offset=1000.0),
        False,
        {"block_columns": 128, "chunk_columns": 256, "store_slots": 1},
    ),
}


@pytest.mark.sampled
@pytest.mark.parametrize("name", GRADIENTS)
def test_linear_cross_entropy_gradients_agree_with_float64(name, capfd):
    (rows, columns, softcap), has_slope, sizes = GRADIENTS[name]
    of_rows = expected_statistics(rows, columns, softcap=softcap)
    rng = np.random.default_rng(1)
    softmax, slope, label, target, maximum, log_sum_exp = (
        jnp.asarray(values, "float32") for values in (*rng.normal(size=(4, len(rows.x))), *of_rows[:2])
    )
    optional = None if columns.class_targets is None else target, slope if has_slope else None
    terms = CotangentTerms(softmax, maximum, log_sum_exp, label, *optional)
    needs = NEEDS._replace(bias=columns.bias is not None)
    run = functools.partial(gradients.run, config=SIZES | sizes, interpret=INTERPRET)
    (x_grad, *none), (weight_grad, bias_grad, no_target_grad) = jax.jit(
        functools.partial(run, softcap=softcap, needs=needs)
    )(terms, rows, columns)
    assert [*none, no_target_grad] == [None] * 3
    truth = expected_gradients(terms, rows, columns, softcap=softcap)
    # The cotangent is rounded to 16 bits for the products, from logits of float32; results are rounded once more.
    dtypes = {"dtype": np.float32, "product_dtype": rows.x.dtype}
    naive = expected_gradients(terms, rows, columns, softcap=softcap, **dtypes)
    operands = rows.x, columns.weight, columns.bias
    for result, exact, rounded, like in zip((x_grad, weight_grad, bias_grad), truth, naive, operands, strict=False):
        assert (result is None) == (like is None)
        if result is not None:
            assert (result.shape, result.dtype) == (like.shape, like.dtype)
            rounding = float(jnp.finfo(like.dtype).eps) * np.abs(exact).max()
            assert np.abs(wide(result) - exact).max() <= 2 * np.abs(rounded - exact).max() + rounding
    assert "RACE DETECTED" not in capfd.readouterr().out


@pytest.mark.parametrize("needs", [Needs(x=True), Needs(weight=True)], ids=["x", "weight"])
def test_linear_cross_entropy_gradients_compute_only_what_is_needed(needs):
    rows, columns, _ = make_case(3, 8, 40, bias=True)
    run = functools.partial(gradients.run, softcap=None, needs=needs, config=SIZES)
    (x_grad, *_), (weight_grad, bias_grad, _) = jax.eval_shape(run, CotangentTerms(*[jnp.ones(3)] * 4), rows, columns)
    assert [x_grad is not None, weight_grad is not None, bias_grad is not None] == [needs.x, needs.weight, False]


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_linear_cross_entropy_kernels_of_a_split_vocabulary_take_another_dtype_of_x(dtype):
    x, weight = jax.ShapeDtypeStruct((6, 64), dtype), jax.ShapeDtypeStruct((70, 64), "bfloat16")
    operands = (x, weight, jax.ShapeDtypeStruct((6,), "int32"), *[jax.ShapeDtypeStruct((), "int32")] * 2)
    assert vocab_parallel.MAX_SUM_KERNEL.refuses(H100, *operands, return_logits=False) is None
    run = functools.partial(vocab_parallel.run_max_sum, return_logits=False, config=SIZES)
    text = jax.jit(run).trace(*operands).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("stablehlo.custom_call @mosaic_gpu") == 1


@pytest.mark.slow
def test_linear_cross_entropy_split_vocabulary_runs_on_the_kernels():
    """The documented calls on two parts of a vocabulary, with the kernels and with their references."""
    rows, columns, _ = make_case(6, 64, 140)
    x, part = rows.x, columns.weight[70:]
    target = jnp.asarray([0, 69, 70, 139, 5, 100], "int32")
    start, end = jnp.asarray(70, "int32"), jnp.asarray(140, "int32")
    run = functools.partial(vocab_parallel.run_max_sum, return_logits=False, config=SIZES, interpret=INTERPRET)
    found = jax.jit(run)(x.astype("float32"), part, target, start, end)  # is rounded to the weight's dtype
    z = wide(x) @ wide(part).T
    is_other = np.asarray(target) < 70
    maximum = z.max(axis=1)
    predicted = np.where(is_other, 0, z[np.arange(6), np.maximum(target - 70, 0)] - maximum)
    np.testing.assert_allclose(found[0], maximum, rtol=1e-6)
    np.testing.assert_allclose(found[1], np.exp(z - maximum[:, None]).sum(axis=1), rtol=1e-5)
    np.testing.assert_allclose(found[2], predicted, atol=1e-5)
    np.testing.assert_array_equal(found[3], is_other)
    np.testing.assert_array_equal(found[4], np.where(is_other, 0, target - 70))
    grad = jnp.linspace(-1, 1, 6)
    total = jnp.asarray(np.exp(z - maximum[:, None]).sum(axis=1) * 1.5, "float32")
    run = functools.partial(vocab_parallel.run_grad, config=SIZES, interpret=INTERPRET)
    x_grad, weight_grad = jax.jit(run)(grad, x, part, found[3], found[4], found[0], total, None)
    softmax = np.exp(z - maximum[:, None]) / np.asarray(total)[:, None]
    is_target = (np.arange(70) == np.asarray(found[4])[:, None]) & ~is_other[:, None]
    cotangent = (softmax - is_target) * np.asarray(grad)[:, None]
    np.testing.assert_allclose(wide(x_grad), cotangent @ wide(part), rtol=0.02, atol=0.004)
    np.testing.assert_allclose(wide(weight_grad), cotangent.T @ wide(x), rtol=0.02, atol=0.008)


def kernels_in(function, *operands):
    """How many kernels the function launches on an NVIDIA GPU."""
    with lowering.use("pallas"):
        text = jax.jit(function).trace(*operands).lower(lowering_platforms=("cuda",)).as_text()
    return text.count("stablehlo.custom_call @mosaic_gpu")


@pytest.mark.slow
def test_linear_cross_entropy_lowers_to_one_kernel_a_pass():
    (x, labels, *_), (weight, *_), _ = make_case(16, 64, 300)
    loss = functools.partial(linear_cross_entropy, strategy="recompute", label_smoothing=0.1, softcap=30.0)
    assert kernels_in(lambda *arrays: loss(*arrays), x, weight, labels) == 1
    assert kernels_in(lambda *arrays: loss(*arrays, return_aux=True)[0], x, weight, labels) == 1
    assert kernels_in(jax.grad(loss, (0, 1)), x, weight, labels) == 2
    rows = functools.partial(loss, reduction="none")
    pulled = jax.vmap(jax.grad(lambda x, label: rows(x, weight, label)))
    assert kernels_in(pulled, x, jnp.maximum(labels, 0)) == 2
    mask = jnp.zeros((2,), "uint8")
    assert kernels_in(
        lambda x, w, t: aclnn.fused_linear_online_max_sum(x, w, t, vocab_start_index=0, vocab_end_index=300)[0],
        x,
        weight,
        labels,
    )
    ones = jnp.ones((16,))
    call = functools.partial(aclnn.fused_linear_cross_entropy_loss_grad, label_smoothing=0.0)
    assert kernels_in(
        lambda x, w, t: call(ones, x, w, mask, t, logits_max=ones, sum_exp_logits=ones), x, weight, labels
    )


@pytest.mark.long
@pytest.mark.parametrize("split", ["shard_map", "explicit"])
def test_linear_cross_entropy_kernels_take_each_devices_rows(split):
    axis_type = AxisType.Explicit if split == "explicit" else AxisType.Auto
    mesh = jax.make_mesh((8,), ("data",), axis_types=(axis_type,))
    (x, labels, *_), (weight, *_), _ = make_case(1024, 64, 300)
    specs = (P("data"), P(), P("data"))
    loss = functools.partial(linear_cross_entropy, strategy="recompute", reduction="sum")
    step = jax.grad(loss, (0, 1))
    operands = (x, weight, labels)
    if split == "shard_map":
        step = jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=(P("data"), P()))
    else:
        operands = [jax.device_put(v, NamedSharding(mesh, spec)) for v, spec in zip(operands, specs, strict=True)]
    with lowering.use("pallas"):
        text = jax.jit(step).trace(*operands).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("stablehlo.custom_call @mosaic_gpu") == 2
    # 128 rows a device, in a thread block of 256.
    assert "tensor<256x64xbf16>" in text


def array(*shape, dtype="bfloat16"):
    return types.SimpleNamespace(shape=shape, dtype=dtype)


def reasons(hardware=H100, hidden=64, classes=100, dtype="bfloat16", rows=8, needs=NEEDS, metrics=False, **fields):
    """Why the kernels of the statistics and of the gradients cannot run, with more fields of rows than x and labels."""
    of_rows = Rows(array(rows, hidden, dtype=dtype), array(rows, dtype="int32"))._replace(**fields)
    columns = Columns(array(classes, hidden, dtype=dtype))
    terms = CotangentTerms(*[array(rows, dtype="float32")] * 4)
    params = {"softcap": 30.0, "chunk_rows": None, "metrics": metrics, "needs": needs}
    return tuple(
        refusal_by_fields(kernel, operands) or kernel.refuses(hardware, *operands, **params)
        for kernel, operands in (
            (statistics.KERNEL, (of_rows, columns)),
            (gradients.KERNEL, (terms, of_rows, columns)),
        )
    )


def test_linear_cross_entropy_kernels_refuse_what_they_cannot_run():
    a100 = Hardware("cuda-a100", "cuda", compute_capability=(8, 0))
    b200 = Hardware("cuda-b200", "cuda", compute_capability=(10, 0))
    assert reasons() == (None, None)
    assert reasons(dtype="float16", metrics=True) == (None, None)
    assert reasons(Hardware("cuda", "cuda")) == (None, None)
    assert all("cuda-a100 has 8.0" in text for text in reasons(a100))
    assert all("cuda-b200 has 10.0" in text for text in reasons(b200))
    assert all("tf32" in text for text in reasons(dtype="float32"))
    assert all("x is float64" in text for text in reasons(dtype="float64"))
    assert all("nothing to compute" in text for text in reasons(rows=0))
    assert reasons(labels=None, probabilities=array(8, 100)) == ("takes no probabilities",) * 2
    assert all("compares rows with labels" in text for text in reasons(labels=None))
    assert reasons(margin=array(8)) == ("takes no margin",) * 2
    assert reasons(scale=array(8)) == (None, "takes no scale")
    assert "16777217" in reasons(classes=2**24 + 1, metrics=True)[0]
    assert "class weights" in reasons(needs=NEEDS._replace(class_targets=True))[1]


def test_linear_cross_entropy_kernels_of_a_split_vocabulary_refuse_what_they_cannot_run():
    x, weight, rows = array(8, 64), array(100, 64), array(8)
    max_sum = functools.partial(vocab_parallel.MAX_SUM_KERNEL.refuses, H100, x, weight, rows, array(), array())
    assert max_sum(return_logits=False) is None
    assert "logits are asked for" in max_sum(return_logits=True)
    grad = functools.partial(vocab_parallel.GRAD_KERNEL.refuses, H100, rows, x, weight, rows, rows)
    assert grad(rows, rows, None) is None
    assert "softmax is given" in grad(None, None, array(8, 100))
