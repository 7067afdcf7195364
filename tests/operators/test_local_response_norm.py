"""`local_response_norm`: against loops in NumPy float64, PyTorch and worked figures, and the promises of operators."""

import functools

import contract
import jax
import jax.numpy as jnp
import local_response_norm_oracle as oracle
import numpy as np
import pytest
from pooling_oracle import AXES

import lowering
from jaxops import local_response_norm
from jaxops._checks.arguments import BadParamError

STRONG = {"alpha": 1.5, "beta": 0.75, "k": 0.5}  # the defaults hardly normalize anything of size 1
ATTRIBUTES = {
    "odd": {"n": 5, **STRONG},
    "even": {"n": 4, **STRONG},
    "one": {"n": 1, **STRONG},
    "more-than-there-are": {"n": 16, **STRONG},
    "integer-power": {"n": 3, "alpha": 1.5, "beta": 2.0, "k": 1.0},
    "negative-mean-square": {"n": 3, "alpha": -4.0, "beta": 1.0, "k": 0.3},
}


of_channels_first = functools.partial(local_response_norm, layout="NCHW")


def draw(rng, shape=(2, 7, 3, 4), dtype="float32"):
    return [np.asarray(jnp.asarray(rng.normal(size=shape), dtype)) for _ in range(2)]


def value_and_gradient(fn, x, cotangent):
    y, pull_back = jax.vjp(jax.jit(fn), x)
    return y, pull_back(cotangent)[0]


@pytest.mark.sampled
@pytest.mark.parametrize("attributes", ATTRIBUTES.values(), ids=ATTRIBUTES)
def test_local_response_norm_equals_loops_in_float64(attributes, rng):
    x, dy = draw(rng)
    truth = oracle.across_channels(x, dy, **attributes)
    for actual, exact in zip(
        value_and_gradient(lambda x: local_response_norm(x, **attributes, layout="NCHW"), x, dy), truth, strict=True
    ):
        np.testing.assert_allclose(actual, exact, rtol=1e-5, atol=2e-6)


@pytest.mark.sampled
@pytest.mark.parametrize("layout", AXES)
@pytest.mark.parametrize("n", [4, 5])
def test_local_response_norm_takes_every_layout(n, layout, rng):
    x, dy = draw(rng, (2, 6, 2, 3, 2)[: len(layout)])
    truth = oracle.across_channels(x, dy, n=n, **STRONG)
    operands = [jnp.asarray(array.transpose(AXES[layout])) for array in (x, dy)]
    results = value_and_gradient(lambda x: local_response_norm(x, n=n, **STRONG, layout=layout), *operands)
    for actual, exact in zip(results, truth, strict=True):
        np.testing.assert_allclose(actual, exact.transpose(AXES[layout]), rtol=1e-5, atol=1e-6)


def test_local_response_norm_equals_pytorch(rng):
    torch = pytest.importorskip("torch", reason="compares with PyTorch")
    x, dy = draw(rng, (2, 9, 4, 5))
    for n in (1, 4, 11):
        theirs = torch.tensor(x, requires_grad=True)
        # Its alpha is divided by n, too; its k is 1 unless it is said.
        y = torch.nn.functional.local_response_norm(theirs, n, **STRONG)
        y.backward(torch.tensor(dy))
        # Its even windows look back: ahead, of channels in reverse.
        turned = [array[:, ::-1] for array in (x, dy)]
        ours = value_and_gradient(lambda x, n=n: local_response_norm(x, n=n, **STRONG, layout="NCHW"), *turned)
        for actual, expected in zip(ours, (y.detach(), theirs.grad), strict=True):
            np.testing.assert_allclose(actual[:, ::-1], expected.numpy(), rtol=1e-5, atol=1e-6)


def test_local_response_norm_works_out():
    # n = 2 looks ahead: s = 1 + (1 + 4), 1 + (4 + 9), 1 + 9.
    x = np.array([1, 2, 3], np.float32).reshape(1, 3, 1, 1)
    y = local_response_norm(x, n=2, alpha=2.0, beta=1.0, k=1.0, layout="NCHW")
    np.testing.assert_allclose(y.ravel(), [1 / 6, 2 / 14, 3 / 10], rtol=1e-6)
    # By default s = 2 + 1e-4 / 5 * 25 of a lone 5, whose power is 0.75.
    np.testing.assert_allclose(
        local_response_norm(np.full((1, 1, 1, 1), 5.0, "f4"), layout="NCHW"), 5 * 2.0005**-0.75, rtol=1e-6
    )


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_local_response_norm_rounds_once(dtype, rng):
    x, dy = draw(rng, (2, 40, 3, 3), dtype)
    truth = oracle.across_channels(x, dy, n=16, **STRONG)
    results = value_and_gradient(
        lambda x: local_response_norm(x, n=16, **STRONG, layout="NCHW"), jnp.asarray(x), jnp.asarray(dy)
    )
    for actual, exact in zip(results, truth, strict=True):
        assert actual.dtype == dtype
        one_rounding = 0.501 * float(jnp.finfo(dtype).eps)
        np.testing.assert_allclose(np.asarray(actual, np.float64), exact, rtol=one_rounding, atol=1e-6)


def test_local_response_norm_of_large_float16_does_not_overflow():
    x = jnp.full((1, 5, 1, 1), 6e4, jnp.float16)
    y = local_response_norm(x, n=5, alpha=1.0, beta=0.5, k=1.0, layout="NCHW")
    np.testing.assert_allclose(y.astype(np.float32).ravel(), np.sqrt(np.array([5 / 3, 5 / 4, 1, 5 / 4, 5 / 3])), 1e-3)


def test_local_response_norm_keeps_float64(rng):
    with jax.enable_x64(True):
        x, dy = rng.normal(size=(2, 7, 3, 4)), rng.normal(size=(2, 7, 3, 4))
        results = value_and_gradient(lambda x: local_response_norm(x, n=4, **STRONG, layout="NCHW"), x, dy)
        for actual, exact in zip(results, oracle.across_channels(x, dy, n=4, **STRONG), strict=True):
            assert actual.dtype == jnp.float64
            np.testing.assert_allclose(actual, exact, rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("shape", [(0, 3, 2, 2), (2, 0, 2, 2), (2, 3, 0, 2)], ids=str)
def test_local_response_norm_of_nothing(shape):
    for actual in value_and_gradient(of_channels_first, jnp.zeros(shape), jnp.zeros(shape)):
        assert actual.shape == shape


def test_local_response_norm_keeps_nothing_but_x_for_its_gradient(rng):
    x = draw(rng)[0]
    kept = [array for array in jax.tree.leaves(jax.vjp(of_channels_first, x)[1]) if array.size > 1]
    assert len(kept) == 1
    np.testing.assert_array_equal(kept[0].reshape(x.shape), x)


def test_local_response_norm_sums_windows_once_forward_and_twice_with_its_gradient():
    x = jax.ShapeDtypeStruct((2, 8, 4, 4), jnp.float32)

    def both(x, dy):
        y, pull_back = jax.vjp(of_channels_first, x)
        return y, pull_back(dy)

    for fn, operands, sums in ((of_channels_first, (x,), 1), (both, (x, x), 2)):
        assert jax.jit(fn).lower(*operands).compile().as_text().count(" reduce-window(") == sums


def test_explain_shows_local_response_norm():
    loss = jax.grad(lambda x: jnp.sum(local_response_norm(x, layout="NCHW")))
    rows = lowering.explain(loss, np.zeros((2, 3, 4, 4), np.float32)).rows
    assert [row.operator for row in rows] == ["local_response_norm", "local_response_norm_backward"]


X = np.zeros((2, 3, 4, 5), np.float32)
REFUSALS = {
    "none": (None, {}, "x must be given; got None"),
    "rank": (X[0], {}, "x must have rank 4 or 5; got float32[3, 4, 5]"),
    "dtype": (X.astype(np.int32), {}, "x must be floating point; got int32[2, 3, 4, 5]"),
    "layout-missing": (
        X,
        {"layout": None},
        "layout must be NCHW or NHWC, as x has 4 axes and there is no default; got None",
    ),
    "layout": (X, {"layout": "NCWH"}, "layout must be one of NCHW, NHWC, NCDHW, NDHWC; got 'NCWH', did you mean NCHW?"),
    "layout-rank": (X, {"layout": "NDHWC"}, "x must have 5 axes, as layout NDHWC says; got float32[2, 3, 4, 5]"),
    "n-zero": (X, {"n": 0}, "n must be an integer from 1 to 2147483647; got 0"),
    "n-float": (X, {"n": 5.0}, "n must be an integer from 1 to 2147483647; got 5.0"),
    "n-bool": (X, {"n": True}, "n must be an integer from 1 to 2147483647; got True"),
    "alpha": (X, {"alpha": None}, "alpha must be a finite number that float32 can hold; got None"),
    "beta": (X, {"beta": "0.75"}, "beta must be a finite number that float32 can hold; got '0.75'"),
    "k": (X, {"k": 1j}, "k must be a finite number that float32 can hold; got 1j"),
}


@pytest.mark.parametrize(("x", "attributes", "words"), REFUSALS.values(), ids=REFUSALS)
def test_local_response_norm_refuses_bad_input(x, attributes, words):
    def call(*operands):
        return local_response_norm(*operands, **{"layout": "NCHW"} | attributes)

    for ask in (call, jax.jit(call), lambda *operands: lowering.explain(call, *operands)):
        with pytest.raises(BadParamError) as refusal:
            ask(x)
        assert str(refusal.value) == f"local_response_norm: {words}"
        assert refusal.value.status == "MCDNN_STATUS_BAD_PARAM"


def case(name, shape, implementation="auto", **attributes):
    return contract.Case(
        name,
        functools.partial(local_response_norm, **STRONG, **{"layout": "NCHW"} | attributes),
        lambda rng: (rng.normal(size=shape).astype(np.float32),),
        differentiable=(0,),
        batched=(0,),
        operator="local_response_norm",
        backward="local_response_norm_backward",
        exact_derivative=implementation == "auto",  # is found in float64, which no kernel takes
        implementation=implementation,
    )


CASES = [
    case("odd", (8, 4, 2, 1), n=3),
    case("even-channels-last", (8, 2, 1, 2, 3), n=4, layout="NDHWC"),
    case("kernel", (8, 4, 2, 1), n=2, implementation="interpret:mosaic_tpu"),
]


@pytest.mark.parametrize("promise", contract.PROMISES, ids=contract.promise_name)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_local_response_norm_keeps_promise(case, promise):
    promise(case)
