"""Explicit meshes: arrays may be split along any axis, also where operators see them in another shape."""

import functools

import batch_norm_oracle
import contract
import jax
import jax.numpy as jnp
import linear_cross_entropy_oracle
import numpy as np
import pytest
import softmax_oracle
import splits
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxops import aclnn, batch_norm, batch_norm_inference, linear_cross_entropy, mcdnn, nll_loss, softmax
from jaxops._primitive.sharding import reshaped
from jaxops.testing.meshes import gathered_sizes

MESH = {"b": 2, "a": 4}
TOLERANCE = {"rtol": 1e-4, "atol": 1e-4}


def drawn(rng, *shapes):
    return [rng.uniform(0.5, 2, size=shape).astype(np.float32) for shape in shapes]


def channels_first(x):
    return np.moveaxis(x, -1, 1)


def normalized(x, scale, bias, residual=None, **attributes):
    return batch_norm(x, scale, bias, residual=residual, **{"layout": "NCHW"} | attributes).y


def expected_inference(x, scale, bias, mean, variance):
    factor, offset, mean = (
        a.astype(np.float64).reshape(-1, *(1,) * (x.ndim - 2)) for a in (scale / np.sqrt(variance + 1e-5), bias, mean)
    )
    return (x - mean) * factor + offset


def expected_nll(log_probs, labels):
    return -np.mean(np.take_along_axis(log_probs.astype(np.float64), labels[None], 0))


IMAGE, VOLUME, CHANNELS = (4, 8, 4, 8), (4, 8, 4, 8, 2), (8,)
# Of each layout: the function, its meaning in NumPy, the shapes of its operands (labels as integers), and their splits.
LAYOUTS = {
    "batch-norm-nhwc-width": (
        functools.partial(normalized, layout="NHWC"),
        lambda x, *rest: np.moveaxis(batch_norm_oracle.training(channels_first(x), *rest)[0], 1, -1),
        [IMAGE, CHANNELS, CHANNELS],
        [P("b", None, "a"), P(), P()],
    ),
    "batch-norm-nchw-width": (
        normalized,
        lambda *operands: batch_norm_oracle.training(*operands)[0],
        [IMAGE, CHANNELS, CHANNELS],
        [P("b", None, None, "a"), P(), P()],
    ),
    "batch-norm-ncdhw-height": (
        functools.partial(normalized, layout="NCDHW"),
        lambda *operands: batch_norm_oracle.training(*operands)[0],
        [VOLUME, CHANNELS, CHANNELS],
        [P("b", None, None, "a"), P(), P()],
    ),
    "inference-nchw-width": (
        functools.partial(batch_norm_inference, layout="NCHW"),
        expected_inference,
        [IMAGE, *[CHANNELS] * 4],
        [P("b", None, None, "a"), *[P()] * 4],
    ),
    "inference-ncdhw-height": (
        functools.partial(batch_norm_inference, layout="NCDHW"),
        expected_inference,
        [VOLUME, *[CHANNELS] * 4],
        [P("b", None, None, "a"), *[P()] * 4],
    ),
    "per-activation-scale": (
        functools.partial(normalized, mode="per_activation"),
        lambda *operands: batch_norm_oracle.training(*operands, mode="per_activation")[0],
        [IMAGE, IMAGE[1:], IMAGE[1:]],
        [P("b"), P(None, "a"), P()],
    ),
    "residual-split-otherwise": (
        normalized,
        lambda *operands: batch_norm_oracle.training(*operands)[0],
        [IMAGE, CHANNELS, CHANNELS, IMAGE],
        [P("b"), P(), P("b"), P(None, "b", None, "a")],
    ),
    "nll-loss-last-axis": (
        functools.partial(nll_loss, axis=0),
        expected_nll,
        [IMAGE, IMAGE[1:]],
        [P(None, None, None, "a"), P()],
    ),
    "softmax-last-of-two": (
        functools.partial(softmax, axis=(1, 3)),
        functools.partial(softmax_oracle.forward, axes=(1, 3), log=False),
        [IMAGE],
        [P("b", None, None, "a")],
    ),
    # Three channels are not divisible by the devices over which what lies behind them is split: that is gathered.
    "softmax-last-of-two-gathered": (
        functools.partial(softmax, axis=(1, 2)),
        functools.partial(softmax_oracle.forward, axes=(1, 2), log=False),
        [(4, 3, 8)],
        [P("b", None, "a")],
    ),
    "softmax-instance-height": (
        functools.partial(mcdnn.softmax_forward, "LOG", "INSTANCE"),
        functools.partial(softmax_oracle.forward, axes=(1, 2, 3), log=True),
        [IMAGE],
        [P("b", None, "a")],
    ),
    "cross-entropy-labels-split-otherwise": (
        lambda x, labels, weight: linear_cross_entropy(x, weight, labels),
        lambda x, labels, weight: linear_cross_entropy_oracle.expected(x, weight, labels)[0],
        [IMAGE, IMAGE[:-1], (6, 8)],
        [P("b"), P(None, "b"), P()],
    ),
    "cross-entropy-one-feature": (
        lambda x, labels, weight: linear_cross_entropy(x, weight, labels),
        lambda x, labels, weight: linear_cross_entropy_oracle.expected(x, weight, labels)[0],
        [(4, 2, 1), (4, 2), (6, 1)],
        [P(), P("b"), P()],
    ),
}


@pytest.mark.sampled
@pytest.mark.parametrize("name", LAYOUTS)
def test_explicit_mesh_has_the_values_and_gradients_of_one_device(name, rng):
    fn, truth, shapes, specs = LAYOUTS[name]
    operands = drawn(rng, *shapes)
    if name.startswith(("nll", "cross")):
        operands[1] = rng.integers(0, 4, shapes[1]).astype(np.int32)
    mesh = jax.make_mesh(tuple(MESH.values()), tuple(MESH), axis_types=(AxisType.Explicit,) * 2)
    placed = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(operands, specs, strict=True)]
    floating = [position for position, x in enumerate(operands) if x.dtype == np.float32]
    gradient = jax.jit(jax.grad(lambda *operands: jnp.sum(jnp.sin(fn(*operands))), floating))
    with jax.set_mesh(mesh):
        result, grads = fn(*placed), gradient(*placed)
    np.testing.assert_allclose(np.asarray(result), truth(*operands), **TOLERANCE)
    for position, actual, expected in zip(floating, grads, gradient(*operands), strict=True):
        assert actual.sharding.is_equivalent_to(placed[position].sharding, actual.ndim)
        np.testing.assert_allclose(np.asarray(actual), np.asarray(expected), **TOLERANCE)


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
def test_batch_norm_of_split_rows_of_pixels_gathers_nothing(layout, rng):
    images, scale, bias = drawn(rng, (8, 8, 8, 8), 8, 8)
    mesh = jax.make_mesh(tuple(MESH.values()), tuple(MESH), axis_types=(AxisType.Explicit,) * 2)
    spec = P("b", None, None, "a") if layout == "NCHW" else P("b", None, "a")
    placed = jax.device_put(images, NamedSharding(mesh, spec))
    whole = (jax.device_put(a, NamedSharding(mesh, P())) for a in (scale, bias))
    step = jax.jit(jax.grad(lambda *operands: jnp.sum(jnp.sin(normalized(*operands, layout=layout))), (0, 1, 2)))
    compiled = step.lower(placed, *whole).compile().as_text()
    assert "all-to-all" in compiled
    assert not [size for size in gathered_sizes(compiled) if size > images.size // 8]


@pytest.mark.parametrize(
    ("shape", "spec", "new_shape", "expected"),
    [
        ((4, 8, 8), P("b", None, "a"), (4, 64), P("b", "a")),
        ((4, 8, 8), P(None, "b", "a"), (4, 64), P(None, ("b", "a"))),
        ((4, 2, 8), P(None, None, ("b", "a")), (4, 16), P(None, "b")),
        ((4, 3, 8), P("b", None, "a"), (4, 24), P("b", None)),
        ((8, 3), P("a", None), (2, 4, 3), P(None, None, None)),
        ((8, 3), P("a", None), (1, 4, 2, 3), P(None, "a", None, None)),
        ((1, 8, 1), P(None, "a", None), (8,), P("a")),
        ((8, 1), P("a", None), (1, 1, 8, 1, 1), P(None, None, "a", None, None)),
        ((4, 0, 2), P("b", None, None), (0,), P("b")),
        ((0, 8), P(None, "a"), (8, 0), P("a", None)),
        ((2, 3, 4), P("b", None, "a"), (6, 2, 2), P("b", None, None)),
    ],
    ids=str,
)
def test_reshaped_keeps_split_what_it_can(shape, spec, new_shape, expected):
    mesh = jax.make_mesh(tuple(MESH.values()), tuple(MESH), axis_types=(AxisType.Explicit,) * 2)
    x = np.arange(np.prod(shape)).reshape(shape)
    with jax.set_mesh(mesh):
        result = jax.jit(lambda x: reshaped(x, new_shape))(jax.device_put(x, NamedSharding(mesh, spec)))
    assert jax.typeof(result).sharding.spec == expected
    assert result.shape == new_shape
    if x.size:  # JAX 0.10 cannot fetch an array that is split and has no elements
        np.testing.assert_array_equal(np.asarray(result), x.reshape(new_shape))


IMAGES, ROW, WORDS = (4, 6, 2, 6), (1, 6, 1, 1), 36
PRIOR = {"alpha": 0.5, "beta": 2.0}
LRN = mcdnn.LRNDescriptor(n=3, alpha=0.5)
RELU = mcdnn.ActivationDescriptor("RELU")
TANH = mcdnn.ActivationDescriptor("TANH")
POOLS = {
    mode: mcdnn.PoolingDescriptor(mode, (2, 2), (0, 0), (2, 2)) for mode in ("MAX", "AVERAGE_COUNT_INCLUDE_PADDING")
}
TRANSFORM = mcdnn.SpatialTransformerDescriptor(IMAGES)
BACKWARD_PRIORS = {"alpha_data_diff": 0.5, "beta_data_diff": 2.0, "alpha_param_diff": 0.5, "beta_param_diff": 2.0}


def training(mode, layout=None):
    def call(x, scale, bias, running_mean, running_variance, y):
        return mcdnn.batch_normalization_forward_training(
            *(mode, x, scale, bias),
            **{"running_mean": running_mean, "running_variance": running_variance, "exponential_average_factor": 0.1},
            **{"y": y, "layout": layout, **PRIOR},
        )

    return call


def training_ex(x, scale, bias, z):
    return mcdnn.batch_normalization_forward_training_ex(
        "SPATIAL", "OPS_BN_ADD_ACTIVATION", x, scale, bias, z=z, activation=RELU, exponential_average_factor=1.0
    )


def batch_norm_gradients(x, dy, scale, dx, dscale, dbias):
    return mcdnn.batch_normalization_backward(
        "SPATIAL", x, dy, scale, dx=dx, dscale=dscale, dbias=dbias, **BACKWARD_PRIORS
    )


def batch_norm_gradients_ex(x, dy, scale, bias, y, saved_mean, saved_inv_variance):
    return mcdnn.batch_normalization_backward_ex(
        *("SPATIAL", "OPS_BN_ACTIVATION", x, dy, scale),
        **{"y": y, "bias": bias, "activation": TANH},
        **{"saved_mean": saved_mean, "saved_inv_variance": saved_inv_variance},
    )


def dropped(x):
    return mcdnn.dropout_forward(mcdnn.DropoutDescriptor(0.25), jax.random.key(0), x)


def dropout_gradient(dy, reserve_space):
    return mcdnn.dropout_backward(mcdnn.DropoutDescriptor(0.25), dy, reserve_space.astype(jnp.uint8))


def dropped_and_back(x, dy):
    y, reserve_space = dropped(x)
    return y, dropout_gradient(dy, reserve_space)


# The documented calls, as functions of arrays alone, and the shapes of these; integers are labels.
CALLS = {
    "training-spatial": (training("SPATIAL"), [IMAGES, *[ROW] * 4, IMAGES]),
    "training-per-activation": (
        training("PER_ACTIVATION", "NHWC"),
        [(4, 2, 6, 6), *[(1, 6, 2, 6)] * 4, (4, 2, 6, 6)],
    ),
    "training-ex": (training_ex, [IMAGES, ROW, ROW, IMAGES]),
    "inference": (
        functools.partial(mcdnn.batch_normalization_forward_inference, "SPATIAL", layout="NHWC"),
        [(4, 2, 6, 6), *[ROW] * 4],
    ),
    "batch-norm-gradients": (batch_norm_gradients, [IMAGES, IMAGES, ROW, IMAGES, ROW, ROW]),
    "batch-norm-gradients-ex": (batch_norm_gradients_ex, [IMAGES, IMAGES, ROW, ROW, IMAGES, ROW, ROW]),
    "softmax-channel": (
        lambda x, y: mcdnn.softmax_forward("ACCURATE", "CHANNEL", x, y=y, **PRIOR),
        [IMAGES, IMAGES],
    ),
    "softmax-gradient": (
        lambda y, dy, dx: mcdnn.softmax_backward("LOG", "INSTANCE", y, dy, dx=dx, **PRIOR),
        [IMAGES, IMAGES, IMAGES],
    ),
    "activation": (lambda x, y: mcdnn.activation_forward(TANH, x, y=y, **PRIOR), [IMAGES, IMAGES]),
    "activation-gradient": (
        lambda y, dy, x, dx: mcdnn.activation_backward(TANH, y, dy, x, dx=dx, **PRIOR),
        [IMAGES] * 4,
    ),
    "max-pool": (lambda x, y: mcdnn.pooling_forward(POOLS["MAX"], x, y=y, **PRIOR), [IMAGES, (4, 6, 1, 3)]),
    "max-pool-gradient": (
        lambda y, dy, x, dx: mcdnn.pooling_backward(POOLS["MAX"], y, dy, x, dx=dx, **PRIOR),
        [(4, 6, 1, 3), (4, 6, 1, 3), IMAGES, IMAGES],
    ),
    "average-pool-gradient": (
        lambda dy, x: mcdnn.pooling_backward(POOLS["AVERAGE_COUNT_INCLUDE_PADDING"], None, dy, x),
        [(4, 6, 1, 3), IMAGES],
    ),
    "lrn": (lambda x, y: mcdnn.lrn_cross_channel_forward(LRN, x, y=y, **PRIOR), [IMAGES, IMAGES]),
    "lrn-gradient": (
        lambda y, dy, x, dx: mcdnn.lrn_cross_channel_backward(LRN, y, dy, x, dx=dx, **PRIOR),
        [IMAGES] * 4,
    ),
    "divisive-norm": (
        lambda x, means, y: mcdnn.divisive_normalization_forward(LRN, x, means, y=y, **PRIOR),
        [IMAGES] * 3,
    ),
    "divisive-norm-gradients": (
        lambda x, means, dy, dx, dmeans: mcdnn.divisive_normalization_backward(
            LRN, x, means, dy, dx=dx, dmeans=dmeans, **PRIOR
        ),
        [IMAGES] * 5,
    ),
    "grid": (functools.partial(mcdnn.spatial_tf_grid_generator_forward, TRANSFORM), [(4, 2, 3)]),
    "grid-gradient": (functools.partial(mcdnn.spatial_tf_grid_generator_backward, TRANSFORM), [(4, 2, 6, 2)]),
    "sampler": (
        lambda x, grid, y: mcdnn.spatial_tf_sampler_forward(TRANSFORM, x, grid, y=y, **PRIOR),
        [IMAGES, (4, 2, 6, 2), IMAGES],
    ),
    "sampler-gradients": (
        lambda x, dy, grid, dx, dgrid: mcdnn.spatial_tf_sampler_backward(
            TRANSFORM, x, dy, grid, dx=dx, dgrid=dgrid, **PRIOR, alpha_dgrid=0.5, beta_dgrid=2.0
        ),
        [IMAGES, IMAGES, (4, 2, 6, 2), IMAGES, (4, 2, 6, 2)],
    ),
    "dropout": (dropped, [IMAGES]),
    "dropout-gradient": (dropout_gradient, [IMAGES, (WORDS,)]),
    "dropout-there-and-back": (dropped_and_back, [IMAGES[:3], IMAGES[:3]]),
    "nll-loss-2d": (
        lambda x, weight: aclnn.nll_loss2d(x, jnp.ones((4, 2, 6), jnp.int32), weight, reduction=0, ignore_index=-1),
        [IMAGES, (1, 6, 1, 1)],
    ),
}


@pytest.mark.sampled
@pytest.mark.parametrize("name", CALLS)
def test_explicit_mesh_takes_every_split_of_documented_calls(name, rng):
    fn, shapes = CALLS[name]
    splits.check(fn, drawn(rng, *shapes))


@pytest.mark.sampled
@pytest.mark.parametrize("name", CALLS)
def test_documented_calls_with_crossed_splits_equal_one_device(name, rng):
    fn, shapes = CALLS[name]
    operands = drawn(rng, *shapes)
    actual = splits.results(fn, operands, splits.crossed(operands), AxisType.Explicit)
    contract.assert_close(actual, fn(*operands))
