"""Numbers that change from step to step: traced scalars give what Python numbers give; new values compile nothing."""

import functools
import inspect
import pathlib

import batch_norm_oracle
import dropout_oracle
import jax
import jax.monitoring
import jax.numpy as jnp
import numpy as np
import pytest
from public_calls import CALLS

import jaxops
from jaxops import aclnn, mcdnn
from jaxops._checks.arguments import BadParamError

KEY_WORDS = (7, 11)
KEY = jnp.asarray(KEY_WORDS, jnp.uint32)
RATES = [0.0, 1.0, 0.5, 0.1, 1 / 3, 2.0**-20, 1 - 2.0**-24, 2.0**-25, 3 * 2.0**-25, 1e-30]
STATM = pathlib.Path("/proc/self/statm")


def number(value):
    """The Python number of a float32."""
    return float(np.float32(value))


# The factors of each output's blend, its prior and its place among the results; None where it is the only one.
ONE = {("alpha", "beta", "y"): None}
ONE_GRADIENT = {("alpha", "beta", "dx"): None}
PARAMETERS = ("alpha_param_diff", "beta_param_diff")
DATA = ("alpha_data_diff", "beta_data_diff", "dx")
WITH_DZ = {DATA: 0, (*PARAMETERS, "dscale"): 2, (*PARAMETERS, "dbias"): 3}
BLENDS = {
    **{f"mcdnn.{kind}_forward": ONE for kind in ("activation", "softmax", "pooling", "lrn_cross_channel")},
    **{f"mcdnn.{kind}_backward": ONE_GRADIENT for kind in ("activation", "softmax", "pooling", "lrn_cross_channel")},
    **{f"mcdnn.{kind}_forward": ONE for kind in ("divisive_normalization", "spatial_tf_sampler")},
    "mcdnn.divisive_normalization_backward": {("alpha", "beta", "dx"): 0, ("alpha", "beta", "dmeans"): 1},
    "mcdnn.spatial_tf_sampler_backward": {
        ("alpha", "beta", "dx"): 0,
        ("alpha_dgrid", "beta_dgrid", "dgrid"): 1,
    },
    **{f"mcdnn.{kind}_forward_inference": ONE for kind in ("batch_normalization", "normalization")},
    **{
        f"mcdnn.{kind}": {("alpha", "beta", "y"): 0}
        for kind in (
            "batch_normalization_forward_training",
            "batch_normalization_forward_training_ex",
            "normalization_forward_training",
        )
    },
    "mcdnn.batch_normalization_backward": {DATA: 0, (*PARAMETERS, "dscale"): 1, (*PARAMETERS, "dbias"): 2},
    "mcdnn.batch_normalization_backward_ex": WITH_DZ,
    "mcdnn.normalization_backward": WITH_DZ,
}


def blended_call(name, rng):
    """`call(priors, alpha, beta)` gives the blended outputs, by the names of their priors; and its priors."""
    function, valid = CALLS[name]
    valid = {
        argument: rng.uniform(0.5, 1.5, value.shape).astype(np.float32)
        if isinstance(value, np.ndarray) and value.dtype == np.float32
        else value
        for argument, value in valid.items()
    }
    blends = BLENDS[name]
    priors = {prior: valid[prior] for _, _, prior in blends}

    def call(priors, alpha, beta):
        factors = {a: alpha for a, _, _ in blends} | {b: beta for _, b, _ in blends}
        results = function(**{**valid, **priors, **factors})
        return {prior: results if place is None else results[place] for (_, _, prior), place in blends.items()}

    return call, priors


def test_table_has_every_blend():
    public = {f"mcdnn.{name}": getattr(mcdnn, name) for name in mcdnn.__all__ if f"mcdnn.{name}" in CALLS}
    functions = {name: inspect.signature(value).parameters for name, value in public.items()}
    blends = {name for name, parameters in functions.items() if {"alpha", "alpha_data_diff"} & {*parameters}}
    assert blends - {"mcdnn.LRNDescriptor"} == {*BLENDS}


@pytest.mark.sampled
@pytest.mark.parametrize("name", BLENDS)
def test_traced_blend_factors_blend_as_numbers_do(name, rng):
    """The results themselves have tests of their own; here they are blended in NumPy."""
    call, priors = blended_call(name, rng)
    jitted = jax.jit(call)
    plain = call(priors, 1.0, 0.0)
    nothing = {prior: np.full_like(value, np.nan) for prior, value in priors.items()}
    for alpha, beta in ((1, 0), (0, 1), (0.5, 2), (-0.25, 0), (1, -1)):
        before = priors if beta else nothing
        scalars = jnp.float32(alpha), jnp.float32(beta)
        for results in (jitted(before, *scalars), call(before, *scalars), call(before, alpha, beta)):
            for prior, result in results.items():
                expected = np.float64(alpha) * np.asarray(plain[prior], np.float64)
                if beta:
                    expected += beta * before[prior].astype(np.float64)
                np.testing.assert_allclose(result, expected, rtol=1e-6, atol=1e-6)
    assert jitted._cache_size() == 1


def test_blend_factors_have_gradients(rng):
    x, y = (jnp.asarray(rng.normal(size=(2, 3, 1, 1)), jnp.float32) for _ in range(2))

    def total(alpha, beta):
        return jnp.sum(mcdnn.activation_forward(mcdnn.ActivationDescriptor("RELU"), x, alpha=alpha, beta=beta, y=y))

    gradients = jax.grad(total, (0, 1))(jnp.float32(0.5), jnp.float32(2))
    expected = np.maximum(np.asarray(x, np.float64), 0).sum(), np.asarray(y, np.float64).sum()
    np.testing.assert_allclose(gradients, expected, rtol=1e-5)


def test_blend_factors_of_16_bits_are_computed_with_in_float32(rng):
    x = jnp.asarray(rng.uniform(0.5, 1.5, size=(2, 3, 1, 1)), jnp.bfloat16)
    blended = jax.jit(functools.partial(mcdnn.activation_forward, mcdnn.ActivationDescriptor("RELU")))
    result = blended(x, alpha=jnp.bfloat16(0.75), beta=jnp.bfloat16(0.5), y=x)
    assert result.dtype == jnp.bfloat16
    np.testing.assert_array_equal(result, (np.asarray(x, np.float64) * 1.25).astype(jnp.bfloat16))


def test_traced_beta_needs_a_prior():
    x = np.ones((2, 3, 1, 1), np.float32)
    with pytest.raises(BadParamError, match=r"^softmax_forward: y must be given where its beta is not 0; got None\b"):
        jax.jit(lambda beta: mcdnn.softmax_forward("FAST", "CHANNEL", x, beta=beta))(0.0)


def averages(name, x, running_mean, running_variance, momentum):
    """Running mean and variance after a training call."""
    one, zero = np.ones(3, np.float32), np.zeros(3, np.float32)
    if name == "batch_norm":
        return jaxops.batch_norm(x, one, zero, running_mean, running_variance, momentum=momentum, layout="NCHW")[1:3]
    mode = {"norm": ("PER_CHANNEL", "NORM", "STANDARD"), "ex": ("SPATIAL", "OPS_BN"), "bn": ("SPATIAL",)}[name]
    function = {
        "norm": mcdnn.normalization_forward_training,
        "ex": mcdnn.batch_normalization_forward_training_ex,
        "bn": mcdnn.batch_normalization_forward_training,
    }[name]
    parameters = [value.reshape(1, 3, 1, 1) for value in (one, zero, running_mean, running_variance)]
    statistics = {"running_mean": parameters[2], "running_variance": parameters[3]}
    out = function(*mode, x, *parameters[:2], exponential_average_factor=momentum, **statistics)
    return [value.reshape(3) for value in (out.running_mean, out.running_variance)]


@pytest.mark.sampled
@pytest.mark.parametrize("name", ["batch_norm", "bn", "ex", "norm"])
def test_traced_momentum_averages_as_numbers_do(name, rng):
    x = rng.normal(size=(4, 3, 2, 2)).astype(np.float32)
    old = [rng.uniform(0.5, 1.5, 3).astype(np.float32) for _ in range(2)]
    _, mean, _, unbiased, _ = batch_norm_oracle.training(x, np.ones(3), np.zeros(3))
    nothing = [np.full(3, np.nan, np.float32)] * 2
    jitted = jax.jit(functools.partial(averages, name))
    for momentum in (0, 1, 0.1, 0.5, 1 / 3):
        before = nothing if momentum == 1 else old
        expected = [
            new if momentum == 1 else (1 - momentum) * was + momentum * new
            for was, new in zip(before, (mean, unbiased), strict=True)
        ]
        traced = jitted(x, *before, jnp.float32(momentum))
        for result in (traced, averages(name, x, *before, jnp.float32(momentum)), averages(name, x, *before, momentum)):
            np.testing.assert_allclose(result, expected, rtol=1e-5)
    np.testing.assert_array_equal(jitted(np.full_like(x, np.nan), *old, jnp.float32(0)), old)
    assert jitted._cache_size() == 1


def test_momentum_has_no_gradient(rng):
    x, old = rng.normal(size=(4, 3, 2, 2)).astype(np.float32), np.ones(3, np.float32)
    gradient = jax.grad(lambda momentum: jnp.sum(averages("batch_norm", x, old, old, momentum)[0]))(jnp.float32(0.5))
    assert gradient == 0


def dropped(x, rate, mask, dtype):
    scale = 0 if rate == 1 else dtype(1) / (dtype(1) - dtype(rate))
    return np.where(mask, np.asarray(x).astype(dtype) * scale, 0)


@pytest.mark.slow
def test_traced_rates_drop_what_numbers_drop(rng):
    x = rng.uniform(0.5, 1.5, 1000).astype(np.float32)
    jitted = jax.jit(lambda x, rate: jax.vjp(lambda x: jaxops.dropout(KEY, x, rate), x)[1](x))
    y_jitted = jax.jit(lambda x, rate: jaxops.dropout(KEY, x, rate))
    for rate in RATES:
        mask = dropout_oracle.kept(KEY_WORDS, x.size, number(rate))
        expected = dropped(x, number(rate), mask, np.float32)
        (gradient,) = jitted(x, np.float32(rate))
        results = (y_jitted(x, np.float32(rate)), gradient, jaxops.dropout(KEY, x, jnp.float32(rate)))
        for result in (*results, jaxops.dropout(KEY, x, number(rate)), jaxops.dropout(KEY, x, np.array(number(rate)))):
            np.testing.assert_array_equal(result, expected)
    assert jitted._cache_size() == y_jitted._cache_size() == 1


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "int32"])
def test_traced_rates_of_other_dtypes_count_by_their_value(dtype, rng):
    x = rng.uniform(0.5, 1.5, 300).astype(np.float32)
    rate = jnp.asarray(0 if dtype == "int32" else 0.3, dtype)
    y = jax.jit(functools.partial(jaxops.dropout, KEY))(x, rate)
    np.testing.assert_array_equal(y, jaxops.dropout(KEY, x, float(rate)))


def test_traced_rates_scale_float64_in_float64(rng):
    with jax.enable_x64(True):
        x = rng.uniform(0.5, 1.5, 1000)
        for rate in (0.0, 1.0, 0.1, 1 / 3):
            mask = dropout_oracle.kept(KEY_WORDS, x.size, rate)
            y = jax.jit(functools.partial(jaxops.dropout, KEY))(x, jnp.float64(rate))
            np.testing.assert_allclose(y, dropped(x, rate, mask, np.float64), rtol=1e-15)


@pytest.mark.slow
def test_mcdnn_dropout_takes_a_traced_rate(rng):
    x, dy = (rng.uniform(0.5, 1.5, (4, 50)).astype(np.float32) for _ in range(2))

    def both(rate):
        desc = mcdnn.DropoutDescriptor(rate)
        y, space = mcdnn.dropout_forward(desc, KEY, x)
        return y, mcdnn.dropout_backward(desc, dy, space)

    jitted = jax.jit(both)
    for rate in RATES[:5]:
        mask = dropout_oracle.kept(KEY_WORDS, x.size, number(rate)).reshape(x.shape)
        for results in (jitted(np.float32(rate)), both(jnp.float32(rate)), both(rate)):
            for result, data in zip(results, (x, dy), strict=True):
                np.testing.assert_array_equal(result, dropped(data, number(rate), mask, np.float32))


@pytest.mark.slow
def test_dropout_maps_over_rates():
    x, rates = jnp.ones((3, 64)), jnp.asarray([0.0, 0.25, 1.0])
    each = jnp.stack([jaxops.dropout(KEY, row, float(rate)) for row, rate in zip(x, rates, strict=True)])
    np.testing.assert_array_equal(jax.vmap(lambda x, rate: jaxops.dropout(KEY, x, rate))(x, rates), each)
    np.testing.assert_array_equal(jax.vmap(lambda rate: jaxops.dropout(KEY, x[0], rate))(rates), each)


def test_traced_rates_outside_of_the_unit_interval_are_clamped_and_nan_is_nan():
    drop = jax.jit(lambda rate: jaxops.dropout(KEY, jnp.full(100, 3.0), rate))
    np.testing.assert_array_equal(drop(-0.5), 3)
    np.testing.assert_array_equal(drop(-np.inf), 3)
    np.testing.assert_array_equal(drop(1.5), 0)
    assert np.isnan(drop(np.nan)).all()


@pytest.mark.slow
def test_dropout_has_no_gradient_in_its_rate():
    def total(x, rate):
        return jnp.sum(jnp.sin(jaxops.dropout(KEY, x, rate)))

    x = jnp.linspace(0, 1, 64)
    assert jax.grad(total, 1)(x, jnp.float32(0.25)) == 0
    mixed = jax.jacfwd(jax.grad(total), 1)(x, jnp.float32(0.25))
    np.testing.assert_array_equal(mixed, np.zeros(64))


def eager_blend(name):
    call, priors = blended_call(name, np.random.default_rng(0))
    return lambda value: call(priors, value, value)


def eager_averages(name):
    x, old = np.ones((4, 3, 2, 2), np.float32), np.ones(3, np.float32)
    return functools.partial(averages, name, x, old, old)


def eager_adam(argument):
    arrays = {name: np.ones(16, np.float32) for name in ("grad", "var", "m", "v", "s")}
    fixed = {"lr": 0.1, "ema_decay": 0.9, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8}
    return lambda value: aclnn.apply_fused_ema_adam(**arrays, step=np.ones(1, np.int32), **{**fixed, argument: value})


def eager_dropout(value):
    desc, x = mcdnn.DropoutDescriptor(value), np.ones((4, 64), np.float32)
    _, space = mcdnn.dropout_forward(desc, KEY, x)
    y, pull_back = jax.vjp(lambda x: jaxops.dropout(KEY, x, value), jnp.asarray(x))
    return mcdnn.dropout_backward(desc, x, space), y, pull_back(y)


EAGER = {
    **{f"{name} blends": functools.partial(eager_blend, name) for name in BLENDS},
    **{f"{name} momentum": functools.partial(eager_averages, name) for name in ("batch_norm", "bn", "ex", "norm")},
    **{f"adam {argument}": functools.partial(eager_adam, argument) for argument in ("lr", "ema_decay", "weight_decay")},
    "dropout": lambda: eager_dropout,
}


@pytest.fixture
def compilations():
    """The programs that were compiled, or read from the persistent cache, so far."""
    found = []

    def listen(event, seconds, **_):
        if "backend_compile" in event:
            found.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    jax.jit(lambda x: x + 1)(1.0)
    assert found
    yield found
    jax.monitoring.unregister_event_duration_listener(listen)


@pytest.mark.sampled
@pytest.mark.skipif(not STATM.exists(), reason="the system does not tell how much memory a process has")
@pytest.mark.parametrize("name", EAGER)
def test_new_numbers_neither_compile_nor_take_memory(name, compilations):
    call = EAGER[name]()

    def grown_bytes(values):
        """A call, of the memory that the process has."""
        before = int(STATM.read_text().split()[1])
        for value in values:
            jax.block_until_ready(call(float(value)))
        return (int(STATM.read_text().split()[1]) - before) * 4096 / len(values)

    grown_bytes(np.linspace(0.2, 0.3, 3))
    compilations.clear()
    # What leaks does so every time; what is allocated once does not.
    assert min(grown_bytes(np.linspace(start, start + 0.1, 10)) for start in (0.31, 0.42, 0.53)) < 100_000
    assert compilations == []
