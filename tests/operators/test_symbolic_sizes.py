"""Sizes that are known when an artifact is called: operators export with them for all platforms.

Operators that are not in the table are tried on the first of their cases, with a batch of any size.
"""

import contract
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxops
import lowering
from jaxops import mcdnn

KEY = jax.random.key(3)
PLATFORMS = ("cpu", "cuda", "tpu")


def transformed(x):
    """A spatial transformer whose maps are pixels, in the documented calls."""
    desc = mcdnn.SpatialTransformerDescriptor(x.shape)
    grid = mcdnn.spatial_tf_grid_generator_forward(desc, x[:, :2, :3, 0])
    return mcdnn.spatial_tf_sampler_forward(desc, x, grid)


def spread(dy):
    """The gradient of an average whose images are given by their shape alone."""
    desc = mcdnn.PoolingDescriptor("AVERAGE_COUNT_INCLUDE_PADDING", 2, 0, 2)
    return mcdnn.pooling_backward(desc, None, dy, None, x_shape=(dy.shape[0], 3, 8, 10))


# symbolic shape, what is known of it, shapes that fit it
IMAGES = ("n, 3, h, w", ("h >= 4", "w >= 4"), [(2, 3, 6, 7), (4, 3, 4, 9)])
CHANNELS = ("n, c, 4, w", (), [(2, 3, 4, 5), (1, 1, 4, 3), (1, 9, 4, 3)])
COLUMNS = ("n, 3, 4, w", (), [(2, 3, 4, 5), (1, 3, 4, 1)])
BATCH = ("n, 3, 4, 5", (), [(2, 3, 4, 5), (1, 3, 4, 5)])
SQUARES = [(2, 3, 4, 4), (1, 3, 1, 1)]
CASES = {
    "softmax": (lambda x: jaxops.softmax(x, axis=(1, 2, 3)), IMAGES),
    "log-softmax": (lambda x: jaxops.softmax(x, algorithm="log"), IMAGES),
    "dropout": (lambda x: jaxops.dropout(KEY, x, 0.4), IMAGES),
    "batch-norm": (lambda x: jaxops.batch_norm(x, jnp.ones(3), jnp.zeros(3), layout="NCHW")[0], IMAGES),
    "running-statistics": (
        lambda x: jaxops.batch_norm(x, *[jnp.ones(3)] * 4, layout="NCHW").running_var,
        ("n, 3, h, h", (), SQUARES),
    ),
    "max-pool": (lambda x: jaxops.max_pool(x, 2, layout="NCHW"), IMAGES),
    "max-pool-overlapping": (lambda x: jaxops.max_pool(x, 3, stride=2, padding=1, layout="NCHW"), IMAGES),
    "max-pool-far": (lambda x: jaxops.max_pool(x, 2, stride=3, layout="NCHW"), IMAGES),
    "avg-pool": (lambda x: jaxops.avg_pool(x, 3, stride=2, padding=1, count_include_pad=False, layout="NCHW"), IMAGES),
    "local-response-norm": (lambda x: jaxops.local_response_norm(x, n=4, alpha=2.0, layout="NCHW"), CHANNELS),
    "divisive-norm": (lambda x: jaxops.divisive_norm(x, n=5, alpha=2.0, layout="NCHW"), ("n, 3, h, h", (), SQUARES)),
    "divisive-norm-means": (
        lambda x: jaxops.divisive_norm(x, jnp.roll(x, 1, -1), n=5, alpha=2.0, layout="NCHW"),
        IMAGES,
    ),
    "grid-sample": (lambda x: jaxops.grid_sample(x, jnp.zeros((x.shape[0], 2, 3, 2))), IMAGES),
    "grid-sample-reflection": (
        lambda x: jaxops.grid_sample(
            x, jnp.full((x.shape[0], 2, 3, 2), 2.3), padding_mode="reflection", align_corners=False
        ),
        IMAGES,
    ),
    "affine-grid-edges": (
        lambda x: jaxops.affine_grid(x[:, :2, :3, 0], (x.shape[0], 3, 4, x.shape[3]), align_corners=False),
        COLUMNS,
    ),
    "affine-grid": (lambda x: jaxops.affine_grid(x[:, :2, :3, 0], (x.shape[0], 3, 4, x.shape[3])), COLUMNS),
    "spatial-transformer": (transformed, COLUMNS),
    "pooling-backward": (spread, BATCH),
    "activation": (lambda x: jaxops.activation(x, "swish"), IMAGES),
}


OTHERS = contract.representatives(covered={name.replace("-", "_") for name in CASES})


def assert_artifact_agrees(value_and_gradient, types, calls):
    artifact = lowering.export(value_and_gradient, *types, platforms=PLATFORMS)
    for operands in calls:
        expected = jax.tree.leaves(value_and_gradient(*operands))
        for actual, right in zip(jax.tree.leaves(artifact.call(*operands)), expected, strict=True):
            np.testing.assert_allclose(actual, right, rtol=2e-5, atol=2e-5)


@pytest.mark.sampled
@pytest.mark.parametrize(("fn", "sizes"), CASES.values(), ids=CASES)
def test_operators_export_with_symbolic_sizes(fn, sizes, rng):
    text, constraints, shapes = sizes
    symbolic = jax.ShapeDtypeStruct(jax.export.symbolic_shape(text, constraints=constraints), jnp.float32)

    def value_and_gradient(x):
        y, pull_back = jax.vjp(fn, x)
        return y, *pull_back(jnp.cos(y))

    calls = [(jnp.asarray(rng.normal(size=shape), jnp.float32),) for shape in shapes]
    assert_artifact_agrees(value_and_gradient, [symbolic], calls)


@pytest.mark.sampled
@pytest.mark.parametrize("case", OTHERS.values(), ids=OTHERS)
def test_other_operators_export_with_a_batch_of_any_size(case):
    def value_and_gradient(*operands):
        fn, primals = case.trial.at_differentiable(operands)
        y, pull_back = jax.vjp(fn, *primals)
        return y, pull_back([jnp.cos(x) for x in y])

    whole, (batch,) = case.trial.arrays, jax.export.symbolic_shape("n")
    types = [
        jax.ShapeDtypeStruct(x.shape if axis is None else (batch, *x.shape[1:]), x.dtype)
        for x, axis in zip(whole, case.batched, strict=True)
    ]
    half = [x if axis is None else x[: len(x) // 2] for x, axis in zip(whole, case.batched, strict=True)]
    assert_artifact_agrees(value_and_gradient, types, [whole, half])


@pytest.mark.slow
@pytest.mark.parametrize("rate", [0.0, 0.5, 1.0])
def test_dropout_of_symbolic_sizes_keeps_the_same_elements(rate):
    (n,) = jax.export.symbolic_shape("n")

    def forward(x):
        return mcdnn.dropout_forward(mcdnn.DropoutDescriptor(rate), KEY, x)

    artifact = lowering.export(forward, jax.ShapeDtypeStruct((n,), jnp.float32), platforms=["cpu"])
    for size in (1, 31, 32, 33, 64, 96):
        for actual, expected in zip(artifact.call(jnp.ones(size)), forward(jnp.ones(size)), strict=True):
            np.testing.assert_array_equal(actual, expected)


def test_kernels_refuse_symbolic_sizes_in_one_sentence():
    symbolic = jax.ShapeDtypeStruct(jax.export.symbolic_shape("n, 128"), jnp.float32)
    table = str(lowering.explain(jaxops.softmax, symbolic, target="cuda-h100"))
    assert "a kernel's blocks need sizes that are numbers" in " ".join(table.replace("│", " ").split())
    with lowering.use("pallas"), pytest.raises(lowering.NotSupportedError, match="sizes that are numbers"):
        lowering.export(jaxops.softmax, symbolic, platforms=["cuda"])


@pytest.mark.parametrize("pool", [jaxops.max_pool, jaxops.avg_pool])
def test_pooling_asks_for_a_constraint_in_one_sentence(pool):
    shape = jax.export.symbolic_shape("1, 1, n, 16")
    with pytest.raises(
        jaxops.BadParamError, match=r"; give symbolic_shape a constraint, such as 'n >= 3'; got \(3, 3\)"
    ):
        jax.eval_shape(lambda x: pool(x, 3, layout="NCHW"), jax.ShapeDtypeStruct(shape, jnp.float32))
    shape = jax.export.symbolic_shape("1, 1, n, 16", constraints=["n >= 3"])
    assert jax.eval_shape(lambda x: pool(x, 3, layout="NCHW"), jax.ShapeDtypeStruct(shape, jnp.float32)).shape[3] == 5
