"""`divisive_norm`: against loops in NumPy float64 and worked figures, and what every operator promises."""

import functools

import contract
import jax
import jax.numpy as jnp
import local_response_norm_oracle as oracle
import numpy as np
import pytest
from pooling_oracle import AXES

import lowering
from jaxops import divisive_norm
from jaxops._checks.arguments import BadParamError
from jaxops.divisive_norm import DIVISIVE_NORM, DIVISIVE_NORM_BACKWARD, Images

STRONG = {"alpha": 1.5, "beta": 0.75, "k": 0.5}  # the defaults hardly normalize anything of size 1
ATTRIBUTES = {
    "odd": {"n": 3, **STRONG},
    "even": {"n": 4, **STRONG},
    "two": {"n": 2, "alpha": 1.5, "beta": 1.0, "k": 2.0},
    "more-than-there-are": {"n": 16, **STRONG},
}


def draw(rng, shape=(2, 3, 5, 6), dtype="float32"):
    return [np.asarray(jnp.asarray(rng.normal(size=shape), dtype)) for _ in range(3)]


def results(x, means, dy, **attributes):
    """y and the gradients of x and, if there are means, of those."""
    operands = (x,) if means is None else (x, means)
    attributes = {"layout": "NCHW" if x.ndim == 4 else "NCDHW"} | attributes
    y, pull_back = jax.vjp(jax.jit(lambda *xs: divisive_norm(*xs, **attributes)), *operands)
    return y, *pull_back(jnp.asarray(dy))


@pytest.mark.sampled
@pytest.mark.parametrize("with_means", [False, True], ids=["zero-means", "means"])
@pytest.mark.parametrize("shape", [(2, 3, 5, 6), (1, 2, 3, 4, 3)], ids=["images", "volumes"])
@pytest.mark.parametrize("attributes", ATTRIBUTES.values(), ids=ATTRIBUTES)
def test_divisive_norm_equals_loops_in_float64(attributes, shape, with_means, rng):
    x, means, dy = draw(rng, shape)
    means = means if with_means else None
    truth = oracle.within_channels(x, means, dy, **attributes)
    for actual, exact in zip(results(x, means, dy, **attributes), truth, strict=with_means):
        np.testing.assert_allclose(actual, exact, rtol=1e-5, atol=1e-5 * np.abs(exact).max())


@pytest.mark.sampled
@pytest.mark.parametrize("layout", AXES)
def test_divisive_norm_takes_every_layout(layout, rng):
    arrays = draw(rng, (2, 2, 3, 4, 2)[: len(layout)])
    truth = oracle.within_channels(*arrays, n=4, **STRONG)
    moved = [array.transpose(AXES[layout]) for array in arrays]
    for actual, exact in zip(results(*moved, n=4, **STRONG, layout=layout), truth, strict=True):
        np.testing.assert_allclose(actual, exact.transpose(AXES[layout]), rtol=1e-5, atol=1e-5)


def test_divisive_norm_works_out():
    # Windows of two look ahead; with alpha = 4 the squared deviations from 1 are summed as they are.
    x = np.array([[1, 2], [3, 4]], np.float32)[None, None]
    y = divisive_norm(x, np.ones_like(x), n=2, alpha=4.0, beta=1.0, k=1.0, layout="NCHW")
    np.testing.assert_allclose(y[0, 0], [[1 / (1 + 14), 2 / (1 + 10)], [3 / (1 + 13), 4 / (1 + 9)]], rtol=1e-6)
    # In a volume of depth 1 the divisor is n**3 all the same.
    y = divisive_norm(x[:, :, None], n=2, alpha=8.0, beta=1.0, k=1.0, layout="NCDHW")
    np.testing.assert_allclose(y[0, 0, 0], [[1 / (1 + 30), 2 / (1 + 20)], [3 / (1 + 25), 4 / (1 + 16)]], rtol=1e-6)


def far_from_zero(rng, shape):
    """1e4, with deviations of 1."""
    return 1e4 + rng.normal(size=shape), 1e4 + rng.normal(size=shape)


def ramp(rng, shape):
    """Most of what the numbers have in common differs from place to place."""
    slope = np.linspace(0, 3e4, shape[-1]) + np.linspace(0, 1e4, shape[-2])[:, None]
    x = slope + rng.normal(size=shape)
    return x, x + rng.normal(size=shape)


def outliers(rng, shape):
    """A single pixel, and a single mean, far from all others."""
    x, means = rng.normal(size=shape), rng.normal(size=shape)
    x[:, :, 3, 4] = 1e4
    means[:, :, 7, 2] = -1e4
    return x, means


def heavy_tails(rng, shape):
    """Many pixels far from all others, also where windows begin."""
    return np.exp(3 * rng.normal(size=shape)), rng.normal(size=shape)


def many_outliers(rng, shape):
    x, means = rng.normal(size=shape), rng.normal(size=shape)
    x[rng.random(shape) < 0.02] *= 1e4
    return x, means


# What float32 differences of neighbours can keep of y and, beside the largest, of the gradients. A gradient that the
# outlying mean hardly touches is a difference of what is far from it.
IMAGES = {"far-from-zero": (far_from_zero, 3e-6, 3e-6), "ramp": (ramp, 1e-5, 1e-5), "outliers": (outliers, 2e-6, 1e-4)}


@pytest.mark.sampled
@pytest.mark.parametrize(("images", "of_y", "of_gradients"), IMAGES.values(), ids=IMAGES)
@pytest.mark.parametrize("n", [6, 15])
def test_divisive_norm_keeps_the_digits_of_deviations(n, images, of_y, of_gradients, rng):
    attributes = {"n": n, "alpha": 3.0, "beta": 0.75, "k": 0.1}
    x, means = (array.astype(np.float32) for array in images(rng, (1, 2, 12, 14)))
    dy = rng.normal(size=x.shape).astype(np.float32)
    truth = oracle.within_channels(x, means, dy, **attributes)
    y, *gradients = results(x, means, dy, **attributes)
    np.testing.assert_allclose(y, truth[0], rtol=of_y)
    for actual, exact in zip(gradients, truth[1:], strict=True):
        np.testing.assert_allclose(actual, exact, rtol=0, atol=of_gradients * np.abs(exact).max())


@pytest.mark.sampled
@pytest.mark.parametrize("images", [heavy_tails, many_outliers])
@pytest.mark.parametrize("n", [5, 16])
@pytest.mark.parametrize("shape", [(1, 1, 24, 24), (1, 1, 6, 7, 8)], ids=["images", "volumes"])
def test_divisive_norm_keeps_the_digits_of_outliers(shape, n, images, rng):
    """As sums of squared differences do."""
    attributes = {"n": n, "alpha": 1.0, "beta": 0.75, "k": 1e-5}
    x, means = (array.astype(np.float32) for array in images(rng, shape))
    dy = rng.normal(size=shape).astype(np.float32)
    truth = oracle.within_channels(x, means, dy, **attributes)
    y, dx, dmeans = results(x, means, dy, **attributes)
    np.testing.assert_allclose(y, truth[0], rtol=2e-6)
    for actual, exact in zip((dx, dmeans), truth[1:], strict=True):
        np.testing.assert_allclose(actual, exact, rtol=0, atol=2e-6 * np.abs(exact).max())


@pytest.mark.parametrize("n", [1, 4])
@pytest.mark.parametrize("pixel", [np.inf, -np.inf, 1e25, np.nan])
def test_divisive_norm_keeps_what_overflows_to_its_windows(pixel, n, rng):
    x, means, dy = (rng.normal(size=(3, 1, 6, 5)).astype(np.float32) for _ in range(3))
    zeros = np.zeros_like(x)
    for image, at in enumerate([(0, 0), (2, 3), (5, 4)]):
        x[image, 0, *at] = pixel
    with np.errstate(over="ignore", invalid="ignore"):
        truth = [oracle.within_channels(x, m, dy, n=n, **STRONG)[0] for m in (zeros, means)]
    for m, exact in zip((None, zeros, means), (truth[0], *truth), strict=True):
        np.testing.assert_allclose(divisive_norm(x, m, n=n, **STRONG, layout="NCHW"), exact, rtol=1e-5, atol=1e-11)


@pytest.mark.sampled
@pytest.mark.parametrize("with_means", [False, True], ids=["zero-means", "means"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_divisive_norm_rounds_once(dtype, with_means, rng):
    x, means, dy = draw(rng, dtype=dtype)
    means = means if with_means else None
    truth = oracle.within_channels(x, means, dy, n=4, **STRONG)
    actuals = results(jnp.asarray(x), means if means is None else jnp.asarray(means), dy, n=4, **STRONG)
    for actual, exact in zip(actuals, truth, strict=with_means):
        assert actual.dtype == dtype
        one_rounding = 0.501 * float(jnp.finfo(dtype).eps)
        np.testing.assert_allclose(np.asarray(actual, np.float64), exact, rtol=one_rounding, atol=2e-6)


def test_divisive_norm_keeps_float64(rng):
    with jax.enable_x64(True):
        x, means, dy = (rng.normal(size=(2, 2, 6, 5)) + shift for shift in (1e4, 1e4, 0))
        truth = oracle.within_channels(x, means, dy, n=4, **STRONG)
        for actual, exact in zip(results(x, means, dy, n=4, **STRONG), truth, strict=True):
            assert actual.dtype == jnp.float64
            np.testing.assert_allclose(actual, exact, rtol=1e-12, atol=1e-12 * np.abs(exact).max())


@pytest.mark.slow
def test_divisive_norm_passes_gradients_through_a_layer_of_means(rng):
    """Local contrast normalization: the means are a blur of x, whose gradient counts as well."""
    attributes = {"n": 3, **STRONG}
    x, _, dy = draw(rng, (1, 2, 5, 4))

    def blurred(x):
        return sum(jnp.roll(x, shift, axis) for shift in (-1, 0, 1) for axis in (2, 3)) / 6

    grad = jax.grad(lambda x: jnp.sum(dy * divisive_norm(x, blurred(x), **attributes, layout="NCHW")))(x)
    step, exact = 1e-6, np.zeros(x.shape)
    for at in np.ndindex(x.shape):
        values = []
        for sign in (1, -1):
            moved = x.astype(np.float64)
            moved[at] += sign * step
            means = sum(np.roll(moved, shift, axis) for shift in (-1, 0, 1) for axis in (2, 3)) / 6
            values.append((dy * oracle.within_channels(moved, means, dy, **attributes)[0]).sum())
        exact[at] = (values[0] - values[1]) / (2 * step)
    np.testing.assert_allclose(grad, exact, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_divisive_norm_without_means_is_that_with_zeros(rng):
    x, _, dy = draw(rng)
    zeros = np.zeros_like(x)
    for actual, expected in zip(results(x, None, dy, **STRONG), results(x, zeros, dy, **STRONG), strict=False):
        np.testing.assert_allclose(actual, expected, rtol=1e-6, atol=1e-6)


def test_divisive_norm_takes_steps_as_the_logarithm_of_its_window():
    x = jnp.zeros((1, 1, 1, 64, 64, 1))

    def steps(n, means):
        attributes = {"window": (1, n, n), "alpha": 1.0, "beta": 0.75, "k": 2.0, "means_grad": True}
        jaxpr = jax.make_jaxpr(lambda *arrays: DIVISIVE_NORM_BACKWARD.reference(Images(*arrays[:2]), x, **attributes))(
            x, means
        )
        return sum(equation.primitive.name == "slice" for equation in jaxpr.eqns)

    assert steps(16, x) - steps(8, x) == steps(8, x) - steps(4, x) < steps(4, x)
    assert steps(16, None) == 0  # sums of squares along one axis after the other, as they stand


@pytest.mark.sampled
@pytest.mark.parametrize("with_means", [False, True], ids=["zero-means", "means"])
@pytest.mark.parametrize("shape", [(0, 3, 4, 4), (2, 0, 4, 4), (2, 3, 0, 4)], ids=str)
def test_divisive_norm_of_nothing(shape, with_means):
    x = jnp.zeros(shape)
    for actual in results(x, x if with_means else None, x):
        assert actual.shape == shape


def test_explain_shows_divisive_norm():
    loss = jax.grad(lambda x: jnp.sum(divisive_norm(x, x, layout="NCHW")))
    rows = lowering.explain(loss, np.zeros((2, 3, 4, 4), np.float32)).rows
    assert [row.operator for row in rows] == ["divisive_norm", "divisive_norm_backward"]


X = np.zeros((2, 3, 4, 5), np.float32)
REFUSALS = {
    "none": (None, None, {}, "x must be given; got None"),
    "rank": (X[0], None, {}, "x must have rank 4 or 5; got float32[3, 4, 5]"),
    "dtype": (X.astype(np.int32), None, {}, "x must be floating point; got int32[2, 3, 4, 5]"),
    "layout": (
        X,
        None,
        {"layout": "NCWH"},
        "layout must be one of NCHW, NHWC, NCDHW, NDHWC; got 'NCWH', did you mean NCHW?",
    ),
    "means-shape": (X, X[:1], {}, "means must have x's shape and dtype, float32[2, 3, 4, 5]; got float32[1, 3, 4, 5]"),
    "means-dtype": (
        X,
        X.astype(np.float16),
        {},
        "means must have x's shape and dtype, float32[2, 3, 4, 5]; got float16[2, 3, 4, 5]",
    ),
    "layout-missing": (
        X,
        None,
        {"layout": None},
        "layout must be NCHW or NHWC, as x has 4 axes and there is no default; got None",
    ),
    "n-zero": (X, None, {"n": 0}, "n must be an integer from 1 to 2147483647; got 0"),
    "alpha": (X, None, {"alpha": None}, "alpha must be a finite number that float32 can hold; got None"),
}


@pytest.mark.parametrize(("x", "means", "attributes", "words"), REFUSALS.values(), ids=REFUSALS)
def test_divisive_norm_refuses_bad_input(x, means, attributes, words):
    def call(*operands):
        return divisive_norm(*operands, **{"layout": "NCHW"} | attributes)

    for ask in (call, jax.jit(call), lambda *operands: lowering.explain(call, *operands)):
        with pytest.raises(BadParamError) as refusal:
            ask(x, means)
        assert str(refusal.value) == f"divisive_norm: {words}"
        assert refusal.value.status == "MCDNN_STATUS_BAD_PARAM"


def test_divisive_norm_operators_refuse_other_shapes():
    volume, attributes = jnp.zeros((2, 1, 4, 4, 1)), {"window": (1, 3, 3), "alpha": 1.0, "beta": 0.5, "k": 1.0}
    with pytest.raises(BadParamError, match=r"^divisive_norm: means must have the shape of x"):
        DIVISIVE_NORM(Images(volume, volume[:1]), **attributes)
    with pytest.raises(BadParamError, match=r"^divisive_norm_backward: grad must have the shape of x"):
        DIVISIVE_NORM_BACKWARD(Images(volume, volume), volume[:1], means_grad=True, **attributes)


def case(name, shape, operands, **attributes):
    return contract.Case(
        name,
        functools.partial(divisive_norm, **STRONG, **{"layout": "NCHW"} | attributes),
        lambda rng: tuple(rng.normal(size=shape).astype(np.float32) for _ in range(operands)),
        differentiable=tuple(range(operands)),
        batched=(0,) * operands,
        operator="divisive_norm",
        backward="divisive_norm_backward",
    )


CASES = [
    case("zero-means-channels-last", (8, 2, 3, 2), 1, n=4, layout="NHWC"),
    case("means", (8, 1, 2, 3), 2, n=2),
]


@pytest.mark.parametrize("promise", contract.PROMISES, ids=contract.promise_name)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_divisive_norm_keeps_promise(case, promise):
    promise(case)
