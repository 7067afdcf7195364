"""`linear_log_probs`: values, gradients and second derivatives against NumPy float64, and bad input."""

import functools
import re

import contract
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import lowering
from jaxops import BadParamError, linear_log_probs

IGNORED = -100
ROWS, HIDDEN, CLASSES = 13, 6, 64


def expected(x, weight, labels, cotangents, *, bias=None, temperature=1.0, softcap=None, ignore_index=IGNORED):
    """Log-probabilities, entropies, and the gradients of x, weight, bias and each row's temperature in float64."""
    wide_x, wide_weight = (np.asarray(v).astype(np.float64) for v in (x, weight))
    kept = np.asarray(labels) != ignore_index
    wide_x = np.where(kept[..., None], wide_x, 0)
    temperature = np.where(kept, np.broadcast_to(np.float64(temperature), kept.shape), 1)[..., None]
    z = wide_x @ wide_weight.T + (0 if bias is None else np.asarray(bias).astype(np.float64))
    slope = np.ones_like(z)
    if softcap is not None:
        slope = 1 - np.tanh(z / softcap) ** 2
        z = softcap * np.tanh(z / softcap)
    scaled = (z - z.max(-1, keepdims=True)) / temperature
    log_p = scaled - np.log(np.exp(scaled).sum(-1, keepdims=True))
    p = np.exp(log_p)
    is_label = np.arange(wide_weight.shape[0]) == np.asarray(labels)[..., None]
    entropy = -(p * log_p).sum(-1)
    for_log_prob, for_entropy = (np.where(kept, v, 0)[..., None] for v in cotangents)
    d_scaled = for_log_prob * (is_label - p) - for_entropy * p * (log_p + entropy[..., None])
    d_temperature = -(d_scaled * scaled).sum(-1) / temperature[..., 0]  # the maximum cancels
    dz = d_scaled / temperature * slope
    rows = tuple(range(wide_x.ndim - 1))
    gradients = dz @ wide_weight, np.tensordot(dz, wide_x, (rows, rows)), dz.sum(rows), d_temperature
    return np.where(kept, np.where(is_label, log_p, 0).sum(-1), 0), np.where(kept, entropy, 0), *gradients


def draw(rng, rows=(ROWS,), classes=CLASSES, dtype="float32"):
    x, weight = rng.normal(size=(*rows, HIDDEN)), rng.normal(size=(classes, HIDDEN))
    labels = np.where(rng.uniform(size=rows) < 0.3, IGNORED, rng.integers(0, classes, size=rows)).astype(np.int32)
    return jnp.asarray(x, dtype), jnp.asarray(weight, dtype), labels


def results_and_gradients(x, weight, labels, cotangents, *, temperature, bias, **options):
    def both(x, weight, bias, temperature):
        options["return_entropy"] = True
        return linear_log_probs(x, weight, labels, bias=bias, temperature=temperature, **options)

    @jax.jit
    def run(*primals):
        results, pull = jax.vjp(both, *primals)
        return *results, *pull(tuple(jnp.asarray(v, results[0].dtype) for v in cotangents))

    return run(x, weight, bias, temperature)


def assert_near(actual, true, rtol=2e-5):
    actual, scale = np.asarray(actual).astype(np.float64), max(1e-3, float(np.max(np.abs(true), initial=0)))
    np.testing.assert_allclose(actual, true, rtol=rtol, atol=rtol * scale)


OPTIONS = {
    "plain": {"temperature": 1.0},
    "traced": {"temperature": np.float32(0.7)},
    "each-row": {"temperature": "rows"},
    "softcap": {"temperature": "rows", "softcap": 3.0},
    "transposed": {"temperature": np.float32(1.5), "transpose_weight": True},
    "chunks": {"temperature": "rows", "softcap": 3.0, "chunk_rows": 4},
    "chunks-plain": {"temperature": 1.0, "chunk_rows": 4},
}


@pytest.mark.sampled
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_linear_log_probs_equal_float64(options, rng):
    x, weight, labels = draw(rng)
    bias, cotangents = rng.normal(size=CLASSES).astype(np.float32), rng.normal(size=(2, ROWS))
    options = dict(options)
    temperature = options.pop("temperature")
    # An ignored row may hold anything.
    poisoned = x.at[labels == IGNORED].set(jnp.nan)
    by_row = rng.uniform(0.3, 3, size=ROWS).astype(np.float32)
    given = np.where(labels == IGNORED, np.nan, by_row).astype(np.float32) if temperature == "rows" else temperature
    transposed = options.get("transpose_weight", False)
    operands = poisoned, weight.T if transposed else weight, labels, cotangents
    if temperature == 1.0:  # not traced
        fn = functools.partial(linear_log_probs, labels=labels, return_entropy=True, temperature=1.0, **options)
        results, pull = jax.vjp(lambda x, weight, bias: fn(x, weight, bias=bias), poisoned, weight, bias)
        actual = *results, *pull(tuple(jnp.asarray(v, jnp.float32) for v in cotangents))
    else:
        actual = results_and_gradients(*operands, temperature=given, bias=bias, **options)
    wide = by_row if temperature == "rows" else temperature
    truth = list(expected(x, weight, labels, cotangents, bias=bias, temperature=wide, softcap=options.get("softcap")))
    if transposed:
        truth[3] = truth[3].T
    if np.ndim(given) == 0:
        truth[5] = truth[5].sum()
    for result, true in zip(actual, truth, strict=False):
        assert_near(result, true, rtol=5e-5)


@pytest.mark.sampled
@pytest.mark.parametrize("rows", [(), (0,), (2, 3, 1)], ids=str)
def test_linear_log_probs_take_any_shape(rows, rng):
    case = draw(rng, rows=rows, classes=7)
    temperature = rng.uniform(0.5, 2, size=rows).astype(np.float32)
    actual = linear_log_probs(*case, temperature=temperature, return_entropy=True)
    for result, true in zip(actual, expected(*case, np.ones((2, *rows)), temperature=temperature), strict=False):
        assert_near(result, true)
        assert result.dtype == jnp.float32


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("chunk_rows", [None, 4])
def test_linear_log_probs_of_16_bits_keep_float32_logits(dtype, chunk_rows, rng):
    case = draw(rng, dtype=dtype)
    temperature, cotangents = np.float32(0.3), np.ones((2, ROWS))
    actual = results_and_gradients(*case, cotangents, temperature=temperature, bias=None, chunk_rows=chunk_rows)
    *truth, _, by_row = expected(*case, cotangents, temperature=temperature)
    assert [result.dtype for result in actual if result is not None] == [*["float32"] * 2, dtype, dtype, "float32"]
    # The results have float32's error, although 1 / 0.3 has no 16-bit value; gradients have that of rounding.
    for result, true in zip(actual[:2], truth[:2], strict=True):
        assert_near(result, true, rtol=2e-6)
    for result, true in zip(actual[2:4], truth[2:], strict=True):
        assert_near(result, true, rtol=2 * float(jnp.finfo(dtype).eps))
    assert_near(actual[5], by_row.sum(), rtol=1e-5)


@pytest.mark.sampled
@pytest.mark.parametrize("chunk_rows", [None, 4])
def test_linear_log_probs_lose_no_digits_to_a_common_offset(chunk_rows, rng):
    x, weight, labels = draw(rng)
    labels, bias = np.abs(labels) % CLASSES, np.full(CLASSES, 2.0**12, np.float32)
    temperature = rng.uniform(0.5, 2, size=ROWS).astype(np.float32)
    x, weight = jnp.round(8 * x) / 8, jnp.round(8 * weight) / 8  # so that the offset itself rounds nothing
    operands = x, weight, labels, rng.normal(size=(2, ROWS))
    actual = results_and_gradients(*operands, temperature=temperature, bias=bias, chunk_rows=chunk_rows)
    for result, true in zip(actual, expected(*operands, bias=bias, temperature=temperature), strict=True):
        assert_near(result, true, rtol=2e-3)


@pytest.mark.sampled
@pytest.mark.parametrize("chunk_rows", [None, 4])
def test_linear_log_probs_have_second_derivatives(chunk_rows, rng):
    _, _, labels = draw(rng, rows=(5,))

    def plain(x, weight, bias, temperature):
        z = 3 * jnp.tanh((x @ weight.T + bias[None]) / 3) / temperature[:, None]
        log_p = jax.nn.log_softmax(z)
        kept = labels != IGNORED
        picked = jnp.take_along_axis(log_p, np.where(kept, labels, 0)[:, None], 1)[:, 0]
        return jnp.where(kept, picked, 0.0), jnp.where(kept, -jnp.sum(jnp.exp(log_p) * log_p, -1), 0.0)

    def ours(x, weight, bias, temperature):
        options = {"softcap": 3.0, "chunk_rows": chunk_rows, "return_entropy": True}
        return linear_log_probs(x, weight, labels, bias=bias, temperature=temperature, **options)

    with jax.enable_x64(True):
        shapes = (5, HIDDEN), (CLASSES, HIDDEN), (CLASSES,)
        operands = *(rng.normal(size=shape) for shape in shapes), rng.uniform(0.5, 2, size=5)
        tangents = tuple(rng.normal(size=v.shape) for v in operands)

        def derivatives(fn):
            gradient = jax.grad(lambda *args: sum(jnp.sum(jnp.sin(v)) for v in fn(*args)), (0, 1, 2, 3))

            def along_tangents(*args):
                return sum(jnp.vdot(v, t) for v, t in zip(gradient(*args), tangents, strict=True))

            return jax.jvp(gradient, operands, tangents), jax.grad(along_tangents, (0, 1, 2, 3))(*operands)

        results = [jax.jit(functools.partial(derivatives, fn))() for fn in (ours, plain)]
        for actual, true in zip(*map(jax.tree.leaves, results), strict=True):
            np.testing.assert_allclose(actual, true, rtol=1e-9, atol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("check_vma", contract.first_in_every_run([True, False]))
def test_linear_log_probs_over_a_split_vocabulary_equal_one_device(check_vma, rng):
    x, weight, labels = draw(rng)
    bias, temperature = rng.normal(size=CLASSES).astype(np.float32), rng.uniform(0.5, 2, size=ROWS).astype(np.float32)
    cotangents = rng.normal(size=(2, ROWS)).astype(np.float32)

    def both(x, weight, bias, temperature, axis):
        options = {"bias": bias, "temperature": temperature, "softcap": 3.0, "chunk_rows": 4, "vocab_axis": axis}
        return linear_log_probs(x, weight, labels, return_entropy=True, **options)

    mesh = jax.make_mesh((4,), ("vocab",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
    split = jax.shard_map(
        functools.partial(both, axis="vocab"),
        mesh=mesh,
        in_specs=(P(), P("vocab"), P("vocab"), P()),
        out_specs=P(),
        check_vma=check_vma,
    )
    whole = functools.partial(both, axis=None)

    @functools.partial(jax.jit, static_argnums=0)
    def results_and_gradients(fn, *operands):
        results, pull = jax.vjp(fn, *operands)
        return results, pull(tuple(cotangents))

    of_split, of_whole = (results_and_gradients(fn, x, weight, bias, temperature) for fn in (split, whole))
    contract.assert_close(of_split, of_whole)


def test_linear_log_probs_take_labels_and_temperatures_split_otherwise(rng):
    x, weight, labels = draw(rng, rows=(8, 4))
    temperature = rng.uniform(0.5, 2, size=(8, 4)).astype(np.float32)
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(AxisType.Explicit,) * 2)
    specs = P("a"), P(), P("b"), P(None, "a")
    placed = [
        jax.device_put(v, NamedSharding(mesh, spec))
        for v, spec in zip((x, weight, labels, temperature), specs, strict=True)
    ]

    def total(x, weight, temperature, labels):
        return jnp.sum(jnp.sin(linear_log_probs(x, weight, labels, temperature=temperature)))

    gradient = jax.jit(jax.value_and_grad(total, (0, 1, 2)))
    with jax.set_mesh(mesh):
        actual = gradient(*placed[:2], placed[3], placed[2])
    contract.assert_close(actual, gradient(x, weight, temperature, labels))


@pytest.mark.parametrize("label", [CLASSES, -1, 2**31 - 1])
def test_linear_log_probs_of_labels_that_are_no_classes_are_nan(label, rng):
    x, weight, labels = draw(rng)
    labels[:2] = label, IGNORED
    log_probs, entropy = linear_log_probs(x, weight, labels, return_entropy=True)
    assert np.isnan(log_probs).tolist() == [True] + [False] * (ROWS - 1)
    assert np.isfinite(entropy).all()
    assert log_probs[1] == entropy[1] == 0


def test_linear_log_probs_at_temperatures_that_are_not_positive_are_nan(rng):
    x, weight, labels = draw(rng, rows=(4,))
    labels[:] = 0, 1, 2, IGNORED
    results = linear_log_probs(x, weight, labels, temperature=np.float32([0, -1, 1, 0]), return_entropy=True)
    for result in results:
        assert np.isnan(result).tolist() == [True, True, False, False]


@pytest.mark.slow
def test_linear_log_probs_allow_forbidden_classes(rng):
    x, weight, labels = draw(rng)
    labels %= 8
    bias = np.where(np.arange(CLASSES) < 40, 0, -np.inf).astype(np.float32)
    truth = expected(x, weight[:40], labels, np.ones((2, ROWS)), temperature=0.5)
    fn = functools.partial(linear_log_probs, x, weight, labels, bias=bias, return_entropy=True, chunk_rows=4)
    for result, true in zip(fn(temperature=0.5), truth, strict=False):
        assert_near(result, true)
    for derivative in (jax.grad, jax.jacfwd):
        of_temperature = derivative(lambda temperature: sum(jnp.sum(v) for v in fn(temperature=temperature)))
        assert_near(jax.jit(of_temperature)(jnp.float32(0.5)), truth[5].sum())


@pytest.mark.slow
def test_linear_log_probs_skip_chunks_of_ignored_rows(rng):
    x, weight, labels = draw(rng, rows=(1100,))
    labels[300:] = IGNORED
    bias = np.full(CLASSES, 120, np.float32)  # exp(bias) overflows
    temperature = rng.uniform(0.5, 2, size=1100).astype(np.float32)

    def log_probs(x, weight, temperature):
        return linear_log_probs(x, weight, labels, bias=bias, temperature=temperature, chunk_rows=300)

    result, pull = jax.vjp(jax.jit(log_probs), x, weight, temperature)
    truth = expected(x, weight, labels, np.stack([np.ones(1100), np.zeros(1100)]), bias=bias, temperature=temperature)
    assert_near(result, truth[0])
    for actual, true in zip(pull(jnp.ones(1100)), (*truth[2:4], truth[5]), strict=True):
        assert_near(actual, true, rtol=1e-4)


def test_linear_log_probs_of_a_new_temperature_compile_nothing(rng):
    x, weight, labels = draw(rng)
    fn = jax.jit(lambda temperature: linear_log_probs(x, weight, labels, temperature=temperature))
    for temperature in (0.5, 1.0, 2.0):
        assert_near(fn(temperature), expected(x, weight, labels, np.ones((2, ROWS)), temperature=temperature)[0])
    assert fn._cache_size() == 1


def test_linear_log_probs_at_temperature_1_multiply_nothing(rng):
    x, weight, labels = draw(rng)
    for temperature, count in ((1, 3), (2, 4)):
        fn = functools.partial(linear_log_probs, temperature=temperature)
        (row,) = lowering.explain(fn, x, weight, labels).rows
        assert (row.operator, len(row.operands)) == ("linear_cross_entropy", count)


def test_linear_log_probs_never_hold_all_logits(rng):
    x, weight, labels = draw(rng, rows=(512,), classes=4096)

    def total(x, weight, temperature):
        log_probs, entropy = linear_log_probs(
            x, weight, labels, temperature=temperature, chunk_rows=8, return_entropy=True
        )
        return jnp.sum(log_probs) + jnp.sum(entropy)

    compiled = jax.jit(jax.grad(total, (0, 1, 2))).lower(x, weight, jnp.float32(2)).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 4 * 512 * 4096 // 8


def test_linear_log_probs_run_kernels_where_asked(rng):
    x, weight, labels = draw(rng, dtype="bfloat16")

    def gradients(x, weight):
        return jax.grad(lambda *args: jnp.sum(linear_log_probs(*args, labels, chunk_rows=8)), (0, 1))(x, weight)

    with lowering.use("pallas"):
        explained = lowering.explain(gradients, x, weight, target="tpu-v5e")
    assert [row.implementation for row in explained.rows] == ["mosaic_tpu"] * 2
    with lowering.use("pallas"):
        warmer = functools.partial(linear_log_probs, labels=labels, temperature=2.0)
        explained = lowering.explain(warmer, x, weight, target="tpu-v5e")
    assert explained.notes == ("linear_log_probs: strategy recompute, as results are rows",)
    assert [(row.operator, row.implementation) for row in explained.rows] == [("linear_cross_entropy", "mosaic_tpu")]


@pytest.mark.sampled
@pytest.mark.parametrize(("is_scaled", "softcap"), [(False, None), (True, None), (True, 3.0)])
def test_linear_log_probs_run_the_tpu_kernel(is_scaled, softcap, rng):
    x, weight, labels = draw(rng, dtype="bfloat16")
    bias = jnp.asarray(rng.normal(size=weight.shape[0]), "bfloat16") if is_scaled else None
    temperature = jnp.asarray(rng.uniform(0.5, 2.0, ROWS), "float32") if is_scaled else 1.0
    given = {"temperature": temperature, "bias": bias, "softcap": softcap}
    fn = functools.partial(linear_log_probs, **given, return_entropy=True)
    with lowering.use("interpret:mosaic_tpu"):
        explained = lowering.explain(fn, x, weight, labels, target="cpu")
        actual = jax.jit(fn)(x, weight, labels)
    assert [row.implementation for row in explained.rows] == ["mosaic_tpu (interpreted)"]
    for result, true in zip(actual, expected(x, weight, labels, np.ones((2, ROWS)), **given), strict=False):
        assert_near(result, true)


X, WEIGHT, LABELS = np.ones((4, 3), np.float32), np.ones((5, 3), np.float32), np.zeros(4, np.int32)
POSITIVE = "temperature must be a positive number, or a floating-point array of shape [] or [4]; got "
REFUSALS = {
    "x-0d": ({"x": np.float32(1)}, "x must be a floating-point array of shape (..., H); got float32[]"),
    "weight-features": ({"weight": WEIGHT[:, :2]}, "weight must have shape (V, 3), as x has 3 features; got"),
    "weight-dtype": (
        {"weight": WEIGHT.astype(np.int32)},
        "weight must have a floating-point dtype of at least 8 bits; got int32[5, 3]",
    ),
    "weight-transposed": (
        {"weight": X[0], "transpose_weight": True},
        "weight must have shape (3, V), as x has 3 features; got float32[3]",
    ),
    "weight-of-flax": (
        {"weight": WEIGHT.T},
        "weight must have shape (V, 3), as x has 3 features, or be given with transpose_weight=True; got float32[3, 5]",
    ),
    "labels-shape": ({"labels": LABELS[:3]}, "labels must have shape [4], as x without its last axis; got int32[3]"),
    "labels-probabilities": ({"labels": np.ones((4, 5), np.float32)}, "labels must be integers; got float32[4, 5]"),
    "bias": ({"bias": X[0]}, "bias must be a floating-point array of shape [5]; got float32[3]"),
    "temperature-0": ({"temperature": 0.0}, f"{POSITIVE}0.0"),
    "temperature-infinite": ({"temperature": np.inf}, f"{POSITIVE}inf"),
    "temperature-word": ({"temperature": "warm"}, f"{POSITIVE}'warm'"),
    "temperature-none": ({"temperature": None}, f"{POSITIVE}None"),
    "temperature-shape": ({"temperature": X[0]}, f"{POSITIVE}float32[3]"),
    "temperature-dtype": ({"temperature": LABELS}, f"{POSITIVE}int32[4]"),
    "softcap": ({"softcap": 0.0}, "softcap must be a positive number that float32 can hold; got 0.0"),
    "chunk_rows": ({"chunk_rows": 0}, "chunk_rows must be a positive integer up to 2147483647; got 0"),
    "ignore_index": ({"ignore_index": 1.5}, "ignore_index must be an integer; got 1.5"),
    "return_entropy": ({"return_entropy": 2}, "return_entropy must be a bool; got 2"),
    "vocab_axis": (
        {"vocab_axis": "model"},
        "vocab_axis must name a mesh axis of the surrounding shard_map, and there is none here; got",
    ),
}


@pytest.mark.parametrize(("changed", "words"), REFUSALS.values(), ids=REFUSALS)
def test_linear_log_probs_refuse(changed, words):
    arguments = {"x": X, "weight": WEIGHT, "labels": LABELS} | changed
    with pytest.raises(BadParamError, match=re.escape(f"linear_log_probs: {words}")) as refusal:
        linear_log_probs(**arguments)
    assert refusal.value.status == 161002


def draw_rows(rng):
    x, weight, labels = draw(rng, rows=(16,), classes=6)
    labels = np.where(labels == IGNORED, -1, labels).astype(np.int32)
    return np.asarray(x), np.asarray(weight), labels, rng.uniform(0.5, 2, size=16).astype(np.float32)


def by_row(x, weight, labels, temperature):
    return linear_log_probs(
        x, weight, labels, temperature=temperature, softcap=3.0, ignore_index=-1, chunk_rows=6, return_entropy=True
    )


CASE = contract.Case(
    name="by_row",
    fn=by_row,
    operands=draw_rows,
    differentiable=(0, 1, 3),
    batched=(0, None, 0, 0),
    operator="linear_cross_entropy",
    backward="linear_cross_entropy_backward",
)


@pytest.mark.slow
@pytest.mark.parametrize("promise", contract.PROMISES, ids=contract.promise_name)
def test_linear_log_probs_keep_promise(promise):
    promise(CASE)
