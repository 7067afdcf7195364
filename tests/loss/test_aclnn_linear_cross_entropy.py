"""The documented calls for a split vocabulary: values worked from the documents, NumPy float64, and every refusal."""

import functools

import contract
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lowering
from jaxops._checks.arguments import BadParamError
from jaxops.aclnn import linear_cross_entropy as aclnn
from jaxops.linear_cross_entropy import vocab_parallel


def wide(array):
    return np.asarray(array).astype(np.float64)


def make_case(rng, rows=11, hidden=8, classes=130, dtype="bfloat16"):
    x, weight = (jnp.asarray(rng.normal(size=(size, hidden)), dtype) for size in (rows, classes))
    return x, weight, rng.integers(0, 2 * classes, size=rows).astype(np.int32)


def test_max_sum_of_the_documented_example():
    x, weight = jnp.ones((3, 4), jnp.float16), jnp.ones((5, 4), jnp.float16)
    attributes = {"vocab_start_index": 0, "vocab_end_index": 2, "return_logits": True}
    result = aclnn.fused_linear_online_max_sum(x, weight, np.ones(3, np.int32), **attributes)
    assert result.logits_max_local.tolist() == [4, 4, 4]
    assert result.sum_exp_logits_local.tolist() == [5, 5, 5]
    assert result.predicted_logits_local.tolist() == [0, 0, 0]
    assert result.target_mask.tolist() == [0]
    assert result.masked_target.tolist() == [1, 1, 1]
    np.testing.assert_array_equal(result.vocab_parallel_logits, np.full((3, 5), 4, np.float16))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_max_sum_equals_float64(dtype, rng):
    x, weight, target = make_case(rng, dtype=dtype)
    attributes = {"vocab_start_index": 100, "vocab_end_index": 230}
    result = aclnn.fused_linear_online_max_sum(x, weight, target, **attributes)
    logits = wide(x) @ wide(weight).T
    maximum = logits.max(-1)
    masked = (target < 100) | (target >= 230)
    column = np.where(masked, 0, target - 100)
    np.testing.assert_allclose(result.logits_max_local, maximum, rtol=1e-5)
    np.testing.assert_allclose(result.sum_exp_logits_local, np.exp(logits - maximum[:, None]).sum(-1), rtol=1e-4)
    predicted = np.where(masked, 0, logits[np.arange(11), column] - maximum)
    np.testing.assert_allclose(result.predicted_logits_local, predicted, rtol=1e-4, atol=1e-5)
    bits = np.unpackbits(np.asarray(result.target_mask), bitorder="little")
    np.testing.assert_array_equal(bits, [*masked, *[True] * 5])
    np.testing.assert_array_equal(result.masked_target, column)
    assert [v.dtype for v in result[:5]] == [jnp.float32, jnp.float32, jnp.float32, jnp.uint8, jnp.int32]
    assert result.vocab_parallel_logits is None
    logits_too = aclnn.fused_linear_online_max_sum(x, weight, target, **attributes, return_logits=True)
    contract.assert_close(logits_too[:5], result[:5])
    np.testing.assert_array_equal(logits_too.vocab_parallel_logits, jnp.asarray(logits, jnp.float32).astype(dtype))


def test_max_sum_counts_bits_from_the_lowest_and_excludes_the_end():
    x, weight = jnp.ones((10, 2), jnp.bfloat16), jnp.ones((4, 2), jnp.bfloat16)
    target = np.array([4, 5, 6, 7, 8, 3, -100, 4, 9, 4], np.int32)
    result = aclnn.fused_linear_online_max_sum(x, weight, target, vocab_start_index=4, vocab_end_index=8)
    assert result.target_mask.tolist() == [0b01110000, 0b11111101]
    assert result.masked_target.tolist() == [0, 1, 2, 3, 0, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("return_logits", [False, True])
def test_max_sum_of_nothing(return_logits):
    call = functools.partial(
        aclnn.fused_linear_online_max_sum, vocab_start_index=0, vocab_end_index=3, return_logits=return_logits
    )
    no_rows = call(jnp.ones((0, 4), jnp.float16), jnp.ones((3, 4), jnp.float16), np.zeros(0, np.int32))
    assert [v.shape for v in no_rows[:5]] == [(0,)] * 5
    no_features = call(jnp.ones((2, 0), jnp.float16), jnp.ones((3, 0), jnp.float16), np.array([1, 7], np.int32))
    assert no_features.logits_max_local.tolist() == [0, 0]
    assert no_features.sum_exp_logits_local.tolist() == [3, 3]
    assert no_features.predicted_logits_local.tolist() == [0, 0]
    assert no_features.target_mask.tolist() == [0b10]


def test_loss_of_the_documented_example():
    row = np.array([0.5, 1], np.float32)
    logits = np.array([[1, 0.5], [0.5, 1]], np.float32)
    loss, softmax = aclnn.fused_cross_entropy_loss_with_max_sum(row, row, row, vocab_parallel_logits=logits)
    np.testing.assert_allclose(loss, np.log(row) - row, rtol=1e-6)
    np.testing.assert_allclose(softmax, np.exp(logits - row[:, None]) / row[:, None], rtol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_loss_equals_float64(dtype, rng):
    maximum, predicted = (rng.uniform(-5, 5, size=9).astype(np.float32) for _ in range(2))
    total = rng.uniform(1, 10, size=9).astype(np.float32)
    logits = jnp.asarray(rng.uniform(-5, 5, size=(9, 7)), dtype)
    loss, softmax = aclnn.fused_cross_entropy_loss_with_max_sum(maximum, total, predicted, vocab_parallel_logits=logits)
    np.testing.assert_allclose(loss, np.log(wide(total)) - predicted, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(softmax, np.exp(wide(logits) - maximum[:, None]) / total[:, None], rtol=1e-5)
    assert loss.dtype == softmax.dtype == jnp.float32


def test_loss_of_sums_that_are_not_positive():
    loss, softmax = aclnn.fused_cross_entropy_loss_with_max_sum(*np.array([[0, 0], [0, -1], [0, 0]], np.float32))
    np.testing.assert_array_equal(loss, [-np.inf, np.nan])
    assert softmax is None


@pytest.mark.parametrize("mode", ["softmax", "memory-friendly"])
@pytest.mark.parametrize("mask_form", ["bits", "more bits", "bool"])
def test_grad_equals_float64(mask_form, mode, rng):
    x, weight, _ = make_case(rng)
    grad = rng.normal(size=11).astype(np.float32)
    masked = rng.uniform(size=11) < 0.4
    # Not read where masked, whatever it is.
    masked_target = np.where(masked, rng.integers(-999, 999, size=11), rng.integers(0, 130, size=11)).astype(np.int32)
    packed = np.packbits(masked, bitorder="little")
    mask = {"bits": packed, "more bits": np.concatenate([packed, np.full(9, 255, np.uint8)]), "bool": masked}[mask_form]
    maximum = rng.normal(size=11).astype(np.float32)
    total = rng.uniform(50, 500, size=11).astype(np.float32)
    softmax = np.exp(wide(x) @ wide(weight).T - maximum[:, None]) / total[:, None]
    statistics = {"logits_max": maximum, "sum_exp_logits": total}
    if mode == "softmax":
        statistics = {"softmax": softmax.astype(np.float32), "logits_max": maximum + 99}
    x_grad, weight_grad = aclnn.fused_linear_cross_entropy_loss_grad(grad, x, weight, mask, masked_target, **statistics)
    one_hot = (np.arange(130) == masked_target[:, None]) & ~masked[:, None]
    pull = wide(jnp.asarray(((softmax - one_hot) * grad[:, None]).astype(np.float32)).astype(x.dtype))
    for actual, true in ((x_grad, pull @ wide(weight)), (weight_grad, pull.T @ wide(x))):
        assert actual.dtype == x.dtype
        np.testing.assert_allclose(wide(actual), true, rtol=8e-3, atol=4e-3 * np.abs(true).max())


def test_grad_accumulates_in_float32():
    # 1000 rows of 1/4: a bfloat16 sum sticks at 64, where adding 1/4 changes nothing.
    ones, zeros = jnp.ones((1000, 1), jnp.bfloat16), np.zeros(1000, np.int32)
    row = np.full(1000, 0.5, np.float32)
    statistics = {"logits_max": row * 0 + 1, "sum_exp_logits": row * 4}
    masked = np.ones(1000, bool)
    call = aclnn.fused_linear_cross_entropy_loss_grad
    _, weight_grad = call(row, ones, jnp.ones((2, 1), jnp.bfloat16), masked, zeros, **statistics)
    assert weight_grad.tolist() == [[250], [250]]


@pytest.mark.parametrize(("rows", "hidden", "classes"), [(0, 3, 5), (4, 0, 5), (4, 3, 0)])
def test_grad_of_nothing_is_zero(rows, hidden, classes):
    x, weight = jnp.ones((rows, hidden), jnp.float16), jnp.ones((classes, hidden), jnp.float16)
    row, target = np.ones(rows, np.float32), np.zeros(rows, np.int32)
    statistics = {"logits_max": row, "sum_exp_logits": row}
    grads = aclnn.fused_linear_cross_entropy_loss_grad(row, x, weight, np.zeros(rows, bool), target, **statistics)
    for actual, operand in zip(grads, (x, weight), strict=True):
        np.testing.assert_array_equal(actual, np.zeros_like(operand))


def test_mask_bits_beyond_the_rows_do_not_matter():
    x, weight, row = jnp.ones((3, 2), jnp.float16), jnp.ones((2, 2), jnp.float16), np.ones(3, np.float32)
    statistics = {"logits_max": row, "sum_exp_logits": row}
    grads = [
        aclnn.fused_linear_cross_entropy_loss_grad(
            row, x, weight, np.array([bits], np.uint8), np.zeros(3, np.int32), **statistics
        )
        for bits in (0b010, 0b11111010)
    ]
    contract.assert_close(*grads)


HALF, WEIGHT, TARGET = np.zeros((9, 4), np.float16), np.zeros((128, 4), np.float16), np.zeros(9, np.int32)
ROW, BITS, SOFTMAX = np.ones(9, np.float32), np.zeros(2, np.uint8), np.zeros((9, 128), np.float32)
NULL, INVALID = 161001, 161002
MAX_SUM, LOSS, GRAD = (
    "fused_linear_online_max_sum",
    "fused_cross_entropy_loss_with_max_sum",
    "fused_linear_cross_entropy_loss_grad",
)
VALID = {
    MAX_SUM: {"input": HALF, "weight": WEIGHT, "target": TARGET, "vocab_start_index": 0, "vocab_end_index": 128},
    LOSS: {"logits_max": ROW, "sum_exp_logits": ROW, "predicted_logits": ROW},
    GRAD: {
        "grad": ROW,
        "input": HALF,
        "weight": WEIGHT,
        "target_mask": BITS,
        "masked_target": TARGET,
        "logits_max": ROW,
        "sum_exp_logits": ROW,
    },
}
REFUSALS = [
    *(
        (name, {argument: None}, NULL, "be given; got None")
        for name, call in VALID.items()
        for argument in call
        if "index" not in argument
    ),
    *(
        (MAX_SUM, {argument: value}, INVALID, f"be an integer; got {shown}")
        for argument in ("vocab_start_index", "vocab_end_index")
        for value, shown in (
            (None, "None"),
            ("a", "'a'"),
            (1.5, "1.5"),
            (np.zeros(1, np.int32), "int32[1]"),
            (np.zeros((), np.float32), "float32[]"),
        )
    ),
    (MAX_SUM, {"input": HALF.astype(np.float32)}, INVALID, "be float16 or bfloat16; got float32[9, 4]"),
    (MAX_SUM, {"weight": WEIGHT.astype(np.float32)}, INVALID, "have the input's dtype float16; got float32[128, 4]"),
    (MAX_SUM, {"target": TARGET.astype(np.int8)}, INVALID, "be int32 or int64; got int8[9]"),
    (MAX_SUM, {"vocab_start_index": -1}, INVALID, "not be negative; got -1"),
    (MAX_SUM, {"vocab_end_index": 4, "vocab_start_index": 5}, INVALID, "be at least vocab_start_index 5; got 4"),
    (MAX_SUM, {"input": HALF[0]}, INVALID, "have rank 2; got float16[4]"),
    (MAX_SUM, {"weight": WEIGHT[0]}, INVALID, "have rank 2; got float16[4]"),
    (MAX_SUM, {"weight": WEIGHT[:, :3]}, INVALID, "have shape (V, 4); got float16[128, 3]"),
    (MAX_SUM, {"weight": WEIGHT[:0]}, INVALID, "have a vocabulary of at least 1; got float16[0, 4]"),
    (MAX_SUM, {"target": TARGET[:8]}, INVALID, "have shape [9]; got int32[8]"),
    (LOSS, {"logits_max": HALF[:, 0]}, INVALID, "be float32; got float16[9]"),
    (LOSS, {"vocab_parallel_logits": TARGET}, INVALID, "be float32 or float16 or bfloat16; got int32[9]"),
    (LOSS, {"label_smoothing": 0.1}, INVALID, "be 0; got 0.1"),
    (LOSS, {"logits_max": SOFTMAX}, INVALID, "have rank 1; got float32[9, 128]"),
    (LOSS, {"sum_exp_logits": ROW[:3]}, INVALID, "have logits_max's shape [9]; got float32[3]"),
    (LOSS, {"predicted_logits": ROW[:3]}, INVALID, "have logits_max's shape [9]; got float32[3]"),
    (LOSS, {"vocab_parallel_logits": ROW}, INVALID, "have rank 2; got float32[9]"),
    (LOSS, {"vocab_parallel_logits": SOFTMAX[:3]}, INVALID, "have shape [9, V]; got float32[3, 128]"),
    (GRAD, {"grad": ROW.astype(np.float16)}, INVALID, "be float32; got float16[9]"),
    (GRAD, {"input": HALF.astype(np.float32)}, INVALID, "be float16 or bfloat16; got float32[9, 4]"),
    (
        GRAD,
        {"weight": jnp.zeros((128, 4), jnp.bfloat16)},
        INVALID,
        "have the input's dtype float16; got bfloat16[128, 4]",
    ),
    (GRAD, {"target_mask": TARGET}, INVALID, "be uint8 or bool; got int32[9]"),
    (GRAD, {"masked_target": BITS}, INVALID, "be int32 or int64; got uint8[2]"),
    (GRAD, {"logits_max": TARGET}, INVALID, "be float32; got int32[9]"),
    (GRAD, {"softmax": HALF}, INVALID, "be float32; got float16[9, 4]"),
    (GRAD, {"label_smoothing": 0.1}, INVALID, "be 0; got 0.1"),
    (GRAD, {"input": HALF[0]}, INVALID, "have rank 2; got float16[4]"),
    (GRAD, {"target_mask": BITS[:1]}, INVALID, "have a bit for each of 9 rows; got uint8[1]"),
    (GRAD, {"target_mask": np.zeros(10, bool)}, INVALID, "have shape [9], as input has rows; got bool[10]"),
    (GRAD, {"grad": ROW[:3]}, INVALID, "have shape [9], as input has rows; got float32[3]"),
    (GRAD, {"masked_target": TARGET[:3]}, INVALID, "have shape [9], as input has rows; got int32[3]"),
    (GRAD, {"sum_exp_logits": ROW[:3]}, INVALID, "have shape [9], as input has rows; got float32[3]"),
    (GRAD, {"weight": WEIGHT[:, :3]}, INVALID, "have shape (V, 4); got float16[128, 3]"),
    (GRAD, {"softmax": SOFTMAX[:, :5]}, INVALID, "have shape [9, 128]; got float32[9, 5]"),
    (GRAD, {"softmax": SOFTMAX[:, :0]}, INVALID, "have shape [9, 128]; got float32[9, 0]"),
]


@pytest.mark.parametrize(
    ("name", "change", "status", "words"),
    REFUSALS,
    ids=[f"{name}-{next(iter(change))}-{words[:24]}" for name, change, _, words in REFUSALS],
)
def test_documented_call_refuses(name, change, status, words):
    arguments = {**VALID[name], **change}
    arrays = {key: value for key, value in arguments.items() if hasattr(value, "shape")}
    rest = {key: value for key, value in arguments.items() if key not in arrays}

    def call(arrays):
        return getattr(aclnn, name)(**arrays, **rest)

    for ask in (call, jax.jit(call), lambda arrays: lowering.explain(call, arrays)):
        with pytest.raises(BadParamError) as refusal:
            ask(arrays)
        assert str(refusal.value) == f"{name}: {next(iter(change))} must {words}"
        assert refusal.value.status == status


def test_softmax_needs_a_vocabulary_of_128():
    arguments = {**VALID[GRAD], "weight": WEIGHT[:127]}
    aclnn.fused_linear_cross_entropy_loss_grad(**arguments)
    with pytest.raises(BadParamError, match="weight must be empty, or at least 128 long in V where softm") as refusal:
        aclnn.fused_linear_cross_entropy_loss_grad(**arguments, softmax=SOFTMAX[:, :127])
    assert refusal.value.status == INVALID
    grads = aclnn.fused_linear_cross_entropy_loss_grad(**{**arguments, "weight": WEIGHT[:0]}, softmax=SOFTMAX[:, :0])
    np.testing.assert_array_equal(grads[0], np.zeros_like(HALF))


@pytest.mark.parametrize("as_index", [int, np.int64, np.int32, np.array, jnp.int32])
def test_max_sum_refuses_known_indices_of_any_kind(as_index):
    arguments = {**VALID[MAX_SUM], "vocab_start_index": as_index(5), "vocab_end_index": as_index(4)}
    with pytest.raises(BadParamError, match="vocab_end_index must be at least vocab_start_index 5; got 4"):
        aclnn.fused_linear_online_max_sum(**arguments)


def draw(kind):
    def operands(rng):
        x, weight, row = rng.normal(size=(16, 3)), rng.normal(size=(6, 3)), rng.normal(size=16)
        target = rng.integers(0, 9, size=16).astype(np.int32)
        drawn = {
            MAX_SUM: (x, weight, target),
            LOSS: (row, np.exp(row), row - 1, rng.normal(size=(16, 6))),
            GRAD: (row, x, weight, target, 3 + row, 2 + np.exp(row)),
        }[kind]
        return tuple(v if v.dtype == np.int32 else v.astype(np.float32) for v in drawn)

    return operands


def max_sum(x, weight, target):
    start, end = jnp.int32(2), jnp.int32(8)
    found = vocab_parallel.ONLINE_MAX_SUM(x, weight, target, start, end, return_logits=True)
    packed = vocab_parallel.PACK(found.target_mask, start > 0)
    # A plain tuple, as exporting knows no other.
    return tuple(found._replace(target_mask=packed))


def grad(grad, x, weight, masked_target, logits_max, sum_exp_logits):
    mask = masked_target > 6
    return vocab_parallel.LOSS_GRAD(grad, x, weight, mask, masked_target, logits_max, sum_exp_logits, None)


CASES = [
    contract.Case(MAX_SUM, max_sum, draw(MAX_SUM), (0, 1), (0, None, 0), MAX_SUM),
    contract.Case(LOSS, vocab_parallel.LOSS, draw(LOSS), (0, 1, 2, 3), (0, 0, 0, 0), LOSS),
    contract.Case(GRAD, grad, draw(GRAD), (0, 1, 2, 4, 5), (0, 0, None, 0, 0, 0), GRAD),
]


@pytest.mark.parametrize("promise", contract.PROMISES, ids=contract.promise_name)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_documented_operator_keeps_promise(case, promise):
    promise(case)
