"""Operators as "auto" runs them on a TPU where evidence takes kernels, executed as they are compiled."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxops
import lowering

pytestmark = pytest.mark.tpu_compile

TARGET = "tpu-v5e"


def normal(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def run(fn, *args, kernels):
    """Returns the results on the chip, of which these kernels have parts."""
    emulation = lowering.emulate(fn, *map(jnp.asarray, args), target=TARGET)
    assert {kernel.name.partition(".")[0] for kernel in emulation.kernels} == kernels
    assert emulation.findings == ()
    return [np.asarray(result).astype(np.float64) for result in jax.tree.leaves(emulation.results)]


def value_and_pull_back(fn, x, grad):
    y, pull_back = jax.vjp(fn, x)
    return y, *pull_back(grad)


def test_softmax_of_a_batch_takes_its_kernels():
    x, grad = normal(0, 4, 128, 1024), normal(1, 4, 128, 1024)
    step = jax.vmap(functools.partial(value_and_pull_back, jaxops.softmax))
    y, dx = run(step, x, grad, kernels={"softmax", "softmax_backward"})
    truth = np.exp(x.astype(np.float64))
    truth /= truth.sum(-1, keepdims=True)
    np.testing.assert_allclose(y, truth, rtol=1e-5, atol=1e-9)
    np.testing.assert_allclose(dx, truth * (grad - (truth * grad).sum(-1, keepdims=True)), rtol=1e-4, atol=1e-7)


def test_batch_norm_takes_its_kernels():
    x, grad, scale = normal(0, 32, 28, 28, 64), normal(1, 32, 28, 28, 64), 1 + normal(2, 64) / 4

    def step(x, grad, scale):
        return value_and_pull_back(lambda x: jaxops.batch_norm(x, scale, scale, layout="NHWC")[0], x, grad)

    y, dx = run(step, x, grad, scale, kernels={"batch_norm", "batch_norm_backward"})
    wide, axes = x.astype(np.float64), (0, 1, 2)
    deviation = np.sqrt(wide.var(axes) + 1e-5)
    normalized = (wide - wide.mean(axes)) / deviation
    np.testing.assert_allclose(y, normalized * scale + scale, rtol=1e-5, atol=1e-5)
    rest = grad.mean(axes, dtype=np.float64) + normalized * (grad * normalized).mean(axes)
    np.testing.assert_allclose(dx, (grad - rest) * scale / deviation, rtol=1e-4, atol=1e-5)


def test_embedding_takes_its_kernel():
    ids, grad = np.random.default_rng(0).integers(0, 8192, 8192), normal(1, 8192, 512)

    def step(ids, grad):
        table = jnp.zeros((8192, 512))
        return jax.vjp(lambda table: jaxops.embedding(table, ids), table)[1](grad)

    (dtable,) = run(step, ids, grad, kernels={"embedding_dense_backward"})
    truth = np.zeros((8192, 512))
    np.add.at(truth, ids, grad)
    np.testing.assert_allclose(dtable, truth, rtol=1e-6, atol=1e-6)


def test_dropout_takes_its_kernel_and_draws_the_mask_that_the_reference_draws():
    x, key = normal(0, 256, 4096), jax.random.key(0)
    (y,) = run(lambda x: jaxops.dropout(key, x, 0.1), x, kernels={"dropout"})
    with jaxops.use("reference"):
        mask = np.asarray(jaxops.dropout(key, jnp.ones_like(x), 0.1)) != 0
    assert 0.89 < mask.mean() < 0.91
    np.testing.assert_allclose(y, np.where(mask, x.astype(np.float64) / 0.9, 0), rtol=1e-6)


def test_divisive_norm_takes_its_kernels():
    x, means, grad = (normal(seed, 128, 7, 7, 64) for seed in range(3))
    attributes = {"n": 5, "alpha": 1.5, "beta": 0.75, "k": 0.5}

    def step(x, means, grad):
        y, pull_back = jax.vjp(lambda *xs: jaxops.divisive_norm(*xs, **attributes, layout="NHWC"), x, means)
        return y, *pull_back(grad)

    y, dx, dmeans = run(step, x, means, grad, kernels={"divisive_norm", "divisive_norm_backward"})
    wide = np.pad(x.astype(np.float64), ((0, 0), (2, 2), (2, 2), (0, 0)), constant_values=np.nan)
    apart = [wide[:, i : i + 7, j : j + 7] - means for i in range(5) for j in range(5)]
    s = attributes["k"] + attributes["alpha"] / 25 * np.nansum(np.square(apart), axis=0)
    np.testing.assert_allclose(y, x * s**-0.75, rtol=1e-5, atol=1e-6)
    u = -0.75 * attributes["alpha"] / 25 * grad * x * s**-1.75
    np.testing.assert_allclose(dmeans, -2 * u * np.nansum(apart, axis=0), rtol=1e-4, atol=1e-5)
    # The windows that hold a pixel lie around it likewise.
    of_u, of_both = (np.pad(each, ((0, 0), (2, 2), (2, 2), (0, 0))) for each in (u, u * means))
    places = [(slice(None), slice(i, i + 7), slice(j, j + 7)) for i in range(5) for j in range(5)]
    truth = grad * s**-0.75 + 2 * sum(x * of_u[place] - of_both[place] for place in places)
    np.testing.assert_allclose(dx, truth, rtol=1e-4, atol=1e-5)
