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

import lowering
from jaxops import aclnn
from jaxops.linear_cross_entropy import linear_cross_entropy
from jaxops.linear_cross_entropy.logits import Needs
from pallas_kernels._jax_private import interpret_gpu_params
from pallas_kernels.gpu.linear_cross_entropy import gradients, statistics, vocab_parallel
from pallas_kernels.hardware import Hardware

INTERPRET = interpret_gpu_params(detect_races=True)
TILES = {"block_rows": 64, "block_columns": 64, "stages": 2, "copying": 1, "cluster_blocks": 1, "row_group": 2}
SIZES = {**TILES, "vocab_splits": 1, "chunk_columns": 128, "store_slots": 2}
H100 = Hardware("cuda-h100", "cuda", compute_capability=(9, 0), cores=132)
NEEDS = Needs(True, True, True, False, False)


def make_case(
    rows, hidden, classes, *, dtype="bfloat16", scale=1.0, offset=0.0, bias=False, target=False, softcap=None, seed=0
):
    """Operands of the forward kernel; `scale` is about that of the logits, which `offset` is added to by the bias."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, hidden))
    weight = scale / hidden**0.5 * rng.normal(size=(classes, hidden))
    labels = rng.integers(-2, classes + 2, rows)  # some are no column
    labels[0] = classes - 1
    values = (
        jnp.asarray(x, dtype),
        jnp.asarray(weight, dtype),
        jnp.asarray(offset + rng.normal(size=classes), "float32") if bias or offset else jnp.zeros((0,)),
        jnp.asarray(labels, "int32"),
        jnp.asarray(rng.uniform(size=classes), "float32") if target else jnp.zeros((0,)),
    )
    return values, softcap


def logits_of(operands, softcap, dtype=np.float64, stored=np.float64):
    """The logits, computed in `dtype` and kept in `stored`."""
    x, weight, bias, *_ = (np.asarray(value).astype(dtype) for value in operands)
    z = x @ weight.T
    z = z + bias if bias.size else z
    z = z if softcap is None else softcap * np.tanh(z / dtype(softcap))
    return z.astype(stored).astype(np.float64)


def expected_statistics(z, labels, target):
    labels, target = np.asarray(labels), np.asarray(target).astype(np.float64)
    rows, classes = z.shape
    maximum = z.max(axis=1)
    shifted = z - maximum[:, None]
    exponential = np.exp(shifted)
    total = exponential.sum(axis=1)
    is_column = (labels >= 0) & (labels < classes)
    label = np.where(is_column, shifted[np.arange(rows), np.clip(labels, 0, classes - 1)], 0)
    weighted = shifted @ target if target.size else np.zeros(rows)
    mean = (exponential * shifted).sum(axis=1) / total
    return maximum, np.log(total), label, weighted, mean


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
    (operands, softcap), metrics, sizes = STATISTICS[name]
    run = functools.partial(statistics.run, softcap=softcap, metrics=metrics, config=SIZES | sizes, interpret=INTERPRET)
    rows = operands[0].shape[0]
    found = jax.jit(run)(*operands, jnp.zeros((rows, 0)))
    z = logits_of(operands, softcap)
    truth = expected_statistics(z, *operands[3:])
    # What float32 arithmetic and logits kept in 16 bits would cost; the kernel is held to the former.
    naive = expected_statistics(logits_of(operands, softcap, np.float32, np.float32), *operands[3:])
    spread = np.abs(z).max() * np.finfo(np.float32).eps
    fields = ("maximum", "log_sum_exp", "label", "target", "mean")
    for field, value, exact, rounded in zip(fields[: 4 + metrics], found, truth, naive, strict=False):
        assert value.shape == (rows,)
        weight = operands[4].size or 1
        assert np.all(np.abs(value - exact) <= 2 * np.abs(rounded - exact).max() + 4 * weight * spread), field
    if metrics:
        np.testing.assert_array_equal(found[5], z.argmax(axis=1))
    assert "RACE DETECTED" not in capfd.readouterr().out


@pytest.mark.sampled
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_linear_cross_entropy_statistics_of_scaled_logits_agree_with_float64(softcap, rng, capfd):
    operands, softcap = make_case(5, 8, 90, softcap=softcap)
    scale = rng.uniform(0.5, 2.0, 5).astype(np.float32)
    run = functools.partial(statistics.run, softcap=softcap, metrics=True, config=SIZES, interpret=INTERPRET)
    found = jax.jit(run)(*operands, jnp.zeros((5, 0)), scale)
    z = logits_of(operands, softcap) * scale[:, None]
    for value, exact in zip(found, expected_statistics(z, *operands[3:]), strict=False):
        np.testing.assert_allclose(value, exact, rtol=2e-6, atol=2e-6 * np.abs(z).max())
    np.testing.assert_array_equal(found[5], z.argmax(axis=1))
    assert "RACE DETECTED" not in capfd.readouterr().out


@pytest.mark.slow
def test_linear_cross_entropy_statistics_take_the_first_of_equal_logits_and_skip_excluded_classes():
    """A bias of -inf excludes classes, here all of the first tile. Of three splits of four tiles the last has none."""
    x = jnp.asarray([[1.0] * 8, [0.0] * 8], "bfloat16")
    weight = jnp.zeros((200, 8), "bfloat16").at[70].set(1).at[140].set(1)
    bias = jnp.zeros(200).at[:64].set(-jnp.inf)
    labels = jnp.asarray([70, 140], "int32")
    run = functools.partial(statistics.run, softcap=None, metrics=True, config=SIZES | {"vocab_splits": 3})
    found = jax.jit(functools.partial(run, interpret=INTERPRET))(
        x, weight, bias, labels, jnp.zeros((0,)), jnp.zeros((2, 0))
    )
    maximum, log_sum_exp, label, _, mean, prediction = (np.asarray(value) for value in found)
    kept = 200 - 64
    np.testing.assert_allclose(maximum, [8, 0])
    np.testing.assert_allclose(log_sum_exp, np.log([2 + (kept - 2) * np.exp(-8), kept]), rtol=1e-6)
    np.testing.assert_allclose(label, [0, 0])
    np.testing.assert_allclose(mean[0], -8 * (kept - 2) * np.exp(-8) / (2 + (kept - 2) * np.exp(-8)), rtol=1e-5)
    assert (prediction[0], prediction[1]) == (70, 64)


def expected_gradients(pull, operands, softcap, z, cotangent_dtype=np.float64):
    x, weight, _, labels, target = (np.asarray(value) for value in operands)
    x, weight = x.astype(np.float64), weight.astype(np.float64)
    softmax, slope, label, by_target, maximum, log_sum_exp = (np.asarray(v).astype(np.float64)[:, None] for v in pull)
    shifted = z - maximum
    cotangent = (softmax + slope * shifted) * np.exp(shifted - log_sum_exp)
    cotangent += label * (np.arange(z.shape[1]) == labels[:, None])
    if target.size:
        cotangent += by_target * target
    if softcap is not None:
        cotangent *= 1 - (z / softcap) ** 2
    cotangent = cotangent.astype(cotangent_dtype).astype(np.float64)
    return cotangent @ weight, cotangent.T @ x, cotangent.sum(axis=0)


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
    (operands, softcap), has_slope, sizes = GRADIENTS[name]
    x, weight, bias, labels, target = operands
    rows = x.shape[0]
    z = logits_of(operands, softcap)
    maximum, log_sum_exp, *_ = expected_statistics(z, labels, target)
    rng = np.random.default_rng(1)
    softmax, slope, label, by_target = (rng.normal(size=rows) for _ in range(4))
    values = (softmax, slope * has_slope, label, by_target * bool(target.size), maximum, log_sum_exp)
    pull = [jnp.asarray(value, "float32") for value in values]
    run = functools.partial(
        gradients.run,
        softcap=softcap,
        metrics=has_slope,
        needs=NEEDS._replace(bias=bool(bias.size)),
        config=SIZES | sizes,
        interpret=INTERPRET,
    )
    found = jax.jit(run)(*pull, *operands, jnp.zeros((rows, 0)), jnp.zeros((rows, 0)))
    truth = expected_gradients(pull, operands, softcap, z)
    # The cotangent is rounded to 16 bits for the products, from logits of float32; results are rounded once more.
    z32 = logits_of(operands, softcap, np.float32, np.float32)
    naive = expected_gradients(pull, operands, softcap, z32, cotangent_dtype=np.asarray(x).dtype)
    for result, exact, rounded, like in zip(found, truth, naive, (x, weight, bias), strict=False):
        if like.size:
            assert (result.shape, result.dtype) == (like.shape, like.dtype)
            rounding = float(jnp.finfo(like.dtype).eps) * np.abs(exact).max()
            error = np.abs(np.asarray(result).astype(np.float64) - exact).max()
            assert error <= 2 * np.abs(rounded - exact).max() + rounding
    assert "RACE DETECTED" not in capfd.readouterr().out


def test_linear_cross_entropy_gradients_compute_only_what_is_needed():
    operands, _ = make_case(3, 8, 40)
    pull = [jnp.ones(3)] * 6
    run = functools.partial(gradients.run, softcap=None, metrics=False, config=SIZES)
    for needs in (Needs(True, False, False, False, False), Needs(False, True, False, False, False)):
        none = jnp.zeros((3, 0))
        shapes = jax.eval_shape(functools.partial(run, needs=needs), *pull, *operands, none, none)
        assert [shape.shape for shape in shapes] == [
            (3, 8 * needs.x),
            (40 * needs.weight, 8),
            (0,),
            (0,),
            (3, 0),
        ]


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
    (x, weight, _, _, _), _ = make_case(6, 64, 140)
    target = jnp.asarray([0, 69, 70, 139, 5, 100], "int32")
    sizes = SIZES | {"block_columns": 64}
    start, end = jnp.asarray(70, "int32"), jnp.asarray(140, "int32")
    part = weight[70:]
    run = functools.partial(vocab_parallel.run_max_sum, return_logits=False, config=sizes, interpret=INTERPRET)
    found = jax.jit(run)(x.astype("float32"), part, target, start, end)  # is rounded to the weight's dtype
    z = np.asarray(x).astype(np.float64) @ np.asarray(part).astype(np.float64).T
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
    run = functools.partial(vocab_parallel.run_grad, config=sizes, interpret=INTERPRET)
    x_grad, weight_grad = jax.jit(run)(grad, x, part, found[3], found[4], found[0], total, jnp.zeros((6, 0)))
    softmax = np.exp(z - maximum[:, None]) / np.asarray(total)[:, None]
    is_target = (np.arange(70) == np.asarray(found[4])[:, None]) & ~is_other[:, None]
    cotangent = (softmax - is_target) * np.asarray(grad)[:, None]
    np.testing.assert_allclose(
        np.asarray(x_grad).astype(float), cotangent @ np.asarray(part).astype(float), rtol=0.02, atol=0.004
    )
    np.testing.assert_allclose(
        np.asarray(weight_grad).astype(float), cotangent.T @ np.asarray(x).astype(float), rtol=0.02, atol=0.008
    )


def kernels_in(function, *operands):
    """How many kernels the function launches on an NVIDIA GPU."""
    with lowering.use("pallas"):
        text = jax.jit(function).trace(*operands).lower(lowering_platforms=("cuda",)).as_text()
    return text.count("stablehlo.custom_call @mosaic_gpu")


@pytest.mark.slow
def test_linear_cross_entropy_lowers_to_one_kernel_a_pass():
    (x, weight, _, labels, _), _ = make_case(16, 64, 300)
    loss = functools.partial(linear_cross_entropy, strategy="recompute", label_smoothing=0.1, softcap=30.0)
    assert kernels_in(lambda *arrays: loss(*arrays), x, weight, labels) == 1
    assert kernels_in(lambda *arrays: loss(*arrays, return_aux=True)[0], x, weight, labels) == 1
    assert kernels_in(jax.grad(loss, (0, 1)), x, weight, labels) == 2
    # Kept logits leave nothing to a kernel, and are no reason to refuse the whole step.
    assert kernels_in(jax.grad(functools.partial(loss, strategy="full"), (0, 1)), x, weight, labels) == 0
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


@pytest.mark.parametrize("split", ["shard_map", "explicit"])
def test_linear_cross_entropy_kernels_take_each_devices_rows(split):
    axis_type = AxisType.Explicit if split == "explicit" else AxisType.Auto
    mesh = jax.make_mesh((8,), ("data",), axis_types=(axis_type,))
    (x, weight, _, labels, _), _ = make_case(1024, 64, 300)
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


def test_linear_cross_entropy_kernels_refuse_what_they_cannot_run():
    def array(*shape, dtype="bfloat16"):
        return types.SimpleNamespace(shape=shape, dtype=dtype)

    def reason(
        hardware=H100, hidden=64, classes=100, dtype="bfloat16", rows=8, row_target=0, logits=0, needs=NEEDS, **params
    ):
        x, weight = array(rows, hidden, dtype=dtype), array(classes, hidden, dtype=dtype)
        operands = (x, weight, array(0), array(rows, dtype="int32"), array(0), array(rows, row_target))
        params = {"softcap": None, "tile_logits": None, "metrics": False, **params}
        forward = statistics.KERNEL.refuses(hardware, *operands, keep_logits=False, **params)
        pull = [array(rows, dtype="float32")] * 6
        backward = gradients.KERNEL.refuses(hardware, *pull, *operands, array(rows, logits), needs=needs, **params)
        return forward, backward

    a100 = Hardware("cuda-a100", "cuda", compute_capability=(8, 0))
    b200 = Hardware("cuda-b200", "cuda", compute_capability=(10, 0))
    assert reason() == (None, None)
    assert reason(dtype="float16", metrics=True, softcap=30.0) == (None, None)
    assert reason(Hardware("cuda", "cuda")) == (None, None)
    assert all("cuda-a100 has 8.0" in text for text in reason(a100))
    assert all("cuda-b200 has 10.0" in text for text in reason(b200))
    assert all("tf32" in text for text in reason(dtype="float32"))
    assert all("x is float64" in text for text in reason(dtype="float64"))
    assert all("nothing to compute" in text for text in reason(rows=0))
    assert all("probabilities" in text for text in reason(row_target=100))
    assert "16777217" in reason(classes=2**24 + 1, metrics=True)[0]
    assert reason(logits=100) == (None, "the logits are kept, so there are none to compute")
    assert "target weights" in reason(needs=NEEDS._replace(shared_target=True))[1]
    x, weight, rows = array(8, 64), array(100, 64), array(8)
    max_sum = functools.partial(vocab_parallel.MAX_SUM_KERNEL.refuses, H100, x, weight, rows, array(), array())
    assert max_sum(return_logits=False) is None
    assert "logits are asked for" in max_sum(return_logits=True)
    grad = functools.partial(vocab_parallel.GRAD_KERNEL.refuses, H100, rows, x, weight, rows, rows, rows, rows)
    assert grad(array(8, 0)) is None
    assert "softmax is given" in grad(array(8, 100))
