"""`activation`: values and slopes against NumPy float64 and PyTorch, and what every operator promises."""

import activation_oracle as oracle
import contract
import hypothesis
import hypothesis.extra.numpy
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from activation_oracle import COEFFICIENTS, MODES, POINTS
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import lowering
from jaxops import activation, batch_norm_inference
from jaxops._checks.arguments import BadParamError
from jaxops.activation.modes import Activation, activated
from jaxops.testing.meshes import gathered_sizes


def attributes_of(mode):
    coef = COEFFICIENTS.get(mode)
    return {"mode": mode, "swish_beta": coef} if mode == "swish" else {"mode": mode, "coef": coef}


def value_and_slope(mode, x):
    y, pull_back = jax.vjp(jax.jit(lambda x: activation(x, **attributes_of(mode))), x)
    return y, pull_back(jnp.ones_like(y))[0]


def assert_within(actual, exact, dtype, roundings):
    """Equal up to so many roundings of the dtype; equal NaN and infinities."""
    eps = float(jnp.finfo(dtype).eps)
    assert actual.dtype == dtype
    np.testing.assert_allclose(np.asarray(actual, np.float64), exact, rtol=roundings * eps, atol=roundings * eps)


@pytest.mark.parametrize("mode", MODES)
def test_activation_has_the_documented_values_and_slopes(mode):
    x = POINTS.astype(np.float32)
    y, slope = value_and_slope(mode, x)
    coef = COEFFICIENTS.get(mode)
    assert_within(y, oracle.value(mode, x.astype(np.float64), coef), np.float32, 4)
    assert_within(slope, oracle.slope(mode, x.astype(np.float64), coef), np.float32, 4)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_activation_rounds_once(dtype, mode, rng):
    x = jnp.asarray(3 * rng.normal(size=200), dtype)
    y, slope = value_and_slope(mode, x)
    coef, wide = COEFFICIENTS.get(mode), np.asarray(x, np.float64)
    assert_within(y, oracle.value(mode, wide, coef), dtype, 0.51)
    stored = np.asarray(y, np.float64)
    from_result = mode in ("sigmoid", "relu", "tanh", "elu")
    truth = oracle.slope_of_result(mode, stored, coef) if from_result else oracle.slope(mode, wide, coef)
    assert_within(slope, truth, dtype, 0.51)


@pytest.mark.parametrize("mode", MODES)
def test_activation_keeps_float64(mode, rng):
    with jax.enable_x64(True):
        x = 3 * rng.normal(size=50)
        y, slope = value_and_slope(mode, x)
        assert_within(y, oracle.value(mode, x, COEFFICIENTS.get(mode)), np.float64, 8)
        assert_within(slope, oracle.slope(mode, x, COEFFICIENTS.get(mode)), np.float64, 8)


def by_torch(torch, mode, x):
    match mode:
        case "clipped_relu":
            return torch.nn.functional.hardtanh(x, 0.0, 0.75)
        case "elu":
            return torch.nn.functional.elu(x, 0.625)
        case "identity":
            return x.clone()
        case "swish":
            return x * torch.sigmoid(1.25 * x)
    return getattr(torch, mode)(x)


@pytest.mark.parametrize("mode", MODES)
def test_activation_is_pytorchs_to_the_second_order(mode, rng):
    torch = pytest.importorskip("torch", reason="compares with PyTorch")
    x = np.concatenate([POINTS[np.isfinite(POINTS)], 3 * rng.normal(size=100)]).astype(np.float32)
    tensor = torch.from_numpy(x).requires_grad_()
    y = by_torch(torch, mode, tensor)
    (first,) = torch.autograd.grad(y.sum(), tensor, create_graph=True)

    def fn(x):
        return activation(x, **attributes_of(mode))

    slope = jax.vmap(jax.grad(fn))
    np.testing.assert_allclose(fn(x), y.detach().numpy(), rtol=2e-6, atol=1e-6)
    np.testing.assert_allclose(slope(x), first.detach().numpy(), rtol=2e-6, atol=1e-6)
    if mode in ("sigmoid", "tanh", "elu", "swish"):
        (second,) = torch.autograd.grad(first.sum(), tensor)
        smooth = x != 0 if mode == "elu" else slice(None)
        np.testing.assert_allclose(jax.vmap(jax.grad(jax.grad(fn)))(x)[smooth], second.numpy()[smooth], atol=2e-6)


@pytest.mark.parametrize("mode", MODES)
def test_activation_of_nan_is_nan_and_corners_stop_its_gradient(mode):
    y, slope = value_and_slope(mode, np.float32([np.nan, 1]))
    assert np.isnan(y[0])
    assert not np.isnan(y[1])
    expected = {"relu": 0, "clipped_relu": 0, "identity": 1}.get(mode, np.nan)
    np.testing.assert_array_equal(slope[0], np.float32(expected))


def test_clipped_relu_compares_what_it_is_given_with_the_ceiling_unrounded():
    x = jnp.asarray([0.69921875, 0.703125], jnp.bfloat16)  # the neighbours of 0.7
    _, pull_back = jax.vjp(lambda x: activation(x, "clipped_relu", coef=0.7), x)
    np.testing.assert_array_equal(np.asarray(pull_back(jnp.ones_like(x))[0], np.float32), [1, 0])


@pytest.mark.parametrize("mode", ["relu", "clipped_relu"])
def test_activation_stops_nan_where_its_slope_is_zero(mode):
    x = np.float32([-1, 0, 0.5, 2])
    pull_back = jax.vjp(lambda x: activation(x, mode, coef=1.0), x)[1]
    (grad,) = pull_back(jnp.full(4, jnp.nan))
    np.testing.assert_array_equal(np.isnan(grad), [False, False, True, mode == "relu"])


def test_activation_takes_a_relu_to_be_unclipped():
    np.testing.assert_array_equal(activation(np.float32([-1, 5]), "relu", coef=0.7), [0, 5])


@pytest.mark.parametrize("coef", [-0.5, 0.0, 2.0])
def test_activation_differentiates_an_elu_of_any_factor(coef):
    x = np.float32([-3, -0.5, 0, 0.5])
    slope = jax.vmap(jax.grad(lambda x: activation(x, "elu", coef=coef)))(x)
    np.testing.assert_allclose(slope, np.where(x > 0, 1, coef * np.exp(x)), rtol=1e-6, atol=1e-6)


def test_activation_clips_below_zero_where_its_ceiling_is():
    y, slope = jax.vjp(lambda x: activation(x, "clipped_relu", coef=-0.5), np.float32([-1, 0, 1]))
    np.testing.assert_array_equal(y, [-0.5] * 3)
    np.testing.assert_array_equal(slope(jnp.ones(3))[0], [0] * 3)


KEPT = {"sigmoid": "y", "relu": "y", "tanh": "y", "elu": "y", "clipped_relu": "x", "swish": "x", "identity": ""}


@pytest.mark.parametrize("mode", MODES)
def test_activation_keeps_no_more_than_its_gradient_reads(mode):
    x = jnp.float32([0.25, 0.5])
    y, pull_back = jax.vjp(lambda x: activation(x, **attributes_of(mode)), x)
    kept = [np.asarray(one) for one in jax.tree.leaves(pull_back)]
    expected = {"y": [y], "x": [x], "": []}[KEPT[mode]]
    assert len(kept) == len(expected)
    for one, other in zip(kept, expected, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.sampled
@pytest.mark.parametrize("mode", MODES)
def test_batch_norm_fuses_the_same_activation(mode):
    x = POINTS[np.isfinite(POINTS)].astype(np.float32).reshape(-1, 1)
    zero, one = np.zeros(1, np.float32), np.ones(1, np.float32)

    def fused(x):
        normal = (mode, COEFFICIENTS.get(mode))
        return batch_norm_inference(x, one, zero, zero, one, epsilon=0.0, activation=normal)

    y, pull_back = jax.vjp(fused, x)
    alone, slope = value_and_slope(mode, x)
    np.testing.assert_allclose(y, alone, rtol=1e-6)
    np.testing.assert_allclose(pull_back(jnp.ones_like(y))[0], slope, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("mode", MODES)
def test_activation_formula_is_differentiated_as_the_operator_is(mode):
    x = POINTS.astype(np.float32)
    formula = Activation(mode, COEFFICIENTS.get(mode, 0.0))
    slope = jax.jvp(lambda x: activated(formula, x), (x,), (np.ones_like(x),))[1]
    np.testing.assert_allclose(slope, value_and_slope(mode, x)[1], rtol=1e-5, atol=5e-7)


def test_swish_of_no_beta_is_half_of_x_up_to_infinity():
    x = np.float32([-np.inf, -3, 0, 2, np.inf])
    y, pull_back = jax.vjp(lambda x: activation(x, "swish", swish_beta=0.0), x)
    np.testing.assert_array_equal(y, x / 2)
    np.testing.assert_array_equal(*pull_back(np.ones_like(x)), np.full_like(x, 0.5))


@pytest.mark.parametrize("mode", ["tanh", "swish"])
def test_activation_takes_numbers_of_the_host_as_tangents_and_cotangents(mode):
    def f(x):
        return activation(x, **attributes_of(mode))

    x = np.float32([-2.5, 0.0, 0.7])
    expected = value_and_slope(mode, x)[1]
    slopes = [jax.vjp(f, each)[1](1.0)[0] for each in x]
    np.testing.assert_allclose(slopes, expected, rtol=1e-5)
    for slope in (lambda each: jax.vjp(f, each)[1](1.0)[0], lambda each: jax.jvp(f, (each,), (1.0,))[1]):
        np.testing.assert_allclose(jax.vmap(slope)(x), expected, rtol=1e-5)


@pytest.mark.sampled
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (2, 1, 3, 1, 2, 1)], ids=str)
@pytest.mark.parametrize("mode", MODES)
def test_activation_takes_any_shape(mode, shape, rng):
    x = rng.normal(size=shape).astype(np.float32)
    y, slope = value_and_slope(mode, x)
    assert y.shape == slope.shape == shape
    np.testing.assert_allclose(y, oracle.value(mode, x.astype(np.float64), COEFFICIENTS.get(mode)), rtol=1e-5)


def test_activation_runs_on_any_split_of_an_array(rng):
    x = rng.normal(size=(4, 6, 8)).astype(np.float32)
    mesh = jax.make_mesh((2, 4), ("rows", "columns"), axis_types=(AxisType.Explicit,) * 2)
    spec = P("rows", None, "columns")
    placed = jax.device_put(x, jax.NamedSharding(mesh, spec))
    slope = jax.jit(jax.grad(lambda x: jnp.sum(activation(x, "swish"))))
    compiled = slope.lower(placed).compile()
    assert list(gathered_sizes(compiled.as_text())) == []
    assert compiled(placed).sharding.spec == spec
    np.testing.assert_allclose(compiled(placed), slope(x), rtol=1e-5, atol=1e-6)


FINITE = hypothesis.extra.numpy.arrays(
    np.float32, 8, elements=st.floats(-(2.0**99), 2.0**99, width=32, allow_subnormal=False)
)


@pytest.mark.slow
@hypothesis.given(x=FINITE, mode=st.sampled_from(MODES))
@hypothesis.settings(max_examples=60)
def test_activation_of_finite_numbers_is_finite_and_so_is_its_slope(x, mode):
    y, slope = value_and_slope(mode, x)
    assert np.isfinite(y).all()
    assert np.isfinite(slope).all()
    assert np.abs(slope).max() <= 1.2  # of swish, whatever its beta


@hypothesis.given(x=FINITE, mode=st.sampled_from(["sigmoid", "relu", "tanh", "clipped_relu", "elu"]))
@hypothesis.settings(max_examples=40)
def test_activation_rises(x, mode):
    y = activation(np.sort(x), **attributes_of(mode))
    assert (np.diff(y) >= -1e-7).all()


X = np.zeros((2, 3), np.float32)
MODE_NAMES = ", ".join(MODES)
REFUSALS = {
    "none": ((None, "relu"), {}, "x must be given; got None"),
    "integers": ((X.astype(np.int32), "relu"), {}, "x must be floating point; got int32[2, 3]"),
    "complex": ((X.astype(np.complex64), "identity"), {}, "x must be floating point; got complex64[2, 3]"),
    "mode": ((X, "gelu"), {}, f"mode must be one of {MODE_NAMES}; got 'gelu', did you mean elu?"),
    "mode-upper": ((X, "RELU"), {}, f"mode must be one of {MODE_NAMES}; got 'RELU', did you mean relu?"),
    "mode-number": ((X, 1), {}, f"mode must be one of {MODE_NAMES}; got 1"),
    "coef-missing": ((X, "clipped_relu"), {}, "coef must be given for clipped_relu; got None"),
    "coef-nan": ((X, "elu"), {"coef": float("nan")}, "coef must be a finite number that float32 can hold; got nan"),
    "coef-text": ((X, "relu"), {"coef": "6"}, "coef must be a finite number that float32 can hold; got '6'"),
    "coef-bool": ((X, "elu"), {"coef": True}, "coef must be a finite number that float32 can hold; got True"),
    "beta-none": (
        (X, "swish"),
        {"swish_beta": None},
        "swish_beta must be a finite number that float32 can hold; got None",
    ),
}


@pytest.mark.parametrize(("operands", "attributes", "words"), REFUSALS.values(), ids=REFUSALS)
def test_activation_refuses_bad_input(operands, attributes, words):
    x, mode = operands

    def call(x):
        return activation(x, mode, **attributes)

    for ask in (call, jax.jit(call), lambda x: lowering.explain(call, x)):
        with pytest.raises(BadParamError) as refusal:
            ask(x)
        assert str(refusal.value) == f"activation: {words}"
        assert refusal.value.status == "MCDNN_STATUS_BAD_PARAM"


def test_explain_shows_activation():
    rows = lowering.explain(jax.grad(lambda x: jnp.sum(activation(x, "swish"))), X).rows
    assert [row.operator for row in rows] == ["activation", "activation_backward"]
    assert {row.implementation for row in rows} == {"reference"}


def case(mode, shape=(8, 3)):
    return contract.Case(
        mode,
        lambda x: activation(x, **attributes_of(mode)),
        # Far enough from the corners for finite differences.
        lambda rng: (rng.permutation(np.linspace(-2, 2, 24)).reshape(shape).astype(np.float32),),
        differentiable=(0,),
        batched=(0,),
        operator="activation",
        backward="activation_backward",
    )


CASES = [case("clipped_relu"), case("elu"), case("swish", (24,))]


@pytest.mark.parametrize("promise", contract.PROMISES, ids=contract.promise_name)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_activation_keeps_promise(case, promise):
    promise(case)
