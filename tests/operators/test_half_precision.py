"""Gradients in float16 at cotangents and sizes where what is rounded on the way leaves float16's range.

A mean over 4096 elements of a cotangent of 2^-14 is below float16's least number, 2^-24; yet their sum is not. So each
operator has to sum, divide and blend in float32 and to round once. The truth is NumPy's in float64. Operators that are
not in the table are tried on the first of their cases; their truth is their own gradient in float64. Linear cross
entropy, which has to round before its matrix products, has a file of its own.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import batch_norm_oracle
import contract
import grid_sample_oracle
import jax
import jax.numpy as jnp
import local_response_norm_oracle
import numpy as np
import pytest
import softmax_oracle

import jaxops

LEAST = 2.0**-24


@dataclasses.dataclass(frozen=True)
class Row:
    """One operator: a function of float16 arrays, their shapes, and its gradients in float64 from them and dy."""

    fn: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...]
    truth: Callable[..., tuple[np.ndarray, ...]]
    sizes: tuple[float, ...] = (2.0**-14, 2.0**10)


def batch_norm(x, scale, bias):
    return jaxops.batch_norm(x, scale, bias, layout="NCHW").y


def summed_windows(dy, window):
    """The gradient of means over all windows of a stride of 1."""
    dx = np.zeros((*dy.shape[:2], dy.shape[2] + window - 1, dy.shape[3] + window - 1))
    for row, column in np.ndindex(window, window):
        dx[:, :, row : row + dy.shape[2], column : column + dy.shape[3]] += dy / window**2
    return dx


IDS = np.arange(6000) % 3 // 2  # 4000 times id 0, 2000 times id 1
LABELS = np.arange(4096) % 5
RESPONSE = {"n": 5, "alpha": 0.5, "beta": 0.75, "k": 2.0}
REFLECTED = {"padding_mode": "reflection", "align_corners": False}
KEY = jax.random.key(0)


def labelled(dy):
    return -np.eye(5)[LABELS] * dy


def averaged_rows(dy):
    return np.stack([dy[IDS == 0].mean(0), dy[IDS == 1].mean(0), np.zeros(3)])


ROWS = {
    "batch_norm": Row(
        batch_norm,
        ((16, 2, 16, 16), (2,), (2,)),
        lambda dy, *xs: batch_norm_oracle.backward(dy, *xs)[:3],
        (2.0**-14, 4.0),
    ),
    "softmax": Row(
        jaxops.softmax,
        ((4, 500),),
        lambda dy, x: (softmax_oracle.backward(softmax_oracle.forward(x, (-1,), False), dy, (-1,), False),),
    ),
    "softmax, log": Row(
        lambda x: jaxops.softmax(x, algorithm="log"),
        ((4, 4096),),
        lambda dy, x: (softmax_oracle.backward(softmax_oracle.forward(x, (-1,), True), dy, (-1,), True),),
    ),
    "avg_pool": Row(
        lambda x: jaxops.avg_pool(x, window=16, stride=1, layout="NCHW"),
        ((1, 2, 40, 40),),
        lambda dy, x: (summed_windows(dy, 16),),
    ),
    "embedding": Row(
        lambda table: jaxops.embedding(table, IDS, scale_grad_by_freq=True),
        ((3, 3),),
        lambda dy, table: (averaged_rows(dy),),
    ),
    "nll_loss": Row(
        lambda x: jaxops.nll_loss(x, LABELS, reduction="none"), ((4096, 5),), lambda dy, x: (labelled(dy[:, None]),)
    ),
    "nll_loss, mean": Row(
        lambda x: jaxops.nll_loss(x, LABELS), ((4096, 5),), lambda dy, x: (labelled(dy) / 4096,), (1, 2.0**15)
    ),
    "nll_loss, weight": Row(
        lambda weight: jaxops.nll_loss(jnp.full((4096, 5), -0.5), LABELS, weight, reduction="sum"),
        ((5,),),
        lambda dy, weight: (dy * 0.5 * np.bincount(LABELS),),
        (2.0**-14, 2.0**6),
    ),
    "local_response_norm": Row(
        lambda x: jaxops.local_response_norm(x, **RESPONSE, layout="NCHW"),
        ((1, 9, 4, 4),),
        lambda dy, x: local_response_norm_oracle.across_channels(x, dy, **RESPONSE)[1:],
    ),
    "divisive_norm": Row(
        lambda x, means: jaxops.divisive_norm(x, means, **RESPONSE, layout="NCHW"),
        ((1, 2, 6, 7), (1, 2, 6, 7)),
        lambda dy, x, means: local_response_norm_oracle.within_channels(x, means, dy, **RESPONSE)[1:],
    ),
    "grid_sample": Row(
        jaxops.grid_sample,
        ((1, 3, 4, 5), (1, 12, 12, 2)),
        lambda dy, x, grid: grid_sample_oracle.grid_sample(x, grid, dy)[1:],
    ),
    "grid_sample, volumes": Row(
        functools.partial(jaxops.grid_sample, **REFLECTED),
        ((1, 3, 2, 4, 5), (1, 3, 6, 8, 3)),
        lambda dy, x, grid: grid_sample_oracle.grid_sample(x, grid, dy, **REFLECTED)[1:],
    ),
    "affine_grid": Row(
        lambda theta: jaxops.affine_grid(theta, (2, 1, 30, 40)),
        ((2, 2, 3),),
        lambda dy, theta: (grid_sample_oracle.affine_grid_gradient(dy),),
        (2.0**-14, 2.0**4),
    ),
    "dropout": Row(
        lambda x: jaxops.dropout(KEY, x, 0.9),
        ((50, 40),),
        lambda dy, x: (10 * dy * (np.asarray(jaxops.dropout(KEY, jnp.ones(x.shape), 0.9)) != 0),),
    ),
}


OTHERS = contract.representatives(covered={*(name.partition(",")[0] for name in ROWS), "linear_cross_entropy"})


def drawn_cotangent(y, size, rng):
    """Draws a cotangent of mostly one sign, so that what is lost in rounding down does not cancel."""
    return jnp.asarray(size * (1 + 0.3 * rng.normal(size=y.shape)), y.dtype)


def assert_rounded_once(grad, true):
    assert grad.dtype == jnp.float16
    # The results that are kept for the gradient, as a softmax is, are rounded as well.
    np.testing.assert_allclose(np.asarray(grad, np.float64), true, rtol=0, atol=1e-3 * np.abs(true).max() + LEAST)


@pytest.mark.sampled
@pytest.mark.parametrize(("name", "size"), [(name, size) for name, row in ROWS.items() for size in row.sizes])
def test_float16_gradients_are_rounded_once(name, size):
    row, rng = ROWS[name], np.random.default_rng(0)
    operands = [jnp.asarray(rng.normal(size=shape), "float16") for shape in row.shapes]
    y, pull = jax.vjp(jax.jit(row.fn), *operands)
    dy = drawn_cotangent(y, size, rng)
    wide = [np.asarray(x, np.float64) for x in (dy, *operands)]
    for grad, true in zip(pull(dy), row.truth(*wide), strict=True):
        assert 10 * LEAST < np.abs(true).max() < 65504
        assert_rounded_once(grad, true)


@pytest.mark.sampled
@pytest.mark.parametrize("size", Row.sizes)
@pytest.mark.parametrize("case", OTHERS.values(), ids=OTHERS)
def test_float16_gradients_of_other_operators_are_rounded_once(case, size, rng):
    def gradients(operands, dtype, dy=None):
        fn, primals = case.trial.at_differentiable([x.astype(dtype) if x.dtype.kind == "f" else x for x in operands])
        y, pull = jax.vjp(jax.jit(fn), *primals)
        dy = [drawn_cotangent(x, size, rng) for x in y] if dy is None else [x.astype(dtype) for x in dy]
        return pull(dy), dy

    narrow = [jnp.asarray(x, "float16") if x.dtype.kind == "f" else x for x in case.trial.operands]
    found, dy = gradients(narrow, "float16")
    with jax.enable_x64(True):
        expected, _ = gradients([np.asarray(x) for x in narrow], "float64", [np.asarray(x) for x in dy])
    for grad, true in zip(found, expected, strict=True):
        assert_rounded_once(grad, true)
