"""The mcDNN calls of batch normalization and normalization: values against NumPy float64, blends, reserves, sizes."""

import functools

import batch_norm_oracle as oracle
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxops import NotSupportedError, VersionMismatchError, mcdnn

LAYOUTS = {"NCHW": (0, 1, 2, 3), "NHWC": (0, 2, 3, 1), "NCDHW": (0, 1, 2, 3, 4), "NDHWC": (0, 2, 3, 4, 1)}
MODES = {"PER_ACTIVATION": "per_activation", "SPATIAL": "spatial", "SPATIAL_PERSISTENT": "spatial"}
NORM_MODES = {"PER_ACTIVATION": "PER_ACTIVATION", "SPATIAL": "PER_CHANNEL", "SPATIAL_PERSISTENT": "PER_CHANNEL"}
RELU = mcdnn.ActivationDescriptor("RELU")
FACTOR = {"exponential_average_factor": 0.25}


def draw(rng, layout="NCHW", mode="SPATIAL", dtype="float32", shape=(3, 2, 2, 3, 3)):
    """x, scale, bias, z and dy with the channels on axis 1; parameters have the documented shape."""
    shape = shape if len(layout) == 5 else (*shape[:2], *shape[3:])
    extents = shape[2:] if mode == "PER_ACTIVATION" else (1,) * len(shape[2:])
    x, z, dy = (np.asarray(jnp.asarray(rng.normal(0.5, 2, shape), dtype)) for _ in range(3))
    wide = np.float64 if dtype == "float64" else np.float32
    scale, bias = (rng.normal(size=(1, shape[1], *extents)).astype(wide) for _ in range(2))
    return x, scale, bias, z, dy


def truths(x, scale, bias, z, dy, mode, activation=("identity", 0.0), epsilon=1e-5):
    """Forward and backward results of the oracle, parameters in the documented shape."""
    attributes = {"mode": MODES[mode], "activation": activation, "epsilon": epsilon}
    flat = scale[0] if mode == "PER_ACTIVATION" else scale.reshape(-1)
    offsets = bias.reshape(flat.shape)
    y, *statistics = oracle.training(x, flat, offsets, z, **attributes)
    dx, dscale, dbias, dz = oracle.backward(dy, x, flat, offsets, z, **attributes)
    shaped = [values.reshape(scale.shape) for values in (*statistics, dscale, dbias)]
    return (y, *shaped[:4]), (dx, dz, *shaped[4:])


def assert_close(actual, truth, dtype="float32"):
    assert actual.dtype == jnp.dtype(dtype)
    tolerance = {"float32": 1e-5, "float64": 1e-12}.get(dtype, 0.51 * float(jnp.finfo(dtype).eps))
    np.testing.assert_allclose(np.asarray(actual).astype(np.float64), truth, rtol=tolerance, atol=tolerance)


def ramp(*shape):
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape)


@pytest.mark.long
def test_figures_that_migrated_cudnn_programs_check():
    """Batch-norm figures of oneapi-src/SYCLomatic-test (dnnl_utils_batch_normalization_2): blends and averages."""
    x, y = ramp(2, 4, 5, 5) + 4, np.ones((2, 4, 5, 5), np.float32)
    blend = {"epsilon": 1.0, "alpha": 2.5, "beta": 1.5, "y": y}
    p = ramp(1, 4, 1, 1)
    out = mcdnn.batch_normalization_forward_training(
        "SPATIAL", x, p, p, exponential_average_factor=0.1, running_mean=p, running_variance=p, **blend
    )
    np.testing.assert_allclose(np.ravel(out.running_mean), [6.6, 10, 13.4, 16.8], rtol=1e-6)
    np.testing.assert_allclose(np.ravel(out.running_variance), [260.408, 261.308, 262.208, 263.108], rtol=2e-6)
    np.testing.assert_allclose(out.y[0, :, 0, 0], [1.5, 0.932347, 0.364693, -0.202961], rtol=5e-6)
    np.testing.assert_allclose(out.y[1, :, 4, 4], [1.5, 7.06765, 12.6353, 18.203], rtol=5e-6)
    p = ramp(1, 4, 5, 5)
    ops = "PER_ACTIVATION", "OPS_BN_ACTIVATION"
    out = mcdnn.batch_normalization_forward_training_ex(
        *ops, x, p, p, activation=RELU, exponential_average_factor=0.5, running_mean=p, running_variance=p, **blend
    )
    np.testing.assert_allclose(out.running_mean, 27 + p)
    np.testing.assert_allclose(out.running_variance, 2500 + p / 2, rtol=1e-6)
    # 99 (1 - 0.9998): what float32 rounds of a hundred is more than the figures' last digit.
    np.testing.assert_allclose(np.ravel(out.y[0])[[0, 1, 99]], [1.5, 1.5005, 1.54949], atol=3e-5)
    np.testing.assert_allclose(np.ravel(out.y[1])[[0, 1, 99]], [1.5, 6.4995, 496.451], rtol=5e-6)


@pytest.mark.sampled
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_batch_normalization_equals_float64_in_every_mode_and_layout(layout, mode, rng):
    x, scale, bias, _, dy = draw(rng, layout, mode)
    forward, backward = truths(x, scale, bias, None, dy, mode)
    x, dy, y, dx = (a.transpose(LAYOUTS[layout]) for a in (x, dy, forward[0], backward[0]))
    running = {"running_mean": np.full_like(scale, 0.5), "running_variance": np.full_like(scale, 2)}
    out = mcdnn.batch_normalization_forward_training(mode, x, scale, bias, **FACTOR, **running, layout=layout)
    assert_close(out.y, y)
    for actual, true in zip(
        out[1:],
        (0.375 + 0.25 * forward[1], 1.5 + 0.25 * forward[3], forward[1], forward[4]),
        strict=True,
    ):
        assert_close(actual, true)
    saved = {"saved_mean": out.saved_mean, "saved_inv_variance": out.saved_inv_variance}
    for statistics in (saved, {}):
        result = mcdnn.batch_normalization_backward(mode, x, dy, scale, **statistics, layout=layout)
        for actual, true in zip(result, (dx, *backward[2:]), strict=True):
            assert_close(actual, true)
    estimated = (out.running_mean, out.running_variance)
    inferred = mcdnn.batch_normalization_forward_inference(mode, x, scale, bias, *estimated, layout=layout)
    factor = np.asarray(scale / np.sqrt(np.float64(out.running_variance) + 1e-5))
    truth = factor * (x.transpose(np.argsort(LAYOUTS[layout])) - np.float64(out.running_mean)) + bias
    assert_close(inferred, truth.transpose(LAYOUTS[layout]))


@pytest.mark.sampled
@pytest.mark.parametrize("ops", ["OPS_BN", "OPS_BN_ACTIVATION", "OPS_BN_ADD_ACTIVATION"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_extended_calls_equal_float64_and_their_twins(dtype, ops, rng):
    with jax.enable_x64(dtype == "float64"):
        operands = draw(rng, "NHWC", dtype=dtype)
        parameters = "float64" if dtype == "float64" else "float32"
        fused = ("identity" if ops == "OPS_BN" else "relu", 0.0)
        x, scale, bias, z, dy = operands
        forward, backward = truths(x, scale, bias, z if "ADD" in ops else None, dy, "SPATIAL", fused)
        x, z, dy, y, dx, dz = (a.transpose(LAYOUTS["NHWC"]) for a in (x, z, dy, forward[0], *backward[:2]))
        attributes = {"z": z, "activation": RELU, "layout": "NHWC"}
        out = mcdnn.batch_normalization_forward_training_ex("SPATIAL", ops, x, scale, bias, **attributes, **FACTOR)
        assert_close(out.y, y, dtype)
        assert_close(out.saved_inv_variance, forward[4], parameters)
        assert out.running_mean is None
        needed = mcdnn.get_batch_normalization_training_ex_reserve_space_size("SPATIAL", ops, RELU, x)
        assert out.reserve_space.shape == (needed,)
        assert needed == (0 if ops == "OPS_BN" else -(-x.size // 32) * 4)
        attributes = {
            **{"y": out.y, "bias": bias, "activation": RELU, "reserve_space": out.reserve_space, "layout": "NHWC"},
            **{"saved_mean": out.saved_mean, "saved_inv_variance": out.saved_inv_variance},
        }
        result = mcdnn.batch_normalization_backward_ex("SPATIAL", ops, x, dy, scale, **attributes)
        assert_close(result[0], dx, dtype)
        assert (result[1] is None) == ("ADD" not in ops)
        if result[1] is not None:
            assert_close(result[1], dz, dtype)
        for actual, true in zip(result[2:], backward[2:], strict=True):
            assert_close(actual, true, parameters)
        norm = "PER_CHANNEL", ops.replace("OPS_BN", "NORM"), "PERSIST"
        twin = mcdnn.normalization_forward_training(
            *norm, x, scale, bias, z=z, activation=RELU, layout="NHWC", **FACTOR
        )
        jax.tree.map(np.testing.assert_array_equal, twin, out)
        twin = mcdnn.normalization_backward(*norm, x, dy, scale, **attributes)
        jax.tree.map(np.testing.assert_array_equal, twin, result)


@pytest.mark.long
def test_outputs_are_blended_before_they_are_rounded(rng):
    x, scale, bias, z, dy = draw(rng, dtype="float16")
    forward, backward = truths(x, scale, bias, z, dy, "SPATIAL", ("relu", 0.0))
    y, dx = (rng.normal(size=x.shape).astype(np.float16) for _ in range(2))
    dscale, dbias = (rng.normal(size=scale.shape).astype(np.float32) for _ in range(2))
    ops = "SPATIAL", "OPS_BN_ADD_ACTIVATION"
    out = mcdnn.batch_normalization_forward_training_ex(
        *ops, x, scale, bias, z=z, activation=RELU, alpha=-2.0, beta=0.5, y=y, **FACTOR
    )
    assert_close(out.y, -2 * forward[0] + 0.5 * y, "float16")
    factors = {"alpha_data_diff": 3.0, "beta_data_diff": -1.0, "alpha_param_diff": 0.5, "beta_param_diff": 2.0}
    result = mcdnn.batch_normalization_backward_ex(
        *ops,
        x,
        dy,
        scale,
        activation=RELU,
        reserve_space=out.reserve_space,
        **factors,
        dx=dx,
        dscale=dscale,
        dbias=dbias,
    )
    assert_close(result[0], 3 * backward[0] - dx, "float16")
    assert_close(result[1], backward[1], "float16")
    assert_close(result[2], 0.5 * backward[2] + 2 * dscale)
    assert_close(result[3], 0.5 * backward[3] + 2 * dbias)


def test_priors_are_not_read_where_beta_is_zero(rng):
    x, scale, bias, _, dy = draw(rng)
    nan, nans = np.full_like(x, np.nan), np.full_like(scale, np.nan)
    out = mcdnn.batch_normalization_forward_training("SPATIAL", x, scale, bias, alpha=2.0, y=nan, **FACTOR)
    assert np.all(np.isfinite(out.y))
    for result in mcdnn.batch_normalization_backward("SPATIAL", x, dy, scale, dx=nan, dscale=nans, dbias=nans):
        assert np.all(np.isfinite(result))
    out = mcdnn.batch_normalization_forward_training(
        "SPATIAL", x, scale, bias, exponential_average_factor=1, running_mean=nans, running_variance=nans
    )
    assert np.all(np.isfinite(out.running_variance))


def test_reserve_space_holds_a_bit_for_each_element_and_is_what_backward_reads(rng):
    x, scale, bias, z, dy = draw(rng)
    ops = "SPATIAL", "OPS_BN_ADD_ACTIVATION"
    out = mcdnn.batch_normalization_forward_training_ex(*ops, x, scale, bias, z=z, activation=RELU, **FACTOR)
    bits = np.unpackbits(np.asarray(out.reserve_space), bitorder="little")
    np.testing.assert_array_equal(bits[: x.size], (np.asarray(out.y) > 0).ravel())
    assert not bits[x.size :].any()
    backward = functools.partial(mcdnn.batch_normalization_backward_ex, *ops, x, dy, scale, activation=RELU)
    from_reserve, from_y = backward(reserve_space=out.reserve_space), backward(y=out.y)
    jax.tree.map(np.testing.assert_array_equal, from_reserve, from_y)
    all_pass = backward(reserve_space=np.full(out.reserve_space.size + 8, 255, np.uint8), y=out.y)
    np.testing.assert_array_equal(all_pass[1], dy)


@pytest.mark.long
@pytest.mark.parametrize("shape", [(4, 3, 5, 5), (8, 2, 4, 4)])
def test_reserve_space_is_the_same_on_an_explicit_mesh(shape, rng):
    """The 300 bits of the first do not make whole bytes on each of four devices."""
    x, scale, bias, *_ = draw(rng, shape=(*shape[:2], 1, *shape[2:]))

    def forward(x):
        ops = "SPATIAL", "OPS_BN_ACTIVATION"
        return mcdnn.batch_normalization_forward_training_ex(*ops, x, scale, bias, activation=RELU, **FACTOR)

    with jax.set_mesh(jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,))):
        split = jax.device_put(x, jax.sharding.PartitionSpec("data"))
        out = forward(split)
    bits = np.unpackbits(np.asarray(out.reserve_space), bitorder="little")
    centred = x.astype(np.float64) - x.astype(np.float64).mean((0, 2, 3), keepdims=True)
    of_std = centred / np.sqrt((centred**2).mean((0, 2, 3), keepdims=True) + 1e-5)
    np.testing.assert_array_equal(bits[: x.size], (of_std * scale + bias > 0).ravel())


def test_reserve_space_survives_jit_checkpoint_and_export(rng):
    x, scale, bias, z, dy = draw(rng)

    def step(x, scale, bias, z, dy):
        ops = "SPATIAL", "OPS_BN_ADD_ACTIVATION"
        out = mcdnn.batch_normalization_forward_training_ex(*ops, x, scale, bias, z=z, activation=RELU, **FACTOR)
        return mcdnn.batch_normalization_backward_ex(
            *ops, x, dy, scale, activation=RELU, reserve_space=out.reserve_space
        )

    expected = step(x, scale, bias, z, dy)
    for wrapped in (jax.jit(step), jax.jit(jax.checkpoint(step))):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), wrapped(x, scale, bias, z, dy), expected)
    exported = jax.export.export(jax.jit(step), platforms=["cpu", "cuda", "tpu"])(x, scale, bias, z, dy)
    assert exported.call(x, scale, bias, z, dy)[0].shape == x.shape


@pytest.mark.sampled
@pytest.mark.parametrize("mode", ["SIGMOID", "TANH", "CLIPPED_RELU", "ELU", "IDENTITY", "SWISH"])
@pytest.mark.parametrize("ops", ["OPS_BN_ACTIVATION", "OPS_BN_ADD_ACTIVATION"])
def test_every_activation_is_fused(ops, mode, rng):
    descriptor = mcdnn.ActivationDescriptor(mode, coef=0.8, swish_beta=1.25)
    x, scale, bias, z, dy = draw(rng)
    activation = (mode.lower(), 1.25 if mode == "SWISH" else 0.8)
    forward, backward = truths(x, scale, bias, z if "ADD" in ops else None, dy, "SPATIAL", activation)
    attributes = {"activation": descriptor}
    out = mcdnn.batch_normalization_forward_training_ex("SPATIAL", ops, x, scale, bias, z=z, **attributes, **FACTOR)
    assert_close(out.y, forward[0])
    attributes |= {"y": out.y, "bias": bias, "reserve_space": out.reserve_space}
    if mode == "SWISH":  # has no fused gradient on hardware either
        with pytest.raises(NotSupportedError):
            mcdnn.batch_normalization_backward_ex("SPATIAL", ops, x, dy, scale, **attributes)
    else:
        result = mcdnn.batch_normalization_backward_ex("SPATIAL", ops, x, dy, scale, **attributes)
        for actual, true in zip(
            jax.tree.leaves(result), backward if "ADD" in ops else backward[:1] + backward[2:], strict=True
        ):
            assert_close(actual, true)


@pytest.mark.parametrize(("propagation", "value"), [("NOT_PROPAGATE_NAN", 0), ("PROPAGATE_NAN", np.nan)])
def test_relu_passes_nan_on_or_not(propagation, value):
    x, ones = np.full((1, 1, 1, 2), np.nan, np.float32), np.ones((1, 1, 1, 1), np.float32)
    descriptor = mcdnn.ActivationDescriptor("RELU", propagation)
    norm = "PER_CHANNEL", "NORM_ACTIVATION", "STANDARD"
    y = mcdnn.normalization_forward_inference(*norm, x, ones, ones, ones, ones, activation=descriptor)
    np.testing.assert_array_equal(y, np.full_like(x, value))


def test_running_variance_is_unbiased_and_averages_cumulatively(rng):
    batches = rng.normal(size=(3, 2, 2, 2, 2)).astype(np.float32)
    ones = np.ones((1, 2, 1, 1), np.float32)
    mean = variance = 0 * ones
    for call, x in enumerate(batches):
        out = mcdnn.batch_normalization_forward_training(
            "SPATIAL",
            *(x, ones, ones),
            exponential_average_factor=1 / (1 + call),
            running_mean=mean,
            running_variance=variance,
        )
        mean, variance = out.running_mean, out.running_variance
    truth = batches.astype(np.float64).var(axis=(1, 3, 4), ddof=1).mean(axis=0)
    np.testing.assert_allclose(np.ravel(variance), truth, rtol=1e-5)


def test_calls_are_differentiable_as_the_documented_backward(rng):
    x, scale, bias, z, dy = draw(rng)

    def y(x, z, scale, bias):
        ops = "SPATIAL", "OPS_BN_ADD_ACTIVATION"
        return mcdnn.batch_normalization_forward_training_ex(
            *ops, x, scale, bias, z=z, activation=RELU, alpha=2.0, **FACTOR
        ).y

    _, backward = truths(x, scale, bias, z, dy, "SPATIAL", ("relu", 0.0))
    for actual, true in zip(jax.vjp(y, x, z, scale, bias)[1](jnp.asarray(dy)), backward, strict=True):
        assert_close(actual, 2 * true)


def test_version_check_compares_the_constants(monkeypatch):
    mcdnn.ops_train_version_check()
    monkeypatch.setattr(mcdnn, "OPS_TRAIN_VERSION", mcdnn.OPS_INFER_VERSION + 1)
    with pytest.raises(VersionMismatchError) as refusal:
        mcdnn.ops_train_version_check()
    assert refusal.value.status == "MCDNN_STATUS_VERSION_MISMATCH"


def test_sizes_take_shapes_and_say_no_workspace():
    x, p = jax.ShapeDtypeStruct((2, 3, 5, 7), jnp.float16), jax.ShapeDtypeStruct((1, 3, 1, 1), jnp.float32)
    bn, norm = ("SPATIAL", "OPS_BN_ADD_ACTIVATION"), ("PER_CHANNEL", "NORM_ADD_ACTIVATION", "STANDARD")
    assert mcdnn.get_batch_normalization_forward_training_ex_workspace_size(*bn, x, x, x, p, RELU) == 0
    assert mcdnn.get_batch_normalization_backward_ex_workspace_size(*bn, x, x, x, x, x, p, RELU) == 0
    assert mcdnn.get_normalization_forward_training_workspace_size(*norm, x, x, x, p, RELU, p) == 0
    assert mcdnn.get_normalization_backward_workspace_size(*norm, x, None, x, None, x, p, RELU, p) == 0
    for elements, bytes_ in ((210, 28), (1000, 128), (7, 4)):
        image = jax.ShapeDtypeStruct((elements, 1, 1, 1), jnp.float32)
        assert mcdnn.get_batch_normalization_training_ex_reserve_space_size(*bn, RELU, image) == bytes_
        assert mcdnn.get_normalization_training_reserve_space_size(*norm, RELU, image) == bytes_
    assert mcdnn.get_normalization_training_reserve_space_size("PER_CHANNEL", "NORM", "STANDARD", None, x) == 0
