"""`softmax`: values and gradients against NumPy float64 and PyTorch, and what every operator promises."""

import functools

import contract
import hypothesis
import hypothesis.extra.numpy
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import softmax_oracle as oracle
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import lowering
from jaxops import softmax
from jaxops._checks.arguments import BadParamError
from jaxops.testing.meshes import gathered_sizes

ALGORITHMS = ("fast", "accurate", "log")
# shape, axis
ARRAYS = {
    "last": ((3, 7), -1),
    "first": ((5, 4), 0),
    "channels": ((2, 3, 4, 5), 1),
    "image": ((2, 3, 4, 2), (1, 2, 3)),
    "all": ((2, 3, 4), (0, 1, 2)),
    "inner-two": ((2, 3, 2, 4), (-3, -2)),
    "scattered": ((2, 3, 2, 4), (3, 1)),
    "scattered-first": ((2, 3, 2, 3), [0, 2]),
    "vector": ((9,), 0),
    "one": ((3, 1), -1),
}
EXPECTED = [
    pytest.param(shape, axis, algorithm, id=f"{name}-{algorithm}")
    for name, (shape, axis) in ARRAYS.items()
    for algorithm in ALGORITHMS[1:]
]


def along(axis, shape):
    axes = axis if isinstance(axis, tuple | list) else (axis,)
    return tuple(a % len(shape) for a in axes)


def value_and_gradient(x, dy, **attributes):
    y, pull_back = jax.vjp(jax.jit(lambda x: softmax(x, **attributes)), x)
    return y, pull_back(dy)[0]


@pytest.mark.sampled
@pytest.mark.parametrize(("shape", "axis", "algorithm"), EXPECTED)
def test_softmax_equals_numpy_in_float64(shape, axis, algorithm, rng):
    x, dy = (jnp.asarray(4 * rng.normal(size=shape), jnp.float32) for _ in range(2))
    y, dx = value_and_gradient(x, dy, axis=axis, algorithm=algorithm)
    axes, log = along(axis, shape), algorithm == "log"
    exact = oracle.forward(x, axes, log)
    np.testing.assert_allclose(y, exact, rtol=2e-6, atol=2e-6)
    np.testing.assert_allclose(dx, oracle.backward(exact, dy, axes, log), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("algorithm", ALGORITHMS[1:])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_softmax_rounds_once(dtype, algorithm, rng):
    x, dy = (jnp.asarray(rng.normal(size=(4, 300)), dtype) for _ in range(2))
    y, dx = value_and_gradient(x, dy, algorithm=algorithm)
    log = algorithm == "log"
    for actual, exact in ((y, oracle.forward(x, -1, log)), (dx, oracle.backward(y, dy, -1, log))):
        assert actual.dtype == dtype
        rounding = 0.502 * float(jnp.finfo(dtype).eps)
        # Below the normal numbers of float16, roundings are absolute.
        smallest = float(jnp.finfo(dtype).smallest_subnormal)
        np.testing.assert_allclose(np.asarray(actual, np.float64), exact, rtol=rounding, atol=1e-6 + smallest)


def test_softmax_of_many_bfloat16_equals_adds_up_to_one():
    y = softmax(jnp.zeros((1, 65536), jnp.bfloat16))
    np.testing.assert_array_equal(y.astype(np.float32), np.full((1, 65536), 2.0**-16))


@pytest.mark.parametrize("algorithm", ALGORITHMS[1:])
def test_softmax_keeps_float64(algorithm, rng):
    with jax.enable_x64(True):
        x, dy = rng.normal(size=(2, 3, 9))
        y, dx = value_and_gradient(x, dy, algorithm=algorithm)
        assert y.dtype == dx.dtype == jnp.float64
        exact = oracle.forward(x, -1, algorithm == "log")
        np.testing.assert_allclose(y, exact, rtol=1e-14)
        np.testing.assert_allclose(dx, oracle.backward(exact, dy, -1, algorithm == "log"), rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize(("shape", "axis"), ARRAYS.values(), ids=ARRAYS)
def test_softmax_is_fast_as_it_is_accurate(shape, axis, rng):
    x = (200 * rng.normal(size=shape)).astype(np.float32)
    np.testing.assert_array_equal(*(softmax(x, axis=axis, algorithm=name) for name in ALGORITHMS[:2]))
    assert np.isfinite(softmax(x, axis=axis, algorithm="fast")).all()


def test_softmax_has_worked_values():
    # ln 1, ln 2 and ln 5 far from 0: their exponentials are to one another as 1, 2 and 5.
    x = np.log(np.float32([1, 2, 5])) + np.float32(1000)
    np.testing.assert_allclose(softmax(x), [0.125, 0.25, 0.625], rtol=1e-4)
    # y = (1/2, 1/4, 1/4) and dy = (1, 0, -1): sum(y * dy) = 1/4.
    x = np.log(np.float32([2, 1, 1]))
    (dx,) = jax.vjp(softmax, x)[1](jnp.float32([1, 0, -1]))
    np.testing.assert_allclose(dx, [0.375, -0.0625, -0.3125], rtol=1e-6)
    # For "log" sum(dy) = 3.
    (dx,) = jax.vjp(lambda x: softmax(x, algorithm="log"), x)[1](jnp.float32([1, 0, 2]))
    np.testing.assert_allclose(dx, [-0.5, -0.75, 1.25], rtol=1e-6)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("shape", "axis", "dtype", "by_product"),
    [
        pytest.param((3, 512), -1, "float32", True, id="long"),
        pytest.param((2, 3, 700), 2, "float32", True, id="long-of-stack"),
        pytest.param((513,), 0, "float32", True, id="vector"),
        pytest.param((2, 16, 8, 8), (1, 2, 3), "float32", True, id="image"),
        pytest.param((3, 511), -1, "float32", False, id="short"),
        pytest.param((600, 3), 0, "float32", False, id="columns"),
        pytest.param((3, 600), -1, "bfloat16", False, id="narrow"),
    ],
)
def test_softmax_sums_long_rows_on_a_cpu_by_a_product(shape, axis, dtype, by_product, rng):
    x, dy = (jnp.asarray(rng.normal(size=shape), dtype) for _ in range(2))
    y, pull_back = jax.vjp(lambda x: softmax(x, axis=axis, algorithm="log"), x)
    gradient = jax.jit(lambda dy: pull_back(dy)[0])
    assert ("dot_general" in gradient.lower(dy).as_text()) == by_product
    exact = oracle.backward(y, dy, along(axis, shape), True)
    rounding = float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(np.asarray(gradient(dy), np.float64), exact, rtol=rounding, atol=2e-5)


INF, NAN = np.inf, np.nan
SPECIAL = {
    "some-minus-inf": ([-INF, 0, -INF, 0], [0, 0.5, 0, 0.5]),
    "all-but-one": ([-INF, 3, -INF, -INF], [0, 1, 0, 0]),
    "all-minus-inf": ([-INF] * 4, [NAN] * 4),
    "nan": ([0, NAN, 1, -INF], [NAN] * 4),
    "inf": ([0, INF, 1, 2], [NAN] * 4),
    "largest": ([3e38, -3e38, 3e38, 0], [0.5, 0, 0.5, 0]),
}


@pytest.mark.parametrize(("x", "expected"), SPECIAL.values(), ids=SPECIAL)
@pytest.mark.parametrize("transposed", [False, True])
def test_softmax_of_special_values(transposed, x, expected):
    # Beside a group of ordinary numbers, to which nothing leaks.
    x = np.float32([x, [0, 0, 0, 0]])
    expected = np.float32([expected, [0.25] * 4])
    x, expected, axis = (x.T, expected.T, 0) if transposed else (x, expected, 1)
    np.testing.assert_array_equal(softmax(x, axis=axis), expected)
    with np.errstate(divide="ignore"):
        log = np.log(expected)
    actual = softmax(x, axis=axis, algorithm="log")
    # What is so small that its exponential is 0 still has a logarithm.
    np.testing.assert_allclose(np.where(actual < -1e38, -INF, actual), log, rtol=1e-6)


def test_softmax_gradient_of_minus_inf_is_that_of_nothing(rng):
    x = np.float32([[0, -INF, 1, -INF]])
    dy = rng.normal(size=(1, 4)).astype(np.float32)
    _, dx = value_and_gradient(x, dy)
    np.testing.assert_array_equal(dx[0, 1::2], [0, 0])
    _, kept = value_and_gradient(x[:, ::2], dy[:, ::2])
    np.testing.assert_allclose(dx[:, ::2], kept, rtol=1e-6)
    _, dx = value_and_gradient(x, dy, algorithm="log")
    np.testing.assert_array_equal(dx[0, 1::2], dy[0, 1::2])


def test_softmax_of_no_axes_and_of_nothing():
    for axis in (0, -1, ()):
        y, dx = value_and_gradient(jnp.float32(3), jnp.float32(2), axis=axis)
        assert (y, dx, y.shape) == (1, 0, ())
    np.testing.assert_array_equal(softmax(np.float32([[1, 2]]), axis=()), [[1, 1]])
    for shape, axis in (((0, 3), -1), ((3, 0), -1), ((0,), 0), ((2, 0, 3), (0, 2))):
        y, dx = value_and_gradient(jnp.zeros(shape), jnp.zeros(shape), axis=axis)
        assert y.shape == dx.shape == shape


@pytest.mark.parametrize("algorithm", ALGORITHMS[1:])
@pytest.mark.parametrize(("shape", "axis"), [((3, 7), -1), ((2, 3, 4, 5), 1), ((), 0)], ids=str)
def test_softmax_is_pytorchs_to_the_second_order(shape, axis, algorithm, rng):
    torch = pytest.importorskip("torch", reason="compares with PyTorch")
    x, dy, ddx = (np.asarray(rng.normal(size=shape), np.float32) for _ in range(3))
    tensor, grad = (torch.from_numpy(array).requires_grad_() for array in (x, dy))
    theirs = torch.log_softmax if algorithm == "log" else torch.softmax
    y = theirs(tensor, axis)
    (first,) = torch.autograd.grad(y, tensor, grad, create_graph=True)
    second = torch.autograd.grad(first, (tensor, grad), torch.from_numpy(ddx))

    def gradient(x, dy):
        return jax.vjp(lambda x: softmax(x, axis=axis, algorithm=algorithm), x)[1](dy)[0]

    np.testing.assert_allclose(softmax(x, axis=axis, algorithm=algorithm), y.detach(), rtol=2e-6, atol=2e-6)
    dx, pull_back = jax.vjp(gradient, x, dy)
    np.testing.assert_allclose(dx, first.detach(), rtol=1e-5, atol=2e-6)
    for ours, other in zip(pull_back(jnp.asarray(ddx)), second, strict=True):
        np.testing.assert_allclose(ours, other, rtol=1e-5, atol=3e-6)


FINITE = hypothesis.extra.numpy.arrays(
    np.float32,
    (4, 2, 3),
    elements=st.floats(-1024, 1024, width=32),
)


@hypothesis.given(x=FINITE, data=st.data())
@hypothesis.settings(max_examples=15)
def test_softmax_adds_up_to_one_and_takes_any_shift(x, data):
    axes = tuple(data.draw(st.sets(st.integers(0, x.ndim - 1), min_size=1)))
    y = np.asarray(softmax(x, axis=axes), np.float64)
    np.testing.assert_allclose(y.sum(axes), 1, rtol=1e-5)
    np.testing.assert_allclose(y, oracle.forward(x, axes, False), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(softmax(x + np.float32(512), axis=axes), y, rtol=1e-3, atol=1e-6)
    dx = value_and_gradient(x, jnp.ones_like(x), axis=axes)[1]
    np.testing.assert_allclose(dx, np.zeros_like(dx), atol=1e-5)  # as the sum does not change


def test_softmax_keeps_its_result_alone(rng):
    x = jnp.asarray(rng.normal(size=(2, 3)), jnp.float32)
    for algorithm in ALGORITHMS:
        y, pull_back = jax.vjp(lambda x, algorithm=algorithm: softmax(x, algorithm=algorithm), x)
        (kept,) = jax.tree.leaves(pull_back)
        np.testing.assert_array_equal(kept, y)


@pytest.mark.parametrize("axis", [1, (1, 2, 3), (1, 3)], ids=str)
def test_softmax_transposes_nothing_in_memory(axis):
    x = jax.ShapeDtypeStruct((4, 6, 10, 12), jnp.float32)

    def both(x, dy):
        y, pull_back = jax.vjp(lambda x: softmax(x, axis=axis), x)
        return y, pull_back(dy)[0]

    compiled = jax.jit(both).lower(x, x).compile()
    assert " transpose(" not in compiled.as_text()
    assert compiled.memory_analysis().temp_size_in_bytes <= 4 * x.size


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("spec", [P("a", None, None, "b"), P(None, None, "b", "a"), P(None, None, ("a", "b"))], ids=str)
def test_softmax_gathers_nothing_along_axes_that_are_not_its_own(spec, axis_type, rng):
    x = rng.normal(size=(2, 3, 8, 8)).astype(np.float32)
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(axis_type,) * 2)
    placed = jax.device_put(x, jax.NamedSharding(mesh, spec))
    gradient = jax.jit(jax.grad(lambda x: jnp.sum(jnp.sin(softmax(x, axis=1)))))
    compiled = gradient.lower(placed).compile()
    assert list(gathered_sizes(compiled.as_text())) == []
    assert compiled(placed).sharding.is_equivalent_to(placed.sharding, 4)
    np.testing.assert_allclose(compiled(placed), gradient(x), rtol=1e-4, atol=1e-6)


X = np.zeros((2, 3), np.float32)
AXES = "axis must be an integer in [-2, 2) or a tuple of different ones; got "
REFUSALS = {
    "none": (None, {}, "x must be given; got None"),
    "integers": (X.astype(np.int32), {}, "x must be floating point; got int32[2, 3]"),
    "bool": (X > 0, {}, "x must be floating point; got bool[2, 3]"),
    "axis-large": (X, {"axis": 2}, f"{AXES}2"),
    "axis-small": (X, {"axis": -3}, f"{AXES}-3"),
    "axis-none": (X, {"axis": None}, f"{AXES}None"),
    "axis-float": (X, {"axis": 1.0}, f"{AXES}1.0"),
    "axis-bool": (X, {"axis": True}, f"{AXES}True"),
    "axis-twice": (X, {"axis": (1, -1)}, f"{AXES}(1, -1)"),
    "axis-of-none": (X[0, 0], {"axis": 1}, "axis must be an integer in [-1, 1) or a tuple of different ones; got 1"),
    "algorithm": (
        X,
        {"algorithm": "LOG"},
        "algorithm must be one of fast, accurate, log; got 'LOG', did you mean log?",
    ),
    "algorithm-number": (X, {"algorithm": 2}, "algorithm must be one of fast, accurate, log; got 2"),
}


@pytest.mark.parametrize(("x", "attributes", "words"), REFUSALS.values(), ids=REFUSALS)
def test_softmax_refuses_bad_input(x, attributes, words):
    def call(x):
        return softmax(x, **attributes)

    for ask in (call, jax.jit(call), lambda x: lowering.explain(call, x)):
        with pytest.raises(BadParamError) as refusal:
            ask(x)
        assert str(refusal.value) == f"softmax: {words}"
        assert refusal.value.status == "MCDNN_STATUS_BAD_PARAM"


def test_explain_shows_softmax():
    rows = lowering.explain(jax.grad(lambda x: jnp.sum(softmax(x))), X).rows
    assert [row.operator for row in rows] == ["softmax", "softmax_backward"]
    assert {row.implementation for row in rows} == {"reference"}


def case(name, shape, **attributes):
    return contract.Case(
        name,
        functools.partial(softmax, **attributes),
        lambda rng: (rng.normal(size=shape).astype(np.float32),),
        differentiable=(0,),
        batched=(0,),
        operator="softmax",
        backward="softmax_backward",
    )


CASES = [
    case("rows", (8, 3)),
    case("channels-log", (8, 3, 2), axis=1, algorithm="log"),
    case("scattered", (8, 2, 2, 2), axis=(1, 3)),
]


@pytest.mark.parametrize("promise", contract.PROMISES, ids=contract.promise_name)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_softmax_keeps_promise(case, promise):
    promise(case)
